"""A sweep: trains the cells that the ledger lacks, several at once, and resumes interrupted runs."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedhassle.engine.tensor_files import round_files
from fedhassle.errors import BusyError, UserError, require
from fedhassle.files import LOCK, locked, remove_stale_lock
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.ledger import Ledger
from fedhassle.runs.events import Event
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, read_summary
from fedhassle.runs.resume import reopen, stored_device
from fedhassle.runs.run import Identity, Load, Loader, Run, start
from fedhassle.runs.several import train_several
from fedhassle.settings.build import build_dataset
from fedhassle.settings.hashing import settings_hash

log = logging.getLogger("fedhassle")

J = TypeVar("J")  # a job: a cell that is ready to train

RUNS = Path("runs/reproduce")


@dataclass(frozen=True)
class LockedCell:
    """A cell in training, and the lock that keeps other processes away from it."""

    cell: Cell
    lock: ExitStack
    together: int = 1  # the most runs that share its device


class BudgetClock:
    """Tracks a time budget, and how long rounds and starts of runs take."""

    def __init__(self, budget: float | None) -> None:
        self._end = None if budget is None else time.monotonic() + budget
        self._since: dict[int, float] = {}  # when a run began, or ended its last round
        self._rounds: dict[int, float] = {}  # seconds of the last round of each run; 0 for its first one
        self._start = 0.0  # the longest time to the end of a first round, which includes compilation

    def note(self, event: Event) -> None:
        """Records the time of an event."""
        now = time.monotonic()
        took = now - self._since.get(event.run, now)
        self._since[event.run] = now
        if event.ended:
            self._rounds.pop(event.run, None)
        elif event.step is not None and event.run in self._rounds:
            self._rounds[event.run] = took
        elif event.step is not None:
            self._rounds[event.run] = 0.0
            self._start = max(self._start, took)

    def allows_round(self) -> bool:
        """True if another round of each run ends in time."""
        return self._allows(max(self._rounds.values(), default=0.0))

    def allows_start(self) -> bool:
        """True if a new run completes a round in time; it can be resumed later."""
        return self._allows(self._start)

    def _allows(self, seconds: float) -> bool:
        return self._end is None or time.monotonic() + seconds < self._end


class Sweep:
    """Trains the cells that a ledger lacks and adds their results to it."""

    def __init__(
        self,
        ledger: Ledger,
        cells: Sequence[Cell],
        runs: Path = RUNS,
        together: int | None = None,
        budget: float | None = None,
    ) -> None:
        self.ledger, self.runs = ledger, runs
        distinct: dict[tuple[str, int], Cell] = {}
        for cell in cells:
            distinct.setdefault(cell.identity.key, cell)
        self.cells = [cell for cell in distinct.values() if cell.identity not in ledger]
        self.known = [cell for cell in distinct.values() if cell.identity in ledger]
        self.together = together
        self.done: list[Cell] = []
        self.failed: list[tuple[Cell, BaseException]] = []
        self.barred: list[BaseException] = []  # errors of cells that lack the same images as a failed one
        self._elsewhere: list[Cell] = []  # cells that another process had locked when their turn came
        self._clock = BudgetClock(budget)
        self._load = Loader()
        self._taken: list[LockedCell] = []  # by the index of the run
        self._going: set[int] = set()  # indices of the runs in training

    @property
    def about(self) -> str:
        """The device and the number of runs at once, if it is known before they begin, in words."""
        width = "" if self.together is None else f", at most {self.together} at once"
        return f"on {self.cells[0].identity.device}{width}"

    @property
    def left(self) -> list[Cell]:
        """The cells that the ledger still lacks, for whatever reason."""
        self.ledger.refresh()
        return [cell for cell in self.cells if cell.identity not in self.ledger]

    @property
    def elsewhere(self) -> list[Cell]:
        """The missing cells that another process was training when this one finished."""
        return [cell for cell in self.left if cell in self._elsewhere]

    @property
    def cut(self) -> list[tuple[Cell, int]]:
        """The interrupted cells that no process is training, with the round of their last checkpoint."""
        others = [*self._elsewhere, *(cell for cell, _ in self.failed)]
        begun = [
            (cell, round_files(Folder(self._home(cell)).checkpoints))
            for cell in self.left
            if cell not in others
        ]
        return [(cell, max(files)) for cell, files in begun if files]

    def cell(self, event: Event) -> Cell:
        """The cell of an event."""
        return self._taken[event.run].cell

    def seconds(self, run: Identity) -> float | None:
        """The expected duration of a run, from earlier runs."""
        return self.ledger.seconds(run)

    def opened(self) -> AbstractContextManager[None]:
        """The context in which the sweep runs; nothing is needed in this process."""
        return nullcontext()

    def tidy(self) -> None:
        """Removes what processes that were killed after they had added a result have left of its run."""
        for cell in self.known:
            folder, lock = Folder(self._home(cell)), self._lock(cell)
            parts = (lock, folder.path / LOCK, folder.checkpoints, folder.memory)
            if any(part.exists() for part in parts):
                with suppress(BusyError), locked(lock):
                    if folder.finished:
                        clear(folder)

    def carry_out(self) -> Generator[Event]:
        """Trains cell after cell, as long as the budget allows."""
        events = self._events()
        try:
            for event in events:
                self._note(event)
                yield event
                if not self._clock.allows_round():
                    return
        finally:
            events.close()  # ends each run after its round, before its lock is released
            for place in list(self._going):
                self._settle(place)

    def _events(self) -> Generator[Event]:
        """The events of the training; closing the generator ends each run after its round."""
        return train_several(self._ready(partial(prepare, load=self._load)), self.together)

    def _ready(self, make: Callable[[Cell, Folder], J]) -> Generator[J]:
        """The jobs of the cells, each prepared when its turn comes; locked cells are retried once."""
        yield from self._ready_of(self.cells, make)
        again, self._elsewhere = self._elsewhere, []
        yield from self._ready_of(again, make)

    def _ready_of(self, cells: Sequence[Cell], make: Callable[[Cell, Folder], J]) -> Iterator[J]:
        for cell in cells:
            if not self._clock.allows_start():
                return
            job = self._take(cell, make)
            if job is not None:
                yield job

    def _take(self, cell: Cell, make: Callable[[Cell, Folder], J]) -> J | None:
        """Prepares a cell under its lock; None if it is done, locked by another process, or fails."""
        with ExitStack() as stack:
            try:
                lock = self._lock(cell)
                lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(lock))
            except BusyError:  # another process trains it, or has just finished it
                self._elsewhere.append(cell)
                return None
            self.ledger.refresh()
            if cell.identity in self.ledger:
                return None
            try:
                summary = self._result(cell)
                if summary is not None:  # its process ended before it could write to the ledger
                    self._keep(cell, summary)
                    return None
                job = make(cell, Folder(self._home(cell)))
            except Exception as error:
                self._give_up(cell, error)
                return None
            self._going.add(len(self._taken))
            self._taken.append(LockedCell(cell, stack.pop_all()))
            return job

    def _give_up(self, cell: Cell, error: Exception) -> None:
        """Records a cell that cannot start; logs it unless `Loader` raised the same error before."""
        if any(error is known for _, known in self.failed):
            self.barred.append(error)
            return
        log.warning("%s cannot be run: %s", cell, error)
        self.failed.append((cell, error))

    def _note(self, event: Event) -> None:
        """Updates the clock and the results after an event."""
        self._clock.note(event)
        if event.begun is not None:
            self._taken[event.run] = replace(self._taken[event.run], together=event.together)
        if event.ended:
            if event.error is not None:
                self.failed.append((self.cell(event), event.error))
            self._settle(event.run)

    def _settle(self, place: int) -> None:
        """Adds the result of a run to the ledger, if it has one, and releases its lock."""
        self._going.discard(place)
        held = self._taken[place]
        with held.lock:
            try:
                summary = self._result(held.cell)
                if summary is not None:
                    self._keep(held.cell, summary, held.together)
            except UserError as error:
                self.failed.append((held.cell, error))

    def _result(self, cell: Cell) -> Metrics | None:
        """The summary of a cell's run; None if it is not finished."""
        return summary_of(cell, Folder(self._home(cell)))

    def _keep(self, cell: Cell, summary: Metrics, together: int = 1) -> None:
        """Adds a finished run to the ledger, then removes its checkpoints and its lock."""
        self.ledger.add(summary, min(together, len(self.cells)))
        self.done.append(cell)
        clear(Folder(self._home(cell)))

    def _home(self, cell: Cell) -> Path:
        """The run folder of a cell, the same for all experiments that share the run."""
        return self.runs / f"{cell.identity.settings_hash[:8]}-{cell.seed}"

    def _lock(self, cell: Cell) -> Path:
        """The file that a process locks while it works on a cell."""
        return self._home(cell).with_suffix(LOCK)


def prepare(cell: Cell, folder: Folder, load: Load = build_dataset) -> Run:
    """The run of a cell, new or resumed, on the device that is requested now."""
    if not folder.begun:
        return start(cell.requested, folder.path, load)
    run = reopen(folder.path, stored_device(cell.requested), load)
    require_own(cell, folder.path, (settings_hash(run.settings, run.dataset, run.split), run.settings.seed))
    return run


def summary_of(cell: Cell, folder: Folder) -> Metrics | None:
    """The summary in the folder of a cell's run; None if there is none."""
    if not folder.summary.exists():
        return None
    summary = read_summary(folder.path)
    require_own(cell, folder.path, (summary["settings_hash"], summary["seed"]))
    return summary


def clear(folder: Folder) -> None:
    """Removes the files that only an unfinished run needs, and the lock file of a killed process."""
    remove_stale_lock(folder.path)
    for part in (folder.checkpoints, folder.memory):
        shutil.rmtree(part, ignore_errors=True)


def require_own(cell: Cell, path: Path, key: tuple[str, int]) -> None:
    """Refuses the folder of another run."""
    require(key == cell.identity.key, f"{path} holds another run than {cell.key}: move it away")
