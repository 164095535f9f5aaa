"""Accuracy of each of a method's predictions, and of its headline by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.engine.cores import side_by_side
from fedhassle.errors import require
from fedhassle.losses import one_hot
from fedhassle.method import Method
from fedhassle.nets import images_a_pass
from fedhassle.vectors import Arrays


class Accuracy(NamedTuple):
    """Accuracies that a method reports."""

    overall: dict[str, float]  # by prediction
    by_class: list[float | None]  # of the headline, on the images of each class; None if there are none


def accuracy(
    method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1
) -> Accuracy:
    """Accuracies that a method reports on images (N, H, W, C)."""
    found = hits(method, state, images, y, views, workers)
    sizes = one_hot(y, len(next(iter(found.values())))).sum(0).long().tolist()  # images of each class

    def on_class(k: int) -> float | None:
        if not sizes[k]:
            return None
        return method.report({name: right[k] / sizes[k] for name, right in found.items()}).get(
            method.headline
        )

    overall = method.report({name: sum(right) / len(y) for name, right in found.items()})
    return Accuracy(overall, [on_class(k) for k in range(len(sizes))])


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
) -> dict[str, list[int]]:
    """Number of images (N, H, W, C) that each prediction classifies correctly, by class.

    Always in float32, even if training uses bfloat16, so that simulator, sites and coordinator agree.
    """
    size = images_a_pass(images)
    batches = list(zip(torch.split(images, size), torch.split(y, size), strict=True))

    @torch.no_grad()
    def right(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pixels, labels = batch
        with torch.autocast(pixels.device.type, enabled=False):  # here, since it applies per thread
            logits = method.predict(state, views.normalise(pixels))
        hit = {name: torch.where(z.argmax(1) == labels, labels, -1) for name, z in logits.items()}
        return {name: one_hot(k, logits[name].shape[1]).sum(0).long() for name, k in hit.items()}  # (M,) each

    found = side_by_side(right, batches, workers)
    return {name: torch.stack([each[name] for each in found]).sum(0).tolist() for name in found[0]}
