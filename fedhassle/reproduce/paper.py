"""The paper's printed results and its claims, read from paper.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

HEADLINE = ""  # the metric of a method that has one prediction alone

Words = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, not tuples
Number = int | float


class TomlTable(BaseModel):
    """A table of a TOML file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Claim(TomlTable):
    """A claim of the paper about an experiment, in a form that can be checked.

    One of `order`, `best`, `worst`, `rises` and `cells` names what is compared; the other fields say how.
    """

    says: str
    order: Words = ()  # metrics of a cell, the highest first
    best: str = ""  # the choice that is above all others of its axis that are in the paper
    worst: str = ""  # the choice that is below them
    rises: str = ""  # the axis along which the accuracy rises
    cells: Words = ()  # names of cells, the highest first; with `near`, the cells that are near to it
    near: Number | str = ""  # a value in the unit of the tables, or the name of a cell
    among: Words = ()  # only results with one of these choices
    metric: str = ""  # the metric that is compared; the headline of a method that lacks it
    apart: Words = ()  # two metrics whose distance is compared
    early: bool = False  # compare the first evaluations, not the last


def by_metric(values: Any) -> Any:
    """The printed values of each cell by metric, as shares; in the file they are numbers or tables in %."""
    named = {cell: one if isinstance(one, dict) else {HEADLINE: one} for cell, one in values.items()}
    return {
        cell: {name and f"accuracy.{name}": percent / 100 for name, percent in one.items()}
        for cell, one in named.items()
    }


class PaperResults(TomlTable):
    """The paper's results and claims for one experiment."""

    source: str  # the table or figure
    says: Words  # statements of its text
    claims: Annotated[tuple[Claim, ...], Field(strict=False)] = ()  # the statements that can be checked
    values: Annotated[dict[str, dict[str, float]], BeforeValidator(by_metric)] = {}  # by cell, then metric

    def of(self, name: str) -> dict[str, float]:
        """The printed values of a cell, as shares; empty if the paper prints none."""
        return self.values.get(name, {})


@cache
def paper_results() -> dict[str, PaperResults]:
    """The results that the paper prints, by the name of the experiment."""
    text = resources.files("fedhassle").joinpath("reproduce", "paper.toml").read_text("utf-8")
    return TypeAdapter(dict[str, PaperResults]).validate_python(tomllib.loads(text))
