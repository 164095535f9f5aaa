"""A report as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import resources

from fedhassle.data.split.dots import MOST_NAMES
from fedhassle.reproduce.report.content import MISSING, OTHER, Report, Result, Section
from fedhassle.reproduce.report.findings import (
    CONFIRMED,
    IN_PART,
    NOT,
    SO_FAR,
    UNKNOWN,
    WITHIN,
    Finding,
    Pair,
    Side,
    findings,
)
from fedhassle.reproduce.report.grid import Entry, Grid, Line, grid
from fedhassle.reproduce.report.markup import Markup, joined, tag
from fedhassle.reproduce.report.plots import (
    Drawing,
    accuracy_by_round,
    draw_holdings,
    drawn,
    shared_split,
    splits,
)
from fedhassle.reproduce.report.wording import (
    HOW_TO_READ,
    MISSING_MARK,
    command,
    gap,
    noise,
    notes,
    ours,
    paper,
    seeds_of,
    signed,
    source,
)
from fedhassle.reproduce.tables import changed_settings
from fedhassle.runs.seeds import spread
from fedhassle.settings.build import Holdings
from fedhassle.version import package_version

MARKS = {CONFIRMED: "✓", WITHIN: "≈", SO_FAR: "○", IN_PART: "~", NOT: "✗", UNKNOWN: "…"}
LOOKS = {
    **{CONFIRMED: "yes", WITHIN: "part", SO_FAR: "sofar", IN_PART: "part", NOT: "no", UNKNOWN: "unknown"},
}

Environments = dict[tuple[str, str], str]
"""A letter for each machine and set of versions."""

Splits = Mapping[str, Holdings]
"""Who holds what in an experiment, by the choices that make it so."""


def page(report: Report) -> str:
    """The whole page."""
    environments = lettered(report)
    every = {one.experiment.name: splits(one) for one in report.sections}
    shared = shared_split(list(every.values()))
    style = resources.files("fedhassle.reproduce.report").joinpath("style.css").read_text("utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"fedhassle: {report.title}"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#results", class_="skip"),
        header(report),
        tag(
            "main",
            contents(report),
            *found(report),
            how_to_read(),
            who_holds_what(shared),
            *(section_of(one, environments, every[one.experiment.name], shared) for one in report.sections),
            made_with(environments),
            left_out(report),
            id="results",
        ),
        tag("footer", tag("p", f"Made by fedhassle {package_version()} from a ledger of finished runs.")),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def lettered(report: Report) -> Environments:
    """A letter for each machine and set of versions that made a run."""
    runs = (run for one in report.sections for result in one.results for run in result.runs)
    different = dict.fromkeys((run.machine, run.versions) for run in runs)
    return dict(zip(different, letters(), strict=False))


def letters() -> itertools.chain[str]:
    """A, B, … Z, A1, B1 and so on."""
    alphabet = [chr(ord("A") + i) for i in range(26)]
    return itertools.chain(alphabet, (f"{one}{n}" for n in itertools.count(1) for one in alphabet))


def header(report: Report) -> Markup:
    """What this is, and how much of it there is."""
    every = len(report.sections)
    facts = [
        (report.done, report.runs, "runs done"),
        (sum(one.done > 0 for one in report.sections), every, "experiments begun"),
        (sum(one.done == one.cells for one in report.sections), every, "experiments complete"),
    ]
    tiles = [
        tag("div", tag("dt", what), tag("dd", f"{n:,}", tag("small", f" of {of:,}")), class_="tile")
        for n, of, what in facts
    ]
    about = (
        "Federated semi-supervised learning with annotation heterogeneity (Shang et al., arXiv 2303.02445): "
        "HASSLE with SUMA and its rivals, our figures beside the paper's."
        if report.of_paper
        else "Federated semi-supervised learning: what came of our own experiments."
    )
    changed = dict.fromkeys(itertools.chain(*(one.changes for one in report.sections)))
    return tag(
        "header",
        tag("p", "fedhassle", class_="brand"),
        tag("h1", report.title),
        tag("p", about, class_="lead"),
        *([tag("p", tag("strong", f"Changed settings: {' '.join(changed)}."))] if changed else []),
        tag("dl", *tiles, class_="tiles"),
    )


def found(report: Report) -> list[Markup]:
    """What the figures say of the paper's claims."""
    every = findings(report)
    if not every:
        return []
    known = [finding_item(one) for one in every if one.known]
    unknown = [tag("li", claim_of(one), f": {one.numbers}") for one in every if not one.known]
    intro = (
        "Computed from the figures below: a claim comes to pairs of figures, compared on the seeds both have."
    )
    parts = [
        tag("h2", "Do the paper's claims hold?"),
        tag("p", " ".join(filter(None, [intro, noise(every)]))),
    ]
    if known:
        parts.append(tag("ul", *known, class_="findings"))
    if unknown:
        parts += [tag("h3", "Not enough data yet"), tag("ul", *unknown, class_="unknown-claims")]
    return [tag("section", *parts, id="findings")]


