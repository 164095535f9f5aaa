"""What 100 more labels are worth, chosen by `next-labels` or at random: `python -m benchmarks.labels`."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import fedhassle
from fedhassle.cli.main import guarded
from fedhassle.data.split.split import Split
from fedhassle.files import write_json
from fedhassle.predict.model import TrainedModel
from fedhassle.predict.next_labels import doubts_of, spread

CLIENTS, SIZE = 5, 400
SETTINGS: dict[str, Any] = {
    "data": "fmnist-mini",
    "rounds": 20,
    "evaluate_every": 1,
    "clients_per_round": CLIENTS,
    "split.kind": "balanced",
    "split.annotation": "own",
    "split.alpha": 0.5,
    "split.clients": CLIENTS,
    "split.size": SIZE,
}
STARTS = {"few": [0.2, 0.1, 0.1, 0.0, 0.0], "many": [1.0, 0.2, 0.2, 0.0, 0.0]}  # labelled shares at first

Choose = Callable[[np.ndarray, int], np.ndarray]
"""A function that takes the rows that a client has not labelled, and returns some to label."""


def more_labels(split: Split, count: int, choose: Choose) -> Split:
    """The split after `count` more labels, shared equally among the clients that have unlabelled images."""
    able = [k for k, rows in enumerate(split.unlabelled) if len(rows)]
    shares = {k: count // len(able) + (i < count % len(able)) for i, k in enumerate(able)}
    new = {k: choose(split.unlabelled[k], shares[k]) for k in able}
    none = np.zeros(0, np.int64)
    return Split.of(
        [np.union1d(rows, new.get(k, none)) for k, rows in enumerate(split.labelled)],
        [np.setdiff1d(rows, new.get(k, none)) for k, rows in enumerate(split.unlabelled)],
    )


def at_random(seed: int) -> Choose:
    """Chooses by lot."""
    rng = np.random.default_rng(seed)
    return lambda rows, count: rng.choice(rows, count, replace=False)


def by_doubt(model: TrainedModel, images: np.ndarray) -> Choose:
    """Chooses as `fedhassle federation next-labels` does."""

    def choose(rows: np.ndarray, count: int) -> np.ndarray:
        found, said = doubts_of(model, images[rows])
        chosen: np.ndarray = rows[spread(found.score, said.classes, count)]
        return chosen

    return choose


def measured(folder: Path, seed: int, shares: list[float], count: int, settings: dict[str, Any]) -> Any:
    """The accuracy of a run before, and of runs from the start with more labels chosen in both ways."""
    given = {**SETTINGS, **settings, "seed": seed}
    before = fedhassle.run("quick", {**given, "split.labels": shares}, out=folder / "before", quiet=True)
    split, images = Split.load(before.folder / "split.npz"), fedhassle.dataset("fmnist-mini").x_train
    accuracy = {"before": score(before)}
    for name, choose in (("random", at_random(seed)), ("chosen", by_doubt(before.model, images))):
        file = folder / f"{name}.npz"
        more_labels(split, count, choose).save(file)
        common = {key: value for key, value in given.items() if not key.startswith("split.")}
        run = fedhassle.run("quick", {**common, "split.file": str(file)}, out=folder / name, quiet=True)
        accuracy[name] = score(run)
    return {"seed": seed, "labels": sum(map(len, split.labelled)), "accuracy": accuracy}


def score(result: fedhassle.Result) -> float:
    """The mean accuracy of EM over the last ten evaluations, in per cent."""
    return 100 * result.accuracy[result.summary["headline"]]["mean_of_last"]


def main(
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds; each has its own class mixes.")] = 5,
    count: Annotated[int, typer.Option(min=1, help="Labels to add.")] = 100,
    method: Annotated[str, typer.Option(help="Method to train.")] = "hassle",
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Measure what more labels are worth, chosen by a model's doubts and at random, on included images."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for start, shares in STARTS.items():
            found[start] = []
            for seed in range(seeds):
                folder = Path(place) / f"{start}-{seed}"
                settings = {"method": method, "method.epochs": 3}
                found[start].append(measured(folder, seed, shares, count, settings))
                typer.echo(json.dumps(found[start][-1]))
                if as_json is not None:
                    write_json(as_json, {"count": count, "method": method, "settings": SETTINGS, **found})
    for start, runs in found.items():
        for name in ("before", "random", "chosen"):
            typer.echo(f"{start:5} {name:7} {summary([run['accuracy'][name] for run in runs])}")
        gaps = [run["accuracy"]["chosen"] - run["accuracy"]["random"] for run in runs]
        typer.echo(f"{start:5} chosen − random {summary(gaps)}, {sum(g > 0 for g in gaps)} of {len(gaps)} up")


def summary(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["--help", "-h"]})(main)
    sys.exit(guarded(app))
