"""A contributed result: a summary from anyone's machine, checked against the current code.

The file is not trusted: it is plain JSON of a limited size, and nothing that it names is imported or opened
unless an experiment names the same. An invented result that fits together cannot be told from a real one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedhassle.averaging import AVERAGED
from fedhassle.data.catalogue import is_available
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError, require
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.ledger import FORMAT, TOGETHER, Ledger
from fedhassle.runs.record import Metrics, final_scores, read_summary, require_schema, summary_file
from fedhassle.runs.resume import on_device
from fedhassle.runs.run import Identity, identify
from fedhassle.settings.build import build_dataset, build_split, split_seed
from fedhassle.settings.request import Request
from fedhassle.settings.schema import Settings, resolve, split_words

LARGEST = 10_000_000  # bytes; the summary of 200 rounds has 65,000
NAMING = ("data", "method", "net", "metrics", "split.file")  # they may name code to import, files to open

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(pattern=r"^[^\p{C}]{0,200}$")]  # a line without control characters
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]


class Checked(BaseModel):
    """A table of a contributed summary: all of its keys, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class CheckedScore(Checked):
    """The final accuracy of a prediction."""

    last: Share
    best: Share
    mean_of_last: Share


class CheckedKinds(Checked):
    """An amount for each kind of client."""

    full: Amount
    partial: Amount
    unlabelled: Amount


class CheckedRound(Checked):
    """A line of metrics."""

    round: int = Field(ge=1)
    accuracy: dict[Text, Share]
    loss: dict[Text, float | None]
    pseudo_label_accuracy: Share | None = None
    pseudo_label_share: Share | None = None  # not in old summaries
    bytes_down: CheckedKinds
    bytes_up: CheckedKinds
    clients: CheckedKinds
    seconds: Amount
    test_loss: dict[Text, Amount | None] = {}  # not in old summaries, like the next
    client_accuracy: dict[Text, Share] = {}
    metrics: dict[Text, float | None] = {}  # only with metrics of one's own
    epsilon: Amount | None = None  # only with noise, like the next
    delta: Share | None = None


class CheckedPrivacy(Checked):
    """The guarantee of a run with noise."""

    epsilon: Amount
    delta: Share
    unit: Literal["site", "sample"]
    noise: Amount
    clip: Amount
    rate: Share


class CheckedVersions(Checked):
    """The software of a run; own methods and networks add hashes of their files."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[Text, Text]
    fedhassle: Text
    code: Text
    python: Text
    torch: Text
    numpy: Text


class CheckedHardware(Checked):
    """The machine of a run."""

    device: Text
    gpu: Text | None
    cpu: Text
    cores: int | None
    threads: int = Field(ge=1)
    workers: int = Field(default=1, ge=1)  # not in old summaries
    system: Text


class CheckedSummary(Checked):
    """A whole summary, with everything that the readers of a ledger use or show."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    method: Text
    data: Text
    seed: int
    settings: Settings
    settings_hash: Digest
    split_hash: Digest
    privacy: CheckedPrivacy | None = None  # only with noise
    versions: CheckedVersions
    hardware: CheckedHardware
    rounds: int
    headline: Text
    modes: dict[Text, Text] = {}  # not in old summaries, like the next
    accuracy: dict[Text, CheckedScore]
    class_accuracy: dict[Text, Share | None] = {}
    accuracy_by_client: dict[Text, Share | None] = {}
    test_loss: dict[Text, Amount | None] = {}
    client_accuracy: dict[Text, Share | None] = {}
    metrics: dict[Text, float | None] = {}
    seconds: Amount
    history: list[CheckedRound]
    together: int = Field(default=1, ge=1)


@dataclass(frozen=True)
class KnownRuns:
    """The runs of some experiments, to find the cells of a summary."""

    cells: Mapping[str, Sequence[Cell]]  # by the hash of their settings
    named: frozenset[tuple[str, ...]]  # their data, method, network, metrics and split file


@dataclass(frozen=True)
class Contribution:
    """A summary that passed all checks."""

    path: Path
    summary: Metrics
    cells: tuple[Cell, ...]  # its cells in all experiments
    unchecked: str | None = None  # the data set without which its split could not be checked

    @property
    def run(self) -> Identity:
        """Its run."""
        return self.cells[0].identity


