"""How the runs of a sweep share a GPU: as threads of one process, or as processes under NVIDIA's MPS."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedhassle.engine.cluster import require_ray
from fedhassle.engine.cores import available_cores
from fedhassle.errors import UserError, require
from fedhassle.nets import Net
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.sweep import on_gpu
from fedhassle.runs.run import runnable
from fedhassle.settings.build import net_without_images

CONTROL = "nvidia-cuda-mps-control"
# Operations of a forward pass of one image: LeNet has 0.8 million, ResNet-8 390 million. One run of ResNet-8
# fills an H200; LeNet is bound by the process that feeds the GPU.
SMALL = 20_000_000
MOST = 16  # processes that share a GPU; more have not been tried


def processes_for(cells: Sequence[Cell], together: int | None, wanted: bool | None) -> int:
    """Number of processes, of one run each, that share the GPU; 0: the runs are threads of one process.

    By default networks decide: if all are small, there are as many processes as cores, and at most `MOST`.
    `wanted` and `together` are the user's choice, if not None.
    """
    if wanted:
        require(on_gpu(cells), "--processes shares a GPU, and these runs train on a CPU: use --ray local")
        require_ray("--processes")
        require(shutil.which(CONTROL) is not None, f"--processes needs {CONTROL}, a part of NVIDIA's driver")
    elif wanted is False or not (on_gpu(cells) and can_share()) or not small_networks(cells):
        return 0
    return together or max(1, min(available_cores(), MOST, len(cells)))


def can_share() -> bool:
    """True if several processes can use a GPU at the same time: MPS and Ray are installed."""
    return shutil.which(CONTROL) is not None and find_spec("ray") is not None


def small_networks(cells: Sequence[Cell]) -> bool:
    """True if no run of these cells fills a GPU by itself."""
    settings = [runnable(cell.requested) for cell in cells]
    distinct = {(one.net, one.data.name): one for one in settings}.values()
    return all(operations(net_without_images(one)) <= SMALL for one in distinct)


def operations(net: Net) -> int:
    """Number of floating-point operations of a forward pass of one image, in convolutions and products."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.logits(net.initial(0), torch.zeros(1, *net.shape))
    return int(counter.get_total_flops())


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
                raise UserError(
                    f"{CONTROL} -d failed: {(started.stderr or started.stdout).strip()}; "
                    "--threads does without it"
                )
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
