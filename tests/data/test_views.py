"""Views of images for training, against NumPy on one image at a time."""

import numpy as np
import pytest
import torch

from fedhassle.data import strong
from fedhassle.data.views import UNIFORMS, make_views, random_crop
from fedhassle.errors import UserError
from fedhassle.method import Stream

CPU = torch.device("cpu")
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def images(n=5, height=7, width=7, channels=3):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, height, width, channels), dtype=np.uint8)


def views(channels=3, flip=True, crop=2):
    mean, std = (0.2, 0.5, 0.7)[:channels], (0.1, 0.25, 0.4)[:channels]
    return make_views(mean, std, flip, crop, CPU), np.array(mean), np.array(std)


def cropped(image, padding, down, across):
    """The window of an image's own size at (down, across) of the image padded by reflection."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
    return padded[down : down + height, across : across + width]


def draw(offset, padding):
    """The uniform numbers at both ends of the interval that stands for an offset in 0 … 2·padding."""
    cells = 2 * padding + 1
    low, high = np.float32(offset / cells), np.float32((offset + 1) / cells)
    return np.nextafter(low, np.float32(1)), np.nextafter(high, np.float32(0)) - np.float32(1e-6)


@pytest.mark.parametrize(("height", "width", "padding"), [(7, 7, 2), (5, 9, 3), (4, 6, 3), (6, 4, 1)])
def test_crops_at_every_offset_equal_numpys_reflection(height, width, padding):
    """All (2p + 1)² windows, among them the four corners, with padding up to a pixel less than the side."""
    pixels = images(1, height, width)
    for down in range(2 * padding + 1):
        for across in range(2 * padding + 1):
            expected = cropped(pixels[0], padding, down, across)
            for u, v in zip(draw(down, padding), draw(across, padding), strict=True):
                found = random_crop(torch.from_numpy(pixels), padding, torch.tensor([u]), torch.tensor([v]))
                assert (found[0].numpy() == expected).all(), (down, across)


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 5, 6])
def test_the_extreme_draws_stay_inside(padding):
    """For u = 0 the first window, for the largest float32 below 1 the last: rounding must not pass it."""
    pixels = images(1, 8, 8)
    for u, offset in ((np.float32(0), 0), (BELOW_ONE, 2 * padding)):
        found = random_crop(torch.from_numpy(pixels), padding, torch.tensor([u]), torch.tensor([u]))
        assert (found[0].numpy() == cropped(pixels[0], padding, offset, offset)).all()


def test_each_image_of_a_batch_has_its_own_draws():
    """Flip where u₀ < ½, then the window at ⌊u·(2p + 1)⌋; a flipped image is flipped before it is padded."""
    view_of, mean, std = views(crop=2)
    pixels = images(40, 6, 9)
    u = np.random.default_rng(1).random((40, 3), dtype=np.float32)
    found = view_of(torch.from_numpy(pixels), "weak", torch.from_numpy(u)).numpy()
    for k, image in enumerate(pixels):
        seen = image[:, ::-1] if u[k, 0] < 0.5 else image
        seen = cropped(seen, 2, int(u[k, 1] * 5), int(u[k, 2] * 5))
        expected = ((seen / 255 - mean) / std).transpose(2, 0, 1)
        np.testing.assert_allclose(found[k], expected, atol=2e-6)


def test_the_flip_is_horizontal_and_takes_half_of_the_draws():
    view_of, _, _ = views(crop=0)
    pixels = images(4)
    u = torch.zeros(4, 3)
    u[:, 0] = torch.tensor([0.0, 0.4999, 0.5, float(BELOW_ONE)])
    seen = view_of.weak(torch.from_numpy(pixels), u).numpy()
    assert (seen[:2] == pixels[:2, :, ::-1]).all()
    assert (seen[2:] == pixels[2:]).all()


def test_without_flip_and_crop_weak_is_clean():
    view_of, _, _ = views(flip=False, crop=0)
    pixels = torch.from_numpy(images())
    assert torch.equal(
        view_of(pixels, "weak", torch.zeros(5, 3)), view_of(pixels, "clean", torch.zeros(5, 0))
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_normalisation_is_by_channel_on_the_scale_of_one(channels):
    """(pixel/255 − mean)/std; 0 and 255 are the ends."""
    view_of, mean, std = views(channels)
    pixels = images(3, 5, 8, channels)
    pixels[0, 0, 0], pixels[0, 0, 1] = 0, 255
    found = view_of(torch.from_numpy(pixels), "clean", torch.zeros(3, 0))
    expected = ((pixels.astype(np.float64) / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_strong_is_weak_and_then_its_own_augmentation():
    """The first three draws belong to the weak view; without operations only cutout remains."""
    view_of, mean, std = views(crop=2)
    pixels = images(40, 6, 9)
    u = np.random.default_rng(2).random((40, UNIFORMS["strong"]), dtype=np.float32)
    u[:, 5] = u[:, 8] = 0.5  # no operation
    found = view_of(torch.from_numpy(pixels), "strong", torch.from_numpy(u)).numpy()
    for k, image in enumerate(pixels):
        seen = image[:, ::-1] if u[k, 0] < 0.5 else image
        seen = cropped(seen, 2, int(u[k, 1] * 5), int(u[k, 2] * 5)).copy()
        down, across = int(u[k, 9] * 6), int(u[k, 10] * 9)
        seen[max(down - 1, 0) : down + 2, max(across - 1, 0) : across + 2] = 127  # half of 6 is 3
        expected = ((seen / 255 - mean) / std).transpose(2, 0, 1)
        np.testing.assert_allclose(found[k], expected, atol=2e-6)


def test_strong_operates_after_flip_and_crop():
    view_of, _, _ = views(crop=2)
    pixels = torch.from_numpy(images(60, 8, 8))
    u = torch.rand(60, UNIFORMS["strong"], generator=torch.Generator().manual_seed(0))
    seen = strong.augmented(view_of.weak(pixels, u[:, :3]), u[:, 3:])
    assert torch.equal(view_of(pixels, "strong", u), view_of(seen, "clean", u[:, :0]))


@pytest.mark.parametrize(("view", "count"), [("clean", 0), ("weak", 3), ("strong", 11)])
def test_how_many_draws_a_view_takes(view, count):
    assert UNIFORMS[view] == count


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("view", ["clean", "weak", "strong"])
def test_views_are_channels_last(view, channels):
    view_of, _, _ = views(channels)
    pixels = torch.from_numpy(images(4, 6, 9, channels))
    x = view_of(pixels, view, torch.rand(4, UNIFORMS[view], generator=torch.Generator().manual_seed(0)))
    assert (x.shape, x.dtype) == ((4, channels, 6, 9), torch.float32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.stride() == (6 * 9 * channels, 1, 9 * channels, channels)


@pytest.mark.parametrize("view", ["weak", "strong"])
def test_pixels_and_draws_are_not_written_to(view):
    view_of, _, _ = views()
    pixels, u = torch.from_numpy(images()), torch.full((5, UNIFORMS[view]), 0.3)
    before = pixels.clone(), u.clone()
    view_of(pixels, view, u)
    assert torch.equal(pixels, before[0]) and torch.equal(u, before[1])


def test_an_unknown_view_is_named_with_those_there_are():
    with pytest.raises(UserError, match="no view 'strnog': a stream takes clean, weak or strong"):
        Stream("labelled", 4, ("weak", "strnog"))
