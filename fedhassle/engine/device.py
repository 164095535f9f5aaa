"""The device to train on, with its precision, lanes and PyTorch's backend switches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

Precision = Literal["bf16", "tf32", "fp32"]

LANES = 8  # measured in docs/speed-log.md
STACK = 8  # measured in docs/speed.md


class Engine(NamedTuple):
    """Device and execution options of training."""

    device: torch.device
    precision: Precision = "fp32"  # of matrix products; weights, statistics and sums are always float32
    lanes: int = LANES  # maximum number of groups of jobs at once on a GPU
    compile: bool = False  # fuse the kernels of a step; takes about a minute
    deterministic: bool = False
    stack: int = 1  # number of seats of a group of jobs, which share each kernel

    def lowered(self) -> AbstractContextManager[Any]:
        """Runs matrix products in the engine's precision inside the block."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Sets PyTorch's backend switches for training inside the block, and restores them afterwards."""
        if self.deterministic:  # required by cuBLAS, which reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cudnn: Any = torch.backends.cudnn  # its stubs lack `conv`
        places = (cudnn.conv, torch.backends.cuda.matmul)
        before = cudnn.benchmark, cudnn.deterministic, *(place.fp32_precision for place in places)
        strict, lax = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        cudnn.benchmark, cudnn.deterministic = not self.deterministic, self.deterministic
        for place in places:
            place.fp32_precision = "ieee" if self.precision == "fp32" else "tf32"
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.deterministic = before[:2]
            for place, precision in zip(places, before[2:], strict=True):
                place.fp32_precision = precision
            if self.deterministic:  # else nothing has changed, and the call imports a compiler for seconds
                torch.use_deterministic_algorithms(strict, warn_only=lax)
