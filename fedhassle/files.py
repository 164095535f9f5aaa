"""Writing files so that a reader never sees half of one, whatever happens."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".writing-"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that takes the place of `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays: some writers choose the format by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what writers left that were killed half-way."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN is an error, since no reader but Python's takes it."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
