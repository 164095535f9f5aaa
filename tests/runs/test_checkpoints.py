"""Damage to the files of a run: detected, repaired, or refused."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import small
import torch
from small import assert_same_result, call, checkpoints, cut, metrics_of, tensors_of

from fedhassle.engine import tensor_files
from fedhassle.engine.tensor_files import read_arrays, write_arrays
from fedhassle.errors import UserError
from fedhassle.federation.server.evaluator import best_so_far
from fedhassle.runs import train
from fedhassle.runs.checkpoints import Checkpoint, discard_after, load_checkpoint, save_checkpoint
from fedhassle.runs.folder import Folder, claim
from fedhassle.runs.logs import log_to_file
from fedhassle.runs.resume import reopen
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
    assert best_so_far(folder) is None
    about = {"headline": "model", "validation": {"model": 0.75}, "round": 3}
    write_arrays(folder.best, {"w": torch.zeros(3)}, about)
    assert best_so_far(folder) == (3, {"model": 0.75})
    with monkeypatch.context() as patch:
        failing(patch)
        with pytest.raises(UserError, match="cannot be read"):
            best_so_far(folder)
    folder.best.write_bytes(truncated(folder.best.read_bytes()))
    assert best_so_far(folder) is None


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
    lines = {t: {"round": t, "accuracy": {"model": 0.5}, "bytes_up": {}, "seconds": 1.0} for t in (1, 2)}
    for t, line in lines.items():
        save_checkpoint(tmp_path, Checkpoint(t, {"w": vector + t, "m": vector}, [line]))
    newest = sorted(tmp_path.iterdir())[-1]
    content = newest.read_bytes()
    for at in range(len(content)):
        newest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = load_checkpoint(tmp_path, small.CPU)
        assert found is not None
        assert torch.equal(found.state["w"], vector + found.t)
        assert torch.equal(found.state["m"], vector)
        assert found.history == [lines[found.t]]


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


# Changes that leave every file valid


def rewritten(path, old, new):
    """Replaces a text that occurs once in a file; returns the file's content before."""
    before = path.read_text("utf-8")
    assert before.count(old) == 1
    path.write_text(before.replace(old, new), "utf-8")
    return before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr = 0.02", "lr = 0.03", "method.lr=0.03 instead of 0.02"),
        ("seed = 0", "seed = 1", "seed=1 instead of 0"),
        ("rounds = 8", "rounds = 7", "rounds=7 instead of 8"),
        ("lr = 0.02", "", "method.lr="),
    ],
)
def test_a_run_does_not_go_on_under_other_settings(old, new, said, eight_rounds, whole, tmp_path):
    folder = tmp_path / "run"
    cut([*eight_rounds, "method.lr=0.02"], folder, 5)
    before = rewritten(folder / "config.toml", old, new)
    changed = (folder / "config.toml").read_bytes()
    code, _, err = call("resume", folder)
    assert code == 2 and said in err and "checkpoint of round 4" in err
    assert (folder / "config.toml").read_bytes() == changed  # it is left as it was found
    (folder / "config.toml").write_text(before, "utf-8")
    assert call("resume", folder)[0] == 0


def test_without_its_checkpoints_a_run_starts_again_under_other_settings(eight_rounds, whole, tmp_path):
    """As the message says."""
    folder = tmp_path / "run"
    cut([*eight_rounds, "method.lr=0.02"], folder, 5)
    lr = small.summary_of(whole)["settings"]["method"]["lr"]
    rewritten(folder / "config.toml", "lr = 0.02", f"lr = {lr}")
    code, _, err = call("resume", folder)
    assert code == 2 and f"remove {folder / 'checkpoints'} to train all rounds again" in err
    shutil.rmtree(folder / "checkpoints")
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("rounds", [0, 1])
def test_settings_count_before_the_first_round_too(rounds, eight_rounds, whole, tmp_path):
    """A run is evaluated, and has a checkpoint of trained rounds, after round 2 only."""
    folder = tmp_path / "run"
    steps = train_run(reopen(claim(request(None, eight_rounds), folder).path))
    if rounds:
        next(steps)
        steps.close()
    else:  # after its settings are written, before any round
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(train, "train_in_federation", interrupted)
            next(steps)
    before = rewritten(folder / "config.toml", "rounds = 8", "rounds = 7")
    code, _, err = call("resume", folder)
    assert code == 2 and "have changed since the run began: rounds=7 instead of 8" in err
    (folder / "config.toml").write_text(before, "utf-8")
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 2/8" in out
    assert_same_result(folder, whole)


