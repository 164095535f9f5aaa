"""A site's own images: sources of labels, conversions of odd files, and errors."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedhassle.data.site import fitting, pictures
from fedhassle.data.site.folder import ImageForm, read_site, site_classes
from fedhassle.data.site.labels import folder_name
from fedhassle.data.site.listing import NO_LABELS, Problem
from fedhassle.errors import UserError

GREY = ImageForm(("cat", "dog", "Größe/x"), 6, 8, 1)
COLOUR = ImageForm(GREY.class_names, 6, 8, 3)


def random_pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def save(path, pixels=None, **options):
    """An image file of 8×6 grey pixels, or of given ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random_pixels(6, 8) if pixels is None else pixels
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


def one(folder, form=GREY):
    """The pixels of a site's only image, and its conversions."""
    site = read_site(folder, form)
    assert len(site.x) == len(site.y) == len(site.files) == 1
    return site.x[0], [problem.what for problem in site.problems]


def csv(folder, text, name="labels.csv", encoding="utf-8"):
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


# Label files


@pytest.fixture
def three(tmp_path):
    """a.png, deep/er/b.PNG and c.png, each with pixels of its own."""
    for seed, name in enumerate(("a.png", "deep/er/b.PNG", "c.png")):
        save(tmp_path / name, random_pixels(6, 8, seed=seed), format="PNG")
    return tmp_path


ROWS = {
    "plain": "file,label\na.png,dog\ndeep/er/b.PNG,cat\n",
    "blank label": "file,label\na.png,dog\ndeep/er/b.PNG,cat\nc.png,\n",
    "spaces as label": "file,label\na.png,dog\ndeep/er/b.PNG,cat\nc.png,  \n",
    "short row": "file,label\na.png,dog\ndeep/er/b.PNG,cat\nc.png\n",
    "other order, further columns": "age,Label,who, FILE \n3,dog,x,a.png\n,cat,,deep/er/b.PNG, ,\n",
    "semicolons": "file;label\na.png;dog\ndeep/er/b.PNG;cat\n",
    "tabs": "file\tlabel\na.png\tdog\ndeep/er/b.PNG\tcat\n",
    "Excel's first line": "sep=;\r\nfile;label\r\na.png;dog\r\ndeep/er/b.PNG;cat\r\n",
    "Excel's first line, quoted": '"sep=,"\nfile,label\na.png,dog\ndeep/er/b.PNG,cat\n',
    "quoted": '"file","label"\r\n"a.png","dog"\r\n"deep/er/b.PNG"," cat "\r\n',
    "BOM and empty lines": "\ufefffile,label\n\na.png,dog\n,\n\ndeep/er/b.PNG,cat\n\n",
    "quotes in cells": 'file,label,who\na.png,dog,"J. ""x"" D.\nJr., ;"\ndeep/er/b.PNG,cat,5" wide\n',
    "old line ends": "file,label\ra.png,dog\rdeep/er/b.PNG,cat\r",
    "dots and backslashes": "file,label\n./a.png,dog\ndeep\\er\\b.PNG,cat\n",
    "the same twice": "file,label\na.png,dog\ndeep/er/b.PNG,cat\na.png,dog\n",
}


@pytest.mark.parametrize("case", ROWS)
def test_labels_come_from_the_rows(three, case):
    csv(three, ROWS[case])
    site = read_site(three, GREY)
    assert site.files == ("a.png", "c.png", "deep/er/b.PNG")
    assert site.y.tolist() == [1, -1, 0] and site.y.dtype == np.int64
    assert site.x.dtype == np.uint8 and site.x.shape == (3, 6, 8, 1)
    for k, seed in enumerate((0, 2, 1)):
        np.testing.assert_array_equal(site.x[k, ..., 0], random_pixels(6, 8, seed=seed))
    assert site.problems == () and dict(site.file_infos) == {("PNG", "L", 8, 6): 3}


def test_a_label_file_may_lie_elsewhere_and_outranks_the_one_in_the_folder(three, tmp_path_factory):
    csv(three, "file,label\na.png,dog\n")
    other = csv(tmp_path_factory.mktemp("labels"), "file,label\na.png,cat\n", "truth.csv")
    assert read_site(three, GREY, labels=other).y.tolist() == [0, -1, -1]
    inside = csv(three, "file,label\nc.png,cat\n", "truth.csv")
    site = read_site(three, GREY, labels=inside)
    assert site.y.tolist() == [-1, 0, -1] and site.problems == ()


def test_a_label_file_is_found_in_any_capitals_and_outranks_folders(tmp_path):
    save(tmp_path / "cat" / "a.png")
    csv(tmp_path, "file,label\ncat/a.png,dog\n", "Labels.CSV")
    assert read_site(tmp_path, GREY).y.tolist() == [1]
    csv(tmp_path, "file,label\n", "labels.csv")
    with pytest.raises(UserError, match=r"2 label files: Labels\.CSV, labels\.csv"):
        read_site(tmp_path, GREY)


TABLE = "is not read: save it as labels.csv, or name one with --labels"


