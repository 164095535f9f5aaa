"""`fedhassle evaluate`: its labelled images, and the metrics that it prints, writes and draws."""

import json
import re

import numpy as np
import pytest
import small
from PIL import Image
from small import PNG, call, metrics_of, strict

import fedhassle
from fedhassle.data.site.folder import ImageForm
from fedhassle.data.site.labels import renumbered
from fedhassle.errors import UserError
from fedhassle.predict import images
from fedhassle.predict.images import labelled_images
from fedhassle.predict.scores import as_json, score


@pytest.fixture(scope="module")
def data(images):
    with np.load(images) as file:
        return file["x_test"], file["y_test"]


def figures(tmp_path, *words):
    """Returns the JSON that a successful call wrote, and its error output."""
    code, _, err = call("evaluate", *words, "--json", tmp_path / "figures.json")
    assert code == 0, err
    return strict((tmp_path / "figures.json").read_text("utf-8")), err


def saved(folder, data, names):
    """Saves images under these names."""
    for image, name in zip(data, names, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / name)


def test_the_test_images_of_a_file_give_the_accuracy_of_the_run(finished, images, data, tmp_path):
    found, err = figures(tmp_path, finished[0], images)
    assert err == "" and found["images"] == 40 and list(found["predictions"]) == ["SM", "UM", "EM"]
    model = fedhassle.load(finished[0])
    for name, made in found["predictions"].items():
        assert made["accuracy"] == metrics_of(finished[0])[-1]["accuracy"][name]
        prediction = model.predict(data[0], name)
        expected = as_json(score(*prediction, data[1]), model.class_names)
        assert made == json.loads(json.dumps(expected))
        assert made["accuracy_95"][0] < made["accuracy"] < made["accuracy_95"][1]


def test_the_tables_show_the_metrics(finished, images, tmp_path):
    code, out, err = call("evaluate", finished[0], images)
    assert (code, err) == (0, "")
    found, _ = figures(tmp_path, finished[0], images)
    for name, made in found["predictions"].items():
        (row,) = [line for line in out.splitlines() if line.startswith(f"│ {name} ")]
        for share, interval in (("accuracy", "accuracy_95"), ("balanced_accuracy", "balanced_accuracy_95")):
            low, high = made[interval]
            assert f"{100 * made[share]:.1f} ({100 * low:.1f} – {100 * high:.1f})" in row
        assert f"{made['auroc']:.3f}" in row and f"{made['ece']:.3f}" in row
    by_class = out[out.index("by class, EM") :]
    for made in found["predictions"]["EM"]["classes"]:
        shown = ["–" if made[k] is None else f"{100 * made[k]:.1f}" for k in ("recall", "precision")]
        if made["recall_95"] is not None:
            low, high = made["recall_95"]
            shown[0] += rf" \({100 * low:.1f} – {100 * high:.1f}\)"
        pattern = rf"│ {made['name']} +│ +{made['images']} │ +{shown[0]} │ +{shown[1]} │"
        assert re.search(pattern, by_class)


def test_files_are_written_before_anything_is_printed_and_named_at_the_end(
    finished, images, tmp_path, monkeypatch
):
    picture, figures = tmp_path / "e.png", tmp_path / "e.json"
    words = ("evaluate", finished[0], images, "--picture", picture, "--json", figures)
    code, out, err = call(*words)
    assert (code, err) == (0, "") and out.endswith(f"picture  {picture}\nscores   {figures}\n")
    picture.unlink()
    figures.unlink()
    there = []
    monkeypatch.setattr(
        "fedhassle.cli.models.show_scores",
        lambda *_: there.extend(file.exists() for file in (picture, figures)),
    )
    assert call(*words)[0] == 0 and there == [True, True]


def test_a_single_mode(finished, images, tmp_path):
    found, _ = figures(tmp_path, finished[0], images, "--mode", "um")
    assert list(found["predictions"]) == ["UM"]
    assert "by class, UM" in call("evaluate", finished[0], images, "--mode", "UM")[1]


