"""Reads the arrays of numbers in a MATLAB file of version 5, the format of SVHN, without SciPy."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhassle.errors import UserError

HEADER = 128  # bytes; the last four are the version and the byte order
LITTLE_ENDIAN = b"\x00\x01IM"
COMPRESSED, MATRIX = 15, 14  # types of elements
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
NUMERIC = range(6, 16)  # classes of arrays: double, single and integers; others are text, cells and the like


def read_mat(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of numbers in a file, by name; other variables are left out."""
    content = path.read_bytes()
    if len(content) < HEADER or content[HEADER - 4 : HEADER] != LITTLE_ENDIAN:
        raise UserError(f"{path}: not a MATLAB file of version 5; delete it to download it again")
    try:
        return dict(arrays_of(memoryview(content)[HEADER:]))
    except (struct.error, zlib.error, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: not a complete MATLAB file ({error}); delete it to download it again"
        ) from error


def arrays_of(content: memoryview) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the name and the values of each array of numbers."""
    for kind, data in elements(content):
        if kind == COMPRESSED:
            yield from arrays_of(memoryview(zlib.decompress(data)))
        elif kind == MATRIX:
            (_, flags), (_, shape), (_, name), *parts = elements(data)
            if flags[0] in NUMERIC:
                stored, values = parts[0]
                sizes = np.frombuffer(shape, "<i4").tolist()
                numbers = np.frombuffer(values, NUMBERS[stored])
                yield bytes(name).decode("ascii"), numbers.reshape(sizes, order="F")


def elements(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields the type and the bytes of each element.

    A tag of 8 bytes holds the type and the number of bytes, which are filled up to a multiple of 8 unless
    they are compressed. Up to 4 bytes stand in the tag itself, which then starts with their number and type.
    """
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from("<II", content, at)
        start, end = at + 8, at + 8 + size
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            start, end = at + 4, at + 4 + size
        if end > len(content):
            raise ValueError(f"an element of {size} bytes is cut off")
        yield kind, content[start:end]
        at = end if kind == COMPRESSED else at + 8 + -(-(end - at - 8) // 8) * 8
