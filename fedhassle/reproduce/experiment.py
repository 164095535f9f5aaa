"""An experiment: a TOML file that says which runs make a table or figure. Adding one needs no code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhassle.errors import UserError, require
from fedhassle.names import nearest
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.runs.run import Identity, identify
from fedhassle.settings.build import is_machine_setting
from fedhassle.settings.request import Changes, Request, flat, key_value, layer, read_toml, request, shipped

SHIPPED = "reproduce/experiments"
SHOWN = ("table", "bars", "lines", "curves", "bytes")  # how an experiment is drawn
OVER_COLUMNS = ("bars", "lines")
MEASURED = ("accuracy", "loss", "bytes_up", "bytes_down")  # tables of a run's metrics


@dataclass(frozen=True)
class Choice:
    """One value of an axis, and the settings that it stands for."""

    id: str  # what it is called in keys and in --only
    label: str  # what it is called by people
    changes: Mapping[str, Any]
    paper: bool  # whether the paper has it
    reference: bool = False  # whether it is a bound to read the others by, and no rival of theirs


@dataclass(frozen=True)
class Axis:
    """What varies in an experiment."""

    name: str
    label: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: a run for every combination of choices and every seed."""

    name: str
    title: str
    source: str  # where the paper has it
    about: str
    show: str  # one of `SHOWN`
    rows: tuple[str, ...]  # names of axes
    columns: tuple[str, ...]
    metrics: tuple[str, ...]  # dotted, as in a run's metrics, or `HEADLINE`, which a run without any shows
    seeds: int
    settings: Mapping[str, Any]  # of all its runs, over the preset `paper`
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Cell:
    """A run of an experiment. Cells of two experiments with one identity are the same run."""

    experiment: str
    choices: tuple[Choice, ...]  # one for each axis
    seed: int
    requested: Request

    @property
    def name(self) -> str:
        """Its choices, such as cifar10-10%-hassle: what its seeds share."""
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

    @cached_property
    def identity(self) -> Identity:
        """Which run it is; raises where its settings are wrong."""
        try:
            return identify(self.requested)
        except UserError as error:
            raise UserError(f"{self}: {error}") from error


@dataclass(frozen=True)
class Narrowing:
    """Which part of experiments is wanted, and what is changed in it."""

    only: tuple[str, ...] = ()  # choices, joined in the order of the axes: cifar10-10%, 5%-hassle-0
    methods: tuple[str, ...] = ()
    seeds: int | None = None  # how many; else as many as the experiment has
    changes: tuple[str, ...] = ()  # settings over those of the experiment, KEY=VALUE

    @property
    def telling(self) -> tuple[str, ...]:
        """The changes that make other runs: all but those of the machine's own settings."""
        return tuple(change for change in self.changes if not is_machine_setting(key_value(change)[0]))


def experiments() -> list[str]:
    """The names of the shipped experiments."""
    return list(shipped(SHIPPED))


def read_experiment(name: str) -> Experiment:
    """A shipped experiment by its name, or a user's own by the path of its file."""
    table = read_toml(name, SHIPPED, "experiment")
    known = {
        **dict.fromkeys(("title", "source", "about", "show"), str),
        **dict.fromkeys(("rows", "columns", "metrics", "axis"), list),
        **{"seeds": int, "settings": dict},
    }
    require_fields(table, known, ("title", "axis"), name)
    experiment = Experiment(
        name=Path(name).stem,
        title=table["title"],
        source=table.get("source", ""),
        about=table.get("about", ""),
        show=table.get("show", "table"),
        rows=tuple(table.get("rows", ())),
        columns=tuple(table.get("columns", ())),
        metrics=tuple(HEADLINE if metric == "accuracy" else metric for metric in table.get("metrics", ())),
        seeds=table.get("seeds", 3),
        settings=table.get("settings", {}),
        axes=tuple(read_axis(axis, name) for axis in table["axis"]),
    )
    check(experiment, name)
    return experiment


