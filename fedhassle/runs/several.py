"""Several runs: of small networks in processes, of large ones in threads on a GPU and in turn on a CPU."""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.streams import STREAMS
from fedhassle.errors import UserError
from fedhassle.runs import mps
from fedhassle.runs.events import Event
from fedhassle.runs.logs import info_level
from fedhassle.runs.processes import fills_a_gpu, gain_from_processes, in_processes, most_at_once
from fedhassle.runs.run import Run
from fedhassle.runs.train import train_run
from fedhassle.settings.build import build_engine

log = logging.getLogger("fedhassle")

E = TypeVar("E", bound=BaseException)

SIDE_BY_SIDE = 3  # default number of runs in threads on a GPU, if their rounds are too small to fill it


def train_several(runs: Iterable[Run], width: int | None = None) -> Generator[Event]:
    """Trains runs to their end, at most `width` at once; an error in one does not stop the others.

    A run is taken from `runs` only when it is its turn. Runs of small networks have a process each where that
    is possible. Others share this one: on a GPU side by side, on a CPU in turn, each with all cores.
    """
    before = 0
    for way, group in itertools.groupby(runs, way_of):
        begun = 0
        with ExitStack() as stack:
            events = stack.enter_context(closing(trained(way, group, width, stack)))
            for event in events:
                begun += event.begun is not None
                yield event._replace(run=before + event.run)
        before += begun


class Way(NamedTuple):
    """The way in which a run trains among others; runs that need another one wait for the earlier ones."""

    engine: Engine  # PyTorch's global switches hold for the whole process
    alone: bool  # in this process: on all cores of a CPU, or on workers that have all devices to themselves
    processes: int  # of small networks that fit on the device; 0: none
    threads: int  # runs at once in this process on a GPU, if nobody asks for another number


def way_of(run: Run) -> Way:
    """The way to train a run."""
    engine = build_engine(run.settings)
    alone = run.settings.distributed or engine.device.type == "cpu"
    try:
        processes = most_at_once(run) if gain_from_processes(run) else 0
        threads = 1 if fills_a_gpu(run) else SIDE_BY_SIDE
    except Exception:  # of a user's own method or network: this run ends with it, and no other
        processes, threads = 0, 1
    return Way(engine, alone, processes, threads)


def trained(way: Way, runs: Iterator[Run], width: int | None, stack: ExitStack) -> Generator[Event]:
    """Trains runs in the same way; the stack gets what has to be undone after them."""
    together = width or way.processes
    if way.processes and together > 1:
        first = list(itertools.islice(runs, together))
        runs = itertools.chain(first, runs)
        if len(first) > 1 and (way.alone or started(stack, mps.mps())):
            return in_processes(runs, len(first))
    if way.alone:
        return in_turn(runs)
    stack.enter_context(way.engine.active())
    stack.enter_context(info_level())
    return in_threads(runs, width or way.threads)


def started(stack: ExitStack, daemon: AbstractContextManager[None]) -> bool:
    """Starts the daemon that processes need on a GPU; if it does not start, says so and returns False."""
    try:
        stack.enter_context(daemon)
    except UserError as error:
        log.warning("%s; the runs share this process instead", error)
        return False
    return True


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


def in_threads(runs: Iterable[Run], width: int) -> Generator[Event]:
    """Trains `width` runs at once, each in a thread and on streams of its own."""
    events: SimpleQueue[Event] = SimpleQueue()
    stop = threading.Event()

    def work(i: int, run: Run) -> None:
        error: BaseException | None = None
        try:
            with own_stream(run.device):
                for step in train_run(run, width):
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
                yield Event(i, begun=run, together=width)
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
