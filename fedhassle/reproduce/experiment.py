"""An experiment: a TOML file with the runs of a table or figure. Adding one needs no code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fedhassle.data.split.layout import KINDS
from fedhassle.engine.metrics import OVER_CLIENTS
from fedhassle.errors import UserError, require
from fedhassle.names import brief, nearest, some_lines
from fedhassle.reproduce.paper import HEADLINE, TomlTable, Words
from fedhassle.runs.run import Identity, identify
from fedhassle.settings.hashing import is_machine_setting
from fedhassle.settings.request import Changes, Request, flat, key_value, layer, read_toml, request, shipped

SHIPPED = "reproduce/experiments"
MEASURED = (  # tables of a run's metrics
    *("accuracy", "loss", "test_loss", "client_accuracy", "metrics", "bytes_up", "bytes_down"),
)
KNOWN: dict[str, tuple[str, ...]] = {  # the names in these tables
    "client_accuracy": OVER_CLIENTS,
    "bytes_up": KINDS,
    "bytes_down": KINDS,
}
WHOLE = ("seconds", "bytes_up", "bytes_down")  # metrics of a whole run, and of all kinds of clients


def labelled(table: Any, name: str) -> Any:
    """The table of a file with a label, by default the value of its key `name`."""
    named = isinstance(table, dict) and isinstance(table.get(name), str)
    return {"label": table[name], **table} if named else table


def require_unique(what: str, names: Sequence[str]) -> None:
    """Refuses an empty list, and a name that occurs twice."""
    if not names:
        raise ValueError(f"there are no {what}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two {what} are called {twice!r}")


def as_metric(word: str) -> str:
    """A metric by its dotted name in a run's metrics, or of the whole run; `accuracy` is the headline."""
    table, dot, name = word.partition(".")
    if word == "accuracy":
        return HEADLINE
    if not (word in WHOLE or (dot and table in MEASURED)):
        raise ValueError(
            f"not a metric: write accuracy, {', '.join(WHOLE)}, or one of {', '.join(MEASURED)}, "
            "a dot and a name"
        )
    names = KNOWN.get(table, (name,))
    if dot and name not in names:
        raise ValueError(f"{table} has no {name!r}{nearest(name, names)} (there are {', '.join(names)})")
    return word


class Choice(TomlTable):
    """One value of an axis, and the settings that it stands for."""

    id: str  # its name in keys and in --only
    label: str = ""  # its name in tables (default: the id)
    changes: dict[str, Any] = Field(default={}, alias="set")
    paper: bool = True  # the paper has it
    reference: bool = False  # a bound to read the others by, not a method to compare
    averaged: bool | None = None  # its accuracy is by running means over rounds; false: not even beside true
    only: Words = ()  # choices of other axes that it is combined with, by id (default: all)
    built_in: bool = False  # it has the settings of those in `only` by itself: theirs are left out

    @model_validator(mode="before")
    @classmethod
    def _label(cls, table: Any) -> Any:
        return labelled(table, "id")


class Axis(TomlTable):
    """A dimension along which the runs of an experiment vary."""

    name: str
    label: str = ""  # default: the name
    choices: Annotated[tuple[Choice, ...], Field(strict=False)]

    @model_validator(mode="before")
    @classmethod
    def _label(cls, table: Any) -> Any:
        return labelled(table, "name")

    @model_validator(mode="after")
    def _unique(self) -> Axis:
        require_unique("choices", [choice.id for choice in self.choices])
        return self


class Experiment(TomlTable):
    """A table or figure of the paper: a run for every combination of choices and every seed."""

    name: str = Field(alias="NAME")  # of its file; no key of a file
    title: str
    source: str = ""  # the table, figure or section of the paper
    about: str = ""
    show: Literal["table", "ranking", "bars", "lines", "curves", "bytes"] = "table"
    rows: Words = ()  # names of axes
    columns: Words = ()
    metrics: Annotated[tuple[Annotated[str, AfterValidator(as_metric)], ...], Field(strict=False)] = ()
    seeds: int = Field(default=3, ge=1)
    settings: dict[str, Any] = Field(default={})  # of all its runs, over the preset `paper`
    axes: Annotated[tuple[Axis, ...], Field(strict=False)] = Field(alias="axis")

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        names = [axis.name for axis in self.axes]
        require_unique("axes", names)
        for name in (*self.rows, *self.columns):
            if name not in names:
                raise ValueError(f"rows and columns: {name!r} is not an axis{nearest(name, names)}")
        if self.show in ("bars", "lines") and not self.columns:
            raise ValueError(f"columns: show = {self.show!r} needs an axis to draw over")
        if self.show == "ranking" and self.columns:
            raise ValueError("columns: show = 'ranking' has a column for each metric, and no others")
        every = [choice for axis in self.axes for choice in axis.choices]
        ids = [choice.id for choice in every]
        for word in itertools.chain(*(choice.only for choice in every)):
            if word not in ids:
                raise ValueError(f"only: {word!r} is not a choice{nearest(word, ids)}")
        changes = [choice.changes for choice in every]
        if any("seed" in table for table in (self.settings, *changes)):
            raise ValueError("seed: write seeds = N, the number of seeds, instead of a seed")
        return self


