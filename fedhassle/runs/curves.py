"""A picture of the accuracy by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedhassle.files import atomic, check_picture
from fedhassle.method import Method
from fedhassle.runs.seeds import SeedGroup

# Colour-blind safe (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.")  # when the colours are used up
LABEL = 28  # characters in a line of a label
FORMATS = (".png", ".svg", ".pdf")


def draw_curves(groups: Sequence[SeedGroup], path: Path) -> None:
    """Draws all predictions of one group, or the headline of several; bands are ± one std over seeds."""
    check_picture(path, FORMATS)
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for group in groups:
        for prediction in group.predictions if len(groups) == 1 else [group.headline]:
            draw_curve(axes, group, prediction, alone=len(groups) == 1)
    about = f"{groups[0].label} on {groups[0].runs[0]['data']}" if len(groups) == 1 else "accuracy by round"
    axes.set_title(about + seeds_in_title(groups), loc="left", parse_math=False)  # a $ is a $
    axes.set(xlabel="round", ylabel="accuracy (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend = axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # right of the curves
    for text in legend.get_texts():
        text.set_parse_math(False)
    lines = [len(text.get_text().splitlines()) for text in legend.get_texts()]
    figure.set_figheight(max(4.2, 0.6 + 0.17 * sum(lines) + 0.07 * len(lines)))
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150)


def seeds_in_title(groups: Sequence[SeedGroup]) -> str:
    """The number of seeds, for the end of a title; empty if each group has one."""
    low, high = (find(len(group.runs) for group in groups) for find in (min, max))
    if high == 1:
        return ""
    return f", {high} seeds" if low == high else f", {low} to {high} seeds"


def draw_curve(axes: Axes, group: SeedGroup, prediction: str, alone: bool) -> None:
    """Draws one line, with a band if there are several seeds."""
    curve = group.curve(prediction)
    means = [100 * spread.mean for spread in curve.spreads]
    named = [] if prediction == Method.headline and not alone else [prediction]
    aside = alone and prediction not in (group.headline, *group.modes)  # a model without its residual
    turn, place = divmod(len(axes.lines), len(COLOURS))
    colour = COLOURS[place]
    axes.plot(
        curve.rounds,
        means,
        color=colour,
        label=fill(" ".join(([] if alone else [group.label]) + named), LABEL, break_long_words=False),
        linewidth=1 if aside else 1.8,
        linestyle=":" if aside else STYLES[turn % len(STYLES)],
        marker="." if len(means) < 3 else "",
    )
    if len(group.runs) > 1 and not aside:
        half = [100 * (spread.std or 0) for spread in curve.spreads]
        low, high = ([m + sign * h for m, h in zip(means, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
