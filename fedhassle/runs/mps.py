"""NVIDIA's MPS: the daemon through which several processes use a GPU at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from fedhassle.errors import UserError

CONTROL = "nvidia-cuda-mps-control"  # a part of NVIDIA's driver for Linux


def available() -> bool:
    """True if this machine has the daemon's program."""
    return shutil.which(CONTROL) is not None


@contextmanager
def mps() -> Iterator[None]:
    """Runs the daemon inside the block, for the processes started there, unless one is running."""
    if answers():
        yield
        return
    # The daemon may still be writing to its folder when it has been told to end.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            started = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, check=False)
            if started.returncode:
                said = (started.stderr or started.stdout).strip()
                raise UserError(f"{CONTROL} -d failed: {said}")
            try:
                yield
            finally:
                control("quit")
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def answers() -> bool:
    """True if a daemon is running where CUDA looks for it."""
    return control("get_server_list").returncode == 0


def control(word: str) -> subprocess.CompletedProcess[str]:
    """Sends a command to the daemon."""
    return subprocess.run([CONTROL], input=f"{word}\n", capture_output=True, text=True, check=False)
