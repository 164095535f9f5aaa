"""`fedhassle reproduce`: every cell is trained once, by any process and after any interruption."""

import itertools
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import ledgers
import pytest
from ledgers import FEW, experiment
from small import LIMIT, but_seconds, call, checkpoints, kill_when

from fedhassle import provenance
from fedhassle.cli.reproduce import remaining_work, seconds_of
from fedhassle.data import download, published
from fedhassle.errors import UserError
from fedhassle.files import locked
from fedhassle.reproduce import sweep as working
from fedhassle.reproduce.experiment import Selection, cells, experiments, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.results import curve, final, measurements
from fedhassle.reproduce.sweep import BudgetClock, Sweep
from fedhassle.reproduce.tables import duration, time_left
from fedhassle.runs import several
from fedhassle.runs.events import Event

if sys.platform != "win32":
    import fcntl

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
TINY = f"""
title = "Two methods on few images"
source = "nowhere"
rows = ["method"]
columns = ["alpha"]
metrics = ["accuracy.SM", "accuracy.EM"]
seeds = 2

{FEW}method.residual_steps = 2

[[axis]]
name = "alpha"
choices = [{{ id = "0.5", set = {{ split.alpha = 0.5 }} }}, {{ id = "5", set = {{ split.alpha = 5.0 }} }}]

[[axis]]
name = "method"
choices = [
  {{ id = "fedavg", label = "FedAvg", set = {{ method = "fedavg" }} }},
  {{ id = "hassle", label = "HASSLE", set = {{ method = "hassle" }} }},
]
"""
KEYS = [
    f"{alpha}-{method}-{seed}" for seed in (0, 1) for alpha in ("0.5", "5") for method in ("fedavg", "hassle")
]


@pytest.fixture(scope="module")
def tiny(images, tmp_path_factory):
    """The file of an experiment of eight runs, a fraction of a second each."""
    return experiment(tmp_path_factory.mktemp("experiment"), TINY, images)


