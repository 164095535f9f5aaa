"""Several runs at once, each in a process of its own; here on a CPU, which needs no MPS."""

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import small
import torch
from test_several import HASSLE, QUICK, FakeEngine, ends, launched

from fedhassle.engine.client_state import ClientState
from fedhassle.engine.cores import available_cores
from fedhassle.engine.tensor_files import read_arrays
from fedhassle.errors import DivergedError, UserError
from fedhassle.nets import NETS, Net
from fedhassle.runs import process, processes, several
from fedhassle.runs.evaluation import evaluator
from fedhassle.runs.events import Event
from fedhassle.runs.process import portable
from fedhassle.runs.processes import MOST, ON_A_GPU, Task, in_processes
from fedhassle.runs.train import simulated
from fedhassle.settings.build import build_engine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="they inherit a pipe, as only POSIX has it")
CPU = [*QUICK, "device=cpu"]
FEDAVG = [*CPU, "method=fedavg"]


def test_processes_and_turns_give_the_same_bits(tmp_path):
    """Three runs, two at a time, against the same three one after another."""
    choices = [("s0", [*HASSLE, "seed=0"]), ("s1", [*HASSLE, "seed=1"]), ("avg", ["method=fedavg"])]
    events = list(in_processes(launched(tmp_path / "processes", *choices, base=CPU), 2))
    assert ends(events) == {0: None, 1: None, 2: None}
    rounds = [(event.run, event.step.t) for event in events if event.step is not None]
    assert sorted(rounds) == [(run, t) for run in range(3) for t in (1, 2)]
    assert {event.together for event in events if event.begun is not None} == {2}
    in_turn = several.in_turn(launched(tmp_path / "turns", *choices, base=CPU))
    assert ends(in_turn) == {0: None, 1: None, 2: None}
    for name, _ in choices:
        first, second = (
            read_arrays(tmp_path / way / name / "model.safetensors")[0] for way in ("processes", "turns")
        )
        assert small.same(first, second)


def test_an_error_in_one_run_does_not_stop_the_others(tmp_path):
    """It arrives as the error that it was."""
    runs = launched(tmp_path, ("bad", ["method.lr=1e30", "method.clip=0"]), ("good", []), base=FEDAVG)
    found = ends(in_processes(runs, 2))
    assert isinstance(found[0], DivergedError) and found[1] is None
    assert (tmp_path / "good" / "summary.json").exists()


def test_a_process_that_is_killed_is_an_error_of_its_run(tmp_path, monkeypatch):
    runs = launched(tmp_path, ("a", ["rounds=50"]), ("b", ["seed=1"]), base=FEDAVG)
    children, begun = [], processes.begun
    monkeypatch.setattr(
        processes, "begun", lambda *given: children.append(one := begun(*given)) or one
    )  # by its number
    found, killed = {}, False
    for event in in_processes(runs, 2):
        if event.run == 0 and event.step is not None and not killed:
            os.kill(children[0].process.pid, signal.SIGKILL)
            killed = True
        if event.ended:
            found[event.run] = event.error
    assert isinstance(found[0], UserError) and "a: its process ended with exit code -9" in str(found[0])
    assert found[1] is None
    assert ends(in_processes(launched_again(tmp_path / "a"), 1)) == {0: None}  # it can be resumed


def launched_again(path):
    """A run that was cut, ready to resume."""
    from fedhassle.runs.resume import reopen

    return [reopen(path)]


def test_what_a_process_prints_before_it_fails_is_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ENTRY", "fedhassle.no_such_module")
    found = ends(in_processes(launched(tmp_path, ("a", []), base=FEDAVG), 1))
    assert "exit code 1" in str(found[0]) and "No module named fedhassle.no_such_module" in str(found[0])


def test_a_process_that_ends_before_it_has_its_task_is_an_error_of_its_run(tmp_path, monkeypatch):
    start = subprocess.Popen

    def late(*given, **options):
        process = start(*given, **options)
        process.wait()
        return process

    monkeypatch.setattr(processes, "ENTRY", "fedhassle.no_such_module")
    monkeypatch.setattr(processes.subprocess, "Popen", late)
    found = ends(in_processes(launched(tmp_path, ("a", []), base=FEDAVG), 1))
    assert "No module named fedhassle.no_such_module" in str(found[0])


