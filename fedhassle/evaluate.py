"""Accuracy of each of a method's predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.method import Method
from fedhassle.nets import images_a_pass
from fedhassle.parallel import side_by_side
from fedhassle.vectors import Arrays


def accuracy(
    method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1
) -> dict[str, float]:
    """The share of images (N, H, W, C) that each prediction gets right."""
    found = hits(method, state, images, y, views, workers)
    return method.report({name: hit / len(y) for name, hit in found.items()})


def hits(
    method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1
) -> dict[str, int]:
    """How many images (N, H, W, C) each prediction gets right.

    Never in the bfloat16 that training may be in: simulator, sites and coordinator measure alike.
    """
    size = images_a_pass(images)
    batches = list(zip(torch.split(images, size), torch.split(y, size), strict=True))

    @torch.no_grad()
    def right(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pixels, labels = batch
        with torch.autocast(pixels.device.type, enabled=False):  # here: it is a matter of each thread
            logits = method.predict(state, views.normalise(pixels))
        return {name: (z.argmax(1) == labels).sum() for name, z in logits.items()}

    found = side_by_side(right, batches, workers)
    return {name: sum(int(hit[name]) for hit in found) for name in found[0]}
