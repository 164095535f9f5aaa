"""Arrays in .npy and .npz files: declared sizes are checked before anything is unpacked or allocated."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from typing import IO, Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from fedhassle.names import brief

# A file of a few kilobytes can unpack to gigabytes. Images hardly shrink by more than a tenth of this factor,
# and labels that do are small.
UNPACKED = 100  # times the size of the file: the most that its arrays may take
ALWAYS = 256 * 2**20  # bytes that they may take anyway
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def names_in(stream: IO[bytes]) -> list[str]:
    """Returns the names of the arrays in an .npz file."""
    with archive_in(stream) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def arrays_in(stream: IO[bytes], wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Reads the wanted arrays that an .npz file has; raises errors of many kinds if it is damaged."""
    most = max(ALWAYS, UNPACKED * stream.seek(0, 2))
    with archive_in(stream) as archive:
        there = set(archive.namelist())
        members = {name: archive.getinfo(f"{name}.npy") for name in wanted if f"{name}.npy" in there}
        declared = sum(member.file_size for member in members.values())
        if declared > most:
            raise ValueError(
                f"it unpacks to {megabytes(declared)}; a file of this size may unpack to {megabytes(most)}"
            )
        found = {}
        for name, member in members.items():
            try:
                with archive.open(member) as file:  # which ends at the declared size
                    found[name] = read_npy(file, member.file_size)
            except Exception as error:  # of zipfile, the decompressors and NumPy
                raise ValueError(f"{name}: {error or type(error).__name__}") from error
        return found


def archive_in(stream: IO[bytes]) -> zipfile.ZipFile:
    """Opens an .npz file; refuses one that starts with something else, over which zipfile would skip."""
    stream.seek(0)
    if stream.read(2) != b"PK":
        raise ValueError("it is not an .npz file")
    return zipfile.ZipFile(stream)


def read_npy(stream: IO[bytes], size: int) -> NDArray[Any]:
    """Reads an array from .npy data of some bytes; refuses Python objects, and headers that claim more."""
    version = npy.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"unknown version {version} of the .npy format")
    shape, _, dtype = HEADERS[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    needed = stream.tell() + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or not dtype.itemsize or needed > size:
        raise ValueError(
            f"its header claims {str(dtype)[:50]} of shape {brief(shape)}, which {size:,} bytes cannot hold"
        )
    stream.seek(0)
    array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
    return array


def megabytes(size: int) -> str:
    """Formats a number of bytes."""
    return f"{size / 1e6:,.0f} MB"
