"""The same from Python: one function that trains, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedhassle.launch import carry_out, reopen, start
from fedhassle.model import TrainedModel, load
from fedhassle.requested import request
from fedhassle.runs import Folder, Metrics, read_summary
from fedhassle.view import follow


class Result(NamedTuple):
    """A finished run."""

    folder: Path
    summary: Metrics

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """By prediction: the last accuracy, the best, and the mean of the last ten evaluations."""
        scores: dict[str, dict[str, float]] = self.summary["accuracy"]
        return scores

    @property
    def model(self) -> TrainedModel:
        """The model that came out."""
        return load(self.folder / "model.safetensors", allow_import=True)


def run(
    config: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Trains as `fedhassle run CONFIG KEY=VALUE …` does; keys of `settings` may be dotted.

    A run that was cut goes on if `out` is its folder and nothing else is asked for.
    """
    folder = Path(out) if out is not None else None
    if folder is not None and Folder(folder).begun and config is None and not settings:
        launched = reopen(folder)
    else:
        launched = start(request(config, settings or {}), folder)
    console = Console(quiet=quiet)
    follow(carry_out(launched), launched.settings.rounds, launched.method.headline, console)
    return Result(launched.folder.path, read_summary(launched.folder.path))
