"""Ends a process with everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

GRACE = 10.0  # seconds that a process has to end after SIGTERM


def end(process: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """Ends a process, then the rest of its group, and its descendants that have left the group.

    Each gets SIGTERM and, after `grace` seconds, SIGKILL. The group is the one that the process leads, so
    never this process's own; if it leads none, no group has its number.
    """
    group, below = process.pid, descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for force in (signal.SIGTERM, signal.SIGKILL):
        for one in survivors(group, below):
            with suppress(psutil.Error):
                one.send_signal(force)
        deadline = time.monotonic() + grace
        while survivors(group, below) and time.monotonic() < deadline:
            time.sleep(0.05)


def descendants(pid: int) -> list[psutil.Process]:
    """The children of a process, their children, and so on; none of a process that has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def survivors(group: int, below: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The living processes of a group, and those of `below`."""
    members = [one for one in psutil.process_iter() if group_of(one) == group]
    return {one for one in (*below, *members) if is_alive(one)}


def group_of(process: psutil.Process) -> int | None:
    """The number of a process's group; None for a process that has ended."""
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def is_alive(process: psutil.Process) -> bool:
    """True for a process that runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
