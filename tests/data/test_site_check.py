"""`fedhassle data check`: counts, problems, and a picture of examples."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from small import PNG, call, environment

from fedhassle.data.site.contact_sheet import EXAMPLES, draw_examples, examples_of
from fedhassle.data.site.survey import survey
from fedhassle.federation.agreement import Agreement, DataTerms, write_agreement


def save(path, size=(10, 10), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three dogs (one of them CMYK), one cat, two without a label, one broken file."""
    place = tmp_path / "images"
    for name in ("dog/1.png", "dog/2.png", "cat/3.png", "unlabelled/4.png"):
        save(place / name)
    save(place / "dog" / "5.jpg", (20, 30), "CMYK")
    save(place / "6.png", mode="L")
    (place / "cat" / "7.png").write_bytes(b"nothing")
    return place


@pytest.fixture
def agreement(tmp_path):
    terms = DataTerms(("cat", "dog", "cow"), 8, 8, 3, (0.0,) * 3, (1.0,) * 3, flip=True, crop=1)
    path = tmp_path / "federation.toml"
    write_agreement(Agreement("Zoo", "localhost:8443", terms), path)
    return path


def rows(out):
    cells = [line.strip("│").split("│") for line in out.splitlines() if line.startswith("│")]
    return {name.strip(): int(count) for name, count in cells}


def test_counts_problems_and_a_picture(folder, tmp_path):
    code, out, err = call("data", "check", folder, "--picture", tmp_path / "x.png")
    assert (code, err) == (0, "")
    assert rows(out) == {"cat": 1, "dog": 3, "unlabelled": 2}
    assert "6 images, 4 labelled (67%)" in out
    assert "formats  PNG 5, JPEG 1" in out and "modes    RGB 4, L 1, CMYK 1" in out
    assert "sizes    10×10 5, 20×30 1" in out
    assert "converted: CMYK to RGB: 1 image\n  dog/5.jpg" in out
    assert "skipped: 1\n  cat/7.png: is not a PNG" in out
    assert "agreed size" not in out and "grey" not in out  # nothing is agreed
    assert (tmp_path / "x.png").read_bytes().startswith(PNG) and f"picture  {tmp_path / 'x.png'}" in out


def test_an_agreement_says_which_classes_and_which_size(folder, agreement, tmp_path):
    words = ("data", "check", folder, "--picture", tmp_path / "x.png", "--agreement", agreement)
    code, out, _ = call(*words)
    assert code == 0 and rows(out) == {"cat": 1, "dog": 3, "cow": 0, "unlabelled": 2}
    assert "converted: reduced to the agreed size: 5 images\n  6.png\n  cat/3.png" in out
    assert "converted: reduced to the agreed size, edges cut: 1 image" in out
    assert "converted: grey to RGB: 1 image\n  6.png" in out
    save(folder / "dogs" / "1.png")
    code, out, err = call(*words)
    assert code == 2 and "did you mean 'dog'?" in err and out == ""


def test_a_label_file_may_be_named(folder, tmp_path):
    (tmp_path / "truth.csv").write_text("file;label\n6.png;[bold]x\ndog/1.png;y$_$\n")
    words = ("data", "check", folder, "--labels", tmp_path / "truth.csv", "--picture", tmp_path / "x.png")
    code, out, _ = call(*words)
    assert code == 0 and rows(out) == {"[bold]x": 1, "y$_$": 1, "unlabelled": 4}


def test_a_site_without_problems(tmp_path):
    save(tmp_path / "a" / "1.png")
    code, out, _ = call("data", "check", tmp_path / "a", "--picture", tmp_path / "x.png")
    assert code == 0 and "no problems" in out and "1 image, 0 labelled (0%)" in out


def test_a_table_that_is_not_read_is_noted(tmp_path):
    save(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "labels.xlsx").write_bytes(b"PK")
    out = call("data", "check", tmp_path / "a", "--picture", tmp_path / "x.png")[1]
    assert "note: labels.xlsx is not read: save it as labels.csv, or name one with --labels\n" in out


def test_suspicious_class_names_are_noted(tmp_path):
    """Names that other programs write for a missing value, and names that differ only in spelling."""
    place, names = tmp_path / "images", ["NA", "nan", "?", "-", "0", "1", "1.0", "cat", "Cat", "10", "11"]
    for k in range(len(names)):
        save(place / f"{k}.png")
    rows = "".join(f"{k}.png,{name}\n" for k, name in enumerate(names))
    (place / "labels.csv").write_text(f"file,label\n{rows}")
    out = call("data", "check", place, "--picture", tmp_path / "x.png")[1]
    assert "no problems" not in out
    assert [line for line in out.splitlines() if line.startswith("note: ")] == [
        "note: looks like a missing label: '-', '?', 'NA', 'nan' (leave the label blank instead)",
        "note: '1' and '1.0' differ only in capitals or “.0”: are they one class?",
        "note: 'Cat' and 'cat' differ only in capitals or “.0”: are they one class?",
    ]


