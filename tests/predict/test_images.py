"""`fedhassle predict`: the images it finds, and a line of CSV for each."""

import csv
import io

import numpy as np
import pytest
import small
from PIL import Image
from small import call

import fedhassle
from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.pictures import read_picture
from fedhassle.predict import images as inputs


@pytest.fixture(scope="module")
def model(finished):
    return fedhassle.load(finished[0])


@pytest.fixture
def pixels(images):
    with np.load(images) as file:
        return file["x_test"][..., 0]  # (40, 12, 12)


@pytest.fixture
def photos(tmp_path, pixels):
    """A folder with three images, one of them in a subfolder."""
    folder = tmp_path / "photos"
    (folder / "below").mkdir(parents=True)
    for name, image in zip(("a.png", "b.png", "below/c.png"), pixels, strict=False):
        Image.fromarray(image).save(folder / name)
    return folder


def predicted(*words):
    """The lines of a successful call as dictionaries, and its error output."""
    code, out, err = call("predict", *words)
    assert code == 0, err
    return list(csv.DictReader(io.StringIO(out))), err


def test_a_line_for_each_image_of_a_folder(finished, photos, pixels, model):
    lines, err = predicted(finished[0], photos)
    assert err == ""
    assert [line["file"] for line in lines] == [
        str(photos / name) for name in ("a.png", "b.png", "below/c.png")
    ]
    assert list(lines[0]) == ["file", "class", "probability", "SM", "UM", "EM", "agree"]
    found = {mode: model.predict(pixels[:3], mode) for mode in ("SM", "UM", "EM")}
    for i, line in enumerate(lines):
        names = [model.class_names[found[mode].classes[i]] for mode in ("SM", "UM", "EM")]
        assert [line["SM"], line["UM"], line["EM"]] == names and line["class"] == names[2]
        assert line["agree"] == ("yes" if len(set(names)) == 1 else "no")
        assert float(line["probability"]) == pytest.approx(found["EM"].probabilities[i].max(), abs=1e-6)


def test_the_column_agree_is_yes_or_no(finished, images, model, pixels):
    """Over all test images, where both occur."""
    lines, _ = predicted(finished[0], images)
    found = [model.predict(pixels, mode).classes for mode in ("SM", "UM", "EM")]
    expected = ["yes" if len({int(classes[i]) for classes in found}) == 1 else "no" for i in range(40)]
    assert [line["agree"] for line in lines] == expected and set(expected) == {"yes", "no"}


@pytest.mark.parametrize("mode", ["sm", "UM", "em"])
def test_the_mode_is_chosen(mode, finished, photos, pixels, model):
    lines, _ = predicted(finished[0], photos, "--mode", mode, "--probabilities")
    expected = model.predict(pixels[:3], mode)
    for i, line in enumerate(lines):
        assert line["class"] == line[mode.upper()] == model.class_names[expected.classes[i]]
        shares = [float(line[f"p({name})"]) for name in model.class_names]
        assert shares == pytest.approx(expected.probabilities[i].tolist(), abs=1e-6)
        assert float(line["probability"]) == max(shares)


def test_a_method_with_one_prediction_has_nothing_to_agree_on(without_residuals, photos, tmp_path):
    folder = tmp_path / "run"
    assert call("run", *without_residuals, "method=fedavg", "rounds=1", "--out", folder)[0] == 0
    lines, _ = predicted(folder / "model.safetensors", photos)
    assert list(lines[0]) == ["file", "class", "probability"] and len(lines) == 3
    code, _, err = call("predict", folder, photos, "--mode", "em")
    assert code == 2 and "unknown mode 'em': this model predicts with model" in err


