"""The model of a run: its predictions by hand, and errors on loading."""

import sys
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from by_hand import lenet
from small import call, metrics_of, tensors_of

import fedhassle
from fedhassle.nets import IMAGES_A_PASS


def test_the_model_predicts_what_the_evaluation_said(finished, images):
    """SM, UM and EM by hand in float64 from the arrays in the file, and through `fedhassle.load`."""
    folder, _ = finished
    with np.load(images) as file:
        x_train, x_test, y = file["x_train"] / 255, file["x_test"], file["y_test"]
    x = torch.from_numpy((x_test / 255 - x_train.mean()) / x_train.std()).permute(
        0, 3, 1, 2
    )  # (40, 1, 12, 12)
    state = tensors_of(folder / "model.safetensors")
    sm = lenet(state["w_S_before"], x, 1) + lenet(state["r_US"], x, 4)
    um = lenet(state["w_U_before"], x, 1) + lenet(state["r_SU"], x, 4)
    z = {"SM": sm, "UM": um, "EM": (sm + um) / 2, "w_S": lenet(state["w_S"], x, 1)}
    z["w_U"] = lenet(state["w_U"], x, 1)
    expected = {name: float((logits.argmax(1).numpy() == y).mean()) for name, logits in z.items()}
    assert metrics_of(folder)[-1]["accuracy"] == expected
    model = fedhassle.load(folder / "model.safetensors")
    assert model.class_names == ("0", "1", "2", "3")
    for name, logits in z.items():
        prediction = model.predict(x_test, mode=name)
        assert (prediction.classes == logits.argmax(1).numpy()).all()
        np.testing.assert_allclose(prediction.probabilities, logits.softmax(1), atol=1e-4)
    assert (model.predict(x_test).classes == z["EM"].argmax(1).numpy()).all()
    assert (model.predict(x_test[..., 0], mode="sm").classes == z["SM"].argmax(1).numpy()).all()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 13, 12, 1), np.uint8),
        np.zeros((2, 12, 12, 3), np.uint8),
        np.zeros((2, 12, 12, 1), np.float32),
        np.zeros((0, 12, 12, 1), np.uint8),
        np.zeros((12, 12), np.uint8),
    ],
)
def test_the_model_refuses_other_images(finished, wrong):
    with pytest.raises(fedhassle.UserError, match=r"expected uint8 images \(N, 12, 12, 1\)"):
        fedhassle.load(finished[0] / "model.safetensors").predict(wrong)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (np.float32, r"\(255 \* images\)\.round\(\)"),
        (np.int64, r"images\.astype\('uint8'\)"),
        (np.bool_, "$"),
    ],
)
def test_numbers_of_another_type_are_refused_with_their_conversion(finished, dtype, advice):
    model = fedhassle.load(finished[0] / "model.safetensors")
    with pytest.raises(fedhassle.UserError, match=r"got \w+ \(2, 12, 12, 1\).*" + advice):
        model.predict(np.zeros((2, 12, 12, 1), dtype))


def test_a_list_of_images_is_refused(finished):
    with pytest.raises(
        fedhassle.UserError, match=r"expected a NumPy array of images, got list: numpy\.stack"
    ):
        fedhassle.load(finished[0] / "model.safetensors").predict([np.zeros((12, 12, 1), np.uint8)])


def test_an_unknown_mode_lists_the_known_ones(finished):
    with pytest.raises(fedhassle.UserError, match="SM, UM, EM"):
        fedhassle.load(finished[0] / "model.safetensors").predict(np.zeros((1, 12, 12), np.uint8), mode="XM")


OWN = """
    from dataclasses import dataclass
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Mine(FedAvg):
        "FedAvg under another name."
"""


def test_loading_a_model_imports_nothing_that_it_names(without_residuals, module, tmp_path):
    module("own_loaded", OWN)
    folder = tmp_path / "run"
    assert call("run", *without_residuals, "method=own_loaded:Mine", "--out", folder)[0] == 0
    del sys.modules["own_loaded"]
    with pytest.raises(fedhassle.UserError, match=r"own_loaded:Mine.*allow_import=True"):
        fedhassle.load(folder / "model.safetensors")
    assert "own_loaded" not in sys.modules
    model = fedhassle.load(folder / "model.safetensors", allow_import=True)
    assert "own_loaded" in sys.modules and type(model.method).__name__ == "Mine"


