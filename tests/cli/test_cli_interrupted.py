"""Runs that diverge or are stopped with Ctrl-C: the message, and the files to resume from."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import small
import torch
from small import LIMIT, but_seconds, call, environment, interruptible, metrics_of

from fedhassle.cli import main
from fedhassle.files import locked
from fedhassle.runs.checkpoints import load_checkpoint
from fedhassle.runs.evaluation import Evaluator

# Divergence


def test_a_run_that_diverges_ends_with_code_1_and_a_clear_message(words, tmp_path):
    folder = tmp_path / "run"
    code, out, err = call("run", *words, "method.lr=1e30", "method.clip=0", "--out", folder)
    assert code == 1 and "Traceback" not in err + out
    assert "NaN or infinite" in err and "method.lr" in err and "client" in err
    assert not (folder / "summary.json").exists() and not (folder / "model.safetensors").exists()


EXPLODES = """
    import os
    from dataclasses import dataclass
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Explodes(FedAvg):
        "FedAvg that diverges in its third round, on a machine that is not healed."

        def phases(self, client, t):
            found = super().phases(client, t)
            return found if "HEALED" in os.environ or t < 3 else tuple(map(self.broken, found))

        def broken(self, phase):
            (descent,) = phase.descents
            nan = lambda *args: descent.loss(*args) * float("nan")
            broken = type(descent)("w", nan, descent.optimiser)
            return Phase(phase.name, phase.streams, (broken,), phase.epochs)
"""


def test_the_last_good_checkpoint_stays_after_divergence(without_residuals, module, monkeypatch, tmp_path):
    module("own_explodes", EXPLODES)
    mine, folder = [*without_residuals, "method=own_explodes:Explodes", "evaluate_every=1"], tmp_path / "run"
    code, _, err = call("run", *mine, "--out", folder)
    assert code == 1 and "round 3" in err
    kept = load_checkpoint(folder / "checkpoints", small.CPU)
    assert kept.t == 2 and all(torch.isfinite(array).all() for array in kept.state.values())
    assert [line["round"] for line in metrics_of(folder)] == [1, 2]
    assert call("resume", folder)[0] == 1  # diverges again, from the same round
    monkeypatch.setenv("HEALED", "1")
    assert call("resume", folder)[0] == 0
    assert call("run", *mine, "--out", tmp_path / "whole")[0] == 0
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(tmp_path / "whole"))


# Ctrl-C


def test_an_interrupted_run_can_be_resumed_and_says_how(words, finished, tmp_path, monkeypatch):
    folder, calls = tmp_path / "run", []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*args)

    evaluate = Evaluator.evaluate
    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    code, out, err = call("run", *words, "--out", folder)
    assert code == 130 and f"fedhassle resume {folder}" in out and "Traceback" not in out + err
    assert [line["round"] for line in metrics_of(folder)] == [2] and not (folder / "summary.json").exists()
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 4/4" in out and "round 2/4" not in out
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(finished[0]))


def wait_for(condition, running):
    """Waits until a condition holds, while the process runs and does not hang."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert running.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "the process hangs"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "code"), [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGTERM] * 2, 143)]
)
def test_a_signal_ends_with_its_code_and_says_how_to_resume(words, tmp_path, sent, code):
    """As SLURM sends it, SIGTERM may come twice: from SLURM itself, and from srun."""
    folder = tmp_path / "run"
    command = interruptible("run", *words, "rounds=100000", "--out", folder)
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: any(path.stem > "round-000000" for path in small.checkpoints(folder)), running)
        for number in sent:
            running.send_signal(number)
        out, err = running.communicate(timeout=LIMIT)
    finally:
        running.kill()
    assert running.returncode == code and err.decode() == main.STOPPING
    assert f"fedhassle resume {folder}".encode() in out
    assert load_checkpoint(folder / "checkpoints", small.CPU).t >= 2


