"""The ledger: finished runs as files, found by settings and seed, merged by copying."""

import json
import math
import shutil
from pathlib import Path

import ledgers
import pytest

from fedhassle.errors import UserError
from fedhassle.reproduce.experiment import cells, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.runs.run import Identity

RESULTS = Path(__file__).parents[2] / "results"
HASH = "0123456789abcdef"


def summary(seed=0, settings_hash=HASH, method="fedavg", seconds=20.0, machine="a", **changes):
    """The summary of a run of ten rounds."""
    line = {"round": 10, "accuracy": {"model": 0.5}, "bytes_up": {"full": 1}}
    return {
        **{"format": 1, "method": method, "data": "cifar10", "seed": seed, "settings": {}},
        **{"settings_hash": settings_hash, "rounds": 10, "headline": "model", "seconds": seconds},
        "accuracy": {"model": {"last": 0.5, "best": 0.6, "mean_of_last": 0.5}},
        "hardware": {"gpu": None, "cpu": machine, "threads": 2},
        "history": [line],
        **changes,
    }


def run(seed=0, settings_hash=HASH, method="fedavg", rounds=10, machine="a"):
    """A run as it is known before it begins."""
    return Identity(settings_hash, seed, method, "cifar10", rounds, "cpu", f"{machine}, 2 threads")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_run_is_found_by_its_settings_and_its_seed(tmp_path):
    write(tmp_path / "deep" / "down" / "any name.json", summary(seed=3))
    ledger = Ledger(tmp_path)
    assert run(3) in ledger and ledger.summary(run(3))["seed"] == 3
    assert run(0) not in ledger and ledger.summary(run(0)) is None
    assert run(3, "f" * 16) not in ledger


def test_no_folder_is_an_empty_ledger(tmp_path):
    ledger = Ledger(tmp_path / "none")
    assert run() not in ledger and not ledger.skipped


def test_the_results_of_this_repository_are_a_ledger():
    """With as many runs as there are, even none: every file counts."""
    ledger = Ledger(RESULTS)
    assert RESULTS.is_dir() and not ledger.skipped
    for path in RESULTS.rglob("*.json"):
        found = json.loads(path.read_text("utf-8"))
        assert run(found["seed"], found["settings_hash"]) in ledger


def test_cells_of_the_paper_are_found_by_their_identity(tmp_path):
    cell, other, *_ = cells(read_experiment("table1"))
    ledgers.put(tmp_path, ledgers.summary(cell, {"model": 0.5}))
    assert cell.identity in Ledger(tmp_path) and other.identity not in Ledger(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"a": 1}', '"text"', "\0"),
        summary(format=2),
        summary(hardware=None),
        summary(rounds=0),
        summary(history=[]),
        summary(history=[{**summary()["history"][0], "pseudo_label_share": "much"}]),
        summary(class_accuracy={"cat": "good"}),
        summary(class_accuracy={"cat\x1b[2J": 1.0}),
        *(summary(**{key: math.nan}) for key in ("seed", "rounds", "seconds")),
        pytest.param("[" * 100_000 + "]" * 100_000, id="deep"),
        {key: value for key, value in summary().items() if key != "settings_hash"},
        {key: value for key, value in summary().items() if key != "hardware"},
    ],
    ids=str,
)
def test_a_foreign_or_broken_file_is_skipped_and_named_once(content, tmp_path):
    write(tmp_path / "foreign.json", content)
    write(tmp_path / "good.json", summary(seed=1))
    ledger = Ledger(tmp_path)
    assert run(1) in ledger and run(0) not in ledger
    assert list(ledger.skipped) == [tmp_path / "foreign.json"]
    assert "foreign.json" in ledger.skipped[tmp_path / "foreign.json"]
    ledger.skipped.clear()
    ledger.refresh()
    assert not ledger.skipped


def test_other_files_and_unfinished_ones_are_ignored(tmp_path):
    write(tmp_path / "README.md", "no summary")
    write(tmp_path / ".writing-x.json", '{"form')
    assert not Ledger(tmp_path).skipped


def test_a_finished_run_gets_a_readable_name(tmp_path):
    ledger = Ledger(tmp_path / "results")
    path = ledger.add(summary(seed=2), together=3)
    assert path == tmp_path / "results" / "cifar10" / "fedavg-01234567-2.json"
    assert run(2) in ledger and run(2) in Ledger(tmp_path / "results")
    assert json.loads(path.read_text()) == {**summary(seed=2), "together": 3}
    odd = ledger.add(summary(settings_hash="b" * 16, method="my.own:Method", data="a b.npz"))
    assert odd == tmp_path / "results" / "a.b.npz" / "my.own.Method-bbbbbbbb-0.json"


