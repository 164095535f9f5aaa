"""Files that declare more than they hold, or unpack to far more than their size, and are refused for it."""

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from fedhassle.data.catalogue import load
from fedhassle.data.npz import TEST, read_images, read_labelled
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError

NAMES = ("x_train", "y_train", "x_test", "y_test")
LITTLE = 20 * 2**20  # bytes that a refusal may take; each file here asks for more


def header(shape, kind="|u1", version=(1, 0)):
    """Returns the beginning of an .npy file."""
    stream = io.BytesIO()
    described = {"descr": kind, "fortran_order": False, "shape": shape}
    write = npy.write_array_header_1_0 if version == (1, 0) else npy.write_array_header_2_0
    write(stream, described)
    return stream.getvalue()


def archive(path, names, beginning, zeros):
    """Writes an .npz whose arrays have a beginning and then zeros, which compress to a thousandth."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(beginning)
                for _ in range(zeros // 2**20):
                    member.write(bytes(2**20))
    return path


def refused(read, path, message):
    """Asserts that reading fails with one line, within little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as found:
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LITTLE and "\n" not in str(found.value) and path.name in str(found.value)


READERS = {
    "data set": (load, NAMES),
    "pair": (lambda path: read_labelled(path, TEST), ("x_test", "y_test")),
    "stack": (read_images, ("x_test",)),
    "split": (
        Split.load,
        ("labelled_rows", "labelled_offsets", "unlabelled_rows", "unlabelled_offsets", "hash", "notes"),
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_bomb_is_refused_by_its_declared_size(reader, tmp_path):
    read, names = READERS[reader]
    size = 300 * 2**20 // len(names)
    path = archive(tmp_path / "bomb.npz", names, header((size // 2**20, 1024, 1024)), size)
    assert path.stat().st_size < 2**20
    refused(read, path, r"unpacks to 3\d\d MB; a file of this size may unpack to 268 MB")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((300, 1024, 1024), "|u1"),
        ((10**12,), "<i8"),
        ((10**10, 10**10, 10**10), "|u1"),
        ((2**32, 2**32), "|u1"),
        ((-1, 28, 28), "|u1"),
        ((-(10**9), -(10**9)), "|u1"),
        ((10**12,), "<U0"),
        ((10**5,), "<U100000"),
    ],
    ids=str,
)
def test_a_header_that_claims_more_than_is_there_is_refused(reader, shape, kind, tmp_path):
    read, names = READERS[reader]
    for version in ((1, 0), (2, 0)):
        path = archive(tmp_path / "liar.npz", names, header(shape, kind, version), 2**20)
        refused(read, path, f"{names[0]}: its header claims")


@pytest.mark.parametrize("reader", READERS)
def test_reading_ends_at_the_declared_size(reader, tmp_path):
    """The directory and the member's own header say 1 kB, where 64 MB follow; so the checksum is wrong."""
    read, names = READERS[reader]
    content = header((64, 1024, 1024))
    path = archive(tmp_path / "short.npz", names, content, 64 * 2**20)
    declared, packed = len(content) + 64 * 2**20, path.read_bytes()
    assert packed.count(struct.pack("<Q", declared)) + packed.count(struct.pack("<I", declared)) >= len(names)
    for form in ("<Q", "<I"):
        packed = packed.replace(struct.pack(form, declared), struct.pack(form, 1024))
    path.write_bytes(packed)
    refused(read, path, "its header claims|Bad CRC-32")


def test_an_npy_that_claims_more_than_the_file_is_refused(tmp_path):
    path = tmp_path / "liar.npy"
    for shape, kind in [((10**12, 28, 28), "|u1"), ((10**12,), "<U0"), ((-1,), "|u1"), ((2,), "|O")]:
        path.write_bytes(header(shape, kind) + bytes(100))
        refused(read_images, path, "its header claims|it holds Python objects")


def test_objects_are_refused_without_unpickling(tmp_path):
    class Fires:
        def __reduce__(self):
            return Path.touch, (tmp_path / "fired",)

    content = dict.fromkeys(NAMES, np.array([Fires()], object))
    np.savez(tmp_path / "objects.npz", **content, allow_pickle=True)
    for read in (load, lambda path: read_labelled(path, TEST), read_images):
        with pytest.raises(UserError, match="it holds Python objects"):
            read(tmp_path / "objects.npz")
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_images_that_compress_well_are_read(save, tmp_path):
    """30 MB of white images, in a file of 30 kB if compressed: under the size that any file may unpack to."""
    x = np.full((10_000, 50, 60), 255, np.uint8)
    save(tmp_path / "white.npz", x=x, y=np.arange(10_000) % 4)
    found = read_labelled(tmp_path / "white.npz", TEST)
    assert (found.x == 255).all() and found.x.shape == (10_000, 50, 60, 1)


def test_images_to_train_on_have_sides_of_at_most_4096_pixels(tmp_path):
    """So has the metadata of a model: what cannot be loaded is not trained."""
    for side in (4096, 4097):
        x = np.zeros((2, 1, side), np.uint8)
        np.savez(tmp_path / f"{side}.npz", **dict(zip(NAMES, (x, [0, 1], x, [0, 1]), strict=True)))
    assert load(tmp_path / "4096.npz").shape == (1, 1, 4096)
    with pytest.raises(UserError, match="expected sides of at most 4096"):
        load(tmp_path / "4097.npz")
