"""Threads that decode pictures: how many pixels they may hold at once, and their silence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock
from warnings import catch_warnings, filterwarnings

from PIL import Image

from fedhassle.data.site.intensities import UnusableError

MOST_PIXELS = 89_478_485  # of a picture: Pillow's limit for a suspected decompression bomb
AT_ONCE = 25_000_000  # pixels, of all threads together; a larger picture is decoded alone
BLOCK = 64 * 2**20  # bytes in which Pillow allocates: from 32 MiB the C library gives memory back at once


def reject_huge(width: int, height: int) -> None:
    """Raises for too many pixels, before decoding fills the memory."""
    if width * height > MOST_PIXELS:
        raise UnusableError(too_large(f" ({width}×{height})"))


def too_large(size: str) -> str:
    """Returns the reason why a picture is not decoded."""
    return f"has more than {MOST_PIXELS // 10**6} megapixels{size}: reduce it first"


class Turns:
    """Lets threads decode side by side while their pictures are small, and one by one while they are large.

    A picture takes up to 16 bytes a pixel while it is converted, and a tiny file may hold a huge one.
    """

    def __init__(self, most: int = AT_ONCE) -> None:
        self.most, self._held, self._freed = most, 0, Condition()

    @contextmanager
    def turn(self, pixels: int) -> Iterator[None]:
        """Waits until a picture of so many pixels fits, or is alone."""
        with self._freed:
            self._freed.wait_for(lambda: not self._held or self._held + pixels <= self.most)
            self._held += pixels
        try:
            yield
        finally:
            with self._freed:
                self._held -= pixels
                self._freed.notify_all()


class Quiet:
    """Suppresses the decoders' warnings about odd files, in any number of threads.

    The filters belong to the whole process: the first thread to enter sets them, the last to leave restores
    them.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._filters = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._filters.enter_context(catch_warnings())
                filterwarnings("ignore", module=r"PIL\.|pydicom\.")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.close()


Image.core.set_block_size(BLOCK)  # type: ignore[attr-defined] # which Pillow sets by an environment variable
turns, quietly = Turns(), Quiet()