@pytest.mark.parametrize("name", ["labels.xlsx", "Truth.CSV", "labels.tsv", "labels.ods"])
def test_a_table_that_is_not_read_is_noted_where_nothing_is_labelled(tmp_path, name):
    save(tmp_path / "a.png")
    csv(tmp_path, "no table", name)
    assert read_site(tmp_path, GREY).notes == (f"{name} {TABLE}",)
    with pytest.raises(UserError, match=rf"no labelled images; {name} is not read: save it as labels\.csv$"):
        read_site(tmp_path, GREY, labelled_only=True)
    csv(tmp_path, "file,label\na.png,\n")
    assert read_site(tmp_path, GREY).notes == ()
    (tmp_path / "labels.csv").unlink()
    save(tmp_path / "dog" / "b.png")  # one is labelled: the table may be about something else
    assert read_site(tmp_path, GREY).notes == ()


def test_tables_that_are_hidden_or_lie_below_are_not_noted(tmp_path):
    save(tmp_path / "unlabelled" / "a.png")
    csv(tmp_path, "", ".~lock.labels.xlsx")
    csv(tmp_path / "unlabelled", "", "labels.xlsx")
    assert read_site(tmp_path, GREY).notes == ()


def test_folder_names_that_a_label_file_overrules_are_noted(tmp_path):
    for name in ("cat/a.png", "cat/b.png", "dog/c.png", "scans/d.png", "unlabelled/e.png", "f.png"):
        save(tmp_path / name)
    csv(tmp_path, "file,label\ncat/a.png,cat\ndog/c.png,cat\nscans/d.png,dog\n")
    note = "labels.csv decides all labels: the folder names of 2 images are ignored"
    assert read_site(tmp_path, GREY).notes == (note,)
    csv(tmp_path, "file,label\ncat/a.png,cat\ncat/b.png,cat\ndog/c.png,dog\nf.png,dog\n")
    assert read_site(tmp_path, GREY).notes == ()
    csv(tmp_path, "file,label\n")
    assert read_site(tmp_path, GREY).notes == (note.replace("2", "3"),)
    unknown = ImageForm(site_classes(tmp_path), 6, 8, 1)
    assert read_site(tmp_path, unknown).notes == (note.replace("2", "4"),)


def test_a_label_file_below_the_top_is_reported_unless_it_is_named(three):
    csv(three, "file,label\na.png,dog\n")
    below = csv(three / "deep", "file,label\na.png,cat\n")
    csv(three / "deep" / "er", "file,label\nb.PNG,cat\n", "Labels.CSV")
    site = read_site(three, GREY)
    (problem,) = site.problems
    assert site.y.tolist() == [1, -1, -1]
    assert problem.path == "deep/er/Labels.CSV" and problem.outcome == "skipped"
    assert problem.what == ("an unused label file: only the one in the top folder counts, and 1 more like it")
    site = read_site(three, GREY, labels=below)
    assert site.y.tolist() == [0, -1, -1] and [one.path for one in site.problems] == ["deep/er/Labels.CSV"]


def test_umlauts_match_however_they_are_written(tmp_path):
    """On macOS, ü is u and two dots in the names of files and folders."""
    save(tmp_path / "Gro\u0308ße.png")
    csv(tmp_path, "file,label\nGr\u00f6ße.png,Gro\u0308ße/x\n")
    assert read_site(tmp_path, GREY).y.tolist() == [2]


