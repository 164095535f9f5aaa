"""Patients of a site's images: by a column, a folder, a name or an array; and identical images."""

import csv

import numpy as np
import pytest
from PIL import Image
from small import call

from fedhassle.data.site.folder import NOT_ASKED_FOR, ImageForm, read_site
from fedhassle.data.site.identical import identical_images
from fedhassle.data.site.patients import hashed, parsed_patients
from fedhassle.data.site.survey import survey
from fedhassle.errors import UserError

CLASSES = ("benign", "malignant")


def form(patients=None):
    return ImageForm(CLASSES, 8, 8, 1, None if patients is None else parsed_patients(patients))


@pytest.fixture
def folder(tmp_path):
    """Writes images with random pixels, and a label file with these columns."""
    rng = np.random.default_rng(1)

    def write(files, header=(), rows=()):
        for file in files:
            path = tmp_path / "site" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
        if header:
            with (tmp_path / "site" / "labels.csv").open("w", newline="") as file:
                csv.writer(file).writerows([header, *rows])
        return tmp_path / "site"

    return write


def same(site):
    """The files of each patient."""
    assert site.patients is not None
    groups = {}
    for file, patient in zip(site.files, site.patients.tolist(), strict=True):
        groups.setdefault(patient, []).append(file)
    return sorted(groups.values())


NAMES = ("1.png", "2.png", "3.png", "4.png")


@pytest.mark.parametrize("column", ["patient", "Group"])
def test_a_column_names_patients_also_of_unlabelled_images(folder, column):
    rows = [("1.png", "benign", "Ann"), ("2.png", "malignant", "Bo"), ("3.png", "", "Ann")]
    site = read_site(folder(NAMES, ("file", "label", column), rows), form("column"), secret=b"x")
    assert same(site) == [["1.png", "3.png"], ["2.png"], ["4.png"]] and site.patients[3] == 0


def test_a_column_counts_whatever_the_rule_and_patient_before_group(folder):
    header = ("patient", "group", "file", "label")
    rows = [("7", "a", "1.png", "benign"), ("7.0", "b", "2.png", "benign")]
    for rule in ("dicom", "folder 1", "name {patient}.png"):
        assert same(read_site(folder(("1.png", "2.png"), header, rows), form(rule))) == [["1.png", "2.png"]]


def test_a_folder_of_the_path_is_a_patient(folder):
    place = folder(("benign/A/1.png", "benign/A/2.png", "malignant/B/x/1.png", "unlabelled/A/3.png"))
    expected = [["benign/A/1.png", "benign/A/2.png", "unlabelled/A/3.png"], ["malignant/B/x/1.png"]]
    assert same(read_site(place, form("folder 2"))) == expected


def test_a_part_of_the_name_is_a_patient(folder):
    place = folder(("benign/A-1_left.png", "benign/A-1_right.png", "malignant/B_x_y.png", "notes.png"))
    expected = [["benign/A-1_left.png", "benign/A-1_right.png"], ["malignant/B_x_y.png"], ["notes.png"]]
    assert same(read_site(place, form("name {patient}_*"))) == expected


def test_an_npz_names_patients_in_an_array(tmp_path, rng):
    x, y = rng.integers(0, 256, (4, 8, 8), dtype=np.uint8), np.array([0, 1, -1, 0])
    np.savez(tmp_path / "a.npz", x=x, y=y, patient=np.array([3, 4, 3, 4]))
    site = read_site(tmp_path / "a.npz", form("column"))
    assert same(site) == [["a.npz[0]", "a.npz[2]"], ["a.npz[1]", "a.npz[3]"]]
    labelled = read_site(tmp_path / "a.npz", form("dicom"), labelled_only=True)
    assert same(labelled) == [["a.npz[0]"], ["a.npz[1]", "a.npz[3]"]]
    np.savez(tmp_path / "b.npz", x=x, y=y, group=np.zeros(3))
    with pytest.raises(UserError, match=r"group is float64 of shape \(3,\); expected 4 texts or whole"):
        read_site(tmp_path / "b.npz", form("column"))


