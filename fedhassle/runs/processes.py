"""Several runs at once, each in a process of its own, for small networks.

The Python code of one process feeds a GPU with about as many small kernels as it can. More processes feed it
more, and NVIDIA's MPS lets their kernels run side by side. On a CPU, a run trains one client per core: cores
wait for the longest client of a round, and threads for Python's lock. A run with a core to itself waits for
neither.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from fedhassle.engine.cores import available_cores
from fedhassle.engine.simulator import clients_of
from fedhassle.errors import UserError
from fedhassle.names import SESSION
from fedhassle.runs import mps
from fedhassle.runs.events import Event
from fedhassle.runs.run import Run
from fedhassle.settings.hashing import own_code_of

MOST = 16  # processes that share a CPU; more have not been tried
ON_A_GPU = 8  # processes that share a GPU; 16 make no more rounds (docs/speed.md)
MEMORY = 8e9  # bytes of a GPU that a process may need beside its images: HASSLE with LeNet took 3.6 GB
WORTH = 1e12  # operations of a run on a CPU, below which its process would take too long to start: about 10 s
FULL = 1.5e14  # operations of a round that fill an H200, for about half a second
ENTRY = "fedhassle.runs.process"  # the module that a process runs


class Task(NamedTuple):
    """A run for another process."""

    place: int  # its index among the runs
    folder: Path
    settings: dict[str, Any]  # as config.toml has them
    share: int  # the number of runs that share the cores of a CPU


@dataclass(frozen=True)
class Child:
    """A process that trains a run, seen from the one that started it."""

    place: int
    run: str  # its name
    process: subprocess.Popen[bytes]
    line: Connection  # events and log records come back on it; anything sent asks the run to stop
    errors: IO[bytes]  # what it prints


# Which runs


def gain_from_processes(run: Run) -> bool:
    """True if a run gains from sharing its device with other processes, and can be sent to one."""
    if run.settings.distributed or uses_session(run):
        return False
    if not all(net.is_small for net in run.method.networks().values()):
        return False
    if run.device.type == "cuda":
        return mps.available()
    return os.name == "posix" and run.settings.threads > 1 and operations_of(run) > WORTH


def fills_a_gpu(run: Run) -> bool:
    """True if its rounds are so large that other runs beside it would gain nothing."""
    return operations_of(run) > FULL * run.rounds


def operations_of(run: Run) -> float:
    """Multiplications and additions of a run, if it trains the largest of its networks on all images."""
    return 3 * max(net.operations for net in run.method.networks().values()) * images_seen(run)


def images_seen(run: Run) -> float:
    """The number of images in all batches of a run, if each of its rounds were as its last one."""
    clients = clients_of(run.split)
    of_everybody = sum(
        phase.length(client) * phase.images
        for client in clients
        for phase in run.method.phases(client, run.rounds)
    )
    return run.rounds * run.settings.clients_per_round / len(clients) * of_everybody


def uses_session(run: Run) -> bool:
    """True if a run has code of a notebook or session, which another process cannot import."""
    return any(name.startswith(f"{SESSION}:") for name in own_code_of(run.settings))


def most_at_once(run: Run) -> int:
    """The number of processes that fit: one per core, as long as a GPU has memory for all."""
    if run.device.type == "cpu":
        return min(run.settings.threads, MOST)
    memory = torch.cuda.get_device_properties(run.device).total_memory
    return max(1, min(available_cores(), ON_A_GPU, int(memory / (MEMORY + run.dataset.x_train.nbytes))))


# Training them


def in_processes(runs: Iterable[Run], width: int) -> Generator[Event]:
    """Trains `width` runs at once, each in a process of its own."""
    waiting, going = enumerate(runs), list[Child]()
    try:
        while True:
            while len(going) < width and (following := next(waiting, None)) is not None:
                i, run = following
                yield Event(i, begun=run, together=width)
                try:
                    going.append(begun(Task(i, run.folder.path, run.settings.as_toml(), width), run.name))
                except OSError as error:  # no memory, or too many processes: the others go on
                    yield Event(i, error=error)
            if not going:
                return
            ready = wait([child.line for child in going])
            for child in [child for child in going if child.line in ready]:
                event = received(child)
                if event is None:
                    continue
                if event.ended:
                    going.remove(child)
                    end(child)
                yield event
    finally:  # if the caller stops, by Ctrl-C for example, each run ends after its round
        for child in going:
            stop(child)
        for child in going:
            while (event := received(child)) is None or not event.ended:
                pass
            end(child)


def begun(task: Task, name: str) -> Child:
    """Starts a process for a run."""
    cores = str(max(1, available_cores() // task.share))
    limits = {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores}
    with ExitStack() as opened:
        ours, theirs = map(opened.enter_context, Pipe())
        errors = opened.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", ENTRY, str(theirs.fileno())],  # -P: imports as in this process
            env=os.environ | limits | {"PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            process_group=0,  # Ctrl-C in a terminal is for this process, which asks the others to stop
        )
        opened.pop_all()  # `end` closes them
    theirs.close()
    with suppress(ConnectionError):  # if it has died already, `received` says why
        ours.send(task)
    return Child(task.place, name, process, ours, errors)


def received(child: Child) -> Event | None:
    """The next event of a process, an error if it died; None for a log record, which is passed on."""
    try:
        news: Event | logging.LogRecord = child.line.recv()
    except (EOFError, ConnectionError):
        code = child.process.wait()
        return Event(child.place, error=UserError(f"{child.run}: {how_it_died(code, child.errors)}"))
    if isinstance(news, Event):
        return news
    logging.getLogger(news.name).handle(news)
    return None


def how_it_died(code: int, errors: IO[bytes]) -> str:
    """The end of a process in a line."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"its process ended with exit code {code}" + (f": {lines[-1].strip()}" if lines else "")


def stop(child: Child) -> None:
    """Asks a run to stop after its round."""
    with suppress(OSError):  # it has just ended
        child.line.send(None)


def end(child: Child) -> None:
    """Waits for the end of a process that has sent its last event."""
    child.line.close()
    child.process.wait()
    child.errors.close()
