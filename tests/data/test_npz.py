"""A user's own .npz, good and bad."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedhassle.data.catalogue import load
from fedhassle.data.dataset import Dataset
from fedhassle.data.npz import TEST, TRAINING, read_images, read_labelled
from fedhassle.errors import UserError


def arrays(shape: tuple[int, ...] = (9, 12, 3), classes: int = 3) -> dict[str, Any]:
    """A good file: two training images and one test image per class."""
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(0, 256, (2 * classes, *shape), np.uint8),
        "y_train": np.arange(2 * classes) % classes,
        "x_test": random.integers(0, 256, (classes, *shape), np.uint8),
        "y_test": np.arange(classes),
    }


def saved(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "own.npz"
    np.savez(path, **content)
    return path


def written(content: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **content)
    return stream.getvalue()


def test_own_file_has_defaults_from_its_images(tmp_path: Path) -> None:
    content = arrays((33, 16, 3))
    content["x_train"][..., 2] = 51
    own = load(saved(tmp_path, content))
    pixels = content["x_train"].astype(np.float64) / 255
    np.testing.assert_allclose(own.mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(own.std[:2], pixels.std(axis=(0, 1, 2))[:2], rtol=1e-12)
    assert own.std[2] == 1.0  # no spread to divide by
    assert (own.name, own.net, own.shape, own.flip, own.crop) == ("own.npz", "resnet8", (3, 33, 16), True, 2)
    assert own.class_names == ("0", "1", "2")
    named = load(str(saved(tmp_path, {**content, "class_names": np.array(["ant", "bee", "cat"])})))
    assert named.class_names == ("ant", "bee", "cat")


@pytest.mark.parametrize("side", [1, 2, 7, 8, 28, 32, 65])
def test_crop_is_an_eighth_and_less_than_the_side(tmp_path: Path, side: int) -> None:
    own = load(saved(tmp_path, arrays((side, 70))))
    assert own.crop == {1: 0, 2: 0, 7: 0, 8: 1, 28: 3, 32: 4, 65: 8}[side] < side
    assert (own.net, own.shape) == ("lenet", (1, side, 70))


def test_layouts_and_types_give_the_same_images(tmp_path: Path) -> None:
    content = arrays((9, 12, 3))
    expected = content["x_train"]
    changes = {
        "channels first": lambda x: np.moveaxis(x, 3, 1),
        "floats": lambda x: x / 255,
        "half floats": lambda x: (x / 255).astype(np.float16),
        "large integers": lambda x: x.astype(">i8"),
        "columns first": np.asfortranarray,
    }
    for name, change in changes.items():
        changed = {
            key: change(value) if key[0] == "x" else value.astype(float) for key, value in content.items()
        }
        if name == "columns first":
            changed |= {"y_train": changed["y_train"][:, None], "y_test": changed["y_test"][:, None]}
        own = load(saved(tmp_path, changed))
        np.testing.assert_array_equal(own.x_train, expected, err_msg=name)
        assert (own.x_train.dtype, own.y_train.dtype) == (np.uint8, np.int64)
        assert own.x_train.flags.c_contiguous
        assert own.y_train.tolist() == [0, 1, 2, 0, 1, 2]


def test_images_may_lack_labels_and_test_images(tmp_path: Path) -> None:
    """As in STL-10, −1 means no label."""
    content = arrays()
    content["y_train"] = np.array([0, 1, 2, -1, -1, 0], np.int8)
    own = load(saved(tmp_path, content))
    assert own.y_train.tolist() == [0, 1, 2, -1, -1, 0] and own.classes == 3
    del content["x_test"], content["y_test"]
    alone = load(saved(tmp_path, content))
    assert alone.x_test.shape == (0, 9, 12, 3) and alone.y_test.shape == (0,)
    np.testing.assert_array_equal(alone.x_train, own.x_train)


GOOD = arrays()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a missing array": ({"y_test": None}, "lacks y_test"),
    "objects": ({"x_train": np.array([None, "a"], object)}, "x_train: it holds Python objects"),
    "strings": (
        {"y_train": np.array(list("abcabc"))},
        "y_train is <U1 .*class_names",
    ),
    "no images": ({"x_test": GOOD["x_test"][:0], "y_test": GOOD["y_test"][:0]}, r"x_test .*\(0, 9, 12, 3\)"),
    "two axes": ({"x_train": GOOD["x_train"][:, :, 0, 0]}, r"x_train has the shape \(6, 9\)"),
    "two channels": ({"x_train": GOOD["x_train"][..., :2]}, r"x_train has the shape \(6, 9, 12, 2\)"),
    "no telling the colour": ({"x_train": GOOD["x_train"][:, :3]}, r"\(6, 3, 12, 3\)"),
    "bright floats": ({"x_test": GOOD["x_test"] * 1.0}, "x_test .float64. runs from .* expected 0 to 1"),
    "large integers": ({"x_test": GOOD["x_test"].astype(int) + 1000}, "x_test .* expected 0 to 255"),
    "negative integers": ({"x_test": GOOD["x_test"].astype(int) - 9}, "x_test .* expected 0 to 255"),
    "NaN": (
        {
            "x_train": GOOD["x_train"]
            / np.where(np.isin(np.arange(6), [2, 4]), np.nan, 255)[:, None, None, None]
        },
        "x_train .float64. has NaN in 2 of 6 images; expected 0 to 1",
    ),
    "complex numbers": ({"x_train": GOOD["x_train"] * 1j}, "x_train has the type complex128"),
    "truth values": ({"x_train": GOOD["x_train"] > 9}, "x_train has the type bool"),
    "fewer labels": ({"y_train": GOOD["y_train"][:5]}, "x_train has 6 images, y_train 5 labels"),
    "more test labels": ({"y_test": np.arange(5) % 3}, "x_test has 3 images, y_test 5 labels"),
    "rows of labels": ({"y_train": np.eye(6)}, r"y_train is float64 of shape \(6, 6\)"),
    "half labels": ({"y_train": GOOD["y_train"] + 0.5}, "y_train runs from 0.5 to 2.5"),
    "NaN labels": ({"y_train": np.full(6, np.nan)}, "y_train runs from nan"),
    "no test label": ({"y_test": GOOD["y_test"] - 1}, "y_test has −1, which means no label"),
    "no label at all": (
        {"y_train": np.full(6, -1)},
        "y_train has the labels −1 alone; expected all of 0 to M−1",
    ),
    "a class only in test images": (
        {"y_train": GOOD["y_train"] - 1},
        "y_test has the label 2; y_train has 0",
    ),
    "negative labels": ({"y_train": GOOD["y_train"] - 2}, "y_train runs from -2 to 0"),
    "vast labels": ({"y_train": GOOD["y_train"] + np.uint64(2**63)}, "y_train runs from"),
    "labels from 1": ({"y_train": GOOD["y_train"] + 1}, "y_train has the labels 1, 2, 3;"),
    "one class": ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, "y_train has the labels 0;"),
    "an unseen class": ({"y_test": np.array([0, 1, 3])}, "y_test has the label 3"),
    "another size": ({"x_test": GOOD["x_test"][:, :8]}, r"\(9, 12, 3\), x_test of \(8, 12, 3\)"),
    "too few names": ({"class_names": np.array(["a", "b"])}, r"class_names is <U1 of shape \(2,\)"),
    "a name that writes": (
        {"class_names": np.array(["a", "b", "c\x1b[2J"])},
        r"'c\\x1b\[2J' cannot name a class",
    ),
    "names as numbers": ({"class_names": np.arange(3)}, "class_names is int64"),
    "names of no text": ({"class_names": np.full(3, 2**31 - 1, np.uint32).view("<U1")}, "class_names"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_file_is_a_user_error_that_names_the_array(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    content = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(UserError, match=f"own.npz: .*{message}"):
        load(saved(tmp_path, content))


def test_other_files_than_npz_are_a_user_error(tmp_path: Path) -> None:
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "folder.npz").mkdir()
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        for name in GOOD:
            archive.writestr(name, "no array")
    for name in ("single", "empty", "folder", "text", "absent", "nul\0", "long" * 99, "~nobody-here/x"):
        with pytest.raises(UserError):
            load(tmp_path / f"{name}.npz" if name[0] != "~" else f"{name}.npz")
    with pytest.raises(UserError, match=r"absent\.npz.*No such file"):
        load(tmp_path / "absent.npz")


def assert_survives(path: Path) -> None:
    """Loads a file that may be bad: the result is a valid data set or a UserError."""
    try:
        own = load(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert isinstance(own, Dataset)
    assert own.x_train.dtype == own.x_test.dtype == np.uint8
    assert own.x_train.shape[1:] == own.x_test.shape[1:]
    assert (len(own.x_train), len(own.x_test)) == (len(own.y_train), len(own.y_test))
    assert set(own.y_test.tolist()) <= set(own.y_train.tolist()) == set(range(own.classes))


FUZZ = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WHOLE = written(GOOD)
MEMBER = WHOLE[WHOLE.index(b"\x93NUMPY") :][: 128 + GOOD["x_train"].size]  # x_train's header and values
FLIPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4)


def flipped(content: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for place, mask in flips:
        changed[place % len(changed)] ^= mask
    return bytes(changed)


@FUZZ
@given(st.floats(0, 1), FLIPS, FLIPS)
def test_damaged_bytes_never_end_in_another_error(
    tmp_path: Path, kept: float, flips: list[tuple[int, int]], header: list[tuple[int, int]]
) -> None:
    path = tmp_path / "damaged.npz"
    for content in (WHOLE[: round(kept * len(WHOLE))], flipped(WHOLE, flips)):
        path.write_bytes(content)
        assert_survives(path)
    path.write_bytes(written({key: value for key, value in GOOD.items() if key != "x_train"}))
    with zipfile.ZipFile(path, "a") as archive:  # whose checksum fits: only numpy can find the damage
        archive.writestr("x_train.npy", flipped(MEMBER[:128], header) + MEMBER[128:])
    assert_survives(path)


NUMBERS = st.sampled_from(
    [np.uint8, np.int8, np.int64, np.uint64, np.float16, np.float64, bool, complex, "U2", "M8[s]"]
)
SHAPES = st.lists(st.integers(0, 4), max_size=5)
ANY = st.builds(
    lambda kind, shape, value: np.full(shape, value).astype(kind), NUMBERS, SHAPES, st.integers(0, 2)
)


@FUZZ
@given(st.dictionaries(st.sampled_from([*GOOD, "class_names"]), st.none() | ANY, max_size=3))
def test_arbitrary_arrays_never_end_in_another_error(tmp_path: Path, change: dict[str, Any]) -> None:
    content = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    assert_survives(saved(tmp_path, content))


# Stacks, and pairs of images and labels


def test_stacks_without_labels(tmp_path, rng):
    x = rng.integers(0, 256, (5, 6, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "one.npz", scans=x)
    np.savez(tmp_path / "more.npz", x_train=x[:1], x_test=x, y_test=np.zeros(5))
    np.savez(tmp_path / "none.npz", a=x, b=x)
    np.save(tmp_path / "lone.npy", x[0])
    np.save(tmp_path / "rgb.npy", np.stack([x[0]] * 3, -1) / 255)
    for name in ("x.npy", "one.npz", "more.npz"):
        assert (read_images(tmp_path / name) == x[..., None]).all()
    assert read_images(tmp_path / "lone.npy").shape == (1, 6, 8, 1)
    assert (read_images(tmp_path / "rgb.npy")[0] == x[0][..., None]).all()
    with pytest.raises(UserError, match=r"none\.npz: holds a, b; expected one array"):
        read_images(tmp_path / "none.npz")


def test_a_stack_that_is_damaged_or_a_pickle_is_a_user_error(tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.npz").write_text("no array")
    np.save(tmp_path / "words.npy", np.array([["a"]]))
    for name in ("pickle.npy", "text.npy", "empty.npy", "text.npz", "words.npy", "nothere.npy"):
        with pytest.raises(UserError, match=name):
            read_images(tmp_path / name)


def test_images_and_labels_are_the_first_pair_that_is_there(tmp_path, rng):
    x, y = rng.integers(0, 256, (5, 6, 8), dtype=np.uint8), np.array([0, 2, -1, 0, 0])
    np.savez(tmp_path / "pair.npz", x=x, y=y)
    np.savez(tmp_path / "all.npz", x_train=x[:1], y_train=[3], x_test=x, y_test=y, class_names=["a", "b"])
    for name, pairs in [("pair", TEST), ("pair", TRAINING), ("all", TEST)]:
        found = read_labelled(tmp_path / f"{name}.npz", pairs)
        assert (found.x == x[..., None]).all() and (found.y == y).all()
        assert found.class_names == (("a", "b") if name == "all" else None)
    assert read_labelled(tmp_path / "all.npz", TRAINING).y.tolist() == [3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": (5, 6, 8), "y": (4,)}, "x has 5 images, y 4 labels"),
        ({"x_test": (5, 6, 8), "y": (5,)}, "lacks y_test; expected x_test, y_test, or x, y"),
        ({"x": (5, 6, 8), "y": (5,), "class_names": (2,)}, "class_names is uint8"),
    ],
)
def test_pairs_that_do_not_fit_are_a_user_error(arrays, message, tmp_path):
    np.savez(tmp_path / "bad.npz", **{name: np.zeros(shape, np.uint8) for name, shape in arrays.items()})
    with pytest.raises(UserError, match=rf"bad\.npz.*{message}"):
        read_labelled(tmp_path / "bad.npz", TEST)
