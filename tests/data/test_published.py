"""SVHN and STL-10 from small archives in their published formats, downloaded from a local server."""

import base64
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_download import Server, images, labels, left, server, tar

from fedhassle.data import catalogue, published
from fedhassle.data.mat import read_mat
from fedhassle.data.split.draw import split
from fedhassle.errors import UserError

__all__ = ["server"]  # a fixture

# Made by SciPy's savemat with compression: X (2, 3, 3, 3) of uint8, y (3, 1) of double, a text and a cell.
BY_SCIPY = (
    "TUFUTEFCIDUuMCBNQVQtZmlsZSAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAAAAAAAAAAAAABSU0PAAAAYgAAAHic42NgYCgAYjYg5gBi"
    "TgYIYAViASBmAmJmJMwIhBFQcTOQwnbdLVEP+afZHM78ILfU+1LFf9Yeo53xz0RmO57I+6q8KuB6LQvXRPN9Ka8lF7idLf6lsT70"
    "ThPQEgBnPRs7DwAAADAAAAB4nONjYGDwAGI2IOaA0iDACuUzAzEjGDMyVAJpTiCWYIABFQcIzQGlP9gDAENdAvMPAAAAKwAAAHic"
    "42NgYDAAYjYg5gBiFgYIYIXyGYGYGUyzMJSkVpQIAHmJSckMACjRA2UPAAAAQAAAAHic42NgYFgAxGxAzAHEjAwQwIrEZwLTLAzJ"
    "qTk5fEC2BZJ6PizqGZHM4UEzF6TeAEk/CwH9AkBWIpAGAJaoA8w="
)


def element(kind: int, data: bytes) -> bytes:
    """An element of a MATLAB file: tag, bytes, zeros up to a multiple of 8."""
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(name: bytes, array: np.ndarray, kind: int) -> bytes:
    """A variable of numbers, as MATLAB stores it."""
    flags = element(6, struct.pack("<II", 9, 0))
    shape = element(5, np.array(array.shape, "<i4").tobytes())
    small_name = struct.pack("<HH", 1, len(name)) + name.ljust(4, b"\0")
    return element(14, flags + shape + small_name + element(kind, array.tobytes(order="F")))


def mat(x: np.ndarray, y: np.ndarray, compressed: bool = True) -> bytes:
    """SVHN's file: X (H, W, C, N) of uint8 and y (N, 1), by hand, after the description of the format."""
    variables = [matrix(b"X", x.transpose(1, 2, 3, 0), 2), matrix(b"y", y.reshape(-1, 1), 2)]
    if compressed:
        packed = [zlib.compress(variable) for variable in variables]
        variables = [struct.pack("<II", 15, len(part)) + part for part in packed]
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + b"".join(variables)


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_is_read_from_its_matlab_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    x, x_test = images(30, 32, 32, 3), images(20, 32, 32, 3)
    digits, test_digits = labels(30, 10), labels(20, 10)
    files = [(x, digits), (x_test, test_digits)]
    contents = [mat(pixels, np.where(y == 0, 10, y).astype(np.uint8), compressed) for pixels, y in files]
    names = [source.name for source in published.SVHN_SOURCES]
    sources = tuple(server.offer(name, content) for name, content in zip(names, contents, strict=True))
    entry = replace(catalogue.CATALOGUE["svhn"], sources=sources, images=(30, 20))
    monkeypatch.setitem(catalogue.CATALOGUE, "svhn", entry)
    for _ in range(2):
        found = catalogue.load("svhn", tmp_path)
        np.testing.assert_array_equal(found.x_train, x)
        np.testing.assert_array_equal(found.x_test, x_test)
        assert found.y_train.tolist() == digits.tolist() and found.y_test.tolist() == test_digits.tolist()
    assert (found.net, found.flip, found.crop, found.class_names[0]) == ("resnet8", False, 4, "0")
    assert server.requests == ["/train_32x32.mat", "/test_32x32.mat"] and left(tmp_path) == ["svhn.npz"]


