"""Bounds on what one client can do to a mean: clipped changes, capped weights, trimmed means and medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhassle.vectors import Arrays, mean

Merging = Literal["trimmed", "median"]
"""A statistic in place of the weighted mean of the clients' vectors."""

TRIM = 0.2  # share of the clients that a trimmed mean leaves out at each end
CHUNK = 2**20  # entries that are sorted at once: bounds the memory, whatever the size of a model
PAIR = 0.9  # largest share of the weight of one of two clients: a hospital beside a practice


# Changes of one client


def change_norm(after: Tensor, before: Tensor) -> float:
    """‖after − before‖, in float64: the square of 3e38 is infinite in float32."""
    return float((after.double() - before.double()).norm())


def clipped(after: Tensor, before: Tensor, bound: float) -> Tensor:
    """Returns before + (after − before)·min(1, bound/‖after − before‖)."""
    norm = change_norm(after, before)
    if norm <= bound:
        return after
    return (before.double() + (after.double() - before.double()) * (bound / norm)).to(after.dtype)


def joint_norm(arrays: Arrays) -> float:
    """Returns ‖·‖ of all vectors together, as if they were one."""
    squares = [v.double().square().sum() for v in arrays.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def clipped_jointly(arrays: Arrays, bound: float) -> Arrays:
    """Returns the vectors, all scaled down by one factor if their joint norm exceeds a bound."""
    norm = joint_norm(arrays)
    if norm <= bound:
        return arrays
    share = bound / norm * (1 - 1e-6)  # below the bound in float32, too
    return {name: v * share for name, v in arrays.items()}


def differences(arrays: Arrays, start: Arrays) -> Arrays:
    """Returns each vector less the one that it started from."""
    return {name: v - start[name] for name, v in arrays.items()}


def lower_median(values: Sequence[float]) -> float:
    """Returns the middle one of the values; of two middle ones the smaller."""
    return sorted(values)[(len(values) - 1) // 2]


# Weights


def capped(counts: Sequence[int], share: float) -> list[int]:
    """Lowers the largest counts until none is more than a share of the total; 0 stays 0.

    Of two counts, each may be at least PAIR of both. If there are too few for the share, all become equal.
    """
    positive = sorted((count for count in counts if count), reverse=True)
    share, limit = max(share, PAIR) if len(positive) == 2 else share, 0.0
    for lowered, largest in enumerate(positive):
        limit = share * sum(positive[lowered:]) / (1 - lowered * share)  # if each lowered one has its share
        if largest <= limit:
            break
    else:
        limit = min(positive, default=0)
    return [min(count, max(1, math.floor(limit))) for count in counts]


# Means that a few vectors cannot move far


def merged(
    vectors: Sequence[Tensor], weights: Sequence[float], merging: Merging | None, trim: float = TRIM
) -> Tensor:
    """Returns the weighted mean of vectors, or what takes its place."""
    if merging is None:
        return mean(vectors, weights)
    if merging == "median":
        return in_chunks(vectors, median)
    return in_chunks(vectors, lambda rows: trimmed_mean(rows, torch.tensor(weights).to(rows), trim))


def median(rows: Tensor) -> Tensor:
    """Returns the median of each column of (K, D); of two middle values their mean."""
    ordered = rows.sort(0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def trimmed_mean(rows: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Returns of each column of (K, D) the weighted mean, without its b largest and b smallest entries.

    b is a share of K, rounded down but at least 1; with two vectors or one, 0 (Yin et al., 2018, weighted).
    """
    b = left_out(len(rows), trim)
    ordered, order = rows.sort(0)
    kept, weight = ordered[b : len(rows) - b], weights[order[b : len(rows) - b]]
    return (kept * weight).sum(0) / weight.sum(0)


def left_out(count: int, trim: float) -> int:
    """Returns how many of `count` entries a trimmed mean leaves out at each end."""
    return min(max(1, int(trim * count)), (count - 1) // 2)


def in_chunks(vectors: Sequence[Tensor], merge: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a function of (K, D) to K vectors, some of their entries at a time."""
    parts = zip(*(torch.split(vector, CHUNK) for vector in vectors), strict=True)
    return torch.cat([merge(torch.stack(part)) for part in parts])
