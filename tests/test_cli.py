"""The command line as a user meets it: what it prints, what it leaves behind, how it fails."""

import contextlib
import hashlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open

import fedhassle
from fedhassle.checkpoints import load_checkpoint
from fedhassle.cli import app, asked, guarded

ROOT = Path(fedhassle.__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
LIMIT = 120  # seconds after which a process counts as hung


def call(*words):
    """Exit code, output and error output of a command, as the console script gives them."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = guarded(lambda: app([str(word) for word in words]))
        except SystemExit as exit_:
            code = exit_.code or 0
    return code, out.getvalue(), err.getvalue()


def environment(**changes):
    """The environment of a process that runs this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **changes}


def process(*words, **changes):
    """The same in a process of its own."""
    command = [sys.executable, "-m", "fedhassle", *map(str, words)]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, timeout=LIMIT, check=False
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A file of 240 small images of four classes."""
    made, path = small.dataset(train=240), tmp_path_factory.mktemp("images") / "small.npz"
    np.savez(path, x_train=made.x_train, y_train=made.y_train, x_test=made.x_test, y_test=made.y_test)
    return path


@pytest.fixture(scope="module")
def words(images):
    """Settings of a run that takes a fraction of a second."""
    return [
        f"data={images}",
        *("rounds=4", "clients_per_round=4", "threads=1", "device=cpu", "split.clients=6"),
        "split.labels={full=1,partial=2,unlabelled=3,share=0.3}",
        *("method.epochs=1", "method.batch=16", "method.residual_steps=2"),
    ]


@pytest.fixture(scope="module")
def without_residuals(words):
    """The same settings for methods that have no residuals."""
    return [word for word in words if "residual" not in word]


@pytest.fixture(scope="module")
def finished(words, tmp_path_factory):
    """The folder of a finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "hassle"
    code, out, err = call("run", *words, "--out", folder)
    assert (code, err) == (0, "")
    return folder, out


