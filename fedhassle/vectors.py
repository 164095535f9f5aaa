"""Federated arithmetic: models are flat vectors, so each operation is a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

Arrays = dict[str, Tensor]
"""Named 1-D tensors: the form in which models travel, are kept and are averaged."""


def mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ n_k·w_k / Σ n_k (Eqs. 1, 2 and 10)."""
    total = sum(weights)
    result = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        result.add_(vector, alpha=weight / total)
    return result


def add_to_mean(mean: Tensor, before: float, vector: Tensor, weight: float) -> None:
    """Moves a mean of weight `before` by one more vector, in place: vectors need not be held together."""
    if weight:
        mean.add_(vector - mean, alpha=weight / (before + weight))


def running_mean(before: Tensor, now: Tensor, decay: float, t: int) -> Tensor:
    """a·before + (1 − a)·now, where a = decay; in the first rounds 1 − 1/t, as in a plain mean."""
    return now.lerp(before, min(decay, 1 - 1 / t))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """‖a − b‖²."""
    return (a - b).square().sum()


def distance(a: Tensor, b: Tensor) -> Tensor:
    """‖a − b‖, with a gradient of zero where both are equal."""
    gap: Tensor = (a - b).norm()
    return gap


def size_in_bytes(arrays: Arrays) -> int:
    """The bytes of all entries: what a message costs."""
    return sum(v.numel() * v.element_size() for v in arrays.values())


def all_finite(groups: Sequence[Sequence[Tensor]]) -> list[bool]:
    """Returns for each group whether all entries are finite."""
    found = iter(each_finite([v for group in groups for v in group]))
    return [all(list(islice(found, len(group)))) for group in groups]  # a list: `all` alone would stop early


def each_finite(vectors: Sequence[Tensor]) -> list[bool]:
    """Returns for each vector whether all entries are finite.

    One synchronisation with the device for all, and another one for each vector that may not be finite.
    """
    if not vectors:
        return []
    # If Σ|v| is finite, so are its terms: one pass in one kernel for all vectors, where `isfinite` has five.
    sums = torch._foreach_norm([v if v.is_floating_point() else v.float() for v in vectors], 1)
    quick = torch.stack(sums).isfinite().tolist()
    return [ok or bool(torch.isfinite(v).all()) for ok, v in zip(quick, vectors, strict=True)]
