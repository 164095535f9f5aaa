"""Accuracy and loss of each of a method's predictions, and the accuracy of its headline by class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.engine.cores import side_by_side
from fedhassle.errors import require
from fedhassle.losses import cross_entropy_each, one_hot
from fedhassle.method import Method
from fedhassle.nets import images_a_pass
from fedhassle.vectors import Arrays


class Scores(NamedTuple):
    """The figures that a method reports."""

    accuracy: dict[str, float]  # by prediction
    loss: dict[str, float | None]  # mean cross-entropy by prediction; None if it is not finite
    by_class: list[float | None]  # accuracy of the headline on each class; None without images of it


class Counts(NamedTuple):
    """The counts of each prediction, and its logits (N, M) if they are kept."""

    right: dict[str, list[int]]  # images classified correctly, by class
    loss: dict[str, float]  # sum of the cross-entropies
    logits: dict[str, Tensor]


def score(method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views, workers: int = 1) -> Scores:
    """The figures that a method reports on images (N, H, W, C)."""
    return scores_of(method, counts_of(method, state, images, y, views, workers), y)


def scores_of(method: Method, found: Counts, y: Tensor) -> Scores:
    """The figures that a method reports, from what was counted on images with labels y (N,)."""
    shares = shares_right(found, y)
    classes = range(len(next(iter(shares.values()))))

    def on_class(k: int) -> float | None:
        known = {name: share for name, each in shares.items() if (share := each[k]) is not None}
        return method.report(known).get(method.headline) if known else None

    loss = method.report({name: total / len(y) for name, total in found.loss.items()})
    return Scores(
        method.report({name: sum(right) / len(y) for name, right in found.right.items()}),
        {name: value if math.isfinite(value) else None for name, value in loss.items()},
        [on_class(k) for k in classes],
    )


def shares_right(found: Counts, y: Tensor) -> dict[str, list[float | None]]:
    """The accuracy of each prediction on each class, of images with labels y (N,); None without images."""
    sizes = one_hot(y, len(next(iter(found.right.values())))).sum(0).long().tolist()
    return {
        name: [n / size if size else None for n, size in zip(right, sizes, strict=True)]
        for name, right in found.right.items()
    }


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


def counts_of(
    method: Method,
    state: Arrays,
    images: Tensor,
    y: Tensor,
    views: Views,
    workers: int = 1,
    keep: bool = False,
) -> Counts:
    """Counts what each prediction gets right on images (N, H, W, C), and adds up its losses.

    Always in float32, even if training uses bfloat16, so that simulator, sites and coordinator agree. The
    figures of all predictions leave the device together: an evaluation waits for it once.
    """
    size = images_a_pass(images)
    batches = list(zip(torch.split(images, size), torch.split(y, size), strict=True))

    @torch.no_grad()
    def counted(batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        pixels, labels = batch
        with torch.autocast(pixels.device.type, enabled=False):  # here, since it applies per thread
            logits = method.predict(state, views.normalise(pixels))
        return {name: figures(z, labels) for name, z in logits.items()}, logits if keep else {}

    found = side_by_side(counted, batches, workers)
    names = list(found[0][0])
    rows = torch.stack([torch.stack([part[name] for part, _ in found]).sum(0) for name in names]).tolist()
    return Counts(
        {name: [int(n) for n in right] for name, (*right, _) in zip(names, rows, strict=True)},
        {name: loss for name, (*_, loss) in zip(names, rows, strict=True)},
        {name: torch.cat([logits[name] for _, logits in found]) for name in names} if keep else {},
    )


def figures(z: Tensor, y: Tensor) -> Tensor:
    """Images of each class that logits (B, M) get right, then the sum of their losses: (M + 1,)."""
    right = one_hot(torch.where(z.argmax(1) == y, y, -1), z.shape[1]).sum(0)
    return torch.cat([right, cross_entropy_each(z, y).sum()[None]]).double()