def strict(text):
    """JSON as the standard has it: without NaN and infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics_of(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def but_seconds(metrics):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics]


# A run


def test_a_run_prints_plain_lines_then_a_table_and_its_files(finished):
    folder, out = finished
    assert "\x1b" not in out and "\r" not in out  # no terminal
    lines = out.splitlines()
    assert lines[0].startswith("hassle on small.npz: 6 clients, 4 a round, 4 rounds, on cpu")
    assert str(folder) in lines[0]
    rounds = [line for line in lines if line.startswith("round ")]
    for line, metrics in zip(rounds, metrics_of(folder), strict=True):
        assert line.startswith(f"round {metrics['round']}/4  ")
        assert all(f"{name} {100 * share:.1f}%" in line for name, share in metrics["accuracy"].items())
        assert "full" in line and "partial" in line and "unlabelled" in line
    scores = strict((folder / "summary.json").read_text("utf-8"))["accuracy"]
    for name in ("SM", "UM", "EM"):
        (row,) = [line for line in lines if line.startswith(f"│ {name}  ")]
        shown = [f"{100 * scores[name][key]:.2f} %" for key in ("mean_of_last", "last", "best")]
        assert [cell.strip() for cell in row.strip("│").split("│")][1:] == shown
    for file in ("model.safetensors", "curves.png", "summary.json"):
        assert any(line.endswith(f" {folder / file}") for line in lines)


def test_a_run_leaves_these_files(finished):
    folder, _ = finished
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "split.npz", "metrics.jsonl", "summary.json", "curves.png"),
        *("model.safetensors", "checkpoints", "log.txt"),
    }
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "round-000002.safetensors",
        "round-000004.safetensors",
    }
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    with Image.open(folder / "curves.png") as picture:
        assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(1 << 20)) > 10


def test_config_holds_every_setting_as_resolved(finished, images):
    config = tomllib.loads((finished[0] / "config.toml").read_text("utf-8"))
    assert (config["rounds"], config["device"], config["threads"]) == (4, "cpu", 1)
    assert config["data"]["name"] == str(images)
    assert config["split"]["labels"] == {"full": 1, "partial": 2, "unlabelled": 3, "share": 0.3}
    assert (config["method"]["name"], config["method"]["batch"], config["method"]["tau"]) == (
        "hassle",
        16,
        2.0,
    )


def test_the_same_config_gives_the_same_run(finished, tmp_path):
    code, _, err = call("run", finished[0] / "config.toml", "--out", tmp_path / "again")
    assert (code, err) == (0, "")
    assert but_seconds(metrics_of(tmp_path / "again")) == but_seconds(metrics_of(finished[0]))


def test_the_split_is_saved_with_the_hash_in_the_summary(finished, images):
    folder, _ = finished
    with np.load(folder / "split.npz", allow_pickle=False) as file:
        saved = dict(file)
    digest = hashlib.sha256()
    for part in ("labelled", "unlabelled"):
        for name in (f"{part}_rows", f"{part}_offsets"):
            digest.update(np.int64(saved[name].size).tobytes() + saved[name].astype("<i8").tobytes())
    summary = strict((folder / "summary.json").read_text("utf-8"))
    assert summary["split_hash"] == str(saved["hash"]) == digest.hexdigest()
    rows = np.concatenate([saved["labelled_rows"], saved["unlabelled_rows"]])
    assert len(saved["labelled_offsets"]) == 7 and sorted(rows) == list(range(240))
    assert len(saved["labelled_rows"]) == 72  # 30 % of 240


def test_metrics_have_a_line_for_each_evaluated_round(finished):
    lines = metrics_of(finished[0])
    assert [line["round"] for line in lines] == [2, 4]
    for line in lines:
        assert set(line["accuracy"]) == {"SM", "UM", "EM", "w_S", "w_U"}
        assert all(0 <= share <= 1 and (40 * share) % 1 == 0 for share in line["accuracy"].values())
        assert set(line["loss"]) == {"w_S", "w_U", "r_US", "r_SU"}
        assert all(value > 0 for value in line["loss"].values())
        assert 0 <= line["pseudo_label_accuracy"] <= 1
        assert sum(line["clients"].values()) == 8  # 4 a round in 2 rounds
        assert line["seconds"] > 0
        for kind in ("full", "partial", "unlabelled"):
            both = line["bytes_up"][kind], line["bytes_down"][kind]
            assert all(n > 0 for n in both) if line["clients"][kind] else both == (0, 0)


@pytest.mark.parametrize(("every", "rounds"), [(1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_the_last_round_is_always_evaluated(every, rounds, words, tmp_path):
    assert call("run", *words, f"evaluate_every={every}", "--out", tmp_path / "run")[0] == 0
    assert [line["round"] for line in metrics_of(tmp_path / "run")] == rounds


def test_a_summary_is_a_whole_result(finished, words):
    folder, _ = finished
    summary, lines = strict((folder / "summary.json").read_text("utf-8")), metrics_of(folder)
    assert summary["history"] == lines
    assert (summary["method"], summary["data"], summary["seed"]) == ("hassle", "small.npz", 0)
    assert (summary["rounds"], summary["headline"]) == (4, "EM")
    assert summary["settings"] == tomllib.loads((folder / "config.toml").read_text("utf-8"))
    assert len(summary["settings_hash"]) >= 16
    assert (
        summary["versions"]["torch"] == torch.__version__ and summary["versions"]["numpy"] == np.__version__
    )
    assert summary["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert summary["hardware"]["device"] == "cpu" and summary["hardware"]["threads"] == 1
    assert summary["hardware"]["cores"] == os.cpu_count()
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in lines), abs=0.06)
    for name, score in summary["accuracy"].items():
        curve = [line["accuracy"][name] for line in lines]
        assert score == {
            "last": curve[-1],
            "best": max(curve),
            "mean_of_last": pytest.approx(sum(curve) / len(curve)),
        }
    assert (folder / "summary.json").stat().st_size < 10_000


def test_the_mean_is_of_the_last_ten(words, tmp_path):
    assert call("run", *words, "rounds=13", "evaluate_every=1", "--out", tmp_path / "run")[0] == 0
    summary = strict((tmp_path / "run" / "summary.json").read_text("utf-8"))
    curve = [line["accuracy"]["EM"] for line in metrics_of(tmp_path / "run")]
    assert len(curve) == 13
    assert summary["accuracy"]["EM"]["mean_of_last"] == pytest.approx(sum(curve[3:]) / 10)


def lenet(vector, x, width, classes=small.CLASSES):
    """LeNet of a flat vector: kernels (out, height, width, in), then the bias, layer by layer."""
    c1, c2, d1, d2 = (-(-n // width) for n in (6, 16, 120, 84))
    flat = c2 * ((x.shape[2] // 2 - 4) // 2) * ((x.shape[3] // 2 - 4) // 2)
    shapes = [(c1, 5, 5, 1), (c1,), (c2, 5, 5, c1), (c2,), (d1, flat), (d1,), (d2, d1), (d2,)]
    shapes += [(classes, d2), (classes,)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    assert sum(sizes) == vector.numel()
    p = [part.reshape(shape) for part, shape in zip(vector.double().split(sizes), shapes, strict=True)]
    x = F.max_pool2d(F.conv2d(x, p[0].permute(0, 3, 1, 2), p[1], padding=2).relu(), 2)
    x = F.max_pool2d(F.conv2d(x, p[2].permute(0, 3, 1, 2), p[3]).relu(), 2).flatten(1)
    return F.linear(F.linear(F.linear(x, p[4], p[5]).relu(), p[6], p[7]).relu(), p[8], p[9])


def test_the_model_predicts_what_the_evaluation_said(finished, images):
    """SM, UM and EM by hand in float64 from the arrays in the file, and through `fedhassle.load`."""
    folder, _ = finished
    with np.load(images) as file:
        x_train, x_test, y = file["x_train"] / 255, file["x_test"], file["y_test"]
    x = torch.from_numpy((x_test / 255 - x_train.mean()) / x_train.std()).permute(
        0, 3, 1, 2
    )  # (40, 1, 12, 12)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
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


def test_loading_a_model_imports_nothing_that_it_names(without_residuals, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_loaded.py").write_text(textwrap.dedent(OWN))
    folder = tmp_path / "run"
    assert call("run", *without_residuals, "method=own_loaded:Mine", "--out", folder)[0] == 0
    del sys.modules["own_loaded"]
    with pytest.raises(fedhassle.UserError, match=r"own_loaded:Mine.*allow_import=True"):
        fedhassle.load(folder / "model.safetensors")
    assert "own_loaded" not in sys.modules
    model = fedhassle.load(folder / "model.safetensors", allow_import=True)
    assert sys.modules.pop("own_loaded") and type(model.method).__name__ == "Mine"


CHECKPOINT = pytest.param("checkpoints/round-000004.safetensors")


@pytest.mark.parametrize("file", [CHECKPOINT, "curves.png", "nothere", "."])
def test_loading_anything_else_is_a_user_error(finished, file):
    with pytest.raises(fedhassle.UserError, match=Path(file).name or str(finished[0])):
        fedhassle.load(finished[0] / file)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_baselines_run_and_count_their_bytes(method, without_residuals, tmp_path):
    folder = tmp_path / "run"
    code, out, _ = call("run", *without_residuals, f"method={method}", "--out", folder)
    assert code == 0 and out.startswith(f"{method} on small.npz")
    # LeNet on 12×12 grey images with 4 classes: 16 maps of 1×1 pixel reach the first linear layer.
    weights = 6 * 26 + 16 * (6 * 25 + 1) + 120 * 17 + 84 * 121 + 4 * 85
    for line in metrics_of(folder):
        assert set(line["accuracy"]) == {"model"} and set(line["loss"]) == {"w"}
        assert line["pseudo_label_accuracy"] is None  # none is given
        expected = {kind: 4 * weights * line["clients"][kind] for kind in ("full", "partial")}
        assert line["bytes_up"] == line["bytes_down"] == {**expected, "unlabelled": 0}


def test_what_is_unknown_is_null(without_residuals, tmp_path):
    folder = tmp_path / "run"
    assert call("run", *without_residuals, "method=fedavg", "--out", folder)[0] == 0
    assert '"pseudo_label_accuracy": null' in (folder / "metrics.jsonl").read_text("utf-8")


def test_python_gives_the_same_as_the_command(finished, words, tmp_path, capsys):
    settings = dict(word.split("=", 1) for word in words)
    for key, value in settings.items():
        settings[key] = int(value) if value.isdecimal() else value
    settings["split.labels"] = {"full": 1, "partial": 2, "unlabelled": 3, "share": 0.3}
    result = fedhassle.run(settings=settings, out=tmp_path / "run", quiet=True)
    assert capsys.readouterr() == ("", "")
    assert but_seconds(result.summary["history"]) == but_seconds(metrics_of(finished[0]))
    assert result.accuracy["EM"]["last"] == metrics_of(finished[0])[-1]["accuracy"]["EM"]
    assert result.model.predict(np.zeros((1, 12, 12), np.uint8)).probabilities.shape == (1, 4)


def test_without_out_a_run_gets_a_folder_of_its_own(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert call("run", *words, "rounds=1")[0] == 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2 and all(folder.name.startswith("hassle-small-") for folder in folders)
    assert all((folder / "summary.json").exists() for folder in folders)


def test_an_empty_folder_may_be_the_runs(words, tmp_path):
    assert call("run", *words, "rounds=1", "--out", tmp_path)[0] == 0
    assert (tmp_path / "summary.json").exists()


# The split


def test_split_counts_what_the_run_holds(words, images, tmp_path):
    """The JSON against the rows in the saved file and the labels of the images."""
    picture, save = tmp_path / "dots.png", tmp_path / "split.npz"
    code, out, _ = call("split", *words, "--json", "--picture", picture, "--save", save)
    assert code == 0 and picture.read_bytes().startswith(PNG)
    found = strict(out)
    with np.load(save, allow_pickle=False) as file, np.load(images) as data:
        saved, y = dict(file), data["y_train"]
    assert found["hash"] == str(saved["hash"])
    kinds = ["full", "partial", "partial", "unlabelled", "unlabelled", "unlabelled"]
    assert [client["kind"] for client in found["clients"]] == kinds
    for part in ("labelled", "unlabelled"):
        rows = np.split(saved[f"{part}_rows"], saved[f"{part}_offsets"][1:-1])
        for client, held in zip(found["clients"], rows, strict=True):
            counts = np.bincount(y[held], minlength=4)
            shares = counts[counts > 0] / max(1, counts.sum())
            assert client[part] == len(held) and client[f"{part}_counts"] == counts.tolist()
            effective = np.prod(shares**-shares) if len(held) else 0
            assert client[f"effective_{part}"] == pytest.approx(effective)


def test_split_prints_a_table_and_draws_beside_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("split", *words)
    assert code == 0 and (tmp_path / "split.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["split.png"]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "│" in line]
    assert [row[0] for row in rows] == [*(f"client {k}" for k in range(1, 7)), "all"]
    assert [row[2:4] for row in rows] == [
        *(["40", "0"], ["16", "24"], ["16", "24"], ["0", "40"], ["0", "40"], ["0", "40"]),
        ["72", "168"],
    ]


def test_the_table_of_a_split_is_not_cut(words, tmp_path):
    """On the 80 columns that a pipe or a small terminal has."""
    _, out, _ = call("split", *words, "--picture", tmp_path / "x.svg")
    assert "…" not in out and out.count("unlabelled") >= 3


def test_a_split_is_drawn_as_svg_too(words, tmp_path):
    assert call("split", *words, "--picture", tmp_path / "dots.svg")[0] == 0
    assert "<svg" in (tmp_path / "dots.svg").read_text("utf-8")


def test_a_split_given_by_file_is_the_split(words, finished, tmp_path):
    save, out = tmp_path / "other.npz", tmp_path / "run"
    call("split", *words, "split.seed=77", "--save", save, "--picture", tmp_path / "x.png")
    other = [word for word in words if not word.startswith("split.")]
    assert call("run", *other, "rounds=1", f"split.file={save}", "--out", out)[0] == 0
    with np.load(save, allow_pickle=False) as file:
        saved = str(file["hash"])
    hashes = [strict((f / "summary.json").read_text("utf-8"))["split_hash"] for f in (out, finished[0])]
    assert hashes[0] == saved != hashes[1]


def test_the_split_of_a_run_can_be_given_to_the_next(words, finished, tmp_path):
    other = [word for word in words if not word.startswith("split.")]
    given = f"split.file={finished[0] / 'split.npz'}"
    assert call("run", *other, given, "--out", tmp_path / "run")[0] == 0
    assert but_seconds(metrics_of(tmp_path / "run")) == but_seconds(metrics_of(finished[0]))


# Lists and help


def test_methods_are_listed_one_a_line():
    code, out, err = call("methods")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["fedavg", "fedprox", "hassle"]
    assert all(len(line.split()) > 4 for line in out.splitlines())


def test_data_sets_are_listed_one_a_line_with_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "cifar10.npz").touch()
    code, out, _ = call("data", "list", "--data-dir", tmp_path)
    first = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and {"fmnist-mini", "fmnist", "cifar10", "cifar100"} <= set(first)
    assert "shipped" in first["fmnist-mini"] and "12,000 + 2,000" in first["fmnist-mini"]
    assert " here " in first["cifar10"] and "to download" in first["cifar100"]
    monkeypatch.setenv("FEDHASSLE_DATA", str(tmp_path))
    assert call("data", "list")[1] == out


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        ((), ("run", "resume", "split", "compare", "methods", "data")),
        (("run",), ("CONFIG", "KEY=VALUE", "--out", "--data-dir", "--device")),
        (("resume",), ("FOLDER",)),
        (("split",), ("--json", "--picture", "--save", "--data-dir")),
        (("compare",), ("FOLDERS", "--picture")),
        (("methods",), ("one line each",)),
        (("data",), ("list",)),
        (("data", "list"), ("--data-dir",)),
    ],
)
def test_help(command, mentioned):
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "") and all(word in out for word in mentioned)


def test_help_does_not_wait_for_pytorch():
    code = "import sys, fedhassle.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=LIMIT, check=False)
    assert done.returncode == 0


# What cannot work: exit code 2, a message, nothing left behind


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("round=5", "did you mean 'rounds'?"),
        ("rounds=0", "rounds"),
        ("rounds=x", "got 'x'"),
        ("method.residual_stepz=1", "did you mean 'method.residual_steps'?"),
        ("method=hasle", "did you mean 'hassle'?"),
        ("method=no_such_module:X", "cannot be imported"),
        ("net=lenett", "did you mean 'lenet'?"),
        pytest.param("net=builtins:abs", "builtins:abs"),
        ("data=nothere.npz", "nothere.npz"),
        ("data=cifar", "did you mean 'cifar10'?"),
        ("data.std=[-1]", "data.std must be positive"),
        ("split.labels=10%", "layout of 20 clients"),
        ("split.labels={partial=6,share=2}", "share"),
        ("split.clients=1000", "1000 clients"),
        ("split.file=nothere", "nothere; name a file"),
        ("clients_per_round=7", "clients_per_round=7 is more than the 6 clients"),
        ("device=tpu", "'auto', 'cpu' or 'cuda'"),
        ("--device=tpu", "'auto', 'cpu' or 'cuda'"),
        ("method.tau=0", "tau must be positive"),
        ("word", "KEY=VALUE"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_a_bad_setting_ends_with_code_2_and_a_message(wrong, message, words, tmp_path):
    code, out, err = call("run", *words, wrong, "--out", tmp_path / "run")
    assert code == 2 and message in err and out == "" and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_bad_setting_leaves_nothing_in_the_working_folder(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("run", *words, "round=5")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_method_leads_to_no_folder_elsewhere(words, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call("run", *words, "method=../../outside/x")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_very_long_name_is_a_user_error(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", *words, "method=" + "a" * 300)
    assert code == 2 and "unknown method" in err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("quik", "did you mean 'quick'?"),
        ("nothere.toml", "nothere.toml cannot be read"),
        ("bad.toml", "bad.toml is not valid TOML"),
        ("images.npz", "unknown preset"),
    ],
)
@pytest.mark.parametrize("command", ["run", "split"])
def test_a_bad_configuration_ends_with_code_2(command, config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("rounds = = 3")
    code, _, err = call(command, config)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "zip"]
)
def test_a_bad_file_of_images_ends_with_code_2(content, words, tmp_path):
    bad = tmp_path / "bad.npz"
    bad.write_bytes(content)
    code, _, err = call("run", *words, f"data={bad}", "--out", tmp_path / "run")
    assert code == 2 and str(bad) in err and not (tmp_path / "run").exists()


def test_images_too_small_for_the_network_end_with_code_2(words, tmp_path):
    tiny = tmp_path / "tiny.npz"
    x, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    np.savez(tiny, x_train=x, y_train=y, x_test=x, y_test=y)
    code, _, err = call("run", *words, f"data={tiny}", "--out", tmp_path / "run")
    assert code == 2 and "12×12" in err and "net=resnet8" in err


def test_a_folder_that_holds_a_run_is_not_touched(words, finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, err = call("run", *words, "seed=9", "--out", folder)
    assert code == 2 and f"fedhassle resume {folder}" in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_holds_something_else_is_not_touched(words, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, err = call("run", *words, "--out", tmp_path)
    assert code == 2 and "choose another --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "folder",
    ["file", pytest.param("file/under"), pytest.param("file/under/deep")],
)
def test_a_folder_that_cannot_be_made_ends_with_code_2(folder, words, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = call("run", *words, "--out", tmp_path / folder)
    assert code == 2 and str(tmp_path / folder) in err


@pytest.mark.parametrize("option", ["--picture", "--save"])
@pytest.mark.parametrize("name", ["file/under.png", "folder.png"])
def test_a_picture_or_split_that_cannot_be_written_ends_with_code_2(
    option, name, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder.png").mkdir()
    code, _, err = call("split", *words, option, name)
    assert code == 2 and Path(name).name in err


def test_a_picture_of_another_kind_is_refused(words, tmp_path):
    code, _, err = call("split", *words, "--picture", tmp_path / "x.gif")
    assert code == 2 and ".png or .svg" in err


@pytest.mark.parametrize("folder", ["nothere", "empty", "file"])
def test_resuming_what_is_no_run_ends_with_code_2(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    code, _, err = call("resume", tmp_path / folder)
    assert code == 2 and "holds no run" in err


def test_a_data_folder_may_have_any_name():
    for name in ("plain", "with space", 'quo"te', "back\\slash", "émoji 😀"):
        assert asked(["paper"], Path(name), None).layers[-1] == {"data": {"folder": str(Path.cwd() / name)}}


def test_no_command_and_unknown_commands_end_with_code_2():
    assert call()[0] == 2
    code, _, err = call("trian")
    assert code == 2 and "trian" in err


# Divergence


def test_a_run_that_explodes_ends_with_code_1_and_a_clear_message(words, tmp_path):
    folder = tmp_path / "run"
    code, out, err = call("run", *words, "method.lr=1e30", "method.clip=0", "--out", folder)
    assert code == 1 and "Traceback" not in err + out
    assert "NaN or infinite" in err and "method.lr" in err and "client" in err
    assert not (folder / "summary.json").exists() and not (folder / "model.safetensors").exists()


EXPLODES = """
    from dataclasses import dataclass
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Explodes(FedAvg):
        "FedAvg that breaks down in its third round."
        healed: bool = False

        def phases(self, client, t):
            found = super().phases(client, t)
            return found if self.healed or t < 3 else tuple(map(self.broken, found))

        def broken(self, phase):
            (descent,) = phase.descents
            nan = lambda *args: descent.loss(*args) * float("nan")
            return Phase(phase.name, phase.streams, (type(descent)("w", nan, descent.sgd),), phase.epochs)