def test_a_file_is_never_overwritten(tmp_path):
    ledger = Ledger(tmp_path)
    first = ledger.add(summary(seconds=1.0))
    before = first.read_text()
    assert ledger.add(summary(seconds=2.0)) == first and first.read_text() == before
    place = tmp_path / "cifar10" / "fedavg-01234567-7.json"
    write(place, "mine")
    longer = Ledger(tmp_path).add(summary(seed=7))
    assert longer.name == f"fedavg-{HASH}-7.json" and place.read_text() == "mine"
    longer.write_text("mine too")
    with pytest.raises(UserError, match="in the way"):
        Ledger(tmp_path).add(summary(seed=7))
    assert longer.read_text() == "mine too"


def test_ledgers_merge_by_copying(tmp_path):
    """One run that both have, and one that each has alone."""
    one, two = Ledger(tmp_path / "one"), Ledger(tmp_path / "two")
    for ledger, seeds in ((one, (0, 1)), (two, (1, 2))):
        for seed in seeds:
            ledger.add(summary(seed))
    shutil.copytree(two.folder, one.folder, dirs_exist_ok=True)
    shutil.copytree(two.folder, one.folder / "from elsewhere")
    assert run(2) not in one
    one.refresh()
    assert all(run(seed) in one for seed in (0, 1, 2)) and not one.skipped
    assert len(list((one.folder / "cifar10").iterdir())) == 3


def test_a_file_that_was_incomplete_is_read_again(tmp_path):
    whole, place = json.dumps(summary()), tmp_path / "a.json"
    write(place, whole[: len(whole) // 2])
    ledger = Ledger(tmp_path)
    assert run() not in ledger and list(ledger.skipped) == [place]
    write(place, whole)
    ledger.refresh()
    assert run() in ledger and not ledger.skipped


def test_a_changed_file_is_found_as_its_new_run_alone(tmp_path):
    """A copy that it stood for stands for itself then."""
    for name in ("a.json", "b.json"):
        write(tmp_path / name, summary())
    ledger = Ledger(tmp_path)
    assert ledger.path(run()) == tmp_path / "a.json"
    write(tmp_path / "a.json", summary(seed=12))
    ledger.refresh()
    assert ledger.path(run(12)) == tmp_path / "a.json" and ledger.path(run()) == tmp_path / "b.json"


def test_a_removed_file_is_forgotten(tmp_path):
    """A sweep that runs for days would count it as done, and fail when it shows its figures."""
    ledger = Ledger(tmp_path)
    ledger.add(summary(seed=0)).unlink()
    kept = ledger.add(summary(seed=1))
    assert run(0) not in ledger and ledger.path(run(1)) == kept


@pytest.mark.parametrize("first", ["a.json", "b.json"])
def test_of_two_results_of_one_run_the_first_by_path_is_used(first, tmp_path):
    """A copy, which was made beside other runs or took another time, is no other result."""
    scores = {"model": {"last": 0.4, "best": 0.6, "mean_of_last": 0.5}}
    files = {
        "a.json": summary(),
        "b.json": summary(accuracy=scores),
        "c.json": summary(seconds=9, together=2),
    }
    write(tmp_path / first, files[first])
    ledger = Ledger(tmp_path)
    assert not ledger.skipped
    for name, content in files.items():
        write(tmp_path / name, content)
    ledger.refresh()
    assert ledger.path(run()) == tmp_path / "a.json"
    (why,) = ledger.skipped.values()
    assert str(tmp_path / "a.json") in why and str(tmp_path / "b.json") in why


def test_durations_are_estimated_from_the_same_settings_and_machine(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.seconds(run()) is None
    ledger.add(summary(seed=0, seconds=20.0))
    ledger.add(summary(seed=1, seconds=40.0))
    ledger.add(summary(seed=2, seconds=30.0))
    assert ledger.seconds(run(seed=9)) == 30.0  # the median of 2, 4 and 3 seconds a round
    assert ledger.seconds(run(seed=9, rounds=100)) == 300.0
    assert ledger.seconds(run(machine="b")) is None
    assert ledger.seconds(run(method="hassle", settings_hash="b" * 16)) is None
    assert ledger.seconds(run(settings_hash="b" * 16)) == 30.0  # the method on the same images
    ledger.add(summary(settings_hash="c" * 16, seconds=90.0), together=3)
    assert ledger.seconds(run(settings_hash="c" * 16)) == 30.0  # a third of the machine
    ledger.add(summary(settings_hash="d" * 16, seconds=500.0))
    assert ledger.seconds(run(settings_hash="d" * 16)) == 500.0


def test_path_of_a_run_and_rounds_of_similar_runs(tmp_path):
    write(tmp_path / "a.json", summary())
    write(tmp_path / "b.json", summary(settings_hash="b" * 16, rounds=50))
    write(tmp_path / "c.json", summary(settings_hash="c" * 16, method="hassle", rounds=7))
    ledger = Ledger(tmp_path)
    assert ledger.path(run()) == tmp_path / "a.json" and ledger.path(run(1)) is None
    assert ledger.rounds(run(settings_hash="f" * 16)) == [50, 10]
    assert ledger.rounds(run(method="sage")) == []