BAD_ROWS = {
    "unknown label": ("file,label\na.png,dog\nc.png,dgo\n", r"row 3 \(c\.png\).*'dgo'.*did you mean 'dog'"),
    "wrong capitals": ("file,label\nc.png,CAT\n", r"'CAT' is not one .* did you mean 'cat'"),
    "nothing like it": ("file,label\nc.png,7\n", r"'7' is not one of the classes \(cat, dog, Größe/x\)"),
    "unknown label of a missing file": ("file,label\nnot.png,dgo\n", r"row 2 \(not\.png\)"),
    "twice, differently": (
        "file,label\na.png,dog\n\n./a.png,cat\n",
        r"row 4 .*'cat' contradicts row 2 \('dog'",
    ),
    "twice, once blank": ("file,label\na.png,dog\na.png,\n", "row 3 .* contradicts row 2"),
    "out of the folder": ("file,label\n../a.png,dog\n", r"row 2 \(\.\./a\.png\): .*outside the folder"),
    "out and back": ("file,label\ndeep/../a.png,dog\n", "outside the folder"),
    "out by backslashes": ("file,label\n..\\a.png,dog\n", "outside the folder"),
    "absolute": ("file,label\n/a.png,dog\n", "outside the folder"),
    "a drive": ("file,label\nC:a.png,dog\n", "outside the folder"),
    "no row fits": (
        "file,label\na,dog\nb,dog\n",
        "no row names an image.*'a', .*'a.png'",
    ),
    "a label that writes": ("file,label\na.png,dog\x1b[2J\n", r"row 2: 'dog\\x1b\[2J' cannot name a class"),
    "a path that writes": (
        "file,label\n../\x1b[2J,dog\n",
        r"row 2 \(\.\./\\x1b\[2J\): the path points outside",
    ),
    "a header that writes": ("file,\x1b[2J\n", r"found file, \\x1b\[2J$"),
    "no file": ("file,label\n,dog\n", "row 2 has the label 'dog' but names no file"),
    "no header": ("a.png,dog\n", r"one column 'file' .*, found a\.png, dog"),
    "no label column": ("file,class\na.png,dog\n", "one column 'label' .*, found file, class"),
    "two label columns": ("file,label,Label\na.png,dog,cat\n", "one column 'label'"),
    "bars": ("file|label\na.png|dog\n", "comma, semicolon or tab"),
    "empty": ("", "is empty"),
    "nothing but Excel's first line": ("sep=;\n", "is empty"),
    "a comma in a name": (
        "file,label\na.png,dog\nx,y.png,cat\n",
        "row 3 has 3 cells.*'cat'",
    ),
    "a cell too many": ("file;label\na.png;dog;;zzz\n", "row 2 has 4 cells.*'zzz'"),
    "many unknown labels": (
        "file,label\na.png,dog\nc.png,NA\nx.png,nan\ny.png,NA\nz.png,dgo\n",
        r"4 rows have labels that are not among the classes \(cat, dog, Größe/x\): "
        r"NA \(rows 3, 5\), nan \(row 4\), dgo \(row 6, did you mean 'dog'\?\); a blank label",
    ),
    "a quote that is not closed": ('file,label\na.png,dog\n"c.png,dog\n', "row 3 is not valid CSV"),
    "a label's quote that is not closed": ('file,label\na.png,"dog\nc.png,dog\n', "row 2 is not valid CSV"),
    "of another column": ('file;label;who\na.png;dog;"x\n\nc.png;dog;y\n', "row 2 is not valid CSV"),
    "a quote that the next opens": ('file,label\n\n"a.png,dog\n"c.png","dog"\n', "row 3 is not valid CSV"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_label_file_is_a_user_error_that_names_the_row(three, case):
    text, message = BAD_ROWS[case]
    csv(three, text)
    with pytest.raises(UserError, match=rf"labels\.csv.*{message}"):
        read_site(three, GREY)


def test_labels_are_checked_before_images_are_read(three, monkeypatch):
    monkeypatch.setattr("fedhassle.data.site.folder.read_picture", lambda *_: pytest.fail("read an image"))
    csv(three, "file,label\na.png,dgo\n")
    with pytest.raises(UserError, match="dgo"):
        read_site(three, GREY)


def test_labelled_only_skips_images_without_a_label_unread(three):
    csv(three, "file,label\nc.png,dog\n")
    (three / "a.png").write_bytes(b"nothing")
    site = read_site(three, GREY, labelled_only=True)
    assert site.files == ("c.png",) and site.y.tolist() == [1] and site.problems == ()
    np.testing.assert_array_equal(site.x[0, ..., 0], random_pixels(6, 8, seed=2))
    np.savez(three / "own.npz", x=random_pixels(3, 6, 8), y=[-1, 2, -1])
    site = read_site(three / "own.npz", GREY, labelled_only=True)
    assert site.files == ("own.npz[1]",) and site.y.tolist() == [2]
    np.testing.assert_array_equal(site.x[0, ..., 0], random_pixels(3, 6, 8)[1])
    csv(three, "file,label\nc.png,\n")
    with pytest.raises(UserError, match="holds no labelled images"):
        read_site(three, GREY, labelled_only=True)


def test_a_row_without_its_image_is_reported(three):
    csv(three, "file,label\na.png,dog\nlost.png,cat\n")
    site = read_site(three, GREY)
    what = "listed in row 3 of labels.csv, but the image does not exist"
    assert site.problems == (Problem("lost.png", what, "skipped"),)
    assert site.y.tolist() == [1, -1, -1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_label_file_may_be_utf_16_with_a_byte_order_mark(three, encoding):
    """As Excel saves “Unicode text”; `utf-16` writes a mark by itself."""
    mark = "" if encoding == "utf-16" else "\ufeff"
    csv(three, f"{mark}file\tlabel\r\na.png\tGröße/x\r\n", encoding=encoding)
    assert read_site(three, GREY).y.tolist() == [2, -1, -1]
    (three / "labels.csv").write_bytes((three / "labels.csv").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"labels\.csv is not UTF-8"):
        read_site(three, GREY)


def test_a_label_such_as_1_0_is_class_1(three):
    """In a column with blanks, pandas writes 1 as 1.0; if 1.0 is a class itself, it means that class."""
    csv(three, "file,label\na.png,1.0\nc.png,0\nc.png,0.0\ndeep/er/b.PNG,\n")
    assert read_site(three, ImageForm(("0", "1"), 6, 8, 1)).y.tolist() == [1, 0, -1]
    csv(three, "file,label\na.png,1.0\nc.png,1\n")
    assert read_site(three, ImageForm(("1", "1.0"), 6, 8, 1)).y.tolist() == [1, 0, -1]
    for label in ("1.5", "1.", "01", "v1.0"):
        csv(three, f"file,label\na.png,{label}\n")
        with pytest.raises(UserError, match="not one of the classes"):
            read_site(three, ImageForm(("0", "1"), 6, 8, 1))


def test_a_label_file_in_another_encoding_is_a_user_error(three):
    csv(three, "file,label\nä.png,dog\n", encoding="latin-1")
    with pytest.raises(UserError, match="is not UTF-8"):
        read_site(three, GREY)


def test_a_label_file_that_is_not_there_is_a_user_error(three):
    with pytest.raises(UserError, match=r"none\.csv cannot be read: No such file"):
        read_site(three, GREY, labels=three / "none.csv")
    (three / "labels.csv").mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        read_site(three, GREY)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.binary(max_size=60), st.sampled_from([b"", b"file,label\n", b"\xef\xbb\xbflabel;file\n"]))
def test_any_label_file_gives_labels_or_a_user_error(three, content, header):
    (three / "labels.csv").write_bytes(header + content)
    try:
        assert set(read_site(three, GREY, threads=1).y.tolist()) <= {-1, 0, 1, 2}
    except UserError as error:
        assert "labels.csv" in str(error)


# Folders


def test_labels_come_from_the_first_folder(tmp_path):
    for name in ("dog/b.png", "dog/deep/a.JPG", "unlabelled/x/cat/c.png", "Größe_x/d.png", "top.png"):
        save(tmp_path / name)
    (tmp_path / "notes").mkdir()  # holds no image
    site = read_site(tmp_path, GREY)
    found = dict(zip(site.files, site.y.tolist(), strict=True))
    assert list(found) == sorted(found)
    expected = {"dog/b.png": 1, "dog/deep/a.JPG": 1, "unlabelled/x/cat/c.png": -1, "Größe_x/d.png": 2}
    assert found == {**expected, "top.png": -1}


@pytest.mark.parametrize("name", ["unlabelled", "Unlabeled", "UNLABELLED"])
def test_unlabelled_may_be_spelt_in_several_ways(tmp_path, name):
    save(tmp_path / name / "a.png")
    assert read_site(tmp_path, GREY).y.tolist() == [-1]


def test_a_folder_that_is_not_a_class_is_a_user_error(tmp_path):
    save(tmp_path / "dogs" / "a.png")
    with pytest.raises(UserError, match=r"folder 'dogs' is not one .*did you mean 'dog'\? .*unlabelled/"):
        read_site(tmp_path, GREY)


def test_a_folder_does_not_write_to_the_terminal(tmp_path):
    save(tmp_path / "cat\x1b[2J" / "a\u202e.png")
    with pytest.raises(UserError, match=r": 'cat\\x1b\[2J' cannot name a class"):
        site_classes(tmp_path)
    csv(tmp_path, "file,label\n")
    (file,) = read_site(tmp_path, GREY).files
    assert file == r"cat\x1b[2J/a\u202e.png"


def test_classes_that_would_share_a_folder_need_a_label_file(tmp_path):
    save(tmp_path / "a_b" / "a.png")
    form = ImageForm(("a/b", "a:b"), 6, 8, 1)
    with pytest.raises(UserError, match="share a folder"):
        read_site(tmp_path, form)
    csv(tmp_path, "file,label\na_b/a.png,a:b\n")
    assert read_site(tmp_path, form).y.tolist() == [1]
    assert folder_name("a/b\\c:d") == "a_b_c_d"


def test_hidden_and_system_files_are_ignored(tmp_path):
    save(tmp_path / "cat" / "a.png")
    for name in (".hidden.png", ".git/x.png", "__MACOSX/cat/._a.png", "cat/._a.png"):
        save(tmp_path / name)
    for name in ("Thumbs.db", "cat/thumbs.db", ".DS_Store", "desktop.ini"):
        (tmp_path / name).write_bytes(b"x")
    site = read_site(tmp_path, GREY)
    assert site.files == ("cat/a.png",) and site.problems == ()


def test_other_files_are_reported_once_for_each_kind(tmp_path):
    save(tmp_path / "cat" / "a.png")
    for name in ("b.raw", "a.raw", "readme", "c.RAW"):
        (tmp_path / name).write_bytes(b"x")
    site = read_site(tmp_path, GREY)
    assert site.problems == (
        Problem("a.raw", "not an image file (.raw), and 2 more like it", "skipped"),
        Problem("readme", "not an image file (without a suffix)", "skipped"),
    )


def test_every_suffix_is_read_in_any_capitals(tmp_path):
    names = ["a.png", "b.jpg", "c.jpeg", "d.webp", "e.tif", "f.tiff", "g.bmp", "h.TIFF", "i.Jpg"]
    names += ["j.gif", "k.pgm", "l.ppm"]
    for name in names:
        save(tmp_path / name)
    site = read_site(tmp_path, GREY)
    assert site.files == tuple(names)
    assert {info.format for info in site.file_infos} == {"PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM"}


def test_links_stay_in_the_folder(tmp_path):
    folder, outside = tmp_path / "site", tmp_path / "outside"
    save(folder / "cat" / "a.png")
    save(outside / "b.png")
    (folder / "cat" / "in.png").symlink_to("a.png")
    (folder / "cat" / "out.png").symlink_to(outside / "b.png")
    (folder / "cat" / "gone.png").symlink_to("none.png")
    (folder / "cat" / "loop.png").symlink_to("loop.png")
    (folder / "dog").symlink_to(outside)
    (folder / "cat" / "self").symlink_to("..")
    site = read_site(folder, GREY)
    assert site.files == ("cat/a.png", "cat/in.png")
    assert {problem.path: problem.what for problem in site.problems} == {
        "cat/out.png": "a link that points outside the folder",
        "cat/gone.png": "a broken link",
        "cat/loop.png": "a broken link",
        "dog": "a link to a folder",
        "cat/self": "a link to a folder",
    }
    (tmp_path / "alias").symlink_to(folder)
    assert read_site(tmp_path / "alias", GREY).files == site.files
    csv(outside, "file,label\ncat/a.png,dog\n")
    (folder / "labels.csv").symlink_to(outside / "labels.csv")
    with pytest.raises(UserError, match=r"labels\.csv is a link that points outside"):
        read_site(folder, GREY)


def test_a_pipe_named_like_an_image_does_not_block(tmp_path):
    save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    assert read_site(tmp_path, GREY).problems == (Problem("b.png", "not a regular file", "skipped"),)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_files_without_permission_are_reported(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "b.png").chmod(0)
    (tmp_path / "cat").mkdir(mode=0)
    whats = [problem.what for problem in read_site(tmp_path, GREY).problems]
    assert whats == ["cannot be read (Permission denied)", "a folder that cannot be read (Permission denied)"]


def test_a_file_name_that_is_not_utf_8_is_escaped(tmp_path):
    save(tmp_path / "a.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    assert read_site(tmp_path, GREY).files == ("\\xff.png",)


@pytest.mark.parametrize("name", ["nothing", "file.txt", "empty"])
def test_a_site_without_images_is_a_user_error(tmp_path, name):
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=name):
        read_site(tmp_path / name, GREY)


def test_a_site_without_a_usable_image_is_a_user_error_that_says_why(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%PDF-1.7")
    with pytest.raises(UserError, match=r"no image that can be read: a\.png: is not a PNG"):
        read_site(tmp_path, GREY)


def test_progress_counts_to_the_end_and_threads_change_nothing(tmp_path):
    for k in range(23):
        save(tmp_path / f"{k}.png", random_pixels(6 + k, 9, seed=k))
    (tmp_path / "7.png").write_bytes(b"no image")
    seen = []
    whole = read_site(tmp_path, GREY, progress=lambda *counts: seen.append(counts))
    assert seen == [(k, 23) for k in range(1, 24)]
    alone = read_site(tmp_path, GREY, threads=1)
    assert alone.files == whole.files == tuple(sorted(f"{k}.png" for k in range(23) if k != 7))
    np.testing.assert_array_equal(alone.x, whole.x)
    assert alone.problems == whole.problems
    where = whole.files.index("8.png")  # after the hole that 7 left
    np.testing.assert_array_equal(whole.x[where], read_alone(random_pixels(14, 9, seed=8)))


def read_alone(pixels):
    image = Image.fromarray(pixels)
    scale = max(8 / image.width, 6 / image.height)
    side = (8 / scale, 6 / scale)
    left, top = (image.width - side[0]) / 2, (image.height - side[1]) / 2
    box = (left, top, left + side[0], top + side[1])
    return np.asarray(image.resize((8, 6), Image.Resampling.BICUBIC, box=box))[..., None]


# Odd images


def test_a_plain_image_stays_as_it_is(tmp_path):
    pixels = random_pixels(6, 8, 3)
    save(tmp_path / "a.png", pixels)
    found, what = one(tmp_path, COLOUR)
    np.testing.assert_array_equal(found, pixels)
    assert what == []


def test_grey_and_colour_become_each_other(tmp_path):
    colour, grey = random_pixels(6, 8, 3), random_pixels(6, 8)
    save(tmp_path / "a.png", colour)
    found, what = one(tmp_path, GREY)
    luma = colour.astype(int) @ [19595, 38470, 7471] + 0x8000 >> 16  # ITU-R 601 in 16 bits
    np.testing.assert_array_equal(found[..., 0], luma)
    assert what == ["RGB to grey"]
    save(tmp_path / "a.png", grey)
    found, what = one(tmp_path, COLOUR)
    np.testing.assert_array_equal(found, np.repeat(grey[..., None], 3, 2))
    assert what == ["grey to RGB"]


def png(pixels, colour):
    """A PNG by hand: Pillow writes none with 16-bit colours."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(pixels.dtype.newbyteorder(">")).tobytes() for row in pixels)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("form", "colour", "kind"), [(GREY, 0, ()), (COLOUR, 2, (3,))])
def test_the_upper_8_of_16_bits_are_kept(tmp_path, form, colour, kind):
    pixels = np.random.default_rng(0).integers(0, 2**16, (6, 8, *kind), np.uint16)
    (tmp_path / "a.png").write_bytes(png(pixels, colour))
    found, what = one(tmp_path, form)
    np.testing.assert_array_equal(found, (pixels // 256).reshape(found.shape))
    assert what == [pictures.SIXTEEN_BITS]


def tiff(pixels, photometric=1, bits=16, **more):
    """A TIFF by hand, in the byte order of its pixels; `more` are further tags."""
    order, head = (">", b"MM\0*\0\0\0\x08") if pixels.dtype.byteorder == ">" else ("<", b"II*\0\x08\0\0\0")
    height, width = pixels.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: height}
    tags |= {279: pixels.nbytes} | {int(tag[1:]): value for tag, value in more.items()}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags))
    return head + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + pixels.tobytes()


@pytest.mark.parametrize("kind", ["<u2", ">u2"])
def test_16_bit_tiffs_are_read_in_either_byte_order(tmp_path, kind):
    pixels = np.random.default_rng(0).integers(0, 2**16, (6, 8), np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(pixels.astype(kind)))
    np.testing.assert_array_equal(one(tmp_path)[0][..., 0], pixels >> 8)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["<u1", "<u2", "<f4"])
def test_a_tiff_in_which_0_is_white_is_inverted(tmp_path, kind, turned):
    """Radiographs often have 0 for white and the largest value (1 for floats) for black."""
    white = {"<u1": 255, "<u2": 2**16 - 1, "<f4": 1}[kind]
    pixels = (np.random.default_rng(0).integers(0, 256, (6, 8)) / 255 * white).astype(kind)
    more = {"t339": 3} if kind == "<f4" else {}
    more |= {"t274": 3} if turned else {}
    (tmp_path / "a.tif").write_bytes(tiff(pixels, 0, 8 * pixels.itemsize, **more))
    found, what = one(tmp_path)
    expected = 255 * (1 - pixels[::-1, ::-1] / white if turned else 1 - pixels / white)
    assert np.abs(found[..., 0] - expected).max() <= 1
    assert not turned or what[0] == pictures.ROTATED


@pytest.mark.parametrize(("form", "colour", "bands"), [(COLOUR, 2, 3), (COLOUR, 6, 4), (GREY, 4, 2)])
@pytest.mark.parametrize("value", [4095, 2**14 - 1, 2**14])
def test_at_most_14_of_16_bits_of_colour_are_refused(tmp_path, form, colour, bands, value):
    """With an alpha channel too: only visible values count."""
    pixels = np.full((6, 8, bands), value, np.uint16)
    pixels[..., 0] = 7 if bands > 2 else value
    if bands in (2, 4):
        pixels[..., -1] = 2**16 - 1
    (tmp_path / "a.png").write_bytes(png(pixels, colour))
    if value >= 2**14:
        assert one(tmp_path, form)[1][0] == pictures.SIXTEEN_BITS
    else:
        with pytest.raises(UserError, match=rf"of which the upper 8 are 0 … {value >> 8}: scale them"):
            read_site(tmp_path, form)


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.full((6, 8), -1000, np.int32), "from -1000 to -1000"),
        (np.full((6, 8), 2**16, np.int32), "from 65536 to 65536"),
        (np.full((6, 8), 1.5, np.float32), "floats from 1.5 to 1.5"),
        (np.full((6, 8), np.nan, np.float32), "floats from nan to nan"),
    ],
)
def test_numbers_without_a_known_scale_are_skipped(tmp_path, pixels, reason):
    save(tmp_path / "a.tif", pixels)
    save(tmp_path / "b.png")
    (problem,) = read_site(tmp_path, GREY).problems
    assert problem.path == "a.tif" and problem.outcome == "skipped" and reason in problem.what


def test_floats_between_0_and_1_are_scaled(tmp_path):
    save(tmp_path / "a.tif", np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8))
    found, what = one(tmp_path)
    np.testing.assert_array_equal(found.ravel(), np.rint(np.linspace(0, 1, 48, dtype=np.float32) * 255))
    assert what == ["floats in [0, 1] to 0 … 255"]


def test_one_bit_is_black_and_white(tmp_path):
    save(tmp_path / "a.png", Image.fromarray(random_pixels(6, 8)).convert("1", dither=0))
    found, what = one(tmp_path)
    np.testing.assert_array_equal(found[..., 0], np.where(random_pixels(6, 8) >= 128, 255, 0))
    assert what == [pictures.ONE_BIT]


def test_transparent_parts_show_white(tmp_path):
    pixels = random_pixels(6, 8, 4)
    pixels[:, :4, 3], pixels[:, 4:, 3] = 255, 0
    save(tmp_path / "a.png", pixels)
    found, what = one(tmp_path, COLOUR)
    np.testing.assert_array_equal(found[:, :4], pixels[:, :4, :3])
    assert (found[:, 4:] == 255).all() and what == [fitting.OVER_WHITE]
    pixels[..., 3] = 255
    save(tmp_path / "a.png", pixels)
    found, what = one(tmp_path, COLOUR)
    np.testing.assert_array_equal(found, pixels[..., :3])
    assert what == [fitting.OPAQUE]


@pytest.mark.parametrize("form", [GREY, COLOUR])
def test_grey_with_alpha_stays_grey(tmp_path, form):
    pixels = random_pixels(6, 8, 2)
    pixels[..., 1] = np.where(np.arange(8) < 4, 255, 0)
    save(
        tmp_path / "a.png",
        Image.merge("LA", [Image.fromarray(pixels[..., k]) for k in (0, 1)]),
    )
    found, what = one(tmp_path, form)
    assert (found[:, :4] == pixels[:, :4, :1]).all() and (found[:, 4:] == 255).all()
    assert what == [fitting.OVER_WHITE, *(["grey to RGB"] if form is COLOUR else [])]


def test_palettes_become_colours(tmp_path):
    image = Image.fromarray(random_pixels(6, 8, 3)).quantize(5)
    save(tmp_path / "a.png", image)
    found, what = one(tmp_path, COLOUR)
    palette = np.array(image.getpalette(), np.uint8).reshape(-1, 3)
    np.testing.assert_array_equal(found, palette[np.asarray(image)])
    assert what == ["palette to RGB"]
    save(tmp_path / "a.png", image, transparency=0)
    found, what = one(tmp_path, COLOUR)
    assert (found[np.asarray(image) == 0] == 255).all() and what == [fitting.OVER_WHITE]


def test_cmyk_becomes_rgb(tmp_path):
    image = Image.new("CMYK", (8, 6), (0, 255, 255, 0))  # pure red
    save(tmp_path / "a.jpg", image, quality=100)
    found, what = one(tmp_path, COLOUR)
    assert np.abs(found.astype(int) - [255, 0, 0]).max() < 6 and what == ["CMYK to RGB"]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_rotated_by_exif(tmp_path, orientation, suffix):
    """The tag's numbers by hand: where the first row and the first column of the file belong."""
    wide = np.zeros((6, 8), np.uint8)
    wide[:3, :4], wide[:3, 4:], wide[3:, :4], wide[3:, 4:] = 20, 90, 160, 230
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.T,
        6: np.rot90,
        7: lambda a: a[::-1, ::-1].T,
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(undo[orientation](wide))
    options = {"quality": 100} if suffix in ("jpg", "webp") else {}
    save(tmp_path / f"a.{suffix}", stored, exif=exif, **options)
    found, what = one(tmp_path, GREY)
    assert np.abs(found[..., 0].astype(int) - wide).max() < 60  # nearer to its own corner than to others
    turned = [note for note in what if note != "RGB to grey"]  # WebP knows no grey
    assert turned == ([] if orientation == 1 else [pictures.ROTATED])


def test_damaged_exif_is_ignored(tmp_path):
    save(tmp_path / "a.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    found, what = one(tmp_path)
    np.testing.assert_array_equal(found[..., 0], random_pixels(6, 8))
    assert what == []


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_the_first_of_several_frames_is_used(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("black", "white", "red")]
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:])
    found, what = one(tmp_path, COLOUR)
    assert found.max() < 5 and what == [pictures.FIRST_FRAME]


@pytest.mark.parametrize(
    ("size", "what"),
    [
        ((16, 12), "reduced to the agreed size"),
        ((17, 12), "reduced to the agreed size"),  # half a pixel is no loss
        ((4, 3), "enlarged to the agreed size"),
        ((40, 12), "reduced to the agreed size, edges cut"),
        ((8, 7), "reduced to the agreed size, edges cut"),
        ((8, 3), "enlarged to the agreed size, edges cut"),
        ((1, 300), "enlarged to the agreed size, edges cut"),
    ],
)
def test_other_sizes_are_scaled_to_cover_and_cut_to_the_middle(tmp_path, size, what):
    pixels = random_pixels(size[1], size[0])
    save(tmp_path / "a.png", pixels)
    found, notes = one(tmp_path)
    np.testing.assert_array_equal(found, read_alone(pixels))
    assert notes == [what]


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path):
    smooth = np.linspace(0, 255, 800, dtype=np.float32)[None, :] * np.linspace(0, 1, 600)[:, None]
    save(tmp_path / "a.jpg", smooth.astype(np.uint8), quality=95)
    found, what = one(tmp_path)
    expected = smooth.reshape(6, 100, 8, 100).mean(axis=(1, 3))
    assert np.abs(found[..., 0] - expected).max() < 4 and what == ["reduced to the agreed size"]
    assert set(read_site(tmp_path, GREY).file_infos) == {("JPEG", "L", 800, 600)}  # as it lies in the file


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, recwarn):
    save(tmp_path / "b.png")
    for name, side in (("a.png", 10_000), ("c.png", 60_000)):  # more than the limit; more than twice of it
        whole = png(np.zeros((1, 1), np.uint8), 0)
        header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        content = whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]
        (tmp_path / name).write_bytes(content)
    problems = read_site(tmp_path, GREY).problems
    assert [(problem.path, problem.outcome) for problem in problems] == [
        ("a.png", "skipped"),
        ("c.png", "skipped"),
    ]
    assert all("more than 89 megapixels" in problem.what for problem in problems)
    assert len(recwarn) == 0


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif", "bmp", "gif", "ppm"])
def test_truncated_files_are_skipped_with_their_path(tmp_path, suffix):
    save(tmp_path / "cat" / "good.png")
    whole = save(tmp_path / "cat" / f"cut.{suffix}", random_pixels(60, 80)).read_bytes()
    (tmp_path / "cat" / f"cut.{suffix}").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / f"nothing.{suffix}").touch()
    site = read_site(tmp_path, GREY)
    assert site.files == ("cat/good.png",) and site.y.tolist() == [0]
    assert [(p.path, p.outcome) for p in site.problems] == [
        (f"cat/cut.{suffix}", "skipped"),
        (f"cat/nothing.{suffix}", "skipped"),
    ]


