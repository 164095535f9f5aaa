"""Atomic writes, locks, and files that are still growing."""

import contextlib
import errno
import inspect
import json
import os
import re
import runpy
import select
import subprocess
import sys
import threading

import pytest
from small import LIMIT, call, checkpoints, cut, environment

from fedhassle.errors import BusyError, UserError
from fedhassle.files import (
    atomic,
    json_lines,
    locked,
    paths_below,
    paths_in,
    remove_stale_lock,
    remove_unfinished,
    write_json,
    write_text,
)

if sys.platform != "win32":
    import fcntl

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX links, pipes and signals")

# Whole or not at all


def test_a_file_takes_its_place_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "deep" / "words.txt"
    with atomic(path) as temporary:
        assert temporary.parent == path.parent and temporary.suffix == ".txt"
        temporary.write_text("αβγ", encoding="utf-8")
        assert not path.exists()
    assert path.read_text("utf-8") == "αβγ"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Without fsync, a power failure after the rename may leave an empty file under the final name."""
    path, synced, fsync = tmp_path / "words.txt", [], os.fsync

    def watched(descriptor):
        fsync(descriptor)
        state = os.fstat(descriptor)
        synced.append((state.st_ino, state.st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    write_text(path, "words")
    assert synced == [(path.stat().st_ino, len("words"), False)]


@pytest.mark.parametrize("there", [False, True], ids=["new", "there before"])
@pytest.mark.parametrize("failure", [RuntimeError("half-way"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_failure_leaves_neither_temporary_nor_target(failure, there, tmp_path):
    path = tmp_path / "words.txt"
    if there:
        path.write_text("old")
    with pytest.raises(type(failure)), atomic(path) as temporary:
        temporary.write_text("half")
        raise failure
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == (
        {"words.txt": "old"} if there else {}
    )


def test_a_full_disk_is_a_user_error_that_names_the_path(tmp_path):
    path = tmp_path / "words.txt"
    with pytest.raises(UserError) as caught, atomic(path) as temporary:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")
    assert str(caught.value) == f"{path} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_names_another_file_is_not_a_write_error(tmp_path):
    """For example, images are read while predictions are written."""
    images = tmp_path / "images.png"
    with pytest.raises(FileNotFoundError) as caught, atomic(tmp_path / "words.txt"):
        images.read_bytes()
    assert caught.value.filename == str(images)
    with (
        pytest.raises(UserError, match=r"words\.txt cannot be written"),
        atomic(tmp_path / "words.txt") as made,
    ):
        made.unlink()
        made.read_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/under.txt", "exists|[Nn]ot a directory"),
        ("file/under/deep.txt", "[Nn]ot a directory"),
        ("folder", "directory"),
        ("a" * 300, "too long"),
    ],
    ids=["under a file", "deep under a file", "a folder", "long name"],
)
def test_a_place_that_cannot_be_written_is_a_user_error_that_names_it(name, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(tmp_path / name))} cannot be written: .*({reason})"
    ):
        write_text(tmp_path / name, "words")
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


@UNIX
def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    for name, start in (("old", "old"), ("new", None)):
        target, link = tmp_path / "there" / f"{name}.txt", tmp_path / f"{name}.lnk"
        if start:
            target.write_text(start)
        link.symlink_to(target)
        write_text(link, "words")
        assert link.is_symlink() and target.read_text() == "words" and not target.is_symlink()
    assert {path.name for path in tmp_path.rglob("*")} == {
        "there",
        "old.txt",
        "new.txt",
        "old.lnk",
        "new.lnk",
    }


@UNIX
@pytest.mark.parametrize("link", [False, True], ids=["itself", "by a link"])
@pytest.mark.parametrize("kind", ["pipe", "device", "circle"])
def test_only_regular_files_are_replaced(kind, link, tmp_path):
    path = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull if kind == "device" else path)
    if link:
        path, target = tmp_path / "link", path
        path.symlink_to(target)
    before = {file.name: file.lstat().st_ino for file in tmp_path.iterdir()}
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(path))} cannot be written: it is not a regular file"
    ):
        write_text(path, "words")
    assert {file.name: file.lstat().st_ino for file in tmp_path.iterdir()} == before


@UNIX
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(umask, mode, tmp_path):
    code = "import pathlib, sys; from fedhassle.files import write_text"
    code += "; write_text(pathlib.Path(sys.argv[1]), 'words'); pathlib.Path(sys.argv[2]).touch()"
    made = [tmp_path / "ours", tmp_path / "any"]
    subprocess.run(
        [sys.executable, "-c", code, *made], env=environment(), umask=umask, check=True, timeout=LIMIT
    )
    assert [path.stat().st_mode & 0o777 for path in made] == [mode, mode]


@UNIX
def test_permissions_follow_the_umask_of_the_moment(tmp_path):
    """The umask at the time of writing counts, not that at import, and not the old file's permissions."""
    path, before = tmp_path / "words.txt", os.umask(0)
    try:
        for umask, mode in ((0o077, 0o600), (0o002, 0o664)):
            os.umask(umask)
            write_text(path, "words")
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


