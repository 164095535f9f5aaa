"""Several runs in one process: in turn, or side by side in threads."""

import gc
import json
import logging
import weakref
from typing import NamedTuple

import pytest
import small
import torch
from small import call

import fedhassle
from fedhassle.engine.device import Engine
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.tensor_files import read_arrays
from fedhassle.errors import DivergedError, UserError
from fedhassle.runs import several, train
from fedhassle.runs.logs import info_level
from fedhassle.runs.run import start_several
from fedhassle.settings.request import combinations, request, variations

QUICK = ["rounds=2", "method.epochs=1", "evaluate_every=1"]
HASSLE = ["method=hassle", "method.residual_steps=2"]


def launched(folder, *choices, base=QUICK):
    """Runs that differ in some settings, ready to start."""
    return start_several([(name, request("quick", [*base, *words])) for name, words in choices], folder)


def in_threads(runs):
    """All runs at once."""
    return several.in_threads(runs, len(runs))


def ends(events):
    return {event.run: event.error for event in events if event.ended}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [("", [])]),
        (["seed=0,1"], [("0", ["seed=0"]), ("1", ["seed=1"])]),
        (["method=a, b", "seed=3"], [("a-3", ["method=a", "seed=3"]), ("b-3", ["method=b", "seed=3"])]),
        (
            ["a={b=1, c=[2, 3]},'x,y'", "d=[1,2],3"],
            [
                (f"{v}-{w}", [f"a={v}", f"d={w}"])
                for v in ("{b=1, c=[2, 3]}", "'x,y'")
                for w in ("[1,2]", "3")
            ],
        ),
        (["a=1,2", "b=3,4"], [(f"{v}-{w}", [f"a={v}", f"b={w}"]) for v in (1, 2) for w in (3, 4)]),
        (["a=1", "a=2"], [("1", ["a=1"]), ("2", ["a=2"])]),
    ],
)
def test_choices_are_combined(words, expected):
    assert variations(words) == expected


def test_choices_from_python_are_combined_by_the_same_names():
    vary = {"seed": [0, 1], "method.lr": [0.5], "split.labels": ["10%"]}
    assert combinations(vary.items()) == [
        (f"{seed}-0.5-10%", [("seed", seed), ("method.lr", 0.5), ("split.labels", "10%")]) for seed in (0, 1)
    ]


@pytest.mark.parametrize("word", ["seed", "=1,2", "seed=", "seed=0,,1"])
def test_an_invalid_choice_is_refused(word):
    with pytest.raises(UserError, match="KEY=V1,V2"):
        variations([word])


def test_side_by_side_and_in_turn_give_the_same_bits(tmp_path):
    """Three runs in threads against the same three one after another."""
    choices = [("s0", [*HASSLE, "seed=0"]), ("s1", [*HASSLE, "seed=1"]), ("avg", ["method=fedavg"])]
    for way, folder in ((in_threads, "threads"), (several.in_turn, "turns")):
        runs = launched(tmp_path / folder, *choices)
        events = list(way(runs))
        assert ends(events) == {0: None, 1: None, 2: None}
        rounds = [(event.run, event.step.t) for event in events if event.step is not None]
        assert sorted(rounds) == [(run, t) for run in range(3) for t in (1, 2)]
    for name, _ in choices:
        models = [read_arrays(tmp_path / way / name / "model.safetensors") for way in ("threads", "turns")]
        assert small.same(models[0][0], models[1][0])


@pytest.mark.parametrize("way", [in_threads, several.in_turn])
def test_an_error_in_one_run_does_not_stop_the_others(tmp_path, way):
    choices = [("bad", ["method.lr=1e30", "method.clip=0"]), ("good", [])]
    runs = launched(tmp_path, *choices, base=[*QUICK, "method=fedavg"])
    found = ends(way(runs))
    assert isinstance(found[0], DivergedError) and found[1] is None
    assert (tmp_path / "good" / "summary.json").exists()
    assert not (tmp_path / "bad" / "summary.json").exists()


@pytest.mark.parametrize("way", [in_threads, several.in_turn])
def test_an_error_does_not_keep_the_simulator_alive(tmp_path, way, monkeypatch):
    held = weakref.WeakSet()

    class Watched(Simulator):
        def __init__(self, *given):
            super().__init__(*given)
            held.add(self)

    monkeypatch.setattr("fedhassle.runs.train.Simulator", Watched)
    choices = [(name, ["method.lr=1e30", "method.clip=0"]) for name in ("one", "two")]
    errors = ends(way(launched(tmp_path, *choices, base=[*QUICK, "method=fedavg"])))
    gc.collect()
    assert all(isinstance(error, DivergedError) for error in errors.values()) and not held


