"""One picture, from a file to pixels of an agreed size and number of channels.

Images for training, evaluation and prediction are all prepared here, so that a model sees them alike. A file
(PNG, JPEG, WebP, TIFF, BMP, GIF, PGM or PPM) becomes 8-bit grey or RGB by these rules, in this order; each
change is reported:

1. Of several frames or pages the first is used.
2. The picture is rotated by its EXIF orientation. Colour profiles are ignored.
3. Of 16 bits the upper 8 are kept, in grey and in colour: never stretched, so that pictures stay comparable.
   PGM and PPM define their own white and are scaled to 8 or 16 bits by it; a TIFF in which 0 is white is
   inverted. 1-bit pictures become black and white. Floats in [0, 1] become round(255·x). Other integers and
   floats have no known scale and are rejected.
4. Transparent parts become white.
5. Palettes, CMYK and other colour spaces become RGB; RGB becomes grey by ITU-R 601 luma, grey becomes RGB.
6. A picture of another size is scaled (bicubic, with its proportions) until it covers the agreed size, and
   cropped to it around the centre.

Files that cannot be read completely, or have more than `MOST_PIXELS` pixels, are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedhassle.data.npz import Images
from fedhassle.data.site.turns import quietly, turns

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".pgm", ".ppm")
# Independent of the suffix. No others: for some formats Pillow runs external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
MOST_PIXELS = 89_478_485  # Pillow's limit for a suspected decompression bomb
FINE = 3  # a JPEG is decoded at this many times the agreed size at least; more makes no visible difference

ORIENTATION = 0x0112  # the EXIF tag
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
WHITE_IS_ZERO = 0  # a value of PHOTOMETRIC
ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FIRST_FRAME = "several frames or pages: first one used"
ROTATED = "rotated by its EXIF orientation"
SIXTEEN_BITS = "16 bits: upper 8 kept"
DARK = "16 bits of which at most 12 are used, so almost black: scale it to all 16 first"
ONE_BIT = "1 bit to black and white"
FLOATS = "floats in [0, 1] to 0 … 255"
OPAQUE = "opaque alpha channel removed"
OVER_WHITE = "transparent parts made white"
TO_GREY, TO_RGB = "RGB to grey", "grey to RGB"
REDUCED, ENLARGED = "reduced to the agreed size", "enlarged to the agreed size"
REDUCED_AND_CUT, ENLARGED_AND_CUT = f"{REDUCED}, edges cut", f"{ENLARGED}, edges cut"
TO_FIT = (
    TO_GREY,
    TO_RGB,
    REDUCED,
    ENLARGED,
    REDUCED_AND_CUT,
    ENLARGED_AND_CUT,
)  # conversions to an agreed form


class UnusableError(Exception):
    """A file whose picture cannot be used; the message gives the reason."""


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


def read_picture(path: Path, height: int, width: int, channels: int) -> Picture:
    """Reads the picture in a file by the rules above; may run in several threads."""
    try:
        if not path.is_file():  # a pipe would block
            raise UnusableError("is not a file" if path.exists() else "does not exist")
        with quietly, path.open("rb") as stream, Image.open(stream, formats=FORMATS) as image:
            info = FileInfo(str(image.format), image.mode, *image.size)
            _reject_huge(image)
            notes: list[str] = []
            if image.format in ("JPEG", "MPO"):
                image.draft(None, (FINE * max(height, width),) * 2)
            with turns.turn(image.width * image.height):
                whole = _decoded(image, notes)
                return Picture(_pixels(whole, height, width, channels, notes), info, tuple(notes))
    except UnusableError:
        raise
    except UnidentifiedImageError as error:
        raise UnusableError(f"is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from error
    except Image.DecompressionBombError as error:
        raise UnusableError(_too_large("")) from error
    # Damaged files make Pillow and its decoders raise many kinds of errors.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnusableError(f"cannot be read ({reason})") from error


def fitted(pixels: Images, height: int, width: int, channels: int) -> tuple[Images, tuple[str, ...]]:
    """Converts pixels (H, W, C) to an agreed size and number of channels; returns also the conversions."""
    notes: list[str] = []
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return _pixels(image, height, width, channels, notes), tuple(notes)


def _reject_huge(image: Image.Image) -> None:
    """Raises for too many pixels, before decoding fills the memory."""
    if image.width * image.height > MOST_PIXELS:
        raise UnusableError(_too_large(f" ({image.width}×{image.height})"))


def _too_large(size: str) -> str:
    return f"has more than {MOST_PIXELS // 10**6} megapixels{size}: reduce it first"


def _decoded(image: Any, notes: list[str]) -> Image.Image:
    """Decodes the first frame and rotates it upright."""
    deep = any(
        ";16" in str(tile) for tile in image.tile
    )  # first, since reading the EXIF data of a PNG decodes it
    frames = getattr(image, "n_frames", 1)
    black = _black(image)
    before = _orientation(image)
    image.load()
    after = _orientation(image)  # Pillow has rotated a TIFF by now
    if frames > 1:
        notes.append(FIRST_FRAME)
    if before in ROTATIONS:
        notes.append(ROTATED)
    if deep and not image.mode.startswith("I"):  # 16-bit colour; `_eight_bits` handles grey
        notes.append(DARK if _almost_black(image) else SIXTEEN_BITS)
    upright: Image.Image = image.transpose(ROTATIONS[after]) if after in ROTATIONS else image
    if black is None:
        return upright
    values = np.asarray(upright)
    return Image.fromarray((black - values).astype(values.dtype))


def _almost_black(image: Any) -> bool:
    """Tells whether 16-bit colours use at most 12 bits; Pillow keeps the upper 8, and in CMYK 0 is white."""
    colours = image.getextrema()[:3]  # without alpha
    return image.mode in ("RGB", "RGBA") and max(high for _, high in colours) < 2 ** (12 - 8)


def _black(image: Any) -> int | None:
    """Returns the value of black if 0 is white; None otherwise, and for 8 bits, which Pillow inverts."""
    if image.format != "TIFF" or image.tag_v2.get(PHOTOMETRIC) != WHITE_IS_ZERO:
        return None
    if image.mode.startswith("I;16"):
        return int(2 ** image.tag_v2[BITS][0] - 1)
    return 1 if image.mode == "F" else None


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if EXIF is damaged: the pixels may be intact."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return 1


def _pixels(image: Image.Image, height: int, width: int, channels: int, notes: list[str]) -> Images:
    """Returns the pixels (H, W, C) of an upright picture in the agreed form."""
    image = _coloured(_opaque(_eight_bits(image, notes), notes), channels, notes)
    if image.size != (width, height):
        notes.append(_change_of_size(image.size, (width, height)))
        image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    # A copy: Pillow's memory is read-only, and PyTorch would warn.
    return np.array(image, np.uint8).reshape(height, width, channels)


def _eight_bits(image: Image.Image, notes: list[str]) -> Image.Image:
    """Converts grey of other depths to 8 bits; colour has them already."""
    if image.mode == "1":
        notes.append(ONE_BIT)
        return image.convert("L")
    if image.mode == "F":
        notes.append(FLOATS)
        return Image.fromarray(_from_floats(np.asarray(image)))
    if image.mode.startswith("I"):
        values = np.asarray(image)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= 2**16:
            raise UnusableError(f"holds numbers from {low} to {high}: scale them to 8 or 16 bits first")
        notes.append(DARK if high < 2**12 else SIXTEEN_BITS)
        return Image.fromarray((values >> 8).astype(np.uint8))
    return image


def _from_floats(values: NDArray[Any]) -> Images:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):  # written so that NaN is rejected too
        raise UnusableError(f"holds floats from {low:g} to {high:g}: scale them to [0, 1] first")
    pixels: Images = np.rint(values * 255).astype(np.uint8)
    return pixels


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
    whole = (
        max(scale * side - room for side, room in zip(size, wanted, strict=True)) < 1
    )  # less than a pixel is lost
    if scale > 1:
        return ENLARGED if whole else ENLARGED_AND_CUT
    return REDUCED if whole else REDUCED_AND_CUT
