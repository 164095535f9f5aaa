"""The file format of splits: saving, loading, the hash, and damaged files."""

import numpy as np
import pytest

from fedhassle.data.split.draw import split
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError

SMALL = np.repeat(np.arange(10), 200)
EXAMPLE = Split((np.array([4, 2]), np.array([], int)), (np.array([0]), np.array([1, 3])), ("a note, with α",))


def test_save_and_load(tmp_path):
    EXAMPLE.save(tmp_path / "new" / "split.npz")
    loaded = Split.load(tmp_path / "new" / "split.npz")
    assert [part.tolist() for part in loaded.labelled] == [[4, 2], []]
    assert [part.tolist() for part in loaded.unlabelled] == [[0], [1, 3]]
    assert all(part.dtype == np.int64 for part in loaded.labelled + loaded.unlabelled)
    assert loaded.notes == ("a note, with α",)
    assert loaded.hash == EXAMPLE.hash
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["split.npz"]


@pytest.mark.parametrize("name", ["split", "split.one"])
def test_the_name_stays_as_given(tmp_path, name):
    EXAMPLE.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert Split.load(tmp_path / name).hash == EXAMPLE.hash


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "split.npz"
    EXAMPLE.save(path)
    before = path.read_bytes()

    def break_off(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", break_off)
    with pytest.raises(UserError, match=r"split\.npz cannot be written: disk full"):
        split(SMALL).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_hash_sees_rows_and_boundaries_but_no_notes():
    a, b, empty = np.array([1, 2]), np.array([3]), np.array([], int)
    same = Split((a, b), (empty, empty))
    assert same.hash == Split((a.copy(), b), (empty, empty), ("a note",)).hash
    others = [
        Split((np.array([1]), np.array([2, 3])), (empty, empty)),  # other boundary
        Split((np.array([1, 4]), b), (empty, empty)),  # other row
        Split((a, empty), (empty, b)),  # not labelled
        Split((a, b, empty), (empty, empty, empty)),  # one client more
        Split((b, a), (empty, empty)),  # other order of clients
    ]
    assert len({same.hash, *(other.hash for other in others)}) == 6


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "split.npz"
    split(SMALL).save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    truth = Split.load(path)
    noticed = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            loaded = Split.load(path)
        except UserError as error:
            noticed += 1
            assert "make the split again" in str(error)
        else:  # a bit that means nothing, such as one of a time stamp
            assert loaded.hash == truth.hash
    assert noticed > 100


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 nor this"])
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "split.npz").write_bytes(content)
    with pytest.raises(UserError, match="not a split, or is damaged"):
        Split.load(tmp_path / "split.npz")


def test_other_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.arange(3))
    np.save(tmp_path / "plain.npy", np.arange(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="not a split, or is damaged"):
            Split.load(path)


def test_changed_rows_are_refused(tmp_path):
    path = tmp_path / "split.npz"
    EXAMPLE.save(path)
    with np.load(path) as file:
        fields = dict(file)
    fields["labelled_rows"] = fields["labelled_rows"] + 1
    np.savez(path, **fields)
    with pytest.raises(UserError, match="do not match its hash"):
        Split.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no split at .*absent\.npz"):
        Split.load(tmp_path / "absent.npz")


def test_check_refuses_rows_beyond_and_rows_used_twice():
    EXAMPLE.check(np.zeros(5, int))
    with pytest.raises(UserError, match=r"uses row 4, .* 4 rows"):
        EXAMPLE.check(np.zeros(4, int))
    with pytest.raises(UserError, match="uses row -1"):
        Split((np.array([-1]),), (np.array([2]),)).check(np.zeros(4, int))
    with pytest.raises(UserError, match="uses row 2 2 times"):
        Split((np.array([1, 2]),), (np.array([2]),)).check(np.zeros(4, int))


def test_names_count_from_one():
    assert EXAMPLE.names == ("client 1", "client 2")
