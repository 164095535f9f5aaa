"""A run on disk: metrics as they come, checkpoints, and at the end a summary and the model."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedhassle.engine.tensor_files import round_files, write_arrays
from fedhassle.runs.checkpoints import Checkpoint, discard_after, load_checkpoint, save_checkpoint
from fedhassle.data.split.layout import KINDS
from fedhassle.errors import UserError
from fedhassle.engine.evaluate import check_headline
from fedhassle.files import remove_unfinished, write_text
from fedhassle.method import Client, Method
from fedhassle.engine.rounds import Federation, Plan, Reply, Round, federate, takes_part, trainable
from fedhassle.vectors import Arrays

Metrics = dict[str, Any]
"""Plain data as JSON has it: a line of metrics.jsonl (what happened since the line before), or a summary."""

STANDS_IN = "test_stands_in"  # in a line of metrics: its accuracy is that on the coordinator's images
LAST = 10  # evaluations whose mean is the headline (ruling 20)


class Folder(NamedTuple):
    """Where a run keeps its files."""

    path: Path

    @property
    def begun(self) -> bool:
        """Whether there is a run, here or in a federation."""
        return self.request.exists() or self.config.exists() or self.audit.exists()

    @property
    def finished(self) -> bool:
        """Whether the run there has come to its end."""
        return self.config.exists() and self.summary.exists()

    @property
    def request(self) -> Path:
        """What was asked for, until it is resolved: a run can be taken up from its first second on."""
        return self.path / "request.json"

    @property
    def config(self) -> Path:
        """The settings, as resolved."""
        return self.path / "config.toml"

    @property
    def split(self) -> Path:
        """Who holds which samples."""
        return self.path / "split.npz"

    @property
    def own_code(self) -> Path:
        """What tells the source of a method or network of one's own from others; there with these alone."""
        return self.path / "own_code.txt"

    @property
    def metrics(self) -> Path:
        """One line of JSON per evaluated round."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """A whole result in one small file; its presence says that the run is finished."""
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The final state with all that prediction needs."""
        return self.path / "model.safetensors"

    @property
    def card(self) -> Path:
        """What a person should know of the model before using it."""
        return self.path / "model.md"

    @property
    def best(self) -> Path:
        """The model of the round that the sites' validation images found best; there in federations alone."""
        return self.path / "best.safetensors"

    @property
    def audit(self) -> Path:
        """One line of JSON for each thing that happened to a site; there in federations alone."""
        return self.path / "audit.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files; there with `track=tensorboard` alone."""
        return self.path / "tensorboard"

    @property
    def mlflow(self) -> Path:
        """MLflow's name for the run, and its database if there is no server; with `track=mlflow` alone."""
        return self.path / "mlflow"

    @property
    def curves(self) -> Path:
        """A picture of the accuracy by round."""
        return self.path / "curves.png"

    @property
    def log(self) -> Path:
        """What the run had to say."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """What the run goes on from after a crash."""
        return self.path / "checkpoints"

    @property
    def memory(self) -> Path:
        """What clients keep between rounds; there only where a method has them keep something."""
        return self.path / "memory"


class Evaluation(NamedTuple):
    """What an evaluation found: accuracy by prediction, and what else a line of metrics is to hold."""

    accuracy: dict[str, float]
    more: Metrics = {}  # noqa: RUF012 - never written to


class Step(NamedTuple):
    """A finished round as an onlooker sees it."""

    t: int
    clients: tuple[Client, ...]  # those whose updates were merged
    metrics: Metrics | None  # where the round was evaluated


def conduct(
    folder: Folder,
    method: Method,
    federation: Federation,
    plan: Plan,
    evaluate: Callable[[Arrays, int], Evaluation | None],
    evaluate_every: int,
    start: Checkpoint,
) -> Iterator[Step]:
    """Carries a run to its end from where it stands, as `begin` finds it; yields after every round.

    Where an evaluation finds nothing, as when no site that can do it is there, the line is left out.
    """
    history, tally = start.history, Tally(method)
    clock = time.perf_counter()
    for done in federate(method, federation, plan, start.state, start.t + 1):
        tally.add(done)
        metrics = None
        if done.t % evaluate_every == 0 or done.t == plan.rounds:
            found = evaluate(done.state, done.t)
            if found is not None:
                check_headline(method, found.accuracy)
                metrics = tally.metrics(done.t, found, time.perf_counter() - clock)
                clock, tally = time.perf_counter(), Tally(method)
                history = [*history, metrics]
                append(folder.metrics, metrics)
            save_checkpoint(folder.checkpoints, Checkpoint(done.t, done.state, history))
            federation.prune(list(round_files(folder.checkpoints)))
        yield Step(done.t, tuple(reply.update.client for reply in done.replies), metrics)


def begin(folder: Folder, method: Method, seed: int, device: torch.device) -> Checkpoint:
    """Where the run stands: its last whole checkpoint, or before round 1; the metrics on disk follow it."""
    remove_unfinished(folder.path)
    remove_unfinished(folder.checkpoints)
    found = load_checkpoint(folder.checkpoints, device)
    if found is None:
        found = Checkpoint(0, {k: v.to(device) for k, v in method.initial(seed).items()}, [])
    discard_after(folder.checkpoints, found.t)
    write_text(folder.metrics, "".join(line(metrics) for metrics in found.history))
    return found


def line(metrics: Metrics) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(metrics, allow_nan=False) + "\n"


def append(path: Path, metrics: Metrics) -> None:
    """Adds a line to the metrics."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line(metrics))


