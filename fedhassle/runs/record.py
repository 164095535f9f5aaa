"""The figures of a run: metrics of each evaluation, final scores, and the summary as it is read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedhassle.data.split.layout import KINDS
from fedhassle.engine.rounds import Reply, Round, takes_part, trainable
from fedhassle.errors import UserError
from fedhassle.method import Client, Method
from fedhassle.names import class_name
from fedhassle.runs.folder import Folder, resume_command
from fedhassle.settings.mistakes import first_mistake

Metrics = dict[str, Any]
"""Plain data as in JSON: a line of metrics.jsonl (the rounds since the line before), or a summary."""

TEST_FALLBACK = "test_stands_in"  # in a line of metrics: no site could evaluate, the coordinator did
BY_CLASS = "class_accuracy"  # in a line of metrics and in a summary: the headline's accuracy on each class
EPSILON = "epsilon"  # in a line of metrics and in a summary's privacy: ε that the rounds so far have spent
BY_CLIENT = "accuracy_by_client"  # in a summary, of own models in lines too: on each client's class mix
CLIENTS = "client_accuracy"  # in a line of metrics: mean, std, lowest of these accuracies
LOSS = "test_loss"  # in a line of metrics: the cross-entropy of each prediction on the test images
OWN = "metrics"  # in a line of metrics: the numbers of a user's own metrics
FINAL_MEANS = (LOSS, CLIENTS, OWN)  # tables of a line whose final means are in a summary
LAST = 10  # evaluations whose mean is the headline (ruling 20)


class Evaluation(NamedTuple):
    """The result of an evaluation: accuracy by prediction, and further entries for the line of metrics."""

    accuracy: dict[str, float]
    more: Metrics = {}  # noqa: RUF012 - never written to
    undo: bool = False  # the rounds since the last evaluation do not count; this is its result


class Step(NamedTuple):
    """A finished round, for those who watch a run."""

    t: int
    clients: tuple[Client, ...]  # those whose updates were merged
    metrics: Metrics | None  # if the round was evaluated


class Tally:
    """The rounds since the last evaluation."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.models: dict[str, None] = {}
        self.replies: list[Reply] = []
        self.dropped: list[Reply] = []  # they count for the traffic
        self.clients: list[Client] = []  # drawn clients, except those that did not answer

    def add(self, done: Round) -> None:
        """Adds a round."""
        self.replies.extend(map(without_arrays, done.replies))
        self.dropped.extend(map(without_arrays, done.dropped))
        present = {reply.update.client.name for reply in (*done.replies, *done.dropped)}
        present |= {client.name for client in done.clients if not takes_part(self.method, client, done.t)}
        self.clients.extend(client for client in done.clients if client.name in present)
        self.models |= dict.fromkeys(sorted(trainable(self.method, done.t)))

    def metrics(self, t: int, found: Evaluation, seconds: float) -> Metrics:
        """One line of metrics; None stands for unknown."""
        return {
            "round": t,
            "accuracy": found.accuracy,
            "loss": {name: self.loss(name) for name in self.models},
            **self.labelling(),
            "bytes_down": self.by_kind(lambda reply: reply.bytes_down),
            "bytes_up": self.by_kind(lambda reply: reply.bytes_up),
            "clients": {kind: sum(c.kind == kind for c in self.clients) for kind in KINDS},
            "seconds": round(seconds, 3),
            **found.more,
        }

    def loss(self, name: str) -> float | None:
        """Mean loss of a model over the clients that trained it, by samples; None if none did."""
        updates = [reply.update for reply in self.replies if name in reply.update.losses]
        total = sum(update.samples[name] for update in updates)
        value = sum(float(u.losses[name]) * u.samples[name] for u in updates) / total if updates else math.nan
        return value if math.isfinite(value) else None  # JSON has neither NaN nor infinity

    def labelling(self) -> Metrics:
        """The share of correct pseudo-labels, and of the unlabelled samples that got one; None without any.

        Samples whose true label is unknown do not count for the accuracy.
        """
        counts = [reply.update.labelling for reply in self.replies]
        rows = torch.stack(counts).tolist() if counts else []
        right, given, asked, judged = (sum(row[i] for row in rows) for i in range(4))
        return {
            "pseudo_label_accuracy": right / judged if judged else None,
            "pseudo_label_share": given / asked if asked else None,
        }

    def by_kind(self, amount: Callable[[Reply], int]) -> dict[str, int]:
        """The sum of an amount over the replies, by kind of client."""
        pairs = [(reply.update.client.kind, amount(reply)) for reply in (*self.replies, *self.dropped)]
        return {kind: sum(n for found, n in pairs if found == kind) for kind in KINDS}


def without_arrays(reply: Reply) -> Reply:
    """A reply without its models, which would fill the memory."""
    return reply._replace(update=reply.update._replace(arrays={}))


