"""Damage to the files of a run: detected, repaired, or refused."""

import errno
import os

import pytest
import small
import torch
from small import assert_same_result, call, checkpoints, cut, metrics_of

from fedhassle.engine import tensor_files
from fedhassle.engine.tensor_files import write_arrays
from fedhassle.errors import UserError
from fedhassle.federation.server.coordinate import best_so_far
from fedhassle.runs.checkpoints import Checkpoint, discard_after, load_checkpoint, save_checkpoint
from fedhassle.runs.folder import Folder, claim
from fedhassle.runs.run import reopen
from fedhassle.runs.train import train_run
from fedhassle.settings.request import request


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
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 6)
    older, newest = checkpoints(folder)
    newest.write_bytes(DAMAGE[damage](newest.read_bytes()))
    code, out, _ = call("resume", folder)
    assert (
        code == 0 and newest.name in out.replace("\n", "") and "checkpoint before it" in " ".join(out.split())
    )
    assert older.name not in out.replace("\n", "")
    assert "round 6/8" in out and "round 4/8" not in out
    assert newest.name in (folder / "log.txt").read_text("utf-8")
    assert_same_result(folder, whole)


def test_without_a_whole_checkpoint_a_run_starts_again(eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 6)
    for path in checkpoints(folder):
        path.write_bytes(truncated(path.read_bytes()))
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 2/8" in out
    assert_same_result(folder, whole)


def failing(monkeypatch, names=""):
    """Reading files of such names fails, as on a disk that is offline for a moment."""
    real = tensor_files.safe_open

    def fails(path, **options):
        if names in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **options)

    monkeypatch.setattr(tensor_files, "safe_open", fails)


@pytest.mark.parametrize("which", ["", "round-000006"])
def test_checkpoints_that_cannot_be_read_for_a_moment_are_kept(which, eight_rounds, whole, tmp_path):
    """The run does not fall back to an older one: it stops, and can resume from the newest later."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 6)
    files = [*checkpoints(folder), folder / "metrics.jsonl"]
    before = [path.read_bytes() for path in files]
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, which)
        code, _, err = call("resume", folder)
    assert code == 2 and "round-000006.safetensors cannot be read: " in err.replace("\n", "")
    assert [path.read_bytes() for path in files] == before
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 8/8" in out and "round 6/8" not in out
    assert_same_result(folder, whole)


@pytest.mark.parametrize("damage", ["truncated", "unreadable"])
def test_a_run_only_finishes_with_its_last_checkpoint(damage, eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    steps = train_run(reopen(claim(request(None, eight_rounds), folder).path))
    for _ in range(8):
        next(steps)
    newest = checkpoints(folder)[-1]
    with pytest.MonkeyPatch.context() as patch:
        if damage == "truncated":
            newest.write_bytes(truncated(newest.read_bytes()))
        else:
            failing(patch, newest.name)
        with pytest.raises(UserError, match="resume" if damage == "truncated" else "cannot be read"):
            next(steps)
    assert not (folder / "summary.json").exists() and not (folder / "model.safetensors").exists()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


def test_an_unreadable_best_model_is_an_error_when_a_run_resumes(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    assert best_so_far(folder) == -1.0
    write_arrays(folder.best, {"w": torch.zeros(3)}, {"headline": "model", "validation": {"model": 0.75}})
    assert best_so_far(folder) == 0.75
    with monkeypatch.context() as patch:
        failing(patch)
        with pytest.raises(UserError, match="cannot be read"):
            best_so_far(folder)
    folder.best.write_bytes(truncated(folder.best.read_bytes()))
    assert best_so_far(folder) == -1.0


def test_damaged_checkpoints_do_not_push_out_new_ones(eight_rounds, tmp_path):
    """A run that starts again has a whole checkpoint after its first evaluation."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 8)
    for path in checkpoints(folder):
        path.write_bytes(truncated(path.read_bytes()))
    steps = train_run(reopen(folder))
    assert [next(steps).t for _ in range(2)] == [1, 2]
    steps.close()
    found = load_checkpoint(folder / "checkpoints", small.CPU)
    assert found is not None and found.t == 2


def test_every_damaged_byte_of_a_checkpoint_is_noticed(tmp_path):
    """Each byte of the header and of the tensors in turn: never another error, never other content."""
    vector = torch.arange(3, dtype=torch.float32)
    for t in (1, 2):
        save_checkpoint(tmp_path, Checkpoint(t, {"w": vector + t, "m": vector}, [{"round": t}]))
    newest = sorted(tmp_path.iterdir())[-1]
    content = newest.read_bytes()
    for at in range(len(content)):
        newest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = load_checkpoint(tmp_path, small.CPU)
        assert found is not None
        assert torch.equal(found.state["w"], vector + found.t)
        assert torch.equal(found.state["m"], vector)
        assert found.history == [{"round": found.t}]


@pytest.mark.parametrize(("t", "left"), [(0, []), (3, [2]), (4, [2, 4]), (10, [2, 4, 10]), (99, [2, 4, 10])])
def test_checkpoints_after_a_round_are_discarded(t, left, tmp_path):
    """Other files are kept."""
    for name in (*(f"round-{n:06d}.safetensors" for n in (2, 4, 10)), "round-notes.txt", "zebra.safetensors"):
        (tmp_path / name).touch()
    discard_after(tmp_path, t)
    kept = {f"round-{n:06d}.safetensors" for n in left}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"round-notes.txt", "zebra.safetensors"}


def test_a_missing_folder_has_no_checkpoints_to_discard(tmp_path):
    discard_after(tmp_path / "missing", 0)
    assert not any(tmp_path.iterdir())


def test_only_the_last_two_checkpoints_are_kept(whole):
    assert [path.name for path in checkpoints(whole)] == [
        "round-000006.safetensors",
        "round-000008.safetensors",
    ]


def test_leftovers_of_half_written_files_are_removed(eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    for path in (folder / ".writing-abc.json", folder / "checkpoints" / ".writing-xyz.safetensors"):
        path.write_bytes(b"half")
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("tear", [-1, -20, -500])
def test_metrics_with_a_torn_last_line_are_repaired(tear, eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:tear])
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


def test_metrics_ahead_of_the_checkpoint_are_taken_back(eight_rounds, whole, tmp_path):
    """The line of a round is written before its checkpoint: a kill between leaves one line too many."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 6)
    checkpoints(folder)[-1].unlink()
    assert len(metrics_of(folder)) == 3
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "split.npz"])
def test_a_file_that_is_lost_is_made_anew(name, eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    (folder / name).unlink()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("damage", [lambda whole: truncated(whole)[:-1], lambda whole: b"\xff" + whole])
@pytest.mark.parametrize("name", ["config.toml", "split.npz", "request.json"])
def test_a_damaged_file_of_settings_or_split_is_a_user_error(name, damage, eight_rounds, tmp_path):
    folder = tmp_path / "run"
    if name == "request.json":
        claim(request(None, eight_rounds), folder)
    else:
        cut(eight_rounds, folder, 3)
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    code, _, err = call("resume", folder)
    assert code == 2 and name in err