class Tally:
    """What happened in the rounds since the last evaluation."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.models: dict[str, None] = {}
        self.replies: list[Reply] = []
        self.dropped: list[Reply] = []  # which have travelled all the same
        self.clients: list[Client] = []  # those drawn, but for those that were asked in vain

    def add(self, done: Round) -> None:
        """Takes in a round."""
        self.replies.extend(map(without_arrays, done.replies))
        self.dropped.extend(map(without_arrays, done.dropped))
        answered = {reply.update.client.name for reply in (*done.replies, *done.dropped)}
        idle = (c for c in done.clients if not takes_part(self.method, c, done.t))
        there = answered | {client.name for client in idle}
        self.clients.extend(client for client in done.clients if client.name in there)
        self.models |= dict.fromkeys(sorted(trainable(self.method, done.t)))

    def metrics(self, t: int, found: Evaluation, seconds: float) -> Metrics:
        """One line of metrics; what is not known is None."""
        return {
            "round": t,
            "accuracy": found.accuracy,
            "loss": self.losses(),
            "pseudo_label_accuracy": self.labelling(),
            "bytes_down": self.by_kind(lambda reply: reply.bytes_down),
            "bytes_up": self.by_kind(lambda reply: reply.bytes_up),
            "clients": {kind: sum(c.kind == kind for c in self.clients) for kind in KINDS},
            "seconds": round(seconds, 3),
            **found.more,
        }

    def losses(self) -> dict[str, float | None]:
        """Mean loss of each model over the clients that trained it, by samples; None if none did."""
        return {name: self.loss(name) for name in self.models}

    def loss(self, name: str) -> float | None:
        """One model's mean loss."""
        updates = [reply.update for reply in self.replies if name in reply.update.losses]
        total = sum(update.samples[name] for update in updates)
        value = sum(float(u.losses[name]) * u.samples[name] for u in updates) / total if updates else math.nan
        return value if math.isfinite(value) else None  # JSON has neither NaN nor infinity

    def labelling(self) -> float | None:
        """The share of pseudo-labels that are right; None where none was given or the truth is not known."""
        counts = [r.update.labelling for r in self.replies if r.update.labelling is not None]
        right, given = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
        return right / given if given else None

    def by_kind(self, amount: Callable[[Reply], int]) -> dict[str, int]:
        """An amount of each reply, added up by kind of client."""
        pairs = [(reply.update.client.kind, amount(reply)) for reply in (*self.replies, *self.dropped)]
        return {kind: sum(n for found, n in pairs if found == kind) for kind in KINDS}


def without_arrays(reply: Reply) -> Reply:
    """A reply without the models, which would fill the memory."""
    return reply._replace(update=reply.update._replace(arrays={}))


def final_scores(history: Sequence[Metrics]) -> dict[str, dict[str, float]]:
    """For each prediction the last accuracy, the best, and the mean of the last ten (ruling 20)."""
    curves = {name: [m["accuracy"][name] for m in history] for name in history[-1]["accuracy"]}
    return {
        name: {
            "last": curve[-1],
            "best": max(curve),
            "mean_of_last": statistics.fmean(curve[-LAST:]),
        }
        for name, curve in curves.items()
    }


def averaged(summary: Metrics) -> int:
    """Of how many evaluations `mean_of_last` is the mean: ten, or as many as there are."""
    return min(LAST, len(summary["history"]))


