"""The figures that the paper prints and what it claims, from one file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Claim:
    """What the paper says of an experiment, in a form that its figures can be held against.

    One of `order`, `best`, `worst`, `rises` and `cells` says what is compared, the others how.
    """

    says: str
    order: tuple[str, ...] = ()  # metrics of a cell, the highest first
    best: str = ""  # the choice that is above all others of its axis that the paper has
    worst: str = ""  # the choice that is below them
    rises: str = ""  # the axis along which the accuracy rises
    cells: tuple[str, ...] = ()  # names of cells, the highest first; with `near`, those that are near to it
    near: float | str = ""  # a value as figures show it, or the name of a cell
    among: tuple[str, ...] = ()  # only where one of these is chosen
    metric: str = ""  # what is compared, where a method has it; else its headline
    apart: tuple[str, ...] = ()  # two metrics: what is compared is how far they lie apart
    early: bool = False  # at the beginning of the runs, and not at their end


@dataclass(frozen=True)
class Printed:
    """What the paper has of an experiment."""

    source: str  # the table or figure
    says: tuple[str, ...]  # in its text
    claims: tuple[Claim, ...]  # those of its text and tables that can be checked
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
            tuple(read_claim(claim) for claim in table.get("claims", ())),
            {cell: by_metric(value) for cell, value in table.get("values", {}).items()},
        )
        for name, table in tomllib.loads(text).items()
    }


def read_claim(table: dict[str, Any]) -> Claim:
    """A claim, its lists as tuples."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return Claim(**plain)


def by_metric(value: float | dict[str, float]) -> dict[str, float]:
    """A number, or one for each prediction, in %."""
    if isinstance(value, dict):
        return {f"accuracy.{name}": percent / 100 for name, percent in value.items()}
    return {HEADLINE: value / 100}