def test_folders_named_by_class(finished, images, data, tmp_path):
    folder = tmp_path / "scans"
    saved(folder, data[0], [f"{k}/deep/{i}.png" for i, k in enumerate(data[1])])
    saved(folder, data[0][:2], ["unlabelled/x.png", ".cache/y.png"])
    (folder / "unlabelled" / "broken.png").touch()  # ignored: it has no label
    (folder / "notes.txt").touch()
    found, err = figures(tmp_path, finished[0], folder)
    assert err == "skipped: 1\n  notes.txt: not an image file (.txt)\n" and found["images"] == 40
    expected, _ = figures(tmp_path, finished[0], images)
    for name, made in found["predictions"].items():  # AUROC sums in another order
        assert made["confusion"] == expected["predictions"][name]["confusion"]
        assert made["auroc"] == pytest.approx(expected["predictions"][name]["auroc"], abs=1e-12)


def test_a_label_file(finished, images, data, tmp_path):
    folder = tmp_path / "scans"
    names = [f"part {i // 15}/{i:02}.png" for i in range(40)]
    saved(folder, data[0], names)
    lines = [f'"{name}", {k} ,x' for name, k in zip(names, data[1], strict=True)]
    saved(folder, data[0][:1], ["more.png"])
    lines += ["more.png,,no label"]
    (folder / "labels.csv").write_text("\ufefffile,label,who\r\n" + "\r\n".join(lines), "utf-8")
    found, err = figures(tmp_path, finished[0], folder)
    assert err == "" and found["images"] == 40
    assert found["predictions"] == figures(tmp_path, finished[0], images)[0]["predictions"]


def test_unreadable_images_are_named_and_left_out(finished, data, tmp_path):
    folder = tmp_path / "scans"
    saved(folder, data[0][:3], ["0/a.png", "0/b.png", "1/c.png"])
    (folder / "0" / "b.png").write_bytes(b"\x89PNG")
    found, err = figures(tmp_path, finished[0], folder)
    assert found["images"] == 2 and err.startswith("skipped: 1\n  0/b.png: is not a PNG")
    assert [made["images"] for made in found["predictions"]["EM"]["classes"]] == [1, 1, 0, 0]
    (folder / "labels.csv").write_text("file,label\n0/a.png,0\n0/gone.png,1\n")
    found, err = figures(tmp_path, finished[0], folder)
    assert found["images"] == 1
    assert err == "skipped: 1\n  0/gone.png: listed in row 3 of labels.csv, but the image does not exist\n"


def test_conversions_are_listed_except_size_and_colours(finished, data, tmp_path):
    folder = tmp_path / "scans"
    saved(folder, data[0][:2], ["0/a.png", "1/b.png"])
    Image.new("CMYK", (40, 20)).save(folder / "0" / "c.tif")
    found, err = figures(tmp_path, finished[0], folder)
    assert found["images"] == 3 and err == "converted: CMYK to RGB: 1 image\n  0/c.tif\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "file,label\na.png,0\na.png,zero\n",
            "labels.csv: row 3 (a.png): the label 'zero' is not one of the classes (0, 1, 2, 3)",
        ),
        ("name,class\na.png,0\n", "expected a header with one column 'file'"),
        ("", "labels.csv is empty"),
        ("file,label\na.png,\n", "holds no labelled images"),
        ("file,label\ngone.png,0\n", "no row names an image of the folder"),
        (b"file,label\n\xff.png,0\n", "labels.csv is not UTF-8"),
    ],
)
def test_a_bad_label_file_ends_with_code_2(content, message, finished, tmp_path):
    Image.new("L", (12, 12)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = call("evaluate", finished[0], tmp_path)
    assert code == 2 and message in err and out == "" and "Traceback" not in err


def test_a_folder_that_is_not_a_class_ends_with_code_2(finished, tmp_path):
    (tmp_path / "cats").mkdir()
    Image.new("L", (12, 12)).save(tmp_path / "cats" / "a.png")
    code, _, err = call("evaluate", finished[0], tmp_path)
    assert code == 2 and "the folder 'cats' is not one of the classes (0, 1, 2, 3)" in err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fmnist-mni", "did you mean 'fmnist-mini'?"),
        ("nothere.npz", "nothere.npz"),
        ("fmnist-mini", "fmnist-mini has the label 9; expected −1, or 0 to 3"),
    ],
)
def test_unusable_data_ends_with_code_2(word, message, finished):
    code, _, err = call("evaluate", finished[0], word)
    assert code == 2 and message in err


