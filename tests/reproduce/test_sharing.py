"""How the runs of a sweep share a GPU."""

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedhassle.architectures import LeNet, ResNet8
from fedhassle.errors import UserError
from fedhassle.nets import Net
from fedhassle.reproduce import sharing
from fedhassle.reproduce.sharing import CONTROL, MOST, mps, operations, processes_for, small_networks
from fedhassle.settings.request import request

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")


def cell(*words, device="cuda"):
    return SimpleNamespace(requested=request("paper", words), identity=SimpleNamespace(device=device))


def test_operations_of_lenet_are_counted():
    """Twice the products: 28²·6·25 + 10²·16·150 in convolutions, 400·120 + 120·84 + 84·10 after them."""
    products = 28 * 28 * 6 * 25 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    assert operations(Net(LeNet, (1, 28, 28), 10)) == 2 * products
    assert operations(Net(ResNet8, (3, 32, 32), 10)) > 100 * 2 * products


@pytest.mark.parametrize(
    ("data", "small"), [(["fmnist"], True), (["cifar10"], False), (["fmnist", "cifar10"], False)]
)
def test_networks_are_small_if_all_are(data, small):
    assert small_networks([cell(f"data={name}") for name in data]) is small


@pytest.mark.parametrize(
    ("runs", "cores", "together", "wanted", "installed", "data", "processes"),
    [
        (40, 8, None, None, True, "fmnist", 8),
        (40, 64, None, None, True, "fmnist", MOST),
        (3, 8, None, None, True, "fmnist", 3),
        (40, 8, 5, None, True, "fmnist", 5),
        (40, 8, None, None, False, "fmnist", 0),
        (40, 8, None, None, True, "cifar10", 0),
        (40, 8, None, True, True, "cifar10", 8),
        (40, 8, 5, False, True, "fmnist", 0),
    ],
)
def test_the_number_of_processes(monkeypatch, runs, cores, together, wanted, installed, data, processes):
    monkeypatch.setattr(sharing, "available_cores", lambda: cores)
    monkeypatch.setattr(sharing, "can_share", lambda: installed)
    monkeypatch.setattr(sharing, "require_ray", lambda wanted: None)
    monkeypatch.setattr(sharing.shutil, "which", lambda name: name)
    assert processes_for([cell(f"data={data}")] * runs, together, wanted) == processes


def test_processes_need_a_gpu_and_mps(monkeypatch):
    assert processes_for([cell(device="cpu")], None, None) == 0
    with pytest.raises(UserError, match="train on a CPU: use --ray local"):
        processes_for([cell(device="cpu")], None, True)
    monkeypatch.setattr(sharing, "require_ray", lambda wanted: None)
    monkeypatch.setattr(sharing.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=CONTROL):
        processes_for([cell()], None, True)


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
def test_a_daemon_that_is_running_stays(daemon):
    daemon.alive.touch()
    with mps():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert daemon.alive.exists() and daemon.told.read_text() == "get_server_list\n"


@UNIX
def test_a_daemon_that_does_not_start_is_a_user_error(daemon):
    daemon.script.write_text("#!/bin/sh\necho no GPU >&2; exit 1\n")
    with pytest.raises(UserError, match="no GPU; --threads does without it"), mps():
        pass
