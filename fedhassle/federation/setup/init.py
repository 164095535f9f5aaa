"""Creates a federation: its file, its certificate authority and its server's certificate."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedhassle.data.catalogue import CATALOGUE, default_entry
from fedhassle.data.dataset import default_crop, statistics
from fedhassle.data.site.dicom import DICOM
from fedhassle.data.site.folder import ImageForm, read_site
from fedhassle.data.site.intensities import intensity_rule
from fedhassle.data.site.survey import is_grey, survey
from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import Agreement, DataTerms, write_agreement
from fedhassle.federation.setup.certificate import server_names
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.federation.setup.keys import make_ca, make_server_certificate
from fedhassle.names import nearest


def terms_by_classes(class_names: Sequence[str], size: tuple[int, int], channels: int) -> DataTerms:
    """Terms for these classes; normalisation and augmentation as in the known data set with such images."""
    known, (height, width) = default_entry(channels), size
    crop = default_crop(height, width)
    return DataTerms(tuple(class_names), height, width, channels, known.mean, known.std, known.flip, crop)


def terms_like(name: str) -> DataTerms:
    """The terms of a named data set."""
    known = ", ".join(CATALOGUE)
    require(name in CATALOGUE, f"unknown data set {name!r}{nearest(name, CATALOGUE)} (known are {known})")
    entry = CATALOGUE[name]
    channels, height, width = entry.shape
    return DataTerms(
        entry.class_names, height, width, channels, entry.mean, entry.std, entry.flip, entry.crop
    )


def terms_of_folder(
    folder: Path,
    labels: Path | None,
    size: tuple[int, int] | None,
    channels: int | None,
    intensities: str | None = None,
) -> DataTerms:
    """Terms for images like those of a folder: its classes, and the mean and std of its pixels."""
    rule = intensity_rule(intensities)
    seen = survey(folder, None, labels, intensities=rule)
    require(
        size is not None or len(seen.sizes) == 1,
        f"the images of {folder} have {len(seen.sizes)} sizes: choose one with --size, such as --size 64",
    )
    height, width = size or (seen.sizes[0][0][1], seen.sizes[0][0][0])
    depth = channels or (1 if is_grey(mode for mode, _ in seen.modes) else 3)
    form = ImageForm(seen.class_names, height, width, depth, intensities=rule)
    site = read_site(folder, form, labels)
    mean, std = statistics(site.x)
    terms = terms_by_classes(seen.class_names, (height, width), depth)
    return replace(
        terms,
        mean=_rounded(mean),
        std=tuple(max(value, 0.0001) for value in _rounded(std)),
        patients=None if seen.patients is None else "dicom" if DICOM in dict(seen.formats) else "column",
        intensities=intensities,
    )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    """Rounds to four digits: more are of no use, and might reveal something of a single image."""
    return tuple(round(value, 4) for value in values)


def create_federation(agreement: Agreement, out: Path, also: Sequence[str] = ()) -> FederationFolder:
    """Creates the folder of a new federation, whole or not at all; `also` are other names of the server.

    An existing empty folder is filled, not replaced: it may be someone's working folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty, and nothing is overwritten: choose another folder with --out")
    names = server_names(agreement.address, also)
    try:
        home = out if out.is_dir() else out.parent
        home.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=home, prefix=".writing-"))
        try:
            made = FederationFolder(temporary)
            write_agreement(agreement, made.agreement)
            make_ca(made.ca_key, made.ca, agreement.name)
            make_server_certificate(made.server_key, made.certificate, made.ca_key, made.ca, names)
            _put_in_place(made, FederationFolder(out))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return FederationFolder(out)


def _put_in_place(made: FederationFolder, wanted: FederationFolder) -> None:
    """Moves a finished folder, or its files into an existing folder; federation.toml comes last."""
    if not wanted.path.is_dir():
        made.path.chmod(0o755)
        made.path.replace(wanted.path)
        return
    for part in sorted(made.path.iterdir(), key=lambda part: part == made.agreement):
        part.replace(wanted.path / part.name)
