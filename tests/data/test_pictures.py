"""One picture from a file: each format, resizing against NumPy, and files that are not pictures."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from fedhassle.data.site import pictures
from fedhassle.data.site.fitting import fitted
from fedhassle.data.site.intensities import UnusableError, parsed_intensities
from fedhassle.data.site.pictures import (
    FIRST_FRAME,
    SIXTEEN_BITS,
    read_picture,
)


@pytest.fixture
def saved(tmp_path):
    """Saves an image and returns its path."""

    def save(pixels, name="x.png", **how):
        image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
        image.save(tmp_path / name, **how)
        return tmp_path / name

    return save


def grey(rng, height=6, width=8):
    return rng.integers(0, 256, (height, width), dtype=np.uint8)


def colour(rng, height=6, width=8):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.bmp", "x.webp", "x.ppm"])
def test_a_picture_of_the_right_size_keeps_its_pixels(name, saved, rng):
    pixels = colour(rng)
    path = saved(pixels, name, **({"lossless": True} if name == "x.webp" else {}))
    found = read_picture(path, 6, 8, 3)
    assert found.pixels.dtype == np.uint8 and (found.pixels == pixels).all() and found.converted == ()
    assert found.pixels.flags.writeable  # else PyTorch warns


@pytest.mark.parametrize("head", ["P5", "P2"])
def test_an_agreed_rule_is_for_the_values_in_a_pgm(head, tmp_path):
    """Pillow scales them to 16 bits, in which 12 agreed bits would all be white."""
    values = np.arange(4095, -1, -1)
    words = " ".join(map(str, values)).encode()
    body = values.astype(">u2").tobytes() if head == "P5" else words
    (tmp_path / "x.pgm").write_bytes(b"%s 64 64 4095\n" % head.encode() + body)
    for rule, expected in (
        ("12 bits", values // 16),
        ("window 100 3000", np.rint(255 * (np.clip(values, 100, 3000) - 100) / 2900)),
        ("16 bits", values // 16),  # its own white
    ):
        found = read_picture(tmp_path / "x.pgm", 64, 64, 1, parsed_intensities(rule)).pixels
        np.testing.assert_array_equal(found.ravel(), expected)


@pytest.mark.parametrize("name", ["x.gif", "x.pgm"])
def test_grey_pictures_of_other_formats_keep_their_pixels(name, saved, rng):
    pixels = grey(rng)
    assert (read_picture(saved(pixels, name), 6, 8, 1).pixels[..., 0] == pixels).all()


def test_the_first_frame_of_a_gif_counts(saved, rng):
    frames = [Image.fromarray(grey(rng)) for _ in range(3)]
    found = read_picture(saved(frames[0], "x.gif", save_all=True, append_images=frames[1:]), 6, 8, 1)
    assert (found.pixels[..., 0] == np.asarray(frames[0])).all() and FIRST_FRAME in found.converted


def test_the_transparent_colour_of_a_palette_is_white(saved):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    found = read_picture(saved(image, "x.gif", transparency=1), 1, 2, 3)
    assert found.pixels.tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize(
    ("white", "note"), [(65_535, SIXTEEN_BITS), (4095, SIXTEEN_BITS), (1000, SIXTEEN_BITS), (100, None)]
)
def test_a_pgm_defines_its_own_white(white, note, tmp_path):
    values = np.array([[0, white // 3, white // 2, white]])
    kind = ">u2" if white > 255 else "u1"
    (tmp_path / "x.pgm").write_bytes(b"P5 4 1 %d\n" % white + values.astype(kind).tobytes())
    found = read_picture(tmp_path / "x.pgm", 1, 4, 1)
    whole = np.rint(values / white * (65_535 if white > 255 else 255)).astype(int)
    assert found.pixels[..., 0].tolist() == (whole >> 8 if white > 255 else whole).tolist()
    assert found.converted == (() if note is None else (note,))


def test_other_formats_with_12_bits_do_not_define_white(saved):
    found = read_picture(saved(np.full((6, 8), 4095, np.uint16), "x.tif"), 6, 8, 1)
    assert (found.pixels == 15).all() and found.converted == (SIXTEEN_BITS,)


def test_photographs_of_several_pictures_are_read(saved):
    first, second = (Image.fromarray(np.full((8, 8, 3), v, np.uint8)) for v in (60, 200))
    path = saved(first, "x.jpg", format="MPO", save_all=True, append_images=[second])
    found = read_picture(path, 8, 8, 3)
    assert np.abs(found.pixels.astype(int) - 60).max() <= 2 and found.converted == (FIRST_FRAME,)


@pytest.mark.parametrize("channels", [1, 3])
def test_half_transparent_parts_are_mixed_with_white(channels, saved, rng):
    pixels, alpha = colour(rng), rng.integers(0, 256, (6, 8, 1), dtype=np.uint8)
    over = 255 + (pixels.astype(float) - 255) * (alpha / 255)
    expected = over if channels == 3 else (over @ np.array([0.299, 0.587, 0.114]))[..., None]
    found = read_picture(saved(np.concatenate([pixels, alpha], 2)), 6, 8, channels)
    assert np.abs(found.pixels - expected).max() <= 2
    lone = Image.fromarray(np.stack([pixels[..., 0], alpha[..., 0]], 2))
    assert lone.mode == "LA"
    found = read_picture(saved(lone), 6, 8, channels)
    assert np.abs(found.pixels - over[..., :1]).max() <= 2


# The size


def bicubic(x):
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def resampled(values, start, stop, size):
    """Along the first axis: the part from start to stop as `size` values, smoothed where it shrinks."""
    step, count = (stop - start) / size, len(values)
    wide = max(step, 1.0)
    made = []
    for i in range(size):
        centre = start + (i + 0.5) * step
        first, last = max(0, int(centre - 2 * wide + 0.5)), min(count, int(centre + 2 * wide + 0.5))
        weights = np.array([bicubic((j + 0.5 - centre) / wide) for j in range(first, last)])
        made.append(np.tensordot(weights / weights.sum(), values[first:last], 1))
    return np.array(made)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((40, 64), (12, 12)),
        ((64, 40), (12, 12)),
        ((9, 7), (28, 28)),
        ((30, 50), (10, 24)),
        ((24, 24), (12, 12)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_other_sizes_are_covered_and_cut_at_the_centre(shape, size, channels, saved, rng):
    """The largest part in the middle that has the wanted shape, each axis by Keys' cubic with a = −½."""
    smooth = np.cumsum(np.cumsum(rng.normal(size=(*shape, channels)), 0), 1)
    pixels = np.uint8(255 * (smooth - smooth.min()) / np.ptp(smooth))
    (height, width), (out_height, out_width) = shape, size
    scale = min(height / out_height, width / out_width)
    top, left = (height - scale * out_height) / 2, (width - scale * out_width) / 2
    across = np.clip(resampled(pixels.swapaxes(0, 1).astype(float), left, width - left, out_width), 0, 255)
    expected = np.clip(resampled(across.swapaxes(0, 1), top, height - top, out_height), 0, 255)
    found = read_picture(saved(pixels[..., 0] if channels == 1 else pixels), *size, channels)
    assert found.pixels.shape == (*size, channels)
    assert np.abs(found.pixels - expected).max() <= 2  # two roundings
    same, notes = fitted(pixels, *size, channels)  # from an array as from a file
    assert (same == found.pixels).all() and notes == found.converted


