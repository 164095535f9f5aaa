"""Commands in which one file operation fails: a kill, half a write, a full disk, an error of the disk.

Operations are those on files below one folder. Python reports most of them to audit hooks, which may raise or
kill; writes and fsync it does not report, so `open` and `os.fsync` are replaced. A hook cannot be removed:
each command runs in a fork of a process that has imported and warmed up everything.
"""

import builtins
import contextlib
import errno
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import small
import torch
from matplotlib.figure import Figure

from fedhassle.engine import simulator

CREATES = {"open", "write", "fsync", "mkdir", "rename"}  # operations that need space on the disk
CHANGES = CREATES | {"remove", "rmdir"}
READS = {"read", "list"}
KINDS = {  # the operations that each kind of fault can hit
    "kill": CHANGES,  # before the operation
    "half": {"write"},  # a kill after half of the bytes
    "full": CREATES,  # from this operation on; of a first write half of the bytes fit
    "error": CHANGES | READS,  # only this operation
}
EVENTS = {  # audit events by operation
    **{"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir"},
    **{"os.listdir": "list", "os.scandir": "list"},
}


class Fault(NamedTuple):
    """A kind of fault, and the number of the operation that it hits."""

    kind: str
    n: int


class Outcome(NamedTuple):
    """The end of a command; a killed one has neither output nor operations."""

    code: int | None  # None for an exception that no command expects
    output: str = ""
    operations: tuple[tuple[str, str], ...] = ()  # each with the name of its file


class Raw(io.FileIO):
    """A file that reports its writes."""

    def write(self, data):
        faults = ACTIVE[-1]
        if (fault := faults.due("write", self.name)) is not None:
            super().write(memoryview(data)[: len(data) // 2] if fault != "error" else b"")
            faults.strike(fault, self.name)
        return super().write(data)


class Faults:
    """The operations of this process below a folder, and the one that fails."""

    def __init__(self, folder, fault):
        self.folder, self.fault, self.operations = str(folder), fault, []

    def due(self, what, path):
        """Counts an operation; returns the kind of fault that hits it, if any."""
        name = "" if path is None or isinstance(path, int) else Path(os.fsdecode(path)).name
        self.operations.append((what, re.sub("[0-9a-f]{8,}", "…", name)))
        if self.fault is None or what not in KINDS[self.fault.kind]:
            return None
        n = len(self.operations) - 1
        hit = n >= self.fault.n if self.fault.kind == "full" else n == self.fault.n
        return self.fault.kind if hit else None

    def strike(self, kind, path):
        """Kills the process, or raises the error of the disk."""
        if kind in ("kill", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.ENOSPC if kind == "full" else errno.EIO
        raise OSError(code, os.strerror(code), path if isinstance(path, str) else None)

    def meet(self, what, path):
        """Counts an operation, which may fail."""
        if (kind := self.due(what, path)) is not None:
            self.strike(kind, path)

    def here(self, path, folder=-1):
        """True for a path below the folder; one relative to an open folder is."""
        if isinstance(path, int):
            return path > 2
        return folder not in (-1, None) or os.fsdecode(path).startswith(self.folder)

    def hook(self, event, args):
        """The audit hook."""
        if event == "open" and not isinstance(args[0], int) and self.here(args[0]):
            self.meet("open" if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "read", args[0])
        elif event in EVENTS and args and args[0] is not None:
            folder = args[-1] if event in ("os.remove", "os.rmdir") else -1
            path = args[1] if event == "os.rename" else args[0]
            if self.here(path, folder):
                self.meet(EVENTS[event], path)

    def open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest):
        """Opens files to be written below the folder as `Raw` ones."""
        if not set("wax+") & set(mode) or isinstance(file, int) or not self.here(file):
            return OPEN(file, mode, buffering, encoding, errors, newline, *rest)
        raw = Raw(os.fspath(file), mode.replace("b", "").replace("t", ""), *rest)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def fsync(self, descriptor):
        """Counts and does it."""
        self.meet("fsync", None)
        FSYNC(descriptor)


OPEN, FSYNC = builtins.open, os.fsync
ACTIVE = []  # the faults of this process, once it has any


def inject(folder, fault):
    """Counts the operations of this process from now on, one of which may fail."""
    faults = Faults(folder, fault)
    ACTIVE.append(faults)

    def opened(
        file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None
    ):
        return faults.open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    io.open = builtins.open = opened
    os.fsync = faults.fsync
    sys.addaudithook(faults.hook)
    return faults


def outcome(words, folder, fault):
    """Runs a command in this process."""
    faults = inject(folder, fault)
    try:
        code, out, err = small.call(*words)
    except Exception:
        code, out, err = None, "", traceback.format_exc()
    return Outcome(code, out + err, tuple(faults.operations))


def in_a_fork(words, folder, fault):
    """Runs a command in a fork of this process; it may be killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        result = outcome(words, folder, fault)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(told) if told else Outcome(os.waitstatus_to_exitcode(status))


def serve(connection, warm_up):
    """The process that forks: runs commands until the connection ends."""
    torch.set_num_threads(1)
    simulator.WRITERS = 1  # clients save their state one after another: operations have an order
    Figure.savefig = lambda figure, path, **options: Path(path).write_bytes(small.PNG)  # half of the time
    small.call(*warm_up)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(in_a_fork(*connection.recv()))


class Commands:
    """Commands that run one at a time, each in a fresh process, within a fraction of a second."""

    def __init__(self, *warm_up):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, warm_up), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, *words, folder, fault=None):
        """Returns the outcome of a command."""
        self.connection.send(([str(word) for word in words], folder, fault))
        assert self.connection.poll(small.LIMIT), "the process hangs"
        return self.connection.recv()

    def close(self):
        """Ends the process."""
        self.connection.close()
        self.process.join(small.LIMIT)