@pytest.mark.parametrize("rule", ["column", "folder 2", "name {patient}_*", "dicom"])
def test_a_labelled_image_without_a_patient_is_an_error_and_an_unlabelled_site_is_none(rule, folder):
    place = folder(("unlabelled/1.png", "2.png"))
    assert read_site(place, form(rule)).patients is None
    folder(("benign/1.png", "malignant/2.png"))
    with pytest.raises(UserError, match=rf"patient of benign/1\.png is not known.*patients = '{rule[:4]}"):
        read_site(place, form(rule))


def test_two_patients_of_one_image_are_an_error_that_names_neither(folder):
    rows = [("1.png", "benign", "Ann"), ("1.png", "benign", "Bo")]
    with pytest.raises(UserError, match="row 3 names another patient") as error:
        read_site(folder(("1.png",), ("file", "label", "patient"), rows), form("column"))
    assert "Ann" not in str(error.value) and "Bo" not in str(error.value)


def test_patients_that_are_not_asked_for_are_noted_and_change_nothing(folder):
    site = read_site(folder(("1.png",), ("file", "label", "patient"), [("1.png", "benign", "Ann")]), form())
    assert site.patients is None and site.notes == (NOT_ASKED_FOR,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "columns",
        "folder",
        "folder 0",
        "folder -1",
        "folder 101",
        "name",
        "name *",
        "name {patient}{patient}",
    ],
)
def test_other_rules_are_an_error(text):
    with pytest.raises(UserError, match="expected column, folder N, name PATTERN or dicom"):
        parsed_patients(text)


def test_a_pattern_is_no_regular_expression():
    pattern = parsed_patients("name (a+)+{patient}.*").pattern
    assert pattern.fullmatch("(a+)+Ann.png")[1] == "Ann" and pattern.fullmatch("aaaAnnxpng") is None


def test_the_hash_depends_on_the_key_and_not_on_how_a_name_is_written():
    assert hashed("Jörg ", b"k") == hashed("Jo\u0308rg", b"k") != hashed("Jörg", b"l")
    assert hashed("17.0", b"k") == hashed("17", b"k") and hashed(" ", b"k") == 0
    assert 0 < hashed("Ann", b"k") < 2**64


# `fedhassle data check`


def test_identical_images_are_named_and_contradictions_come_first(folder):
    header = ("file", "label", "patient")
    rows = [(f"{k}.png", label, who) for k, label, who in [(1, "benign", "A"), (2, "malignant", "B")]]
    place = folder(("1.png", "3.png", "5.png"), header, rows)
    for old, new in ((1, 2), (3, 4), (3, 6)):
        (place / f"{new}.png").write_bytes((place / f"{old}.png").read_bytes())
    found = identical_images(read_site(place, form("column")), CLASSES)
    assert found == (
        (("1.png (benign)", "2.png (malignant)"), True, True),
        (("3.png", "4.png", "6.png"), False, False),
    )
    code, out, _ = call("data", "check", place, "--picture", place.parent / "x.png")
    assert code == 0
    assert "contradicting labels: 1 set\n  1.png (benign) = 2.png (malignant)\n" in out
    assert "identical images: 1 set\n  3.png = 4.png = 6.png\n" in out
    assert "6 images, 2 labelled (33%), 2 patients" in out and "│ benign     │      1 │        1 │" in out
    assert "Ann" not in out


def test_check_takes_a_rule_or_finds_a_column_or_counts_no_patients(folder, tmp_path):
    place = folder(("benign/A_1.png", "benign/A_2.png", "malignant/B_1.png", "loose.png"))
    words = ("data", "check", place, "--picture", tmp_path / "x.png")
    assert "patients" not in call(*words)[1]
    code, out, _ = call(*words, "--patients", "name {patient}_*")
    assert code == 0 and "4 images, 3 labelled (75%), 2 patients" in out
    code, _, err = call(*words, "--patients", "names")
    assert code == 2 and "expected column, folder N" in err
    counts = survey(place, None, rule=parsed_patients("name {patient}_*")).patients
    assert counts == (2, (1, 1), 0, 2, 1)
