"""What runs on one GPU must share: its streams, and the quiet that a capture needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

EACH = 32  # streams that PyTorch has of a priority
USUAL, FIRST = 0, -1  # priorities, as CUDA counts them


class Streams:
    """Lends out each stream to one holder at a time: two that share one would record each other's work.

    PyTorch has a few of each priority, and hands them out again from the start.
    """

    def __init__(self, make: Callable[[torch.device, int], torch.cuda.Stream]) -> None:
        self._make = make
        self._free: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}
        self._lock = threading.RLock()  # a lane that the collector frees gives its stream back, at any time

    def take(self, device: torch.device, priority: int = USUAL) -> torch.cuda.Stream | None:
        """A stream of this priority, else of the other; None where all are lent."""
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())  # type: ignore[unreachable]
        with self._lock:
            for wanted in (priority, USUAL + FIRST - priority):
                free = self._of(device, wanted)
                if free:
                    return free.pop()
        return None

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """What is still queued on it comes before all that its next holder does."""
        with self._lock:
            self._of(stream.device, stream.priority).append(stream)

    def _of(self, device: torch.device, priority: int) -> list[torch.cuda.Stream]:
        key = (device, priority)
        if key not in self._free:
            self._free.setdefault(key, [self._make(device, priority) for _ in range(EACH)])
        return self._free[key]


def made_by_torch(device: torch.device, priority: int) -> torch.cuda.Stream:
    """The next of PyTorch's streams."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


STREAMS = Streams(made_by_torch)


class Quiet:
    """Either one thread captures, or any number do what may make the whole device wait; never both.

    A library that tries out its kernels on new shapes waits for the device. CUDA refuses that while any
    stream is being captured, and spoils the capture.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing = False
        self._wanted = 0  # captures that wait
        self._noisy = 0  # threads
        self._depth = threading.local()

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Here networks may run eagerly."""
        depth = getattr(self._depth, "n", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._capturing and not self._wanted)
                self._noisy += 1
        self._depth.n = depth + 1
        try:
            yield
        finally:
            self._depth.n = depth
            if not depth:
                with self._changed:
                    self._noisy -= 1
                    self._changed.notify_all()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Here a stream may be captured; not from within `broken`, which it would wait for."""
        with self._changed:
            self._wanted += 1
            self._changed.wait_for(lambda: not self._capturing and not self._noisy)
            self._wanted -= 1
            self._capturing = True
        try:
            yield
        finally:
            with self._changed:
                self._capturing = False
                self._changed.notify_all()


QUIET = Quiet()