def by_class(class_names: Sequence[str], found: Sequence[float | None]) -> Metrics:
    """The entry of a line of metrics with the headline's accuracy on each class."""
    return {BY_CLASS: dict(zip(class_names, found, strict=True))}


def metrics_line(metrics: Metrics) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(metrics, allow_nan=False) + "\n"


# Final scores


def final_scores(history: Sequence[Metrics]) -> dict[str, dict[str, float]]:
    """The last accuracy, the best, and the mean of the last ten, of each prediction (ruling 20)."""
    # A checkpoint of an older version may lack a prediction.
    names = [name for name in history[-1]["accuracy"] if all(name in m["accuracy"] for m in history)]
    curves = {name: [m["accuracy"][name] for m in history] for name in names}
    return {
        name: {
            "last": curve[-1],
            "best": max(curve),
            "mean_of_last": statistics.fmean(curve[-LAST:]),
        }
        for name, curve in curves.items()
    }


def final_means(history: Sequence[Metrics], table: str) -> dict[str, float | None]:
    """The mean over the last ten evaluations of each figure in a table; None if none of them knows it."""
    lines = [metrics[table] for metrics in history[-LAST:] if table in metrics]
    names = dict.fromkeys(name for line in lines for name in line)
    known = {name: [line[name] for line in lines if line.get(name) is not None] for name in names}
    return {name: statistics.fmean(values) if values else None for name, values in known.items()}


def shortened(metrics: Metrics) -> Metrics:
    """A line of metrics without accuracies by class and by client: a summary would grow too large."""
    return {key: value for key, value in metrics.items() if key not in (BY_CLASS, BY_CLIENT)}


def evaluations_averaged(summary: Metrics) -> int:
    """The number of evaluations behind `mean_of_last`: ten, or fewer in a short run."""
    return min(LAST, len(summary["history"]))


def on_test_images(summary: Metrics) -> Metrics | None:
    """The summary with the coordinator's test images in place of the sites' own; None if there are none."""
    lines = [metrics for metrics in summary["history"] if "test" in metrics]
    if not lines or lines[-1] is not summary["history"][-1] or all(TEST_FALLBACK in line for line in lines):
        return None
    history = [{**metrics, "accuracy": metrics["test"]} for metrics in lines]
    scores = final_scores(history)
    in_order = {name: scores[name] for name in summary["accuracy"] if name in scores}
    return {**summary, "accuracy": in_order, "history": history}


# Reading summaries

ClassName = Annotated[str, AfterValidator(class_name)]


class Score(BaseModel):
    """The final accuracy of a prediction."""

    model_config = ConfigDict(strict=True)
    last: float
    best: float
    mean_of_last: float


class EvaluatedRound(BaseModel):
    """A line of metrics."""

    model_config = ConfigDict(strict=True)
    round: int
    accuracy: dict[str, float]
    bytes_up: dict[str, float]
    pseudo_label_accuracy: float | None = None  # not in every summary, like the next
    pseudo_label_share: float | None = None


class Summary(BaseModel):
    """The parts of a summary that its readers use."""

    model_config = ConfigDict(strict=True)
    method: str
    data: str
    seed: int
    settings: dict[str, Any]
    settings_hash: str
    rounds: int
    headline: str
    modes: dict[str, str] = {}  # not in old summaries
    accuracy: dict[str, Score]
    class_accuracy: dict[ClassName, float | None] = {}  # not in old summaries
    metrics: dict[str, float | None] = {}  # only with metrics of one's own
    seconds: float
    history: list[EvaluatedRound] = Field(min_length=1)

    @model_validator(mode="after")
    def has_every_accuracy(self) -> Summary:
        """Refuses a summary in which a prediction lacks its accuracy, at the end or in a round."""
        known = [set(self.accuracy), *(set(line.accuracy) for line in self.history)]
        if not {self.headline, *self.accuracy} <= set.intersection(*known):
            raise ValueError("the accuracy of a prediction is missing")
        return self


def summary_file(path: Path) -> Path:
    """The file of a summary, by the folder of its run or by the file itself."""
    return Folder(path).summary if path.is_dir() else path


def read_summary(path: Path) -> Metrics:
    """The summary of a finished run, by its folder or by the file itself."""
    file = summary_file(path)
    try:
        summary: Metrics = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        hint = f": finish the run with {resume_command(Folder(path))}" if Folder(path).begun else ""
        raise UserError(f"{file} does not exist{hint}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not the summary of a run: {type(error).__name__}: {error}") from error
    require_schema(Summary, summary, file)
    return summary


def require_schema(schema: type[BaseModel], summary: Metrics, file: Path) -> None:
    """Refuses a summary that a schema does not allow; names its first wrong entry."""
    try:
        schema.model_validate(summary)
    except ValidationError as error:
        raise UserError(f"{file} is not the summary of a run: {first_mistake(error)}") from error