def test_an_image_with_the_suffix_of_another_format_is_read(tmp_path):
    save(tmp_path / "a.jpg", format="PNG")
    assert one(tmp_path)[1] == []


def test_other_formats_are_not_tried_whatever_the_suffix(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n")
    save(tmp_path / "b.png")
    save(tmp_path / "c.png", format="SGI")
    assert [problem.path for problem in read_site(tmp_path, GREY).problems] == ["a.png", "c.png"]


def encoded(name):
    stream = io.BytesIO()
    Image.fromarray(random_pixels(20, 30, 3)).save(stream, name)
    return stream.getvalue()


WHOLE = {name: encoded(name) for name in ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "PPM")}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    st.sampled_from(sorted(WHOLE)), st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=5)
)
def test_damaged_bytes_end_in_pixels_or_are_skipped(tmp_path, name, flips):
    content = bytearray(WHOLE[name])
    for place, mask in flips:
        content[place % len(content)] ^= mask
    (tmp_path / "a.png").write_bytes(content)
    save(tmp_path / "b.png")
    site = read_site(tmp_path, GREY, threads=1)
    assert site.files[-1] == "b.png" and site.x.shape == (len(site.files), 6, 8, 1)
    np.testing.assert_array_equal(site.x[-1, ..., 0], random_pixels(6, 8))


