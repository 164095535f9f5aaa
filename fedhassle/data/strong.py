"""FixMatch's strong augmentation, RandAugment and then cutout, for a whole batch; random draws are arguments.

Each image has its own operations. To avoid branches, each of two slots applies a table of values, a blend and
an affine map to all images; those that do not belong to an image's operation leave it unchanged.

The arithmetic is Pillow's, in integers: magnitudes are multiples of 1/65536, for which Pillow's floating
point has no rounding errors. So every device gives the same bytes, however kernels are fused; the two places
that need fractions say why they are safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

OPERATIONS = (
    "AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize",
    "Rotate", "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY",
)  # fmt: skip
(
    AUTO_CONTRAST, BRIGHTNESS, COLOR, CONTRAST, EQUALIZE, IDENTITY, POSTERIZE,
    ROTATE, SHARPNESS, SHEAR_X, SHEAR_Y, SOLARIZE, TRANSLATE_X, TRANSLATE_Y,
) = range(len(OPERATIONS))  # fmt: skip
SLOTS = 2  # operations per image, each with probability ½
UNIFORMS = 3 * SLOTS + 2  # per slot: operation, magnitude, whether to apply it; then the centre of the cutout

ONE = 1 << 16  # Pillow's fixed point: 16 bits of fraction
HALF = ONE >> 1
FACTOR = (math.ceil(0.05 * ONE), math.floor(0.95 * ONE))  # for Brightness, Color, Contrast, Sharpness
BITS = (4, 8)  # that Posterize keeps
DEGREES = 30  # for Rotate, in either direction
SLANT = (-math.floor(0.3 * ONE), math.floor(0.3 * ONE))  # for shears; for translations as a share of the side
THRESHOLD = (0, 256)  # from which Solarize inverts
BLACK, GREY = 0, 127  # fill outside the image; fill of the cutout


def augmented(pixels: Tensor, u: Tensor) -> Tensor:
    """Applies two operations and cutout to images (B, H, W, C) with 1 or 3 channels; u is (B, UNIFORMS)."""
    pixels = pixels.permute(0, 3, 1, 2).contiguous()  # (B, C, H, W) from here on: a third less time on a CPU
    for slot in range(SLOTS):
        which, magnitude, chance = u[:, 3 * slot : 3 * slot + 3].unbind(1)
        operation = torch.where(chance < 0.5, whole(which, 0, len(OPERATIONS) - 1), IDENTITY)
        pixels = operated(pixels, operation, magnitude)
    cut = cut_out(pixels, u[:, -2], u[:, -1])
    return cut.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)


def operated(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Applies to each image its operation (B,), with a magnitude that the uniform u (B,) draws."""
    return moved(blended(toned(pixels, operation, u), operation, u), operation, u)


def whole(u: Tensor, low: int, high: int) -> Tensor:
    """Maps [0, 1) to the integers from low to high, in equal shares; the product is exact."""
    return low + (u.double() * (high - low + 1)).int()


def selected(operation: Tensor, cases: Mapping[int, Tensor | int], otherwise: Tensor) -> Tensor:
    """Returns for each image the value of its operation."""
    for case, value in cases.items():
        otherwise = torch.where(operation == case, value, otherwise)
    return otherwise


# By a table: the new value of a pixel depends only on its value and channel


