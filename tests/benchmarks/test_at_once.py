"""Runs per hour for several runs at once."""

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import at_once
from benchmarks.at_once import counted_rounds, in_words, measured, prepared, written
from fedhassle.runs.events import Event

FEW = ["method=fedavg", "method.epochs=1", "net=lenet", "device=cpu", "threads=1", "rounds=100000"]


def test_rounds_of_processes_are_counted_after_their_warmup(tmp_path):
    runs = prepared([*FEW, f"data={written(tmp_path, 400)}"], 2, tmp_path / "runs")
    assert [run.settings.seed for run in runs] == [0, 1]
    found = measured("processes", runs, 0.5, 300)
    assert found["rounds_per_second"] > 0
    assert found["runs_per_hour"] == pytest.approx(18 * found["rounds_per_second"])


@pytest.fixture
def clock(monkeypatch):
    """A clock of the benchmark alone, which is a second later at each look."""
    ticks = itertools.count()
    monkeypatch.setattr(at_once, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


def rounds(*runs):
    return [Event(run, step=object()) for run in runs]


def test_only_rounds_after_the_slowest_warmup_count(clock):
    """Run 1 has its third round as the ninth event; four more end in four seconds: one a second."""
    events = rounds(0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0)
    assert counted_rounds(events, 2, 3, 4, 60) == {
        "warmup": 9,
        "rounds_per_second": 1.0,
        "runs_per_hour": 18.0,
    }


def test_a_run_that_ends_or_a_long_warmup_is_an_error(clock):
    assert counted_rounds([Event(0, error=ValueError("too hot"))], 1, 3, 4, 60) == {
        "error": "a run ended: too hot"
    }
    assert counted_rounds(rounds(0, 0), 1, 3, 4, 1) == {"error": "the first 3 rounds took more than 1 s"}


def test_the_first_measurement_is_the_one_to_compare_with():
    one = {"way": "threads", "runs": 1, "warmup": 3.0, "runs_per_hour": 20.0}
    many = one | {"way": "processes", "runs": 8, "runs_per_hour": 50.0}
    assert in_words(many, one) == "8 at once, processes: 50.0 runs per hour, 2.50 times one (ready after 3 s)"
    assert in_words(one | {"error": "no"}, one) == "1 at once, threads: no"
