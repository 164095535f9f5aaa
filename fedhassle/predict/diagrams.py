"""Drawings of a confusion matrix and a reliability diagram for each prediction of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhassle.files import atomic, check_picture
from fedhassle.names import truncated
from fedhassle.predict.scores import Scores

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#5F5F5F"  # colour-blind safe (Okabe and Ito)
MOST_COUNTS, MOST_NAMES = 15, 30  # most classes with counts, and with names
LONGEST_NAME = 18  # characters
FORMATS = (".png", ".svg", ".pdf")


def draw_scores(scores: Mapping[str, Scores], class_names: Sequence[str], path: Path, title: str) -> None:
    """Draws a row for each prediction: its confusion matrix and its calibration."""
    check_picture(path, FORMATS)
    side = 3.6 + 0.12 * min(len(class_names), MOST_NAMES)
    figure = Figure(figsize=(side + 5.0, side * len(scores) + 0.4), layout="constrained")
    axes = figure.subplots(len(scores), 2, squeeze=False, gridspec_kw={"width_ratios": (side, 4.2)})
    figure.suptitle(title, fontsize=11, parse_math=False)
    for row, (name, values) in zip(axes, scores.items(), strict=True):
        draw_confusion(row[0], values, class_names, name)
        draw_reliability(row[1], values, name)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150)


def draw_confusion(axes: Axes, scores: Scores, class_names: Sequence[str], name: str) -> None:
    """Draws the counts, shaded by the share of the true class."""
    counts = scores.confusion
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, gid="confusion")
    if len(counts) <= MOST_COUNTS:
        for (true, predicted), count in np.ndenumerate(counts):
            ink = "white" if shares[true, predicted] > 0.5 else "black"
            axes.text(predicted, true, f"{count:,}", ha="center", va="center", fontsize=7, color=ink)
    if len(counts) <= MOST_NAMES:
        shown = [truncated(each, LONGEST_NAME) for each in class_names]
        axes.set_xticks(range(len(counts)), shown, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(counts)), shown, fontsize=7, parse_math=False)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(f"{name}: accuracy {scores.accuracy:.1%}", loc="left", fontsize=9.5, parse_math=False)


def draw_reliability(axes: Axes, scores: Scores, name: str) -> None:
    """Draws accuracy by confidence; a calibrated prediction lies on the diagonal."""
    bins = scores.reliability
    width = 1 / len(bins.images)
    left, there = np.arange(len(bins.images)) * width, bins.images > 0
    share = bins.images / bins.images.sum()
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    axes.bar(left, share, width, align="edge", color=GREY, alpha=0.25, linewidth=0, label="share of images")
    axes.plot(bins.confidence[there], bins.accuracy[there], "o-", color=BLUE, markersize=4, label="accuracy")
    axes.vlines(
        bins.confidence[there], bins.accuracy[there], bins.confidence[there], color=ORANGE, linewidth=1
    )
    axes.set(xlabel="probability of the predicted class", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    error = scores.calibration_error
    axes.set_title(f"{name}: calibration error {error:.3f}", loc="left", fontsize=9.5, parse_math=False)