def test_each_run_logs_to_its_own_file(tmp_path):
    """A warning in one run's thread is only in that run's log."""
    runs = launched(tmp_path, ("a", []), ("b", ["seed=1"]), base=[*QUICK, "method=fedavg", "rounds=3"])
    log = logging.getLogger("fedhassle")
    train_run = several.train_run

    def saying(run, sharing):
        for step in train_run(run, sharing):
            log.warning("this is %s", run.folder.path.name)
            yield step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several, "train_run", saying)
        assert set(ends(several.in_threads(runs, len(runs))).values()) == {None}
    for name, other in (("a", "b"), ("b", "a")):
        text = (tmp_path / name / "log.txt").read_text("utf-8")
        assert f"this is {name}" in text and f"this is {other}" not in text


def test_log_records_of_a_runs_thread_have_its_name(tmp_path):
    """Also side by side, when all records go to one console."""
    runs = launched(tmp_path, ("a", []), ("b", ["seed=1"]), base=[*QUICK, "method=fedavg"])
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append((record.run, record.threadName))
    log = logging.getLogger("fedhassle")
    log.addHandler(handler)
    try:
        with info_level():
            assert set(ends(several.in_threads(runs, len(runs))).values()) == {None}
    finally:
        log.removeHandler(handler)
    assert {("a", "run 0"), ("b", "run 1")} == set(said) and not log.filters


def test_runs_stop_when_the_caller_leaves_and_can_be_resumed(tmp_path):
    runs = launched(tmp_path, ("a", []), ("b", ["seed=1"]), base=[*QUICK, "method=fedavg", "rounds=50"])
    watching = in_threads(runs)
    next(event for event in watching if event.step is not None)
    watching.close()
    done = [len((tmp_path / n / "metrics.jsonl").read_text().splitlines()) for n in ("a", "b")]
    assert all(n < 50 for n in done) and max(done) >= 1
    (tmp_path / "notes").mkdir()
    code, *_ = call("resume", tmp_path)  # the folder of all runs, and of another folder
    assert code == 0 and all((tmp_path / n / "summary.json").exists() for n in ("a", "b"))


def test_the_next_run_starts_when_one_ends(tmp_path):
    """Four runs, two at a time: each is prepared only when it can start."""
    choices = [(str(seed), [f"seed={seed}", f"rounds={2 + seed % 2}"]) for seed in range(4)]
    runs = launched(tmp_path, *choices, base=[*QUICK, "method=fedavg"])
    going, most, taken = set(), 0, []

    def ready():
        for i, run in enumerate(runs):
            assert len(going) < 2
            taken.append(i)
            yield run

    for event in several.in_threads(ready(), 2):
        if event.begun is not None:
            assert event.begun is runs[event.run]
            going.add(event.run)
        elif event.ended:
            assert event.error is None
            going.remove(event.run)
        else:
            assert event.run in going
        most = max(most, len(going))
    assert (taken, most, going) == ([0, 1, 2, 3], 2, set())
    assert all((tmp_path / name / "summary.json").exists() for name, _ in choices)


def test_runs_with_another_engine_wait_for_the_earlier_ones(tmp_path, monkeypatch):
    """Two kinds of engine as if on a GPU; the index counts on over the groups."""
    runs = launched(tmp_path, *((str(i), [f"seed={i}"]) for i in range(3)), base=[*QUICK, "method=fedavg"])
    other, groups = several.build_engine(runs[0].settings), []

    def engine(settings):
        return FakeEngine(other, "one" if settings.seed < 2 else "two")

    def in_threads(group, width):
        groups.append((group := list(group), width))
        yield from several.in_turn(group)

    monkeypatch.setattr(several, "build_engine", engine)
    monkeypatch.setattr(several, "in_threads", in_threads)
    events = list(several.train_several(iter(runs), 5))
    assert groups == [(runs[:2], 5), (runs[2:], 5)]
    assert ends(events) == {0: None, 1: None, 2: None}
    assert [event.run for event in events if event.begun is not None] == [0, 1, 2]


class FakeEngine(NamedTuple):
    """An engine that says it is on a GPU."""

    real: Engine
    name: str

    @property
    def device(self):
        return torch.device("cuda")

    def active(self):
        return self.real.active()


def test_one_command_trains_every_combination(tmp_path):
    code, out, _ = call(
        *("run", "quick", *QUICK, "--vary", "seed=0,1", "--vary", "method=fedavg,fedprox"),
        *("--out", tmp_path / "all"),
    )
    assert code == 0
    names = {"0-fedavg", "0-fedprox", "1-fedavg", "1-fedprox"}
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    for name in names:
        summary = json.loads((tmp_path / "all" / name / "summary.json").read_text())
        assert f"{summary['seed']}-{summary['method']}" == name
        assert f"{name}  round 2/2" in out
        assert f"{name}  round 1: unlabelled clients do not train" in out
    heading, gap = out.splitlines()[-2:]
    assert heading == "over fedavg model, seed by seed:" and gap.startswith("  fedprox model: ")
    assert gap.endswith(" of 2 above")
    assert "± " in out and "fedprox" in out  # the table, seeds together


