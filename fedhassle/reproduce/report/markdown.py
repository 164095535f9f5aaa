"""A report in Markdown, whole or as blocks that keep the tables of another text up to date."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedhassle.reproduce.paper import printed
from fedhassle.reproduce.report.content import Report, Section
from fedhassle.reproduce.report.findings import Finding, findings
from fedhassle.reproduce.report.grid import Entry, Grid, Line, grid
from fedhassle.reproduce.report.wording import (
    HOW_TO_READ,
    MISSING_MARK,
    bold,
    command,
    noise,
    notes,
    ours,
    paper,
    source,
)
from fedhassle.reproduce.tables import changed_settings

OWN = "<!-- made by fedhassle report -->"
FINDINGS = "findings"  # the name of the block that has them
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [OWN, f"# {escaped(report.title)}"]
    parts.append(f"{report.done:,} of {report.runs:,} runs are done. {HOW_TO_READ}")
    every = findings(report)
    if every:
        parts += ["## Do the paper's claims hold?", findings_block(every)]
    for section in report.sections:
        title = (
            f"{section.experiment.title} ({source(section)})" if source(section) else section.experiment.title
        )
        parts += [f"## {escaped(title)}", escaped(section.experiment.about), block(section)]
    if report.skipped:
        parts += ["## Left out", "\n".join(f"- {escaped(reason)}" for reason in report.skipped)]
    return "\n\n".join(part for part in parts if part) + "\n"


def blocks(report: Report) -> dict[str, str]:
    """What other texts may hold between <!-- NAME --> and <!-- /NAME -->: tables, and the findings.

    A report on a part of a table, or with other settings, leaves the table in such a text as it is; findings
    are those of the whole paper.
    """
    made = {section.experiment.name: block(section) for section in report.sections if section.as_asked}
    return made | ({FINDINGS: findings_block(findings(report))} if made.keys() >= {*printed()} else {})


def renewed(text: str, report: Report) -> str | None:
    """A text with its blocks as they stand now, its line ends kept; None where it has none of them."""
    found = False
    for name, content in blocks(report).items():
        lines = ["", *content.split("\n"), "", ""]
        text, count = place_of(name).subn(lambda m, new=lines: m[1] + m[2].join(new) + m[3], text)  # type: ignore[misc]
        found |= count > 0
    return text if found else None


def left_alone(text: str, report: Report) -> list[str]:
    """The names of the blocks of a text that a report on more would renew, and this one does not."""
    names = [*(section.experiment.name for section in report.sections), FINDINGS]
    return [name for name in names if name not in blocks(report) and place_of(name).search(text)]


def place_of(name: str) -> re.Pattern[str]:
    """Where a text holds the block of that name: its first line, how lines end there, and its last line."""
    name = re.escape(name)
    return re.compile(rf"(<!-- {name} -->(\r?\n)).*?(<!-- /{name} -->)", re.DOTALL)


def block(section: Section) -> str:
    """A table, what its marks mean, and how it is made."""
    made = grid(section)
    return "\n\n".join([table(made), legend(section, made)])


def legend(section: Section, made: Grid) -> str:
    """What a reader of a table has to know."""
    entries = [entry for line in made.lines for entry in line.entries if entry is not None]
    words = [f"{section.done} of {section.cells} runs are done."]
    if section.changes:
        words.append(escaped(changed_settings(section.changes)))
    if any(paper(entry.figure) is not None for entry in entries):
        words.append("In parentheses the paper's figure.")
    if any(entry.figure.ours is None for entry in entries):
        words.append(f"{MISSING_MARK} is not run yet.")
    if any(notes(entry) for entry in entries if entry.result.runs):
        words.append("Small print says of which seeds a figure is and what it lacks.")
    words += filter(None, [bold(made)])
    if any(line.own for line in made.lines):
        words.append("† The paper does not have it.")
    return " ".join([*words, f"Made by `{command(section)}`."])


def table(made: Grid) -> str:
    """A grid as a table; headings of several levels become one."""
    names = [*made.stub, *(", ".join(heading) for heading in made.headings)]
    rule = [*("---" for _ in made.stub), *("--:" for _ in made.headings)]
    lines = [[escaped(name) for name in names], rule, *(row(line) for line in made.lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(line: Line) -> list[str]:
    """A row of a table."""
    *labels, last = [escaped(label) for label in line.labels]
    return [*labels, last + " †" * line.own, *(cell(entry) for entry in line.entries)]


def cell(entry: Entry | None) -> str:
    """Our figure, what it lacks, and the paper's in parentheses."""
    if entry is None:
        return ""
    shown = ours(entry.figure)
    if entry.best:
        value, mark, std = shown.partition(" ± ")
        shown = f"**{value}**{mark}{std}"
    note = f" <sub>{'; '.join(notes(entry))}</sub>" if entry.result.runs and notes(entry) else ""
    beside = paper(entry.figure)
    return shown + note + ("" if beside is None else f" ({beside})")


def findings_block(every: Sequence[Finding]) -> str:
    """Claims and what the figures say of them, and what a gap on one seed is worth."""
    return "\n\n".join(filter(None, [findings_table(every), noise(every)]))


def findings_table(every: Sequence[Finding]) -> str:
    """Claims and what the figures say of them."""
    lines = [["claim", "in the paper", "verdict", "numbers"], ["---"] * 4]
    for one in every:
        words = (one.claim.says, one.section.experiment.source, one.verdict)
        lines.append([*(escaped(word) for word in words), escaped(one.numbers)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Any text as a line of Markdown that shows it."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
