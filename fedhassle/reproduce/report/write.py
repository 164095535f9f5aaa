"""Writes a report in the format that the name of a file asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.reproduce.report.content import Report
from fedhassle.reproduce.report.csv import tidy
from fedhassle.reproduce.report.html import page
from fedhassle.reproduce.report.latex import latex
from fedhassle.reproduce.report.markdown import OWN, left_alone, markdown, renewed

FORMATS: dict[str, Callable[[Report], str]] = {".html": page, ".md": markdown, ".csv": tidy, ".tex": latex}


def check_format(path: Path) -> None:
    """Refuses a file of a kind that is not written, before any work is done for it."""
    known = ", ".join(FORMATS)
    require(path.suffix in FORMATS, f"a report ends in one of {known}, got {path.name!r}")


def write_report(report: Report, path: Path) -> list[str]:
    """Writes a report; of Markdown that is a person's own, only the blocks that are marked for it.

    Returns the names of those blocks that it leaves as they are, since it has no more than a part of them.
    """
    check_format(path)
    if path.suffix != ".md":
        write_text(path, FORMATS[path.suffix](report))
        return []
    before = text_of(path)
    own = before.startswith(OWN)
    write_text(path, markdown(report) if own else in_place(report, path, before))
    return [] if own else left_alone(before, report)


def text_of(path: Path) -> str:
    """The text that is there, its line ends as they are; else that of an empty report."""
    try:
        return path.read_bytes().decode("utf-8") if path.exists() else OWN
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def in_place(report: Report, path: Path, before: str) -> str:
    """A text of a person's own with its blocks renewed."""
    text = renewed(before, report)
    if text is None and (kept := left_alone(before, report)):
        raise UserError(
            f"{path} keeps {', '.join(kept)} whole, and this report has a part of it or other settings: "
            "nothing was written. Leave out --only, --methods, --seeds and KEY=VALUE, or name another file"
        )
    if text is None:
        names = ", ".join(section.experiment.name for section in report.sections)
        raise UserError(
            f"{path} is there and is no report: nothing was written. To have a table kept in it, mark its "
            f"place with the lines <!-- NAME --> and <!-- /NAME --> (NAME: {names} or findings)"
        )
    return text