"""


def test_the_last_good_checkpoint_stays_after_an_explosion(without_residuals, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_explodes.py").write_text(textwrap.dedent(EXPLODES))
    mine, folder = [*without_residuals, "method=own_explodes:Explodes", "evaluate_every=1"], tmp_path / "run"
    code, _, err = call("run", *mine, "--out", folder)
    assert code == 1 and "round 3" in err
    kept = load_checkpoint(folder / "checkpoints", torch.device("cpu"))
    assert kept.t == 2 and all(torch.isfinite(array).all() for array in kept.state.values())
    assert [line["round"] for line in metrics_of(folder)] == [1, 2]
    assert call("resume", folder)[0] == 1  # again, from the same place
    config = folder / "config.toml"
    config.write_text(config.read_text("utf-8").replace("healed = false", "healed = true"))
    assert call("resume", folder)[0] == 0
    assert call("run", *mine, "method.healed=true", "--out", tmp_path / "whole")[0] == 0
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(tmp_path / "whole"))


# Ctrl-C


def test_an_interrupt_leaves_a_run_that_can_go_on_and_says_how(words, finished, tmp_path, monkeypatch):
    folder, calls = tmp_path / "run", []
    from fedhassle import launch

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return accuracy(*args)

    accuracy = launch.accuracy
    monkeypatch.setattr(launch, "accuracy", interrupted)
    code, out, err = call("run", *words, "--out", folder)
    assert code == 130 and f"fedhassle resume {folder}" in out and "Traceback" not in out + err
    assert [line["round"] for line in metrics_of(folder)] == [2] and not (folder / "summary.json").exists()
    code, out, _ = call("resume", folder)
    assert code == 0 and "round 4/4" in out and "round 2/4" not in out
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(finished[0]))


def wait_for(condition, running):
    """Waits until something is so, as long as a process runs and is not hung."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert running.poll() is None, "the process ended before its time"
        assert time.monotonic() < deadline, "the process hangs"
        time.sleep(0.01)


