"""A run from the command line: its output, its files, and that it can be repeated."""

import hashlib
import os
import shutil
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
import torch
from PIL import Image
from small import PNG, but_seconds, call, metrics_of, summary_of

import fedhassle
from fedhassle import provenance
from fedhassle.files import write_text
from fedhassle.provenance import code
from fedhassle.runs.folder import claim, stored_request
from fedhassle.runs.record import shortened
from fedhassle.settings.request import request


def test_a_run_prints_plain_lines_then_a_table_and_its_files(finished):
    folder, out = finished
    assert "\x1b" not in out and "\r" not in out  # no terminal
    lines = out.splitlines()
    assert lines[0].startswith("hassle on small.npz: 6 clients, 4 per round, 4 rounds, on cpu")
    assert lines[1] == f"files    {folder}"
    rounds = [line for line in lines if line.startswith("round ")]
    for line, metrics in zip(rounds, metrics_of(folder), strict=True):
        assert line.startswith(f"round {metrics['round']}/4  ")
        assert all(f"{name} {100 * share:.1f}%" in line for name, share in metrics["accuracy"].items())
        assert "full" in line and "partial" in line and "unlabelled" in line
    scores = summary_of(folder)["accuracy"]
    for name in ("SM", "UM", "EM"):
        (row,) = [line for line in lines if line.startswith(f"│ {name}  ")]
        shown = [f"{100 * scores[name][key]:.2f} %" for key in ("mean_of_last", "last", "best")]
        assert [cell.strip() for cell in row.strip("│").split("│")][1:] == shown
    for file in ("model.safetensors", "curves.png", "summary.json"):
        assert any(line.endswith(f" {folder / file}") for line in lines)


def test_a_run_writes_these_files(finished):
    folder, _ = finished
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "split.npz", "metrics.jsonl", "summary.json", "curves.png"),
        *("model.safetensors", "model.md", "checkpoints", "log.txt"),
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
    summary = summary_of(folder)
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
        assert 0 <= line["pseudo_label_accuracy"] <= 1 and line["pseudo_label_share"] == 1
        assert list(line["class_accuracy"]) == ["0", "1", "2", "3"]  # of ten test images each
        mean = sum(line["class_accuracy"].values()) / 4
        assert mean == pytest.approx(line["accuracy"]["EM"]) and len({*line["class_accuracy"].values()}) > 1
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
    summary, lines = summary_of(folder), metrics_of(folder)
    for name, share in summary["class_accuracy"].items():
        assert share == pytest.approx(sum(line["class_accuracy"][name] for line in lines) / len(lines))
    assert list(summary["class_accuracy"]) == ["0", "1", "2", "3"]
    assert summary["history"] == [shortened(line) for line in lines]
    assert (summary["method"], summary["data"], summary["seed"]) == ("hassle", "small.npz", 0)
    assert (summary["rounds"], summary["headline"]) == (4, "EM")
    assert summary["settings"] == tomllib.loads((folder / "config.toml").read_text("utf-8"))
    assert len(summary["settings_hash"]) >= 16
    assert (
        summary["versions"]["torch"] == torch.__version__ and summary["versions"]["numpy"] == np.__version__
    )
    assert summary["versions"]["code"] == code()
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


def test_a_summary_holds_the_hash_of_the_code(tmp_path, monkeypatch):
    """It depends only on the names and contents of the package's modules."""
    hashes = []
    for files in ({"a.py": "x", "b.py": "y"}, {"a.py": "xy", "b.py": ""}, {"a.py": "x", "c.py": "y"}):
        home = tmp_path / str(len(hashes))
        for name, text in {**files, "a.txt": str(len(hashes))}.items():
            write_text(home / name, text)
        monkeypatch.setattr(provenance, "__file__", str(home / "provenance.py"))
        hashes.append(code.__wrapped__())
    assert len(set(hashes)) == 3
    monkeypatch.setattr(
        provenance, "__file__", str(shutil.copytree(tmp_path / "0", tmp_path / "again") / "a.py")
    )
    assert code.__wrapped__() == hashes[0]


