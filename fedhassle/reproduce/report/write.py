"""Writes a report in the format of the file's suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.reproduce.report.content import Report
from fedhassle.reproduce.report.csv import csv_text
from fedhassle.reproduce.report.html import page
from fedhassle.reproduce.report.latex import latex
from fedhassle.reproduce.report.markdown import OWN, markdown, not_updated, updated

FORMATS: dict[str, Callable[[Report], str]] = {
    ".html": page,
    ".md": markdown,
    ".csv": csv_text,
    ".tex": latex,
}


def check_format(path: Path) -> None:
    """Refuses an unknown suffix, before any work is done."""
    require(path.suffix in FORMATS, f"a report ends in one of {', '.join(FORMATS)}, got {path.name!r}")


def write_report(report: Report, path: Path) -> list[str]:
    """Writes a report; in a Markdown file that is not a report, it updates only the marked blocks.

    Returns the names of the blocks that it cannot update, since the report has only a part of them.
    """
    check_format(path)
    if path.suffix != ".md":
        write_text(path, FORMATS[path.suffix](report))
        return []
    before = text_of(path)
    own = before.startswith(OWN)
    write_text(path, markdown(report) if own else in_place(report, path, before))
    return [] if own else not_updated(before, report)


def text_of(path: Path) -> str:
    """The text of a file with its line ends, or that of an empty report if there is no file."""
    try:
        return path.read_bytes().decode("utf-8") if path.exists() else OWN
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def in_place(report: Report, path: Path, before: str) -> str:
    """A text with its marked blocks updated."""
    text = updated(before, report)
    if text is None and (kept := not_updated(before, report)):
        raise UserError(
            f"{path} holds {', '.join(kept)}, and this report has only a part of it or other settings: "
            "nothing was written. Omit --only, --methods, --seeds and KEY=VALUE, or name another file"
        )
    if text is None:
        names = ", ".join(section.experiment.name for section in report.sections)
        raise UserError(
            f"{path} exists and is not a report: nothing was written. To keep a table in it, mark its place "
            f"with the lines <!-- NAME --> and <!-- /NAME --> (NAME: {names} or findings)"
        )
    return text
