"""The figures that the paper prints, from one file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Printed:
    """What the paper has of an experiment."""

    source: str  # the table or figure
    says: tuple[str, ...]  # in its text
    values: dict[str, dict[str, float]]  # by the name of a cell, then by metric as an experiment names it

    def of(self, name: str) -> dict[str, float]:
        """The figures of a cell, as shares; nothing where the paper prints none."""
        return self.values.get(name, {})


HEADLINE = ""  # the metric of a method that has one prediction alone


@cache
def printed() -> dict[str, Printed]:
    """By the name of the experiment."""
    text = resources.files("fedhassle").joinpath("reproduce", "paper.toml").read_text("utf-8")
    return {
        name: Printed(
            table["source"],
            tuple(table["says"]),
            {cell: by_metric(value) for cell, value in table.get("values", {}).items()},
        )
        for name, table in tomllib.loads(text).items()
    }


def by_metric(value: float | dict[str, float]) -> dict[str, float]:
    """A number, or one for each prediction, in %."""
    if isinstance(value, dict):
        return {f"accuracy.{name}": percent / 100 for name, percent in value.items()}
    return {HEADLINE: value / 100}
