"""Deep grey images: how values become 0 … 255, against NumPy, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.intensities import UnusableError, levels_of, parsed_intensities
from fedhassle.data.site.pictures import read_picture
from fedhassle.errors import UserError

SMOOTH = np.linspace(0, 1, 48 * 64).reshape(48, 64)  # all levels, equally often


def by(text, values):
    return levels_of(values, parsed_intensities(text))


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_of_the_agreed_bits_the_upper_8_are_kept_and_more_is_white(bits):
    values = np.floor(SMOOTH * (2**bits - 1)).astype(np.uint16)
    values[0, :3] = 2**16 - 1  # burnt in
    expected = values // 2 ** (bits - 8)
    expected[0, :3] = 255
    np.testing.assert_array_equal(by(f"{bits} bits", values), expected)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.float32])
def test_a_window_maps_its_ends_to_0_and_255(kind):
    values = np.floor(SMOOTH * 2000 - 1000).astype(kind)
    expected = np.rint(255 * np.clip((values.astype(float) + 160) / 400, 0, 1))
    found = by("window -160 240", values)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.uint8


def test_percentiles_are_those_of_the_image_itself():
    values = np.floor(SMOOTH * 3000 + 500).astype(np.uint16)
    ordered = np.sort(values.ravel())
    low, high = (int(ordered[int(np.ceil(share * ordered.size)) - 1]) for share in (0.05, 0.9))
    expected = np.rint(255 * (np.clip(values.astype(float), low, high) - low) / (high - low))
    np.testing.assert_array_equal(by("percentiles 5 90", values), expected)
    np.testing.assert_array_equal(by("percentiles 5 90", values * 7 + 11), expected)  # whatever its scale


@pytest.mark.parametrize("text", ["16 bits", "percentiles 0 100"])
def test_an_image_of_one_value_loses_nothing(text):
    assert len(np.unique(by(text, np.full((6, 8), 700, np.uint16)))) == 1


@pytest.mark.parametrize("bits", [8, 12, 14])
@pytest.mark.parametrize("letters", [False, True])
def test_images_that_would_keep_few_levels_are_refused_also_with_letters_burnt_in(bits, letters, tmp_path):
    values = np.floor(SMOOTH * (2**bits - 1)).astype(np.uint16)
    if letters:
        values[:2, :20] = np.linspace(0, 65_535, 20)  # smooth edges: 1.3 % of the pixels
    Image.fromarray(values).save(tmp_path / "x.tif")
    with pytest.raises(UnusableError, match=r"keep few of its levels: by '16 bits' .* such as '12 bits'\)"):
        read_picture(tmp_path / "x.tif", 48, 64, 1)
    assert read_picture(tmp_path / "x.tif", 48, 64, 1, parsed_intensities(f"{bits} bits")).pixels.max() == 255


@pytest.mark.parametrize("rule", ["16 bits", "window 5000 9000"])
def test_a_white_box_burnt_in_hides_nothing(rule):
    """A tenth of the pixels is white; by the percentiles alone the image would span all levels."""
    values = np.floor(SMOOTH * 4095).astype(np.uint16)
    values[:5] = 2**16 - 1
    with pytest.raises(UnusableError, match="keep few of its levels"):
        by(rule, values)
    assert np.ptp(by("window 0 4095", values)[5:].astype(int)) > 200


def test_windows_that_miss_an_image_and_bits_that_it_exceeds_are_refused():
    values = np.floor(SMOOTH * 4095).astype(np.uint16)
    with pytest.raises(UnusableError, match="keep few"):
        by("window 5000 9000", values)
    with pytest.raises(UnusableError, match=r"many above the agreed 10 bits \(0 … 1023\)"):
        by("10 bits", values)
    with pytest.raises(UnusableError, match="names no window of its own"):
        by("own window", values)
    with pytest.raises(UnusableError, match="not finite"):
        by("window 0 1", np.array([[np.nan, 0.5]]))


def test_few_colours_are_enough_if_none_is_lost():
    """A mask of two values, far below white: the upper 8 bits keep both."""
    mask = np.where(SMOOTH > 0.5, 512, 0).astype(np.uint16)
    assert {*np.unique(by("16 bits", mask))} == {0, 2}


@pytest.mark.parametrize(
    "text",
    [
        *("", "bits", "7 bits", "17 bits", "12 bit", "window", "window 1", "window 2 1", "window 1 1"),
        *("window a b", "window nan 1", "window 0 inf", "percentiles -1 50", "percentiles 1 101", "own"),
    ],
)
def test_other_rules_are_an_error(text):
    with pytest.raises(UserError, match="expected 'N bits'"):
        parsed_intensities(text)


def test_a_site_reads_by_the_rule_and_8_bits_stay(tmp_path, rng):
    eight = rng.integers(0, 256, (6, 8), dtype=np.uint8)
    Image.fromarray(eight).save(tmp_path / "a.png")
    Image.fromarray(eight.astype(np.uint16) * 16).save(tmp_path / "b.tif")
    Image.fromarray((eight / np.float32(255)).astype(np.float32)).save(tmp_path / "c.tif")
    site = read_site(tmp_path, ImageForm(("a", "b"), 6, 8, 1, intensities=parsed_intensities("12 bits")))
    assert (site.x[..., 0] == eight).all() and len(site.x) == 3
    assert [(one.path, one.what) for one in site.problems] == [
        ("b.tif", "12 bits: upper 8 kept"),
        ("c.tif", "floats in [0, 1] to 0 … 255"),
    ]
    stretched = read_site(
        tmp_path, ImageForm(("a",), 6, 8, 1, intensities=parsed_intensities("percentiles 0 100"))
    )
    low, high = int(eight.min()), int(eight.max())
    expected = np.rint(255 * (eight.astype(float) - low) / (high - low))
    assert (stretched.x[0, ..., 0] == eight).all() and (stretched.x[1, ..., 0] == expected).all()
