"""Captures of CUDA graphs, kept apart from networks that run in other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureLock:
    """Keeps networks that run eagerly apart from CUDA graph captures in other threads.

    A library that times its kernels on new shapes waits for the whole device. CUDA forbids that during a
    capture, and invalidates the capture. So either one thread captures, or any number of threads run
    networks.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing = False
        self._waiting = 0  # captures
        self._eager = 0  # threads
        self._depth = threading.local()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Waits until no graph is being captured; networks may run in the block. Re-entrant."""
        depth = getattr(self._depth, "n", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._capturing and not self._waiting)
                self._eager += 1
        self._depth.n = depth + 1
        try:
            yield
        finally:
            self._depth.n = depth
            if not depth:
                with self._changed:
                    self._eager -= 1
                    self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Waits until no other thread runs networks; a graph may be captured in the block.

        Within it `eager` does not wait. Must not be entered within `eager`, for which it would wait forever.
        """
        assert not getattr(self._depth, "n", 0)
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._capturing and not self._eager)
            finally:  # by Ctrl-C, too: other threads wait until nobody waits to capture
                self._waiting -= 1
                self._changed.notify_all()
            self._capturing = True
        self._depth.n = 1
        try:
            yield
        finally:
            self._depth.n = 0
            with self._changed:
                self._capturing = False
                self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()
