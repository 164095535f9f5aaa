"""A run that is killed at any moment resumes and ends in the same bits."""

import random
import signal
import subprocess
import sys
import time

import pytest
import small
from small import (
    LIMIT,
    assert_same_result,
    call,
    checkpoints,
    kill_when,
)

WATCHED = {
    "folder": lambda folder: folder.exists(),
    "request": lambda folder: (folder / "request.json").exists(),
    "split": lambda folder: (folder / "split.npz").exists(),
    "config": lambda folder: (folder / "config.toml").exists(),
    "metrics": lambda folder: (folder / "metrics.jsonl").exists(),
    "checkpoint": lambda folder: bool(checkpoints(folder)),
    "half a checkpoint": lambda folder: any((folder / "checkpoints").glob(".writing-*")),
    "two checkpoints": lambda folder: len(checkpoints(folder)) == 2,
    "model": lambda folder: (folder / "model.safetensors").exists(),
    "curves": lambda folder: (folder / "curves.png").exists(),
}


def resume_to_the_end(words, folder):
    """Resumes a run; starts it again if it was killed before it wrote its request."""
    recorded = (folder / "request.json").exists() or (folder / "config.toml").exists()
    code, _, err = call("resume", folder) if recorded else call("run", *words, "--out", folder)
    assert code == 0, err


@pytest.mark.parametrize("moment", WATCHED)
def test_a_run_killed_at_a_critical_moment_ends_in_the_same_bits(
    moment, eight_rounds, whole, forked, tmp_path
):
    folder = tmp_path / "run"
    kill_when(forked("run", *eight_rounds, "--out", folder), folder, WATCHED[moment], 0)
    resume_to_the_end(eight_rounds, folder)
    assert_same_result(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_again_and_again_at_random_ends_in_the_same_bits(
    seed, eight_rounds, whole, forked, tmp_path
):
    """Up to six kills, each within a few rounds of the start of the process."""
    rng, folder = random.Random(seed), tmp_path / "run"
    asked = ("run", *eight_rounds, "--out", folder)
    for _ in range(6):
        seen = rng.choice(list(WATCHED.values()))
        kill_when(forked(*asked), folder, seen, rng.uniform(0, 0.15))
        if (folder / "request.json").exists() or (folder / "config.toml").exists():
            asked = ("resume", folder)
    resume_to_the_end(eight_rounds, folder)
    assert (folder / "summary.json").exists()
    assert_same_result(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.15])
def test_a_process_killed_in_its_first_second_can_be_resumed(delay, eight_rounds, whole, tmp_path):
    """Real processes, from the shell command to the table at the end."""
    folder = tmp_path / "run"
    shell = [sys.executable, "-m", "fedhassle", "run", *eight_rounds, "--out", str(folder)]
    running = subprocess.Popen(shell, env=small.environment(), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT
        while not (folder / "request.json").exists() and running.poll() is None:
            assert time.monotonic() < deadline
        time.sleep(delay)
    finally:
        running.kill()
        running.wait(LIMIT)
    assert running.returncode == -signal.SIGKILL
    done = small.process("resume", folder)
    assert (done.returncode, done.stderr) == (0, b"")
    assert_same_result(folder, whole)


IN_MEMORY = {
    "a client's file": lambda folder: any((folder / "memory").rglob("round-*")),
    "half a client's file": lambda folder: any((folder / "memory").rglob(".writing-*")),
    "a round without a checkpoint": lambda folder: any((folder / "memory").rglob("round-000003.*")),
    "a file of the fifth round": lambda folder: any((folder / "memory").rglob("round-000005.*")),
}


@pytest.mark.parametrize("moment", IN_MEMORY)
def test_a_run_killed_while_its_clients_save_their_state_ends_in_the_same_bits(
    moment, without_residuals, module, forked, tmp_path
):
    own = module("own_keeps", small.KEEPS.replace("NAME", "kept"))
    mine = [*without_residuals, "rounds=8", f"method={own}:Keeps"]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert call("run", *mine, "--out", whole)[0] == 0
    kill_when(forked("run", *mine, "--out", folder), folder, IN_MEMORY[moment], 0)
    resume_to_the_end(mine, folder)
    assert_same_result(folder, whole)


def test_a_folder_without_a_request_can_be_used(eight_rounds, tmp_path):
    """The run was killed between making the folder and writing its first file."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".writing-abc.json").write_text('[{"rou')
    code, _, err = call("resume", folder)
    assert code == 2 and "fedhassle run" in err
    assert call("run", *eight_rounds, "rounds=1", "--out", folder)[0] == 0
