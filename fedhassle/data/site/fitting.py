"""From a decoded picture of 8 bits to pixels of the agreed size and number of channels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from fedhassle.data.npz import Images

OPAQUE = "opaque alpha channel removed"
OVER_WHITE = "transparent parts made white"
TO_GREY, TO_RGB = "RGB to grey", "grey to RGB"
REDUCED, ENLARGED = "reduced to the agreed size", "enlarged to the agreed size"
REDUCED_AND_CUT, ENLARGED_AND_CUT = f"{REDUCED}, edges cut", f"{ENLARGED}, edges cut"
# Conversions to an agreed form.
TO_FIT = (TO_GREY, TO_RGB, REDUCED, ENLARGED, REDUCED_AND_CUT, ENLARGED_AND_CUT)


class FileInfo(NamedTuple):
    """Format, mode and size of the picture in a file."""

    format: str
    mode: str  # as Pillow names it: L, RGB, CMYK, I;16 and so on
    width: int
    height: int


class Picture(NamedTuple):
    """Pixels in the agreed form, their source, and the conversions."""

    pixels: Images  # (H, W, C)
    info: FileInfo
    converted: tuple[str, ...]


def fitted(pixels: Images, height: int, width: int, channels: int) -> tuple[Images, tuple[str, ...]]:
    """Converts pixels (H, W, C) to an agreed size and number of channels; returns also the conversions."""
    notes: list[str] = []
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return fit(image, height, width, channels, notes), tuple(notes)


def fit(image: Image.Image, height: int, width: int, channels: int, notes: list[str]) -> Images:
    """Returns the pixels (H, W, C) of an upright picture of 8 bits in the agreed form."""
    image = _coloured(_opaque(image, notes), channels, notes)
    if image.size != (width, height):
        notes.append(_change_of_size(image.size, (width, height)))
        image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    # A copy: Pillow's memory is read-only, and PyTorch would warn.
    return np.array(image, np.uint8).reshape(height, width, channels)


def _opaque(image: Image.Image, notes: list[str]) -> Image.Image:
    """Removes transparency."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema() == (255, 255):
        notes.append(OPAQUE)
        return layer.convert("L" if image.mode == "LA" else "RGB")
    notes.append(OVER_WHITE)
    flat = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return flat.convert("L" if image.mode in ("L", "LA") else "RGB")


def _coloured(image: Image.Image, channels: int, notes: list[str]) -> Image.Image:
    """Converts to grey or RGB, as agreed."""
    if image.mode not in ("L", "RGB"):
        notes.append("palette to RGB" if image.mode == "P" else f"{image.mode} to RGB")
        image = image.convert("RGB")
    wanted = "L" if channels == 1 else "RGB"
    if image.mode != wanted:
        notes.append(TO_GREY if channels == 1 else TO_RGB)
        image = image.convert(wanted)
    return image


def _change_of_size(size: tuple[int, int], wanted: tuple[int, int]) -> str:
    """Names the change of size: reduced or enlarged, and whether edges are cut."""
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    lost = max(scale * side - room for side, room in zip(size, wanted, strict=True))  # pixels of a side
    whole = lost < 1
    if scale > 1:
        return ENLARGED if whole else ENLARGED_AND_CUT
    return REDUCED if whole else REDUCED_AND_CUT