def test_a_file_of_another_writer_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "x.mat").write_bytes(base64.b64decode(BY_SCIPY))
    found = read_mat(tmp_path / "x.mat")
    assert set(found) == {"X", "y"}
    np.testing.assert_array_equal(found["X"], (np.arange(54) * 5 % 256).reshape(2, 3, 3, 3))
    assert found["y"].tolist() == [[10], [3], [1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no MATLAB", "not a MATLAB file of version 5"),
        (mat(images(3, 32, 32, 3), labels(3, 10))[:-9], "not a complete MATLAB file"),
        (mat(images(3, 32, 32, 3), labels(3, 10), compressed=False)[:-20], "not a complete MATLAB file"),
        (mat(images(3, 16, 32, 3), labels(3, 10)), r"expected X \(32, 32, 3, N\)"),
        (mat(images(3, 32, 32, 3), labels(4, 10)), r"expected X \(32, 32, 3, N\)"),
        (b"".ljust(124) + b"\x00\x01IM", r"has \{\}; expected X"),
    ],
    ids=["text", "cut", "cut plain", "size", "count", "empty"],
)
def test_malformed_svhn_is_a_user_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.mat").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.mat: .*{message}"):
        published.read_svhn([tmp_path / "x.mat"] * 2)


def columns(x: np.ndarray) -> bytes:
    """STL-10's images: plane by plane, each column by column."""
    return b"".join(image[:, :, channel].T.tobytes() for image in x for channel in range(3))


def stl10(parts: dict[str, np.ndarray]) -> bytes:
    """The archive, with labels from 1 and files that nobody reads."""
    pixels = {
        f"stl10_binary/{name}_X.bin": columns(parts[f"{name}_x"]) for name in ("test", "unlabeled", "train")
    }
    numbers = {f"stl10_binary/{name}_y.bin": (parts[f"{name}_y"] + 1).tobytes() for name in ("test", "train")}
    return tar({**pixels, "stl10_binary/class_names.txt": b"airplane\n", **numbers})


def small_stl10() -> dict[str, np.ndarray]:
    arrays = {
        f"{name}_x": images(count, 96, 96, 3)
        for name, count in (("train", 20), ("unlabeled", 30), ("test", 10))
    }
    return {**arrays, "train_y": labels(20, 10), "test_y": labels(10, 10)}


def test_stl10_has_its_unlabelled_images_behind_the_others(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "SLICE", 7)  # images are read in slices
    parts = small_stl10()
    source = server.offer("stl10_binary.tar.gz", stl10(parts))
    entry = replace(catalogue.CATALOGUE["stl10"], sources=(source,), images=(50, 10))
    monkeypatch.setitem(catalogue.CATALOGUE, "stl10", entry)
    found = catalogue.load("stl10", tmp_path)
    np.testing.assert_array_equal(found.x_train[:20], parts["train_x"])
    np.testing.assert_array_equal(found.x_train[20:], parts["unlabeled_x"])
    np.testing.assert_array_equal(found.x_test, parts["test_x"])
    assert found.y_train.tolist() == [*parts["train_y"], *[-1] * 30]
    assert found.y_test.tolist() == parts["test_y"].tolist()
    assert (found.shape, found.crop, found.classes) == ((3, 96, 96), 12, 10)
    assert left(tmp_path) == ["stl10.npz"]


@pytest.mark.parametrize("lacking", ["train_X", "unlabeled_X", "train_y", "test_y"])
def test_malformed_stl10_is_a_user_error(tmp_path: Path, lacking: str) -> None:
    members = {"train_X": bytes(27648), "unlabeled_X": bytes(27648), "test_X": bytes(27648)}
    members |= {"train_y": b"\1", "test_y": b"\1"}
    for changed in ({}, {lacking: b"\1\1\1"}):
        kept = {name: content for name, content in members.items() if name != lacking} | changed
        (tmp_path / "s.tar.gz").write_bytes(tar({f"stl10_binary/{k}.bin": v for k, v in kept.items()}))
        with pytest.raises(UserError, match=rf"s\.tar\.gz: not a complete STL-10 archive \(.*{lacking}"):
            published.read_stl10([tmp_path / "s.tar.gz"])


def test_a_split_of_stl10_takes_its_labels_from_the_labelled_images() -> None:
    y = catalogue.without_pixels(catalogue.CATALOGUE["stl10"]).y_train
    layout = {"full": 0, "partial": 10, "unlabelled": 10, "share": 0.04}
    found = split(y, kind="authors", labels=layout, clients=20, alpha=0.1, seed=0)
    assert sum(part.size for part in found.labelled) == 4_200
    assert all((y[part] >= 0).all() for part in found.labelled)
    assert sum((y[part] < 0).sum() for part in found.unlabelled) == 100_000