def test_images_of_another_size_are_resized(finished, data, tmp_path):
    x, y = np.kron(data[0], np.ones((1, 2, 2, 3), np.uint8)), data[1]
    np.savez(tmp_path / "large.npz", x=x, y=y)
    found, _ = figures(tmp_path, finished[0], tmp_path / "large.npz")
    small_again = np.stack(
        [Image.fromarray(image).convert("L").resize((12, 12), Image.Resampling.BICUBIC) for image in x]
    )
    classes = fedhassle.load(finished[0]).predict(small_again).classes
    assert found["images"] == 40 and found["predictions"]["EM"]["accuracy"] == (classes == y).mean()


def test_classes_match_by_name_if_both_sides_have_names():
    y = np.array([0, 1, -1, 2])
    assert renumbered(y, ("b", "c", "a"), ("a", "b", "c"), "x").tolist() == [1, 2, -1, 0]
    assert renumbered(y, ("b", "c", "a", "never"), ("a", "b", "c"), "x").tolist() == [1, 2, -1, 0]
    assert renumbered(y, None, ("a", "b", "c"), "x").tolist() == y.tolist()
    with pytest.raises(UserError, match="x: class_names: label 1, 'd' is not one of the classes"):
        renumbered(y, ("a", "d", "b"), ("a", "b", "c"), "x")
    with pytest.raises(UserError, match="x has the label 2; expected −1, or 0 to 1"):
        renumbered(y, None, ("a", "b"), "x")


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("bca", "abc", [1, 2, 0]),
        (None, "abc", [0, 1, 2]),
        ("012", "abc", [0, 1, 2]),
        ("bca", "012", [0, 1, 2]),
    ],
)
def test_classes_match_by_number_if_a_side_has_no_names(theirs, ours, expected, tmp_path):
    x = np.arange(4 * 36, dtype=np.uint8).reshape(4, 6, 6)
    named = {} if theirs is None else {"class_names": list(theirs)}
    np.savez(tmp_path / "x.npz", x=x, y=[0, 1, -1, 2], **named)
    found = labelled_images(str(tmp_path / "x.npz"), ImageForm(tuple(ours), 6, 6, 1))
    assert found.y.tolist() == expected and (found.x[..., 0] == x[[0, 1, 3]]).all()


def test_long_work_shows_a_progress_bar_on_a_terminal(finished, data, tmp_path, monkeypatch):
    saved(tmp_path / "scans", data[0], [f"{k}/{i}.png" for i, k in enumerate(data[1])])
    words = ("evaluate", finished[0], tmp_path / "scans")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich treats this as a terminal
    assert call(*words)[2] == ""  # too few images for a bar
    monkeypatch.setattr(images, "BATCH_SIZE", 7)
    code, _, err = call(*words)
    assert code == 0 and "images" in err and "/40" in err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_shows_every_prediction(suffix, finished, images, tmp_path):
    path = tmp_path / f"deep/x.{suffix}"
    assert call("evaluate", finished[0], images, "--picture", path)[0] == 0
    if suffix == "png":
        assert path.read_bytes().startswith(PNG)
        with Image.open(path) as picture:
            assert min(picture.size) > 600 and len(picture.convert("RGB").getcolors(1 << 20)) > 50
    else:
        text = path.read_text("utf-8")
        for name in ("SM", "UM", "EM"):
            assert f"<!-- {name}: accuracy" in text and f"<!-- {name}: calibration error" in text


