"""The log of a run in its folder."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("fedhassle")


class LogFile(logging.FileHandler):
    """A log in a file; on a full disk its lines are lost, and the next file that a run needs ends it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        """Ignores errors of the disk, which logging would print with a traceback for every line."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Closes the file, even if its last lines cannot be written."""
        with suppress(OSError):
            super().close()


@contextmanager
def log_to_file(path: Path, alone: bool, name: str = "") -> Iterator[None]:
    """Logs to a file; the messages of this thread only, unless the run is alone.

    Each record gets the run's name, for a console that shows several runs.
    """
    handler, thread = LogFile(path, encoding="utf-8"), threading.get_ident()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: alone or record.thread == thread)

    def add_name(record: logging.LogRecord) -> bool:
        if alone or record.thread == thread:
            record.run = name
        return True

    log.addFilter(add_name)
    log.addHandler(handler)
    try:
        with info_level():
            yield
    finally:
        log.removeHandler(handler)
        log.removeFilter(add_name)
        handler.close()


@contextmanager
def info_level() -> Iterator[None]:
    """Logs at INFO inside the block."""
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
