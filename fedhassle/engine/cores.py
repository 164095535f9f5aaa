"""Parallel work on the cores of a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
