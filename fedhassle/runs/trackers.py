"""Trackers: onlookers that write TensorBoard's or MLflow's log while a run trains.

The run's own files stay the truth. A log is made from them, and an error in making it stops no run.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Protocol

from fedhassle.errors import require
from fedhassle.files import write_text
from fedhassle.runs.record import Folder, Metrics
from fedhassle.settings.schema import Tool

log = logging.getLogger("fedhassle")

NEEDS: dict[Tool, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # the last two for the database in the run's folder
}
NOT_TRACKED = ("round", "sites")  # the step itself, and what concerns one site of a federation alone
LONGEST, MOST = 6000, 100  # characters of a parameter, and parameters in one request, that MLflow takes

# Unless a user has them otherwise: no word to MLflow's makers, none of what it does in passing on the screen,
# and no run that stands still for long because a server is away.
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Tracker(Protocol):
    """Whoever is told of a run."""

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """A run begins or goes on: its settings, and the rounds that are done, which the log is to have."""
        ...

    def evaluated(self, metrics: Metrics) -> None:
        """A round was evaluated."""
        ...

    def end(self, summary: Metrics | None) -> None:
        """The run is finished, or, without a summary, left for now: nothing may stay open."""
        ...


def require_installed(tools: Sequence[Tool]) -> None:
    """Refuses tools that are not installed."""
    for tool in tools:
        missing = [name for name in NEEDS[tool] if find_spec(name) is None]
        require(
            not missing,
            f"track={tool} needs {', '.join(missing)}, not installed here: pip install 'fedhassle[{tool}]'",
        )


@contextmanager
def tracking(tools: Sequence[Tool], folder: Folder) -> Iterator[Trackers]:
    """The trackers of a run, told of its end however it comes about."""
    made: dict[Tool, Callable[[Folder], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
    trackers = Trackers({tool: made[tool](folder) for tool in tools})
    try:
        yield trackers
    finally:
        trackers.end(None)


class Trackers:
    """Several trackers as one; the first error of one is told, and the run goes on without it."""

    def __init__(self, trackers: Mapping[Tool, Tracker]) -> None:
        self._going = dict(trackers)

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """A run begins or goes on."""
        self._tell(lambda tracker: tracker.begin(parameters, history))

    def evaluated(self, metrics: Metrics) -> None:
        """A round was evaluated."""
        self._tell(lambda tracker: tracker.evaluated(metrics))

    def end(self, summary: Metrics | None) -> None:
        """The run is finished or left; whoever has heard it hears nothing more."""
        self._tell(lambda tracker: tracker.end(summary))
        self._going.clear()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for tool, tracker in list(self._going.items()):
            try:
                what(tracker)
            except Exception as error:  # a server, a disk or a library: none is worth a run
                first = str(error).strip().partition("\n")[0]
                reason = re.sub(r"//[^/\s]*@", "//", first)  # a server's address may hold a password
                log.warning(
                    "track=%s: the run goes on without it: %s: %s", tool, type(error).__name__, reason
                )
                del self._going[tool]
                with suppress(Exception):
                    tracker.end(None)


def figures(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested tables by names such as `accuracy/EM`; what is not known is left out."""
    for key, value in metrics.items():
        name = prefix + re.sub(r"[^\w. -]", "_", key)  # what every tool takes
        if isinstance(value, Mapping):
            yield from figures(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)


def figures_of_round(metrics: Metrics) -> dict[str, float]:
    """What is tracked of an evaluated round."""
    return dict(figures({key: value for key, value in metrics.items() if key not in NOT_TRACKED}))


def final_figures(summary: Metrics) -> dict[str, float]:
    """What is tracked of a finished run beyond its rounds."""
    return dict(figures({"final": summary["accuracy"]}))


class TensorBoard:
    """An event file in the run's folder."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.tensorboard
        self._writer: Any = None
        self._closing: Any = None

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """Opens a file that takes the place of those before it, and writes again what is done."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # All is written anew, since a file that was cut may lack its last rounds, or have some that the run
        # went back behind. Readers drop what they have read of the files before, which then go: by their
        # names alone, files of the same second have no order.
        before = list(self._path.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(self._path), purge_step=0)
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in parameters.items()}
        write_hparams: Any = hparams
        _, opening, self._closing = write_hparams(plain, {})
        self._writer.file_writer.add_summary(opening, 0)
        now = time.time()
        for i, metrics in enumerate(history):  # as if the run had never stood still
            self._write(metrics, now - sum(later["seconds"] for later in history[i + 1 :]))
        self._writer.flush()
        for path in before:
            path.unlink(missing_ok=True)

    def evaluated(self, metrics: Metrics) -> None:
        """Adds a round, to be seen at once."""
        self._write(metrics, time.time())
        self._writer.flush()

    def end(self, summary: Metrics | None) -> None:
        """Adds the final scores, and closes the file."""
        if self._writer is None:
            return
        try:
            if summary is not None:
                for name, value in final_figures(summary).items():
                    self._writer.add_scalar(name, value, summary["rounds"])
                self._writer.file_writer.add_summary(self._closing, summary["rounds"])
        finally:
            self._writer.close()  # and ends its thread

    def _write(self, metrics: Metrics, when: float) -> None:
        for name, value in figures_of_round(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"], when)


class MLflow:
    """A run at `MLFLOW_TRACKING_URI`, else in a database in the run's folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._client: Any = None
        self._run: str | None = None
        self._there: set[int] = set()  # rounds that the log has: none is written twice

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """Makes a run or takes up the one that the folder names, and adds what it lacks."""
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)  # read when it is imported, and when it asks a server
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._folder.mlflow.mkdir(exist_ok=True)
        local = f"sqlite:///{(self._folder.mlflow / 'mlflow.db').absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        found = self._found()
        if found is None:
            found = self._client.create_run(self._experiment(), run_name=self._folder.path.absolute().name)
            write_text(self._folder.mlflow / "run-id", found.info.run_id)
        else:
            self._client.update_run(found.info.run_id, "RUNNING")
        self._run = found.info.run_id
        if not found.data.params:  # which can be written once only
            params = [Param(key, str(value)[:LONGEST]) for key, value in parameters.items()]
            for i in range(0, len(params), MOST):
                self._client.log_batch(self._run, params=params[i : i + MOST])
        self._there = {metric.step for metric in self._client.get_metric_history(self._run, "seconds")}
        for metrics in history:
            self.evaluated(metrics)

    def evaluated(self, metrics: Metrics) -> None:
        """Adds a round."""
        if metrics["round"] not in self._there:
            self._log(figures_of_round(metrics), metrics["round"])

    def end(self, summary: Metrics | None) -> None:
        """Adds the final scores, the curves and the model's card; says whether the run is finished."""
        if self._run is None:
            return
        if summary is not None:
            self._log(final_figures(summary), summary["rounds"])
            for file in (self._folder.curves, self._folder.card):
                if file.exists():  # a picture may be one that could not be drawn
                    self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, "KILLED" if summary is None else "FINISHED")

    def _log(self, values: Mapping[str, float], t: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, value, now, t) for name, value in values.items()])

    def _found(self) -> Any:
        """The run that the folder names; None where there is none, or another server has it."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run((self._folder.mlflow / "run-id").read_text("utf-8"))
        except FileNotFoundError:
            return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _experiment(self) -> str:
        """The experiment that runs belong to, made by the first of them."""
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedhassle"
        at_server = os.environ.get("MLFLOW_TRACKING_URI")
        artefacts = None if at_server else (self._folder.mlflow / "artifacts").absolute().as_uri()
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artefacts))
            except MlflowException:  # another run may have made it in this moment
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
