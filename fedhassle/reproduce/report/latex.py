"""The tables of a report for a paper in LaTeX; they need the packages booktabs and graphicx."""

from __future__ import annotations

import itertools
import re
import unicodedata

from fedhassle.reproduce.report.content import Report, Section
from fedhassle.reproduce.report.grid import Entry, Grid, Line, grid
from fedhassle.reproduce.report.wording import (
    HOW_TO_READ,
    MISSING_MARK,
    bold,
    gap,
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
SHORT = 12  # letters of a heading that stay in one line
WIDE = 6  # columns from which on a table takes both columns of a page
FITTING = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # never wider than the text


def latex(report: Report) -> str:
    """A table for each experiment."""
    head = ["% Made by fedhassle report. In the preamble: \\usepackage{booktabs,graphicx}"]
    return "\n\n".join([*head, *(table(section) for section in report.sections)]) + "\n"


def table(section: Section) -> str:
    """An experiment as a floating table, made smaller where it is wider than the text."""
    made, experiment = grid(section), section.experiment
    stubs, width = len(made.stub), len(made.headings)
    where = f" ({source(section)})" if source(section) else ""
    words = [f"{experiment.title}{where}.", changed_settings(section.changes), HOW_TO_READ, marks(made)]
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


def marks(made: Grid) -> str:
    """What the marks of a table mean, those that it has."""
    entries = [entry for line in made.lines for entry in line.entries if entry is not None]
    words = []
    if any(paper(entry.figure) is not None for entry in entries):
        words.append("Beneath in parentheses: the paper's figure and how far ours is above it.")
    if any(entry.figure.ours is None for entry in entries):
        words.append(f"{MISSING_MARK}: not run.")
    if any(entry.result.runs and lacking(entry.result) for entry in entries):
        words.append("*: fewer seeds than asked for, or other rounds.")
    if any(line.own for line in made.lines):
        words.append("†: not in the paper.")
    if len(seeds := {seed for entry in entries for seed in entry.result.seeds}) == 1:
        words.append(f"All of it is of {seeds_in_words(seeds)}.")
    return " ".join([*words, *filter(None, [bold(made)])])


def headings(made: Grid) -> list[str]:
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
    """The heading of a column, in two lines where it is long and has a place to break."""
    first, mark, second = heading.partition(", " if ", " in heading else " = ")
    if len(heading) <= SHORT or not mark:
        return escaped(heading)
    end, start = (",", "") if mark == ", " else ("", "= ")
    return f"\\shortstack[r]{{{escaped(first)}{end}\\\\{{}}{start}{escaped(second)}}}"


def body(made: Grid) -> list[str]:
    """The rows of a table, each with the paper's figures beneath it where it prints some."""
    lines: list[str] = []
    for before, line in zip([None, *made.lines], made.lines, strict=False):
        if before is not None and line.reference and not before.reference:
            lines.append("\\midrule")
        elif before is not None and any(map(beneath, before.entries)):
            lines.append("\\addlinespace[2pt]")
        lines += row(line)
    return lines


def row(line: Line) -> list[str]:
    """A row of a table, and beneath it that of the paper's figures, if there are some."""
    *labels, last = line.labels
    named = [escaped(label) for label in (*labels, last + " †" * line.own)]
    ours_row = ended([*named, *map(cell, line.entries)])
    paper_row = ended([*("" for _ in named), *map(beneath, line.entries)])
    return [ours_row, paper_row] if any(map(beneath, line.entries)) else [ours_row]


def ended(cells: list[str]) -> str:
    """A line of a table; a bracket or star at its start would be taken for an option of the line above."""
    line = " & ".join(cells)
    return ("{}" if line.startswith(("[", "*")) else "") + line + r" \\"


def cell(entry: Entry | None) -> str:
    """Our figure."""
    if entry is None:
        return ""
    value, _, std = ours(entry.figure).partition(" ± ")
    shown = f"\\textbf{{{escaped(value)}}}" if entry.best else escaped(value)
    star = "*" if entry.result.runs and lacking(entry.result) else ""
    return shown + (f" {escaped('± ' + std)}" if std else "") + star


def beneath(entry: Entry | None) -> str:
    """The paper's figure and how far ours is above it, in small print."""
    if entry is None or (printed := paper(entry.figure)) is None:
        return ""
    points = gap(entry)
    words = [printed, *([] if points is None else [signed(points)])]
    return f"\\scriptsize({escaped(', '.join(words))})"


def escaped(text: str) -> str:
    """Any text as LaTeX shows it; what its usual fonts do not have becomes a question mark."""
    return "".join(SPECIAL.get(character) or plain(character) for character in " ".join(text.split()))


def plain(character: str) -> str:
    """A letter that every LaTeX has, accents included; nothing that it would take for a command."""
    known = character.isascii() and character.isprintable()
    accented = unicodedata.category(character).startswith("L") and ord(character) < 0x180
    return character if known or accented else "?"