def test_the_mean_is_of_the_last_ten(words, tmp_path):
    assert call("run", *words, "rounds=13", "evaluate_every=1", "--out", tmp_path / "run")[0] == 0
    summary = summary_of(tmp_path / "run")
    curve = [line["accuracy"]["EM"] for line in metrics_of(tmp_path / "run")]
    assert len(curve) == 13
    assert summary["accuracy"]["EM"]["mean_of_last"] == pytest.approx(sum(curve[3:]) / 10)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_baselines_run_and_count_their_bytes(method, without_residuals, tmp_path):
    folder = tmp_path / "run"
    code, out, _ = call("run", *without_residuals, f"method={method}", "--out", folder)
    assert code == 0 and out.startswith(f"{method} on small.npz")
    # LeNet on 12×12 grey images with 4 classes: 16 maps of 1×1 pixel reach the first linear layer. The
    # first kernel (150) and three biases (6, 84 and 4) are filled up to multiples of eight.
    weights = (152 + 8) + 16 * (6 * 25 + 1) + 120 * 17 + (84 * 120 + 88) + (4 * 84 + 8)
    for line in metrics_of(folder):
        assert set(line["accuracy"]) == {"model"} and set(line["loss"]) == {"w"}
        assert line["pseudo_label_accuracy"] is line["pseudo_label_share"] is None  # FedAvg has none
        expected = {kind: 4 * weights * line["clients"][kind] for kind in ("full", "partial")}
        assert line["bytes_up"] == line["bytes_down"] == {**expected, "unlabelled": 0}


def test_python_returns_the_same_as_the_command(finished, words, tmp_path, capsys):
    settings = dict(word.split("=", 1) for word in words)
    for key, value in settings.items():
        settings[key] = int(value) if value.isdecimal() else value
    settings["split.labels"] = {"full": 1, "partial": 2, "unlabelled": 3, "share": 0.3}
    result = fedhassle.run(settings=settings, out=tmp_path / "run", quiet=True)
    assert capsys.readouterr() == ("", "")
    expected = map(shortened, metrics_of(finished[0]))
    assert but_seconds(result.summary["history"]) == but_seconds(expected)
    assert result.accuracy["EM"]["last"] == metrics_of(finished[0])[-1]["accuracy"]["EM"]
    assert result.model.predict(np.zeros((1, 12, 12), np.uint8)).probabilities.shape == (1, 4)


def test_without_out_a_run_creates_its_own_folder(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert call("run", *words, "rounds=1")[0] == 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2 and all(folder.name.startswith("hassle-small-") for folder in folders)
    assert all((folder / "summary.json").exists() for folder in folders)


def test_runs_that_start_in_the_same_second_have_different_folders(tmp_path, monkeypatch):
    """Each keeps its own settings."""
    monkeypatch.chdir(tmp_path)
    every, together = range(8), threading.Barrier(8)

    def start(seed):
        together.wait()
        return claim(request("quick", [f"seed={seed}"]), None)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(start, every))
    assert len({folder.path for folder in folders}) == 8
    assert [stored_request(folder).top("seed", None) for folder in folders] == list(every)


def test_a_run_survives_an_error_in_its_plot(words, tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError("no such symbol")

    monkeypatch.setattr("fedhassle.runs.train.draw_curves", fails)
    assert call("run", *words, "rounds=1", "--out", tmp_path / "run")[0] == 0
    assert (tmp_path / "run" / "summary.json").exists()
    assert (
        "curves.png could not be drawn: ValueError: no such symbol" in (tmp_path / "run/log.txt").read_text()
    )


def test_one_round_is_in_the_singular(words, tmp_path):
    _, out, _ = call("run", *words, "rounds=1", "--out", tmp_path / "run")
    lines = out.splitlines()
    assert ", 1 round, on cpu" in lines[0] and "hassle on small.npz, 1 round, seed 0" in out
    assert "last 1 evaluation " in out


def test_a_run_counts_the_test_images_that_are_training_images(without_residuals, tmp_path):
    """Here 3 of 40, of which one is there twice; `finished` has none, and no such line."""
    data = small.dataset(train=240)
    data.x_test[[4, 5, 11]] = data.x_train[[0, 1, 1]]
    small.save_images(tmp_path / "mixed.npz", data)
    mine = [*without_residuals, f"data={tmp_path / 'mixed.npz'}", "method=fedavg", "rounds=1"]
    code, out, _ = call("run", *mine, "--out", tmp_path / "run")
    line = "test images that are training images too: 3 of 40; the accuracy looks better than it is"
    assert code == 0 and line in " ".join(out.split())
    assert line in (tmp_path / "run" / "log.txt").read_text("utf-8")


def test_a_run_may_use_an_empty_folder(words, tmp_path):
    assert call("run", *words, "rounds=1", "--out", tmp_path)[0] == 0
    assert (tmp_path / "summary.json").exists()