def test_an_interrupt_from_outside_ends_with_code_130(words, tmp_path):
    folder = tmp_path / "run"
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # tests may ignore it
    code += "; from fedhassle.cli import main; main()"
    command = [sys.executable, "-c", code, "run", *words, "rounds=100000", "--out", str(folder)]
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: any((folder / "checkpoints").glob("round-*")), running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=LIMIT)
    finally:
        running.kill()
    assert running.returncode == 130 and err == b""
    assert f"fedhassle resume {folder}".encode() in out
    assert load_checkpoint(folder / "checkpoints", torch.device("cpu")).t >= 2


# A terminal


def on_a_terminal(command, **changes):
    """Exit code and all output of a command on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm", COLUMNS="150", LINES="40", **changes)
    running = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output, deadline = b"", time.monotonic() + LIMIT
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
                if not chunk:
                    break
                output += chunk
        return running.wait(timeout=LIMIT), output.decode()
    finally:
        running.kill()
        os.close(ours)


def test_a_terminal_shows_the_run_while_it_goes_on(words, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedhassle", "run", *words, "rounds=12", "--out", str(folder)]
    code, output = on_a_terminal(command)
    assert code == 0 and "\x1b[" in output
    shown = output.replace("\x1b", "\n\x1b")
    assert "12/12" in shown and "left" in shown
    last = metrics_of(folder)[-1]["accuracy"]["EM"]
    assert f"EM {100 * last:.1f}%" in shown
    assert all(kind in shown for kind in ("full", "partial", "unlabelled"))
    assert "round 2/12" not in shown  # the plain lines are for pipes
    assert "SM  supervised" in shown and str(folder / "model.safetensors") in shown


def test_a_process_prints_no_traceback_and_ends_with_code_2(tmp_path):
    done = process("run", "data=nothere.npz", "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"fedhassle: ") and b"Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_lists_can_be_printed_where_the_output_is_ascii(tmp_path):
    done = process("methods", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == b"" and b"hassle" in done.stdout


def test_a_method_in_the_working_folder_is_found(without_residuals, tmp_path):
    """The console script does not put the working folder on the path; `main` does."""
    (tmp_path / "own_here.py").write_text(textwrap.dedent(OWN))
    code = "import sys; sys.path.remove(''); from fedhassle.cli import main; main()"
    command = [sys.executable, "-c", code, "run", *without_residuals, "method=own_here:Mine", "--out", "run"]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "run" / "summary.json").exists()
