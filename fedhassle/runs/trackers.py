"""Trackers: write a TensorBoard, MLflow or W&B log while a run trains.

The run's own files are authoritative. An error in a tracker never stops a run.
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

from fedhassle.errors import first_line, require
from fedhassle.files import write_text
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics
from fedhassle.runs.tracked import figures_of_round, final_figures, label_of
from fedhassle.runs.weights_and_biases import WeightsAndBiases
from fedhassle.settings.schema import Tool

log = logging.getLogger("fedhassle")

NEEDS: dict[Tool, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # the last two: for the database in the run's folder
    "wandb": ("wandb",),
}
LONGEST, MOST = 6000, 100  # MLflow's limits: characters of a parameter, parameters in one request …
MOST_METRICS = 1000  # … and metrics

# Defaults that a user can override: no telemetry, no chatter on the screen, and no long wait for a server
# that is down.
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Tracker(Protocol):
    """A log of a run."""

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """A run starts or resumes, with its settings and the metrics so far, which the log must contain."""
        ...

    def evaluated(self, metrics: Metrics) -> None:
        """A round was evaluated."""
        ...

    def end(self, summary: Metrics | None) -> None:
        """The run is finished, or interrupted if there is no summary: closes everything."""
        ...


def require_installed(tools: Sequence[Tool]) -> None:
    """Raises if a tool is not installed."""
    for tool in tools:
        missing = [name for name in NEEDS[tool] if find_spec(name) is None]
        require(
            not missing,
            f"track={tool} needs {', '.join(missing)}, not installed: pip install 'fedhassle[{tool}]'",
        )


@contextmanager
def tracking(tools: Sequence[Tool], folder: Folder) -> Iterator[Trackers]:
    """The trackers of a run; they are closed however the run ends."""
    made: dict[Tool, Callable[[Folder], Tracker]] = {
        "tensorboard": TensorBoard,
        "mlflow": MLflow,
        "wandb": WeightsAndBiases,
    }
    trackers = Trackers({tool: made[tool](folder) for tool in tools})
    try:
        yield trackers
    finally:
        trackers.end(None)


class Trackers:
    """Several trackers as one; after its first error, which is logged, a tracker is dropped."""

    def __init__(self, trackers: Mapping[Tool, Tracker]) -> None:
        self._active = dict(trackers)

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """A run starts or resumes."""
        self._each(lambda tracker: tracker.begin(parameters, history))

    def evaluated(self, metrics: Metrics) -> None:
        """A round was evaluated."""
        self._each(lambda tracker: tracker.evaluated(metrics))

    def end(self, summary: Metrics | None) -> None:
        """The run is finished or interrupted; no tracker is called again."""
        self._each(lambda tracker: tracker.end(summary))
        self._active.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tool, tracker in list(self._active.items()):
            try:
                call(tracker)
            except Exception as error:  # of a server, a disk or a library: not worth a run
                # A server's address may hold a password.
                reason = re.sub(r"//[^/\s]*@", "//", first_line(error))
                log.warning("track=%s failed, the run continues: %s: %s", tool, type(error).__name__, reason)
                del self._active[tool]
                with suppress(Exception):
                    tracker.end(None)


class TensorBoard:
    """An event file in the run's folder."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.tensorboard
        self._writer: Any = None
        self._closing: Any = None

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """Opens a new file in place of the old ones, and writes the metrics so far."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Everything is written again, since a file that was cut may lack the last rounds, or contain rounds
        # that are trained again. purge_step makes readers drop the old files, which are then removed: files
        # of the same second would have no order.
        before = list(self._path.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(self._path), purge_step=0)
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in parameters.items()}
        write_hparams: Any = hparams
        _, opening, self._closing = write_hparams(plain, {})
        self._writer.file_writer.add_summary(opening, 0)
        now = time.time()
        for i, metrics in enumerate(history):  # times as if the run had not been interrupted
            self._write(metrics, now - sum(later["seconds"] for later in history[i + 1 :]))
        self._writer.flush()
        for path in before:
            path.unlink(missing_ok=True)

    def evaluated(self, metrics: Metrics) -> None:
        """Adds a round and flushes."""
        self._write(metrics, time.time())
        self._writer.flush()

    def end(self, summary: Metrics | None) -> None:
        """Adds the final scores and closes the file."""
        if self._writer is None:
            return
        try:
            if summary is not None:
                for name, value in final_figures(summary).items():
                    self._writer.add_scalar(name, value, summary["rounds"])
                self._writer.file_writer.add_summary(self._closing, summary["rounds"])
        finally:
            self._writer.close()  # also ends its thread

    def _write(self, metrics: Metrics, when: float) -> None:
        for name, value in figures_of_round(metrics).items():
            self._writer.add_scalar(name, value, metrics["round"], when)


class MLflow:
    """A run at `MLFLOW_TRACKING_URI`; default: a database in the run's folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._client: Any = None
        self._run: str | None = None
        self._logged: set[int] = set()  # rounds in the log: none is written twice

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """Creates a run or resumes the one that the folder names, and adds the rounds it lacks."""
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)  # read on import, and for each request
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._folder.mlflow.mkdir(exist_ok=True)
        local = f"sqlite:///{(self._folder.mlflow / 'mlflow.db').absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        found = self._found()
        if found is None:
            label = label_of(self._folder)
            found = self._client.create_run(self._experiment(), run_name=label.name, tags=label.tags)
            write_text(self._folder.mlflow / "run-id", found.info.run_id)
        else:
            self._client.update_run(found.info.run_id, "RUNNING")
        self._run = found.info.run_id
        if not found.data.params:  # parameters can be written only once
            params = [Param(key, str(value)[:LONGEST]) for key, value in parameters.items()]
            for i in range(0, len(params), MOST):
                self._client.log_batch(self._run, params=params[i : i + MOST])
        self._logged = {metric.step for metric in self._client.get_metric_history(self._run, "seconds")}
        for metrics in history:
            self.evaluated(metrics)

    def evaluated(self, metrics: Metrics) -> None:
        """Adds a round."""
        if metrics["round"] not in self._logged:
            self._log(figures_of_round(metrics), metrics["round"])

    def end(self, summary: Metrics | None) -> None:
        """Adds the final scores, the curves and the model card; sets the status."""
        if self._run is None:
            return
        if summary is not None:
            self._log(final_figures(summary), summary["rounds"])
            for file in (self._folder.curves, self._folder.card):
                if file.exists():  # the picture may have failed
                    self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, "KILLED" if summary is None else "FINISHED")

    def _log(self, values: Mapping[str, float], t: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, t) for name, value in values.items()]
        for i in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics[i : i + MOST_METRICS])

    def _found(self) -> Any:
        """The run that the folder names; None if there is none, or this server does not know it."""
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
        """The id of the experiment of the runs; the first run creates it."""
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedhassle"
        at_server = os.environ.get("MLFLOW_TRACKING_URI")
        artefacts = None if at_server else (self._folder.mlflow / "artifacts").absolute().as_uri()
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artefacts))
            except MlflowException:  # another run may have created it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
