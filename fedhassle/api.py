"""fedhassle from Python: functions that train, and the result of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedhassle.files import remove_stale_lock
from fedhassle.predict.model import TrainedModel, load
from fedhassle.runs.folder import Folder
from fedhassle.runs.live import follow, follow_several
from fedhassle.runs.record import OWN, Metrics, read_summary
from fedhassle.runs.run import reopen, start, start_several
from fedhassle.runs.several import train_several
from fedhassle.runs.train import train_run
from fedhassle.settings.request import combinations, request


class Result(NamedTuple):
    """A finished run."""

    folder: Path
    summary: Metrics

    def __repr__(self) -> str:
        headline = self.summary["headline"]
        score = self.summary["accuracy"][headline]["mean_of_last"]
        return f"Result({str(self.folder)!r}, {self.summary['method']}, {headline} {score:.2%})"

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """By prediction: the last accuracy, the best, and the mean of the last ten evaluations."""
        scores: dict[str, dict[str, float]] = self.summary["accuracy"]
        return scores

    @property
    def metrics(self) -> dict[str, float | None]:
        """The numbers of your own metrics: the mean of the last ten evaluations; None if it is not known."""
        return dict(self.summary.get(OWN, {}))

    @property
    def model(self) -> TrainedModel:
        """The trained model."""
        return load(self.folder / "model.safetensors", allow_import=True)


def run_several(
    config: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    vary: Mapping[str, Sequence[Any]],
    out: str | Path | None = None,
    quiet: bool = False,
) -> list[Result]:
    """Trains one run per combination of values, as `fedhassle run --vary` does: `vary={"seed": [0, 1]}`.

    On a GPU they train side by side. An error in one is raised after the others have ended.
    """
    chosen = combinations(vary.items())
    requests = [(name, request(config, {**(settings or {}), **dict(pairs)})) for name, pairs in chosen]
    runs = start_several(requests, None if out is None else Path(out))
    for end in follow_several(train_several(runs), Console(quiet=quiet)):
        if end.error is not None:
            raise end.error
    return [Result(run.folder.path, read_summary(run.folder.path)) for run in runs]


def run(
    config: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Trains as `fedhassle run CONFIG KEY=VALUE …` does; keys of `settings` may be dotted.

    If only `out` is given and holds a run, that run is resumed; if it is finished, its result is returned.
    """
    folder = Path(out) if out is not None else None
    if folder is not None and Folder(folder).begun and config is None and not settings:
        if Folder(folder).finished:
            remove_stale_lock(folder)
            return Result(folder, read_summary(folder))
        training = reopen(folder)
    else:
        training = start(request(config, settings or {}), folder)
    console = Console(quiet=quiet)
    follow(train_run(training), training.rounds, training.headline, console)
    return Result(training.folder.path, read_summary(training.folder.path))
