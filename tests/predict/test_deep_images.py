"""A model of deep greyscale: training, prediction, evaluation and ONNX see the same pixels."""

import csv
import json

import numpy as np
import pytest
from dicom_files import write
from PIL import Image
from small import call

import fedhassle

SIDE = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 12 bits in 16-bit TIFF files of two sites, and their folder."""
    folder, rng = tmp_path_factory.mktemp("deep"), np.random.default_rng(0)
    for name in ("north", "south"):
        (folder / "sites" / name).mkdir(parents=True)
        rows = []
        for k in range(30):
            values = np.clip(rng.normal(1200 + 1200 * (k % 2), 700, (SIDE, SIDE)), 0, 4095)
            Image.fromarray(values.astype(np.uint16)).save(folder / "sites" / name / f"{k:02}.tif")
            rows.append((f"{k:02}.tif", "ab"[k % 2], k // 3))
        with (folder / "sites" / name / "labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "label", "patient"), *rows])
    words = (
        "data.holdout=0.2",
        "data.patients=column",
        "rounds=2",
        "clients_per_round=2",
        "method.epochs=1",
        "threads=1",
        "device=cpu",
    )
    more = ("method=fedavg", "net=lenet", 'data.intensities="12 bits"', "method.batch=8")
    code, _, err = call("run", f"data={folder / 'sites'}", *words, *more, "--out", folder / "run")
    assert code == 0, err
    return folder


def lines(out):
    return list(csv.DictReader(out.splitlines()))


def test_prediction_evaluation_and_onnx_use_the_rule_of_the_training(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert call("export", trained / "run", tmp_path / "x.onnx", "--onnx")[0] == 0
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert about["intensities"] == "12 bits" and json.loads(about["class_names"]) == ["a", "b"]
    files = sorted((trained / "sites" / "north").glob("*.tif"))
    values = np.stack([np.asarray(Image.open(file)) for file in files])
    levels = (values // 16).astype(np.uint8)[..., None]  # by hand: the upper 8 of 12 bits
    probabilities, _ = session.run(["probabilities", "logits"], {"images": levels})
    code, out, err = call("predict", trained / "run", *files, "--probabilities")
    assert code == 0 and "12 bits: upper 8 kept: 30 images" in err
    found = np.array([[float(line["p(a)"]), float(line["p(b)"])] for line in lines(out)])
    np.testing.assert_allclose(found, probabilities, atol=1e-5)
    assert np.ptp(found[:, 0]) > 1e-4  # it does not predict the same for all
    np.testing.assert_allclose(
        fedhassle.load(trained / "run").predict(levels).probabilities, probabilities, atol=1e-5
    )
    words = ("evaluate", trained / "run", trained / "sites" / "north", "--json", tmp_path / "x.json")
    assert call(*words)[0] == 0
    right = np.mean(probabilities.argmax(1) == np.arange(30) % 2)
    made = json.loads((tmp_path / "x.json").read_text())["predictions"]["model"]
    assert made["accuracy"] == pytest.approx(right)


def test_the_card_counts_patients_and_draws_no_split(trained):
    """A fifth of the twenty patients is held out; the sites are the clients, whatever `split` says."""
    card = (trained / "run" / "model.md").read_text("utf-8")
    assert "; 48 images with labels, 0 without, of 16 patients |" in card
    assert "On 20% of the patients of sites/, which took no part" in card
    assert "| split | none: each site has its own images |" in card


def test_a_dicom_file_with_the_same_values_gets_the_same_prediction(trained, tmp_path):
    file = trained / "sites" / "south" / "07.tif"
    write(tmp_path / "x.dcm", np.asarray(Image.open(file)), bits=12)
    code, out, _ = call("predict", trained / "run", file, tmp_path / "x.dcm")
    one, other = lines(out)
    assert code == 0 and one["probability"] == other["probability"] and one["class"] == other["class"]
    assert "12 bits" in (trained / "run" / "model.md").read_text()


def test_files_that_do_not_fit_the_rule_are_named_and_get_no_class(trained, tmp_path):
    rng = np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 2**16, (SIDE, SIDE), dtype=np.uint16)).save(tmp_path / "deeper.tif")
    code, out, err = call("predict", trained / "run", tmp_path / "deeper.tif", trained / "sites/north/00.tif")
    assert code == 0 and [bool(line["class"]) for line in lines(out)] == [False, True]
    assert "many above the agreed 12 bits (0 … 4095)" in err
