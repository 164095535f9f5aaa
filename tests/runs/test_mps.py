"""The daemon through which processes share a GPU, with a stand-in for its program."""

import os
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedhassle.errors import UserError
from fedhassle.runs.mps import CONTROL, available, mps

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")


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


def test_it_is_available_where_its_program_is(daemon, tmp_path, monkeypatch):
    assert available()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not available()


def test_the_daemon_runs_inside_the_block_even_if_it_fails(daemon):
    with pytest.raises(ZeroDivisionError), mps():
        where = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert daemon.alive.exists() and where.is_dir()
        raise ZeroDivisionError
    assert daemon.told.read_text().split("\n") == [f"start {where}", "quit", ""]
    assert not where.exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_daemon_that_is_running_stays(daemon):
    daemon.alive.touch()
    with mps():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert daemon.alive.exists() and daemon.told.read_text() == "get_server_list\n"


def test_a_folder_that_the_daemon_still_uses_is_no_error(daemon, tmp_path, monkeypatch):
    """Here it ends with a file where its folder was, which cannot be removed as one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with daemon.script.open("a") as script:
        script.write('rm -r "$CUDA_MPS_PIPE_DIRECTORY"; touch "$CUDA_MPS_PIPE_DIRECTORY"\n')
    with mps():
        pass
    assert not daemon.alive.exists()


def test_a_daemon_that_does_not_start_is_a_user_error(daemon):
    daemon.script.write_text("#!/bin/sh\necho no GPU >&2; exit 1\n")
    with pytest.raises(UserError, match="-d failed: no GPU"), mps():
        pass
