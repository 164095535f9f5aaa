"""Metrics of predictions, from classes and probabilities: plain NumPy, no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Z95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval
BINS = 15  # of confidence, of equal width, for the calibration


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


class Reliability(NamedTuple):
    """Confidence against accuracy in B bins of equal width; NaN in bins without images."""

    images: np.ndarray  # (B,), number in the bin
    confidence: np.ndarray  # (B,), mean probability of the predicted class
    accuracy: np.ndarray  # (B,)


class Scores(NamedTuple):
    """All metrics of one prediction on N labelled images; NaN if undefined."""

    accuracy: float
    accuracy_interval: Interval
    balanced: float  # mean recall of the classes that occur
    balanced_interval: Interval
    auroc: float  # mean over classes, each against the rest; with two classes the usual one
    recall: np.ndarray  # (M,)
    recall_intervals: tuple[Interval | None, ...]  # (M,), None for a class that does not occur
    precision: np.ndarray  # (M,)
    confusion: np.ndarray  # (M, M) counts: true class down, predicted class across
    calibration_error: float
    reliability: Reliability


def score(
    classes: np.ndarray, probabilities: np.ndarray, y: np.ndarray, patients: np.ndarray | None = None
) -> Scores:
    """Computes all metrics from predicted classes (N,), probabilities (N, M) and labels y (N,), N ≥ 1.

    With the patient of each image (N,), intervals allow for images of one patient being alike.
    """
    matrix = confusion(classes, y, probabilities.shape[1])
    right, total = int(matrix.trace()), int(matrix.sum())
    confidence = np.take_along_axis(probabilities, classes[:, None], axis=1)[:, 0]
    bins = reliability(confidence, classes == y)
    effective = None if patients is None else effective_images(classes == y, patients)
    limits = recall_intervals(matrix, effective_by_class(classes == y, y, patients, len(matrix)))
    return Scores(
        accuracy=right / total,
        accuracy_interval=wilson(right, total, effective),
        balanced=float(np.nanmean(recall(matrix))),
        balanced_interval=balanced_interval(matrix, limits),
        auroc=macro_auroc(probabilities, y),
        recall=recall(matrix),
        recall_intervals=limits,
        precision=recall(matrix.T),  # the share of correct ones among those predicted as a class
        confusion=matrix,
        calibration_error=calibration_error(bins),
        reliability=bins,
    )


def wilson(right: int, total: int, effective: float | None = None) -> Interval:
    """Returns Wilson's score interval of a share: inside [0, 1], and honest at 0 and 1 and for few images.

    `effective`: the number of independent images that tell as much, if they are not all independent.
    """
    n = total if effective is None else effective
    share, spare = right / total, Z95**2 / n
    centre = share + spare / 2
    half = Z95 * math.sqrt(share * (1 - share) / n + spare / (4 * n))
    low, high = (centre - half) / (1 + spare), (centre + half) / (1 + spare)
    return Interval(low if right else 0.0, high if right < total else 1.0)  # exact, but for rounding


def effective_images(right: np.ndarray, patients: np.ndarray) -> float:
    """Returns how many independent images tell as much about the accuracy as these of several patients.

    With r_g right of n_g images of patient g, p = Σr_g/N has the variance G/(G − 1) · Σ(r_g − p·n_g)²/N²
    (linearised ratio of sums over G clusters, Cochran 1977); independent images would have p(1 − p)/n. Where
    all images are right or wrong, patients count by Kish's N²/Σn_g².
    """
    if not len(right):
        return 0.0
    _, group = np.unique(patients, return_inverse=True)
    sizes, hits = np.bincount(group), np.bincount(group, right.astype(np.float64))
    total, share, groups = len(right), float(right.mean()), len(sizes)
    if groups == 1:
        return 1.0
    if share in (0.0, 1.0):
        return float(total**2 / np.square(sizes).sum())
    variance = groups / (groups - 1) * float(np.square(hits - share * sizes).sum()) / total**2
    found = share * (1 - share) / variance if variance else math.inf
    return min(float(total), max(1.0, found))


def effective_by_class(
    right: np.ndarray, y: np.ndarray, patients: np.ndarray | None, m: int
) -> list[float] | None:
    """Returns the effective images of each of M classes; None if patients are not known."""
    if patients is None:
        return None
    return [effective_images(right[y == k], patients[y == k]) for k in range(m)]


def confusion(classes: np.ndarray, y: np.ndarray, m: int) -> np.ndarray:
    """Returns counts (M, M): true class down, predicted class across."""
    return np.bincount(y * m + classes, minlength=m * m).reshape(m, m)


def recall(matrix: np.ndarray) -> np.ndarray:
    """Returns the share of each class (M,) that is found; NaN for a class that does not occur."""
    counts = matrix.sum(1)
    return ratio(matrix.diagonal(), counts)


def ratio(parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
    """Returns parts / wholes; NaN if the whole is 0."""
    shares = np.full(len(wholes), math.nan)
    np.divide(parts, wholes, out=shares, where=wholes > 0)
    return shares


def recall_intervals(
    matrix: np.ndarray, effective: Sequence[float] | None = None
) -> tuple[Interval | None, ...]:
    """Returns Wilson's interval of each recall (M,), None for a class that does not occur.

    `effective`: of each class, the number of independent images that tell as much.
    """
    return tuple(
        wilson(int(row[k]), int(row.sum()), None if effective is None else effective[k])
        if row.sum()
        else None
        for k, row in enumerate(matrix)
    )


def balanced_interval(matrix: np.ndarray, limits: Sequence[Interval | None]) -> Interval:
    """Returns the interval of the mean recall, from those of each class by square and add.

    With recalls p_k in [l_k, u_k], the K classes that occur being independent samples, the mean p lies
    in p − √Σ(p_k − l_k)²/K … p + √Σ(u_k − p_k)²/K (MOVER: Zou and Donner 2008, after Newcombe 1998).
    Unlike the bootstrap it has a width where every image of a class is right.
    """
    shares = recall(matrix).tolist()
    known = [(p, limit) for p, limit in zip(shares, limits, strict=True) if limit is not None]
    mean = math.fsum(p for p, _ in known) / len(known)
    below = math.hypot(*(p - limit.low for p, limit in known)) / len(known)
    above = math.hypot(*(limit.high - p for p, limit in known)) / len(known)
    return Interval(max(0.0, mean - below), min(1.0, mean + above))


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Returns the chance that a positive (N,) scores higher than a negative, ties counting half; by ranks."""
    n = int(positive.sum())
    rest = len(positive) - n
    if not n or not rest:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # from 1; equal scores share their mean rank
    return float((ranks[place][positive].sum() - n * (n + 1) / 2) / (n * rest))


