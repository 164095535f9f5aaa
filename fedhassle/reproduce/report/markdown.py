"""A report in Markdown: a whole document, or blocks that keep the tables of another document up to date."""

from __future__ import annotations

from collections.abc import Sequence

from fedhassle.blocks import block_pattern, escaped, replaced
from fedhassle.blocks import table as plain_table
from fedhassle.reproduce.paper import paper_results
from fedhassle.reproduce.report.content import Report, Section
from fedhassle.reproduce.report.findings import Finding, findings
from fedhassle.reproduce.report.layout import ResultTable, TableCell, TableRow, result_table
from fedhassle.reproduce.report.wording import (
    MISSING_MARK,
    bold,
    command,
    devices,
    how_to_read,
    noise,
    notes,
    ours,
    paper,
    source,
)
from fedhassle.reproduce.tables import changed_settings

OWN = "<!-- made by fedhassle report -->"
FINDINGS = "findings"  # the name of their block


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [OWN, f"# {escaped(report.title)}"]
    results = [result for section in report.sections for result in section.results]
    parts.append(f"{report.done:,} of {report.runs:,} runs are done. {how_to_read(results)}")
    every = findings(report)
    if every:
        parts += ["## Do the paper's claims hold?", findings_block(every)]
    for section in report.sections:
        title = (
            f"{section.experiment.title} ({source(section)})" if source(section) else section.experiment.title
        )
        parts += [f"## {escaped(title)}", escaped(section.experiment.about), block(section)]
    if report.skipped:
        parts += ["## Ignored files", "\n".join(f"- {escaped(reason)}" for reason in report.skipped)]
    return "\n\n".join(part for part in parts if part) + "\n"


def blocks(report: Report) -> dict[str, str]:
    """The blocks that other documents may hold between <!-- NAME --> and <!-- /NAME -->, by name.

    A table has a block if it is whole and its settings are unchanged; the findings, if the report has every
    experiment of the paper.
    """
    made = {section.experiment.name: block(section) for section in report.sections if section.as_asked}
    return made | ({FINDINGS: findings_block(findings(report))} if made.keys() >= {*paper_results()} else {})


def updated(text: str, report: Report) -> str | None:
    """A text with its blocks updated and its line ends kept; None if it has none of the blocks."""
    return replaced(text, blocks(report))


def not_updated(text: str, report: Report) -> list[str]:
    """The names of the blocks in a text that this report cannot update."""
    names = [*(section.experiment.name for section in report.sections), FINDINGS]
    return [name for name in names if name not in blocks(report) and block_pattern(name).search(text)]


def block(section: Section) -> str:
    """A table and its legend."""
    made = result_table(section)
    return "\n\n".join([table(made), legend(section, made)])


def legend(section: Section, made: ResultTable) -> str:
    """The progress of a table, the meaning of its marks, and its command."""
    entries = [entry for line in made.rows for entry in line.cells if entry is not None]
    words = [f"{section.done} of {section.runs} runs are done."]
    if section.changes:
        words.append(escaped(changed_settings(section.changes)))
    if any(paper(entry.measurement) is not None for entry in entries):
        words.append("In parentheses: the paper's value.")
    if any(entry.measurement.ours is None for entry in entries):
        words.append(f"{MISSING_MARK}: not run yet.")
    if any(notes(entry) for entry in entries if entry.result.runs):
        timed = "; for seconds, the machine" if devices(entries) else ""
        words.append(f"Small print: seeds used, and what is missing{timed}.")
    words += filter(None, [bold(made)])
    if any(line.own for line in made.rows):
        words.append("†: not in the paper.")
    return " ".join([*words, f"Made by `{command(section)}`."])


def table(made: ResultTable) -> str:
    """A table in Markdown; the levels of a heading are joined."""
    names = [*made.stub, *(", ".join(heading) for heading in made.headings)]
    rule = [*("---" for _ in made.stub), *("--:" for _ in made.headings)]
    lines = [[escaped(name) for name in names], rule, *(row(line) for line in made.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(line: TableRow) -> list[str]:
    """A row of a table."""
    *labels, last = [escaped(label) for label in line.labels]
    return [*labels, last + " †" * line.own, *(cell(entry) for entry in line.cells)]


def cell(entry: TableCell | None) -> str:
    """Our value, remarks on it, and the paper's value in parentheses."""
    if entry is None:
        return ""
    shown = ours(entry.measurement)
    if entry.best:
        value, mark, std = shown.partition(" ± ")
        shown = f"**{value}**{mark}{std}"
    note = f" <sub>{escaped('; '.join(notes(entry)))}</sub>" if entry.result.runs and notes(entry) else ""
    beside = paper(entry.measurement)
    return shown + note + ("" if beside is None else f" ({beside})")


def findings_block(every: Sequence[Finding]) -> str:
    """The table of claims and verdicts, and a warning about gaps on one seed."""
    return "\n\n".join(filter(None, [findings_table(every), noise(every)]))


def findings_table(every: Sequence[Finding]) -> str:
    """The table of claims and verdicts."""
    rows = [["claim", "in the paper", "verdict", "numbers"]]
    for one in every:
        words = (one.claim.says, one.section.experiment.source, one.verdict, one.numbers)
        rows.append([escaped(word) for word in words])
    return plain_table(rows)
