"""The files that pictures are written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedhassle.errors import require


def check_picture(path: Path, formats: Sequence[str]) -> None:
    """Raises for a picture of a format that is not drawn, by its suffix, whatever its capitals."""
    known = " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))
    require(path.suffix.lower() in formats, f"the picture ends in {known}, got {path.name!r}")