def macro_auroc(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Returns the mean over classes, each against the rest; skips classes of no image or of all images."""
    each = [auroc(probabilities[:, k], y == k) for k in range(probabilities.shape[1])]
    defined = [value for value in each if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> Reliability:
    """Returns mean confidence and accuracy in bins ((b − 1)/B, b/B]."""
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)

    def mean(values: np.ndarray) -> np.ndarray:
        return ratio(np.bincount(place, values, minlength=bins), count)

    return Reliability(count, mean(confidence), mean(right.astype(np.float64)))


def calibration_error(bins: Reliability) -> float:
    """Returns the expected calibration error: the mean gap of confidence and accuracy, weighted by images."""
    gaps = np.abs(bins.confidence - bins.accuracy)
    return float(np.nansum(gaps * bins.images) / bins.images.sum())


def as_json(scores: Scores, class_names: Sequence[str]) -> dict[str, Any]:
    """Returns the metrics for JSON, with None for undefined ones."""
    bins = scores.reliability
    return {
        "accuracy": scores.accuracy,
        "accuracy_95": list(scores.accuracy_interval),
        "balanced_accuracy": scores.balanced,
        "balanced_accuracy_95": list(scores.balanced_interval),
        "auroc": none_if_nan(scores.auroc),
        "ece": none_if_nan(scores.calibration_error),
        "classes": [
            {
                "name": name,
                "images": int(scores.confusion[k].sum()),
                "recall": none_if_nan(scores.recall[k]),
                "recall_95": None if (limit := scores.recall_intervals[k]) is None else list(limit),
                "precision": none_if_nan(scores.precision[k]),
            }
            for k, name in enumerate(class_names)
        ],
        "confusion": scores.confusion.tolist(),
        "reliability": [
            {
                "from": b / len(bins.images),
                "to": (b + 1) / len(bins.images),
                "images": int(bins.images[b]),
                "confidence": none_if_nan(bins.confidence[b]),
                "accuracy": none_if_nan(bins.accuracy[b]),
            }
            for b in range(len(bins.images))
        ],
    }


def none_if_nan(value: float) -> float | None:
    """Returns the value, or None for NaN."""
    return None if math.isnan(value) else float(value)
