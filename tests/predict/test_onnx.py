"""ONNX files: their contents, predictions equal to PyTorch's, and errors."""

import json
import shutil
import sys

import numpy as np
import pytest
import small
import torch
from by_hand import lenet
from small import call
from torch import nn

import fedhassle
from fedhassle.architectures import LeNet, ResNet8
from fedhassle.data.views import make_views
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.nets import Net
from fedhassle.predict import onnx as export
from fedhassle.predict.model import TrainedModel
from fedhassle.predict.onnx import export_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def ran(path, images):
    return session(path).run(["probabilities", "logits"], {"images": images})


def drawn(count, shape=(12, 12, 1), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["SM", "UM", "EM"])
def test_the_file_predicts_what_the_arrays_say(mode, finished, images, tmp_path, capfd):
    """LeNet by hand in float64, from uint8 images that the file normalises itself."""
    code, out, err = call("export", finished[0], tmp_path / "x.onnx", "--onnx", "--mode", mode.lower())
    assert code == 0 and err == "" and out.startswith(f"{tmp_path / 'x.onnx'}: {mode}, equal to PyTorch to ")
    assert capfd.readouterr() == ("", "")
    with np.load(images) as file:
        x_train = file["x_train"] / 255
    for count in (1, 5, 33):
        pixels = drawn(count, seed=count)
        x = torch.from_numpy((pixels / 255 - x_train.mean()) / x_train.std()).permute(0, 3, 1, 2)
        state = small.tensors_of(finished[0] / "model.safetensors")
        sm = lenet(state["w_S_before"], x, 1) + lenet(state["r_US"], x, 4)
        um = lenet(state["w_U_before"], x, 1) + lenet(state["r_SU"], x, 4)
        z = {"SM": sm, "UM": um, "EM": (sm + um) / 2}[mode]
        probabilities, logits = ran(tmp_path / "x.onnx", pixels)
        np.testing.assert_allclose(logits, z, atol=1e-4)
        np.testing.assert_allclose(probabilities, z.softmax(1), atol=1e-5)


def test_it_is_one_file_beside_the_model_with_its_metadata(without_residuals, tmp_path):
    folder = tmp_path / "run"
    assert call("run", *without_residuals, "method=fedavg", "rounds=1", "--out", folder)[0] == 0
    before = {path.name for path in folder.iterdir()}
    assert call("export", folder, "--onnx")[0] == 0
    assert {path.name for path in folder.iterdir()} == before | {"model.onnx"}
    made = onnx.load(folder / "model.onnx", load_external_data=False)
    assert not [tensor for tensor in made.graph.initializer if tensor.data_location != 0]
    opened = session(folder / "model.onnx")
    (given,) = opened.get_inputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["N", 12, 12, 1])
    assert [(o.name, o.type, o.shape) for o in opened.get_outputs()] == [
        ("probabilities", "tensor(float)", ["N", 4]),
        ("logits", "tensor(float)", ["N", 4]),
    ]
    words, about = opened.get_modelmeta().custom_metadata_map, fedhassle.load(folder).about
    assert json.loads(words["class_names"]) == ["0", "1", "2", "3"]
    assert json.loads(words["mean"]) == about["mean"] and json.loads(words["std"]) == about["std"]
    assert (words["method"], words["mode"]) == ("fedavg", "model")
    assert "uint8 (N, 12, 12, 1), grey" in words["input"]


def test_what_the_mode_does_not_use_is_left_out(finished, tmp_path):
    """SM is one network and its residual, EM two of each."""
    sizes = {}
    for mode in ("SM", "EM"):
        export_onnx(fedhassle.load(finished[0]), tmp_path / mode, mode)
        made = onnx.load(tmp_path / mode)
        sizes[mode] = sum(int(np.prod(tensor.dims)) for tensor in made.graph.initializer)
    model = fedhassle.load(finished[0]).method
    each = model.net.n_parameters + model.residual_net.n_parameters
    assert each <= sizes["SM"] < 1.02 * each and 2 * each <= sizes["EM"] < 2.04 * each


# Every method and network


def trained(method, channels=1):
    """A model straight from the initial state, with noise so that no statistics are trivial."""
    rng = torch.Generator().manual_seed(0)
    state = {name: v + 0.05 * torch.rand(v.shape, generator=rng) for name, v in method.initial(0).items()}
    views = make_views([0.4] * channels, [0.2] * channels, False, 0, torch.device("cpu"))
    about = {"method": {"name": "x"}, "mean": [0.4] * channels, "std": [0.2] * channels}
    return TrainedModel(method, state, views, tuple("abcd"), about)


