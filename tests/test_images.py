"""One image from a file: every kind of pixels, the rule of its size, and what cannot be read."""

import struct

import numpy as np
import pytest
from PIL import Image

from fedhassle.data import npz
from fedhassle.data.images import images_in, read_image, resized
from fedhassle.errors import UserError


@pytest.fixture
def saved(tmp_path):
    """Saves an image and returns its path."""

    def save(image, name="x.png", **how):
        image.save(tmp_path / name, **how)
        return tmp_path / name

    return save


def grey(rng, height=6, width=8):
    return rng.integers(0, 256, (height, width), dtype=np.uint8)


def colour(rng, height=6, width=8):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.bmp", "x.webp", "x.ppm"])
def test_an_image_of_the_right_size_keeps_its_pixels(name, saved, rng):
    pixels = colour(rng)
    path = saved(Image.fromarray(pixels), name, **({"lossless": True} if name == "x.webp" else {}))
    found = read_image(path, 6, 8, 3)
    assert found.dtype == np.uint8 and (found == pixels).all()


def test_grey_and_colour_become_each_other(saved, rng):
    pixels = colour(rng)
    found = read_image(saved(Image.fromarray(pixels)), 6, 8, 1)
    luma = pixels @ np.array([0.299, 0.587, 0.114])  # ITU-R 601-2
    assert found.shape == (6, 8, 1) and np.abs(found[..., 0] - luma).max() <= 1
    light = grey(rng)
    found = read_image(saved(Image.fromarray(light)), 6, 8, 3)
    assert (found == light[..., None]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_transparent_lies_over_white(channels, saved, rng):
    pixels, alpha = colour(rng), rng.integers(0, 256, (6, 8, 1), dtype=np.uint8)
    path = saved(Image.fromarray(np.concatenate([pixels, alpha], 2)))
    over = 255 + (pixels.astype(float) - 255) * (alpha / 255)
    expected = over if channels == 3 else (over @ np.array([0.299, 0.587, 0.114]))[..., None]
    assert np.abs(read_image(path, 6, 8, channels) - expected).max() <= 2
    lone = Image.fromarray(np.stack([pixels[..., 0], alpha[..., 0]], 2))
    assert lone.mode == "LA"
    found = read_image(saved(lone), 6, 8, 1)[..., 0]
    assert np.abs(found - over[..., 0]).max() <= 2


def test_a_palette_is_looked_up_and_its_transparent_colour_is_white(saved):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    assert read_image(saved(image), 1, 2, 3).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    found = read_image(saved(image, transparency=0), 1, 2, 3)
    assert found.tolist() == [[[255, 255, 255], [200, 100, 50]]]
    found = read_image(saved(image, "x.gif", transparency=1), 1, 2, 3)
    assert found.tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("name", ["x.tif", "x.jpg"])
def test_cmyk_becomes_rgb(name, saved):
    path = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), name)  # red
    with Image.open(path) as image:
        assert image.mode == "CMYK"
    assert np.abs(read_image(path, 8, 8, 3).astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("name", ["x.png", "x.tif"])
def test_sixteen_bits_are_scaled_to_eight(name, saved):
    values = np.array([[0, 128, 129, 257, 32_896, 65_535]], np.uint16)
    path = saved(Image.fromarray(values), name)
    assert read_image(path, 1, 6, 1)[..., 0].tolist() == [[0, 0, 1, 1, 128, 255]]
    assert read_image(path, 1, 6, 3)[0, 4].tolist() == [128] * 3


def test_one_bit_is_black_and_white(saved):
    image = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    assert read_image(saved(image), 1, 2, 1).ravel().tolist() == [0, 255]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(np.full((2, 2), 0.5, np.float32)), "fractions without a known range"),
        (Image.fromarray(np.full((2, 2), 70_000, np.int32)), "from 70000 to 70000"),
        (Image.fromarray(np.full((2, 2), -1, np.int32)), "from -1 to -1"),
    ],
)
def test_pixels_without_a_known_range_are_refused(image, message, saved):
    with pytest.raises(UserError, match=rf"x\.tif cannot be read as an image: .*{message}"):
        read_image(saved(image, "x.tif"), 2, 2, 1)


def turned(pixels, orientation):
    """How a camera that wrote this orientation means its pixels (EXIF 2.3, table of the tag 274)."""
    return {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.swapaxes(0, 1),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels, 2).swapaxes(0, 1),
        8: np.rot90(pixels, 1),
    }[orientation]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(orientation, saved, rng):
    pixels = colour(rng, 6, 8)
    exif = Image.Exif()
    exif[274] = orientation
    path = saved(Image.fromarray(pixels), exif=exif)
    expected = turned(pixels, orientation)
    assert (read_image(path, *expected.shape) == expected).all()


def test_damaged_exif_is_ignored(saved, rng):
    pixels = colour(rng)
    path = saved(Image.fromarray(pixels), "x.webp", lossless=True, exif=b"Exif\0\0nonsense")
    assert (read_image(path, 6, 8, 3) == pixels).all()


def test_the_first_frame_counts(saved, rng):
    frames = [Image.fromarray(grey(rng)) for _ in range(3)]
    for name in ("x.gif", "x.tif"):
        path = saved(frames[0], name, save_all=True, append_images=frames[1:])
        assert (read_image(path, 6, 8, 1)[..., 0] == np.asarray(frames[0])).all()


