"""What a person sees of several runs: a line each that fits, or a line now and then."""

import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from fedhassle.runs import live
from fedhassle.runs.seeds import grouped
from fedhassle.runs.several import Event
from fedhassle.runs.live import OF_SEVERAL, follow_together

NAME = "table1 cifar100-10%-fixmatch-global-0"
CLIENT = SimpleNamespace(kind="partial")


def line(width, name=NAME):
    """A run of which 12 of 200 rounds are done, in a terminal of some width."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = Progress(*OF_SEVERAL, console=console)
    progress.update(progress.add_task(name, total=200, score="model 73.5%", clients=""), completed=12)
    console.print(progress)
    (shown,) = console.file.getvalue().splitlines()
    return shown


@pytest.mark.parametrize("width", [60, 80, 150])
def test_a_narrow_terminal_takes_from_the_name_alone(width):
    shown = line(width)
    assert "round  12/200" in shown and "0:00:00 left -:--:-- model 73.5%" in shown and len(shown) <= width


def test_of_a_name_that_is_too_long_the_end_is_shown():
    assert line(80).startswith("…10%-fixmatch-global-0 ") and line(150).startswith(NAME)
    assert line(80, "short").startswith("short ")


def test_a_long_run_says_where_it_is_where_no_line_moves(monkeypatch):
    """Rounds of 50 seconds, of which every second is evaluated, by a clock that is set by hand."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now.time))
    metrics = {"accuracy": {"EM": 0.5}, "seconds": 50.0}

    def events():
        yield Event(0, begun=SimpleNamespace(name="run", rounds=7, headline="EM"))
        for t in range(1, 8):
            now.time += 50
            yield Event(0, step=SimpleNamespace(t=t, metrics=None if t % 2 else metrics, clients=[CLIENT]))
        yield Event(0)

    console = Console(file=io.StringIO(), width=80)
    follow_together(events(), console, lambda event: "a", lambda event: "a has ended")
    assert console.file.getvalue().splitlines() == [
        "a  round 3/7  1 partial",
        "a  round 6/7  EM 50.0%  1 partial  50.0 s",
        "a has ended",
    ]


def test_what_a_run_of_several_has_to_say_stands_behind_its_name():
    """Of one of several runs by the name that it is shown with; of anything else as it is."""
    log = logging.getLogger("fedhassle")

    def events():
        yield Event(0, begun=SimpleNamespace(name="folder", rounds=1, headline="EM"))
        log.warning("of the run", extra={"run": "folder"})
        log.warning("of another", extra={"run": "elsewhere"})
        log.warning("of nobody")
        yield Event(0)

    console = Console(file=io.StringIO(), width=80)
    follow_together(events(), console, lambda event: "table1 [a]")
    shown = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert shown == ["table1 [a]  of the run", "of another", "of nobody"]


def rows(summary):
    """The first cells of a run's table."""
    score = dict.fromkeys(("mean_of_last", "last", "best"), 0.5)
    known = {"method": "mine", "data": "any", "rounds": 2, "seed": 0, "headline": "EM", "history": [{}]}
    (cells, *_) = live.final_table(known | {"accuracy": {"EM": score, "w": score}} | summary).columns
    return list(cells.cells)


def test_the_table_of_a_run_says_what_its_modes_are():
    """By its summary; by the method of that name where the summary is older; not by the prediction's name."""
    assert rows({"modes": {"EM": "mine"}}) == ["EM  mine", "w"]
    assert rows({"method": "hassle"}) == ["EM  mean of SM and UM", "w"]
    assert rows({}) == rows({"modes": {"EM": ""}}) == ["EM", "w"]


@pytest.mark.parametrize("data", ["a [b].npz", "a [/b].npz"])
def test_the_table_of_a_run_shows_any_name(data):
    score = dict.fromkeys(("mean_of_last", "last", "best"), 0.5)
    summary = {"method": "mine", "data": data, "rounds": 2, "seed": 0, "headline": "[x]", "history": [{}]}
    console = Console(width=100, file=io.StringIO())
    console.print(live.final_table(summary | {"accuracy": {"[x]": score}}))
    shown = console.file.getvalue()
    assert data in shown and "[x]" in shown


def test_a_comparison_has_what_clients_sent_and_how_long_it_took():
    """Two seeds of two lines: up 2·(1 + 2 + 3) and 2·(3 + 4 + 5) MB, in 1 and 2 minutes; down is no part."""
    score = dict.fromkeys(("mean_of_last", "last", "best"), 0.5)

    def summary(seed):
        up = {kind: (n + 2 * seed) * 1e6 for n, kind in enumerate(("full", "partial", "unlabelled"), start=1)}
        line = {"accuracy": {"EM": 0.5}, "bytes_up": up, "bytes_down": dict.fromkeys(up, 9e6)}
        about = {"method": "mine", "data": "small", "seed": seed, "settings_hash": "a", "settings": {}}
        figures = {"accuracy": {"EM": score}, "headline": "EM", "seconds": 60.0 * (1 + seed)}
        return about | figures | {"history": [line | {"round": 1}, line | {"round": 2}]}

    console = Console(width=100, file=io.StringIO())
    console.print(live.comparison_table(grouped([summary(0), summary(1)])))
    _, titles, _, row = (line for line in console.file.getvalue().splitlines() if line.strip())
    assert titles.split() == ["run", "seeds", "prediction", "accuracy", "best", "MB", "up", "min"]
    assert row.split() == ["mine", "2", "EM", "50.00", "±", "0.00", "50.00", "18", "1.5"]
