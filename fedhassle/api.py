"""fedhassle from Python: functions that train, and the result of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedhassle.errors import require
from fedhassle.files import remove_stale_lock
from fedhassle.names import require_no_import
from fedhassle.notebook import ClientData, Comparison, Picture, client_data
from fedhassle.predict.model import TrainedModel, load
from fedhassle.runs.folder import Folder, result_folders
from fedhassle.runs.live import follow, follow_several
from fedhassle.runs.record import OWN, Metrics, read_summary
from fedhassle.runs.resume import reopen
from fedhassle.runs.run import start, start_several
from fedhassle.runs.seeds import grouped
from fedhassle.runs.several import train_several
from fedhassle.runs.train import train_run
from fedhassle.settings.objects import in_words
from fedhassle.settings.request import Request, combinations, request


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
    def curves(self) -> Picture:
        """The accuracy by round; a notebook shows it as a picture."""
        return compare(self).curves

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
    **keywords: Any,
) -> list[Result]:
    """Trains one run per combination of values, as `fedhassle run --vary` does: `vary={"seed": [0, 1]}`.

    Settings are given as for `run`; values that vary may be classes too: `vary={"method": ["fedavg", Mine]}`.
    Several train at once where that is faster. An error in one is raised after the others have ended.
    """
    require_no_import()
    for key, values in vary.items():
        is_list = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
        require(is_list, f"vary={{{key!r}: {values!r}}}: expected a list of values, such as [{values!r}]")
    home = Path("runs") if out is None else Path(out)
    requests = [
        (name, requested(config, home, settings or {}, keywords, dict(pairs)))
        for name, pairs in combinations(vary.items())
    ]
    runs = start_several(requests, None if out is None else home)
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
    **keywords: Any,
) -> Result:
    """Trains as `fedhassle run CONFIG KEY=VALUE …` does.

    Settings are keywords (`rounds=2`), with tables as dicts (`method={"name": "fedprox", "mu": 0.01}`), or a
    mapping whose keys may be dotted (`{"method.mu": 0.01}`); a keyword counts more. Classes and functions are
    accepted where names are (`method=MyMethod`, `net=MyNet`, `metrics=my_metric`), and a `Dataset` or `Split`
    where files are. These two are saved beside the run's folder.

    If only `out` is given and holds a run, that run is resumed; if it is finished, its result is returned.
    """
    require_no_import()
    folder = Path(out) if out is not None else None
    if folder is not None and Folder(folder).begun and config is None and not settings and not keywords:
        if Folder(folder).finished:
            remove_stale_lock(folder)
            return Result(folder, read_summary(folder))
        training = reopen(folder)
    else:
        home = Path("runs") if folder is None else folder.parent
        training = start(requested(config, home, settings or {}, keywords), folder)
    console = Console(quiet=quiet)
    follow(train_run(training), training.rounds, training.headline, console)
    return Result(training.folder.path, read_summary(training.folder.path))


def split(
    config: str | None = None, settings: Mapping[str, Any] | None = None, **keywords: Any
) -> ClientData:
    """The data of each client, as `fedhassle split CONFIG KEY=VALUE …` shows it; settings as for `run`."""
    return client_data(requested(config, Path("runs"), settings or {}, keywords))


def compare(*runs: Result | str | Path) -> Comparison:
    """Finished runs side by side, as `fedhassle compare` shows them: results, or folders of runs."""
    require(bool(runs), "there is nothing to compare: give results of run, or folders")
    summaries: list[Metrics] = []
    for run in runs:
        if isinstance(run, Result):
            summaries.append(run.summary)
        else:
            summaries += map(read_summary, result_folders(Path(run)))
    return Comparison(grouped(summaries))


def requested(config: str | None, home: Path, *settings: Mapping[str, Any]) -> Request:
    """A request from settings as Python has them; later ones count more, and defaults of a data set least."""
    words = [in_words(one, home) for one in settings]
    made = request(config, *(given for given, _ in words))
    return Request((*(defaults for _, defaults in words if defaults), *made.layers))
