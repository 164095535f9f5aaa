"""`fedhassle reproduce --ray`: cells are tasks of Ray, and end in the same figures."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from ledgers import FEW, experiment
from small import LIMIT, but_seconds, call, checkpoints, environment, interruptible

from fedhassle.errors import UserError
from fedhassle.reproduce import ray
from fedhassle.reproduce.experiment import Narrowing, cells, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.ray import Board, Errand, Node, Share, SpreadWork, carried_out, look, share_of
from fedhassle.reproduce.sweep import Work
from fedhassle.runs import several

TINY = f"""
title = "Two step sizes on few images"
seeds = 2

{FEW}split.alpha = 5.0
method.name = "fedavg"

[[axis]]
name = "step"
choices = [{{ id = "fine" }}, {{ id = "wild", set = {{ method.lr = 1e30, method.clip = 0.0 }} }}]
"""
SMALL, LARGE = Node("a", "small", 0, 2), Node("b", "large", 4, 16)


@pytest.fixture(scope="module")
def tiny(images, tmp_path_factory):
    """The file of an experiment: two runs that end well, and two that diverge."""
    return experiment(tmp_path_factory.mktemp("experiment"), TINY, images)


@pytest.fixture(scope="module")
def chosen(tiny):
    return cells(read_experiment(str(tiny)), Narrowing(only=("fine",)))


@pytest.fixture(scope="module")
def made(chosen, tmp_path_factory):
    """A folder in which the good half was made without Ray."""
    folder = tmp_path_factory.mktemp("made")
    work = Work(Ledger(folder / "results"), chosen, folder / "runs")
    assert all(event.error is None for event in work.carry_out()) and not work.left
    return folder


def results(folder):
    """The summaries of a ledger by the names of their files, without times."""
    kept = ("seed", "settings", "settings_hash", "split_hash", "rounds", "accuracy")
    found = {}
    for file in sorted((folder / "results").rglob("*.json")):
        summary = json.loads(file.read_text())
        history = but_seconds(summary["history"])
        found[file.name] = {**{key: summary[key] for key in kept}, "history": history}
    return found


def errand(cell, home, share=None):
    share = share or Share(1, 1)
    sent = replace(cell, requested=share.applied(cell.requested))
    return Errand(sent, cell.identity, str(home), share.sharing)


def asked(chosen, **settings):
    """Cells with other settings, which are not looked at yet."""
    return [
        replace(cell, requested=cell.requested._replace(layers=(*cell.requested.layers, settings)))
        for cell in chosen
    ]


# Shares


@pytest.mark.parametrize("sharing", [1, 2, 3, 6, 7, 12])
def test_as_many_as_share_a_gpu_fit_on_it_and_no_more(sharing):
    part = round(10_000 * Share(sharing, 0).resources["num_gpus"])  # Ray counts ten-thousandths
    assert part > 0 and 10_000 // part == sharing


def test_a_cell_takes_a_part_of_a_gpu_where_there_is_one(chosen):
    share = share_of(asked(chosen, device="auto"), [SMALL, LARGE], None)
    assert share == Share(3, 0) and share.places([SMALL, LARGE]) == 12
    assert share_of(asked(chosen, device="auto"), [LARGE], 5).places([SMALL, LARGE]) == 20
    assert share.resources["num_cpus"] == 0


def test_else_it_takes_as_many_cores_as_it_has_threads(chosen):
    assert share_of(chosen, [SMALL, LARGE], 5) == Share(1, 1)  # the settings say device=cpu
    assert share_of(asked(chosen, device="auto", threads=0), [SMALL], None) == Share(1, 1)
    share = share_of(asked(chosen, threads=3), [SMALL, LARGE], None)
    assert share == Share(1, 3) and share.places([SMALL, LARGE]) == 5
    assert share.resources == {"num_cpus": 3}


def test_what_no_machine_has_is_told(chosen):
    with pytest.raises(UserError, match=r"no machine of the Ray cluster has 3 cores: .* threads=N"):
        share_of(asked(chosen, threads=3), [SMALL, SMALL], None)
    with pytest.raises(UserError, match="device=cuda: the Ray cluster has no GPU"):
        share_of(asked(chosen, device="cuda"), [SMALL], None)


@pytest.mark.parametrize(
    ("device", "share", "expected"),
    [
        ("auto", Share(3, 0), {"device": "cuda", "threads": 1}),
        ("cpu", Share(3, 0), {"device": "cpu", "threads": 1}),
        ("auto", Share(1, 2), {"device": "cpu", "threads": 2}),
    ],
)
def test_settings_keep_to_the_share_and_to_what_was_asked_for(device, share, expected, chosen):
    (cell,) = asked(chosen[:1], device=device)
    applied = share.applied(cell.requested)
    assert {key: applied.top(key, None) for key in expected} == expected


def test_the_share_does_not_change_which_run_it_is(chosen):
    sent = errand(chosen[0], "home", Share(1, 7)).cell
    assert sent.identity.key == chosen[0].identity.key and "7 threads" in sent.identity.machine


# On the machine of a task


def never(step):
    return False


def test_a_task_makes_the_same_run(chosen, made, tmp_path):
    heard = []
    summary = carried_out(errand(chosen[0], tmp_path / "run"), heard.append)
    assert [step and step.t for step in heard] == [None, 1, 2, 3, 4]
    Ledger(tmp_path / "results").add(json.loads(json.dumps(summary)))
    ((name, found),) = results(tmp_path).items()
    assert found == results(made)[name]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_task_that_is_told_to_stop_ends_after_its_round_and_goes_on_later(chosen, made, tmp_path):
    sent = errand(chosen[0], tmp_path / "run")
    assert carried_out(sent, lambda step: True) is None and not (tmp_path / "run").exists()
    assert carried_out(sent, lambda step: step is not None and step.t == 2) is None
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-000001", "round-000002"]
    heard = []
    summary = carried_out(sent, heard.append)
    assert [step and step.t for step in heard] == [None, 3, 4]
    Ledger(tmp_path / "results").add(summary)
    ((name, found),) = results(tmp_path).items()
    assert found == results(made)[name]


def test_a_run_that_lies_finished_on_the_machine_is_brought_back_as_it_is(chosen, tmp_path, monkeypatch):
    sent = errand(chosen[0], tmp_path / "run")
    first = carried_out(sent, never)
    monkeypatch.setattr(ray, "carry_out", None)
    assert carried_out(sent, never) == first


def test_another_run_than_was_meant_is_refused_before_it_begins(chosen, tmp_path):
    sent = errand(chosen[0], tmp_path / "run")
    other = sent._replace(identity=sent.identity._replace(settings_hash="0" * 16))
    with pytest.raises(UserError, match="its images or the version of fedhassle are others"):
        carried_out(other, never)
    assert "are others" in look([other]).error and not (tmp_path / "run").exists()


def test_a_machine_says_what_it_is_or_what_it_lacks(chosen, images, tmp_path):
    sent = errand(chosen[0], tmp_path / "new" / "run")
    assert look([sent]) == (sent.cell.identity.machine, None) and (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    blocked = errand(chosen[0], tmp_path / "file" / "run")
    assert "cannot be written there: choose another --runs" in look([blocked]).error
    away = tmp_path / "away.npz"
    shutil.copy(images, away)
    (cell,) = asked(chosen[:1], data={"name": str(away)})
    lacking = errand(cell, tmp_path / "run")
    away.unlink()
    assert str(away) in look([lacking]).error


def test_the_board_passes_on_rounds_and_the_wish_to_stop():
    async def play():
        board = Board()
        assert not await board.note(0, None) and not await board.note(1, None)
        assert not await board.note(1, "first") and not await board.note(0, "second")
        assert await board.news() == [(1, "first"), (0, "second")]
        await board.note(1, None)  # again: its process died
        assert await board.news() == [(1, None)]
        waiting = asyncio.create_task(board.news())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await board.stop() == {0, 1}
        assert await board.note(0, "third") and await waiting == [(0, "third")]

    asyncio.run(play())


# The command


def test_the_time_left_is_that_of_all_machines_together(chosen, made, tmp_path):
    """A cell that takes 8 s on one kind of machine and 4 s on another, 2 of one and 1 of the other: 2 s."""
    shutil.copytree(made / "results", tmp_path / "results")
    for file, seconds, cpu in zip(sorted((tmp_path / "results").rglob("*.json")), (8, 4), "ab", strict=True):
        summary = json.loads(file.read_text())
        hardware = {**summary["hardware"], "cpu": cpu}
        file.write_text(json.dumps({**summary, "seconds": seconds, "hardware": hardware}))
    work = SpreadWork("local", Ledger(tmp_path / "results"), chosen)
    work._machines = [("a, 1 thread", 2), ("b, 1 thread", 1), ("unknown", 9)]
    assert work.seconds(chosen[0].identity) == pytest.approx(2)
    work._machines = [("unknown", 9)]
    assert work.seconds(chosen[0].identity) is None


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "", "two words:1"])
def test_what_is_no_cluster_is_told(address, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("reproduce", tiny, "--ray", address)
    assert (code, out) == (2, "") and "write local, auto, or HOST:PORT" in err
    assert not list(tmp_path.iterdir())


def test_where_nobody_answers_is_told_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, out, err = call("reproduce", tiny, "--ray", f"127.0.0.1:{port}")
    assert (code, out) == (2, "") and "nobody answers there; ray start --head" in err
    assert not list(tmp_path.iterdir())


def test_without_the_extra_it_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call("reproduce", tiny, "--ray", "local")
    assert code == 2 and "pip install 'fedhassle[ray]'" in err and not list(tmp_path.iterdir())


def test_where_nothing_is_lacking_no_cluster_is_needed(made, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(several, "carry_out", None)
    code, out, _ = call("reproduce", tiny, "--only", "fine", "--ray", "auto", "--results", made / "results")
    assert code == 0 and "2 of 2" in out


# With Ray


class Started:
    """The command in a process group of its own; its processes are known by a word in their environment."""

    def __init__(self, tiny, folder, *words):
        self.mark = uuid.uuid4().hex
        self.home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
        self.output = folder / "output.txt"
        options = ("--ray", "local", "--results", folder / "results", "--runs", folder / "runs")
        changes = {"MARK": self.mark, "HOME": str(self.home), "RAY_TMPDIR": str(self.home)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                interruptible("reproduce", tiny, *options, *words),
                env=environment(**changes),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT)
        shutil.rmtree(self.home, ignore_errors=True)

    def living(self, title=""):
        """The numbers of its processes, or of those with a title."""
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [number for number in numbers if self.owns(number, title)]

    def owns(self, pid, title):
        try:
            marked = f"MARK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            return marked and Path(f"/proc/{pid}/cmdline").read_text().startswith(title)
        except OSError:  # it has ended meanwhile
            return False

    def until(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, "the process hangs"
            time.sleep(0.02)

    def ended(self):
        """Exit code and output, once the command is over; none of its processes are left."""
        code = self.process.wait(LIMIT)
        deadline = time.monotonic() + 20
        while self.living() and time.monotonic() < deadline:  # those that were told to end
            time.sleep(0.1)
        assert not self.living()
        return code, self.output.read_text()


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@linux
@pytest.mark.slow
def test_tasks_fill_the_ledger_with_the_same_figures_and_a_failure_stops_no_other(made, tiny, tmp_path):
    with Started(tiny, tmp_path) as command:
        code, out = command.ended()
    assert code == 1 and results(tmp_path) == results(made)
    first, *lines = out.splitlines()
    assert first.startswith("4 runs to make with Ray on 1 machine, on cpu, ")
    assert sum("of 4  tiny fine-" in line for line in lines) == 2
    for seed in (0, 1):
        (line,) = {line for line in lines if line.startswith(f"tiny wild-{seed} failed: round ")}
        assert line.endswith(", 127.0.0.1)")  # the machine, which listens to itself alone
    assert "left: 2 of 4 runs" in out and not list((tmp_path / "runs").glob("*.lock"))


@linux
@pytest.mark.slow
def test_a_dead_process_is_replaced_and_ctrl_c_ends_after_the_round(chosen, tiny, tmp_path):
    """A run that would last for days: its process is killed, another goes on with it, then all is stopped."""
    with Started(tiny, tmp_path, "--only", "fine-0", "--rounds", "900000") as command:

        def reached():
            found = [checkpoints(home) for home in (tmp_path / "runs").glob("*/")]
            return max((int(path.stem.partition("-")[2]) for paths in found for path in paths), default=0)

        command.until(lambda: reached() > 10)
        (killed,) = command.living("ray::train")
        os.kill(killed, signal.SIGKILL)
        command.until(lambda: command.living("ray::train") not in ([], [killed]))
        before = reached()
        command.until(lambda: reached() > before)
        os.killpg(command.process.pid, signal.SIGINT)
        code, out = command.ended()
    assert code == 130 and "stopped; the same command goes on" in out
    assert "tiny fine-0 goes on: its process or machine died" in out and before >= 10
    (home,) = (tmp_path / "runs").glob("*/")
    history = [json.loads(line)["round"] for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert history == list(range(1, len(history) + 1)) and len(history) in (reached(), reached() + 1)