@UNIX
def test_importing_leaves_the_umask_alone_for_other_threads(monkeypatch):
    """Setting it even briefly would expose files that other threads create meanwhile."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is set"))
    runpy.run_path(inspect.getfile(write_text))


def test_json_has_no_nan_and_a_refused_value_leaves_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"α": [1, None]})
    assert json.loads(path.read_text("utf-8")) == {"α": [1, None]} and "α" in path.read_text("utf-8")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"α": float("nan")})
    assert json.loads(path.read_text("utf-8")) == {"α": [1, None]}


def test_temporary_files_are_removed_by_age(tmp_path):
    """Where several processes write, a new one may have a writer."""
    old, new = tmp_path / ".writing-old", tmp_path / ".writing-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    remove_unfinished(tmp_path, 3600)
    assert list(tmp_path.iterdir()) == [new]
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_temporary_files_are_removed(tmp_path):
    for name in (".writing-abc.json", ".writing-xyz", "writing-mine", ".hidden", "config.toml"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"writing-mine", ".hidden", "config.toml"}
    remove_unfinished(tmp_path / "nothere")


# One process at a time

HOLD = """
import sys
from pathlib import Path
from fedhassle.files import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(folder):
    """Another process that holds the lock of a folder until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    other = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert select.select([other.stdout], [], [], LIMIT)[0], "the process hangs"
        assert other.stdout.readline() == b"held\n"
        yield other
    finally:
        other.kill()
        other.wait(LIMIT)
        other.stdin.close()
        other.stdout.close()


@UNIX
@pytest.mark.parametrize("end", ["by itself", "SIGKILL"])
def test_a_second_process_is_kept_out_until_the_first_ends(end, tmp_path):
    with held(tmp_path) as other:
        with (
            pytest.raises(UserError, match=rf"^another process is at work in {re.escape(str(tmp_path))}: "),
            locked(tmp_path),
        ):
            pytest.fail("two are in the folder")
        if end == "SIGKILL":
            other.kill()
        else:
            other.stdin.close()
        assert other.wait(LIMIT) == (-9 if end == "SIGKILL" else 0)
        with locked(tmp_path):
            assert other.poll() is not None
    assert list(tmp_path.iterdir()) == []  # no lock file is left


def test_an_error_frees_the_lock(tmp_path):
    with pytest.raises(RuntimeError, match="half-way"), locked(tmp_path):
        raise RuntimeError("half-way")
    assert not (tmp_path / ".lock").exists()
    with locked(tmp_path):
        assert (tmp_path / ".lock").exists()


@UNIX
@pytest.mark.parametrize("recreated", [False, True])
def test_a_lock_file_that_its_holder_removed_locks_nobody_in(recreated, tmp_path, monkeypatch):
    """It was removed and released just after this process opened it: the next one locks a new file."""
    path, flock = tmp_path / "run.lock", fcntl.flock

    def too_late(descriptor, how):
        path.unlink()
        if recreated:
            path.touch()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(BusyError), locked(path):
        pytest.fail("the lock is held, and no other process can know")


def test_a_lock_is_freed_by_whichever_thread_closes_it(tmp_path):
    """Runs are generators, which another thread may close."""
    lock = locked(tmp_path)
    lock.__enter__()
    thread = threading.Thread(target=lock.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with locked(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_process_cannot_lock_a_folder_twice(tmp_path):
    with locked(tmp_path), pytest.raises(BusyError), locked(tmp_path):
        pytest.fail("the folder is locked twice")


def test_locks_of_different_folders_are_independent(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with locked(tmp_path / "one"), locked(tmp_path / "two"):
        assert {path.parent.name for path in tmp_path.glob("*/.lock")} == {"one", "two"}


@UNIX
def test_a_run_of_another_process_cannot_be_resumed(eight_rounds, tmp_path):
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 3)
    files = [folder / "metrics.jsonl", *checkpoints(folder)]
    before = [path.read_bytes() for path in files]
    with held(folder):
        code, _, err = call("resume", folder)
    assert code == 2 and f"another process is at work in {folder}" in err
    assert [path.read_bytes() for path in files] == before
    assert call("resume", folder)[0] == 0


@UNIX
def test_a_lock_file_is_removed_unless_a_process_holds_it(tmp_path):
    (tmp_path / ".lock").touch()
    remove_stale_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with held(tmp_path):
        remove_stale_lock(tmp_path)
        with pytest.raises(BusyError), locked(tmp_path):
            pytest.fail("two are in the folder")


# Folders that cannot be read


@pytest.mark.parametrize("find", [paths_in, paths_below])
def test_a_folder_that_cannot_be_read_is_an_error_not_an_empty_folder(find, tmp_path, monkeypatch):
    assert find(tmp_path / "missing", "*") == []
    below = tmp_path / "b" / "3.txt"
    below.parent.mkdir()
    for path in (tmp_path / "2.txt", tmp_path / "1.txt", tmp_path / "1.json", below):
        path.touch()
    expected = [tmp_path / "1.txt", tmp_path / "2.txt"]
    assert find(tmp_path, "*.txt") == (expected if find is paths_in else [*expected, below])

    def broken(path):
        raise OSError(errno.EIO, "input/output error", str(path))

    monkeypatch.setattr(os, "listdir", broken)
    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(OSError, match="input/output error"):
        find(tmp_path, "*.txt")


# Files that grow


def test_lines_of_json_are_read_up_to_one_that_is_half_written(tmp_path):
    """Skips lines that a crash has cut, and values other than objects; a line may contain separators."""
    path = tmp_path / "lines.jsonl"
    assert json_lines(path) == []
    lines = [{"a": 1}, {"why": "of two\u2028lines\x85"}, {"b": 2}]
    whole = [json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join([whole[0], '{"a": ', "[3]", "", *whole[1:], '{"c": 3}']), "utf-8")
    assert json_lines(path) == lines
    path.write_bytes(path.read_bytes() + b"\n\xff\n")
    assert json_lines(path) == [*lines, {"c": 3}]
