"""FixMatch's strong augmentation, RandAugment and then cutout, of a whole batch by draws that come as data.

Each image has its own operations. To go without branches, each of two slots runs on all images one table of
values, one blend and one affine map, which leave those images alone whose operation is of another kind.

All of it is Pillow's arithmetic in whole numbers: magnitudes are multiples of 1/65536, for which the floating
point that Pillow uses makes no rounding errors. So every device gives the same bytes, whichever way kernels
are fused; the two places that need fractions say why they are safe.
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
SLOTS = 2  # operations of an image, each with probability ½
UNIFORMS = 3 * SLOTS + 2  # per slot: which operation, its magnitude, whether; then the middle of the cutout

ONE = 1 << 16  # Pillow's fixed point: 16 bits of fraction
HALF = ONE >> 1
FACTOR = (math.ceil(0.05 * ONE), math.floor(0.95 * ONE))  # of Brightness, Color, Contrast, Sharpness
BITS = (4, 8)  # that Posterize keeps
DEGREES = 30  # of Rotate, either way
SLANT = (-math.floor(0.3 * ONE), math.floor(0.3 * ONE))  # of shears; of translations as a share of the side
THRESHOLD = (0, 256)  # from which Solarize inverts
BLACK, GREY = 0, 127  # what lies outside the image; what cutout leaves


def augmented(pixels: Tensor, u: Tensor) -> Tensor:
    """Two operations on each image (B, H, W, C) of 1 or 3 channels, then cutout; u is (B, UNIFORMS)."""
    pixels = pixels.permute(0, 3, 1, 2).contiguous()  # (B, C, H, W) from here on: a third less time on a CPU
    for slot in range(SLOTS):
        which, magnitude, whether = u[:, 3 * slot : 3 * slot + 3].unbind(1)
        operation = torch.where(whether < 0.5, whole(which, 0, len(OPERATIONS) - 1), IDENTITY)
        pixels = operated(pixels, operation, magnitude)
    cut = cut_out(pixels, u[:, -2], u[:, -1])
    return cut.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)


def operated(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Each image after its operation (B,), whose magnitude a uniform (B,) draws from its range."""
    return moved(blended(toned(pixels, operation, u), operation, u), operation, u)


def whole(u: Tensor, low: int, high: int) -> Tensor:
    """The whole numbers from low to high, each for an equal share of [0, 1); the product is exact."""
    return low + (u.double() * (high - low + 1)).int()


def chosen(operation: Tensor, cases: Mapping[int, Tensor | int], otherwise: Tensor) -> Tensor:
    """For each image the case of its operation."""
    for case, value in cases.items():
        otherwise = torch.where(operation == case, value, otherwise)
    return otherwise


# By a table: what becomes of a value depends on the image's channel alone


def toned(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """AutoContrast, Equalize, Posterize and Solarize."""
    values = pixels.flatten(2).long()  # (B, C, H·W)
    up_to = counts(values)  # (B, C, 256)
    value = torch.arange(256, dtype=torch.int32, device=u.device)
    u = u[:, None, None]
    dropped = 8 - whole(u, *BITS)
    cases = {
        AUTO_CONTRAST: auto_contrast(up_to, value),
        EQUALIZE: equalize(up_to, value),
        POSTERIZE: value >> dropped << dropped,
        SOLARIZE: torch.where(value < whole(u, *THRESHOLD), value, 255 - value),
    }
    table = chosen(operation[:, None, None], cases, value)  # (B, C, 256)
    return table.to(pixels.dtype).gather(2, values).view_as(pixels)


def counts(values: Tensor) -> Tensor:
    """How many of an image's values (B, C, n) are 0, at most 1, … at most 255, as (B, C, 256)."""
    none = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=values.device)
    each = torch.ones((), dtype=torch.int32, device=values.device).expand_as(values)
    return none.scatter_add(2, values, each).cumsum(2, dtype=torch.int32)  # integers: in any order the same


def auto_contrast(up_to: Tensor, value: Tensor) -> Tensor:
    """Stretches each channel to 0 … 255, in Pillow's float64, which falls short of some whole numbers.

    Rounded as Pillow rounds, product by product: a fused multiply-add would leave out a rounding.
    """
    low = (up_to == 0).sum(2, keepdim=True)  # (B, C, 1)
    high = (up_to < up_to[..., -1:]).sum(2, keepdim=True)
    span = (high - low).clamp(min=1).double()
    scale = torch.full_like(span, 255) / span  # `255 / span` would multiply by a rounded 1/span
    upper = (scale * 2**20).floor() / 2**20  # scale in two halves, whose products with 0 … 255 are exact
    lower = scale - upper
    stretched = (value * upper + value * lower) - (low * upper + low * lower)
    return torch.where(high > low, stretched.int().clamp(0, 255), value)


