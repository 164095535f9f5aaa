"""DICOM files, written here by pydicom: values, windows, colours, frames, patients and compressions."""

import logging
import sys
from io import BytesIO

import numpy as np
import pytest
from dicom_files import write
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_windowing
from pydicom.sequence import Sequence
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
)

from fedhassle.data.site import dicom
from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.intensities import UNSTATED, UnusableError, parsed_intensities
from fedhassle.data.site.patients import WHAT_IS_THERE, parsed_patients
from fedhassle.data.site.pictures import read_picture
from fedhassle.predict.images import image_sources, read_batch

SMOOTH = np.linspace(0, 1, 48 * 64).reshape(48, 64)
CT = np.floor(SMOOTH * 4095).astype(np.uint16)  # stored: 1024 below the Hounsfield units


def read(path, rule=None, channels=1, frame=0):
    rule = UNSTATED if rule is None else parsed_intensities(rule)
    return read_picture(path, 48, 64, channels, rule, frame)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian, RLELossless])
def test_bits_and_windows_of_stored_values(tmp_path, syntax):
    path = write(tmp_path / "a.dcm", CT, syntax, bits=12)
    found = read(path, "12 bits")
    np.testing.assert_array_equal(found.pixels[..., 0], CT >> 4)
    assert found.info == ("DICOM", "I;16", 64, 48) and found.converted == ("12 bits: upper 8 kept",)
    with pytest.raises(UnusableError, match="keep few of its levels"):
        read(path)


@pytest.mark.parametrize(
    ("pixels", "slope", "intercept"),
    [
        (CT, "1", "-1024"),
        (CT.astype(np.int16) - 2000, "1", "976"),
        (CT, "0.5", "-1024.0"),
        (CT, "2", "-1024"),
    ],
)
def test_a_window_is_in_rescaled_units(tmp_path, pixels, slope, intercept):
    path = write(tmp_path / "a.dcm", pixels, RescaleSlope=slope, RescaleIntercept=intercept)
    units = pixels.astype(float) * float(slope) + float(intercept)
    expected = np.rint(255 * np.clip((units + 160) / 400, 0, 1))
    np.testing.assert_array_equal(read(path, "window -160 240").pixels[..., 0], expected)
    with pytest.raises(UnusableError, match=r"holds (numbers|floats) from -1024"):
        read(path, "12 bits")