def known_runs(cells: Sequence[Cell]) -> KnownRuns:
    """The runs of cells."""
    by_hash: dict[str, list[Cell]] = {}
    for cell in cells:
        by_hash.setdefault(cell.identity.settings_hash, []).append(cell)
    return KnownRuns(by_hash, frozenset(named_by(cell.requested) for cell in cells))


def named_by(request: Request) -> tuple[str, ...]:
    """The settings of a request in the order of `NAMING`; empty where it has none."""
    net, file = str(request.top("net", "")), request.get("split", "file", "")
    metrics = split_words(request.top("metrics", ""))
    own = ",".join(map(str, metrics)) if isinstance(metrics, list) else str(metrics)
    return request.data, request.method, net, own, file


def check(path: Path, known: KnownRuns) -> Contribution:
    """The summary in a file or run folder; refuses it with one sentence if anything is wrong with it."""
    require_small(summary_file(path))
    summary = read_summary(path)
    require_schema(CheckedSummary, summary, summary_file(path))
    run = identity_of(path, summary, known)
    require_agreement(path, summary, run)
    cells = cells_of(path, run, known)
    settings = resolve(cells[0].requested)
    require_history(path, summary, settings)
    require_guarantee(path, summary, settings)
    require_scores(path, summary)
    require_means(path, summary, cells)
    return Contribution(path, summary, cells, require_split(path, summary, settings))


def require_small(file: Path) -> None:
    """Refuses a file that is not regular or too large, before it is read."""
    require(file.is_file() or not file.exists(), f"{file} is not a regular file")
    too_large = file.exists() and file.stat().st_size > LARGEST
    require(not too_large, f"{file} is larger than {LARGEST:,} bytes, which no summary is")


def identity_of(path: Path, summary: Metrics, known: KnownRuns) -> Identity:
    """The run that the settings of a summary describe, by the current code on this machine."""
    request = Request((summary["settings"],))
    names = named_by(request)
    named = [
        f"{key}={names[i]}" if names[i] else f"no {key}"
        for i, key in enumerate(NAMING)
        if names[i] or any(others[i] for others in known.named)
    ]
    require(names in known.named, f"{path} belongs to no experiment: none has {' and '.join(named)}")
    require("folder" not in summary["settings"]["data"], f"{path} names a folder of its machine: data.folder")
    try:
        return identify(on_device(request, "cpu"))
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # lists in lists in lists
        raise UserError(f"{path} has settings that are not valid in this version: {error}") from error


def require_agreement(path: Path, summary: Metrics, run: Identity) -> None:
    """Refuses a summary whose entries differ from what its own settings say."""
    found = summary["settings_hash"]
    require(
        found == run.settings_hash,
        f"{path} has the settings hash {found}, but its settings give {run.settings_hash} in this version: "
        "they were changed, or it was made by another version",
    )
    for key in ("method", "data", "seed", "rounds", "headline"):
        said, given = summary[key], getattr(run, key)
        require(said == given, f"{path} has {key} {said}, but its settings give {given}")


def cells_of(path: Path, run: Identity, known: KnownRuns) -> tuple[Cell, ...]:
    """The cells of a run in all experiments; refuses a run that none of them has."""
    alike = known.cells.get(run.settings_hash, ())
    require(bool(alike), f"{path} belongs to no experiment: none has a run with its settings")
    found = tuple(cell for cell in alike if cell.seed == run.seed)
    first = alike[0]
    require(
        bool(found),
        f"{path} belongs to no experiment: {first.experiment} {first.name} has no seed {run.seed}",
    )
    return found


def require_history(path: Path, summary: Metrics, settings: Settings) -> None:
    """Refuses a history with other rounds or predictions than the run evaluates, or another duration."""
    every, last = settings.evaluate_every, settings.rounds
    expected = [t for t in range(1, last + 1) if t % every == 0 or t == last]
    require(
        [line["round"] for line in summary["history"]] == expected,
        f"{path} has other rounds in its history than every {every} up to {last}",
    )
    names = set(summary["accuracy"])
    require(
        all(set(line["accuracy"]) == names for line in summary["history"]),
        f"{path} has other predictions in its history than in its accuracy",
    )
    seconds = sum(line["seconds"] for line in summary["history"])
    require(
        math.isclose(seconds, summary["seconds"], abs_tol=0.1),
        f"{path} took {summary['seconds']} seconds, but those of its history add up to {seconds:.1f}",
    )