def make(tiny, folder, *words):
    """Exit code and output of the command, with its ledger and runs in a folder."""
    code, out, err = call(
        *("reproduce", tiny, *words, "--results", folder / "results", "--runs", folder / "runs")
    )
    assert err == ""
    return code, out


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A folder in which all cells were trained by one command, and its output."""
    folder = tmp_path_factory.mktemp("made")
    code, out = make(tiny, folder)
    assert code == 0
    return folder, out


def test_a_change_in_a_users_method_makes_a_new_cell(images, module, tmp_path):
    """The results of a method before the change are not shown as those of the changed method."""
    source = "from fedhassle.methods.fedavg import FedAvg as Mine"
    name = module("own_cell", source)
    axis = f'[[axis]]\nname = "m"\nchoices = [{{ id = "mine", set = {{ method = "{name}:Mine" }} }}]\n'
    text = f'title = "x"\nsource = "x"\nrows = ["m"]\nseeds = 1\n{FEW}{axis}'
    own = experiment(tmp_path, text, images)
    assert "1 run to make" in make(own, tmp_path)[1]
    assert "to make" not in make(own, tmp_path)[1]
    module(name, source + "  # changed")
    assert "1 run to make" in make(own, tmp_path)[1]
    assert len(list((tmp_path / "results").rglob("*.json"))) == 2


def results(folder, method="*"):
    """The summaries of a ledger by the names of their files, without what differs from run to run."""
    files = sorted((folder / "results").rglob(f"{method}-*.json"))
    return {file.name: essence(json.loads(file.read_text())) for file in files}


def essence(summary):
    kept = ("method", "data", "seed", "settings", "settings_hash", "split_hash", "rounds", "accuracy")
    return {**{key: summary[key] for key in kept}, "history": but_seconds(summary["history"])}


FEDAVG = [key for key in KEYS if "fedavg" in key]  # half of the cells, and the fast ones


def work_on(tiny, folder, **options):
    """A sweep over the cells of FedAvg."""
    chosen = cells(read_experiment(str(tiny)), Selection(methods=("fedavg",)))
    return Sweep(Ledger(folder / "results"), chosen, folder / "runs", **options)


def told(out):
    """The keys of the cells that a command says it has made."""
    return re.findall(r"^\d+ of \d+  tiny (\S+)", out, re.MULTILINE)


@pytest.fixture
def idle(monkeypatch):
    """Fails the test if anything trains."""

    def refuse(run, alone=True):
        raise AssertionError(f"{run.folder.path} is trained again")
        yield

    monkeypatch.setattr(several, "train_run", refuse)


# Whole


def test_every_cell_is_trained_and_reported_with_its_result(made):
    folder, out = made
    assert out.splitlines()[0] == "8 runs to make on cpu; time left: unknown"
    assert told(out) == KEYS
    found = results(folder)
    assert len(found) == 8
    for method, seed in itertools.product(("fedavg", "hassle"), (0, 1)):
        assert sum(name.startswith(method) and name.endswith(f"-{seed}.json") for name in found) == 2
    assert "round 1/4" not in out and "do not train" not in out  # that is in the logs


def test_the_table_has_the_means_over_seeds(made, tiny):
    folder, out = made
    experiment = read_experiment(str(tiny))
    shown = measurements(experiment, cells(experiment), Ledger(folder / "results"))
    assert [(f.name, f.metric) for f in shown] == [
        *(("0.5-fedavg", ""), ("0.5-hassle", "accuracy.SM"), ("0.5-hassle", "accuracy.EM")),
        *(("5-fedavg", ""), ("5-hassle", "accuracy.SM"), ("5-hassle", "accuracy.EM")),
    ]
    for measurement in shown:
        alpha, method = measurement.name.split("-")
        runs = [
            run
            for run in results(folder).values()
            if run["method"] == method and run["settings"]["split"]["alpha"] == float(alpha)
        ]
        prediction = measurement.metric.removeprefix("accuracy.") or "model"
        scores = [run["accuracy"][prediction]["mean_of_last"] for run in runs]
        assert len(scores) == measurement.done == measurement.seeds == 2 and measurement.paper is None
        assert measurement.ours.mean == pytest.approx(sum(scores) / 2)
        assert measurement.ours.std == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
        assert f"{100 * measurement.ours.mean:.2f} ± {100 * measurement.ours.std:.2f}" in out
    assert "HASSLE" in out and "nowhere" in out


MODEL = {"model.safetensors", "model.md", "curves.png"}


def test_a_finished_run_keeps_its_model_and_records(made):
    folder, _ = made
    kept = {"config.toml", "split.npz", "metrics.jsonl", "summary.json", "log.txt"}
    homes = list((folder / "runs").iterdir())
    assert len(homes) == 8  # and no locks
    assert all({path.name for path in home.iterdir()} == {*kept, *MODEL} for home in homes)


def test_a_finished_cell_is_never_made_again(made, tiny, idle):
    folder, first = made
    before, touched = results(folder), (folder / "results").stat().st_mtime_ns
    code, out = make(tiny, folder)
    assert (folder / "results").stat().st_mtime_ns == touched  # nor is anything tried out there
    assert code == 0 and not told(out) and "to make" not in out
    assert out in first  # the same table
    assert results(folder) == before


def test_a_cell_of_two_experiments_is_made_once(tiny, tmp_path):
    """The other is the same experiment, but for its names and a third value of α."""
    more = '{ id = "much", set = { split.alpha = 5.0 } }, { id = "most", set = { split.alpha = 9.0 } }'
    text = tiny.read_text().replace('{ id = "5", set = { split.alpha = 5.0 } }', more)
    (tmp_path / "other.toml").write_text(text)
    words = ("--seeds", "1", "--methods", "fedavg")
    _, out = make(tiny, tmp_path, tmp_path / "other.toml", *words)
    assert re.findall(r"^\d of 3  (\S+ \S+)", out, re.MULTILINE) == [
        *("tiny 0.5-fedavg-0", "tiny 5-fedavg-0", "other most-fedavg-0"),
    ]
    assert len(results(tmp_path)) == 3 and out.count("1 of 1") == 5  # rows of two tables


def test_a_part_is_trained_and_then_the_rest(made, tiny, tmp_path):
    _, out = make(tiny, tmp_path, "--only", "5-hassle", "--seeds", "1")
    assert told(out) == ["5-hassle-0"]
    _, out = make(tiny, tmp_path)
    assert told(out) == [key for key in KEYS if key != "5-hassle-0"]
    assert results(tmp_path) == results(made[0])


def test_other_rounds_are_other_cells(made, tiny, tmp_path):
    shutil.copytree(made[0] / "results", tmp_path / "results")
    words = ("--rounds", "2", "--only", "5-fedavg", "--seeds", "1")
    _, out = make(tiny, tmp_path, *words, "method.epochs=2")
    assert told(out) == ["5-fedavg-0"] and len(results(tmp_path)) == 9
    (added,) = [run for run in results(tmp_path).values() if run["rounds"] == 2]
    assert added["settings"]["method"]["epochs"] == 2


# Cut


@pytest.mark.parametrize("budget", ["8s", "34s"])
def test_a_budget_ends_the_sweep_and_the_same_command_resumes(budget, made, tiny, tmp_path, monkeypatch):
    """A clock that moves on by a second whenever somebody looks at it."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    with monkeypatch.context() as patch:
        patch.setattr(working, "time", clock)
        code, out = make(tiny, tmp_path, "--methods", "fedavg", "--budget", budget)
    assert code == 0 and len(told(out)) == len(results(tmp_path)) < 4
    assert f"left: {4 - len(told(out))} of 4 runs" in out
    (cut,) = (tmp_path / "runs").glob("*/checkpoints")  # one was cut
    key, t = FEDAVG[len(told(out))], int(sorted(cut.iterdir())[-1].stem.removeprefix("round-"))
    assert 0 < t < 4 and f"\ntiny {key} was interrupted after round {t} of 4\nleft: " in out
    code, _ = make(tiny, tmp_path, "--methods", "fedavg")
    assert code == 0 and results(tmp_path) == results(made[0], "fedavg")
    assert not list((tmp_path / "runs").glob("*.lock"))