def test_files_folders_patterns_and_stacks(finished, photos, tmp_path, pixels, monkeypatch):
    np.save(tmp_path / "stack.npy", pixels[3:5])
    np.savez(tmp_path / "stack.npz", scans=pixels[5:6])
    monkeypatch.chdir(tmp_path)
    lines, _ = predicted(
        *(finished[0], "photos/b.png", "photos/*.png", "photos/**/c.*", photos / "below" / "*.png"),
        *("stack.npy", "st*.npz"),
    )
    assert [line["file"] for line in lines] == [
        *("photos/b.png", "photos/a.png", "photos/below/c.png", str(photos / "below/c.png")),
        *("stack.npy[0]", "stack.npy[1]", "stack.npz[0]"),
    ]
    assert lines[2]["probability"] == lines[3]["probability"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(finished, tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "scan[1].png")
    lines, _ = predicted(finished[0], tmp_path / "scan[1].png")
    assert [line["file"] for line in lines] == [str(tmp_path / "scan[1].png")]


@pytest.mark.parametrize("word", ["nothere.png", "*.jpg", "photos/*.txt", "empty", "nothere/*.png", "**"])
def test_an_argument_without_images_ends_with_code_2(word, finished, photos, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (photos / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    code, out, err = call("predict", finished[0], word)
    assert code == 2 and word in err and out == "" and "Traceback" not in err


def test_images_of_other_sizes_and_colours_are_fitted_by_the_rule(finished, tmp_path, pixels, model):
    large = np.kron(
        pixels[0], np.ones((4, 4), np.uint8)
    )  # of blocks: shrinks to what it was, but for the filter
    Image.fromarray(np.stack([large] * 3, -1)).save(tmp_path / "large.png")
    np.save(tmp_path / "large.npy", large[None])
    lines, _ = predicted(finished[0], tmp_path / "large.png", tmp_path / "large.npy")
    same = model.predict(read_picture(tmp_path / "large.png", 12, 12, 1).pixels[None])
    for line in lines:
        assert float(line["probability"]) == pytest.approx(same.probabilities.max(), abs=1e-6)
        assert line["class"] == model.class_names[int(same.classes[0])]


def test_unreadable_images_are_named_and_have_no_class(finished, photos):
    (photos / "aa.jpg").write_bytes(b"no image")
    whole = (photos / "a.png").read_bytes()
    (photos / "b.png").write_bytes(whole[: len(whole) // 2])
    lines, err = predicted(finished[0], photos, photos / "a.png")
    assert [bool(line["class"]) for line in lines] == [True, False, False, True]
    assert all(line[column] == "" for line in lines[1:3] for column in list(line)[1:])
    said = err.splitlines()
    assert str(photos / "aa.jpg") in said[0] and str(photos / "b.png") in said[1]
    assert said[2] == "fedhassle: 2 of 4 images could not be read and have no class" and len(said) == 3


def test_a_file_that_is_not_an_image_has_no_class(finished, photos):
    (photos / "scan.raw").write_bytes(b"\0" * 128 + b"DICM")
    lines, err = predicted(finished[0], photos / "scan.raw", photos / "a.png")
    assert [bool(line["class"]) for line in lines] == [False, True] and "scan.raw: is not a PNG" in err


def test_other_files_in_a_folder_are_reported(finished, photos):
    for name in ("a.raw", "b.raw", "labels.csv", ".hidden"):
        (photos / name).touch()
    lines, err = predicted(finished[0], photos)
    assert len(lines) == 3
    assert err == f"skipped: 1\n  {photos / 'a.raw'}: not an image file (.raw), and 1 more like it\n"


def test_conversions_are_reported_once_for_all_images(finished, photos, pixels):
    for name in ("a.png", "b.png"):
        Image.fromarray(pixels[0].astype(np.uint16) * 257).save(photos / name)
    Image.fromarray(np.stack([pixels[0]] * 3, -1)).resize((30, 20)).save(photos / "large.png")
    lines, err = predicted(finished[0], photos)
    assert len(lines) == 4 and err.splitlines() == [
        "converted: 16 bits: upper 8 kept: 2 images",  # nothing of sizes: any model has one
        *(f"  {photos / name}" for name in ("a.png", "b.png")),
    ]


def test_a_long_list_of_conversions_names_no_command_for_the_folder_of_a_site(finished, photos, pixels):
    for k in range(12):
        Image.fromarray(pixels[0].astype(np.uint16) * 257).save(photos / f"{k:02}.png")
    _, err = predicted(finished[0], photos)
    assert err.splitlines()[0] == "converted: 16 bits: upper 8 kept: 12 images"
    assert err.splitlines()[-1] == "  … and 2 more"


def test_a_model_predicts_on_the_pixels_that_a_site_would_train_on(finished, photos, pixels, model):
    Image.fromarray(pixels[0].astype(np.uint16) * 200).save(photos / "a.png")
    Image.fromarray(np.stack([pixels[1]] * 4, -1)).resize((30, 20)).save(photos / "b.png")
    site = read_site(photos, ImageForm(model.class_names, 12, 12, 1), labels=no_labels(photos))
    lines, _ = predicted(finished[0], photos)
    assert [line["file"] for line in lines] == [str(photos / file) for file in site.files]
    shares = model.predict(site.x).probabilities.max(1)
    assert [float(line["probability"]) for line in lines] == pytest.approx(shares.tolist(), abs=1e-6)


def no_labels(folder):
    """A label file without rows, since the subfolder is not a class."""
    (folder / "labels.csv").write_text("file,label\n")
    return folder / "labels.csv"


def test_if_none_can_be_read_it_ends_with_code_2(finished, tmp_path):
    (tmp_path / "x.png").touch()
    code, out, err = call("predict", finished[0], tmp_path, "--out", tmp_path / "x.csv")
    assert code == 2 and "none of the 1 images could be read" in err and out == ""
    assert not (tmp_path / "x.csv").exists()


def test_the_csv_goes_to_a_file(finished, photos, tmp_path):
    code, out, err = call("predict", finished[0], photos, "--out", tmp_path / "deep" / "x.csv")
    assert (code, out, err) == (0, f"classes  {tmp_path / 'deep' / 'x.csv'}\n", "")
    assert (tmp_path / "deep" / "x.csv").read_text("utf-8") == call("predict", finished[0], photos)[1]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.csv"]


def test_file_names_that_are_not_utf_8_are_written_as_their_bytes(finished, photos, tmp_path):
    odd = b"\xff,\xe9.png"
    try:
        (photos / "a.png").rename(photos / odd.decode("utf-8", "surrogateescape"))
    except OSError:
        pytest.skip("no such names on this system")
    assert call("predict", finished[0], photos, "--out", tmp_path / "x.csv")[0] == 0
    assert odd in (tmp_path / "x.csv").read_bytes()


def test_many_images_go_in_batches_and_in_their_order(finished, tmp_path, pixels, monkeypatch):
    np.save(tmp_path / "x.npy", pixels)
    whole, _ = predicted(finished[0], tmp_path / "x.npy")
    monkeypatch.setattr(inputs, "BATCH_SIZE", 7)
    lines, err = predicted(finished[0], tmp_path / "x.npy")
    assert err == "" and [line["file"] for line in lines] == [f"{tmp_path / 'x.npy'}[{i}]" for i in range(40)]
    assert [line["class"] for line in lines] == [line["class"] for line in whole]


def test_long_work_shows_a_bar_on_a_terminal_and_the_csv_stays_plain(finished, images, monkeypatch):
    plain = call("predict", finished[0], images)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    assert call("predict", finished[0], images) == plain  # short work
    monkeypatch.setattr(inputs, "BATCH_SIZE", 7)
    code, out, err = call("predict", finished[0], images)
    assert code == 0 and "\x1b" not in out and len(out.splitlines()) == 41
    assert "images" in err and "/40" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "xm"), "unknown mode 'xm': this model predicts with SM, UM, EM"),
        (("--mode", "w_S"), "unknown mode"),
        (("--device", "tpu"), "auto, cpu or cuda"),
    ],
)
def test_bad_options_end_with_code_2(options, message, finished, photos):
    code, out, err = call("predict", finished[0], photos, *options)
    assert code == 2 and message in err and out == ""


def test_a_model_with_user_code_is_loaded_only_with_allow_import(module, without_residuals, photos, tmp_path):
    module(
        "own_predicted",
        """
        from dataclasses import dataclass
        from fedhassle.methods.fedavg import FedAvg

        @dataclass(frozen=True)
        class Mine(FedAvg):
            "FedAvg under another name."
        """,
    )
    folder = tmp_path / "run"
    words = [*without_residuals, "method=own_predicted:Mine", "rounds=1"]
    assert call("run", *words, "--out", folder)[0] == 0
    code, _, err = call("predict", folder, photos)
    assert code == 2 and "--allow-import" in err
    assert len(predicted(folder, photos, "--allow-import")[0]) == 3


def test_as_a_process_it_prints_only_csv(finished, photos):
    done = small.process("predict", finished[0], photos)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode().splitlines() == call("predict", finished[0], photos)[1].splitlines()