# .npz


@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train")])
def test_an_npz_is_a_site(tmp_path, names):
    x, path = random_pixels(5, 6, 8), tmp_path / "own.npz"
    rest = {"x_test": x[:1], "y_test": np.zeros(1)} if names[0] == "x_train" else {}
    np.savez(path, **{names[0]: x, names[1]: [0, -1, 2, 1, -1]}, **rest)
    site = read_site(path, GREY)
    np.testing.assert_array_equal(site.x[..., 0], x)
    assert site.y.tolist() == [0, -1, 2, 1, -1] and site.problems == ()
    assert site.files[:2] == ("own.npz[0]", "own.npz[1]") and dict(site.file_infos) == {("NPZ", "L", 8, 6): 5}


def test_an_npz_of_another_size_is_converted(tmp_path):
    x = random_pixels(3, 12, 16, 3)
    np.savez(tmp_path / "own.npz", x=x, y=[0, 1, -1])
    site = read_site(tmp_path / "own.npz", GREY)
    luma = (x.astype(int) @ [19595, 38470, 7471] + 0x8000 >> 16).astype(np.uint8)
    np.testing.assert_array_equal(site.x, np.stack([read_alone(image) for image in luma]))
    assert [problem.what for problem in site.problems] == [
        "RGB to grey",
        "reduced to the agreed size",
    ] * 3


