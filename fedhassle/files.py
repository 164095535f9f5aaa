"""Atomic writes, locks, and reading files that are still growing."""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from fedhassle.errors import BusyError, UserError, require

UNFINISHED = ".writing-"  # prefix of temporary files
LOCK = ".lock"  # in a locked folder, or the suffix of a lock file

Stamp = tuple[int, int]
"""Size and modification time of a file."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which replaces `path` when the block ends without an error.

    If `path` is a link, the link stays and its target is replaced. An error that names another file, such as
    one that is read in the block, is not a write error and is passed on unchanged.
    """
    with write_errors(path):
        target = resolved_target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The suffix stays: some writers choose the format by it.
        temporary = target.parent / f"{UNFINISHED}{secrets.token_hex(8)}{path.suffix}"
        temporary.touch(exist_ok=False)  # with the permissions of any new file
    try:
        with write_errors(path, temporary):
            yield temporary
        with write_errors(path):
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turns OS errors into a `UserError` about writing `path`.

    With a temporary file, errors that name any other file are passed on unchanged.
    """
    try:
        yield
    except OSError as error:
        if temporary is not None and error.filename not in (None, str(temporary)):
            raise
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def resolved_target(path: Path) -> Path:
    """Returns the path with links resolved; devices, pipes and circular links must not be replaced."""
    target = Path(os.path.realpath(path))  # a circular link resolves to a link
    # A folder passes: replacing it fails later with the system's own message.
    allowed = path.is_file() or path.is_dir() or not (path.exists() or target.is_symlink())
    require(allowed, f"{path} cannot be written: it is not a regular file; choose another path")
    return target


def check_writable(folder: Path) -> None:
    """Creates the folder and a temporary file in it: permission bits alone do not tell whether that works."""
    if not folder.exists():  # if it is a file, the attempt below gives the better message
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=UNFINISHED) as file:
        file.write(b"test")
        file.flush()


def cache_folder() -> Path:
    """Returns our folder among the user's caches, where the platform keeps them; it may not exist yet.

    Raises a RuntimeError for a user without a home, as in some containers.
    """
    if sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "fedhassle"


def check_picture(path: Path, formats: Sequence[str]) -> None:
    """Raises unless the path has the suffix of a supported picture format, in upper or lower case."""
    known = " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))
    require(path.suffix.lower() in formats, f"the picture ends in {known}, got {path.name!r}")


def stamp(path: Path) -> Stamp:
    """Returns size and modification time, or zeros if the file cannot be examined.

    Of a folder, returns the size of all that is in it and the time of the latest change.
    """
    inside = [Path(home) / name for home, *names in os.walk(path) for name in itertools.chain(*names)]
    try:
        found = [each.stat() for each in (path, *inside)]
    except (OSError, ValueError):  # reading the file will report it
        return 0, 0
    return sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Returns the sorted paths in a folder whose names match; none if there is no such folder.

    A folder that cannot be read raises: `Path.glob` would return nothing, as if the files did not exist.
    """
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if fnmatch.fnmatch(path.name, pattern)]


def paths_below(folder: Path, pattern: str) -> list[Path]:
    """Like `paths_in`, at any depth."""
    if not folder.is_dir():
        return []
    found = (Path(home) / name for home, _, names in os.walk(folder, onerror=fail) for name in names)
    return sorted(path for path in found if fnmatch.fnmatch(path.name, pattern))


def fail(error: OSError) -> NoReturn:
    """Raises an error that `os.walk` would ignore."""
    raise error


def remove_unfinished(folder: Path, age: float = 0.0) -> None:
    """Removes the temporary files of writers that were killed: those of at least this age in seconds."""
    for path in paths_in(folder, f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its writer has just finished
            if time.time() - path.stat().st_mtime >= age:
                path.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a folder, or a file that ends in .lock; raises `BusyError` if it is already held.

    The operating system frees the lock when the process ends, even by a kill. The holder removes the lock
    file: a process that had opened it before does not get the lock.
    """
    file = lock_file(path)
    lock = FileLock(file, timeout=0, thread_local=False)  # a generator may be closed by another thread
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyError(f"another process is at work in {path}: wait for it, or end it") from error
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows, where releasing the lock removes its file
            file.unlink(missing_ok=True)
        lock.release()


def lock_file(path: Path) -> Path:
    """Returns the lock file of a folder; a path that ends in .lock is one itself."""
    return path if path.suffix == LOCK else path / LOCK


def remove_stale_lock(path: Path) -> None:
    """Removes the lock file that a killed process has left, unless another process holds it now."""
    if lock_file(path).exists():
        with suppress(BusyError, OSError), locked(path):  # OSError: an archive that cannot be written
            pass


def wait_until_free(folder: Path, seconds: float = 30.0) -> None:
    """Waits until no process holds the lock of a folder, or the time is up."""
    deadline = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < deadline:
        try:
            with locked(folder):
                return
        except BusyError:
            time.sleep(0.1)


def file_name(text: str) -> str:
    """Returns a short text as a name that every file system accepts."""
    return re.sub(r"[^\w.%-]+", ".", text)[:40].strip(".")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically and keeps its line ends."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN is an error, since only Python would read it."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file with one per line; it may be growing, and cut lines are skipped.

    Only a line feed ends a line: JSON may contain other characters that Python treats as line ends.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]
