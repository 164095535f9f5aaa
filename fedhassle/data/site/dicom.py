"""DICOM files, read by pydicom (the extra `dicom`): the picture of each frame, and the patient.

Slope and intercept, or the modality's table, turn stored values into the units of the device, such as
Hounsfield units; the agreed rule turns these into 0 … 255. MONOCHROME1, in which 0 is white, is inverted;
RGB, YBR and palettes become RGB. Frames of one file show one patient. Compressed files are read if pydicom
can decode them, with Pillow JPEG, JPEG 2000 and RLE; others are refused by the name of their compression.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fedhassle.data.site.fitting import FileInfo
from fedhassle.data.site.intensities import (
    IntensityRule,
    UnusableError,
    Values,
    Window,
    conversion,
    levels_of,
)
from fedhassle.data.site.turns import AT_ONCE, quietly, reject_huge, turns

DICOM = "DICOM"
SUFFIXES = (".dcm", ".dicom")
PREAMBLE, MAGIC = 128, b"DICM"
MOST_FRAMES = 10_000  # of a file
GREY, INVERTED = ("MONOCHROME1", "MONOCHROME2"), "MONOCHROME1"
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "PALETTE COLOR")
DEFLATED = "1.2.840.10008.1.2.1.99"  # unpacks to any size before its header can be read
# Groups of an enhanced file that replace its own elements, for all frames or for one.
FUNCTIONAL = ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence")
RESCALING, WINDOWING = "PixelValueTransformationSequence", "FrameVOILUTSequence"


class DicomHeader(NamedTuple):
    """The number of pictures in a file, and the patient whom they show."""

    frames: int
    patient: str  # PatientID: never logged, sent or kept


def is_dicom(path: Path) -> bool:
    """True if a file is a DICOM file, by its suffix or, without one, by its first bytes."""
    if has_suffix(path):
        return path.suffix.lower() in SUFFIXES
    try:
        with path.open("rb") as file:
            return file.read(PREAMBLE + len(MAGIC))[PREAMBLE:] == MAGIC
    except OSError:
        return False


def has_suffix(path: Path) -> bool:
    """True if a suffix names the format; the numbers in 1.2.840.1 do not."""
    return bool(path.suffix) and not path.suffix[1:].isdecimal()


def read_header(path: Path) -> DicomHeader:
    """Returns the frames and the patient of a file; of one that cannot be read a single frame of nobody."""
    try:
        with quietly:
            header = _header(path)
            return DicomHeader(_frames(header), str(header.get("PatientID") or ""))
    except Exception:  # damaged files raise many kinds of errors; reading the frame says which
        return DicomHeader(1, "")


def read_frame(path: Path, frame: int, rule: IntensityRule, notes: list[str]) -> tuple[Image.Image, FileInfo]:
    """Returns the picture of a frame with 8 bits, and its source."""
    header = _header(path)
    if "Rows" not in header or "Columns" not in header:
        raise UnusableError("is a DICOM file without a picture")
    width, height, colours = int(header.Columns), int(header.Rows), str(header.PhotometricInterpretation)
    reject_huge(width, height)
    _require_known(header, colours)
    packed = header.file_meta.TransferSyntaxUID.is_encapsulated
    # A compressed picture may be larger than the header says: it is decoded alone.
    with turns.turn(max(width * height, AT_ONCE * packed)):
        values = _stored(path, header, frame, colours)
        if colours not in GREY:
            return Image.fromarray(values), FileInfo(DICOM, "RGB", width, height)
        deep = int(header.BitsStored) > 8
        levels = _grey(values, header, frame, rule, notes)
        inverted = colours == INVERTED
        image = Image.fromarray(255 - levels if inverted else levels)
        return image, FileInfo(DICOM, "I;16" if deep else "L", width, height)


def _header(path: Path) -> Any:
    """Reads everything before the pixels."""
    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
    except ImportError as error:
        raise UnusableError("is a DICOM file: install pydicom with pip install 'fedhassle[dicom]'") from error
    logging.getLogger("pydicom").disabled = True  # it quotes odd values, which may name the patient
    with path.open("rb") as file:
        if file.read(PREAMBLE + len(MAGIC))[PREAMBLE:] != MAGIC:
            raise UnusableError("is not a DICOM file")
    if read_file_meta_info(path).get("TransferSyntaxUID") == DEFLATED:
        raise UnusableError("is compressed as Deflated Explicit VR: save it uncompressed first")
    return dcmread(path, stop_before_pixels=True)


def _frames(header: Any) -> int:
    return min(max(1, int(header.get("NumberOfFrames") or 1)), MOST_FRAMES)


def _require_known(header: Any, colours: str) -> None:
    """Raises for colours or a compression that cannot be read, by name."""
    from pydicom.pixels import get_decoder

    if colours not in (*GREY, *COLOURS):
        raise UnusableError(f"has the photometric interpretation {colours[:40]!r}, which is not supported")
    if colours not in GREY and int(header.BitsStored) > 8 and colours != "PALETTE COLOR":
        raise UnusableError(f"has colours of {header.BitsStored} bits; 8 are supported")
    syntax = header.file_meta.TransferSyntaxUID
    try:
        known = not syntax.is_encapsulated or get_decoder(syntax).is_available
    except NotImplementedError:
        known = False
    if not known:
        raise UnusableError(
            f"is compressed as {syntax.name}, which is not supported here: save it uncompressed first"
        )


def _stored(path: Path, header: Any, frame: int, colours: str) -> Values:
    """Returns the values of a frame as stored, (H, W), or as RGB of 8 bits, (H, W, 3)."""
    from pydicom.pixels import apply_color_lut, pixel_array

    values = pixel_array(path, index=frame)
    if colours == "PALETTE COLOR":
        values = apply_color_lut(values, header)
        values = values >> 8 if values.dtype.itemsize > 1 else values
    return values if colours in GREY else np.ascontiguousarray(values, np.uint8)


def _grey(values: Values, header: Any, frame: int, rule: IntensityRule, notes: list[str]) -> Values:
    """Returns the levels of a grey frame; 8 bits without a scale of their own stay as they are."""
    bits, own = int(header.BitsStored), _window(header, frame) if rule.own else None
    rescaled = _rescaled(values, header, frame)
    if bits <= 8 and rescaled is values and own is None and values.dtype.kind == "u":
        return (
            values.astype(np.uint8) if bits == 8 else np.rint(values * (255 / (2**bits - 1))).astype(np.uint8)
        )
    levels = levels_of(rescaled, rule, own)
    notes.append(conversion(rescaled, rule))
    return levels


def _rescaled(values: Values, header: Any, frame: int) -> Values:
    """Returns values in the units of the device: by a table, or by slope and intercept."""
    from pydicom.pixels import apply_modality_lut

    if header.get("ModalityLUTSequence"):
        return np.asarray(apply_modality_lut(values, header))
    slope = float(_element(header, frame, RESCALING, "RescaleSlope") or 1)
    intercept = float(_element(header, frame, RESCALING, "RescaleIntercept") or 0)
    if slope == 1 and intercept == 0:
        return values
    if slope.is_integer() and intercept.is_integer():
        return values.astype(np.int64) * int(slope) + int(intercept)
    return values.astype(np.float64) * slope + intercept


def _window(header: Any, frame: int) -> Window | None:
    """Returns the first window that a file names, as the values that become 0 and 255."""
    centre = _first(_element(header, frame, WINDOWING, "WindowCenter"))
    width = _first(_element(header, frame, WINDOWING, "WindowWidth"))
    if centre is None or width is None:
        return None
    shape = str(_element(header, frame, WINDOWING, "VOILUTFunction") or "LINEAR")
    if shape == "LINEAR" and width > 1:  # DICOM PS3.3 C.11.2.1.2.1
        return Window(centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)
    if shape == "LINEAR_EXACT" and width > 0:
        return Window(centre - width / 2, centre + width / 2)
    if shape == "SIGMOID" and width > 0:
        return Window(centre - width / 2, centre + width / 2, "sigmoid")
    raise UnusableError(f"names a window of width {width:g} with the function {shape[:40]!r}")


def _element(header: Any, frame: int, group: str, name: str) -> Any:
    """Returns an element of a frame, of all frames, or of the file."""
    for functional in FUNCTIONAL:
        groups = header.get(functional) or []
        place = frame if functional == FUNCTIONAL[0] else 0
        inside = groups[place].get(group) if place < len(groups) else None
        if inside and name in inside[0]:
            return inside[0].get(name)
    return header.get(name)


def _first(value: Any) -> float | None:
    """Returns a number, or the first of several."""
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, Sequence) else value)