@pytest.mark.parametrize(
    "file", ["checkpoints/round-000004.safetensors", "curves.png", "nothere", "checkpoints"]
)
def test_loading_anything_else_is_a_user_error(finished, file):
    with pytest.raises(fedhassle.UserError, match=Path(file).name):
        fedhassle.load(finished[0] / file)


def test_a_runs_folder_stands_for_its_model(finished, words, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (3, 12, 12), dtype=np.uint8)
    by_file, by_folder = (fedhassle.load(finished[0] / name).predict(x) for name in ("model.safetensors", ""))
    assert (by_file.probabilities == by_folder.probabilities).all()
    assert (fedhassle.load(finished[0], which="last").predict(x).classes == by_file.classes).all()
    with pytest.raises(fedhassle.UserError, match=r"no best\.safetensors: only the run of a federation"):
        fedhassle.load(finished[0], which="best")
    small.cut(words, tmp_path / "cut", 2)
    with pytest.raises(fedhassle.UserError, match=rf"fedhassle resume {tmp_path / 'cut'}"):
        fedhassle.load(tmp_path / "cut")


def test_an_unfinished_run_names_the_command_that_finishes_it(words, tmp_path):
    """It can be pasted into a shell; a federation's run continues by another command than a simulated one."""
    folder = tmp_path / "two words"
    small.cut(words, folder, 1)
    for command in ("predict", "compare"):
        _, _, err = small.call(command, folder, *(["x.png"] if command == "predict" else []))
        assert f"fedhassle resume '{folder}'" in " ".join(err.split())
    (folder / "audit.jsonl").touch()
    for command in ("predict", "compare"):
        _, _, err = small.call(command, folder, *(["x.png"] if command == "predict" else []))
        assert f"fedhassle federation run FOLDER --out '{folder}'" in " ".join(err.split())
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "audit.jsonl").touch()
    with pytest.raises(fedhassle.UserError, match="fedhassle federation run FOLDER --out"):
        fedhassle.load(tmp_path / "early")


def test_predictions_are_those_of_each_mode(finished, images):
    model = fedhassle.load(finished[0])
    with np.load(images) as file:
        x = file["x_test"]
    found = model.predictions(x)
    assert list(found) == ["SM", "UM", "EM"] == list(model.modes) and model.image_size == (12, 12, 1)
    for name, prediction in found.items():
        alone = model.on("cpu").predict(x, mode=name)
        assert (prediction.classes == alone.classes).all()
        assert (prediction.probabilities == alone.probabilities).all()
        np.testing.assert_allclose(prediction.probabilities.sum(1), 1, atol=1e-12)
    with pytest.raises(fedhassle.UserError, match="auto, cpu or cuda, got 'tpu'"):
        model.on("tpu")


def test_large_images_pass_a_few_at_a_time(finished, monkeypatch):
    model, seen = fedhassle.load(finished[0]), []
    x = np.random.default_rng(0).integers(0, 256, (7, 12, 12), dtype=np.uint8)
    whole = model.predict(x).probabilities
    monkeypatch.setitem(IMAGES_A_PASS, "cpu", 6)
    monkeypatch.setattr("fedhassle.nets.SMALL", 72)  # of 144 pixels: twice as large
    predict = type(model.method).predict

    def watched(self, state, x):
        seen.append(len(x))
        return predict(self, state, x)

    monkeypatch.setattr(type(model.method), "predict", watched)
    np.testing.assert_allclose(model.predict(x).probabilities, whole, atol=1e-6)
    assert seen == [3, 3, 1]


def test_a_model_that_diverged_says_so(finished):
    model = fedhassle.load(finished[0])
    model.state["w_S_before"].fill_(float("nan"))
    with pytest.raises(fedhassle.UserError, match="NaN: its training diverged"):
        model.predict(np.zeros((1, 12, 12), np.uint8))
