"""Writing files so that a reader never sees half of one, whatever happens; and reading those that grow."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedhassle.errors import BusyError, UserError, require

if sys.platform != "win32":
    import fcntl

UNFINISHED = ".writing-"

Stamp = tuple[int, int]
"""The size of a file, and when it was last written."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that takes the place of `path` when the block ends well.

    Where that is a link, it stays, and what it leads to is replaced. An error that names another file, such
    as one that is read in the block, is none of writing, and stays what it is.
    """
    with writing(path):
        place = replaceable(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays: some writers choose the format by it.
        temporary = place.parent / f"{UNFINISHED}{secrets.token_hex(8)}{path.suffix}"
        temporary.touch(exist_ok=False)  # with the permissions of any new file
    try:
        with writing(path, temporary):
            yield temporary
        with writing(path):
            settle(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Errors are those of writing `path`; with a temporary file, if they name that or none."""
    try:
        yield
    except OSError as error:
        if temporary is not None and error.filename not in (None, str(temporary)):
            raise
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def replaceable(path: Path) -> Path:
    """The path without links; a device or a pipe, which a file must not take the place of, is an error."""
    place = Path(os.path.realpath(path))  # that of a link in a circle is a link
    sound = path.is_file() or path.is_dir() or not (path.exists() or place.is_symlink())  # a folder: below
    require(sound, f"{path} cannot be written: it is no regular file; name a new file, or one to replace")
    return place


def settle(temporary: Path, path: Path) -> None:
    """Puts a finished file in its place, once it is on the disk."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def try_out(folder: Path) -> None:
    """Makes a folder, and a file in it that does not stay: permissions do not tell whether that works."""
    if not folder.exists():  # of a file in its place the attempt below says more
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=UNFINISHED) as file:
        file.write(b"tried")
        file.flush()


def stamp(path: Path) -> Stamp:
    """Another one once a file has changed."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # of which reading tells
        return 0, 0
    return found.st_size, found.st_mtime_ns


def remove_unfinished(folder: Path) -> None:
    """Removes what writers left that were killed half-way."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a folder or file; the lock ends with the process, however that ends.

    Whoever holds it may remove the file: one that was opened before is then no lock, since others find none.
    """
    if sys.platform == "win32":  # no such locks there
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(descriptor), folder.stat())
        except BlockingIOError:
            free = False
        if not free:
            raise BusyError(f"another process is at work in {folder}: wait for it, or end it")
        yield
    finally:
        os.close(descriptor)


def wait_until_free(folder: Path, seconds: float = 30.0) -> None:
    """Waits until no process is at work in a folder; not for ever."""
    deadline = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < deadline:
        try:
            with locked(folder):
                return
        except BusyError:
            time.sleep(0.1)


def file_name(text: str) -> str:
    """A short text as a name that every file system takes."""
    return re.sub(r"[^\w.%-]+", ".", text)[:40].strip(".")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, its line ends as they are."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN is an error, since no reader but Python's takes it."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file with one a line, which may be growing; lines that are cut off do not count.

    Only a line feed ends a line: JSON may hold other characters at which Python would break one.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]