def claim_of(finding: Finding) -> Markup:
    """A claim, with a link to its experiment."""
    origin = tag("a", source(finding.section), href=f"#{finding.section.experiment.name}")
    return joined(tag("strong", finding.claim.says), " ", tag("span", origin, class_="from"))


def finding_item(finding: Finding) -> Markup:
    """A claim, the verdict on it, and the comparisons."""
    badge = tag(
        "span", f"{MARKS[finding.verdict]} {finding.verdict}", class_=f"badge {LOOKS[finding.verdict]}"
    )
    line = tag("p", badge, " ", claim_of(finding))
    comparisons = (
        [tag("details", tag("summary", "the comparisons"), pairs_table(finding.known))]
        if finding.known
        else []
    )
    return tag(
        "li",
        line,
        tag("p", f"{finding.numbers[0].upper()}{finding.numbers[1:]}", class_="numbers"),
        *comparisons,
    )


def pairs_table(pairs: Sequence[Pair]) -> Markup:
    """Comparisons, a line each."""
    rows = [
        tag(
            "tr",
            tag("th", pair.where or MISSING_MARK, scope="row"),
            tag("td", side(pair.high, pair)),
            tag("td", "near" if pair.near else "no lower than"),
            tag("td", side(pair.low, pair)),
            tag("td", difference(pair.gap, pair.unit.decimals)),
            tag("td", seeds_of(pair.seeds)),
        )
        for pair in pairs
    ]
    titles = ("where", "this", "is, it says,", "that", "difference", "seeds")
    head = tag("tr", *(tag("th", word, scope="col") for word in titles))
    return scrolled(tag("table", tag("thead", head), tag("tbody", *rows)), "comparisons")


def side(one: Side, pair: Pair) -> Markup:
    """One of two figures that are compared, over the seeds of both."""
    value = spread([one.values[seed] for seed in pair.seeds])
    return joined(one.label, " ", tag("span", pair.unit.spread_text(value), class_="ours"))


def difference(points: float | None, decimals: int = 2) -> Markup:
    """A difference with its sign, coloured by it."""
    if points is None:
        return Markup("")
    least = 0.5 * 10**-decimals
    look = "above" if points >= least else "below" if points <= -least else "level"
    return tag("span", signed(points, decimals), class_=f"gap {look}")


