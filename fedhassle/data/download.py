"""Downloads the published files of a data set and stores their images as one .npz file."""

from __future__ import annotations

import hashlib
import http.client
import logging
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedhassle.errors import UserError
from fedhassle.files import atomic

ATTEMPTS = 3  # per address: dropped connections are common
PAUSE = 1.0  # seconds before the second attempt, twice as long before the third
TIMEOUT = 30.0  # seconds without a single byte
CHUNK = 1 << 18  # bytes

log = logging.getLogger("fedhassle")

Bytes = NDArray[np.uint8]
Signed = NDArray[np.int8]


class RawData(NamedTuple):
    """Arrays of an .npz file, as read from the published files."""

    x_train: Bytes  # (N, H, W, C)
    y_train: Bytes | Signed  # (N,), −1 = no label
    x_test: Bytes
    y_test: Bytes | Signed


Reader = Callable[[Sequence[Path]], RawData]
"""Reads the published files, in the order of their sources, into arrays."""


@dataclass(frozen=True)
class Source:
    """A published file: its addresses, checksum and length."""

    name: str
    urls: tuple[str, ...]  # tried in this order
    md5: str
    length: int  # bytes


class _FailedError(Exception):
    """A failed download; `again` tells whether another attempt may help."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


def fetch(name: str, sources: Sequence[Source], read: Reader, folder: Path, progress: bool = True) -> Path:
    """Returns the path of NAME.npz in the folder, which is built from the published files on first use.

    Downloads go to a temporary folder, which is always removed, also after an interruption. The result is
    written atomically.
    """
    target = folder / f"{name}.npz"
    try:
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as temporary:
            advice = _advice(name, sources, folder)
            paths = [_obtain(source, folder, Path(temporary), advice, progress) for source in sources]
            _save(target, read(paths))
    except OSError as error:
        raise UserError(
            f"cannot create {target}: {error.strerror or error}; "
            "$FEDHASSLE_DATA or --data-dir chooses another folder"
        ) from error
    return target


def _advice(name: str, sources: Sequence[Source], folder: Path) -> str:
    """Returns a hint for machines without a network."""
    originals = ", ".join(source.name for source in sources)
    return (
        f"Without network, put {name}.npz (arrays {', '.join(RawData._fields)}) or the original {originals} "
        f"into {folder}; $FEDHASSLE_DATA or --data-dir chooses another folder."
    )


def _save(path: Path, arrays: RawData) -> None:
    """Writes an .npz without compression, since photographs hardly shrink and every run reads the file."""
    with atomic(path) as temporary:
        np.savez(temporary, **arrays._asdict())


def _obtain(source: Source, folder: Path, temporary: Path, advice: str, progress: bool) -> Path:
    """Returns the path of a verified published file: the user's copy in the folder, or a new download."""
    own = folder / source.name
    if not own.is_file():
        return _download(source, temporary / source.name, advice, progress)
    with own.open("rb") as file:
        found = hashlib.file_digest(file, _md5).hexdigest()
    if found != source.md5:
        raise UserError(
            f"{own}: md5 is {found}, published is {source.md5}; delete the file to download it again"
        )
    return own


def _download(source: Source, target: Path, advice: str, progress: bool) -> Path:
    """Downloads a file from the first address that delivers the published bytes."""
    failures = []
    for url in source.urls:
        try:
            _try_repeatedly(source, url, target, progress)
        except _FailedError as failure:
            failures.append(f"  {url}: {failure}")
        else:
            return target
    raise UserError("\n".join([f"cannot download {source.name}:", *failures, advice]))


def _try_repeatedly(source: Source, url: str, target: Path, progress: bool) -> None:
    """Downloads from one address, with a few attempts."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _receive(source, url, target, progress)
            return
        except _FailedError as failure:
            if not failure.again or attempt == ATTEMPTS:
                raise
            log.warning("%s: %s; trying again", url, failure)
            time.sleep(PAUSE * attempt)


def _receive(source: Source, url: str, target: Path, progress: bool) -> None:
    """Downloads to a file and checks length and checksum."""
    digest, received = _md5(), 0
    with target.open("wb") as file, _progress_bar(source, url, progress) as advance:
        for chunk in _chunks(url):
            digest.update(chunk)
            file.write(chunk)
            advance(len(chunk))
            received += len(chunk)
            if received > source.length:  # an endless response must not fill the disk
                raise _FailedError(f"longer than the published {source.length} bytes", again=False)
    if received < source.length:
        raise _FailedError(f"ended after {received} of {source.length} bytes", again=True)
    if digest.hexdigest() != source.md5:
        raise _FailedError(
            f"wrong checksum: md5 is {digest.hexdigest()}, published is {source.md5}", again=False
        )


def _md5() -> hashlib._Hash:
    """Returns a new md5, the published checksum; FIPS systems allow it only with this flag."""
    return hashlib.md5(usedforsecurity=False)


def _chunks(url: str) -> Iterator[bytes]:
    """Yields the bytes of an address; network errors become `_FailedError`, disk errors do not."""
    request = urllib.request.Request(url, headers={"User-Agent": "fedhassle"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            while chunk := response.read(CHUNK):
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        busy = error.code in (408, 429) or error.code >= 500
        raise _FailedError(f"the server answered {error.code} {error.reason}", again=busy) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _FailedError(f"no connection ({reason})", again=True) from error


@contextmanager
def _progress_bar(source: Source, url: str, progress: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, or logs one line; yields a function that takes the bytes of each chunk."""
    if not (progress and sys.stderr.isatty()):
        log.info("downloading %s (%.1f MB) from %s", source.name, source.length / 1e6, url)
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(source.name, total=source.length)
        yield lambda count: bar.advance(task, count)
