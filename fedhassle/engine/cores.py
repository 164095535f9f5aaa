"""Parallel work on the cores of a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Parameters of glibc's `mallopt`, from malloc.h, and their values here.
KEEP = {
    -1: 2**30,  # M_TRIM_THRESHOLD: bytes at the end of the heap that it may keep for later
    -3: 2**30,  # M_MMAP_THRESHOLD: tensors of fewer bytes come from the heap
    -8: 1,  # M_ARENA_MAX: all threads share one heap
}


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory() -> None:
    """Lets this process keep the memory that it frees; does nothing where the C library is not glibc.

    By default glibc returns the memory of large tensors to the system, and each new tensor costs page faults:
    a quarter of the CPU time of a step.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is not None and hasattr(library, "mallopt"):
        for parameter, value in KEEP.items():
            library.mallopt(parameter, value)


@contextmanager
def on_cores(n: int) -> Iterator[None]:
    """Sets the number of PyTorch's threads to n inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(work: Callable[[T], R], items: Sequence[T], workers: int) -> list[R]:
    """Results of `work` for each item, in order, computed on `workers` threads; items start in order.

    Each call runs on one core: two threads that share an operation wait for each other, and on busy cores
    were measured up to ten times slower than one. So results do not depend on `workers` either.
    """
    if workers == 1 or len(items) < 2:
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, waiting items do not start
