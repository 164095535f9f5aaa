"""Accuracy of each of a method's predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.engine.cores import side_by_side
from fedhassle.errors import require
from fedhassle.method import Method
from fedhassle.nets import images_a_pass
from fedhassle.vectors import Arrays


def accuracy(
    method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1
) -> dict[str, float]:
    """Accuracies that a method reports on images (N, H, W, C)."""
    found = hits(method, state, images, y, views, workers)
    return method.report({name: hit / len(y) for name, hit in found.items()})


@torch.no_grad()
def check_predictions(method: Method, state: Arrays, images: Tensor, classes: int) -> None:
    """Raises a `UserError` if a method's predictions cannot be evaluated; called before training."""
    with torch.autocast(images.device.type, enabled=False):
        found: Any = method.predict(state, images)
    wanted = (len(images), classes)
    name, expected = type(method).__name__, f"a dict of logits, {wanted} for {len(images)} images"
    require(isinstance(found, Mapping), f"{name}.predict returns {type(found).__name__}; expected {expected}")
    for key, logits in found.items():
        size = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        require(size == wanted, f"{name}.predict returns {size} for {key!r}; expected {expected}")
    check_headline(method, method.report(dict.fromkeys(found, 1.0)))


def check_headline(method: Method, accuracy: Mapping[str, float]) -> None:
    """Raises a `UserError` if a method's headline is not among the accuracies that it reports."""
    require(
        method.headline in accuracy,
        f"{type(method).__name__} reports {', '.join(accuracy)}, but not its headline {method.headline!r}: "
        "set headline to one of them",
    )


def hits(
    method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1
) -> dict[str, int]:
    """Number of images (N, H, W, C) that each prediction classifies correctly.

    Always in float32, even if training uses bfloat16, so that simulator, sites and coordinator agree.
    """
    size = images_a_pass(images)
    batches = list(zip(torch.split(images, size), torch.split(y, size), strict=True))

    @torch.no_grad()
    def right(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pixels, labels = batch
        with torch.autocast(pixels.device.type, enabled=False):  # here, since it applies per thread
            logits = method.predict(state, views.normalise(pixels))
        return {name: (z.argmax(1) == labels).sum() for name, z in logits.items()}

    found = side_by_side(right, batches, workers)
    return {name: sum(int(hit[name]) for hit in found) for name in found[0]}