def test_a_process_that_cannot_start_is_an_error_of_its_run(tmp_path, monkeypatch):
    """The first two of three, as if memory were short; what was opened for them is closed."""
    start, open_pipe, open_file = subprocess.Popen, processes.Pipe, processes.tempfile.TemporaryFile
    opened, failures = [], iter([OSError(12, "no memory"), OSError(12, "no memory")])

    def fail_twice(*given, **options):
        if (error := next(failures, None)) is not None:
            raise error
        return start(*given, **options)

    monkeypatch.setattr(processes, "Pipe", lambda: opened.extend(ends := open_pipe()) or ends)
    monkeypatch.setattr(
        processes.tempfile, "TemporaryFile", lambda: opened.append(file := open_file()) or file
    )
    monkeypatch.setattr(processes.subprocess, "Popen", fail_twice)
    runs = launched(tmp_path, ("a", []), ("b", ["seed=1"]), ("c", ["seed=2"]), base=FEDAVG)
    found = ends(in_processes(runs, 1))
    assert [str(found[i]) for i in (0, 1)] == ["[Errno 12] no memory"] * 2 and found[2] is None
    assert len(opened) == 9 and all(one.closed for one in opened)


def test_files_of_the_current_folder_are_no_modules_of_a_process(tmp_path, monkeypatch):
    """Here one of the same name as a part of Python's library, which this process has imported."""
    runs = launched(tmp_path / "runs", ("a", []), base=FEDAVG)
    (tmp_path / "logging.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert ends(in_processes(runs, 1)) == {0: None}


def test_a_process_has_its_share_of_the_cores(tmp_path, monkeypatch):
    """Also to compile kernels: otherwise each would start as many processes as there are cores."""
    started = []

    def start(*_, env, **__):
        started.append(env)
        raise OSError("no process today")

    monkeypatch.setattr(processes, "available_cores", lambda: 9)
    monkeypatch.setattr(processes.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no process today"):
        processes.begun(Task(0, tmp_path, {}, 4), "a")
    assert [started[0][name] for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")] == ["2", "2"]


def test_runs_stop_after_their_round_when_the_caller_leaves(tmp_path):
    runs = launched(tmp_path, ("a", []), ("b", ["seed=1"]), base=[*FEDAVG, "rounds=500"])
    watching = in_processes(runs, 2)
    next(event for event in watching if event.step is not None)
    watching.close()
    done = [len((tmp_path / n / "metrics.jsonl").read_text().splitlines()) for n in ("a", "b")]
    assert 1 <= max(done) < 500
    assert not (tmp_path / "a" / "summary.json").exists()


def test_log_records_of_a_process_reach_this_one_with_the_runs_name(tmp_path):
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append((record.run, record.getMessage()))
    log = logging.getLogger("fedhassle")
    log.addHandler(handler)
    try:
        assert ends(in_processes(launched(tmp_path, ("a", []), base=FEDAVG), 1)) == {0: None}
    finally:
        log.removeHandler(handler)
    assert {run for run, _ in said} == {"a"}
    assert any(text.startswith("round 1: unlabelled clients do not train") for _, text in said)


def test_what_a_method_of_ones_own_logs_in_a_process_reaches_this_one(tmp_path, module, caplog):
    name = module(
        "telling",
        """
        import logging
        from fedhassle.methods import FedAvg

        class Telling(FedAvg):
            def merge(self, state, updates, t, rng):
                logging.getLogger("own").warning("round %d has %d updates", t, len(updates))
                return super().merge(state, updates, t, rng)
        """,
    )
    runs = launched(tmp_path, ("a", [f"method={name}:Telling", "clients_per_round=1"]), base=FEDAVG)
    assert ends(in_processes(runs, 1)) == {0: None}
    said = [record.getMessage() for record in caplog.records if record.name == "own"]
    assert [text[:11] for text in said] == ["round 1 has", "round 2 has"]


def test_an_error_that_cannot_travel_arrives_as_its_message():
    class LocalError(Exception):
        """A class that no other process can find."""

    assert str(portable(LocalError("too hot"))) == "LocalError: too hot"
    error = UserError("as it is")
    assert portable(error) is error


def test_a_small_network_is_one_with_few_operations():
    """LeNet's, by hand, two for each multiplication: its layers, (outputs, inputs of each).

    2·(28²·6·25 + 10²·16·150 + 120·400 + 84·120 + 10·84) = 833,040. ResNet-8 has 0.39e9.
    """
    sizes = (28 * 28 * 6, 25), (10 * 10 * 16, 150), (120, 400), (84, 120), (10, 84)
    lenet, resnet = Net(NETS["lenet"], (1, 28, 28), 10), Net(NETS["resnet8"], (3, 32, 32), 10)
    assert lenet.is_small and lenet.operations == 2 * sum(a * b for a, b in sizes)
    assert not resnet.is_small and resnet.operations == pytest.approx(0.39e9, rel=0.02)


@pytest.fixture
def gpu(monkeypatch):
    """As if runs trained on a GPU of 100 GB, on a machine of 8 cores with MPS."""
    monkeypatch.setattr(several, "build_engine", lambda settings: FakeEngine(None, "one"))
    monkeypatch.setattr("fedhassle.runs.run.Run.device", torch.device("cuda"))
    monkeypatch.setattr(processes.mps, "available", lambda: True)
    monkeypatch.setattr(processes, "available_cores", lambda: 8)
    memory = SimpleNamespace(total_memory=100e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    return SimpleNamespace(memory=memory)


def test_only_small_networks_get_processes_and_as_many_as_fit(tmp_path, gpu, monkeypatch):
    (run,) = launched(tmp_path, ("a", []), base=FEDAVG)
    monkeypatch.setattr(processes, "available_cores", lambda: 4)
    assert several.way_of(run).processes == 4
    monkeypatch.setattr(processes, "available_cores", lambda: 64)
    assert several.way_of(run).processes == ON_A_GPU
    gpu.memory.total_memory = 3 * processes.MEMORY + 3 * run.dataset.x_train.nbytes
    assert several.way_of(run).processes == 3
    monkeypatch.setattr("fedhassle.nets.LARGE", 1.0)
    assert several.way_of(run).processes == 0


def test_runs_whose_rounds_fill_a_gpu_have_it_to_themselves(tmp_path, gpu, monkeypatch):
    (run,) = launched(tmp_path, ("a", []), base=FEDAVG)
    assert several.way_of(run).threads == several.SIDE_BY_SIDE
    monkeypatch.setattr(processes, "FULL", processes.operations_of(run) / run.rounds / 1.01)
    assert several.way_of(run).threads == 1


def test_runs_without_mps_or_with_code_of_a_session_share_the_process(tmp_path, gpu, monkeypatch):
    (run,) = launched(tmp_path, ("a", []), base=FEDAVG)
    monkeypatch.setattr(processes, "own_code_of", lambda settings: {"__main__:Mine": "hash"})
    assert several.way_of(run).processes == 0
    monkeypatch.setattr(processes, "own_code_of", lambda settings: {})
    assert several.way_of(run).processes == 8
    monkeypatch.setattr(processes.mps, "available", lambda: False)
    assert several.way_of(run).processes == 0


@pytest.mark.parametrize(
    ("n", "asked", "daemon", "expected"),
    [
        (9, None, True, ("processes", 8)),
        (9, 5, True, ("processes", 5)),
        (3, None, True, ("processes", 3)),
        (9, 1, True, ("threads", 1)),
        (1, None, True, ("threads", several.SIDE_BY_SIDE)),
        (9, None, False, ("threads", several.SIDE_BY_SIDE)),
    ],
)
def test_the_way_that_runs_train(tmp_path, gpu, monkeypatch, caplog, n, asked, daemon, expected):
    """One run at a time needs no process, and without the daemon runs share this one."""

    @contextlib.contextmanager
    def started():
        if not daemon:
            raise UserError("the daemon failed: no GPU")
        yield

    (run,), ways = launched(tmp_path, ("a", []), base=FEDAVG), []

    def way(name):
        def train(group, width):
            ways.append((name, width))
            yield from (Event(i, begun=one) for i, one in enumerate(group))

        return train

    monkeypatch.setattr(several.mps, "mps", started)
    monkeypatch.setattr(several, "in_processes", way("processes"))
    monkeypatch.setattr(several, "in_threads", way("threads"))
    monkeypatch.setattr(FakeEngine, "active", lambda self: contextlib.nullcontext())
    events = list(several.train_several([run] * n, asked))
    assert ways == [expected] and [event.run for event in events] == list(range(n))
    assert ("the daemon failed: no GPU" in caplog.text) == (not daemon)


@pytest.fixture
def long(monkeypatch):
    """As if every run were worth a process, on a CPU of four cores."""
    monkeypatch.setattr(processes, "WORTH", 0.0)
    return [*FEDAVG, "threads=4"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], 4), (["threads=32"], MOST), (["threads=1"], 0), (["data=fmnist-mini", "net=resnet8"], 0)],
)
def test_on_a_cpu_small_networks_get_a_process_per_thread(tmp_path, long, words, expected):
    (run,) = launched(tmp_path, ("a", words), base=long)
    assert several.way_of(run).processes == expected


def test_short_runs_get_no_process(tmp_path, long, monkeypatch):
    """A run is short by its operations: those of LeNet, for all its images, times three."""
    (run,) = launched(tmp_path, ("a", []), base=[*long, "method.batch=10"])
    steps = sum(math.ceil(len(rows) / 10) for rows in run.split.labelled)
    drawn = run.settings.clients_per_round / len(run.split.names)
    work = 3 * 833_040 * 2 * drawn * 10 * steps  # two rounds of one epoch
    monkeypatch.setattr(processes, "WORTH", 0.999 * work)
    assert several.way_of(run).processes == 4
    monkeypatch.setattr(processes, "WORTH", 1.001 * work)
    assert several.way_of(run).processes == 0


def test_an_error_in_a_method_of_ones_own_ends_its_run_alone(tmp_path, long, module):
    """Also one in the phases by which its operations are counted."""
    name = module(
        "failing_late",
        """
        from fedhassle.methods import FedAvg

        class FailingLate(FedAvg):
            def phases(self, client, t):
                return super().phases(client, t) if t < 2 else 1 / 0
        """,
    )
    runs = launched(tmp_path, ("bad", [f"method={name}:FailingLate"]), ("good", []), base=long)
    found = ends(several.train_several(runs))
    assert isinstance(found[0], ZeroDivisionError) and found[1] is None


@pytest.mark.parametrize(
    ("runs", "asked", "at_once"), [(3, None, 3), (6, None, 4), (3, 2, 2), (3, 1, 0), (1, None, 0)]
)
def test_runs_on_a_cpu_share_its_cores(tmp_path, long, monkeypatch, runs, asked, at_once):
    """As many as there are or as were asked for, each with its share; 0: in this process."""
    shares = []
    monkeypatch.setattr(processes, "begun", lambda task, name: shares.append(task.share) or ended(task))
    monkeypatch.setattr(processes, "wait", lambda lines: lines)
    monkeypatch.setattr(several, "train_run", lambda run: iter(()))
    choices = [(str(seed), [f"seed={seed}"]) for seed in range(runs)]
    events = list(several.train_several(launched(tmp_path, *choices, base=long), asked))
    assert len(ends(events)) == runs
    assert {event.together for event in events if event.begun is not None} == {at_once or 1}
    assert shares == ([at_once] * runs if at_once else [])


def ended(task):
    """A process whose run has just ended."""
    line = SimpleNamespace(recv=lambda: Event(task.place), close=lambda: None)
    nothing = SimpleNamespace(wait=lambda: 0, close=lambda: None)
    return processes.Child(task.place, "", nothing, line, nothing)


@pytest.mark.parametrize(("share", "threads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_run_that_shares_a_cpu_has_a_part_of_its_threads(tmp_path, long, share, threads):
    """Its settings and its summary name all of them, as with any number of runs on a GPU."""
    (run,) = launched(tmp_path, ("a", []), base=long)
    shared = replace(run, share=share)
    assert shared.threads == threads and shared.settings.threads == 4
    with simulated(shared, build_engine(run.settings), ClientState()) as simulator:
        assert simulator.trainer.threads == threads
    assert evaluator(shared).threads == min(threads, available_cores())


def test_a_process_trains_with_its_share_of_the_threads(tmp_path, long, monkeypatch):
    (run,) = launched(tmp_path, ("a", []), base=long)
    seen = []

    def train(run):
        seen.append(run.threads)
        yield from ()

    monkeypatch.setattr(process, "train_run", train)
    process.train(Task(0, run.folder.path, run.settings.as_toml(), 2), None)
    assert seen == [2]


def test_a_run_that_ends_in_a_process_is_whole(tmp_path):
    list(in_processes(launched(tmp_path, ("a", []), base=FEDAVG), 1))
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["rounds"] == 2 and not list(tmp_path.rglob("*.lock"))