def test_class_names_in_an_npz_give_the_meaning_of_its_numbers(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=random_pixels(3, 6, 8), y=[0, 1, -1], class_names=["dog", "cat", "cow"])
    assert read_site(path, GREY).y.tolist() == [1, 0, -1]  # nothing is a cow
    assert site_classes(path) == ("dog", "cat", "cow")
    np.savez(path, x=random_pixels(3, 6, 8), y=[0, 2, -1], class_names=["dog", "cat", "cow"])
    with pytest.raises(UserError, match=r"label 2, 'cow' is not one of the classes"):
        read_site(path, GREY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((2, 6, 8), np.uint8)}, "lacks y; expected x, y, or x_train, y_train"),
        ({"x": np.zeros((2, 6, 8), np.uint8), "y": [0]}, "x has 2 images, y 1 labels"),
        ({"x": np.zeros((2, 6, 8), np.uint8), "y": [0, 3]}, "label 3; expected −1, or 0 to 2"),
        ({"x": np.zeros((2, 6, 8), np.uint8), "y": [0, -2]}, "y runs from -2 to 0"),
        ({"x": np.zeros((2, 6, 8)) + 7, "y": [0, 1]}, "x .float64. runs from 7.0"),
    ],
)
def test_a_bad_npz_is_a_user_error(tmp_path, content, message):
    np.savez(tmp_path / "own.npz", **content)
    with pytest.raises(UserError, match=rf"own\.npz.*{message}"):
        read_site(tmp_path / "own.npz", GREY)
    with pytest.raises(UserError, match="labels of its own"):
        read_site(tmp_path / "own.npz", GREY, labels=tmp_path / "labels.csv")