def equalize(up_to: Tensor, value: Tensor) -> Tensor:
    """Gives the values of each channel equal shares, as far as a map of values can."""
    below = F.pad(up_to[..., :-1], (1, 0))
    but_highest = (up_to * (up_to < up_to[..., -1:])).amax(2, keepdim=True)  # all below the highest value
    step = but_highest // 255  # (B, C, 1)
    shared = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, shared, value)


# By a blend of the image with one that lacks something


def blended(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Brightness, Color, Contrast and Sharpness."""
    full = pixels.int()
    grey = luma(full)
    cases: dict[int, Tensor | int]
    cases = {BRIGHTNESS: BLACK, COLOR: grey, CONTRAST: mean(grey), SHARPNESS: smooth(full)}
    lacking = chosen(operation[:, None, None, None], cases, full)
    factor = whole(u, *FACTOR)[:, None, None, None]
    return (lacking + (factor * (full - lacking) >> 16)).to(pixels.dtype)


def luma(pixels: Tensor) -> Tensor:
    """The grey of images, (B, 1, H, W)."""
    channels = pixels.shape[1]
    if channels not in (1, 3):
        raise ValueError(f"strong augmentation takes images of 1 or 3 channels, got {channels}")
    if channels == 1:
        return pixels
    red, green, blue = pixels[:, :1], pixels[:, 1:2], pixels[:, 2:]
    return (19595 * red + 38470 * green + 7471 * blue + HALF) >> 16


def mean(grey: Tensor) -> Tensor:
    """The mean of each image, rounded, (B, 1, 1, 1)."""
    n = grey[0].numel()
    return ((2 * grey.sum((1, 2, 3), keepdim=True) + n) // (2 * n)).int()


def smooth(pixels: Tensor) -> Tensor:
    """The mean over 3 × 3 pixels, of which the middle counts five times, rounded; edges stay."""
    height, width = pixels.shape[2:]
    if min(height, width) < 3:
        return pixels
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    middle = pixels[:, :, 1:-1, 1:-1]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * middle
    return pixels + F.pad((total + 6) // 13 - middle, (1, 1, 1, 1))


# By an affine map from where a pixel goes to where it comes from


def moved(pixels: Tensor, operation: Tensor, u: Tensor) -> Tensor:
    """Rotate, ShearX, ShearY, TranslateX and TranslateY: the nearest pixel, or black."""
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
    """The six entries (B,) of each image's map in fixed point, for pixels whose middles lie at halves."""
    cosine, sine, turned_x, turned_y = rotation(u, height, width)
    slant = whole(u, *SLANT)
    leaning = HALF + ((slant + 1) >> 1)
    right, down = (
        HALF + ONE * torch.div(slant * side, ONE, rounding_mode="trunc") for side in (width, height)
    )
    one, none, half = (torch.full_like(slant, value) for value in (ONE, 0, HALF))
    return (
        chosen(operation, {ROTATE: cosine}, one),
        chosen(operation, {ROTATE: -sine, SHEAR_X: slant}, none),
        chosen(operation, {ROTATE: turned_x, SHEAR_X: leaning, TRANSLATE_X: right}, half),
        chosen(operation, {ROTATE: sine, SHEAR_Y: slant}, none),
        chosen(operation, {ROTATE: cosine}, one),
        chosen(operation, {ROTATE: turned_y, SHEAR_Y: leaning, TRANSLATE_Y: down}, half),
    )


def rotation(u: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosine, sine and the two offsets (B,) of rotations about the middle, in fixed point.

    Devices differ in the last bits of a float64 cosine. None of the 131,073 angles comes so near to where
    fixed point rounds the other way that it could show: the tests try them all for the usual sizes.
    """
    angle = whole(u, -ONE, ONE).double() * (math.radians(DEGREES) / ONE)
    cosine, sine = angle.cos(), angle.sin()
    across, down = (width - 1) / 2, (height - 1) / 2  # from the middle of the first pixel to that of all
    turned_x = width / 2 - cosine * across + sine * down
    turned_y = height / 2 - sine * across - cosine * down
    return fixed(cosine), fixed(sine), fixed(turned_x), fixed(turned_y)


def fixed(x: Tensor) -> Tensor:
    """The nearest number of fixed point."""
    return (x * ONE + 0.5).floor().int()


# Cutout


def cut_out(pixels: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """A grey square of half the shorter side about a random pixel, as far as it lies in the image."""
    height, width = pixels.shape[2:]
    side = min(height, width) // 2
    rows, columns = window(height, side, down), window(width, side, across)
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], GREY, pixels)


def window(length: int, side: int, u: Tensor) -> Tensor:
    """Which of a length's places (B, length) lie in a window of some side about a random place."""
    first = whole(u, 0, length - 1) - side // 2
    place = torch.arange(length, dtype=torch.int32, device=u.device) - first[:, None]
    return (place >= 0) & (place < side)
