"""The events of several runs while they train, for those who watch them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fedhassle.runs.record import Step


class RunInfo(Protocol):
    """A run that begins, for those who watch it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def rounds(self) -> int:
        """The number of its rounds."""

    @property
    def headline(self) -> str:
        """The prediction that stands for it in a line."""


class Event(NamedTuple):
    """The beginning of a run, the end of one of its rounds, or its own end, perhaps with an error."""

    run: int  # its index among the runs
    begun: RunInfo | None = None
    step: Step | None = None
    error: BaseException | None = None
    together: int = 1  # at its beginning: the most runs that share its device

    @property
    def ended(self) -> bool:
        """True at the end of the run."""
        return self.begun is None and self.step is None
