"""A sweep whose runs share a GPU as processes under NVIDIA's MPS, for networks too small to fill it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedhassle.engine.cluster import LOCAL, require_ray
from fedhassle.engine.cores import available_cores
from fedhassle.errors import UserError, require
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.ray import RaySweep
from fedhassle.reproduce.sweep import RUNS, on_gpu

CONTROL = "nvidia-cuda-mps-control"
MOST = 16  # processes that share a GPU; more have not been tried


class ProcessSweep(RaySweep):
    """A sweep in which each cell trains in a process of its own on this machine's GPU."""

    def __init__(
        self,
        ledger: Ledger,
        cells: Sequence[Cell],
        runs: Path = RUNS,
        together: int | None = None,
        budget: float | None = None,
    ) -> None:
        super().__init__(LOCAL, ledger, cells, runs, together, budget)
        self._together = together or max(1, min(available_cores(), MOST, len(self.cells)))
        if self.cells:
            require(
                on_gpu(self.cells), "--processes shares a GPU, but these runs train on a CPU: use --ray local"
            )
            require_ray("--processes")
            require(
                shutil.which(CONTROL) is not None, f"--processes needs {CONTROL}, a part of NVIDIA's driver"
            )

    @property
    def about(self) -> str:
        """The machine, the device and the number of runs at once, in words."""
        return f"{super().about}, as processes under NVIDIA's MPS"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Starts MPS, and then the cluster, whose processes find it."""
        with mps(), super().opened():
            yield


@contextmanager
def mps() -> Iterator[None]:
    """Runs NVIDIA's MPS daemon inside the block, for the processes started there, unless one is running."""
    if answers():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            started = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, check=False)
            if started.returncode:
                said = (started.stderr or started.stdout).strip()
                raise UserError(f"{CONTROL} -d failed: {said}; without --processes no MPS is needed")
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
    """True if an MPS daemon is running where CUDA looks for it."""
    return control("get_server_list").returncode == 0


def control(word: str) -> subprocess.CompletedProcess[str]:
    """Sends a command to the MPS daemon."""
    return subprocess.run([CONTROL], input=f"{word}\n", capture_output=True, text=True, check=False)