def test_an_unknown_picture_format_is_refused_before_any_work(finished, images, tmp_path):
    code, out, err = call("evaluate", finished[0], images, "--picture", tmp_path / "x.gif")
    assert code == 2 and ".png, .svg or .pdf" in err and out == ""


def test_the_suffix_of_a_picture_may_be_in_capitals(finished, images, tmp_path):
    assert call("evaluate", finished[0], images, "--picture", tmp_path / "x.PNG")[0] == 0
    assert (tmp_path / "x.PNG").read_bytes().startswith(PNG)


def test_many_classes_and_odd_names_are_drawn(tmp_path, rng):
    from fedhassle.predict.diagrams import draw_scores

    for m in (2, 40):
        p, y = rng.dirichlet(np.ones(m), 50), rng.integers(0, m, 50)
        names = ["$x_{", "a" * 80, *(f"class {k}" for k in range(m - 2))]
        draw_scores({"model": score(p.argmax(1), p, y)}, names, tmp_path / f"{m}.png", "$[title")
        assert (tmp_path / f"{m}.png").read_bytes().startswith(PNG)


def test_a_process_prints_nothing_to_standard_error(finished, images):
    done = small.process("evaluate", finished[0], images)
    assert done.returncode == 0 and done.stderr == b""


def test_intervals_are_by_patient_if_these_are_known(finished, data, tmp_path):
    """Ten copies of four images: forty images of four patients have the intervals of four images."""
    x, y = data
    names = [f"p{k % 4}_{k}.png" for k in range(40)]
    saved(tmp_path / "in", [x[k % 4] for k in range(40)], names)
    rows = [f"{name},{y[k % 4]}" for k, name in enumerate(names)]
    (tmp_path / "in" / "labels.csv").write_text("\n".join(["file,label", *rows]))
    plain, _ = figures(tmp_path, finished[0], tmp_path / "in")
    words = (finished[0], tmp_path / "in", "--patients", "name {patient}_*")
    found, _ = figures(tmp_path, *words)
    assert (found["images"], found["patients"]) == (40, 4) and "patients" not in plain
    for mode, made in found["predictions"].items():
        assert made["accuracy"] == plain["predictions"][mode]["accuracy"]
        (low, high), (lower, upper) = made["accuracy_95"], plain["predictions"][mode]["accuracy_95"]
        assert high - low > 2 * (upper - lower)
    copies = [k % 4 for k in range(40)]
    arrays = {"x": x[copies], "y": y[copies], "patient": np.array(copies)}
    arrays |= {"x": np.concatenate([arrays["x"], x[:1]]), "y": np.append(arrays["y"], -1)}  # without a label
    np.savez(tmp_path / "in.npz", **arrays | {"patient": np.append(arrays["patient"], 7)})
    same, _ = figures(tmp_path, finished[0], tmp_path / "in.npz")
    assert (same["images"], same["patients"]) == (40, 4)
    for mode, made in same["predictions"].items():
        for key in ("accuracy_95", "balanced_accuracy_95", "classes"):
            assert made[key] == found["predictions"][mode][key]
    np.savez(tmp_path / "test.npz", x_test=x, y_test=y, patient_test=np.arange(40) // 2, patient=np.arange(3))
    assert figures(tmp_path, finished[0], tmp_path / "test.npz")[0]["patients"] == 20
    out = " ".join(call("evaluate", *words)[1].split())
    assert "40 images of 4 patients" in out and "95 % interval by patient" in out
    code, _, err = call("evaluate", finished[0], "fmnist-mini", "--patients", "column")
    assert code == 2 and "--patients is for a folder of images" in err
