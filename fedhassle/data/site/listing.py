"""The image files of a site's folder, found without opening them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fedhassle.data.site.dicom import is_dicom
from fedhassle.data.site.pictures import SUFFIXES
from fedhassle.errors import require
from fedhassle.names import escaped

LABEL_FILE = "labels.csv"
NO_LABELS = Path(os.devnull)  # as a label file: no image has a label, whatever the folders are called
UNUSED = "an unused label file: only the one in the top folder counts"
SYSTEM_FILES = ("__macosx", "thumbs.db", "desktop.ini")  # left in folders by macOS and Windows


class Problem(NamedTuple):
    """A file that is skipped or converted."""

    path: str  # in the site's folder
    what: str
    outcome: Literal["skipped", "converted"]


class ImageFiles(NamedTuple):
    """The image files of a folder."""

    folder: Path  # with links resolved
    files: tuple[str, ...]  # POSIX paths in the folder, sorted
    problems: tuple[Problem, ...]


def find_images(path: Path, labels: Path | None = None) -> ImageFiles:
    """Finds the image files in a folder and its subfolders; no image at all is an error.

    Other files are reported, except the label file, which is `labels` or the one in the folder.
    """
    folder = path.resolve()
    label_file = labels.resolve() if labels else None
    files: list[str] = []
    problems: list[Problem] = []
    others: dict[str, list[str]] = {}

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(folder).as_posix()
        require(where != ".", f"{path} cannot be read: {error.strerror}")
        what = f"a folder that cannot be read ({error.strerror})"
        problems.append(Problem(printable(where), what, "skipped"))

    for here, folders, names in os.walk(folder, onerror=unreadable):
        base = Path(here)
        linked = [name for name in folders if not is_ignored(name) and (base / name).is_symlink()]
        problems += [_skipped(base / name, folder, "a link to a folder") for name in linked]
        folders[:] = [name for name in folders if not is_ignored(name) and name not in linked]
        for name in (name for name in names if not is_ignored(name)):
            file = base / name
            suffix, reason = file.suffix.lower(), reason_to_skip(file, folder)
            if suffix not in SUFFIXES and (reason or not is_dicom(file)):
                is_label_file = name.lower() == LABEL_FILE
                if file != label_file and not (is_label_file and base == folder):
                    what = UNUSED if is_label_file else f"not an image file ({suffix or 'without a suffix'})"
                    others.setdefault(what, []).append(file.relative_to(folder).as_posix())
            elif reason:
                problems.append(_skipped(file, folder, reason))
            else:
                files.append(file.relative_to(folder).as_posix())
    problems += [_merged(what, sorted(paths)) for what, paths in others.items()]
    problems.sort()
    require(bool(files), f"{path} holds no images ({', '.join(SUFFIXES)}){first_of(problems)}")
    return ImageFiles(folder, tuple(sorted(files)), tuple(problems))


def find_label_file(folder: Path) -> Path | None:
    """Returns the label file in a folder, in upper or lower case, or None."""
    found = sorted(file for file in folder.iterdir() if file.name.lower() == LABEL_FILE)
    require(len(found) < 2, f"{folder} holds {len(found)} label files: {', '.join(f.name for f in found)}")
    for file in found:
        reason = reason_to_skip(file, folder)
        require(not reason, f"{file} is {reason}: put the file itself there, or name it as the label file")
    return found[0] if found else None


def is_ignored(name: str) -> bool:
    """True if a file or folder is hidden, or left by the operating system."""
    return name.startswith(".") or name.lower() in SYSTEM_FILES


def reason_to_skip(file: Path, folder: Path) -> str:
    """Returns a reason if a path points outside the folder or is not a file: reading a pipe would block."""
    if file.is_symlink():
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError):  # older Pythons raise the latter for a loop
            return "a broken link"
        if not target.is_relative_to(folder):
            return "a link that points outside the folder"
    return "" if file.is_file() else "not a regular file"


def printable(path: str) -> str:
    """Returns a path as valid text, with control characters and bytes that are not UTF-8 escaped."""
    return escaped(path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def frame_name(file: str, frame: int) -> str:
    """Returns the name of one of several pictures in a file."""
    return f"{file}[{frame}]"


def file_of(name: str) -> str:
    """Returns the file whose label a picture has, by the picture's name; in an .npz each has its own."""
    return re.sub(r"(?<!\.npz)\[\d+\]\Z", "", name, flags=re.IGNORECASE)


def frame_of(name: str) -> int:
    """Returns the number of a picture in its file, by the picture's name."""
    found = re.search(r"\[(\d+)\]\Z", name)
    return int(found[1]) if found else 0


def first_of(problems: Sequence[Problem]) -> str:
    """Returns the first problem, to end an error message with."""
    return f": {problems[0].path}: {problems[0].what}" if problems else ""


def _skipped(file: Path, folder: Path, what: str) -> Problem:
    return Problem(printable(file.relative_to(folder).as_posix()), what, "skipped")


def _merged(what: str, paths: Sequence[str]) -> Problem:
    """Returns one problem for all files of a kind: there may be as many as images."""
    many = f", and {len(paths) - 1:,} more like it" if len(paths) > 1 else ""
    return Problem(printable(paths[0]), f"{what}{many}", "skipped")
