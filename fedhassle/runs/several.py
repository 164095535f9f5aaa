"""Several runs in one process: side by side on a GPU, which small networks do not fill; in turn on a CPU."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch

from fedhassle.engine.gpu.streams import STREAMS
from fedhassle.runs.logs import info_level
from fedhassle.runs.record import Step
from fedhassle.runs.run import Run
from fedhassle.runs.train import train_run
from fedhassle.settings.build import build_engine

E = TypeVar("E", bound=BaseException)

AT_ONCE = 12  # default number of runs on one GPU: each lane takes memory


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

    @property
    def ended(self) -> bool:
        """True at the end of the run."""
        return self.begun is None and self.step is None


def train_several(runs: Iterable[Run], width: int | None = None) -> Generator[Event]:
    """Trains runs to their end, at most `width` at once; an error in one does not stop the others.

    A run is taken from `runs` only when it is its turn.
    """
    before = 0
    # PyTorch's global switches hold for the whole process: runs that need others wait for the earlier ones.
    # A run with workers has all devices to itself.
    kinds = itertools.groupby(runs, lambda run: (build_engine(run.settings), run.settings.distributed))
    for (engine, distributed), group in kinds:
        begun = 0
        with ExitStack() as stack:
            if distributed or engine.device.type == "cpu":
                events = in_turn(group)
            else:
                stack.enter_context(engine.active())
                stack.enter_context(info_level())
                events = in_threads(group, width)
            for event in stack.enter_context(closing(events)):
                begun += event.begun is not None
                yield event._replace(run=before + event.run)
        before += begun


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Gives this thread a CUDA stream of its own."""
    stream = STREAMS.take(device) if device.type == "cuda" else None
    if stream is None:
        yield
        return
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        STREAMS.give_back(stream)


def without_locals(error: E) -> E:
    """An error whose traceback does not keep images, streams and graphs of its run alive."""
    traceback.clear_frames(error.__traceback__)
    return error


def in_turn(runs: Iterable[Run]) -> Generator[Event]:
    """Trains one run after another."""
    for i, run in enumerate(runs):
        error: Exception | None = None
        yield Event(i, begun=run)
        try:
            for step in train_run(run):
                yield Event(i, step=step)
        except Exception as raised:
            error = without_locals(raised)
        yield Event(i, error=error)


def in_threads(runs: Iterable[Run], width: int | None = None) -> Generator[Event]:
    """Trains `width` runs at once, each in a thread and on streams of its own."""
    if width is None:
        runs = list(runs)
        width = max(1, min(len(runs), AT_ONCE))
    sharing = width
    events: SimpleQueue[Event] = SimpleQueue()
    stop = threading.Event()

    def work(i: int, run: Run) -> None:
        error: BaseException | None = None
        try:
            with own_stream(run.device):
                for step in train_run(run, sharing):
                    events.put(Event(i, step=step))
                    if stop.is_set():
                        break
        except BaseException as raised:
            error = without_locals(raised)
        events.put(Event(i, error=error))

    waiting, going = enumerate(runs), dict[int, threading.Thread]()
    try:
        while True:
            for i, run in itertools.islice(waiting, width - len(going)):
                yield Event(i, begun=run)
                going[i] = threading.Thread(target=work, args=(i, run), name=f"run {i}")
                going[i].start()
            if not going:
                return
            event = events.get()
            if event.ended:
                going.pop(event.run).join()
            yield event
    finally:  # if the caller stops, by Ctrl-C for example, each run ends after its round
        stop.set()
        for thread in going.values():
            thread.join()