def scrolled(table: Markup, about: str) -> Markup:
    """A table that scrolls by itself where it is wider than the page; by the keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0", role="group", aria_label=about)


def contents(report: Report) -> Markup:
    """The experiments and how much of each is done."""
    items = []
    for one in report.sections:
        experiment = one.experiment
        bar = tag(
            "progress",
            f"{one.done} of {one.cells}",
            value=one.done,
            max=one.cells,
            aria_label=f"{experiment.name} done",
        )
        items.append(
            tag(
                "li",
                tag("span", experiment.source or experiment.name, class_="from"),
                tag("a", experiment.title, href=f"#{experiment.name}"),
                tag("span", bar, f" {one.done} of {one.cells}", class_="done"),
            )
        )
    return tag(
        "nav",
        tag("h2", "Contents", id="contents-title"),
        tag("ul", *items),
        class_="contents",
        aria_labelledby="contents-title",
    )


def how_to_read() -> Markup:
    """What the marks mean."""
    marks = [
        (tag("span", "72.34", class_="ours"), "ours: an accuracy in %, where nothing else is said"),
        (tag("span", "71.11", class_="second"), "beneath it the paper's"),
        (difference(1.23), "ours is above the paper's, in points"),
        (difference(-1.23), "ours is below it"),
        (tag("b", "72.34"), "the best of ours in a column (or row) in which all rivals but † have run"),
        (
            tag("span", "best on seed 0", class_="note"),
            "as far as all there have the same seeds: on this one",
        ),
        (tag("span", "seed 0", class_="note"), "the only one that is asked for"),
        (tag("span", "1 of 3 seeds", class_="note"), "fewer seeds than asked for, or other rounds"),
        (tag("span", MISSING_MARK, class_="none"), "not run yet"),
        (tag("span", "†", class_="own"), "the paper does not have it"),
    ]
    items = [tag("li", mark, tag("span", words)) for mark, words in marks]
    return tag(
        "section",
        tag("h2", "How to read the tables"),
        tag("p", HOW_TO_READ),
        tag("ul", *items, class_="marks"),
    )


def who_holds_what(shared: Holdings | None) -> Markup:
    """The dot picture of the split that experiments share."""
    if shared is None:
        return Markup("")
    picture = figure_of(draw_holdings(shared, "split-shared"))
    return tag("section", tag("h2", "Who holds what"), picture, id="split")


def splits_of(name: str, its: Splits) -> list[Markup]:
    """The dot pictures of an experiment's own splits; of many classes they would be rows without names."""
    drawable = {words: held for words, held in its.items() if len(held.class_names) <= MOST_NAMES}
    figures = [
        figure_of(draw_holdings(held, f"split-{name}-{i}", words))
        for i, (words, held) in enumerate(drawable.items())
    ]
    rest = [words for words in its if words not in drawable]
    note = [tag("p", f"Not drawn, with more than {MOST_NAMES} classes: {'; '.join(rest)}.")] if rest else []
    grid_of = tag("div", *figures, class_="splits")
    return [tag("details", tag("summary", "Who holds what"), grid_of, *note)] if figures else []


def section_of(section: Section, environments: Environments, its: Splits, shared: Holdings | None) -> Markup:
    """An experiment: what it is, its figure, its table, and how they were made."""
    experiment, made = section.experiment, grid(section)
    says = () if section.paper is None else section.paper.says
    where = f"{source(section)} · " if section.experiment.source else ""
    about = tag(
        "p", where, tag("code", experiment.name), f" · {section.done} of {section.cells} runs", class_="from"
    )
    parts = [
        tag("h2", experiment.title),
        about,
        *([tag("p", experiment.about)] if experiment.about else []),
        *([tag("p", tag("strong", changed_settings(section.changes)))] if section.changes else []),
        *(tag("p", f"The paper: {text}", class_="says") for text in says),
        *(figure_of(one) for one in drawn(section, made)),
        table_of(made, experiment.title),
        *rounds_of(section),
        *splits_of(experiment.name, {words: held for words, held in its.items() if held != shared}),
        provenance(section, environments),
    ]
    return tag("section", *parts, id=experiment.name, class_="experiment")


def rounds_of(section: Section) -> list[Markup]:
    """The curves of what a table shows the ends of."""
    charts = accuracy_by_round(section) if section.experiment.show == "table" else []
    figures = [figure_of(one) for one in charts]
    return [tag("details", tag("summary", "Accuracy by round"), *figures)] if figures else []


def figure_of(drawing: Drawing) -> Markup:
    """A figure with its caption."""
    return tag("figure", drawing.picture, tag("figcaption", drawing.caption))


def table_of(made: Grid, title: str) -> Markup:
    """A grid with our figures above the paper's."""
    levels = len(made.headings[0]) if made.headings else 1
    head = [header_row(made, level, levels) for level in range(levels)]
    rows = []
    for before, line in zip([None, *made.lines], made.lines, strict=False):
        first = line.reference and not (before is not None and before.reference)
        rows.append(row_of(line, first))
    table = tag("table", tag("caption", title), tag("thead", *head), tag("tbody", *rows), class_="figures")
    return scrolled(table, title)


def header_row(made: Grid, level: int, levels: int) -> Markup:
    """One level of the headings; neighbours under one heading share it."""
    stub = (
        [tag("th", name, scope="col", rowspan=levels if levels > 1 else None) for name in made.stub]
        if not level
        else []
    )
    cells = []
    for (_, word), group in itertools.groupby((names[: level + 1], names[level]) for names in made.headings):
        width = len(list(group))
        several = level + 1 < levels
        cells.append(
            tag("th", word, scope="colgroup" if several else "col", colspan=width if width > 1 else None)
        )
    return tag("tr", *stub, *cells)


