"""Accuracy by round, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedhassle.files import atomic

# Colour-blind safe (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw_curves(summaries: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One run: all its predictions; several: the headline of each."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    alone = len(summaries) == 1
    for label, summary in summaries.items():
        names = summary["accuracy"] if alone else [summary["headline"]]
        for name in names:
            rounds = [m["round"] for m in summary["history"]]
            curve = [100 * m["accuracy"][name] for m in summary["history"]]
            shown = name if alone else label if name == "model" else f"{label} {name}"
            faint = alone and name not in ("model", "SM", "UM", "EM")
            axes.plot(
                rounds,
                curve,
                color=COLOURS[len(axes.lines) % len(COLOURS)],
                label=shown,
                linewidth=1 if faint else 1.8,
                linestyle=":" if faint else "-",
                marker="." if len(rounds) < 3 else "",
            )
    first = next(iter(summaries.values()))
    axes.set(xlabel="round", ylabel="accuracy (%)")
    axes.set_title(f"{first['method']} on {first['data']}" if alone else "accuracy by round", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", ncols=1 + (len(axes.lines) > 5))
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150)
