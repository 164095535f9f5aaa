"""A run that is killed at any moment goes on where it was and ends in the same bits."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from safetensors import safe_open

import fedhassle
from fedhassle.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from fedhassle.cli import app, guarded
from fedhassle.launch import carry_out, claim, reopen
from fedhassle.requested import request

ROOT = Path(fedhassle.__file__).parents[1]
LIMIT = 120  # seconds after which a process counts as hung
CPU = torch.device("cpu")


def call(*words):
    """Exit code and output of a command, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = guarded(lambda: app([str(word) for word in words]))
        except SystemExit as exit_:
            code = exit_.code or 0
    return code, out.getvalue()


def words_for(images, *more):
    """Settings of a run of eight rounds that takes half a second."""
    return [
        f"data={images}",
        *("rounds=8", "clients_per_round=4", "threads=1", "device=cpu", "split.clients=6"),
        "split.labels={full=1,partial=2,unlabelled=3,share=0.3}",
        *("method.epochs=1", "method.batch=16"),
        *more,
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A file of 240 small images of four classes."""
    made, path = small.dataset(train=240), tmp_path_factory.mktemp("images") / "small.npz"
    np.savez(path, x_train=made.x_train, y_train=made.y_train, x_test=made.x_test, y_test=made.y_test)
    return path


@pytest.fixture(scope="module")
def words(images):
    return words_for(images, "method.residual_steps=2")


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """The folder of the same run, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert call("run", *words, "--out", folder)[0] == 0
    return folder


def metrics_of(folder):
    """The lines of metrics, but for the time they took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def tensors_of(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator


def assert_same_result(folder, whole):
    """Equal metrics, accuracies and model, bit for bit; nothing half-written is left."""
    assert metrics_of(folder) == metrics_of(whole)
    mine, other = (json.loads((f / "summary.json").read_text("utf-8")) for f in (folder, whole))
    for key in ("accuracy", "rounds", "settings", "settings_hash", "split_hash", "seed"):
        assert mine[key] == other[key]
    assert small.same(tensors_of(folder / "model.safetensors"), tensors_of(whole / "model.safetensors"))
    assert {path.name for path in folder.rglob("*")} == {path.name for path in whole.rglob("*")}


def cut(words, folder, rounds):
    """A run that is left after some rounds, as if the process had ended there."""
    steps = carry_out(reopen(claim(request(None, words), folder).path))
    for _ in range(rounds):
        next(steps)
    steps.close()


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


# Killed

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


def command(words):
    """The command line in a process that is forked from one which has PyTorch loaded already."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        sys.exit(guarded(lambda: app(words)))


@pytest.fixture(scope="module")
def forked():
    """Starts commands in processes of their own, within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedhassle.cli", "fedhassle.launch", "fedhassle.view"])
    started = []

    def start(*words):
        process = context.Process(target=command, args=([str(word) for word in words],), daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join(LIMIT)


def kill_when(process, folder, condition, delay):
    """SIGKILL once something is so, and a little later; the end of the process is no failure."""
    deadline = time.monotonic() + LIMIT
    while process.is_alive() and not condition(folder):
        assert time.monotonic() < deadline, "the process hangs"
    time.sleep(delay)
    process.kill()
    process.join(LIMIT)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode


def resume_to_the_end(words, folder):
    """Goes on; a run that was killed before it could write what was asked is simply started again."""
    recorded = (folder / "request.json").exists() or (folder / "config.toml").exists()
    code, out = call("resume", folder) if recorded else call("run", *words, "--out", folder)
    assert code == 0, out


@pytest.mark.parametrize("moment", WATCHED)
def test_a_run_killed_at_a_moment_that_matters_ends_in_the_same_bits(moment, words, whole, forked, tmp_path):
    folder = tmp_path / "run"
    kill_when(forked("run", *words, "--out", folder), folder, WATCHED[moment], 0)
    resume_to_the_end(words, folder)
    assert_same_result(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_again_and_again_at_random_ends_in_the_same_bits(seed, words, whole, forked, tmp_path):
    """Up to six kills, each at most some rounds after the process begins to work."""
    rng, folder, kills = random.Random(seed), tmp_path / "run", 0
    asked = ("run", *words, "--out", folder)
    for _ in range(6):
        seen = rng.choice(list(WATCHED.values()))
        code = kill_when(forked(*asked), folder, seen, rng.uniform(0, 0.15))
        kills += code != 0
        if (folder / "request.json").exists() or (folder / "config.toml").exists():
            asked = ("resume", folder)
    resume_to_the_end(words, folder)
    assert kills and (folder / "summary.json").exists()
    assert_same_result(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.15])
def test_a_process_killed_in_its_first_second_is_taken_up_by_another(delay, words, whole, tmp_path):
    """Real processes, from the shell's command to the table at the end."""
    folder, program = tmp_path / "run", [sys.executable, "-m", "fedhassle"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = subprocess.Popen(
        [*program, "run", *words, "--out", str(folder)], env=env, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + LIMIT
        while not (folder / "request.json").exists() and running.poll() is None:
            assert time.monotonic() < deadline
        time.sleep(delay)
    finally:
        running.kill()
        running.wait(LIMIT)
    assert running.returncode == -signal.SIGKILL
    done = subprocess.run(
        [*program, "resume", str(folder)], env=env, capture_output=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert_same_result(folder, whole)


def test_a_folder_from_before_the_request_was_written_can_be_used(words, tmp_path):
    """Killed between making the folder and its first file: nothing is lost, so nothing is in the way."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".writing-abc.json").write_text('[{"rou')
    code, out = call("resume", folder)
    assert code == 2 and "fedhassle run" in out
    assert call("run", *words, "rounds=1", "--out", folder)[0] == 0


# Cut at a certain place


@pytest.mark.parametrize("rounds", range(9))
def test_a_run_cut_after_any_round_ends_in_the_same_bits(rounds, words, whole, tmp_path):
    cut(words, tmp_path / "run", rounds)
    code, out = call("resume", tmp_path / "run")
    assert code == 0
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("round ")]
    assert shown == [f"{t}/8" for t in (2, 4, 6, 8) if t > rounds // 2 * 2]  # what is done is not done again
    assert_same_result(tmp_path / "run", whole)


def test_a_run_cut_before_its_settings_were_resolved_goes_on(words, whole, tmp_path):
    folder = claim(request(None, words), tmp_path / "run")
    assert [path.name for path in folder.path.iterdir()] == ["request.json"]
    assert call("resume", folder.path)[0] == 0
    assert_same_result(folder.path, whole)


def test_python_takes_up_a_run_by_its_folder_alone(words, whole, tmp_path):
    cut(words, tmp_path / "run", 3)
    result = fedhassle.run(out=tmp_path / "run", quiet=True)
    assert result.folder == tmp_path / "run"
    assert_same_result(tmp_path / "run", whole)


def test_python_takes_up_a_run_that_was_cut_before_its_settings_were_resolved(words, whole, tmp_path):
    folder = claim(request(None, words), tmp_path / "run").path
    fedhassle.run(out=folder, quiet=True)
    assert_same_result(folder, whole)


@pytest.mark.parametrize(
    "resolved",
    [True, pytest.param(False)],
    ids=["resolved", "as asked"],
)
def test_a_run_goes_on_from_another_working_folder(resolved, words, whole, images, tmp_path, monkeypatch):
    """Its images were given by a path relative to the first one."""
    folder, relative = tmp_path / "run", [f"data={images.name}", *words[1:]]
    monkeypatch.chdir(images.parent)
    if resolved:
        cut(relative, folder, 3)
    else:
        claim(request(None, relative), folder)
    monkeypatch.chdir(tmp_path)
    code, out = call("resume", folder)
    assert code == 0, out
    assert_same_result(folder, whole)


def test_a_run_keeps_its_split_though_the_file_it_came_from_is_gone(words, tmp_path):
    save, folder = tmp_path / "given.npz", tmp_path / "run"
    call("split", *words, "--save", save, "--picture", tmp_path / "x.png")
    given = [word for word in words if not word.startswith("split.")]
    cut([*given, f"split.file={save}"], folder, 3)
    save.unlink()
    assert call("resume", folder)[0] == 0


def test_a_finished_run_says_so_and_changes_nothing(whole):
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in whole.rglob("*") if path.is_file()
    }
    code, out = call("resume", whole)
    assert code == 0 and "is finished" in out and "EM  mean of SM and UM" in out
    after = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in whole.rglob("*") if path.is_file()
    }
    assert after == before


def test_a_run_cut_between_its_last_round_and_its_summary_is_finished(words, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in ("summary.json", "model.safetensors", "curves.png"):
        (folder / name).unlink()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)
    tensors = [tensors_of(f / "checkpoints" / "round-000008.safetensors") for f in (folder, whole)]
    assert small.same(*tensors)


# Damage


def truncated(content):
    return content[: len(content) * 2 // 3]


def flipped(content):
    """One bit of a tensor."""
    at = len(content) - len(content) // 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "truncated": truncated,
    "flipped": flipped,
    "header": lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "foreign": lambda content: b"not a checkpoint at all",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, words, whole, tmp_path):
    folder = tmp_path / "run"
    cut(words, folder, 6)
    older, newest = checkpoints(folder)
    newest.write_bytes(DAMAGE[damage](newest.read_bytes()))
    code, out = call("resume", folder)
    assert (
        code == 0 and newest.name in out.replace("\n", "") and "checkpoint before it" in " ".join(out.split())
    )
    assert older.name not in out.replace("\n", "")
    assert "round 6/8" in out and "round 4/8" not in out
    assert newest.name in (folder / "log.txt").read_text("utf-8")
    assert_same_result(folder, whole)


def test_without_a_whole_checkpoint_a_run_starts_again(words, whole, tmp_path):
    folder = tmp_path / "run"
    cut(words, folder, 6)
    for path in checkpoints(folder):
        path.write_bytes(truncated(path.read_bytes()))
    code, out = call("resume", folder)
    assert code == 0 and "round 2/8" in out
    assert_same_result(folder, whole)


def test_damaged_checkpoints_do_not_push_out_new_ones(words, tmp_path):
    """A run that starts again has a whole checkpoint after its first evaluation."""
    folder = tmp_path / "run"
    cut(words, folder, 8)
    for path in checkpoints(folder):
        path.write_bytes(truncated(path.read_bytes()))
    steps = carry_out(reopen(folder))
    assert [next(steps).t for _ in range(2)] == [1, 2]
    steps.close()
    found = load_checkpoint(folder / "checkpoints", CPU)
    assert found is not None and found.t == 2


def test_every_damaged_byte_of_a_checkpoint_is_noticed(tmp_path):
    """Each byte of the header and of the tensors in turn: never another error, never other content."""
    vector = torch.arange(3, dtype=torch.float32)
    for t in (1, 2):
        save_checkpoint(
            tmp_path, Checkpoint(t, {"w": vector + t}, {"client 1": {"m": vector}}, [{"round": t}])
        )
    newest = sorted(tmp_path.iterdir())[-1]
    content = newest.read_bytes()
    for at in range(len(content)):
        newest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = load_checkpoint(tmp_path, CPU)
        assert found is not None
        assert torch.equal(found.state["w"], vector + found.t)
        assert torch.equal(found.memory["client 1"]["m"], vector)
        assert found.history == [{"round": found.t}]


def test_only_the_last_two_checkpoints_are_kept(whole):
    assert [path.name for path in checkpoints(whole)] == [
        "round-000006.safetensors",
        "round-000008.safetensors",
    ]


def test_leftovers_of_half_written_files_are_removed(words, whole, tmp_path):
    folder = tmp_path / "run"
    cut(words, folder, 5)
    for path in (folder / ".writing-abc.json", folder / "checkpoints" / ".writing-xyz.safetensors"):
        path.write_bytes(b"half")
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("tear", [-1, -20, -500])
def test_metrics_with_a_torn_last_line_are_repaired(tear, words, whole, tmp_path):
    folder = tmp_path / "run"
    cut(words, folder, 5)
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:tear])
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


def test_metrics_ahead_of_the_checkpoint_are_taken_back(words, whole, tmp_path):
    """The line of a round is written before its checkpoint: a kill between leaves one line too many."""
    folder = tmp_path / "run"
    cut(words, folder, 6)
    checkpoints(folder)[-1].unlink()
    assert len(metrics_of(folder)) == 3
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "split.npz"])
def test_a_file_that_is_lost_is_made_anew(name, words, whole, tmp_path):
    folder = tmp_path / "run"
    cut(words, folder, 5)
    (folder / name).unlink()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("name", ["config.toml", "split.npz", pytest.param("request.json")])
def test_a_damaged_file_of_settings_or_split_is_a_user_error(name, words, tmp_path):
    folder = tmp_path / "run"
    if name == "request.json":
        claim(request(None, words), folder)
    else:
        cut(words, folder, 3)
    (folder / name).write_bytes(truncated((folder / name).read_bytes())[:-1])
    code, out = call("resume", folder)
    assert code == 2 and name in out


# Clients that keep something

KEEPS = """
    from dataclasses import dataclass
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Keeps(FedAvg):
        "FedAvg whose clients are pulled towards the mean of what they ended with in earlier rounds."

        def memory(self, client, message):
            return {"NAME": message["w"].clone()}

        def networks(self):
            return {**super().networks(), "NAME": self.net}

        def phases(self, client, t):
            return tuple(self.keeping(phase) for phase in super().phases(client, t))

        def keeping(self, phase):
            (descent,) = phase.descents
            pulled = type(descent)("w", self.pull, descent.sgd)
            return Phase(phase.name, phase.streams, (pulled,), phase.epochs, then=self.keep)

        def pull(self, local, received, batch):
            gap = local["w"].weights - local["NAME"].weights
            return super().loss(local, received, batch) + 0.1 * gap.square().sum()

        def keep(self, local, received):
            return {"NAME": local["NAME"].lerp(local["w"], 0.3)}
"""


@pytest.mark.parametrize("name", ["kept", pytest.param("kept/model")])
def test_what_clients_keep_is_kept_over_a_cut(name, images, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = "own_" + name.replace("/", "_")
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(KEEPS).replace("NAME", name))
    mine, folder, whole = words_for(images, f"method={module}:Keeps"), tmp_path / "run", tmp_path / "whole"
    assert call("run", *mine, "--out", whole)[0] == 0
    assert call("run", *mine, "method=fedavg", "--out", tmp_path / "other")[0] == 0
    assert metrics_of(whole) != metrics_of(tmp_path / "other")  # what they keep does matter
    cut(mine, folder, 5)
    kept = load_checkpoint(folder / "checkpoints", CPU).memory
    assert set(kept) <= {"client 1", "client 2", "client 3"} and len(kept) > 1
    assert all(set(arrays) == {name} for arrays in kept.values())
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)
    sys.modules.pop(module)
