"""Patients: which images of a site show the same one.

A column `patient` (or `group`) of the label file counts, or an array of that name in an .npz. Without one, a
rule says where to look: a folder of the path, a part of the file's name, or PatientID of a DICOM file. From
here on a patient is a number, the keyed hash of the name: names are neither kept, nor logged, nor sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhassle.data.npz import Labels
from fedhassle.data.site.dicom import DicomHeader
from fedhassle.data.site.labels import nfc, read_labels, row_places, without_decimals
from fedhassle.data.site.listing import LABEL_FILE, ImageFiles, find_label_file
from fedhassle.errors import UserError, require

Patients = NDArray[np.uint64]
"""(N,): the patient of each image, 0 = unknown."""

UNKNOWN = 0
WAYS = "column, folder N, name PATTERN or dicom"
PLACE = "{patient}"  # in a pattern
DEEPEST = 100  # folders


class PatientRule(NamedTuple):
    """The place where the patient of an image is found if there is no column."""

    text: str  # as the agreement has it
    level: int = 0  # of a folder in the path, from 1; 0: not a folder
    pattern: re.Pattern[str] | None = None  # of a file's name
    dicom: bool = False
    strict: bool = True  # an image with a label whose patient is unknown is an error


def parsed_patients(text: str) -> PatientRule:
    """Parses `column`, `folder 2`, `name {patient}_*` or `dicom`."""
    word, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if word == "folder" and rest.isdecimal() and 0 < int(rest) <= DEEPEST:
        return PatientRule(text, level=int(rest))
    if word == "name" and rest.count(PLACE) == 1:
        # No regular expression of the user's: one that takes for ever would stop a site.
        parts = [re.escape(part) for part in rest.split(PLACE)]
        return PatientRule(text, pattern=re.compile("(.+?)".join(parts).replace(r"\*", ".*")))
    require(
        text in ("column", "dicom"),
        f"expected {WAYS}, such as 'folder 2' or 'name {PLACE}_*', got {text!r}",
    )
    return PatientRule(text, dicom=text == "dicom")


# Without an agreement: whatever the images themselves say.
WHAT_IS_THERE = PatientRule("dicom", dicom=True, strict=False)


def hashed(name: str, secret: bytes) -> int:
    """Returns a patient's number below 2⁶⁴, the keyed hash of the name; 0, unknown, for a blank one."""
    plain = without_decimals(nfc(name.strip()))
    if not plain:
        return UNKNOWN
    content = plain.encode("utf-8", "surrogateescape")
    made = hashlib.blake2b(content, digest_size=8, key=secret, person=b"patient").digest()
    return int.from_bytes(made, "big") or 1


def folder_patients(
    rule: PatientRule, images: ImageFiles, label_file: Path | None, secret: bytes
) -> Patients:
    """Returns the patient of each file of a folder, by the column or by the rule; of DICOM unknown."""
    file = label_file or find_label_file(images.folder)
    rows = [] if file is None else read_labels(file)
    if file is not None and any(row.patient is not None for row in rows):
        found = np.zeros(len(images.files), np.uint64)
        for row, place in row_places(rows, file, images.files):
            number = np.uint64(hashed(row.patient or "", secret))
            if place is not None:
                contradiction = found[place] and number and found[place] != number
                require(not contradiction, f"{file}: row {row.number} names another patient for its image")
                found[place] = number or found[place]
        return found
    return np.array([hashed(_by_path(rule, one), secret) for one in images.files], np.uint64)


def patient_of(header: DicomHeader, file: str, rule: PatientRule) -> str:
    """Returns the patient of a DICOM file; of one that names nobody, its frames still show the same one."""
    alone = rule.strict or header.frames == 1
    return header.patient or ("" if alone else f"\0{file}")


def numbered(names: Sequence[str], secret: bytes) -> Patients:
    """Returns the patients of these names."""
    return np.array([hashed(name, secret) for name in names], np.uint64)


def known_patients(
    rule: PatientRule, found: Patients, y: Labels, files: Sequence[str], where: str
) -> Patients | None:
    """Returns the patients, or None if none is known; a labelled image without one may be an error."""
    lacking = np.flatnonzero((y >= 0) & (found == UNKNOWN))
    if rule.strict and len(lacking):
        raise UserError(
            f"{where}: the patient of {files[lacking[0]]} is not known ({len(lacking):,} labelled images "
            f"without one; agreed is patients = {rule.text!r}): add a column patient to {LABEL_FILE}, or an "
            "array patient to an .npz, filled for every labelled image"
        )
    return found if found.any() else None


def has_column(label_file: Path | None) -> bool:
    """True if a label file names patients."""
    return label_file is not None and any(row.patient is not None for row in read_labels(label_file))


def told_apart(patients: Patients) -> Patients:
    """Returns the patients with one of their own for each image whose patient is unknown."""
    _, numbers = np.unique(patients, return_inverse=True)
    own = len(patients) + np.arange(len(patients))
    return np.where(patients == UNKNOWN, own, numbers).astype(np.uint64)


def count_patients(patients: Patients) -> int:
    """Returns the number of known patients."""
    return len(np.unique(patients[patients != UNKNOWN]))


def _by_path(rule: PatientRule, file: str) -> str:
    """Returns the patient's name in a path, or nothing."""
    *folders, name = file.split("/")
    if rule.level:
        return folders[rule.level - 1] if rule.level <= len(folders) else ""
    match = rule.pattern.fullmatch(name) if rule.pattern else None
    return match[1] if match else ""
