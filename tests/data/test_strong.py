"""FixMatch's strong augmentation of a batch, against Pillow on one image at a time: the same bytes."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from fedhassle.data import strong
from fedhassle.engine.gpu.graphs import SyncDetector

NAMES = (
    "AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize",
    "Rotate", "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY",
)  # fmt: skip
ENHANCERS = ("Brightness", "Color", "Contrast", "Sharpness")
SLANTS = ("ShearX", "ShearY", "TranslateX", "TranslateY")
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
RANGES = {  # of the whole numbers that magnitudes are drawn from; 65,536 stands for 1, for Rotate for 30°
    **dict.fromkeys(ENHANCERS, (3277, 62259)),  # 0.05 … 0.95
    **dict.fromkeys(SLANTS, (-19660, 19660)),  # ±0.3
    "Posterize": (4, 8),
    "Rotate": (-65536, 65536),
    "Solarize": (0, 256),
}
SIZES = [(32, 32), (28, 28), (5, 9), (9, 4), (3, 3), (2, 7), (7, 2), (1, 1), (1, 6), (6, 1)]


# One image at a time


def operate(image, name, k):
    """An operation of the magnitude k on one image (H, W, C), by Pillow."""
    picture = as_picture(image)
    width, height = picture.size
    share = k / 65536
    across, down = int(share * width), int(share * height)
    made = {
        "AutoContrast": lambda: ImageOps.autocontrast(picture),
        "Brightness": lambda: ImageEnhance.Brightness(picture).enhance(share),
        "Color": lambda: ImageEnhance.Color(picture).enhance(share),
        "Contrast": lambda: ImageEnhance.Contrast(picture).enhance(share),
        "Equalize": lambda: ImageOps.equalize(picture),
        "Identity": lambda: picture,
        "Posterize": lambda: ImageOps.posterize(picture, k),
        "Rotate": lambda: picture.rotate(30 * share),
        "Sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(share),
        "ShearX": lambda: picture.transform(picture.size, Image.Transform.AFFINE, (1, share, 0, 0, 1, 0)),
        "ShearY": lambda: picture.transform(picture.size, Image.Transform.AFFINE, (1, 0, 0, share, 1, 0)),
        "Solarize": lambda: ImageOps.solarize(picture, k),
        "TranslateX": lambda: picture.transform(
            picture.size, Image.Transform.AFFINE, (1, 0, across, 0, 1, 0)
        ),
        "TranslateY": lambda: picture.transform(picture.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, down)),
    }[name]()
    return np.asarray(made).reshape(image.shape)


def as_picture(image):
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def cell(u, low, high):
    """The integer from low to high that a uniform number stands for."""
    return low + int(float(u) * (high - low + 1))


def augment(image, u):
    """The whole augmentation of one image, from its eight draws: two operations, then the square."""
    for which, magnitude, whether in (u[:3], u[3:6]):
        name = NAMES[cell(which, 0, 13)]
        if whether < 0.5:
            image = operate(image, name, cell(magnitude, *RANGES.get(name, (0, 0))))
    height, width, _ = image.shape
    side = min(height, width) // 2
    top, left = int(u[6] * height) - side // 2, int(u[7] * width) - side // 2
    image = image.copy()
    image[max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 127
    return image


# Images and draws


def pictures(height, width, channels, n=4):
    """Random images: of all values, of few contrasts, dark, with gradients, of two values, of one."""
    rng = np.random.default_rng([height, width, channels])
    shape = (n, height, width, channels)
    noise = rng.integers(0, 256, shape, dtype=np.uint8)
    narrow = rng.integers(90, 131, shape, dtype=np.uint8)
    dark = (255 * rng.random(shape) ** 4).astype(np.uint8)
    slope = np.linspace(3, 250, height * width).reshape(height, width, 1)
    smooth = np.clip(slope + rng.normal(0, 9, shape), 0, 255).astype(np.uint8)
    pair = rng.choice(np.array([17, 201], np.uint8), shape)
    ends = rng.choice(np.array([0, 255], np.uint8), shape)
    flat = [np.full((1, height, width, channels), value, np.uint8) for value in (0, 1, 127, 254, 255)]
    coloured = np.broadcast_to(rng.integers(0, 256, (n, 1, 1, channels), dtype=np.uint8), shape)
    return np.concatenate([noise, narrow, dark, smooth, pair, ends, *flat, coloured])


def planes(images):
    """Images (B, H, W, C) as the operations see them, (B, C, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def middle(k, low, high):
    """The uniform number in the middle of those that stand for k."""
    return (k - low + 0.5) / (high - low + 1)


def magnitudes(name, n=20):
    """Pairs of a uniform number and the magnitude it stands for: both ends, zero and others."""
    low, high = RANGES.get(name, (0, 0))
    inner = np.random.default_rng(0).integers(low, high + 1, n)
    several = {low, min(low + 1, high), high, *inner.tolist(), *({0, 1, -1} if low < 0 else ())}
    several = sorted(several) if high - low > 20 else range(low, high + 1)
    return [(0.0, low), (BELOW_ONE, high), *((middle(k, low, high), k) for k in several)]


def found(images, name, u):
    """An operation on all images with one draw or one each, as (B, H, W, C)."""
    operation = torch.full((len(images),), NAMES.index(name), dtype=torch.int32)
    u = torch.as_tensor(np.broadcast_to(np.asarray(u, np.float32), len(images)).copy())
    made = strong.operated(planes(images), operation, u)
    assert made.dtype == torch.uint8
    return made.numpy().transpose(0, 2, 3, 1)


# Each operation


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_gives_pillows_bytes(name, channels):
    """At both ends of its range and within, on images of all kinds down to a single pixel."""
    for height, width in SIZES:
        images = pictures(height, width, channels, n=2)
        for u, k in magnitudes(name, n=6):
            expected = np.stack([operate(image, name, k) for image in images])
            assert (found(images, name, u) == expected).all(), (height, width, k)


@pytest.mark.parametrize("name", [*ENHANCERS, *SLANTS, "Rotate"])
def test_many_magnitudes_on_images_of_the_usual_size(name):
    rng = np.random.default_rng(1)
    low, high = RANGES[name]
    images = np.tile(pictures(32, 32, 3), (8, 1, 1, 1))
    magnitude = rng.integers(low, high + 1, len(images))
    expected = np.stack([operate(image, name, int(k)) for image, k in zip(images, magnitude, strict=True)])
    assert (found(images, name, middle(magnitude, low, high)) == expected).all()


@pytest.mark.parametrize("name", ["ShearX", "ShearY"])
@pytest.mark.parametrize("slant", [13107, 3855, 17476, -13107])
def test_shears_whose_source_lies_on_an_edge_between_pixels(name, slant):
    """In row j the middle of a pixel moves by k·(j + ½)/65536: almost ½ for 65535/5 in row 2."""
    images = pictures(32, 32, 3)
    expected = np.stack([operate(image, name, slant) for image in images])
    assert (found(images, name, middle(slant, -19660, 19660)) == expected).all()


def test_every_threshold_of_solarise():
    thresholds = np.arange(257)
    images = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), (257, 1, 1, 1))
    expected = np.stack(
        [operate(image, "Solarize", int(k)) for image, k in zip(images, thresholds, strict=True)]
    )
    assert (found(images, "Solarize", middle(thresholds, 0, 256)) == expected).all()


