"""Runs that share a GPU as processes under MPS."""

import contextlib
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledgers import FEW, experiment
from small import call

from fedhassle.errors import UserError
from fedhassle.reproduce import sharing
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.ray import RaySweep
from fedhassle.reproduce.sharing import CONTROL, MOST, ProcessSweep, mps
from fedhassle.runs.run import Identity

ONE = f"""
title = "One run"
seeds = 1

{FEW}
[[axis]]
name = "method"
choices = [{{ id = "fedavg", set = {{ method.name = "fedavg" }} }}]
"""
UNIX = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A function that makes a sweep of so many cells on a machine of 8 cores."""
    monkeypatch.setattr(sharing, "available_cores", lambda: 8)
    monkeypatch.setattr(sharing, "require_ray", lambda wanted: None)
    monkeypatch.setattr(sharing.shutil, "which", lambda name: name)

    def make(count, together=None, device="cuda"):
        named = [Identity(str(n), 0, "fedavg", "fmnist", 200, device, "") for n in range(count)]
        cells = [SimpleNamespace(identity=one) for one in named]
        return ProcessSweep(Ledger(tmp_path / "results"), cells, tmp_path / "runs", together)

    return make


@pytest.mark.parametrize(
    ("cells", "together", "processes"), [(40, None, 8), (3, None, 3), (40, 5, 5), (40, 9, 9)]
)
def test_the_number_of_processes(sweep, cells, together, processes):
    assert sweep(cells, together)._together == processes


def test_no_more_than_a_few_processes_share_a_gpu(sweep, monkeypatch):
    monkeypatch.setattr(sharing, "available_cores", lambda: 64)
    assert sweep(40)._together == MOST


def test_processes_need_a_gpu_and_mps_if_a_run_is_missing(sweep, monkeypatch):
    with pytest.raises(UserError, match="train on a CPU: use --ray local"):
        sweep(1, device="cpu")
    monkeypatch.setattr(sharing.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=CONTROL):
        sweep(1)
    assert sweep(0).cells == []


def test_the_command_takes_processes(images, tmp_path, monkeypatch):
    """On a CPU it is refused, and beside --ray."""
    monkeypatch.chdir(tmp_path)
    own = experiment(tmp_path, ONE, images)
    code, _, err = call("reproduce", own, "--processes")
    assert code == 2 and "train on a CPU: use --ray local" in err
    code, _, err = call("reproduce", own, "--processes", "--ray", "local")
    assert code == 2 and "leave out --ray" in err


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A stand-in for the daemon's program, which writes down what it is told, and where its pipe is."""
    told, alive = tmp_path / "told", tmp_path / "alive"
    script = tmp_path / CONTROL
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -d ]; then touch {alive}; echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {told}; exit 0; fi\n'
        f"[ -e {alive} ] || exit 1\n"
        f'read word; echo "$word" >> {told}\n'
        f'if [ "$word" = quit ]; then rm {alive}; fi\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return SimpleNamespace(told=told, alive=alive, script=script)


@UNIX
def test_the_daemon_runs_inside_the_block_even_if_it_fails(daemon):
    with pytest.raises(ZeroDivisionError), mps():
        where = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert daemon.alive.exists() and where.is_dir()
        raise ZeroDivisionError
    assert daemon.told.read_text().split("\n") == [f"start {where}", "quit", ""]
    assert not where.exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


@UNIX
def test_the_cluster_of_a_sweep_starts_after_the_daemon(daemon, sweep, monkeypatch):
    @contextlib.contextmanager
    def cluster(self):
        assert daemon.alive.exists()
        yield

    monkeypatch.setattr(RaySweep, "opened", cluster)
    with sweep(1).opened():
        assert daemon.alive.exists()
    assert not daemon.alive.exists()


@UNIX
def test_a_daemon_that_is_running_stays(daemon):
    daemon.alive.touch()
    with mps():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert daemon.alive.exists() and daemon.told.read_text() == "get_server_list\n"


@UNIX
def test_a_daemon_that_does_not_start_is_a_user_error(daemon):
    daemon.script.write_text("#!/bin/sh\necho no GPU >&2; exit 1\n")
    with pytest.raises(UserError, match="no GPU; without --processes"), mps():
        pass
