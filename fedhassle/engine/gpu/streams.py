"""CUDA streams, each lent to one lane at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

EACH = 32  # streams per priority in PyTorch's pool
USUAL, FIRST = 0, -1  # priorities, as CUDA numbers them


class Streams:
    """Lends each stream to one holder at a time, since two holders would capture each other's work.

    PyTorch has a fixed pool of streams per priority and hands them out in rotation.
    """

    def __init__(self, make: Callable[[torch.device, int], torch.cuda.Stream]) -> None:
        self._make = make
        self._free: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}
        self._lock = threading.RLock()  # garbage collection of a lane may return its stream at any time

    def take(self, device: torch.device, priority: int = USUAL) -> torch.cuda.Stream | None:
        """Takes a stream of this priority, or of the other if none is free; None if all are lent."""
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())  # type: ignore[unreachable]
        with self._lock:
            for wanted in (priority, USUAL + FIRST - priority):
                free = self._of(device, wanted)
                if free:
                    return free.pop()
        return None

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Returns a stream; work still queued on it runs before that of its next holder."""
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
