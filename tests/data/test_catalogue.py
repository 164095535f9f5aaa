"""The shipped set, the catalogue, the data folder, and held-out images."""

import hashlib
import runpy
import sys
import zipfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

from fedhassle.data import catalogue
from fedhassle.data.catalogue import CATALOGUE, data_folder, load
from fedhassle.data.dataset import Dataset, hold_out
from fedhassle.errors import UserError

MINI = {  # of the arrays' bytes, as scripts/make_fmnist_mini.py left them
    "x_train": "10635fbe5e611b32ddbec7af3ae48f0143afc4d028a01187405de3c806c05f4f",
    "y_train": "a04d3b45609a736c961303bd807b01055c7981fffef4300ce2910b6680a18e2f",
    "x_test": "2a22cee95665e3df7c1da5e1934694fde035b87aab132def6c27d211c84c1c0c",
    "y_test": "715256556437c0eff360f955d897ec7ce68484294fc250b0dcb7bad5d632219a",
}
ROOT = Path(__file__).parents[2]


def test_mini_set_is_balanced_and_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHASSLE_DATA", "/nowhere")  # it needs no folder
    mini = load("fmnist-mini")
    assert (mini.x_train.shape, mini.x_test.shape) == ((12_000, 28, 28, 1), (2_000, 28, 28, 1))
    assert (mini.x_train.dtype, mini.y_train.dtype) == (np.uint8, np.int64)
    assert np.bincount(mini.y_train).tolist() == [1_200] * 10
    assert np.bincount(mini.y_test).tolist() == [200] * 10
    for name, digest in MINI.items():
        assert hashlib.sha256(getattr(mini, name).astype(np.uint8).tobytes()).hexdigest() == digest
    assert (mini.name, mini.net, mini.shape, mini.classes) == ("fmnist-mini", "lenet", (1, 28, 28), 10)
    assert (mini.mean, mini.std, mini.flip, mini.crop) == ((0.0,), (1.0,), True, 0)
    assert mini.class_names[9] == "Ankle boot"
    with pytest.raises(FrozenInstanceError):
        mini.crop = 4  # type: ignore[misc]
    folder = ROOT / "fedhassle" / "data"
    assert (folder / "fmnist-mini.npz").stat().st_size <= 6_000_000
    assert "Copyright (c) 2017 Zalando SE" in (folder / "fmnist-mini.LICENSE.txt").read_text()


def test_script_draws_balanced_rows_and_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_fmnist_mini.py"))
    y = np.repeat(np.arange(10, dtype=np.uint8), 8)
    x = np.arange(80, dtype=np.uint8).reshape(80, 1, 1, 1)
    chosen = script["subset"]({"x_train": x, "y_train": y, "x_test": x, "y_test": y}, train=5, test=2)
    rows = chosen["x_train"].ravel().tolist()
    assert rows == sorted(set(rows))
    assert np.bincount(chosen["y_train"]).tolist() == [5] * 10
    assert chosen["y_train"].tolist() == [row // 8 for row in rows]
    assert np.bincount(chosen["y_test"]).tolist() == [2] * 10
    for name in ("a.npz", "b.npz"):
        script["write"](tmp_path / name, chosen)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_LZMA}


def test_catalogue_has_the_settings_of_the_paper() -> None:
    assert list(CATALOGUE) == ["fmnist-mini", "fmnist", "cifar10", "cifar100", "svhn", "stl10"]
    for name in ("cifar10", "cifar100"):
        entry = CATALOGUE[name]
        assert (entry.mean, entry.std) == ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
        assert (entry.net, entry.flip, entry.crop, entry.images) == ("resnet8", True, 4, (50_000, 10_000))
    assert (CATALOGUE["cifar10"].classes, CATALOGUE["cifar100"].classes) == (10, 100)
    names = CATALOGUE["cifar100"].class_names
    assert (len(set(names)), list(names)) == (100, sorted(names))  # the authors' order is the alphabet's


def test_sets_without_pixels_have_the_labels_of_the_published_ones() -> None:
    svhn, stl10 = (catalogue.without_pixels(CATALOGUE[name]) for name in ("svhn", "stl10"))
    assert (len(svhn.y_train), len(svhn.y_test)) == CATALOGUE["svhn"].images
    assert np.bincount(svhn.y_train)[:3].tolist() == [4_948, 13_861, 10_585]
    assert np.bincount(stl10.y_train + 1).tolist() == [100_000, *[500] * 10]
    assert np.bincount(stl10.y_test).tolist() == [800] * 10
    for name in ("fmnist", "cifar100"):
        entry = CATALOGUE[name]
        made = catalogue.without_pixels(entry)
        assert (len(made.y_train), len(made.y_test)) == entry.images
        assert set(np.bincount(made.y_train)) == {entry.images[0] // entry.classes}


def test_folder_is_argument_then_variable_then_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHASSLE_DATA", str(tmp_path / "variable"))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder(None) == tmp_path / "variable"
    monkeypatch.delenv("FEDHASSLE_DATA")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    folders = {"linux": "xdg", "darwin": "Library/Caches", "win32": "local"}
    for platform, folder in folders.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert data_folder(None) == tmp_path / folder / "fedhassle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert data_folder(None) == tmp_path / ".cache" / "fedhassle"


def test_user_without_a_home_is_told_to_choose_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FEDHASSLE_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match=r"\$FEDHASSLE_DATA or --data-dir"):
        data_folder(None)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'CIFRA10'.*'cifar10'\?.*fmnist-mini, fmnist, cifar10, cifar100"):
        load("CIFRA10")
    with pytest.raises(UserError, match=r"unknown data set 'zzz' \(known are"):
        load("zzz")


def test_named_file_must_be_the_set_of_that_name(tmp_path: Path) -> None:
    x, y = np.zeros((6, 9, 12, 3), np.uint8), np.arange(6) % 3
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    with pytest.raises(
        UserError, match=r"cifar10\.npz: .*\(6, 3, 9, 12, 3, 3\).*\(50000, 10000, 32, 32, 3, 10\)"
    ):
        load("cifar10", tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"cifar10\.npz: .*delete the file"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_hold_out_takes_its_share_of_each_class_from_training(share: float) -> None:
    y = np.repeat([0, 1, 2], [100, 40, 2])
    x = np.arange(len(y), dtype=np.uint8).reshape(-1, 1, 1, 1)  # an image is its own number
    full = Dataset("own", x, y, x[:0], y[:0], ("a", "b", "c"), "lenet", (0.5,), (0.2,), True, 0)
    held = hold_out(full, share, seed=3)
    train, test = held.x_train.ravel().tolist(), held.x_test.ravel().tolist()
    assert sorted(train + test) == list(range(142))  # nothing twice, nothing lost
    assert held.y_train.tolist() == [y[i] for i in train]
    assert held.y_test.tolist() == [y[i] for i in test]
    assert np.bincount(held.y_test).tolist() == [100 * share, 40 * share, 1]
    assert (held.mean, held.std, held.class_names) == (full.mean, full.std, full.class_names)
    assert hold_out(full, share, seed=3).x_test.ravel().tolist() == test
    assert hold_out(full, share, seed=4).x_test.ravel().tolist() != test
    with pytest.raises(UserError, match="class 'c' has 1 labelled image"):
        hold_out(hold_out(full, share, seed=3), share, seed=3)
    for bad in (0, 1, -0.1, 2, float("nan")):
        with pytest.raises(UserError, match=f"between 0 and 1, got {bad}"):
            hold_out(full, bad, seed=3)
    with pytest.raises(UserError, match="negative, got -1"):
        hold_out(full, share, seed=-1)
