"""Several runs in one process: on a GPU side by side, so that small networks fill it; on a CPU in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch

from fedhassle.build import build_engine
from fedhassle.launch import Run, carry_out, heard
from fedhassle.runs import Step
from fedhassle.streams import STREAMS


class Event(NamedTuple):
    """A round of one of the runs that ended, or the run itself: with an error, or without one."""

    run: int  # by its place among the runs
    step: Step | None = None
    error: BaseException | None = None


def carry_out_together(runs: Sequence[Run]) -> Iterator[Event]:
    """Trains all of them to the end; what goes wrong in one does not stop the others."""
    engines = [build_engine(run.settings) for run in runs]
    # The switches of PyTorch's libraries are one for a process: runs that want others go one after another.
    if engines[0].device.type == "cpu" or len(set(engines)) > 1:
        yield from in_turn(runs)
        return
    with engines[0].active(), heard():
        yield from side_by_side(runs)


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


def in_turn(runs: Sequence[Run]) -> Iterator[Event]:
    """One run after another."""
    for i, run in enumerate(runs):
        error: Exception | None = None
        try:
            for step in carry_out(run):
                yield Event(i, step)
        except Exception as raised:
            error = raised
        yield Event(i, error=error)


def side_by_side(runs: Sequence[Run]) -> Iterator[Event]:
    """All runs at once, each in a thread and on streams of its own."""
    events: SimpleQueue[Event] = SimpleQueue()
    stop = threading.Event()

    def work(i: int, run: Run) -> None:
        error: BaseException | None = None
        try:
            with own_stream(run.device):
                for step in carry_out(run, sharing=len(runs)):
                    events.put(Event(i, step))
                    if stop.is_set():
                        break
        except BaseException as raised:
            error = raised
        events.put(Event(i, error=error))

    threads = [threading.Thread(target=work, args=pair, name=f"run {pair[0]}") for pair in enumerate(runs)]
    for thread in threads:
        thread.start()
    try:
        going = len(runs)
        while going:
            event = events.get()
            going -= event.step is None
            yield event
    finally:  # an onlooker who leaves, by Ctrl-C for one, ends each run after its round
        stop.set()
        for thread in threads:
            thread.join()