def row_of(line: Line, first: bool) -> Markup:
    """A row of a table."""
    *labels, last = line.labels
    named = joined(last, tag("span", "†", class_="own", title="not in the paper")) if line.own else last
    stub = [tag("th", label, scope="row") for label in (*labels, named)]
    look = " ".join(word for word, holds in (("reference", line.reference), ("first", first)) if holds)
    return tag("tr", *stub, *(cell_of(entry) for entry in line.entries), class_=look or None)


def cell_of(entry: Entry | None) -> Markup:
    """Our figure, what it lacks, and beneath it the paper's with the difference."""
    if entry is None:
        return tag("td", class_="blank")
    figure, result = entry.figure, entry.result
    second = []
    if (beside := paper(figure)) is not None:
        printed = tag("span", beside, class_="paper", title="the paper's")
        second = [tag("span", printed, " ", difference(gap(entry)), class_="second")]
    if result.status == MISSING or figure.ours is None:
        words = "not run" if result.status == MISSING else "nothing to count"
        mark = tag("span", MISSING_MARK, class_="none", title=words, aria_label=words, role="img")
        return tag("td", mark, *second, class_="missing")
    value, _, std = ours(figure).partition(" ± ")
    spread = [tag("span", f" ± {std}", class_="std")] if std else []
    shown = tag("span", tag("b", value) if entry.best else value, *spread, class_="ours")
    note = [tag("span", words, class_="note") for words in notes(entry)]
    return tag("td", shown, *second, *note, class_="other" if result.status == OTHER else None)


def provenance(section: Section, environments: Environments) -> Markup:
    """How every number was made."""
    ran = [one for one in section.results if one.runs]
    rest = sum(one.status == MISSING for one in section.results)
    parts = [tag("p", "All of it: ", tag("code", command(section)))]
    if ran:
        titles = ("cell", "seeds", "rounds", "minutes a run", "settings", "made with", "files", "command")
        head = tag("tr", *(tag("th", word, scope="col") for word in titles))
        rows = [provenance_row(section, one, environments) for one in ran]
        parts.append(
            scrolled(tag("table", tag("thead", head), tag("tbody", *rows)), "how the figures were made")
        )
    if rest:
        parts.append(tag("p", f"{rest} of {len(section.results)} cells have not run with any seed."))
    return tag("details", tag("summary", "How every number was made"), *parts, class_="made")


def provenance_row(section: Section, result: Result, environments: Environments) -> Markup:
    """How the runs of a cell were made."""
    runs = result.runs
    minutes = sum(run.seconds for run in runs) / len(runs) / 60
    used = dict.fromkeys(environments[run.machine, run.versions] for run in runs)
    links = [joined(", " if i else "", tag("a", one, href=f"#made-{one}")) for i, one in enumerate(used)]
    cells = [
        seeds_of(run.seed for run in runs) + f" ({len(runs)} of {result.headline.seeds})",
        str(result.rounds),
        f"{minutes:.1f}",
        tag("code", *dict.fromkeys(run.settings_hash for run in runs)),
        joined(*links),
        joined(*(tag("div", tag("code", run.file)) for run in runs)),
        tag("code", command(section, result)),
    ]
    return tag("tr", tag("th", tag("code", result.name), scope="row"), *(tag("td", one) for one in cells))


def made_with(environments: Environments) -> Markup:
    """The machines and versions that the letters stand for."""
    if not environments:
        return Markup("")
    rows = [
        joined(tag("dt", letter, id=f"made-{letter}"), tag("dd", f"{machine}; {versions}"))
        for (machine, versions), letter in environments.items()
    ]
    return tag(
        "section", tag("h2", "Machines and versions"), tag("dl", *rows, class_="environments"), id="machines"
    )


def left_out(report: Report) -> Markup:
    """Files of the ledger that do not count."""
    if not report.skipped:
        return Markup("")
    items = [tag("li", reason) for reason in report.skipped]
    intro = tag("p", "These files of the ledger do not count:")
    return tag("section", tag("h2", "Left out"), intro, tag("ul", *items), id="left-out")