# Class names where none are agreed


def test_the_classes_of_a_site_come_from_its_own_data(tmp_path):
    for name in ("10/a.png", "9/b.png", "unlabelled/c.png", "x/d.png", "e.png"):
        save(tmp_path / name)
    assert site_classes(tmp_path) == ("9", "10", "x")
    csv(tmp_path, "file,label\ne.png,b\n9/b.png,a\nx/d.png,\n")
    assert site_classes(tmp_path) == ("a", "b")
    np.savez(tmp_path / "own.npz", x=random_pixels(3, 6, 8), y=[0, 2, -1])
    assert site_classes(tmp_path / "own.npz") == ("0", "1", "2")


def test_a_class_in_both_forms_of_unicode_is_one(tmp_path):
    """ü as one character, and as u and two dots: half of a folder may come from macOS."""
    for name in ("fr\u00fch/a.png", "fru\u0308h/b.png"):
        save(tmp_path / name)
    assert site_classes(tmp_path) == ("fr\u00fch",)
    assert read_site(tmp_path, ImageForm(("x", "fru\u0308h"), 6, 8, 1)).y.tolist() == [1, 1]
    csv(tmp_path, "file,label\nfr\u00fch/a.png,u\u0308\nfr\u00fch/b.png,\u00fc\n")
    assert site_classes(tmp_path) == ("\u00fc",)


@pytest.mark.parametrize(("height", "channels"), [(6, 2), (0, 1)])
def test_an_impossible_image_form_is_an_error(height, channels):
    with pytest.raises(UserError):
        ImageForm(("a", "b"), height, 8, channels)


def test_an_unlabelled_site_may_have_folders_of_any_names(tmp_path):
    """Only if its user says that no folder stands for a class: it may be a misspelt one."""
    for name in ("2024/a/1.png", "2024/2.png", "cat/3.png"):
        save(tmp_path / name)
    with pytest.raises(UserError, match=r"'2024' is not one of the classes.*--labels none"):
        read_site(tmp_path, GREY)
    site = read_site(tmp_path, GREY, NO_LABELS)
    assert site.y.tolist() == [-1, -1, -1] and site.notes == () == site.problems
    (tmp_path / "labels.csv").write_text("file,label\ncat/3.png,cat\n")
    assert read_site(tmp_path, GREY, NO_LABELS).y.tolist() == [-1, -1, -1]