def on_test_images(summary: Metrics) -> Metrics | None:
    """The summary by the coordinator's test images, where they were measured beside the sites' own."""
    lines = [metrics for metrics in summary["history"] if "test" in metrics]
    if not lines or lines[-1] is not summary["history"][-1] or all(STANDS_IN in line for line in lines):
        return None
    history = [{**metrics, "accuracy": metrics["test"]} for metrics in lines]
    scores = final_scores(history)
    in_order = {name: scores[name] for name in summary["accuracy"] if name in scores}
    return {**summary, "accuracy": in_order, "history": history}


def finish(
    folder: Folder, method: Method, rounds: int, about_run: dict[str, Any], about_model: dict[str, Any]
) -> Metrics:
    """Writes the model from the last round's checkpoint; returns the summary, which is to be written last."""
    last = load_checkpoint(folder.checkpoints, torch.device("cpu"))
    t = 0 if last is None else last.t
    if last is None or t != rounds:
        raise UserError(
            f"{folder.path} ends with round {rounds}, but its newest whole checkpoint is that of round {t}: "
            f"it goes on from there with {way_on(folder)}"
        )
    if not last.history:
        raise UserError(f"{folder.path}: no round could be evaluated, so there is no result to write")
    scores = final_scores(last.history)
    write_arrays(folder.model, method.model(last.state), about_model | {"scores": scores})
    return {
        **about_run,
        "rounds": last.t,
        "headline": method.headline,
        "modes": dict(method.modes),
        "accuracy": scores,
        "seconds": round(sum(m["seconds"] for m in last.history), 1),
        "history": last.history,
    }


def spread_out(path: Path) -> list[Path]:
    """A path as it is; a folder that is no run but holds finished ones as the folders in it."""
    if not path.is_dir() or Folder(path).begun or to_be_read(path):
        return [path]
    below = sorted(folder for folder in path.iterdir() if folder.is_dir())
    return below if any(map(to_be_read, below)) else [path]


def begun_in(path: Path) -> list[Path]:
    """A path as it is; a folder that is no run but holds some as those in it."""
    if not path.is_dir() or Folder(path).begun:
        return [path]
    return sorted(folder for folder in path.iterdir() if Folder(folder).begun) or [path]


def to_be_read(path: Path) -> bool:
    """Whether reading a path gives a summary, or tells the user best what is wrong: as where nothing is."""
    return Folder(path).summary.exists() if path.is_dir() else path.suffix == ".json" or not path.exists()


def way_on(*folders: Folder) -> str:
    """The command by which runs that were cut go on; FOLDER is where a run's federation is at home."""
    command = "federation run FOLDER --out" if folders[0].audit.exists() else "resume"
    return f"fedhassle {command} {shlex.join(str(folder.path) for folder in folders)}"


def read_summary(path: Path) -> Metrics:
    """The summary of a finished run, by its folder or by the file itself."""
    file = Folder(path).summary if path.is_dir() else path
    try:
        summary: Metrics = json.loads(file.read_text("utf-8"))
        check_summary(summary)
    except FileNotFoundError as error:
        hint = f": finish the run with {way_on(Folder(path))}" if Folder(path).begun else ""
        raise UserError(f"{file} does not exist{hint}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is no summary of a run: {type(error).__name__}: {error}") from error
    return summary


def check_summary(summary: Metrics) -> None:
    """Touches all that readers of a summary use: anything but a summary raises."""
    words = [summary[key] for key in ("method", "data", "settings_hash", "headline")]
    words += [word for mode in summary.get("modes", {}).items() for word in mode]  # not in old summaries
    if not all(isinstance(word, str) for word in words) or not isinstance(summary["settings"], dict):
        raise TypeError("its words are no words")
    predictions = [summary["headline"], *summary["accuracy"]]
    figures = [summary["rounds"], summary["seconds"], summary["seed"]]
    for name in predictions:
        figures += [summary["accuracy"][name][key] for key in ("last", "best", "mean_of_last")]
        figures += [metrics["accuracy"][name] for metrics in summary["history"]]
    if not summary["history"]:
        raise ValueError("it has no evaluated round")
    for metrics in summary["history"]:
        figures += [metrics["round"], *metrics["bytes_up"].values()]
    if not all(isinstance(figure, int | float) for figure in figures):
        raise TypeError("its figures are no numbers")