@pytest.mark.parametrize("shape", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_its_own_window_is_pydicoms(tmp_path, shape):
    more = {} if shape is None else {"VOILUTFunction": shape}
    scale = {"RescaleSlope": "1", "RescaleIntercept": "-1024"}
    path = write(
        tmp_path / "a.dcm", CT, bits=12, WindowCenter=["40", "500"], WindowWidth=["400", "9"], **scale, **more
    )
    header = Dataset()
    header.WindowCenter, header.WindowWidth, header.BitsStored, header.PixelRepresentation = 40, 400, 12, 0
    header.PhotometricInterpretation = "MONOCHROME2"
    header.RescaleSlope, header.RescaleIntercept = "1", "-1024"
    if shape:
        header.VOILUTFunction = shape
    windowed = apply_windowing(CT.astype(float) - 1024, header)
    expected = 255 * (windowed - windowed.min()) / (windowed.max() - windowed.min())
    assert np.abs(read(path, "own window").pixels[..., 0] - expected).max() <= 1
    with pytest.raises(UnusableError, match="names no window of its own"):
        read(write(tmp_path / "b.dcm", CT, bits=12), "own window")


def test_monochrome1_is_inverted_and_8_bits_stay(tmp_path, rng):
    eight = rng.integers(0, 256, (48, 64), dtype=np.uint8)
    for kind, expected in (("MONOCHROME2", eight), ("MONOCHROME1", 255 - eight)):
        path = write(tmp_path / "a.dcm", eight, PhotometricInterpretation=kind)
        for rule in (None, "12 bits", "percentiles 1 99"):
            found = read(path, rule)
            assert (found.pixels[..., 0] == expected).all() and found.converted == ()
    path = write(tmp_path / "b.dcm", CT, bits=12, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(read(path, "12 bits").pixels[..., 0], 255 - (CT >> 4))


def test_colours(tmp_path, rng):
    rgb = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
    assert (read(write(tmp_path / "a.dcm", rgb), channels=3).pixels == rgb).all()
    grey = np.repeat(rng.integers(0, 256, (48, 64, 1), dtype=np.uint8), 3, 2)
    grey[..., 1:] = 128  # YCbCr without colour
    found = read(write(tmp_path / "b.dcm", grey, PhotometricInterpretation="YBR_FULL"), channels=3)
    assert (found.pixels == grey[..., :1]).all()
    with pytest.raises(UnusableError, match="colours of 16 bits; 8 are supported"):
        read(write(tmp_path / "c.dcm", rgb.astype(np.uint16)), channels=3)
    with pytest.raises(UnusableError, match="photometric interpretation 'HSV'"):
        read(write(tmp_path / "d.dcm", rgb, PhotometricInterpretation="HSV"), channels=3)


def test_each_frame_is_a_picture_of_one_patient(tmp_path, rng):
    folder = tmp_path / "site"
    folder.mkdir()
    frames = rng.integers(0, 256, (3, 48, 64), dtype=np.uint8)
    write(folder / "cine.dcm", frames, frames=3, PatientID="Müller 17 ")
    write(folder / "IM0001", frames[0] // 2, PatientID="Müller 17")  # without a suffix
    write(folder / "1.2.840.17", frames[1] // 2, PatientID="other")
    (folder / "labels.csv").write_text("file,label\ncine.dcm,b\n1.2.840.17,a\n")
    form = ImageForm(("a", "b"), 48, 64, 1, parsed_patients("dicom"))
    site = read_site(folder, form, secret=b"k")
    assert site.files == ("1.2.840.17", "IM0001", "cine.dcm[0]", "cine.dcm[1]", "cine.dcm[2]")
    assert site.y.tolist() == [0, -1, 1, 1, 1] and (site.x[2:, ..., 0] == frames).all()
    other, one, *frames_of = site.patients.tolist()
    assert {*frames_of} == {one} and other not in (one, 0) and "ller" not in str(site)
    assert (read_site(folder, form, secret=b"l").patients != site.patients).all()
    found = image_sources([str(folder / "cine.dcm")], (48, 64, 1))
    assert [source.name for source in found.images] == [str(folder / f"cine.dcm[{k}]") for k in range(3)]
    assert (np.stack(read_batch(found.images)[0])[..., 0] == frames).all()


def test_frames_show_one_patient_whom_nobody_names(tmp_path, rng):
    """For intervals they count as one; where patients are not agreed on, a site is told what happens."""
    frames = rng.integers(0, 256, (3, 48, 64), dtype=np.uint8)
    write(tmp_path / "cine.dcm", frames, frames=3)
    write(tmp_path / "one.dcm", frames[0] // 2)
    (tmp_path / "labels.csv").write_text("file,label\ncine.dcm,b\n")
    wanted = ImageForm(("a", "b"), 48, 64, 1, WHAT_IS_THERE)
    *cine, one = read_site(tmp_path, wanted, secret=b"k").patients.tolist()
    assert len({*cine}) == 1 and 0 not in cine and one == 0
    (note,) = read_site(tmp_path, ImageForm(("a", "b"), 48, 64, 1)).notes
    assert note.startswith("cine.dcm has frames of one patient to train on and to validate on: agree")
    (tmp_path / "labels.csv").unlink()
    assert read_site(tmp_path, ImageForm(("a", "b"), 48, 64, 1)).notes == ()


def test_a_patient_is_never_logged_not_even_by_pydicom(tmp_path, caplog, recwarn):
    """Pydicom warns of values that are too long for their element, and quotes them."""
    write(tmp_path / "a.dcm", CT, bits=12, PatientID="Erika Mustermann " * 9)
    write(tmp_path / "b.dcm", CT >> 4, bits=8, PatientID="Erika Mustermann " * 9)
    recwarn.clear()
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        site = read_site(tmp_path, ImageForm(("a", "b"), 8, 8, 1, parsed_patients("dicom")), secret=b"k")
    assert len(site.files) == 1 and site.patients.all()
    said = [*caplog.messages, *map(str, site.problems), *(str(one.message) for one in recwarn)]
    assert not [line for line in said if "Mustermann" in line]


def test_a_labelled_file_without_a_patient_is_an_error(tmp_path):
    write(tmp_path / "a.dcm", CT, bits=12)
    (tmp_path / "labels.csv").write_text("file,label\na.dcm,b\n")
    with pytest.raises(ValueError, match=r"the patient of a\.dcm is not known"):
        read_site(tmp_path, ImageForm(("a", "b"), 8, 8, 1, parsed_patients("dicom")))


def test_an_enhanced_file_has_a_scale_and_a_window_for_each_frame(tmp_path):
    def groups(intercept, centre):
        scale, window, made = Dataset(), Dataset(), Dataset()
        scale.RescaleSlope, scale.RescaleIntercept = "1", intercept
        window.WindowCenter, window.WindowWidth, window.VOILUTFunction = centre, "400", "LINEAR_EXACT"
        made.PixelValueTransformationSequence, made.FrameVOILUTSequence = (
            Sequence([scale]),
            Sequence([window]),
        )
        return made

    each = Sequence([groups("-1024", "40"), groups("-2000", "600")])
    path = write(tmp_path / "a.dcm", np.stack([CT, CT]), frames=2, PerFrameFunctionalGroupsSequence=each)
    for frame, (intercept, centre) in enumerate([(-1024, 40), (-2000, 600)]):
        expected = np.rint(255 * np.clip((CT.astype(float) + intercept - centre + 200) / 400, 0, 1))
        np.testing.assert_array_equal(read(path, "own window", frame=frame).pixels[..., 0], expected)


def test_jpeg_and_jpeg_2000_are_read_by_pillow(tmp_path):
    smooth = (SMOOTH * 255).astype(np.uint8)
    for name, syntax, how, most in (
        ("JPEG", JPEGBaseline8Bit, {"quality": 95}, 4),
        ("JPEG2000", JPEG2000Lossless, {}, 0),
    ):
        stream = BytesIO()
        Image.fromarray(smooth).save(stream, name, **how, **({"no_jp2": True} if name == "JPEG2000" else {}))
        path = write(tmp_path / "a.dcm", smooth, syntax, PixelData=encapsulate([stream.getvalue()]))
        assert np.abs(read(path).pixels[..., 0].astype(int) - smooth).max() <= most


@pytest.mark.parametrize(
    ("syntax", "reason"),
    [
        (JPEGLosslessSV1, "is compressed as JPEG Lossless, Non-Hierarchical, First-Order Prediction"),
        (DeflatedExplicitVRLittleEndian, "is compressed as Deflated Explicit VR"),
    ],
)
def test_other_compressions_are_refused_by_name(tmp_path, syntax, reason):
    more = {"PixelData": encapsulate([b"\xff\xd8\xff\xd9"])} if syntax == JPEGLosslessSV1 else {}
    with pytest.raises(UnusableError, match=reason):
        read(write(tmp_path / "a.dcm", CT, syntax, **more))


def test_damaged_and_huge_files_are_refused(tmp_path):
    path = write(tmp_path / "a.dcm", CT, bits=12)
    content = path.read_bytes()
    for name, part, reason in (
        ("b.dcm", content[:-100], "cannot be read"),
        ("c.dcm", content[:400], "without a picture|cannot be read"),
        ("d.dcm", b"x" * 200, "is not a DICOM file"),
        ("e.dcm", b"", "is not a DICOM file"),
    ):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(UnusableError, match=reason):
            read(tmp_path / name, "12 bits")
    with pytest.raises(UnusableError, match=r"more than 89 megapixels \(60000×60000\)"):
        read(write(tmp_path / "f.dcm", CT, Rows=60_000, Columns=60_000))
    assert dicom.read_header(write(tmp_path / "g.dcm", CT, NumberOfFrames=10**6)).frames == dicom.MOST_FRAMES


def test_without_pydicom_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm", CT)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(
        UnusableError, match=r"is a DICOM file: install pydicom with pip install 'fedhassle\[dicom\]'"
    ):
        read(path)