def test_fine_stripes_become_grey_and_not_stripes(saved):
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    found = read_picture(saved(stripes), 9, 9, 1).pixels
    assert found.min() > 100 and found.max() < 155


def test_a_sliver_is_read(saved):
    found = read_picture(saved(Image.new("L", (1000, 1), 7)), 12, 12, 1)
    assert found.pixels.tolist() == [[[7]] * 12] * 12


# What is no picture


def test_folders_and_pipes_are_not_opened(tmp_path):
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")  # would be waited for
    for name, message in [
        ("folder.png", "is not a file"),
        ("pipe.png", "is not a file"),
        ("no.png", "not exist"),
    ]:
        with pytest.raises(UnusableError, match=message):
            read_picture(tmp_path / name, 12, 12, 1)


def odd_tiff(saved, rng):
    """A TIFF with intact pixels that makes Pillow warn: its last tag claims more data than there is."""
    path = saved(grey(rng), "odd.tif")
    content = bytearray(path.read_bytes())
    start = int.from_bytes(content[4:8], "little")
    count = int.from_bytes(content[start : start + 2], "little")
    entry = start + 2 + 12 * (count - 1)
    content[entry : entry + 12] = (60_000).to_bytes(2, "little") + b"\2\0" + b"\xff\xff\0\0" * 2
    path.write_bytes(content)
    return path


def test_only_warnings_about_odd_files_are_suppressed_in_many_threads(saved, rng):
    path = odd_tiff(saved, rng)
    with pytest.warns(UserWarning), Image.open(path) as image:
        image.getexif()
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: read_picture(path, 6, 8, 1).pixels.sum(), range(100)))
        assert seen == [] and len(set(found)) == 1 and warnings.filters == inside
        with pictures.quietly:
            warnings.warn("of others", stacklevel=1)
        assert len(seen) == 1
    assert warnings.filters == before
