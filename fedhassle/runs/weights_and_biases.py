"""A log of a run at Weights & Biases, or offline in the run's folder."""

from __future__ import annotations

import netrc
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlparse

from fedhassle.files import write_text
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics
from fedhassle.runs.tracked import figures_of_round, final_figures, label_of

# Defaults that a user can override: no reports of errors, no chatter on the screen, and nothing about the
# code and the output of the program.
DEFAULTS = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
}


class WeightsAndBiases:
    """A run in the project `WANDB_PROJECT`; offline if nobody is logged in, or `WANDB_MODE` says so."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._run: Any = None
        self._logged = 0  # the last round in the log: none is written twice

    def begin(self, parameters: Mapping[str, Any], history: Sequence[Metrics]) -> None:
        """Creates a run or resumes the one that the folder names, and adds the rounds it lacks."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import wandb

        mode, label, home = chosen_mode(), label_of(self._folder), self._folder.wandb
        home.mkdir(exist_ok=True)
        if mode == "offline":  # a log that was cut may lack rounds: all of it is written anew
            for old in home.glob("wandb/offline-run-*"):
                shutil.rmtree(old)
        init: Any = wandb.init  # its types know fewer modes than it has
        self._run = init(
            project=os.environ.get("WANDB_PROJECT") or "fedhassle",
            dir=str(home.absolute()),
            id=self._id(),
            name=label.name,
            group=label.group,
            tags=[f"{key}={value}"[:64] for key, value in label.tags.items() if key != "group"],
            config=dict(parameters),
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="create_new",  # runs that train side by side in one process
        )
        self._logged = self._run.step - 1 if self._run.resumed else 0
        for metrics in history:
            self.evaluated(metrics)

    def evaluated(self, metrics: Metrics) -> None:
        """Adds a round."""
        if metrics["round"] > self._logged:
            self._run.log(figures_of_round(metrics), step=metrics["round"])

    def end(self, summary: Metrics | None) -> None:
        """Adds the final scores and ends the log; a run that was cut counts as failed."""
        if self._run is None:
            return
        if summary is not None:
            self._run.summary.update(final_figures(summary))
        self._run.finish(exit_code=1 if summary is None else 0)

    def _id(self) -> str:
        """The id of the run, which its folder keeps; a new one at first."""
        file = self._folder.wandb / "run-id"
        if not file.exists():
            write_text(file, uuid.uuid4().hex[:16])
        return file.read_text("utf-8")


def chosen_mode() -> str:
    """The mode that a user chose; or online if somebody is logged in: nobody is asked for a key."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return "online" if netrc.netrc().authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"
