"""One image from a file, brought to the size and colours that a network takes by one stated rule.

In this order: the first frame; turned upright by its EXIF orientation; 16-bit grey scaled to 8 bits; palettes
and CMYK to RGB; what is transparent laid over white; grey or RGB as asked for; then scaled to cover the
wanted size without distortion (bicubic, antialiased) and cut at the centre. What has that size keeps its
pixels.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from fedhassle.errors import UserError

Pixels = NDArray[np.uint8]  # (H, W, C)

# Decoders of other formats are not even tried: some of Pillow's start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
SUFFIXES = frozenset(
    {*(".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff"), *(".bmp", ".gif", ".pgm", ".ppm")}
)
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by channels
WHITE = (255, 255, 255, 255)
TURNS = {  # from an EXIF orientation to upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_filtering = threading.Lock()  # the filters of warnings belong to the whole process


def read_image(path: Path, height: int, width: int, channels: int) -> Pixels:
    """The image in a file as (height, width, 1 or 3); one that cannot be read is a UserError."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError("there is no such file")
        with opened(path) as image:
            return fitted(image, height, width, channels)
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is no image, or not one of {', '.join(FORMATS)}") from error
    # Damaged bytes make Pillow's decoders raise a dozen kinds of errors.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read as an image: {reason}") from error


def opened(path: Path) -> Image.Image:
    """An image whose pixels are not read yet; one so large that it may be meant to fill the memory raises."""
    with quietly():
        return Image.open(path, formats=FORMATS)


@contextmanager
def quietly() -> Iterator[None]:
    """Without Pillow's warnings of damaged tags; that of an image that would fill the memory is an error."""
    with _filtering, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def fitted(image: Image.Image, height: int, width: int, channels: int) -> Pixels:
    """An image as an array of this size, by the rule above."""
    image.load()  # raises if any pixels are missing
    plain = without_alpha(in_eight_bits(upright(image))).convert(MODES[channels])
    exact = ImageOps.fit(plain, (width, height), Image.Resampling.BICUBIC)
    return np.array(exact, np.uint8).reshape(height, width, channels)


def resized(pixels: Pixels, height: int, width: int, channels: int) -> Pixels:
    """An image (H, W, 1 or 3) that is no file, brought to a size by the same rule."""
    if pixels.shape == (height, width, channels):
        return pixels
    return fitted(
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), height, width, channels
    )


def upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF orientation says; EXIF that is damaged says nothing."""
    turn = None
    with (
        quietly(),
        suppress(Exception),
    ):  # not Pillow's `exif_transpose`, which fails on tags that it cannot write back
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Grey images of 16 bits with 0 … 65,535 scaled to 0 … 255; others as they are."""
    if image.mode == "F":
        raise UserError("its pixels are fractions without a known range: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):  # "I;16" and its like; "I" where Pillow reads 16 bits into 32
        return image
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65_535:
        raise UserError(f"its pixels run from {low} to {high}: save it with 8 or 16 bits")
    return Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8))


def without_alpha(image: Image.Image) -> Image.Image:
    """What is transparent laid over white; palettes and CMYK as RGB; others as they are."""
    if image.has_transparency_data:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, WHITE), over).convert("RGB")
    return image if image.mode in ("1", "L", "RGB") else image.convert("RGB")


def images_in(folder: Path) -> Iterator[Path]:
    """The image files of a folder and those below it, by their names; hidden ones are left out."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            yield path
