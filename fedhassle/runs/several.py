"""Several runs in one process: on a GPU side by side, so that small networks fill it; on a CPU in turn."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch

from fedhassle.settings.build import build_engine
from fedhassle.engine.gpu.streams import STREAMS
from fedhassle.runs.launch import Run, carry_out, heard
from fedhassle.runs.record import Step

E = TypeVar("E", bound=BaseException)

AT_ONCE = 12  # runs that share a GPU, where nobody says how many: each lane takes memory


class Begun(Protocol):
    """What an onlooker wants to know of a run that begins."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def rounds(self) -> int:
        """How long it is."""

    @property
    def headline(self) -> str:
        """The prediction that stands for it in a line."""


class Event(NamedTuple):
    """A run that begins, a round of it that ended, or its own end: with an error, or without one."""

    run: int  # by its place among the runs
    begun: Begun | None = None
    step: Step | None = None
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether this is the end of the run."""
        return self.begun is None and self.step is None


def carry_out_together(runs: Iterable[Run], width: int | None = None) -> Generator[Event]:
    """Trains all of them to the end, at most so many at once; what goes wrong in one stops no other.

    A run is taken from `runs` when its turn comes.
    """
    before = 0
    # The switches of PyTorch's libraries are one for a process: runs that want others wait for those before.
    for engine, group in itertools.groupby(runs, lambda run: build_engine(run.settings)):
        begun = 0
        with ExitStack() as stack:
            if engine.device.type == "cpu":
                events = in_turn(group)
            else:
                stack.enter_context(engine.active())
                stack.enter_context(heard())
                events = in_threads(group, width)
            for event in stack.enter_context(closing(events)):
                begun += event.begun is not None
                yield event._replace(run=before + event.run)
        before += begun


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work of this thread goes to a stream of its own."""
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
    """An error that does not keep alive what its run held: images, and on a GPU streams and graphs."""
    traceback.clear_frames(error.__traceback__)
    return error


def in_turn(runs: Iterable[Run]) -> Generator[Event]:
    """One run after another."""
    for i, run in enumerate(runs):
        error: Exception | None = None
        yield Event(i, begun=run)
        try:
            for step in carry_out(run):
                yield Event(i, step=step)
        except Exception as raised:
            error = without_locals(raised)
        yield Event(i, error=error)


def in_threads(runs: Iterable[Run], width: int | None = None) -> Generator[Event]:
    """So many runs at once, each in a thread and on streams of its own; when one ends, the next."""
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
                for step in carry_out(run, sharing):
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
    finally:  # an onlooker who leaves, by Ctrl-C for one, ends each run after its round
        stop.set()
        for thread in going.values():
            thread.join()
