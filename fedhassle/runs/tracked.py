"""The view that trackers have of a run: its name, its tags, and the figures of its rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedhassle.runs.folder import Folder
from fedhassle.runs.record import BY_CLIENT, Metrics

NOT_TRACKED = ("round", "sites", BY_CLIENT)  # the step itself, and figures of single sites and clients


class Label(NamedTuple):
    """The name of a run at a tracker, and the tags that find it among others."""

    name: str
    group: str | None  # the folder of several runs
    tags: dict[str, str]  # of several runs: the group, and the settings in which they differ


def label_of(folder: Folder) -> Label:
    """The name and tags of a run: one of several is named by the settings in which they differ."""
    path = folder.path.absolute()
    try:
        words = folder.varied.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return Label(path.name, None, {})
    pairs = [word.partition("=") for word in words]
    group = path.parent.name
    return Label(" ".join(words) or path.name, group, {"group": group, **{k: v for k, _, v in pairs}})


def figures(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested tables, with names such as `accuracy/EM`; unknown ones are left out."""
    for key, value in metrics.items():
        name = prefix + re.sub(r"[^\w. -]", "_", key)  # characters that every tool accepts
        if isinstance(value, Mapping):
            yield from figures(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)


def figures_of_round(metrics: Metrics) -> dict[str, float]:
    """The tracked figures of an evaluated round."""
    return dict(figures({key: value for key, value in metrics.items() if key not in NOT_TRACKED}))


def final_figures(summary: Metrics) -> dict[str, float]:
    """The tracked figures of a finished run."""
    return dict(figures({"final": summary["accuracy"]}))
