"""The tables of a report for a paper in LaTeX; they need the packages booktabs and graphicx."""

from __future__ import annotations

import itertools
import re
import unicodedata

from fedhassle.reproduce.report.content import Report, Section
from fedhassle.reproduce.report.layout import ResultTable, TableCell, TableRow, result_table
from fedhassle.reproduce.report.wording import (
    MISSING_MARK,
    bold,
    devices,
    gap,
    how_to_read,
    lacking,
    ours,
    paper,
    seeds_in_words,
    signed,
    source,
)
from fedhassle.reproduce.tables import changed_settings

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"$<$", ">": r"$>$", "|": r"$|$", '"': "''"},
    **{"±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "≥": r"$\ge$", "≤": r"$\le$", "·": r"$\cdot$"},
    **{"✓": r"$\surd$", "✗": r"$\times$", "†": r"\textdagger{}", "…": r"\dots{}", "–": "--", "—": "---"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
}
SHORT = 12  # letters up to which a heading stays on one line
WIDE = 6  # columns from which a table spans both columns of a page
FITTING = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # never wider than the text


def latex(report: Report) -> str:
    """A table for each experiment."""
    head = ["% Made by fedhassle report. In the preamble: \\usepackage{booktabs,graphicx}"]
    return "\n\n".join([*head, *(table(section) for section in report.sections)]) + "\n"


def table(section: Section) -> str:
    """An experiment as a floating table, shrunk to the width of the text if it is wider."""
    made, experiment = result_table(section), section.experiment
    stubs, width = len(made.stub), len(made.headings)
    title = experiment.title + (f" ({source(section)})" if source(section) else "")
    words = [
        title if title.endswith("?") else f"{title}.",
        changed_settings(section.changes),
        how_to_read(section.results),
        marks(made),
    ]
    caption = " ".join(filter(None, words))
    floating = "table*" if stubs + width >= WIDE else "table"
    return "\n".join(
        [
            f"\\begin{{{floating}}}",
            "\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}",
            f"\\caption{{{escaped(caption)}}}",
            f"\\label{{tab:{re.sub(r'[^A-Za-z0-9-]', '', experiment.name)}}}",
            FITTING,
            f"\\begin{{tabular}}{{{'l' * stubs}{'r' * width}}}",
            "\\toprule",
            *headings(made),
            "\\midrule",
            *body(made),
            "\\bottomrule",
            "\\end{tabular}}",
            f"\\end{{{floating}}}",
        ]
    )


def marks(made: ResultTable) -> str:
    """The meaning of the marks that a table has."""
    entries = [entry for line in made.rows for entry in line.cells if entry is not None]
    words = []
    if any(paper(entry.measurement) is not None for entry in entries):
        words.append("In parentheses below: the paper's value and our difference from it.")
    if any(entry.measurement.ours is None for entry in entries):
        words.append(f"{MISSING_MARK}: not run.")
    if any(entry.result.runs and lacking(entry.result) for entry in entries):
        words.append("*: fewer seeds than requested, or other rounds.")
    if any(line.own for line in made.rows):
        words.append("†: not in the paper.")
    if len(seeds := {seed for entry in entries for seed in entry.result.seeds}) == 1:
        words.append(f"All values are from {seeds_in_words(seeds)}.")
    if devices(entries):
        words.append("In parentheses below seconds: the machine.")
    return " ".join([*words, *filter(None, [bold(made)])])


def headings(made: ResultTable) -> list[str]:
    """The levels of the headings, with a rule under each that spans several columns."""
    stubs, levels = len(made.stub), len(made.headings[0])
    lines = []
    for level in range(levels):
        last = level + 1 == levels
        cells = [escaped(name) if last else "" for name in made.stub]
        rules, column = [], stubs + 1
        for (*_, word), group in itertools.groupby(names[: level + 1] for names in made.headings):
            width = len(list(group))
            cells.append(stacked(word) if width == 1 else f"\\multicolumn{{{width}}}{{c}}{{{escaped(word)}}}")
            rules.append(f"\\cmidrule(lr){{{column}-{column + width - 1}}}")
            column += width
        lines.append(ended(cells))
        if not last:
            lines.append("".join(rules))
    return lines


def stacked(heading: str) -> str:
    """The heading of a column, on two lines if it is long and has a place to break."""
    first, mark, second = heading.partition(", " if ", " in heading else " = ")
    if len(heading) <= SHORT or not mark:
        return escaped(heading)
    end, start = (",", "") if mark == ", " else ("", "= ")
    return f"\\shortstack[r]{{{escaped(first)}{end}\\\\{{}}{start}{escaped(second)}}}"


def body(made: ResultTable) -> list[str]:
    """The rows of a table, each with the paper's values below it, if any."""
    lines: list[str] = []
    for before, line in zip([None, *made.rows], made.rows, strict=False):
        if before is not None and line.reference and not before.reference:
            lines.append("\\midrule")
        elif before is not None and any(map(beneath, before.cells)):
            lines.append("\\addlinespace[2pt]")
        lines += row(line)
    return lines


def row(line: TableRow) -> list[str]:
    """A row of a table, and below it the paper's values, if any."""
    *labels, last = line.labels
    named = [escaped(label) for label in (*labels, last + " †" * line.own)]
    ours_row = ended([*named, *map(cell, line.cells)])
    paper_row = ended([*("" for _ in named), *map(beneath, line.cells)])
    return [ours_row, paper_row] if any(map(beneath, line.cells)) else [ours_row]


def ended(cells: list[str]) -> str:
    """A line of a table; LaTeX would read a bracket or star at its start as an option of the line above."""
    line = " & ".join(cells)
    return ("{}" if line.startswith(("[", "*")) else "") + line + r" \\"


def cell(entry: TableCell | None) -> str:
    """Our value."""
    if entry is None:
        return ""
    value, _, std = ours(entry.measurement).partition(" ± ")
    shown = f"\\textbf{{{escaped(value)}}}" if entry.best else escaped(value)
    star = "*" if entry.result.runs and lacking(entry.result) else ""
    return shown + (f" {escaped('± ' + std)}" if std else "") + star


def beneath(entry: TableCell | None) -> str:
    """The paper's value and our difference from it, or the machine of seconds, in small print."""
    if entry is None:
        return ""
    printed, points = paper(entry.measurement), gap(entry)
    words = [*([] if printed is None else [printed]), *([] if points is None else [signed(points)])]
    words += devices([entry])
    return f"\\scriptsize({escaped(', '.join(words))})" if words else ""


def escaped(text: str) -> str:
    """A text escaped for LaTeX; a character that its usual fonts lack becomes a question mark."""
    return "".join(SPECIAL.get(character) or plain(character) for character in " ".join(text.split()))


def plain(character: str) -> str:
    """A character if every LaTeX has it, accented letters included, or a question mark."""
    known = character.isascii() and character.isprintable()
    accented = unicodedata.category(character).startswith("L") and ord(character) < 0x180
    return character if known or accented else "?"
