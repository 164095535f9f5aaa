"""CUDA streams of one's own: PyTorch has 32 of a priority, and hands them out again from the start."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

EACH = 32  # streams that PyTorch has of a priority
USUAL, FIRST = 0, -1  # priorities, as CUDA counts them


class Streams:
    """Lends out each stream to one holder at a time: two that share one would record each other's work."""

    def __init__(self, make: Callable[[torch.device, int], torch.cuda.Stream]) -> None:
        self._make = make
        self._free: dict[tuple[torch.device, int], list[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()

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
            self._free[key] = [self._make(device, priority) for _ in range(EACH)]
        return self._free[key]


def made_by_torch(device: torch.device, priority: int) -> torch.cuda.Stream:
    """The next of PyTorch's streams."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


STREAMS = Streams(made_by_torch)