def toned(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Applies AutoContrast, Equalize, Posterize and Solarize."""
    values = pixels.flatten(2).long()  # (B, C, H·W)
    up_to = cumulative_counts(values)  # (B, C, 256)
    value = torch.arange(256, dtype=torch.int32, device=u.device)
    u = u[:, None, None]
    dropped = 8 - whole(u, *BITS)
    cases = {
        AUTO_CONTRAST: auto_contrast(up_to, value),
        EQUALIZE: equalize(up_to, value),
        POSTERIZE: value >> dropped << dropped,
        SOLARIZE: torch.where(value < whole(u, *THRESHOLD), value, 255 - value),
    }
    table = selected(operation[:, None, None], cases, value)  # (B, C, 256)
    return table.to(pixels.dtype).gather(2, values).view_as(pixels)


def cumulative_counts(values: Tensor) -> Tensor:
    """Counts the values (B, C, n) that are 0, at most 1, … at most 255, as (B, C, 256)."""
    none = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=values.device)
    each = torch.ones((), dtype=torch.int32, device=values.device).expand_as(values)
    counts = none.scatter_add(2, values, each)  # of integers: the order does not matter
    return counts.cumsum(2, dtype=torch.int32)


def auto_contrast(up_to: Tensor, value: Tensor) -> Tensor:
    """Stretches each channel to 0 … 255 in float64 as Pillow does, which misses some integers.

    Each product is rounded as in Pillow: a fused multiply-add would skip a rounding.
    """
    low = (up_to == 0).sum(2, keepdim=True)  # (B, C, 1)
    high = (up_to < up_to[..., -1:]).sum(2, keepdim=True)
    span = (high - low).clamp(min=1).double()
    scale = torch.full_like(span, 255) / span  # `255 / span` would multiply by a rounded 1/span
    upper = (scale * 2**20).floor() / 2**20  # two halves, whose products with 0 … 255 are exact
    lower = scale - upper
    stretched = (value * upper + value * lower) - (low * upper + low * lower)
    return torch.where(high > low, stretched.int().clamp(0, 255), value)


def equalize(up_to: Tensor, value: Tensor) -> Tensor:
    """Equalises the histogram of each channel, as far as a table of values can."""
    below = F.pad(up_to[..., :-1], (1, 0))
    lower = up_to < up_to[..., -1:]
    but_highest = (up_to * lower).amax(2, keepdim=True)  # all pixels below the highest value
    step = but_highest // 255  # (B, C, 1)
    shared = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, shared, value)


# By a blend of the image with a degenerate one


def blended(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Applies Brightness, Color, Contrast and Sharpness."""
    full = pixels.int()
    grey = luma(full)
    cases: dict[int, Tensor | int]
    cases = {BRIGHTNESS: BLACK, COLOR: grey, CONTRAST: mean(grey), SHARPNESS: smooth(full)}
    degenerate = selected(operation[:, None, None, None], cases, full)
    factor = whole(u, *FACTOR)[:, None, None, None]
    return (degenerate + (factor * (full - degenerate) >> 16)).to(pixels.dtype)


def luma(pixels: Tensor) -> Tensor:
    """Returns the images in grey, (B, 1, H, W)."""
    channels = pixels.shape[1]
    if channels not in (1, 3):
        raise ValueError(f"strong augmentation takes images of 1 or 3 channels, got {channels}")
    if channels == 1:
        return pixels
    red, green, blue = pixels[:, :1], pixels[:, 1:2], pixels[:, 2:]
    return (19595 * red + 38470 * green + 7471 * blue + HALF) >> 16


def mean(grey: Tensor) -> Tensor:
    """Returns the rounded mean of each image, (B, 1, 1, 1)."""
    n = grey[0].numel()
    return ((2 * grey.sum((1, 2, 3), keepdim=True) + n) // (2 * n)).int()


def smooth(pixels: Tensor) -> Tensor:
    """Returns the rounded mean over 3 × 3 pixels, the centre counted five times; the border is kept."""
    height, width = pixels.shape[2:]
    if min(height, width) < 3:
        return pixels
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    middle = pixels[:, :, 1:-1, 1:-1]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * middle
    return pixels + F.pad((total + 6) // 13 - middle, (1, 1, 1, 1))


# By an affine map from a pixel's new place to its old one


def moved(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Applies Rotate, ShearX, ShearY, TranslateX and TranslateY, by the nearest pixel or black."""
    height, width = pixels.shape[2:]
    xx, xy, x0, yx, yy, y0 = (entry[:, None, None] for entry in affine(operation, u, height, width))
    row = torch.arange(height, dtype=torch.int32, device=u.device)[:, None]
    column = torch.arange(width, dtype=torch.int32, device=u.device)
    x = (xx * column + xy * row + x0) >> 16  # (B, H, W)
    y = (yx * column + yy * row + y0) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    source = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    flat = pixels.flatten(2)  # (B, C, H·W)
    found = flat.gather(2, source.flatten(1)[:, None].long().expand_as(flat)).view_as(pixels)
    return torch.where(inside[:, None], found, BLACK)


def affine(operation: Tensor, u: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """Returns the six entries (B,) of each image's map in fixed point; pixel centres lie at halves."""
    cosine, sine, turned_x, turned_y = rotation(u, height, width)
    slant = whole(u, *SLANT)
    leaning = HALF + ((slant + 1) >> 1)
    right, down = (
        HALF + ONE * torch.div(slant * side, ONE, rounding_mode="trunc") for side in (width, height)
    )
    one, none, half = (torch.full_like(slant, value) for value in (ONE, 0, HALF))
    return (
        selected(operation, {ROTATE: cosine}, one),
        selected(operation, {ROTATE: -sine, SHEAR_X: slant}, none),
        selected(operation, {ROTATE: turned_x, SHEAR_X: leaning, TRANSLATE_X: right}, half),
        selected(operation, {ROTATE: sine, SHEAR_Y: slant}, none),
        selected(operation, {ROTATE: cosine}, one),
        selected(operation, {ROTATE: turned_y, SHEAR_Y: leaning, TRANSLATE_Y: down}, half),
    )


def rotation(u: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns cosine, sine and the two offsets (B,) of rotations about the centre, in fixed point.

    Devices differ in the last bits of a float64 cosine. None of the 131,073 angles comes close enough to a
    rounding boundary for this to matter: the tests try them all for the usual sizes.
    """
    angle = whole(u, -ONE, ONE).double() * (math.radians(DEGREES) / ONE)
    cosine, sine = angle.cos(), angle.sin()
    across, down = (width - 1) / 2, (height - 1) / 2  # from the first pixel's centre to the image's
    turned_x = width / 2 - cosine * across + sine * down
    turned_y = height / 2 - sine * across - cosine * down
    return fixed(cosine), fixed(sine), fixed(turned_x), fixed(turned_y)


def fixed(x: Tensor) -> Tensor:
    """Rounds to fixed point."""
    return (x * ONE + 0.5).floor().int()


# Cutout


def cut_out(pixels: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Draws a grey square of half the shorter side around a random pixel, clipped to the image."""
    height, width = pixels.shape[2:]
    side = min(height, width) // 2
    rows, columns = window(height, side, down), window(width, side, across)
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], GREY, pixels)


def window(length: int, side: int, u: Tensor) -> Tensor:
    """Returns a mask (B, length) of a window of the given side around a random place."""
    first = whole(u, 0, length - 1) - side // 2
    place = torch.arange(length, dtype=torch.int32, device=u.device) - first[:, None]
    return (place >= 0) & (place < side)
