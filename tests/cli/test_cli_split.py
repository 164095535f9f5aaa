"""`fedhassle split`: the data of each client as a table, JSON, a picture and a file."""

import numpy as np
import pytest
from small import PNG, but_seconds, call, metrics_of, strict, summary_of


def test_split_counts_what_the_run_holds(words, images, tmp_path):
    """Compares the JSON with the rows in the saved file and the labels of the images."""
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


def test_split_prints_a_table_and_writes_a_picture(words, tmp_path, monkeypatch):
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
    """With the 80 columns of a pipe or a small terminal."""
    _, out, _ = call("split", *words, "--picture", tmp_path / "x.svg")
    assert "…" not in out and out.count("unlabelled") >= 3


def test_a_split_can_be_drawn_as_svg(words, tmp_path):
    assert call("split", *words, "--picture", tmp_path / "dots.svg")[0] == 0
    assert "<svg" in (tmp_path / "dots.svg").read_text("utf-8")


def test_an_unknown_picture_format_is_refused_before_any_image_is_loaded(tmp_path):
    code, out, err = call("split", f"data={tmp_path / 'none.npz'}", "--picture", "x.jpg")
    assert code == 2 and ".png or .svg" in err and "x.jpg" in err and out == ""


def test_a_run_uses_the_split_of_a_file(words, finished, tmp_path):
    save, out = tmp_path / "other.npz", tmp_path / "run"
    said = call("split", *words, "split.seed=77", "--save", save, "--picture", tmp_path / "x.png")[1]
    assert said.endswith(f"picture  {tmp_path / 'x.png'}\nsplit    {save}\n")
    other = [word for word in words if not word.startswith("split.")]
    assert call("run", *other, "rounds=1", f"split.file={save}", "--out", out)[0] == 0
    with np.load(save, allow_pickle=False) as file:
        saved = str(file["hash"])
    hashes = [summary_of(f)["split_hash"] for f in (out, finished[0])]
    assert hashes[0] == saved != hashes[1]


def test_the_picture_of_a_saved_split_does_not_state_alpha(words, finished, tmp_path):
    other = [word for word in words if not word.startswith("split.")]
    given = f"split.file={finished[0] / 'split.npz'}"
    assert call("split", *other, given, "--picture", tmp_path / "x.svg")[0] == 0
    text = (tmp_path / "x.svg").read_text("utf-8")
    assert "small.npz, split.npz" in text and "α" not in text


def test_the_split_of_a_run_can_be_reused(words, finished, tmp_path):
    other = [word for word in words if not word.startswith("split.")]
    given = f"split.file={finished[0] / 'split.npz'}"
    assert call("run", *other, given, "--out", tmp_path / "run")[0] == 0
    assert but_seconds(metrics_of(tmp_path / "run")) == but_seconds(metrics_of(finished[0]))