def require_guarantee(path: Path, summary: Metrics, settings: Settings) -> None:
    """Refuses another guarantee of privacy than the settings and the history give."""
    asked, found = settings.privacy, summary.get("privacy")
    noisy = bool(asked.noise or asked.epsilon)
    said = "no noise" if found is None else "noise"
    require(noisy == (found is not None), f"{path} has {said}, but its settings say otherwise")
    if found is None:
        return
    spent = summary["history"][-1].get("epsilon")
    require(
        spent is not None and math.isclose(spent, found["epsilon"], rel_tol=1e-6),
        f"{path} has privacy.epsilon {found['epsilon']}, but its history ends with {spent}",
    )
    within = asked.epsilon is None or found["epsilon"] <= asked.epsilon
    require(within, f"{path} spends ε = {found['epsilon']}, more than the {asked.epsilon} of its settings")


def require_scores(path: Path, summary: Metrics) -> None:
    """Refuses final accuracies that the history does not give."""
    given = figures(final_scores(summary["history"]))
    for key, said in figures(summary["accuracy"]).items():
        close = math.isclose(said, given[key], abs_tol=1e-9)
        require(close, f"{path} has {key} {said}, but its history gives {given[key]}")


def figures(accuracy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Final accuracies by their dotted names, such as accuracy.EM.mean_of_last."""
    return {
        f"accuracy.{name}.{key}": value for name, score in accuracy.items() for key, value in score.items()
    }


def require_means(path: Path, summary: Metrics, cells: Sequence[Cell]) -> None:
    """Refuses a summary without running means if the table of one of its cells shows them."""
    averaged = next((cell for cell in cells if cell.averaged), None)
    name = summary["headline"] + AVERAGED
    has_them = averaged is None or name in summary["accuracy"]
    require(has_them, f"{path} lacks the prediction {name!r}, which {averaged} shows")


def require_split(path: Path, summary: Metrics, settings: Settings) -> str | None:
    """Refuses another split than the settings give; returns the data set if its labels are not here."""
    data = settings.data
    folder = None if data.folder is None else Path(data.folder)
    if settings.split.file is None and not is_available(data.name, folder):
        return data.name
    seed = settings.seed if data.holdout else 0  # it draws the held-out images
    chosen = settings.split.model_copy(update={"seed": split_seed(settings)})
    expected = split_hash(data.model_dump_json(), chosen.model_dump_json(), seed)
    found = summary["split_hash"]
    require(found == expected, f"{path} has the split {found[:12]}…, but its settings give {expected[:12]}…")
    return None


@functools.cache
def split_hash(data: str, split: str, seed: int) -> str:
    """The hash of a split, from [data] and [split] as JSON; cached, since most runs share a few splits."""
    settings = Settings.model_validate_json(f'{{"data": {data}, "split": {split}, "seed": {seed}}}')
    if settings.split.file is not None:
        return Split.load(settings.split.file).hash
    return build_split(settings, build_dataset(settings, progress=False)).hash


def stored(found: Contribution, ledger: Ledger) -> Path | None:
    """The file of a result in a ledger, None without one; refuses another result of the same run."""
    path, there = ledger.path(found.run), ledger.summary(found.run)
    if path is None or there is None:
        return None
    ours, theirs = figures(there["accuracy"]), figures(found.summary["accuracy"])
    for key in {**ours, **theirs}:
        said, known = theirs.get(key), ours.get(key)
        require(said == known, f"{found.path} has {key} {said}, but {path} has {known} for the same run")
    return path


def keep(found: Contribution, ledger: Ledger) -> Path:
    """Adds a result to a ledger, under the ledger's own name for it; returns its file."""
    return ledger.add(found.summary, found.summary.get(TOGETHER, 1))
