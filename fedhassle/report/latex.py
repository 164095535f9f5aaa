"""The tables of a report for a paper in LaTeX; they need the package booktabs alone."""

from __future__ import annotations

import itertools
import re
import unicodedata

from fedhassle.report.content import Report, Section
from fedhassle.report.grid import Entry, Grid, Line, grid
from fedhassle.report.wording import (
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
from fedhassle.reproduce.text import changed_settings

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"$<$", ">": r"$>$", "|": r"$|$", '"': "''"},
    **{"±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "≥": r"$\ge$", "≤": r"$\le$", "·": r"$\cdot$"},
    **{"✓": r"$\surd$", "✗": r"$\times$", "†": r"\textdagger{}", "…": r"\dots{}", "–": "--", "—": "---"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
}


def latex(report: Report) -> str:
    """A table for each experiment."""
    head = ["% Made by fedhassle report. In the preamble: \\usepackage{booktabs}"]
    return "\n\n".join([*head, *(table(section) for section in report.sections)]) + "\n"


def table(section: Section) -> str:
    """An experiment as a floating table."""
    made, experiment = grid(section), section.experiment
    stubs, width = len(made.stub), len(made.headings)
    where = f" ({source(section)})" if source(section) else ""
    words = [f"{experiment.title}{where}.", changed_settings(section.changes), HOW_TO_READ, marks(made)]
    caption = " ".join(filter(None, words))
    rows = [row(line) for line in made.lines]
    rules = [line.reference and not before.reference for before, line in itertools.pairwise(made.lines)]
    body = [
        rows[0],
        *(("\\midrule\n" if rule else "") + one for rule, one in zip(rules, rows[1:], strict=True)),
    ]
    return "\n".join(
        [
            "\\begin{table}",
            "\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}",
            f"\\caption{{{escaped(caption)}}}",
            f"\\label{{tab:{re.sub(r'[^A-Za-z0-9-]', '', experiment.name)}}}",
            f"\\begin{{tabular}}{{{'l' * stubs}{'r' * width}}}",
            "\\toprule",
            *headings(made),
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
        ]
    )


def marks(made: Grid) -> str:
    """What the marks of a table mean, those that it has."""
    entries = [entry for line in made.lines for entry in line.entries if entry is not None]
    words = []
    if any(paper(entry.figure) is not None for entry in entries):
        words.append("In parentheses the paper's figure and how far ours is above it.")
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
            cells.append(escaped(word) if width == 1 else f"\\multicolumn{{{width}}}{{c}}{{{escaped(word)}}}")
            rules.append(f"\\cmidrule(lr){{{column}-{column + width - 1}}}")
            column += width
        lines.append(ended(cells))
        if not last:
            lines.append("".join(rules))
    return lines


def row(line: Line) -> str:
    """A row of a table."""
    *labels, last = line.labels
    named = [*labels, last + " †" * line.own]
    return ended([*(escaped(label) for label in named), *(cell(entry) for entry in line.entries)])


def ended(cells: list[str]) -> str:
    """A line of a table; a bracket or star at its start would be taken for an option of the line above."""
    line = " & ".join(cells)
    return ("{}" if line.startswith(("[", "*")) else "") + line + r" \\"


def cell(entry: Entry | None) -> str:
    """Our figure, and the paper's with the difference."""
    if entry is None:
        return ""
    value, _, std = ours(entry.figure).partition(" ± ")
    shown = f"\\textbf{{{escaped(value)}}}" if entry.best else escaped(value)
    star = "*" if entry.result.runs and lacking(entry.result) else ""
    beside, points = paper(entry.figure), gap(entry)
    words = [] if beside is None else [beside, *([] if points is None else [signed(points)])]
    return (
        shown
        + (f" {escaped('± ' + std)}" if std else "")
        + star
        + (f" ({escaped(', '.join(words))})" if words else "")
    )


def escaped(text: str) -> str:
    """Any text as LaTeX shows it; what its usual fonts do not have becomes a question mark."""
    return "".join(SPECIAL.get(character) or plain(character) for character in " ".join(text.split()))


def plain(character: str) -> str:
    """A letter that every LaTeX has, accents included; nothing that it would take for a command."""
    known = character.isascii() and character.isprintable()
    accented = unicodedata.category(character).startswith("L") and ord(character) < 0x180
    return character if known or accented else "?"
