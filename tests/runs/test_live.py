"""Progress of several runs on the screen: live lines that fit, or a heartbeat; and result tables."""

import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from fedhassle.runs import live
from fedhassle.runs.events import Event
from fedhassle.runs.live import SEVERAL_RUNS, follow_several
from fedhassle.runs.seeds import grouped

NAME = "table1 cifar100-10%-fixmatch-global-0"
CLIENT = SimpleNamespace(kind="partial")


def line(width, name=NAME):
    """The line of a run after 12 of 200 rounds, in a terminal of some width."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = Progress(*SEVERAL_RUNS, console=console)
    progress.update(progress.add_task(name, total=200, score="model 73.5%", clients=""), completed=12)
    console.print(progress)
    (shown,) = console.file.getvalue().splitlines()
    return shown


@pytest.mark.parametrize("width", [60, 80, 150])
def test_only_the_name_is_shortened_in_a_narrow_terminal(width):
    shown = line(width)
    assert "round  12/200" in shown and "0:00:00 left -:--:-- model 73.5%" in shown and len(shown) <= width


def test_a_name_that_is_too_long_keeps_its_end():
    assert line(80).startswith("…10%-fixmatch-global-0 ") and line(150).startswith(NAME)
    assert line(80, "short").startswith("short ")


def test_a_long_run_has_a_heartbeat_without_a_terminal(monkeypatch):
    """Rounds of 50 seconds, every second one evaluated, by a fake clock."""
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
    follow_several(events(), console, lambda event: "a", lambda event: "a has ended")
    assert console.file.getvalue().splitlines() == [
        "a  round 3/7  1 partial",
        "a  round 6/7  EM 50.0%  1 partial  50.0 s",
        "a has ended",
    ]


def test_messages_of_one_of_several_runs_have_its_name():
    """The displayed name of the run comes first; other messages are unchanged."""
    log = logging.getLogger("fedhassle")

    def events():
        yield Event(0, begun=SimpleNamespace(name="folder", rounds=1, headline="EM"))
        log.warning("of the run", extra={"run": "folder"})
        log.warning("of another", extra={"run": "elsewhere"})
        log.warning("of nobody")
        yield Event(0)

    console = Console(file=io.StringIO(), width=80)
    follow_several(events(), console, lambda event: "table1 [a]")
    shown = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert shown == ["table1 [a]  of the run", "of another", "of nobody"]


def rows(summary):
    """The first cells of a run's table."""
    score = dict.fromkeys(("mean_of_last", "last", "best"), 0.5)
    known = {"method": "mine", "data": "any", "rounds": 2, "seed": 0, "headline": "EM", "history": [{}]}
    (cells, *_) = live.final_table(known | {"accuracy": {"EM": score, "w": score}} | summary).columns
    return list(cells.cells)


def test_the_table_of_a_run_describes_its_modes():
    """From its summary; from the method of that name if the summary is old."""
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


def test_a_comparison_has_upload_and_time():
    """Two seeds of two lines: up 2·(1 + 2 + 3) and 2·(3 + 4 + 5) MB, in 1 and 2 minutes; no download."""
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
