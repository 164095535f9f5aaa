"""Runs that diverge or are stopped with Ctrl-C: the message, and the files to resume from."""

import signal
import subprocess
import time

import small
import torch
from small import LIMIT, but_seconds, call, environment, interruptible, metrics_of

from fedhassle.runs import train
from fedhassle.runs.checkpoints import load_checkpoint

# Divergence


def test_a_run_that_diverges_ends_with_code_1_and_a_clear_message(words, tmp_path):
    folder = tmp_path / "run"
    code, out, err = call("run", *words, "method.lr=1e30", "method.clip=0", "--out", folder)
    assert code == 1 and "Traceback" not in err + out
    assert "NaN or infinite" in err and "method.lr" in err and "client" in err
    assert not (folder / "summary.json").exists() and not (folder / "model.safetensors").exists()


EXPLODES = """
    from dataclasses import dataclass
    from pathlib import Path
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    HEALED = Path(__file__).with_name("healed")

    @dataclass(frozen=True)
    class Explodes(FedAvg):
        "FedAvg that diverges in its third round, until a file is there: settings may not change."

        def phases(self, client, t):
            found = super().phases(client, t)
            return found if HEALED.exists() or t < 3 else tuple(map(self.broken, found))

        def broken(self, phase):
            (descent,) = phase.descents
            nan = lambda *args: descent.loss(*args) * float("nan")
            return Phase(phase.name, phase.streams, (type(descent)("w", nan, descent.sgd),), phase.epochs)
"""


def test_the_last_good_checkpoint_stays_after_divergence(without_residuals, module, tmp_path):
    module("own_explodes", EXPLODES)
    mine, folder = [*without_residuals, "method=own_explodes:Explodes", "evaluate_every=1"], tmp_path / "run"
    code, _, err = call("run", *mine, "--out", folder)
    assert code == 1 and "round 3" in err
    kept = load_checkpoint(folder / "checkpoints", small.CPU)
    assert kept.t == 2 and all(torch.isfinite(array).all() for array in kept.state.values())
    assert [line["round"] for line in metrics_of(folder)] == [1, 2]
    assert call("resume", folder)[0] == 1  # diverges again, from the same round
    (tmp_path / "healed").touch()
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
        return accuracy(*args)

    accuracy = train.accuracy
    monkeypatch.setattr(train, "accuracy", interrupted)
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


def test_an_interrupt_signal_ends_with_code_130(words, tmp_path):
    folder = tmp_path / "run"
    command = interruptible("run", *words, "rounds=100000", "--out", folder)
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: any((folder / "checkpoints").glob("round-*")), running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=LIMIT)
    finally:
        running.kill()
    assert running.returncode == 130 and err == b""
    assert f"fedhassle resume {folder}".encode() in out
    assert load_checkpoint(folder / "checkpoints", small.CPU).t >= 2
