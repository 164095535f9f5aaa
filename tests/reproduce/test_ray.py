"""`fedhassle reproduce --ray`: cells are Ray tasks, and give the same results."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import replace

import pytest
from ledgers import FEW, experiment
from ray_commands import RayCommand
from small import but_seconds, call, checkpoints

from fedhassle.engine.cluster import Allocation, Machine
from fedhassle.errors import UserError
from fedhassle.reproduce import ray_task
from fedhassle.reproduce.experiment import Selection, cells, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.ray import ProgressBoard, RaySweep, allocation_for, placed
from fedhassle.reproduce.ray_task import CellTask, check_machine, train_cell
from fedhassle.reproduce.sweep import Sweep
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
SMALL, LARGE = Machine("a", "small", 0, 2), Machine("b", "large", 4, 16)


@pytest.fixture(scope="module")
def tiny(images, tmp_path_factory):
    """The file of an experiment: two runs that end well, and two that diverge."""
    return experiment(tmp_path_factory.mktemp("experiment"), TINY, images)


@pytest.fixture(scope="module")
def chosen(tiny):
    return cells(read_experiment(str(tiny)), Selection(only=("fine",)))


@pytest.fixture(scope="module")
def made(chosen, tmp_path_factory):
    """A folder in which the good half was trained without Ray."""
    folder = tmp_path_factory.mktemp("made")
    work = Sweep(Ledger(folder / "results"), chosen, folder / "runs")
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


def task(cell, home, allocation=None):
    allocation = allocation or Allocation(1, 1)
    sent = replace(cell, requested=placed(cell.requested, allocation))
    return CellTask(sent, cell.identity, str(home), allocation.sharing)


def asked(chosen, **settings):
    """Cells with other settings, which are not checked yet."""
    return [
        replace(cell, requested=cell.requested._replace(layers=(*cell.requested.layers, settings)))
        for cell in chosen
    ]


# Allocations


@pytest.mark.parametrize("sharing", [1, 2, 3, 6, 7, 12])
def test_exactly_as_many_cells_fit_on_a_gpu_as_share_it(sharing):
    part = round(10_000 * Allocation(sharing, 0).resources["num_gpus"])  # Ray counts ten-thousandths
    assert part > 0 and 10_000 // part == sharing


def test_a_cell_takes_a_part_of_a_gpu_if_there_is_one(chosen):
    allocation = allocation_for(asked(chosen, device="auto"), [SMALL, LARGE], None)
    assert allocation == Allocation(3, 0) and allocation.places([SMALL, LARGE]) == 12
    assert allocation_for(asked(chosen, device="auto"), [LARGE], 5).places([SMALL, LARGE]) == 20
    assert allocation.resources["num_cpus"] == 0


def test_without_a_gpu_a_cell_takes_as_many_cores_as_it_has_threads(chosen):
    assert allocation_for(chosen, [SMALL, LARGE], 5) == Allocation(1, 1)  # the settings say device=cpu
    assert allocation_for(asked(chosen, device="auto", threads=0), [SMALL], None) == Allocation(1, 1)
    allocation = allocation_for(asked(chosen, threads=3), [SMALL, LARGE], None)
    assert allocation == Allocation(1, 3) and allocation.places([SMALL, LARGE]) == 5
    assert allocation.resources == {"num_cpus": 3}


def test_resources_that_no_machine_has_are_an_error(chosen):
    with pytest.raises(UserError, match=r"3 cores: .* threads=N"):
        allocation_for(asked(chosen, threads=3), [SMALL, SMALL], None)
    with pytest.raises(UserError, match=r"device=cuda.* no GPU"):
        allocation_for(asked(chosen, device="cuda"), [SMALL], None)
    with pytest.raises(UserError, match=r"workers=N spreads each run, --ray spreads the runs"):
        allocation_for(asked(chosen, workers=2), [LARGE], None)


@pytest.mark.parametrize(
    ("device", "allocation", "expected"),
    [
        ("auto", Allocation(3, 0), {"device": "cuda", "threads": 1}),
        ("cpu", Allocation(3, 0), {"device": "cpu", "threads": 1}),
        ("auto", Allocation(1, 2), {"device": "cpu", "threads": 2}),
    ],
)
def test_settings_follow_the_allocation_but_keep_a_chosen_device(device, allocation, expected, chosen):
    (cell,) = asked(chosen[:1], device=device)
    applied = placed(cell.requested, allocation)
    assert {key: applied.top(key, None) for key in expected} == expected


def test_the_allocation_does_not_change_the_identity_of_a_run(chosen):
    sent = task(chosen[0], "home", Allocation(1, 7)).cell
    assert sent.identity.key == chosen[0].identity.key and "7 threads" in sent.identity.machine


# On the machine of a task


def never(step):
    return False


def test_a_task_makes_the_same_run(chosen, made, tmp_path):
    heard = []
    summary = train_cell(task(chosen[0], tmp_path / "run"), heard.append)
    assert [step and step.t for step in heard] == [None, 1, 2, 3, 4]
    Ledger(tmp_path / "results").add(json.loads(json.dumps(summary)))
    ((name, found),) = results(tmp_path).items()
    assert found == results(made)[name]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_stopped_task_ends_after_its_round_and_resumes_later(chosen, made, tmp_path):
    sent = task(chosen[0], tmp_path / "run")
    assert train_cell(sent, lambda step: True) is None and not (tmp_path / "run").exists()
    assert train_cell(sent, lambda step: step is not None and step.t == 2) is None
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-000001", "round-000002"]
    heard = []
    summary = train_cell(sent, heard.append)
    assert [step and step.t for step in heard] == [None, 3, 4]
    Ledger(tmp_path / "results").add(summary)
    ((name, found),) = results(tmp_path).items()
    assert found == results(made)[name]


def test_a_finished_run_on_the_machine_is_returned_as_it_is(chosen, tmp_path, monkeypatch):
    sent = task(chosen[0], tmp_path / "run")
    first = train_cell(sent, never)
    monkeypatch.setattr(ray_task, "train_run", None)
    assert train_cell(sent, never) == first


def test_a_run_with_another_identity_is_refused_before_it_starts(chosen, tmp_path):
    sent = task(chosen[0], tmp_path / "run")
    other = sent._replace(identity=sent.identity._replace(settings_hash="0" * 16))
    with pytest.raises(UserError, match="would be another run"):
        train_cell(other, never)
    assert "would be another run" in check_machine([other]).error and not (tmp_path / "run").exists()


def test_a_machine_reports_its_hardware_or_what_it_lacks(chosen, images, tmp_path):
    sent = task(chosen[0], tmp_path / "new" / "run")
    assert check_machine([sent]) == (sent.cell.identity.machine, None) and (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    blocked = task(chosen[0], tmp_path / "file" / "run")
    assert f"{tmp_path / 'file'} cannot be written" in check_machine([blocked]).error
    away = tmp_path / "away.npz"
    shutil.copy(images, away)
    (cell,) = asked(chosen[:1], data={"name": str(away)})
    lacking = task(cell, tmp_path / "run")
    away.unlink()
    assert str(away) in check_machine([lacking]).error


def test_the_board_passes_on_rounds_and_requests_to_stop():
    async def play():
        board = ProgressBoard()
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
    work = RaySweep("local", Ledger(tmp_path / "results"), chosen)
    work._machines = [("a, 1 thread", 2), ("b, 1 thread", 1), ("unknown", 9)]
    assert work.seconds(chosen[0].identity) == pytest.approx(2)
    work._machines = [("unknown", 9)]
    assert work.seconds(chosen[0].identity) is None


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "", "two words:1"])
def test_an_invalid_address_is_an_error(address, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("reproduce", tiny, "--ray", address)
    assert (code, out) == (2, "") and "local, auto, or HOST:PORT" in err
    assert not list(tmp_path.iterdir())


def test_an_address_that_does_not_answer_is_an_error_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, out, err = call("reproduce", tiny, "--ray", f"127.0.0.1:{port}")
    assert (code, out) == (2, "") and "no answer; ray start --head" in err
    assert not list(tmp_path.iterdir())


def test_a_missing_ray_is_an_error_that_names_the_extra(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call("reproduce", tiny, "--ray", "local")
    assert code == 2 and "pip install 'fedhassle[ray]'" in err and not list(tmp_path.iterdir())


def test_no_cluster_is_needed_if_no_cell_is_missing(made, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(several, "train_run", None)
    code, out, _ = call("reproduce", tiny, "--only", "fine", "--ray", "auto", "--results", made / "results")
    assert code == 0 and "2 of 2" in out


# With Ray


def started(tiny, folder, *words):
    """The command in a process of its own."""
    options = ("--ray", "local", "--results", folder / "results", "--runs", folder / "runs")
    return RayCommand(folder / "output.txt", "reproduce", tiny, *options, *words)


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@linux
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_tasks_give_the_same_results_and_a_failure_stops_no_other(made, tiny, tmp_path):
    with started(tiny, tmp_path) as command:
        code, out = command.ended()
    assert code == 1 and results(tmp_path) == results(made)
    first, *lines = out.splitlines()
    assert first.startswith("4 runs to make with Ray on 1 machine, on cpu, ")
    assert sum("of 4  tiny fine-" in line for line in lines) == 2
    for seed in (0, 1):
        (line,) = {line for line in lines if line.startswith(f"tiny wild-{seed} failed: round ")}
        assert line.endswith(", 127.0.0.1)")  # the machine, which listens on localhost alone
    assert "left: 2 of 4 runs" in out and not list((tmp_path / "runs").glob("*.lock"))


@linux
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_dead_process_is_replaced_and_ctrl_c_ends_after_the_round(chosen, tiny, tmp_path):
    """A run that would take days: its process is killed, another resumes it, then the command is stopped."""
    with started(tiny, tmp_path, "--only", "fine-0", "--rounds", "900000") as command:

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
    assert code == 130 and "run the same command again" in out
    assert "tiny fine-0 resumes" in out and before >= 10
    (home,) = (tmp_path / "runs").glob("*/")
    history = [json.loads(line)["round"] for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert history == list(range(1, len(history) + 1)) and len(history) in (reached(), reached() + 1)
