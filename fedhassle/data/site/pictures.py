"""One picture, from a file to pixels of an agreed size and number of channels.

Images for training, evaluation and prediction are all prepared here, so that a model sees them alike. A file
(PNG, JPEG, WebP, TIFF, BMP, GIF, PGM, PPM or DICOM) becomes 8-bit grey or RGB by these rules, in this order;
each change is reported:

1. Of several frames or pages the first is used; of DICOM (`site.dicom`) each frame is a picture.
2. The picture is rotated by its EXIF orientation. Colour profiles are ignored.
3. Grey of more than 8 bits becomes 0 … 255 by the agreed rule (`site.intensities`); without one, of 16 bits
   the upper 8 are kept, in grey and in colour, floats in [0, 1] become round(255·x), and other values are
   rejected, as are pictures that would keep few levels. PGM and PPM define their own white and are scaled to
   8 or 16 bits by it, unless another rule is agreed, which is for the values in the file. Where 0 is white,
   as in some TIFF and DICOM files, the picture is inverted. 1-bit pictures become black and white.
4. Transparent parts become white.
5. Palettes, CMYK and other colour spaces become RGB; RGB becomes grey by ITU-R 601 luma, grey becomes RGB.
6. A picture of another size is scaled (bicubic, with its proportions) until it covers the agreed size, and
   cropped to it around the centre.

Files that cannot be read completely, or have more than `MOST_PIXELS` pixels, are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedhassle.data.npz import Images
from fedhassle.data.site.dicom import SUFFIXES as DICOM_SUFFIXES
from fedhassle.data.site.dicom import is_dicom, read_frame
from fedhassle.data.site.fitting import FileInfo, Picture, fit
from fedhassle.data.site.intensities import (
    FEW,
    MIDDLE,
    UNSTATED,
    IntensityRule,
    UnusableError,
    conversion,
    levels_of,
)
from fedhassle.data.site.turns import quietly, reject_huge, too_large, turns

PLAIN = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".pgm", ".ppm")
SUFFIXES = (*PLAIN, *DICOM_SUFFIXES)
# Independent of the suffix. No others: for some formats Pillow runs external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
FINE = 3  # a JPEG is decoded at this many times the agreed size at least; more makes no visible difference

ORIENTATION = 0x0112  # the EXIF tag
PHOTOMETRIC = 262  # a tag of TIFF
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
ONE_BIT = "1 bit to black and white"


def read_picture(
    path: Path, height: int, width: int, channels: int, rule: IntensityRule = UNSTATED, frame: int = 0
) -> Picture:
    """Reads the picture in a file by the rules above; may run in several threads. `frame`: of DICOM."""
    try:
        if not path.is_file():  # a pipe would block
            raise UnusableError("is not a file" if path.exists() else "does not exist")
        notes: list[str] = []
        if is_dicom(path):
            with quietly:
                whole, info = read_frame(path, frame, rule, notes)
                return Picture(fit(whole, height, width, channels, notes), info, tuple(notes))
        with quietly, path.open("rb") as stream, Image.open(stream, formats=FORMATS) as image:
            info = FileInfo(str(image.format), image.mode, *image.size)
            reject_huge(image.width, image.height)
            if image.format in ("JPEG", "MPO"):
                image.draft(None, (FINE * max(height, width),) * 2)
            with turns.turn(image.width * image.height):
                inverted, white = _is_inverted(image), _own_white(image)
                decoded = _decoded(image, rule, notes)
                if white is not None and rule.bits != UNSTATED.bits:
                    decoded = _unscaled(decoded, white)
                whole = _eight_bits(decoded, rule, inverted, notes)
                return Picture(fit(whole, height, width, channels, notes), info, tuple(notes))
    except UnusableError:
        raise
    except UnidentifiedImageError as error:
        raise UnusableError(f"is not a {', '.join(FORMATS)} or DICOM file") from error
    except Image.DecompressionBombError as error:
        raise UnusableError(too_large("")) from error
    # Damaged files make Pillow and its decoders raise many kinds of errors.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnusableError(f"cannot be read ({reason})") from error


def _decoded(image: Any, rule: IntensityRule, notes: list[str]) -> Image.Image:
    """Decodes the first frame and rotates it upright."""
    deep = any(";16" in str(tile) for tile in image.tile)  # first: to read a PNG's EXIF data decodes it
    frames = getattr(image, "n_frames", 1)
    before = _orientation(image)
    image.load()
    after = _orientation(image)  # Pillow has rotated a TIFF by now
    if frames > 1:
        notes.append(FIRST_FRAME)
    if before in ROTATIONS:
        notes.append(ROTATED)
    if deep and not image.mode.startswith("I"):  # `_eight_bits` handles grey
        _check_deep_colours(image, rule)
        notes.append(SIXTEEN_BITS)
    upright: Image.Image = image.transpose(ROTATIONS[after]) if after in ROTATIONS else image
    return upright


def _check_deep_colours(image: Any, rule: IntensityRule) -> None:
    """Raises for 16-bit colours that another rule is agreed for, or that are dark: Pillow keeps the upper 8.

    In CMYK 0 is white.
    """
    if rule.bits != UNSTATED.bits:
        raise UnusableError(f"has colours of 16 bits: the agreed {rule.text!r} is for grey images")
    if image.mode in ("RGB", "RGBA"):
        high = np.percentile(np.asarray(image)[..., :3], MIDDLE[1])
        if high < FEW:
            raise UnusableError(f"has colours of 16 bits of which the upper 8 are 0 … {high:.0f}: scale them")


def _is_inverted(image: Any) -> bool:
    """True if 0 is white; not for 8 bits, which Pillow inverts."""
    if image.format != "TIFF" or image.tag_v2.get(PHOTOMETRIC) != WHITE_IS_ZERO:
        return False
    return bool(image.mode == "F" or image.mode.startswith("I;16"))


def _own_white(image: Any) -> int | None:
    """Returns the value that is white in a deep grey PGM file, if it is not that of 16 bits."""
    if image.format != "PPM" or image.mode != "I" or image.tile[0].codec_name == "raw":
        return None
    return int(image.tile[0].args[1])


def _unscaled(image: Image.Image, white: int) -> Image.Image:
    """Returns the values in a PGM file, which Pillow has scaled to 16 bits."""
    return Image.fromarray(np.rint(np.asarray(image) * (white / (2**16 - 1))).astype(np.int32))


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if EXIF is damaged: the pixels may be intact."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return 1


def _eight_bits(image: Image.Image, rule: IntensityRule, inverted: bool, notes: list[str]) -> Image.Image:
    """Converts grey of other depths to 8 bits; colour has them already."""
    if image.mode == "1":
        notes.append(ONE_BIT)
        return image.convert("L")
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values: NDArray[Any] = np.asarray(image)
    if image.mode == "F" and inverted and rule.bits:
        return Image.fromarray(_noted(1 - values, rule, notes))
    levels = _noted(values, rule, notes)
    return Image.fromarray(255 - levels if inverted else levels)


def _noted(values: NDArray[Any], rule: IntensityRule, notes: list[str]) -> Images:
    """Returns the levels of values, and notes the conversion."""
    levels = levels_of(values, rule)
    notes.append(conversion(values, rule))
    return levels