def assert_exported(model, path, mode):
    assert export_onnx(model, path, mode) <= 1e-4
    height, width, channels = model.image_size
    for count in (1, 4):
        pixels = drawn(count, (height, width, channels), seed=count)
        expected = model.predict(pixels, mode)
        probabilities, _ = ran(path, pixels)
        np.testing.assert_allclose(probabilities, expected.probabilities, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_exported(name, tmp_path):
    model = trained(METHODS[name](small.net(LeNet)))
    assert_exported(model, tmp_path / "x.onnx", model.method.headline)


@pytest.mark.parametrize("build", [ResNet8, small.ConvNet, small.Linear, small.Normed, small.NoisyNet])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_network_can_be_exported(build, channels, tmp_path):
    method = METHODS["hassle"](small.net(build, channels=channels), residual_width=0.5)
    assert_exported(trained(method, channels), tmp_path / "x.onnx", "EM")


def test_a_network_that_is_not_square(tmp_path):
    method = METHODS["fedavg"](Net(LeNet, (3, 13, 20), 4))
    assert_exported(trained(method, 3), tmp_path / "x.onnx", "model")


# What is refused


class Counting(nn.Module):
    """A network that uses the number of images as a plain number, which becomes a constant in a trace."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        self.output = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.output(x.flatten(1)) + int(x.shape[0])


class Strange(nn.Module):
    """A network with an operation that ONNX does not have."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        self.output = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return torch.special.bessel_j0(self.output(x.flatten(1)))


@pytest.mark.parametrize(
    ("build", "message"), [(Counting, "differs from PyTorch by"), (Strange, "cannot be written as ONNX")]
)
def test_a_network_that_cannot_be_exported_leaves_what_was_there(build, message, tmp_path, capfd):
    path = tmp_path / "x.onnx"
    path.write_text("the old one")
    with pytest.raises(UserError, match=message):
        export_onnx(trained(METHODS["fedavg"](small.net(build))), path, "model")
    assert path.read_text() == "the old one" and [p.name for p in tmp_path.iterdir()] == ["x.onnx"]
    assert capfd.readouterr().err == ""  # on stdout PyTorch prints the graph that it fails on


def test_a_file_with_other_predictions_is_not_written(finished, tmp_path, monkeypatch):
    def spoilt(path, properties, describe=export.describe):
        describe(path, properties)
        made = onnx.load(path)
        weights = max(made.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
        values = onnx.numpy_helper.to_array(weights) * 1.01
        weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
        onnx.save(made, path)

    monkeypatch.setattr(export, "describe", spoilt)
    code, out, err = call("export", finished[0], tmp_path / "x.onnx", "--onnx")
    assert code == 2 and "differs from PyTorch by" in err and "nothing is written" in err and out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_the_extra_it_says_what_to_install(missing, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = call("export", finished[0], tmp_path / "x.onnx", "--onnx")
    assert code == 2 and f"needs {missing}," in err and "pip install 'fedhassle[export]'" in err
    assert not list(tmp_path.iterdir())


def test_a_package_that_fails_without_a_name_says_how(finished, tmp_path, monkeypatch):
    """For example, an extension whose shared library is missing."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "onnxruntime.py").write_text("raise ImportError('libgomp.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    code, _, err = call("export", finished[0], tmp_path / "x.onnx", "--onnx")
    assert code == 2 and "libgomp.so.1: cannot open" in err and "None" not in err
    assert "pip install 'fedhassle[export]'" in err


@pytest.mark.parametrize("name", ["model.safetensors", "model", "summary.json", "."])
def test_only_an_onnx_file_is_overwritten(name, finished, tmp_path):
    copy = shutil.copytree(finished[0], tmp_path / "copy")
    before = (copy / "model.safetensors").read_bytes(), (copy / "summary.json").read_bytes()
    code, out, err = call("export", copy, copy / name, "--onnx")
    assert (code, out) == (2, "") and "does not end in .onnx" in err
    assert ((copy / "model.safetensors").read_bytes(), (copy / "summary.json").read_bytes()) == before
    assert not (copy / "model").exists()


def test_the_format_is_required(finished):
    code, _, err = call("export", finished[0])
    assert code == 2 and f"fedhassle export {finished[0]} --onnx" in err