def test_an_interrupted_run_resumes_from_its_checkpoint(made, tiny, tmp_path):
    work = work_on(tiny, tmp_path)
    steps = work.carry_out()
    for event in steps:
        if event.step is not None and event.step.t == 3:
            break
    steps.close()
    (home,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert [path.stem for path in checkpoints(home)] == ["round-000002", "round-000003"]
    again = work_on(tiny, tmp_path)
    rounds = [event.step.t for event in again.carry_out() if event.step is not None]
    assert rounds[:2] == [4, 1] and results(tmp_path) == results(made[0], "fedavg")


def test_a_killed_process_loses_nothing(made, tiny, tmp_path, forked):
    options = ("--results", tmp_path / "results", "--runs", tmp_path / "runs")
    process = forked("reproduce", tiny, *options)

    def in_its_second_run(runs):
        return len(list(runs.glob("*/"))) > 1 and any(checkpoints(home) for home in runs.glob("*/"))

    kill_when(process, tmp_path / "runs", in_its_second_run, 0)
    code, out = make(tiny, tmp_path)
    assert code == 0 and "failed" not in out and len(told(out)) < 8
    assert results(tmp_path) == results(made[0])


def test_a_finished_run_that_the_ledger_lacks_is_not_trained_again(made, tiny, tmp_path, idle):
    """Killed between the summary and the ledger, or the ledger was lost."""
    shutil.copytree(made[0] / "runs", tmp_path / "runs")
    code, _ = make(tiny, tmp_path)
    assert code == 0 and results(tmp_path) == results(made[0])


def test_what_a_kill_left_of_a_finished_run_is_removed(made, tiny, tmp_path, idle):
    """Killed after its result was in the ledger; but a run that is not finished keeps its checkpoints."""
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    first, second, busy, *_ = sorted((tmp_path / "runs").iterdir())
    for home in (first, second, busy):
        (home / "checkpoints").mkdir()
        home.with_suffix(".lock").touch()
    (first / ".lock").touch()
    (second / "summary.json").unlink()
    with locked(busy.with_suffix(".lock")):
        assert make(tiny, tmp_path)[0] == 0
        assert (busy / "checkpoints").exists()
    left = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    whole = {path.relative_to(made[0]) for path in made[0].rglob("*")}
    assert {path.name for path in left - whole} == {"checkpoints"}
    assert {path.parent.name for path in left - whole} == {second.name, busy.name}


def test_an_abandoned_file_in_the_ledger_is_removed(made, tiny, tmp_path):
    """A new one may belong to another process."""
    shutil.copytree(made[0] / "runs", tmp_path / "runs")
    (tmp_path / "results" / "small.npz").mkdir(parents=True)
    old, new = (tmp_path / "results" / "small.npz" / f".writing-{age}.json" for age in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    assert make(tiny, tmp_path)[0] == 0
    assert list((tmp_path / "results").rglob(".writing-*")) == [new]
    new.unlink()
    assert results(tmp_path) == results(made[0])


# Several processes, several ledgers


def test_two_processes_share_the_cells_of_a_ledger(made, tiny, tmp_path, forked):
    options = ("--results", tmp_path / "results", "--runs", tmp_path / "runs")
    outputs = [tmp_path / "one.txt", tmp_path / "two.txt"]
    processes = [forked("reproduce", tiny, *options, output=output) for output in outputs]
    for process in processes:
        process.join(LIMIT)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(told(outputs[0].read_text()) + told(outputs[1].read_text())) == sorted(KEYS)
    assert results(tmp_path) == results(made[0])


def test_a_cell_locked_by_another_process_is_skipped_and_retried(made, tiny, tmp_path):
    work = work_on(tiny, tmp_path)
    busy = work.cells[1]
    lock = tmp_path / "runs" / f"{busy.identity.settings_hash[:8]}-{busy.seed}.lock"
    lock.parent.mkdir()
    lock.touch()
    with locked(lock):
        assert {work.cell(event).key for event in work.carry_out()} == {*FEDAVG} - {busy.key}
        assert [cell.key for cell in work.left] == [busy.key] and not work.failed
        assert list(remaining_work(work)) == ["left: 1 of 4 runs, 1 of them running in another process"]
    again = work_on(tiny, tmp_path)
    assert {again.cell(event).key for event in again.carry_out()} == {busy.key}
    assert results(tmp_path) == results(made[0], "fedavg")
    assert not list(remaining_work(again)) and not list(remaining_work(work))


def test_cells_that_were_not_started_are_left_to_the_same_command(tiny, tmp_path):
    """One cell is in work elsewhere; the others were not begun."""
    work = work_on(tiny, tmp_path)
    lock = tmp_path / "runs" / f"{work.cells[0].identity.settings_hash[:8]}-{work.cells[0].seed}.lock"
    lock.parent.mkdir()
    lock.touch()
    with locked(lock):
        work._take(work.cells[0], lambda cell, folder: None)
    (line,) = remaining_work(work)
    assert line == (
        "left: 4 of 4 runs, 1 of them running in another process; run the same command again to continue"
    )


def test_a_cell_that_is_unlocked_meanwhile_is_trained_at_the_end(tiny, tmp_path):
    work = work_on(tiny, tmp_path)
    busy = work.cells[0]
    lock = tmp_path / "runs" / f"{busy.identity.settings_hash[:8]}-{busy.seed}.lock"
    lock.parent.mkdir()
    lock.touch()
    held, order = locked(lock), []
    held.__enter__()
    for event in work.carry_out():
        if event.begun is not None:
            order.append(work.cell(event).key)
            if len(order) == 2:
                held.__exit__(None, None, None)
    assert order == [*FEDAVG[1:], FEDAVG[0]] and not work.left


@UNIX
def test_a_cell_that_failed_elsewhere_is_trained_by_one_process_alone(tiny, tmp_path, monkeypatch):
    """One gives up and removes its lock, a second had opened that just before, a third makes a new one."""
    first, second, third = (work_on(tiny, tmp_path) for _ in range(3))
    cell, honest, made = first.cells[0], fcntl.flock, []

    def refuse(cell, folder):
        raise UserError("the images cannot be had")

    def meanwhile(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", honest)
        assert first._take(cell, refuse) is None and first.failed
        honest(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    for work in (second, third):
        work._take(cell, lambda cell, folder, work=work: made.append(work))
    assert made == [third] and second._elsewhere == [cell]


def test_a_cell_that_another_process_finished_meanwhile_is_not_trained(made, tiny, tmp_path):
    work = work_on(tiny, tmp_path)
    begun = []
    for event in work.carry_out():
        if event.begun is not None:
            begun.append(work.cell(event).key)
            shutil.copytree(made[0] / "results", tmp_path / "results", dirs_exist_ok=True)
    assert begun == FEDAVG[:1] and not work.left


def test_ledgers_of_two_machines_merge_by_copying(made, tiny, tmp_path, idle):
    """Half of the cells each, one of them in both."""
    names = sorted(results(made[0]))
    (source,) = (made[0] / "results").iterdir()
    for machine, part in (("one", names[:5]), ("two", names[4:])):
        for name in part:
            target = tmp_path / machine / "results" / source.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    code, out = make(tiny, tmp_path / "one")
    assert code == 0 and not told(out) and results(tmp_path / "one") == results(made[0])


# What goes wrong


def test_a_failure_does_not_stop_the_others(tiny, tmp_path):
    """One that diverges, one whose split is impossible, one that is fine."""
    bad = '{ id = "0.5", set = { method.lr = 1e30, method.clip = 0.0 } }, '
    bad += '{ id = "none", set = { split.labels = "10%" } }'
    text = tiny.read_text().replace('{ id = "0.5", set = { split.alpha = 0.5 } }', bad)
    (tmp_path / "tiny.toml").write_text(text)
    code, out = make(tmp_path / "tiny.toml", tmp_path, "--methods", "fedavg", "--seeds", "1")
    assert code == 1 and told(out) == ["5-fedavg-0"]
    assert re.search(r"^tiny 0.5-fedavg-0 failed: round \d: the updates of all clients", out, re.MULTILINE)
    assert "\ntiny none-fedavg-0 failed: split.labels='10%' is a layout of 20 clients" in out
    assert "left: 2 of 3 runs" in out and "missing" in out
    assert not list((tmp_path / "runs").glob("*.lock"))


def test_a_failed_download_is_tried_once(tiny, tmp_path, monkeypatch):
    """Without a network, eight cells on images to be downloaded beside four on others."""
    asked = []

    def refuse(url):
        asked.append(url)
        raise download._FailedError("no connection", again=False)
        yield

    monkeypatch.setattr(download, "_chunks", refuse)
    monkeypatch.setenv("FEDHASSLE_DATA", str(tmp_path / "data"))
    far = """
[[axis]]
name = "data"
choices = [
  { id = "far", set = { data = "fmnist", split.clients = 20, split.labels = "10%" } },
  { id = "farther", set = { data = "fmnist", split.clients = 20, split.labels = "20%" } },
  { id = "near" },
]
"""
    (tmp_path / "tiny.toml").write_text(tiny.read_text() + far)
    code, out = make(tmp_path / "tiny.toml", tmp_path, "--methods", "fedavg")
    assert code == 1 and len(told(out)) == 4
    assert len(asked) == len(published.FMNIST_SOURCES[0].urls)
    assert out.count("cannot be run: ") == 1 and re.findall(r"^tiny (\S+) failed", out, re.MULTILINE) == [
        "0.5-fedavg-far-0"
    ]
    assert "\n7 more runs need these images\n" in out and "left: 8 of 12 runs" in out
    assert not list((tmp_path / "runs").glob("*.lock"))


def test_a_folder_that_holds_another_run_is_left_alone(tiny, tmp_path, made):
    """As if two hashes began alike: the run, finished or not, of another cell."""
    first, second = (cell.identity for cell in work_on(tiny, tmp_path).cells[:2])
    taken = tmp_path / "runs" / f"{first.settings_hash[:8]}-0"
    shutil.copytree(made[0] / "runs" / f"{second.settings_hash[:8]}-0", taken)
    words = ("--only", "0.5-fedavg-0")
    for _ in range(2):
        code, out = make(tiny, tmp_path, *words)
        assert code == 1 and f"{taken} holds another run than 0.5-fedavg-0: move it away" in out
        (taken / "summary.json").unlink(missing_ok=True)
    assert not results(tmp_path) and (taken / "model.safetensors").exists()


@pytest.mark.parametrize("place", ["afile", "afile/results"])
def test_a_ledger_that_cannot_be_written_is_noticed_before_any_training(place, tiny, tmp_path):
    (tmp_path / "afile").touch()
    results, runs = tmp_path / place, tmp_path / "runs"
    code, out, err = call("reproduce", tiny, "--results", results, "--runs", runs)
    assert (code, out) == (2, "") and not runs.exists()
    assert err == (
        f"fedhassle: cannot write results to {results}: Not a directory: "
        "choose another folder with --results\n"
    )


def test_a_result_that_cannot_be_written_is_reported_with_the_cause(made, tiny, tmp_path):
    """A file has the place of the folder for these images."""
    (source,) = (made[0] / "results").iterdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / source.name).touch()
    code, out = make(tiny, tmp_path, "--only", "0.5-fedavg-0")
    assert code == 1 and not told(out)
    cause = rf"{re.escape(str(tmp_path / 'results' / source.name))}/\S+ cannot be written: "
    assert re.search(rf"^tiny 0.5-fedavg-0 has no result: {cause}", out, re.MULTILINE)


def test_names_are_shown_as_they_are(made, tiny, tmp_path, idle):
    """Markup and emoji of rich, in every name of an experiment."""
    shutil.copytree(made[0] / "results", tmp_path / "results")
    text = tiny.read_text().replace('"FedAvg"', '"FedAvg [ours]"').replace('"HASSLE"', '"H :star: [/i]"')
    text = text.replace('title = "Two methods', 'title = "Two [/b] :star: methods')
    text = text.replace('"nowhere"', '"[nowhere]"')
    text = text.replace('name = "alpha"', 'name = "alpha"\nlabel = "[a]"')
    (tmp_path / "a [b].toml").write_text(text)
    code, out = make(tmp_path / "a [b].toml", tmp_path)
    assert code == 0
    assert " ".join(out.split()).startswith("a [b]: Two [/b] :star: methods on few images ([nowhere]) [a] ")
    assert "FedAvg [ours] " in out and "H :star: [/i] " in out


def test_foreign_files_are_named_and_skipped(made, tiny, tmp_path, idle):
    shutil.copytree(made[0] / "results", tmp_path / "results")
    (tmp_path / "results" / "notes.json").write_text('{"mine": 1}')
    code, out = make(tiny, tmp_path)
    assert code == 0 and out.count("notes.json") == 1 and "skipped" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tabel1",), "unknown experiment 'tabel1', did you mean 'table1'"),
        (("table1", "--methods", "hasle"), "did you mean 'hassle'"),
        (("table1", "--only", "cifar11"), "did you mean 'cifar10'"),
        (("table1", "--budget", "soon"), "--budget 'soon' is not a duration"),
        (("table1", "--only", ","), "--only ','"),
        (("table1", "--only", ""), "--only ''"),
        (("table1", "--methods", " , "), "--methods ' , '"),
        (("table1", "roundz=3"), "unknown setting 'roundz'"),
        (("table1", "seed=3"), "--seeds"),
        (("table1", "--device", "cdua"), "device"),
        (("table1", "--together", "0"), "together"),
    ],
)
def test_mistakes_are_errors_before_anything_trains(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("reproduce", *words)
    assert code == 2 and message in err and not list(tmp_path.iterdir())


# Lists and times


def in_table1(*keys):
    """Cells of Table 1 by their keys."""
    its = {cell.key: cell for cell in cells(read_experiment("table1"))}
    return [its[key] for key in keys]


def test_the_list_has_every_experiment_with_its_size_and_progress(tmp_path):
    """Two runs of Table 1; HASSLE's is in the ablation too. And a ledger without any."""
    for cell in in_table1("cifar10-10%-hassle-0", "fmnist-5%-fedavg-2"):
        ledgers.put(tmp_path / "some", ledgers.summary(cell, {"EM": 0.5}))
    (tmp_path / "none").mkdir()
    for folder, done in (("some", {"table1": 2, "ablation": 1}), ("none", {"table1": 0, "ablation": 0})):
        code, out, err = call("reproduce", "--results", tmp_path / folder)
        assert (code, err) == (0, "")
        rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert set(experiments()) <= set(rows)
        for name, size in (("table1", 351), ("ablation", 12)):
            found = re.match(rf"{name} +Table \d +(\d+) +(\d+) ", rows[name])
            assert [int(number) for number in found.groups()] == [size, done[name]]


def test_the_time_left_is_estimated_from_earlier_runs(made, tiny, tmp_path):
    """A third seed of a cell of which two are there."""
    shutil.copytree(made[0] / "results", tmp_path / "results")
    _, out = make(tiny, tmp_path, "--seeds", "3", "--only", "5-fedavg-2")
    assert re.match(r"1 run to make on cpu; time left: \d+ s\n", out)


@pytest.mark.parametrize(("threads", "text"), [(1, "a, 1 thread"), (2, "a, 2 threads")])
def test_a_machine_without_a_gpu_is_described_by_cpu_and_threads(threads, text):
    assert provenance.machine({"gpu": None, "cpu": "a", "threads": threads}) == text


def test_the_time_left_says_how_many_cells_it_covers(tiny):
    """Of two of four cells; of none; of all."""
    chosen = cells(read_experiment(str(tiny)), Selection(methods=("fedavg",)))
    known = {cell.identity.key: 3600.0 for cell in chosen[:2]}
    assert time_left(chosen, lambda run: known.get(run.key)) == "2 h 0 min for 2 of 4; the rest unknown"
    assert time_left(chosen[:2], lambda run: known.get(run.key)) == "2 h 0 min"
    assert time_left(chosen, lambda run: None) == "unknown"


def test_our_results_are_beside_the_papers(tmp_path, monkeypatch, idle):
    """A run that is in the ledger: nothing is left to make."""
    monkeypatch.chdir(tmp_path)
    (cell,) = in_table1("cifar10-10%-fedavg-0")
    ledgers.put(tmp_path / "results", ledgers.summary(cell, {"model": 0.6273}))
    code, out, _ = call("reproduce", "table1", "--only", cell.key)
    row = next(line for line in out.splitlines() if "accuracy" in line)
    assert code == 0 and row.split()[-3:] == ["62.73", "57.85", "+4.88"]


def test_curves_losses_and_bytes_come_from_the_history(made):
    run = json.loads(next((made[0] / "results").rglob("hassle-*-0.json")).read_text())
    assert curve(run, "accuracy.UM") == [(m["round"], m["accuracy"]["UM"]) for m in run["history"]]
    losses = [m["loss"]["w_S"] for m in run["history"] if m["loss"]["w_S"] is not None]
    assert final(run, "loss.w_S") == pytest.approx(sum(losses) / len(losses))
    up = sum(m["bytes_up"]["partial"] for m in run["history"])
    asked = sum(m["clients"]["partial"] for m in run["history"])
    assert final(run, "bytes_up.partial") == pytest.approx(up / asked)
    for m in run["history"]:
        m["clients"]["full"] = m["bytes_up"]["full"] = 0
    assert final(run, "bytes_up.full") is None


def test_lines_without_losses_or_bytes_count_for_nothing(made):
    run = json.loads(next((made[0] / "results").rglob("hassle-*-0.json")).read_text())
    first, *rest = run["history"]
    bare = {key: value for key, value in first.items() if key not in ("loss", "bytes_up")}
    without = {**run, "history": [bare, *rest]}
    assert curve(without, "loss.w_S") == curve({**run, "history": rest}, "loss.w_S")
    for metric in ("loss.w_S", "bytes_up.partial"):
        assert final(without, metric) == final({**run, "history": rest}, metric)
        assert final({**run, "history": [bare]}, metric) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20m", 1200), ("1h30m", 5400), ("0.5h", 1800), ("1h1m1s", 3661)]
)
def test_a_budget_is_a_time(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "20", "m", "20 m", "0s", "-1h", "20mm", "1d"])
def test_an_invalid_budget_is_refused(text):
    with pytest.raises(UserError, match="20m or 1h30m"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3600, "1 h 0 min"), (8000, "2 h 13 min"), (200000, "2 d 7 h")],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_the_clock_knows_what_still_ends_in_time(monkeypatch):
    """Rounds of 2 s after a first one of 30 s, by a clock that is set by hand; 100 s in all."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(working, "time", SimpleNamespace(monotonic=lambda: now.time))
    clock = BudgetClock(100.0)

    def at(time, event):
        now.time = time
        clock.note(event)
        return clock.allows_start(), clock.allows_round()

    begun, step = SimpleNamespace(), SimpleNamespace()
    assert at(0, Event(0, begun=begun)) == (True, True)
    assert at(30, Event(0, step=step)) == (True, True)
    assert at(69, Event(0, step=step)) == (True, False)  # a round of 39 s
    assert at(71, Event(0, step=step)) == (False, True)  # of 2 s
    assert at(97, Event(1, begun=begun)) == (False, True)
    assert at(98, Event(0, step=step)) == (False, False)  # of 27 s
    assert at(98, Event(0)) == (False, True)  # that run is over
    now.time = 100
    assert not clock.allows_round()
    assert BudgetClock(None).allows_round() and BudgetClock(None).allows_start()


def test_a_sweep_says_how_many_runs_it_was_asked_to_train_at_once(tiny, tmp_path):
    """If nothing is asked, the networks decide."""
    assert work_on(tiny, tmp_path).about == "on cpu"
    assert work_on(tiny, tmp_path, together=5).about == "on cpu, at most 5 at once"


@pytest.mark.parametrize("together", [1, 2])
def test_the_ledger_knows_how_many_runs_shared_the_device(tiny, tmp_path, monkeypatch, together):
    """As the events of the training say."""

    def train(runs, width):
        for event in several.train_several(runs, width):
            yield event._replace(together=together)

    monkeypatch.setattr(working, "train_several", train)
    sweep = work_on(tiny, tmp_path)
    done = next(event for event in sweep.carry_out() if event.ended)
    noted = [json.loads(path.read_text())["together"] for path in tmp_path.rglob("results/**/*.json")]
    assert done.error is None and noted == [together]
