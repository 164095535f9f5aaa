"""A GPU's memory: how much of it a process may take, and errors that say that it is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedhassle.errors import first_line

FOR_TENSORS = 0.9  # of a GPU's memory; each process takes some for its kernels, too


def share_memory(device: torch.device, processes: int) -> None:
    """Limits this process to its share of a GPU, so that it runs out of memory before the others do."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(FOR_TENSORS / processes)  # of the current device


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(free, allowed - torch.cuda.memory_reserved(device))


@contextmanager
def showing_lack_of_memory() -> Iterator[None]:
    """Raises `OutOfMemoryError` inside the block for any error that it caused.

    A compiled function, for example, replaces it by an error of the compiler.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise torch.OutOfMemoryError(first_line(error)) from error
        raise


def lacks_memory(error: BaseException | None) -> bool:
    """True if an error, or one of those that led to it, says that memory is full."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