def read_axis(table: Any, where: str) -> Axis:
    """An axis of an experiment's file."""
    require_fields(table, {"name": str, "label": str, "choices": list}, ("name", "choices"), f"{where}: axis")
    place = f"{where}: axis {table['name']!r}"
    choices = tuple(read_choice(choice, place) for choice in table["choices"])
    ids = [choice.id for choice in choices]
    require(bool(ids) and len(set(ids)) == len(ids), f"{place} needs choices, each with an id of its own")
    return Axis(table["name"], table.get("label", table["name"]), choices)


def read_choice(table: Any, where: str) -> Choice:
    """A choice of an axis."""
    fields = {"id": str, "label": str, "set": dict, "paper": bool, "reference": bool}
    require_fields(table, fields, ("id",), f"{where}: choice")
    return Choice(
        table["id"],
        table.get("label", table["id"]),
        table.get("set", {}),
        table.get("paper", True),
        table.get("reference", False),
    )


def require_fields(table: Any, known: Mapping[str, type], needed: Sequence[str], where: str) -> None:
    """Refuses a table of a file that lacks a field, or has an unknown one or one of the wrong type."""
    require(isinstance(table, dict), f"{where} must be a table, got {table!r}")
    for key, value in table.items():
        require(key in known, f"{where} has no {key!r}{nearest(key, known)} (known are {', '.join(known)})")
        fits = isinstance(value, known[key]) and isinstance(value, bool) == (known[key] is bool)
        require(fits, f"{where}: {key} must be of type {known[key].__name__}, got {value!r}")
    for key in needed:
        require(key in table, f"{where} needs {key!r}")


def check(experiment: Experiment, where: str) -> None:
    """Refuses an experiment that cannot be shown or run."""
    require(experiment.show in SHOWN, f"{where}: show must be one of {', '.join(SHOWN)}")
    require(experiment.seeds >= 1, f"{where}: seeds must be at least 1, got {experiment.seeds}")
    names = [axis.name for axis in experiment.axes]
    require(bool(names) and len(set(names)) == len(names), f"{where} needs axes, each with a name of its own")
    for name in (*experiment.rows, *experiment.columns):
        require(name in names, f"{where}: {name!r} is no axis{nearest(str(name), names)}")
    over = experiment.show not in OVER_COLUMNS or bool(experiment.columns)
    require(over, f"{where}: show = {experiment.show!r} needs columns, over which it is drawn")
    for metric in experiment.metrics:
        dotted = isinstance(metric, str) and metric.partition(".")[0] in MEASURED and "." in metric
        require(
            dotted or metric == HEADLINE,
            f"{where}: {metric!r} is no metric: write one of {', '.join(MEASURED)}, a dot, its name; "
            "or accuracy alone",
        )
    taken = [axis.name for axis in experiment.axes for choice in axis.choices if "seed" in choice.changes]
    require(
        not taken and "seed" not in experiment.settings, f"{where}: seeds = N in place of settings of seed"
    )


def cells(experiment: Experiment, narrowing: Narrowing | None = None) -> list[Cell]:
    """Its runs, the first seed of all of them first; of those the ones that are wanted."""
    wanted = narrowing or Narrowing()
    seeds = experiment.seeds if wanted.seeds is None else wanted.seeds
    require(seeds >= 1, f"the number of seeds must be at least 1, got {seeds}")
    require_free(experiment, wanted.changes)
    chosen = list(itertools.product(*(axis.choices for axis in experiment.axes)))
    made = (
        make_cell(experiment, choices, seed, wanted.changes)
        for seed, choices in itertools.product(range(seeds), chosen)
    )
    return [cell for cell in made if is_wanted(cell, wanted)]


def require_free(experiment: Experiment, changes: Sequence[str]) -> None:
    """Refuses changes of what tells the cells of an experiment apart."""
    changed = dict(flat(layer(changes)))
    require("seed" not in changed, "the seeds are 0, 1, …: choose how many with --seeds")
    for axis in experiment.axes:
        taken = {key for choice in axis.choices for key, _ in flat(layer(choice.changes))}
        for key in changed:
            require(
                key not in taken,
                f"{experiment.name}: {key.removesuffix('.name')} is what its axis {axis.name!r} sets: choose "
                "among its cells with --only or --methods, or write an experiment file of your own "
                "(docs/reproduce.md)",
            )