def test_long_lists_are_shortened_without_all(tmp_path):
    place = tmp_path / "images"
    for k in range(15):
        save(place / f"{k}.png", (10 + k, 20), "1")
        (place / f"bad{k:02}.png").write_bytes(b"x")
    words = ("data", "check", place, "--picture", tmp_path / "x.png")
    out = call(*words)[1]
    assert out.count("… and 5 more (fedhassle data check --all shows them)") == 2 and "bad14.png" not in out
    assert "and 5 more: 10 to 24 wide, 20 to 20 high" in out
    out = call(*words, "--all")[1]
    assert "--all" not in out and all(f"  bad{k:02}.png: " in out for k in range(15))


def test_paths_are_printed_as_they_are(folder, tmp_path):
    """Not as rich markup, in which [bold] is a tag and :smile: an emoji."""
    (folder / "cat" / "[bold] :smile:.png").touch()
    picture = tmp_path / "[bold] :smile:.png"
    code, out, _ = call("data", "check", folder, "--picture", picture)
    assert code == 0 and f"picture  {picture}\n" in out and "\n  cat/[bold] :smile:.png: is not a PNG" in out


def test_an_npz_is_checked_too(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 8, 8), np.uint8), y=[1, -1, 0])
    code, out, _ = call("data", "check", tmp_path / "own.npz", "--picture", tmp_path / "x.png")
    assert code == 0 and rows(out) == {"0": 1, "1": 1, "unlabelled": 1}


def test_test_images_that_are_training_images_are_noted(tmp_path, rng):
    """Two of four; the folder of a site has no test images."""
    x = rng.integers(0, 256, (9, 8, 8), np.uint8)
    test = {"x_test": x[[6, 2, 7, 0]], "y_test": [0, 0, 1, 1]}
    np.savez(tmp_path / "own.npz", x_train=x[:6], y_train=[0, 1, 0, 1, -1, 0], **test)
    code, out, _ = call("data", "check", tmp_path / "own.npz", "--picture", tmp_path / "x.png")
    assert code == 0 and "note: test images that are training images too: 2 of 4;" in out
    np.savez(tmp_path / "other.npz", x_train=x[3:6], y_train=[0, 1, 0], **test)
    code, out, _ = call("data", "check", tmp_path / "other.npz", "--picture", tmp_path / "x.png")
    assert code == 0 and "test images" not in out


def test_the_picture_is_never_put_among_the_images(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    code, _, err = call("data", "check", ".")
    assert code == 2 and "choose another --picture" in err and not (folder / "check.png").exists()
    monkeypatch.chdir(tmp_path)
    assert call("data", "check", "images")[0] == 0 and (tmp_path / "check.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing does not exist"),
        (["images", "--agreement", "none.toml"], "none.toml cannot be read"),
        (["images", "--picture", "x.svg"], "ends in .png"),
        (["images", "--labels", "none.csv"], "none.csv cannot be read"),
    ],
)
def test_what_cannot_be_checked_ends_with_code_2(folder, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("data", "check", *words)
    assert code == 2 and message in err and "Traceback" not in err


def test_a_picture_of_another_kind_is_refused_before_any_image_is_read(tmp_path):
    code, out, err = call("data", "check", tmp_path / "none", "--picture", "x.jpg")
    assert code == 2 and "ends in .png, got 'x.jpg'" in err and out == ""


def test_the_sheet_shows_the_images_of_each_class_in_its_row(tmp_path):
    """Colours of the drawn picture, looked up where the rows are."""
    colours = {"a": "red", "b": "lime", "unlabelled": "blue"}
    for name, colour in colours.items():
        for k in range(3):
            save(tmp_path / "images" / name / f"{k}.png", (16, 16), colour=colour)
    found = survey(tmp_path / "images", None)
    draw_examples(found.site, found.class_names, tmp_path / "x.png")
    drawn = np.asarray(Image.open(tmp_path / "x.png").convert("RGB"))
    tops = []
    for pure in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
        where = np.argwhere((drawn == pure).all(axis=2))
        assert len(where) > 3 * 50 * 50  # three images of about 96 pixels a side, but for the gaps
        tops.append(where[:, 0].min())
    assert tops == sorted(tops)


def test_examples_are_spread_over_a_class():
    y = np.array([0, 1] * 50)
    assert examples_of(y, 1) == list(range(1, 100, 10)) and len(examples_of(y, 1)) == EXAMPLES
    assert examples_of(np.array([0, 1, 1]), 1) == [1, 2] and examples_of(y, 5) == []


def test_the_check_does_not_wait_for_pytorch(folder, tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedhassle.cli.data import check;"
        f"check(Path({str(folder)!r}), picture=Path({str(tmp_path / 'x.png')!r}));"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert re.search(r"dog\s+│\s+3", done.stdout.decode())