def test_a_mistake_in_one_choice_leaves_no_folder(tmp_path):
    code, _, err = call("run", "quick", "--vary", "method=fedavg,fedavgg", "--out", tmp_path / "all")
    assert code == 2 and "fedavgg" in err and "fedavg" in err
    assert not (tmp_path / "all").exists()
    code, _, err = call("run", "quick", "--vary", "seed=1,1", "--out", tmp_path / "all")
    assert code == 2 and "twice" in err and not (tmp_path / "all").exists()


def test_every_run_gets_a_valid_folder_name(tmp_path):
    names = ["/a/b.npz", "[0.5]", "x" * 300, "a/b", "a b", "...", "seed"]
    runs = launched(tmp_path, *((name, [f"seed={i}"]) for i, name in enumerate(names)))
    found = [run.folder.path.name for run in runs]
    assert found == ["a.b.npz", "0.5", "x" * 40, "a.b", "a.b-2", "run", "seed"]


def test_the_images_of_runs_are_loaded_once(tmp_path):
    words = [["seed=0"], ["seed=1"], ["data.holdout=0.1", "seed=0"], ["data.holdout=0.1", "seed=1"]]
    runs = launched(tmp_path, *((str(i), word) for i, word in enumerate(words)))
    assert runs[0].dataset is runs[1].dataset
    assert len({id(run.dataset) for run in runs}) == 3


def test_no_run_at_all_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run to start"):
        fedhassle.run_several("quick", vary={"seed": []}, out=tmp_path / "none")


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 3), ("method", "fedavg"), ("split.labels", {"full": 1, "share": 0.1})]
)
def test_a_single_value_to_vary_is_refused(key, value, tmp_path):
    """The letters of a name, or the keys of a table, are no values."""
    with pytest.raises(UserError, match=rf"^vary=.*'{key}'.*: expected a list of values, such as \["):
        fedhassle.run_several("quick", vary={key: value}, out=tmp_path / "none")


def test_the_error_of_a_run_is_raised_after_the_others_are_done(tmp_path):
    words = ("quick", "rounds=2", "method=fedavg", "method.clip=0", "method.epochs=1")
    code, out, err = call("run", *words, "--vary", "method.lr=1e30,0.1", "--out", tmp_path / "all")
    assert code == 1 and "NaN" in err and "1e30 failed" in out
    assert (tmp_path / "all" / "0.1" / "summary.json").exists()


def test_a_sweep_that_was_cut_says_how_to_finish_it(tmp_path):
    """Its middle run is finished; the command that it names does the rest."""
    home = tmp_path / "all"
    words = ("quick", "rounds=1", "method=fedavg", "method.epochs=1", "--vary", "seed=0,1,2", "--out", home)
    runs = launched(
        home,
        *[(str(seed), ["rounds=1", f"seed={seed}"]) for seed in range(3)],
        base=["method=fedavg", "method.epochs=1"],
    )
    assert ends(several.in_turn(runs[1:2])) == {0: None}
    code, _, err = call("run", *words)
    left = f"fedhassle resume {home / '0'} {home / '2'}"
    assert code == 2 and f"{home} already holds 3 of 3 runs: resume those that are not finished with" in err
    assert left in err
    assert call(*left.split()[1:])[0] == 0
    code, _, err = call("run", *words)
    assert code == 2 and "holds 3 of 3 runs: all are finished, or choose another --out" in err


def test_python_trains_every_combination(tmp_path):
    settings = {"rounds": 1, "method": "fedavg", "method.epochs": 1}
    results = fedhassle.run_several(
        "quick", settings, vary={"seed": [0, 1]}, out=tmp_path / "two", quiet=True
    )
    assert [result.summary["seed"] for result in results] == [0, 1]
    assert [result.folder.name for result in results] == ["0", "1"]


@pytest.mark.parametrize(("asked", "sharing", "lanes"), [(32, 1, 32), (32, 3, 8), (4, 3, 4), (8, 100, 1)])
def test_runs_that_share_a_gpu_share_its_lanes(tmp_path, monkeypatch, asked, sharing, lanes):
    (run,) = launched(tmp_path, ("a", [f"lanes={asked}"]), base=[*QUICK, "method=fedavg"])
    given = []

    def watched(dataset, split, seed, engine, *more):
        given.append(engine.lanes)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedhassle.runs.train.Simulator", watched)
    with pytest.raises(KeyboardInterrupt):
        next(train.train_run(run, sharing))
    assert given == [lanes]