@dataclass(frozen=True)
class Cell:
    """A run of an experiment. Cells of two experiments with the same identity are the same run."""

    experiment: str
    choices: tuple[Choice, ...]  # one for each axis
    seed: int
    requested: Request

    @property
    def name(self) -> str:
        """Its choices without the seed, such as cifar10-10%-hassle."""
        return "-".join(choice.id for choice in self.choices)

    @property
    def key(self) -> str:
        """Its choices and its seed, such as cifar10-10%-hassle-0."""
        return f"{self.name}-{self.seed}"

    def __str__(self) -> str:
        return f"{self.experiment} {self.key}"

    @property
    def method(self) -> str:
        """The name of its method."""
        return self.requested.method

    @property
    def measures(self) -> tuple[str, ...]:
        """The settings on which the names of its metrics depend."""
        asked = self.requested
        return self.method, str(asked.top("metrics", "")), asked.get("method", "average", "")

    @property
    def averaged(self) -> bool:
        """True if its accuracy is that of the main prediction by running means over rounds."""
        said = {choice.averaged for choice in self.choices}
        return True in said and False not in said

    @cached_property
    def identity(self) -> Identity:
        """The identity of its run; raises if its settings are invalid."""
        try:
            return identify(self.requested)
        except UserError as error:
            raise UserError(f"{self}: {error}") from error


@dataclass(frozen=True)
class Selection:
    """The part of experiments that is asked for, and the settings that are changed in it."""

    only: tuple[str, ...] = ()  # choices, joined in the order of the axes: cifar10-10%, 5%-hassle-0
    methods: tuple[str, ...] = ()
    seeds: int | None = None  # number of seeds (default: the experiment's)
    changes: tuple[str, ...] = ()  # settings over those of the experiment, KEY=VALUE

    @property
    def run_changes(self) -> tuple[str, ...]:
        """The changes that make different runs, without settings of the machine such as `threads`."""
        return tuple(change for change in self.changes if not is_machine_setting(key_value(change)[0]))


def experiments() -> list[str]:
    """The names of the shipped experiments."""
    return list(shipped(SHIPPED))


def read_experiment(name: str) -> Experiment:
    """A shipped experiment by its name, or a user's own by the path of its file."""
    table = read_toml(name, SHIPPED, "experiment")
    try:
        return Experiment.model_validate({**table, "NAME": Path(name).stem})
    except ValidationError as error:
        raise UserError(some_lines(error.errors(), lambda one: f"{name}: {explained(one)}")) from error


def explained(error: Any) -> str:
    """One error of an experiment's file in a line, such as `axis.0.choices.1.id: field required`."""
    key, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        tables: dict[int, type[TomlTable]] = {1: Experiment, 3: Axis, 5: Choice}
        table = tables[len(error["loc"])]
        known = [field.alias or name for name, field in table.model_fields.items() if field.alias != "NAME"]
        hint = nearest(str(error["loc"][-1]), known)
        return f"unknown key {brief(key)}{hint} (known are {', '.join(known)})"
    given = f", got {brief(error['input'])}" if isinstance(error["input"], str | int | float) else ""
    return (f"{key}: {message[0].lower()}{message[1:]}" if key else message) + given


def cells(experiment: Experiment, selection: Selection | None = None) -> list[Cell]:
    """The selected runs of an experiment, the first seed of all cells first."""
    wanted = selection or Selection()
    seeds = experiment.seeds if wanted.seeds is None else wanted.seeds
    require(seeds >= 1, f"the number of seeds must be at least 1, got {seeds}")
    require_not_on_axes(experiment, wanted.changes)
    every = itertools.product(*(axis.choices for axis in experiment.axes))
    chosen = [choices for choices in every if occur_together(choices)]
    made = (
        make_cell(experiment, choices, seed, wanted.changes)
        for seed, choices in itertools.product(range(seeds), chosen)
    )
    return [cell for cell in made if is_selected(cell, wanted)]