def test_photographs_of_several_pictures_are_read(saved, rng):
    first, second = (Image.fromarray(np.full((8, 8, 3), v, np.uint8)) for v in (60, 200))
    path = saved(first, "x.mpo", format="MPO", save_all=True, append_images=[second])
    assert np.abs(read_image(path, 8, 8, 3).astype(int) - 60).max() <= 2


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
    path = saved(Image.fromarray(pixels[..., 0] if channels == 1 else pixels))
    found = read_image(path, *size, channels)
    assert found.shape == (*size, channels)
    assert np.abs(found - expected).max() <= 2  # two roundings
    assert (resized(pixels, *size, channels) == found).all()


def test_fine_stripes_become_grey_and_not_stripes(saved):
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    found = read_image(saved(Image.fromarray(stripes)), 9, 9, 1)
    assert found.min() > 100 and found.max() < 155


def test_a_sliver_is_read(saved):
    assert read_image(saved(Image.new("L", (1000, 1), 7)), 12, 12, 1).tolist() == [[[7]] * 12] * 12


# What cannot be read


def png_that_says(width, height):
    """The head of a PNG of this size, and no pixels."""

    def chunk(kind, body):
        import zlib

        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 60_000], ids=["over the limit", "far over it"])
def test_an_image_that_would_fill_the_memory_is_refused(side, tmp_path, recwarn):
    (tmp_path / "bomb.png").write_bytes(png_that_says(side, side))
    with pytest.raises(UserError, match=r"bomb\.png cannot be read as an image: .*decompression bomb"):
        read_image(tmp_path / "bomb.png", 12, 12, 1)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.tif", "x.webp", "x.bmp", "x.gif"])
@pytest.mark.filterwarnings("ignore:(Corrupt EXIF|Tag data larger|Truncated)")  # Pillow's, of TIFF
def test_an_image_that_is_cut_short_or_spoilt_is_a_user_error(name, saved, rng):
    path = saved(Image.fromarray(colour(rng, 64, 64)), name)
    whole = path.read_bytes()
    for cut in (0, 1, 10, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=name):
            read_image(path, 12, 12, 3)
    for seed in range(30):  # anything may come of damaged bytes but another kind of error
        spoilt = bytearray(whole)
        for place in np.random.default_rng(seed).integers(0, len(whole), 20):
            spoilt[place] ^= 0x55
        path.write_bytes(bytes(spoilt))
        try:
            assert read_image(path, 12, 12, 3).shape == (12, 12, 3)
        except UserError as error:
            assert name in str(error)


def test_what_is_no_image_is_a_user_error(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    for name, message in [
        ("text.png", "is no image, or not one of PNG, JPEG"),
        ("page.eps", "is no image"),  # Pillow would start another program
        ("folder.png", "no such file"),
        ("nothere.png", "no such file"),
    ]:
        with pytest.raises(UserError, match=rf"{name} .*{message}"):
            read_image(tmp_path / name, 12, 12, 1)


def test_the_images_of_a_folder_are_found_at_every_depth(tmp_path):
    for name in (
        "b.PNG",
        "a/x.jpeg",
        "a/deep/y.tif",
        "notes.txt",
        ".hidden.png",
        ".cache/z.png",
        "a/._x.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in images_in(tmp_path)]
    assert found == ["a/deep/y.tif", "a/x.jpeg", "b.PNG"]


# Stacks


def test_stacks_without_labels(tmp_path, rng):
    x = rng.integers(0, 256, (5, 6, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "one.npz", scans=x)
    np.savez(tmp_path / "more.npz", x_train=x[:1], x_test=x, y_test=np.zeros(5))
    np.savez(tmp_path / "none.npz", a=x, b=x)
    np.save(tmp_path / "lone.npy", x[0])
    np.save(tmp_path / "rgb.npy", np.stack([x[0]] * 3, -1) / 255)
    for name in ("x.npy", "one.npz", "more.npz"):
        assert (npz.read_images(tmp_path / name) == x[..., None]).all()
    assert npz.read_images(tmp_path / "lone.npy").shape == (1, 6, 8, 1)
    assert (npz.read_images(tmp_path / "rgb.npy")[0] == x[0][..., None]).all()
    with pytest.raises(UserError, match=r"none\.npz: holds a, b; expected one array"):
        npz.read_images(tmp_path / "none.npz")


def test_a_stack_that_is_damaged_or_a_pickle_is_a_user_error(tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.npz").write_text("no array")
    np.save(tmp_path / "words.npy", np.array([["a"]]))
    for name in ("pickle.npy", "text.npy", "empty.npy", "text.npz", "words.npy", "nothere.npy"):
        with pytest.raises(UserError, match=name):
            npz.read_images(tmp_path / name)


def test_the_test_part_of_a_file(tmp_path, rng):
    x, y = rng.integers(0, 256, (5, 6, 8), dtype=np.uint8), np.array([0, 2, 1, 0, 0])
    np.savez(tmp_path / "pair.npz", x=x, y=y)
    np.savez(tmp_path / "named.npz", x_test=x, y_test=y, class_names=["a", "b", "c", "d"])
    np.savez(tmp_path / "short.npz", x=x, y=y[:4])
    np.savez(tmp_path / "half.npz", x_test=x, y=y)
    np.savez(tmp_path / "few.npz", x=x, y=y, class_names=["a", "b"])
    found = npz.read_test(tmp_path / "pair.npz")
    assert (found.x == x[..., None]).all() and (found.y == y).all() and found.class_names is None
    assert npz.read_test(tmp_path / "named.npz").class_names == ("a", "b", "c", "d")
    for name, message in [
        ("short", "5 images, y 4 labels"),
        ("half", "expected x_test and y_test"),
        ("few", "3 strings"),
    ]:
        with pytest.raises(UserError, match=message):
            npz.read_test(tmp_path / f"{name}.npz")
