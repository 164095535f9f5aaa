"""Model files with crafted metadata and valid checksums: they load, or one line says what is wrong."""

import json

import numpy as np
import pytest
import torch
from crafted import DROPPED, ODD, changed, written
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small import call

import fedhassle
from fedhassle.engine.tensor_files import read_arrays

ENTRIES = [
    *(
        (key,)
        for key in ("format", "method", "net", "shape", "class_names", "mean", "std", "headline", "round")
    ),
    ("validation",),
    *((key, 0) for key in ("shape", "class_names", "mean", "std")),
    *(("shape", 1), ("shape", 2)),
    *(("method", key) for key in ("name", "lr", "batch", "clip", "average", "teacher", "gra", "prior")),
    *(("method", key) for key in ("residual_width", "confidence", "unheard_of")),
]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def assert_survives(path):
    """Loads a file and predicts: the only exception allowed is one line that names the file."""
    try:
        model = fedhassle.load(path)
    except fedhassle.UserError as error:
        assert path.name in str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return
    try:
        model.predictions(np.zeros((1, 12, 12), np.uint8))
    except fedhassle.UserError as error:  # numbers that are too large for the network
        assert "NaN" in str(error)


@pytest.fixture(scope="module")
def model(finished):
    return read_arrays(finished[0] / "model.safetensors")


@pytest.mark.parametrize("at", ENTRIES, ids=lambda at: ".".join(map(str, at)))
def test_an_odd_entry_ends_in_one_line(model, at, tmp_path):
    arrays, about = model
    for value in ODD:
        assert_survives(written(tmp_path / "odd.safetensors", arrays, json.dumps(changed(about, at, value))))


@given(st.lists(st.tuples(st.sampled_from([at for at in ENTRIES if len(at) == 1]), JUNK), max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@example([(("shape",), [1, 10**9, 10**9])])
def test_random_metadata_end_in_one_line(model, tmp_path, changes):
    arrays, about = model
    for at, value in changes:
        about = changed(about, at, value)
    assert_survives(written(tmp_path / "random.safetensors", arrays, json.dumps(about)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "1",
        '"x"',
        "{}",
        "NaN",
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 5000 + "1" + "}" * 5000,
    ],
    ids=lambda text: f"{text[:8]} {len(text)}",
)
def test_a_description_that_is_no_table_ends_in_one_line(model, text, tmp_path):
    path = written(tmp_path / "text.safetensors", model[0], text)
    with pytest.raises(
        fedhassle.UserError, match=r"text\.safetensors is (damaged|not a trained model)"
    ) as found:
        fedhassle.load(path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda vector: vector.double(),
        lambda vector: vector.half(),
        lambda vector: vector.long(),
        lambda vector: vector > 0,
        lambda vector: vector.to(torch.complex64),
        lambda vector: vector[:-1].clone(),
        lambda vector: vector[:0].clone(),
        lambda vector: torch.cat([vector, vector[:8]]),
        lambda vector: vector[None],
        lambda vector: torch.tensor(1.0),
    ],
    ids=["double", "half", "whole", "truth", "complex", "short", "empty", "long", "matrix", "number"],
)
def test_arrays_that_do_not_fit_end_in_one_line(model, change, tmp_path):
    arrays, about = model
    for name in arrays:
        path = written(
            tmp_path / "arrays.safetensors", arrays | {name: change(arrays[name])}, json.dumps(about)
        )
        with pytest.raises(fedhassle.UserError, match=r"arrays\.safetensors: its arrays do not fit") as found:
            fedhassle.load(path)
        assert "\n" not in str(found.value)


def test_an_array_that_lacks_ends_in_one_line(model, tmp_path):
    """Without w_S_before and w_U_before the method would predict with w_S and w_U."""
    arrays, about = model
    for lacking in ("w_S", "w_U", "r_SU", "r_US"):
        left = {name: array for name, array in arrays.items() if name != lacking}
        path = written(tmp_path / "lacking.safetensors", left, json.dumps(about))
        with pytest.raises(fedhassle.UserError, match=r"lacking\.safetensors: its arrays do not fit"):
            fedhassle.load(path)


def test_nothing_is_allocated_that_the_weights_cannot_fill(model, tmp_path):
    """The hidden layer of LeNet on images of 4096×4096: 16·1022² inputs for each of 120 units."""
    arrays, about = model
    large = about | {"shape": [1, 4096, 4096]}
    least = 16 * 1022**2 * 120
    with pytest.raises(fedhassle.UserError, match="its network needs") as found:
        fedhassle.load(written(tmp_path / "large.safetensors", arrays, json.dumps(large)))
    needed, there = (int(word.replace(",", "")) for word in str(found.value).split() if word[0].isdigit())
    assert least < needed < 1.001 * least and there == sum(array.numel() for array in arrays.values())
    with pytest.raises(fedhassle.UserError, match="less than or equal to 4096, got 1000000000"):
        fedhassle.load(
            written(tmp_path / "huge.safetensors", arrays, json.dumps(about | {"shape": [1, 10**9, 12]}))
        )


def test_the_line_says_which_entry_is_wrong(model, tmp_path):
    arrays, about = model
    for at, value, line in [
        (("shape",), DROPPED, "shape: Field required"),
        (("std", 0), 0.0, "std.0: Input should be greater than 0, got 0.0"),
        (("mean",), [0.5] * 3, r"mean and std need one number per channel \(1\)"),
        (("format",), 2, "format: .*it has format 2, which needs a newer fedhassle"),
        (("format",), 0, "format: .*expected format 1, got 0"),
        (("format",), DROPPED, "format: Field required"),
        (("validation",), {"EM": "high"}, "validation.EM: Input should be a valid number"),
        (("round",), "last", "round: Input should be a valid integer"),
        (("method", "lr"), "fast", "lr: Input should be a valid number, got 'fast'"),
        (("method", "lr"), 1e39, r"lr must be at most 3.4e\+38"),
        (("method", "unheard_of"), 1, "unheard_of: Extra inputs are not permitted, got 1"),
        (("class_names", 0), "cat\x1b[2J", r"class_names.0: .*'cat\\x1b\[2J' cannot name a class"),
        (("class_names", 1), "cat\u202e", r"class_names.1: .*'cat\\u202e' cannot name a class"),
        (("net",), "lenet5", "needs the network 'lenet5'"),
    ]:
        path = written(tmp_path / "wrong.safetensors", arrays, json.dumps(changed(about, at, value)))
        with pytest.raises(fedhassle.UserError, match=rf"wrong\.safetensors.*{line}"):
            fedhassle.load(path)


def test_the_command_answers_with_one_line(model, tmp_path):
    arrays, about = model
    path = written(tmp_path / "bad.safetensors", arrays, json.dumps(about | {"mean": None}))
    for command in (["predict", path, "x.png"], ["evaluate", path, "x.npz"], ["export", path, "--onnx"]):
        code, out, err = call(*command)
        assert code == 2 and out == "" and err.count("\n") == 1 and "mean: Input should be" in err