def occur_together(choices: Sequence[Choice]) -> bool:
    """True if each choice is combined with one of those that it names in `only`, if it names any."""
    ids = {choice.id for choice in choices}
    return all(not choice.only or ids & {*choice.only} for choice in choices)


def require_not_on_axes(experiment: Experiment, changes: Sequence[str]) -> None:
    """Refuses changes of settings that an axis of the experiment sets."""
    changed = dict(flat(layer(changes)))
    require("seed" not in changed, "the seeds are 0, 1, …: set their number with --seeds")
    for axis in experiment.axes:
        taken = {key for choice in axis.choices for key, _ in flat(layer(choice.changes))}
        for key in changed:
            require(
                key not in taken,
                f"{experiment.name}: {key.removesuffix('.name')} is set by its axis {axis.name!r}: choose "
                "cells with --only or --methods, or write your own experiment file (docs/reproduce.md)",
            )


def make_cell(experiment: Experiment, choices: tuple[Choice, ...], seed: int, changes: Sequence[str]) -> Cell:
    """A cell with its settings, which are not checked before it is selected."""
    built_in = {word for choice in choices if choice.built_in for word in choice.only}
    own = [choice.changes for choice in choices if choice.id not in built_in]
    layers: list[Changes] = [experiment.settings, *own, changes]
    return Cell(experiment.name, choices, seed, request("paper", *layers, {"seed": seed}))


def as_shipped(experiment: Experiment, made: Sequence[Cell]) -> bool:
    """True if cells are those of the shipped experiment of that name, with no setting changed."""
    if experiment.name not in experiments() or experiment != read_experiment(experiment.name):
        return False
    hashes = {cell.name: cell.identity.settings_hash for cell in made}
    shipped_cells = cells(experiment, Selection(seeds=1))
    return all(
        cell.identity.settings_hash == hashes[cell.name] for cell in shipped_cells if cell.name in hashes
    )


def is_selected(cell: Cell, selection: Selection) -> bool:
    """True if a cell is part of a selection."""
    ids = [choice.id for choice in cell.choices]
    if selection.methods and not {*ids, cell.method} & {*selection.methods}:
        return False
    return not selection.only or any(word in joined([*ids, str(cell.seed)]) for word in selection.only)


def fitting(selection: Selection, chosen: Sequence[Cell]) -> Selection:
    """A selection without the words that match none of these cells, meant for other experiments."""

    def fits(part: Selection) -> bool:
        return any(is_selected(cell, part) for cell in chosen)

    return replace(
        selection,
        only=tuple(word for word in selection.only if fits(Selection(only=(word,)))),
        methods=tuple(word for word in selection.methods if fits(Selection(methods=(word,)))),
    )


def joined(ids: Sequence[str]) -> set[str]:
    """Every ordered subset of a key's words: a, b, a-b."""
    parts = (itertools.combinations(ids, n) for n in range(1, len(ids) + 1))
    return {"-".join(part) for part in itertools.chain(*parts)}


def select(chosen: Sequence[Experiment], selection: Selection) -> dict[str, list[Cell]]:
    """The selected cells by experiment, with valid settings; a word that matches no cell is an error."""
    names = [experiment.name for experiment in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"two experiments are called {twice!r}: give one of the files another name")
    whole = replace(selection, only=(), methods=())
    every = [cell for experiment in chosen for cell in cells(experiment, whole)]
    methods = dict.fromkeys(cell.method for cell in every)
    axes = itertools.chain(*(experiment.axes for experiment in chosen))
    ids = dict.fromkeys(choice.id for axis in axes for choice in axis.choices)
    for word in selection.only:
        if not any(is_selected(cell, Selection(only=(word,))) for cell in every):
            raise no_match(f"--only {word!r}", nearest(word, parts(every)), ids)
    for word in selection.methods:
        if not any(is_selected(cell, Selection(methods=(word,))) for cell in every):
            raise no_match(f"--methods {word!r}", nearest(word, methods), methods)
    found = {experiment.name: cells(experiment, selection) for experiment in chosen}
    require(any(found.values()), "no cell matches both --only and --methods")
    for cell in itertools.chain(*found.values()):
        cell.identity  # noqa: B018 - raises on invalid settings, before anything trains
    return found


def parts(every: Sequence[Cell]) -> set[str]:
    """Every word that --only accepts, without seeds."""
    return set().union(*(joined([choice.id for choice in cell.choices]) for cell in every))


def no_match(option: str, hint: str, known: Iterable[str]) -> UserError:
    """The error about an option that matches no cell."""
    return UserError(f"{option} matches no cell{hint} (known are {', '.join(known)})")
