"""The published files of the named data sets: where they are, and how their formats are read."""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedhassle.data.download import Bytes, RawData, Source
from fedhassle.data.mat import read_mat
from fedhassle.errors import UserError

SLICE = 1000  # images of STL-10 that are read at once


def _source(folders: tuple[str, ...], name: str, md5: str, length: int) -> Source:
    """Returns a file that several web folders offer."""
    return Source(name, tuple(folder + name for folder in folders), md5, length)


_FASHION = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
FMNIST_SOURCES = (
    _source(_FASHION, "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    _source(_FASHION, "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
    _source(_FASHION, "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    _source(_FASHION, "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
)
# The first redirects to the second at present.
_TORONTO = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
CIFAR10_SOURCES = (
    _source(_TORONTO, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
)
CIFAR100_SOURCES = (
    _source(_TORONTO, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
)
# The authors of SVHN and of STL-10 publish no checksums. These are the ones by which torchvision checks them.
_NUMBERS = ("http://ufldl.stanford.edu/housenumbers/",)
SVHN_SOURCES = (
    _source(_NUMBERS, "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
    _source(_NUMBERS, "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
)
_COATES = ("http://ai.stanford.edu/~acoates/stl10/", "https://cs.stanford.edu/~acoates/stl10/")
STL10_SOURCES = (_source(_COATES, "stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb", 2_640_397_119),)


def read_idx(paths: Sequence[Path]) -> RawData:
    """Reads MNIST's four files: training images and labels, test images and labels."""
    x_train, y_train, x_test, y_test = (_idx(path) for path in paths)
    return RawData(x_train[..., None], y_train, x_test[..., None], y_test)


def _idx(path: Path) -> Bytes:
    """Reads a gzipped idx file: two zeros, type 8 (uint8), number of dimensions, dimensions, values."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: not a complete gzip file ({error}); delete it to download it again"
        ) from error
    header = 4 + 4 * content[3] if len(content) >= 4 else 4
    if content[:3] != b"\0\0\x08" or len(content) < header:
        raise UserError(f"{path}: starts with {content[:4].hex()}; expected an idx file of uint8 (000008…)")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", content[3], 4))
    values = np.frombuffer(content, np.uint8, offset=header)
    if values.size != math.prod(shape):
        raise UserError(f"{path}: has {values.size} values; expected {shape} by its header")
    return values.reshape(shape)


def read_cifar10(paths: Sequence[Path]) -> RawData:
    """Reads CIFAR-10's binary archive."""
    train = [f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)]
    return _cifar(paths[0], train, "cifar-10-batches-bin/test_batch.bin", label_bytes=1)


def read_cifar100(paths: Sequence[Path]) -> RawData:
    """Reads CIFAR-100's binary archive, whose records start with the coarse and the fine label."""
    return _cifar(paths[0], ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", label_bytes=2)


def _cifar(path: Path, train: Sequence[str], test: str, label_bytes: int) -> RawData:
    """Reads a CIFAR archive in memory; the last label byte of a record counts, then come planes R, G, B."""
    with _archive(path, "CIFAR") as archive:
        train_records = np.concatenate([_records(archive, name, label_bytes) for name in train])
        test_records = _records(archive, test, label_bytes)
    return RawData(
        *_images_and_labels(train_records, label_bytes), *_images_and_labels(test_records, label_bytes)
    )


@contextmanager
def _archive(path: Path, name: str) -> Iterator[tarfile.TarFile]:
    """Opens a .tar.gz; what is wrong with it becomes a `UserError`."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            yield archive
    except (OSError, EOFError, KeyError, zlib.error, tarfile.TarError) as error:
        raise UserError(
            f"{path}: not a complete {name} archive ({error}); delete it to download it again"
        ) from error


def _records(archive: tarfile.TarFile, name: str, label_bytes: int) -> Bytes:
    """Reads one member as rows of labels and pixels."""
    member = archive.extractfile(name)
    values = np.frombuffer(b"" if member is None else member.read(), np.uint8)
    size = label_bytes + 3 * 32 * 32
    if values.size == 0 or values.size % size:
        raise tarfile.ReadError(f"{name} has {values.size} bytes; expected a multiple of {size}")
    return values.reshape(-1, size)


def _images_and_labels(records: Bytes, label_bytes: int) -> tuple[Bytes, Bytes]:
    """Returns the images and labels of records."""
    planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)  # (N, C, H, W)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, label_bytes - 1].copy()


def read_svhn(paths: Sequence[Path]) -> RawData:
    """Reads SVHN's MATLAB files of cropped digits, for training and for testing."""
    train, test = (_digits(path) for path in paths)
    return RawData(*train, *test)


def _digits(path: Path) -> tuple[Bytes, Bytes]:
    """Reads X (H, W, C, N) and y (N, 1), in which 10 stands for the digit 0."""
    found = read_mat(path)
    x, y = found.get("X"), found.get("y")
    if x is None or y is None or x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or y.size != x.shape[-1]:
        shapes = {name: array.shape for name, array in found.items()}
        raise UserError(f"{path}: has {shapes}; expected X (32, 32, 3, N) of uint8 and y (N, 1)")
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), (y.ravel() % 10).astype(np.uint8)


def read_stl10(paths: Sequence[Path]) -> RawData:
    """Reads STL-10's binary archive; the images without a label follow the others, with the label −1.

    All images together take 3 GB, so they go straight to their place.
    """
    names = ("train_X", "unlabeled_X", "test_X", "train_y", "test_y")
    with _archive(paths[0], "STL-10") as archive:
        # In the order of the archive: a step back would decompress it again from its start.
        wanted = {f"stl10_binary/{name}.bin": name for name in names}
        members = {wanted[each.name]: each for each in archive.getmembers() if each.name in wanted}
        lacking = [name for name in names if name not in members]
        if lacking:
            raise tarfile.ReadError(f"{', '.join(lacking)} missing")
        counts = {name: _count(members[name]) for name in names[:3]}
        train, test = (
            np.empty((count, 96, 96, 3), np.uint8)
            for count in (counts["train_X"] + counts["unlabeled_X"], counts["test_X"])
        )
        first = counts["train_X"]
        places: Mapping[str, Bytes] = {
            "train_X": train[:first],
            "unlabeled_X": train[first:],
            "test_X": test,
            "train_y": np.empty(first, np.uint8),
            "test_y": np.empty(counts["test_X"], np.uint8),
        }
        for name in sorted(names, key=lambda name: members[name].offset):
            _fill(places[name], archive, members[name])
    y_train, y_test = (places[name].astype(np.int8) - 1 for name in ("train_y", "test_y"))
    return RawData(train, np.append(y_train, np.full(counts["unlabeled_X"], -1, np.int8)), test, y_test)


def _count(member: tarfile.TarInfo) -> int:
    """Returns the number of images in a member."""
    size = 3 * 96 * 96
    count, rest = divmod(member.size, size)
    if rest or not count:
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes; expected a multiple of {size}")
    return count


def _fill(place: Bytes, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Reads labels, or images, whose planes R, G, B are stored column by column."""
    stream = archive.extractfile(member)
    if stream is None or member.size != place.size:
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes; expected {place.size}")
    for start in range(0, len(place), SLICE):
        part = place[start : start + SLICE]
        values = np.frombuffer(stream.read(part.size), np.uint8)
        part[:] = values if place.ndim == 1 else values.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