def test_a_run_goes_on_with_other_threads(eight_rounds, whole, tmp_path):
    """How it is computed may change."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    rewritten(folder / "config.toml", "threads = 1", "threads = 2")
    assert call("resume", folder)[0] == 0
    mine, other = (tensors_of(home / "model.safetensors") for home in (folder, whole))
    assert small.same(mine, other)


def test_a_run_does_not_go_on_with_other_images(eight_rounds, images, tmp_path):
    mine, folder = tmp_path / "mine.npz", tmp_path / "run"
    shutil.copy(images, mine)
    cut([f"data={mine}", *eight_rounds[1:]], folder, 5)
    small.save_images(mine, small.dataset(train=240, seed=1))
    code, _, err = call("resume", folder)
    assert code == 2 and "the images have changed" in err and "data.name=" in err


def test_settings_cut_after_any_line_are_refused(eight_rounds, tmp_path):
    """What is left is often valid; its defaults would make another run."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    config = folder / "config.toml"
    lines = config.read_text("utf-8").splitlines(keepends=True)
    for n in range(lines.index("residual_steps = 2\n") + 1):  # the lines after it are defaults
        config.write_text("".join(lines[:n]), "utf-8")
        code, _, err = call("resume", folder)
        assert code == 2 and err.startswith("fedhassle: ") and len(err.splitlines()) == 1, (n, err)


def test_a_checkpoint_of_an_older_version_is_read(eight_rounds, whole, tmp_path):
    """It names neither settings nor states of clients."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 5)
    for path in checkpoints(folder):
        arrays, about = read_arrays(path)
        assert about.pop("settings") and about.pop("kept") == {}
        write_arrays(path, arrays, about)
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 6/8" in out and "round 4/8" not in out
    assert_same_result(folder, whole)


def test_a_run_whose_client_lost_its_state_does_not_go_on(without_residuals, tmp_path):
    """The unlabelled clients of RSCFed keep a teacher. The advice of the message repeats its round."""
    words, folder, whole = (
        [*without_residuals, "rounds=8", "method=rscfed"],
        tmp_path / "run",
        tmp_path / "whole",
    )
    assert call("run", *words, "--out", whole)[0] == 0
    cut(words, folder, 6)
    kept = small.kept_by(folder)
    client, t = max(kept, key=lambda one: one[1])
    (lost,) = [
        path
        for path in (folder / "memory").rglob("round-*")
        if read_arrays(path)[1] == {"client": client, "round": t}
    ]
    lost.unlink()
    code, _, err = call("resume", folder)
    assert code == 2 and f"{lost}, the state of {client!r} after round {t}, is missing" in err
    assert f"remove the checkpoints of round {t} and later" in err
    for path in checkpoints(folder):
        if int(path.stem[-6:]) >= t:
            path.unlink()
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


def test_a_killed_process_leaves_no_old_checkpoints(eight_rounds, whole, tmp_path):
    """It was killed after it had written its last checkpoint, before it removed the oldest."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 6)
    oldest = checkpoints(folder)[0]
    content = oldest.read_bytes()
    cut_again = train_run(reopen(folder))
    for _ in range(2):
        next(cut_again)
    cut_again.close()
    oldest.write_bytes(content)
    assert len(checkpoints(folder)) == 3
    assert call("resume", folder)[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_log_is_no_error(capsys):
    with log_to_file(Path("/dev/full"), alone=True):
        logging.getLogger("fedhassle").warning("words")
    assert "Traceback" not in capsys.readouterr().err
