"""Writes a report in the format that the name of a file asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.report.content import Report
from fedhassle.report.latex import latex
from fedhassle.report.markdown import OWN, markdown, renewed
from fedhassle.report.page import page
from fedhassle.report.tidy import tidy

FORMATS: dict[str, Callable[[Report], str]] = {".html": page, ".md": markdown, ".csv": tidy, ".tex": latex}


def check_format(path: Path) -> None:
    """Refuses a file of a kind that is not written, before any work is done for it."""
    known = ", ".join(FORMATS)
    require(path.suffix in FORMATS, f"a report ends in one of {known}, got {path.name!r}")


def write_report(report: Report, path: Path) -> None:
    """Writes a report; of Markdown that is a person's own, only the blocks that are marked for it."""
    check_format(path)
    write_text(path, FORMATS[path.suffix](report) if path.suffix != ".md" else in_place(report, path))


def in_place(report: Report, path: Path) -> str:
    """The report in Markdown, or a text that is there with its blocks renewed."""
    try:
        before = path.read_text("utf-8") if path.exists() else OWN
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if before.startswith(OWN):
        return markdown(report)
    text = renewed(before, report)
    if text is None:
        names = ", ".join(section.experiment.name for section in report.sections)
        raise UserError(
            f"{path} is there and is no report: nothing was written. To have a table kept in it, mark its "
            f"place with the lines <!-- NAME --> and <!-- /NAME --> (NAME: {names} or findings)"
        )
    return text