AT_ONCE = """
    import signal
    from fedhassle.cli.main import main
    from fedhassle.runs import processes

    processes.WORTH = 0.0  # runs so short get a process each
    main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="processes inherit a pipe, as only POSIX has it")
def test_a_termination_ends_runs_in_processes_of_their_own_too(without_residuals, tmp_path):
    folder = tmp_path / "all"
    mine = [*without_residuals, "method=fedavg", "threads=2", "rounds=100000", "--vary", "seed=0,1"]
    command = [sys.executable, "-c", textwrap.dedent(AT_ONCE), "run", *mine, "--out", folder]
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: all(small.checkpoints(folder / name) for name in "01"), running)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=LIMIT)
    finally:
        running.kill()
    assert running.returncode == 143 and err.decode() == main.STOPPING
    assert f"fedhassle resume {folder / '0'} {folder / '1'}".encode() in out
    for name in "01":
        with locked(folder / name):  # no process holds it any more
            assert load_checkpoint(folder / name / "checkpoints", small.CPU).t < 100000


HANGS = """
    import threading
    from dataclasses import dataclass
    from pathlib import Path
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Hangs(FedAvg):
        "FedAvg whose clients never finish."

        def phases(self, client, t):
            return tuple(map(self.endless, super().phases(client, t)))

        def endless(self, phase):
            (descent,) = phase.descents
            hanging = type(descent)("w", hang, descent.optimiser)
            return Phase(phase.name, phase.streams, (hanging,), phase.epochs)

    def hang(*_):
        Path("training").touch()
        threading.Event().wait()
"""


def test_a_second_interrupt_ends_at_once_while_clients_still_train(without_residuals, tmp_path):
    """The first waits for their threads, here forever; the second ends without them."""
    (tmp_path / "own_hangs.py").write_text(textwrap.dedent(HANGS), "utf-8")
    mine = [*without_residuals, "threads=2", "method=own_hangs:Hangs", "--out", tmp_path / "run"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    running = subprocess.Popen(interruptible("run", *mine), env=environment(), cwd=tmp_path, **pipes)
    try:
        wait_for((tmp_path / "training").exists, running)
        running.send_signal(signal.SIGINT)
        first = running.stderr.readline() + running.stderr.readline()
        running.send_signal(signal.SIGINT)
        _, rest = running.communicate(timeout=LIMIT)
    finally:
        running.kill()
    assert running.returncode == 130
    assert (first.decode(), rest.decode()) == (main.STOPPING, main.ENDED)


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    """Replaces the end of the process by an error, and its registered functions by a list of calls."""
    called = []

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(main, "atexit", SimpleNamespace(_run_exitfuncs=lambda: called.append("registered")))
    monkeypatch.setattr(main.os, "_exit", end)
    return called


def test_an_interrupted_command_does_not_wait_for_the_end_of_the_interpreter(ends):
    with pytest.raises(Ended, match="130"):
        main.end_interrupted()
    assert ends == ["registered"]


def test_functions_registered_for_the_end_do_not_disturb_threads_at_work(ends):
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    try:
        with pytest.raises(Ended, match="130"):
            main.end_interrupted()
    finally:
        go.set()
        thread.join(LIMIT)
    assert ends == []


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_the_second_interrupt_shows_the_cursor_again(ends, monkeypatch):
    above, below = os.openpty()
    with os.fdopen(above, "rb", buffering=0) as screen, os.fdopen(below, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(Ended, match="130"):
            main.on_second_interrupt()
        shown = main.SHOW_CURSOR + main.ENDED.replace("\n", "\r\n")
        assert read(screen, len(shown)).decode() == shown


def read(screen, size):
    """So many bytes of a terminal, which may hand them over piece by piece."""
    found = b""
    while len(found) < size and select.select([screen], [], [], LIMIT)[0]:
        found += screen.read(size - len(found))
    return found


def test_interrupts_without_output_end_all_the_same(ends, monkeypatch):
    """As in a process that was started with its output closed."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for end in (main.on_second_interrupt, main.end_interrupted):
        with pytest.raises(Ended, match="130"):
            end()
