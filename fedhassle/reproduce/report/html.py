"""A report as one HTML page without scripts that loads nothing. Its text and layout are in page.html.j2."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from fedhassle.data.split.dots import MOST_NAMES
from fedhassle.reproduce.report import wording
from fedhassle.reproduce.report.content import MISSING, OTHER, CellResult, Report
from fedhassle.reproduce.report.findings import (
    CONFIRMED,
    IN_PART,
    NOT,
    SO_FAR,
    UNKNOWN,
    WITHIN,
    ComparedSide,
    Comparison,
    findings,
)
from fedhassle.reproduce.report.layout import ResultTable, diagnostics_tables, result_table
from fedhassle.reproduce.report.markup import writable
from fedhassle.reproduce.report.plots import (
    Drawing,
    accuracy_by_round,
    draw_holdings,
    drawings,
    shared_split,
    splits,
)
from fedhassle.reproduce.results import PERCENT
from fedhassle.reproduce.tables import changed_settings
from fedhassle.runs.seeds import Spread, spread
from fedhassle.settings.build import Holdings
from fedhassle.version import package_version

VERDICTS = {  # mark and class of each verdict
    CONFIRMED: ("✓", "yes"),
    WITHIN: ("≈", "part"),
    SO_FAR: ("○", "sofar"),
    IN_PART: ("~", "part"),
    NOT: ("✗", "no"),
    UNKNOWN: ("…", "unknown"),
}


def page(report: Report) -> str:
    """The whole page."""
    every = {one.experiment.name: splits(one) for one in report.sections}
    shared = shared_split(list(every.values()))
    letter = lettered(report)

    def made_with(result: CellResult) -> list[str]:
        return list(dict.fromkeys(letter[run.machine, run.versions] for run in result.runs))

    text = template().render(
        report=report,
        style=Markup(resource("style.css")),
        version=package_version(),
        findings=findings(report),
        changed=list(dict.fromkeys(itertools.chain(*(one.changes for one in report.sections)))),
        complete=sum(one.done == one.runs for one in report.sections),
        marks=marks_in(report),
        every=[result for section in report.sections for result in section.results],
        environments=letter,
        made_with=made_with,
        shared=None if shared is None else draw_holdings(shared, "split-shared"),
        splits={name: own_splits(name, its, shared) for name, its in every.items()},
    )
    return text.strip() + "\n"


def marks_in(report: Report) -> set[str]:
    """The marks that occur in the tables of a report, which its legend explains."""
    tables = [result_table(section) for section in report.sections]
    rows = [row for table in tables for row in table.rows]
    entries = [entry for row in rows for entry in row.cells if entry is not None]
    gaps = [gap for entry in entries if (gap := wording.gap(entry)) is not None]
    found = {
        "paper": any(wording.paper(entry.measurement) is not None for entry in entries),
        "above": any(gap > 0 for gap in gaps),
        "below": any(gap < 0 for gap in gaps),
        "best": any(entry.best for entry in entries),
        "best on": any(entry.best_on for entry in entries),
        "alone": any(note.startswith("seed ") for entry in entries for note in wording.notes(entry)),
        "lacking": any(wording.lacking(entry.result) not in ("", "not run") for entry in entries),
        "missing": any(entry.measurement.ours is None for entry in entries),
        "own": any(row.own for row in rows),
    }
    return {mark for mark, occurs in found.items() if occurs}


def resource(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files("fedhassle.reproduce.report").joinpath(name).read_text("utf-8")


@cache
def template() -> Template:
    """The template of the page, with the functions that it calls; it escapes every text."""
    environment = Environment(
        loader=FunctionLoader(resource),
        autoescape=True,
        finalize=writable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        **{"MISSING": MISSING, "OTHER": OTHER, "MOST_NAMES": MOST_NAMES, "VERDICTS": VERDICTS},
        **{"wording": wording, "changed_settings": changed_settings, "result_table": result_table},
        **{"drawings": drawings, "accuracy_by_round": accuracy_by_round, "heading_rows": heading_rows},
        **{"direction": direction, "side_text": side_text, "minutes": minutes},
        **{"diagnostics_tables": diagnostics_tables, "share_text": share_text},
    }
    return environment.get_template("page.html.j2")


def lettered(report: Report) -> dict[tuple[str, str], str]:
    """A letter for each machine and set of versions that made a run."""
    runs = (run for one in report.sections for result in one.results for run in result.runs)
    different = dict.fromkeys((run.machine, run.versions) for run in runs)
    return dict(zip(different, letters(), strict=False))


def letters() -> itertools.chain[str]:
    """A, B, … Z, A1, B1 and so on."""
    alphabet = [chr(ord("A") + i) for i in range(26)]
    return itertools.chain(alphabet, (f"{one}{n}" for n in itertools.count(1) for one in alphabet))


def own_splits(
    name: str, its: Mapping[str, Holdings], shared: Holdings | None
) -> tuple[list[Drawing], list[str]]:
    """The pictures of an experiment's own splits, and the names of those with too many classes to draw."""
    own = {words: held for words, held in its.items() if held != shared}
    drawable = {words: held for words, held in own.items() if len(held.class_names) <= MOST_NAMES}
    pictures = [
        draw_holdings(held, f"split-{name}-{i}", words) for i, (words, held) in enumerate(drawable.items())
    ]
    return pictures, [words for words in own if words not in drawable]


def heading_rows(table: ResultTable) -> list[list[tuple[str, int]]]:
    """The levels of a table's headings; neighbours share a heading, given with its number of columns."""
    levels = len(table.headings[0]) if table.headings else 1
    grouped = (itertools.groupby(names[: level + 1] for names in table.headings) for level in range(levels))
    return [[(names[-1], len(list(group))) for names, group in level] for level in grouped]


def direction(points: float, decimals: int) -> str:
    """The class of a difference: above, below, or level if it rounds to zero."""
    least = 0.5 * 10**-decimals
    return "above" if points >= least else "below" if points <= -least else "level"


def side_text(side: ComparedSide, comparison: Comparison) -> str:
    """One value of a comparison over the common seeds."""
    return comparison.unit.spread_text(spread([side.values[seed] for seed in comparison.seeds]))


def share_text(share: Spread | None) -> str:
    """A share in per cent, to one decimal."""
    return wording.MISSING_MARK if share is None else PERCENT._replace(decimals=1).spread_text(share)


def minutes(result: CellResult) -> str:
    """The mean duration of a result's runs."""
    return f"{sum(run.seconds for run in result.runs) / len(result.runs) / 60:.1f}"