@pytest.mark.parametrize("span", [1, 2, 7, 25, 31, 49, 93, 98, 103, 187, 200, 254, 255])
def test_auto_contrast_falls_short_where_pillow_does(span):
    """Pillow truncates i·s + o in float64, which for some spans lies just below a whole number.

    All images whose lowest and highest value lie so far apart, each with all values between.
    """
    lows = range(0, 256 - span, max((256 - span) // 9, 1))
    images = np.stack([np.linspace(low, low + span, 256).astype(np.uint8) for low in lows])[..., None, None]
    expected = np.stack([operate(image, "AutoContrast", 0) for image in images])
    assert (found(images, "AutoContrast", 0.5) == expected).all()


def test_auto_contrast_does_fall_short():
    """255·(i − 0)/25 at i = 25 is 255; Pillow's float64 gives 254.99…, hence 254."""
    image = np.arange(26, dtype=np.uint8).reshape(1, 1, 26, 1)
    assert found(image, "AutoContrast", 0.5)[0, 0, 25, 0] == 254


def test_equalise_by_hand():
    """510 pixels, one of them of the highest value: a step of 509 // 255 = 1, and sums beyond 255 are cut."""
    image = np.repeat(np.array([10, 20, 30], np.uint8), [100, 409, 1]).reshape(1, 17, 30, 1)
    expected = np.repeat(np.array([0, 100, 255], np.uint8), [100, 409, 1]).reshape(1, 17, 30, 1)
    assert (found(image, "Equalize", 0.5) == expected).all()
    assert (operate(image[0], "Equalize", 0) == expected).all()


def test_colour_leaves_grey_images_alone():
    images = pictures(8, 8, 1)
    assert (found(images, "Color", 0.0) == images).all()


def test_images_of_two_channels_are_refused():
    with pytest.raises(ValueError, match="1 or 3 channels, got 2"):
        strong.augmented(torch.zeros(1, 4, 4, 2, dtype=torch.uint8), torch.zeros(1, strong.UNIFORMS))


# Rotation


@pytest.mark.parametrize("side", [28, 32, 64, 96])
def test_no_angle_lies_where_the_last_bits_of_a_cosine_matter(side):
    """Every angle's numbers stay 10⁻⁷ of a unit of fixed point from where they would round otherwise.

    Float64 errs by a tenth of that at most: ten roundings of numbers below 96 make 10·96·2⁻⁵³·65536 < 10⁻⁸.
    """
    k = np.arange(-65536, 65537)
    cosine, sine, middle_ = np.cos(np.radians(30 * k / 65536)), np.sin(np.radians(30 * k / 65536)), side / 2
    # Pillow: the source of the first pixel's middle (½, ½), turned about the middle of the image
    x = cosine * (0.5 - middle_) - sine * (0.5 - middle_) + middle_
    y = sine * (0.5 - middle_) + cosine * (0.5 - middle_) + middle_
    exact = np.stack([cosine, sine, x, y]) * 65536
    nearest = np.floor(exact + 0.5)
    assert (0.5 - np.abs(exact - nearest)).min() > 1e-7
    u = torch.from_numpy(middle(k, -65536, 65536).astype(np.float32))
    entries = torch.stack(strong.rotation(u, side, side))
    assert (entries.numpy() == nearest).all()


# Draws


@pytest.mark.parametrize(("low", "high"), [(0, 13), (4, 8), (0, 256), (3277, 62259), (-65536, 65536)])
def test_whole_numbers_have_equal_shares(low, high):
    """Both ends occur, nothing beyond them, and all have equally many of the 2²⁴ draws, give or take one."""
    u = np.arange(2**24, dtype=np.float32) / np.float32(2**24)
    drawn = strong.whole(torch.from_numpy(u), low, high).numpy()
    assert (drawn[0], drawn[-1]) == (low, high)
    counts = np.bincount(drawn - low)
    assert len(counts) == high - low + 1
    assert counts.max() - counts.min() <= 1


def test_the_ranges_are_those_of_fixmatch():
    factor, slant = np.array(strong.FACTOR) / 65536, np.array(strong.SLANT) / 65536
    np.testing.assert_allclose(factor, (0.05, 0.95), atol=1 / 65536)
    np.testing.assert_allclose(slant, (-0.3, 0.3), atol=1 / 65536)
    assert factor[0] >= 0.05 and factor[1] <= 0.95 and slant[1] <= 0.3
    assert strong.OPERATIONS == NAMES


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_draws_of_a_slot_by_hand(name, slot):
    """Operation, magnitude, chance: with a chance of ½ − ε it is applied, with ½ it is not."""
    image = pictures(12, 12, 3, n=1)[0]
    for which, (magnitude, k) in itertools.product(ends_of(NAMES.index(name)), magnitudes(name)[:2]):
        u = np.full((2, 8), 0.5, np.float32)  # the other slot leaves its operation out
        u[:, 3 * slot : 3 * slot + 3] = which, magnitude, 0.5
        u[0, 3 * slot + 2] = np.nextafter(np.float32(0.5), np.float32(0))
        made = strong.augmented(torch.from_numpy(np.stack([image, image])), torch.from_numpy(u)).numpy()
        expected = np.stack([operate(image, name, k), image])
        expected[:, 3:9, 3:9] = 127  # ⌊12/2⌋ = 6 pixels about the pixel ⌊0.5·12⌋ = 6
        assert (made == expected).all(), (which, k)


def ends_of(index):
    """The least and the largest float32 that stand for an operation: those that lie in [k/14, (k + 1)/14)."""
    low, high = -(-index * 2**24 // 14), -(-(index + 1) * 2**24 // 14) - 1  # in units of 2⁻²⁴
    return np.float32(low / 2**24), np.float32(high / 2**24)


def test_operations_are_drawn_in_equal_shares(monkeypatch):
    """Each with probability 1/28, Identity with ½ more, in both slots independently."""
    drawn = []
    monkeypatch.setattr(strong, "operated", lambda pixels, operation, u: drawn.append(operation) or pixels)
    n = 100_000
    u = np.random.default_rng(0).random((n, strong.UNIFORMS), dtype=np.float32)
    strong.augmented(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.from_numpy(u))
    first, second = (operation.numpy() for operation in drawn)
    p = np.full(14, 1 / 28)
    p[NAMES.index("Identity")] += 0.5
    for operation in (first, second):
        counts = np.bincount(operation, minlength=14)
        assert (np.abs(counts - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()
    joint = np.outer(p, p)
    pairs = np.bincount(14 * first + second, minlength=196).reshape(14, 14)
    assert (np.abs(pairs - n * joint) < 5 * np.sqrt(n * joint)).all()


# Cutout


@pytest.mark.parametrize(
    ("height", "width", "side"), [(8, 8, 4), (7, 7, 3), (6, 10, 3), (2, 2, 1), (1, 1, 0)]
)
def test_the_square_at_every_place(height, width, side):
    """Half of the shorter side about each pixel in turn, cut off at the edges."""
    image = np.zeros((1, 1, height, width), np.uint8)
    for down, across in itertools.product(range(height), range(width)):
        u, v = (torch.tensor([(place + 0.5) / n]) for place, n in ((down, height), (across, width)))
        expected = image.copy()
        for row, column in itertools.product(range(height), range(width)):
            within = [-(side // 2) <= d < side - side // 2 for d in (row - down, column - across)]
            expected[0, 0, row, column] = 127 if all(within) else 0
        assert (strong.cut_out(torch.from_numpy(image), u, v).numpy() == expected).all()


def test_the_square_of_cifar_has_sixteen_pixels():
    u = torch.tensor([0.5])
    cut = strong.cut_out(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), u, u) == 127
    assert cut.sum() == 3 * 16 * 16


# All together


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (5, 9), (2, 3), (1, 1)])
def test_a_batch_equals_pillow_image_by_image(height, width, channels):
    images = np.tile(pictures(height, width, channels), (12, 1, 1, 1))
    u = np.random.default_rng(5).random((len(images), strong.UNIFORMS), dtype=np.float32)
    u[:, [2, 5]] *= 0.6  # most operations are applied
    made = strong.augmented(torch.from_numpy(images), torch.from_numpy(u))
    assert (made.dtype, made.shape, made.is_contiguous()) == (torch.uint8, images.shape, True)
    for image, draws, result in zip(images, u, made.numpy(), strict=True):
        assert (result == augment(image, draws)).all(), draws


def batch(n=64, channels=3):
    images = pictures(16, 16, channels, n=(n + 9) // 6)[:n]
    u = torch.rand(len(images), strong.UNIFORMS, generator=torch.Generator().manual_seed(1))
    return torch.from_numpy(images), u


def test_an_image_does_not_depend_on_its_batch():
    images, u = batch()
    together = strong.augmented(images, u)
    alone = [strong.augmented(images[i : i + 1], u[i : i + 1]) for i in range(len(images))]
    assert torch.equal(together, torch.cat(alone))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
    assert torch.equal(strong.augmented(images[order], u[order]), together[order])


def test_nothing_is_drawn(global_randomness):
    images, u = batch()
    first = strong.augmented(images, u)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert torch.equal(strong.augmented(images, u), first)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_host_waits(channels):
    """It can be captured: nothing depends on values on the device."""
    images, u = batch(channels=channels)
    expected = strong.augmented(images, u)
    with SyncDetector():
        made = strong.augmented(images, u)
    assert torch.equal(made, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_bytes_on_a_gpu_eager_captured_and_compiled(channels):
    images, u = batch(channels=channels)
    expected = strong.augmented(images, u)
    there = images.cuda(), u.cuda()
    assert torch.equal(strong.augmented(*there).cpu(), expected)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(strong.augmented(*there).cpu(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = strong.augmented(*there)
    graph.replay()
    assert torch.equal(made.cpu(), expected)
    compiled = torch.compile(strong.augmented, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*there).cpu(), expected)
