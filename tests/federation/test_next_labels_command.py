"""`fedhassle federation next-labels`: the CSV can be filled in, and the page shows what it proposes."""

import base64
import csv
import io
import re

import numpy as np
import pytest
import small
from browser import browser, executable
from dicom_files import write
from PIL import Image

import fedhassle
from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.pictures import read_picture
from fedhassle.predict.next_labels import doubts_of

CHECK = "document.getElementById('guesses').click()"
SHOWN = "[...document.querySelectorAll('.guess')].filter(e => e.checkVisibility()).length"
LOADED = "[...document.images].filter(i => i.complete && i.naturalWidth > 100).length"


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Forty images of ten patients, a fifth of them labelled; names that need care in HTML."""
    folder = tmp_path_factory.mktemp("site") / "scans & <more>"
    folder.mkdir()
    data = small.dataset(train=240)
    lines = ["file,label,patient"]
    for k in range(40):
        Image.fromarray(data.x_train[k, ..., 0]).resize((30, 30)).save(folder / f"{k:02} <b>&.png")
        lines.append(f"{k:02} <b>&.png,{data.y_train[k] if k < 8 else ''},P{k % 10}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def made(finished, scans, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "next.csv"
    words = ["federation", "next-labels", finished[0], "--data", scans, "--count", "20", "--out", out]
    code, said, err = small.call(*words)
    assert (code, err) == (0, "") and "20 of 32 images without a label" in said
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), out


def test_the_table_has_unlabelled_images_of_many_patients_and_can_be_filled_in(made, scans, finished):
    rows, _ = made
    numbers = [int(row["file"][:2]) for row in rows]
    assert len(set(numbers)) == 20 and min(numbers) >= 8 and {row["label"] for row in rows} == {""}
    assert len({number % 10 for number in numbers[:10]}) == 10  # each patient once before any twice
    model = fedhassle.load(finished[0])
    site = read_site(scans, ImageForm(model.class_names, *model.image_size))
    predictions = model.predictions(site.x[numbers])
    p = predictions["EM"].probabilities
    entropy = -(p * np.log(p)).sum(1) / np.log(4)
    assert [float(row["uncertainty"]) for row in rows] == pytest.approx(list(entropy), abs=1e-4)
    filled = "\n".join(["file,label", *(f"{row['file']},2" for row in rows)])
    (scans.parent / "filled.csv").write_text(filled)
    labelled = read_site(scans, ImageForm(model.class_names, *model.image_size), scans.parent / "filled.csv")
    assert sorted(np.flatnonzero(labelled.y == 2)) == sorted(numbers)


@pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")
def test_the_page_shows_every_image_and_hides_the_guesses_at_first(made):
    rows, out = made
    with browser() as page:
        for width in (1200, 400):
            page.show(out.with_suffix(".html"), width=width)
            assert page.run(LOADED) == len(rows) and page.run(SHOWN) == 0
            names = page.run("[...document.querySelectorAll('.images a')].map(e => e.textContent)")
            assert [name.partition(". ")[2] for name in names] == [row["file"] for row in rows]
            page.run(CHECK)
            assert page.run(SHOWN) == len(rows)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert "keep it at your site" in page.run("document.body.innerText").lower()
            told, asked = page.complaints()
            assert told == [] and all(address.startswith("data:") for address in asked)


def test_a_site_with_all_labels_has_nothing_to_label(finished, scans, tmp_path):
    np.savez(tmp_path / "all.npz", x=np.zeros((3, 12, 12), np.uint8), y=[0, 1, 2])
    words = ["federation", "next-labels", finished[0], "--data", tmp_path / "all.npz"]
    code, _, err = small.call(*words)
    assert code == 2 and "nothing left to label" in err
    code, _, err = small.call(*words[:-1], scans, "--out", tmp_path / "x.html")
    assert code == 2 and "cannot both be" in " ".join(err.split())


def test_the_images_of_an_npz_have_thumbnails_too(finished, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (5, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "site.npz", x=x, y=np.full(5, -1))
    words = ["--data", tmp_path / "site.npz", "--out", tmp_path / "n.csv", "--page", tmp_path / "p.html"]
    code, _, err = small.call("federation", "next-labels", finished[0], *words)
    assert (code, err) == (0, "") and (tmp_path / "p.html").read_text("utf-8").count("data:image/png") == 5


def test_the_frames_of_a_file_are_one_row_and_one_thumbnail(finished, tmp_path):
    """They have one label, in the row of their file; the page shows the frame with the highest score."""
    folder = tmp_path / "scans"
    folder.mkdir()
    frames = np.random.default_rng(0).integers(0, 256, (5, 40, 40), dtype=np.uint8)
    write(folder / "cine.dcm", frames, frames=5)
    write(folder / "one.dcm", frames[0] // 2)
    words = ["--data", folder, "--out", tmp_path / "n.csv"]
    code, _, err = small.call("federation", "next-labels", finished[0], *words)
    with (tmp_path / "n.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (code, err) == (0, "") and sorted(row["file"] for row in rows) == ["cine.dcm", "one.dcm"]
    model = fedhassle.load(finished[0])
    site = read_site(folder, model.form)
    doubt, _ = doubts_of(model, site.x)
    best = int(doubt.score[:5].argmax())
    page = (tmp_path / "n.html").read_text("utf-8")
    shown = [Image.open(io.BytesIO(base64.b64decode(one))) for one in re.findall(r"base64,([^\"]+)", page)]
    assert f"cine.dcm[{best}]" in page and f'href="{(folder / "cine.dcm").resolve().as_uri()}"' in page
    larger = read_picture(folder / "cine.dcm", 224, 224, 1, frame=best).pixels[..., 0]
    assert any(np.array_equal(np.asarray(one), larger) for one in shown) and len(shown) == 2