def make_cell(experiment: Experiment, choices: tuple[Choice, ...], seed: int, changes: Sequence[str]) -> Cell:
    """A cell with its settings; not yet checked, since it may not be wanted."""
    layers: list[Changes] = [experiment.settings, *(choice.changes for choice in choices), changes]
    return Cell(experiment.name, choices, seed, request("paper", *layers, {"seed": seed}))


def as_shipped(experiment: Experiment, made: Sequence[Cell]) -> bool:
    """Whether cells are those of the shipped experiment of that name, with no setting changed."""
    if experiment.name not in experiments() or experiment != read_experiment(experiment.name):
        return False
    hashes = {cell.name: cell.identity.settings_hash for cell in made}
    shipped_cells = cells(experiment, Narrowing(seeds=1))
    return all(
        cell.identity.settings_hash == hashes[cell.name] for cell in shipped_cells if cell.name in hashes
    )


def is_wanted(cell: Cell, narrowing: Narrowing) -> bool:
    """Whether a cell is in the part that is wanted."""
    ids = [choice.id for choice in cell.choices]
    if narrowing.methods and not {*ids, cell.method} & {*narrowing.methods}:
        return False
    return not narrowing.only or any(word in joined([*ids, str(cell.seed)]) for word in narrowing.only)


def fitting(narrowing: Narrowing, chosen: Sequence[Cell]) -> Narrowing:
    """A narrowing without the words that fit none of its cells: they are meant for other experiments."""

    def fits(part: Narrowing) -> bool:
        return any(is_wanted(cell, part) for cell in chosen)

    return replace(
        narrowing,
        only=tuple(word for word in narrowing.only if fits(Narrowing(only=(word,)))),
        methods=tuple(word for word in narrowing.methods if fits(Narrowing(methods=(word,)))),
    )


def joined(ids: Sequence[str]) -> set[str]:
    """Every part of a key that keeps its order: a, b, a-b."""
    parts = (itertools.combinations(ids, n) for n in range(1, len(ids) + 1))
    return {"-".join(part) for part in itertools.chain(*parts)}


def select(chosen: Sequence[Experiment], narrowing: Narrowing) -> dict[str, list[Cell]]:
    """The wanted cells of experiments, by their names, all checked; a word that fits no cell is an error."""
    names = [experiment.name for experiment in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"two experiments are called {twice!r}: give one of the files another name")
    whole = replace(narrowing, only=(), methods=())
    every = [cell for experiment in chosen for cell in cells(experiment, whole)]
    methods = dict.fromkeys(cell.method for cell in every)
    axes = itertools.chain(*(experiment.axes for experiment in chosen))
    ids = dict.fromkeys(choice.id for axis in axes for choice in axis.choices)
    for word in narrowing.only:
        if not any(is_wanted(cell, Narrowing(only=(word,))) for cell in every):
            raise no_such_part(f"--only {word!r}", nearest(word, parts(every)), ids)
    for word in narrowing.methods:
        if not any(is_wanted(cell, Narrowing(methods=(word,))) for cell in every):
            raise no_such_part(f"--methods {word!r}", nearest(word, methods), methods)
    found = {experiment.name: cells(experiment, narrowing) for experiment in chosen}
    require(any(found.values()), "--only and --methods together leave no cell")
    for cell in itertools.chain(*found.values()):
        cell.identity  # noqa: B018 - raises where settings are wrong, before anything trains
    return found


def parts(every: Sequence[Cell]) -> set[str]:
    """All that --only may be given, but for seeds."""
    return set().union(*(joined([choice.id for choice in cell.choices]) for cell in every))


def no_such_part(what: str, hint: str, known: Iterable[str]) -> UserError:
    """What is said of a word that leaves no cell."""
    return UserError(f"{what} fits no cell{hint} (known are {', '.join(known)})")
