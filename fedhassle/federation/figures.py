"""A site's own figures beside its accuracy: AUROC, recall by class, calibration.

They leave a site only if that is agreed, and only so coarse that they do not tell how many images of a class
it holds: rates in whole per cent, of classes with enough validation images, and counts as powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedhassle.federation.messages import RefusedError, count_of, is_number, short
from fedhassle.predict.scores import auroc, calibration_error, effective_by_class, reliability, wilson

PER_CLASS = ("recall", "auroc")  # rates by class
RATES = ("ece", "confidence")  # rates of all images


def own_figures(
    probabilities: np.ndarray,
    y: np.ndarray,
    class_names: Sequence[str],
    least: int,
    patients: np.ndarray | None = None,
) -> dict[str, Any]:
    """Computes a site's figures from probabilities (N, M) and labels y (N,); {} if it has too few images.

    `images` are those behind a recall, and with the patient of each image (N,) as many independent ones as
    these are worth.
    """
    if len(y) < least:
        return {}
    classes, confidence = probabilities.argmax(1), probabilities.max(1)
    counts = np.bincount(y, minlength=len(class_names))
    enough = [k for k in range(len(class_names)) if counts[k] >= least]
    apart = [k for k in enough if len(y) - counts[k] >= least]
    found = calibration_error(reliability(confidence, classes == y))
    worth = effective_by_class(classes == y, y, patients, len(class_names)) or counts
    return {
        "recall": {class_names[k]: percent((classes == y)[y == k].mean()) for k in enough},
        "images": {class_names[k]: 2 ** int(math.log2(worth[k])) for k in enough},
        "auroc": {class_names[k]: percent(auroc(probabilities[:, k], y == k)) for k in apart},
        "ece": percent(found),
        "confidence": percent(confidence.mean()),
    }


def percent(rate: float) -> float:
    """Rounds a rate to whole per cent."""
    return round(float(rate), 2)


def read_figures(words: Any, class_names: Sequence[str], validation: int) -> dict[str, Any]:
    """Reads a site's figures; refuses others than agreed, and rates outside 0 … 1. {}: it has none."""
    if words in (None, {}):
        return {}
    if not isinstance(words, dict) or words.keys() != {*PER_CLASS, *RATES, "images"}:
        raise RefusedError(f"its figures are {short(words)}")
    tables = [words[key] for key in (*PER_CLASS, "images")]
    known = all(isinstance(table, dict) and table.keys() <= set(class_names) for table in tables)
    if not known or words["recall"].keys() != words["images"].keys():
        raise RefusedError(f"its figures by class are {short(tables)}")
    rates = [words[key] for key in RATES] + [rate for key in PER_CLASS for rate in words[key].values()]
    if not all(is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise RefusedError(f"its figures are {short(rates)}")
    counts = [count_of(count, "validation") for count in words["images"].values()]
    if any(not 0 < count <= 2 * validation for count in counts):
        raise RefusedError(f"its figures are of {short(counts)} images, but it has {validation:,}")
    return words


def figures_of_site(figures: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Any]:
    """A site's figures in a line of metrics: with the mean AUROC, and a 95 % interval of each recall.

    An interval is that of the count as the site rounded it down, so it is rather too wide.
    """
    if not figures:
        return {}
    recall, images = figures["recall"], figures["images"]
    by_class = {name: recall[name] for name in class_names if name in recall}
    intervals = {name: wilson(round(share * images[name]), images[name]) for name, share in by_class.items()}
    areas = {name: figures["auroc"][name] for name in class_names if name in figures["auroc"]}
    return {
        "auroc": sum(areas.values()) / len(areas) if areas else None,
        "class_auroc": areas,
        "recall": by_class,
        "recall_95": {name: list(interval) for name, interval in intervals.items()},
        **{key: figures[key] for key in RATES},
    }
