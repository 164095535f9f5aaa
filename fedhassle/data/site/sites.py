"""A folder of sites: the data of a federation on one machine, to rehearse it with its sites as clients.

Each subfolder is a site's folder and each .npz file a site's file, as `site.folder` reads them. Their names
are the sites' names. The classes are those of all sites together.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.folder import ImageForm, SiteData, read_site, site_classes
from fedhassle.data.site.intensities import intensity_rule
from fedhassle.data.site.labels import natural_order, nfc, suspicious_names
from fedhassle.data.site.listing import LABEL_FILE, is_ignored
from fedhassle.data.site.patients import Patients, parsed_patients
from fedhassle.data.site.pictures import SUFFIXES
from fedhassle.data.site.survey import DEFAULT_SIDE, is_grey, skipped
from fedhassle.errors import UserError, require
from fedhassle.names import counted, some_of

Size = tuple[int, int]
"""Height and width in pixels."""


class SiteImages(NamedTuple):
    """The form in which the images of sites are read; None: as they are."""

    size: Size | None = None
    channels: int | None = None
    patients: str | None = None  # how the patient of an image is known
    intensities: str | None = None  # how grey images of more than 8 bits become 0 … 255


class SitesData(NamedTuple):
    """The images of all sites, site by site."""

    x: Images  # (N, H, W, C)
    y: Labels  # (N,), −1 = unlabelled
    site: Labels  # (N,), from 0
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    notes: tuple[str, ...]  # on files that are skipped and labels that are ignored
    patients: Patients | None  # (N,), 0 = unknown; None: no site knows them


def read_sites(folder: Path, how: SiteImages | None = None) -> SitesData:
    """Reads the images of all sites; without a size or channels, those of the files themselves."""
    size, channels, patients, intensities = how or SiteImages()
    paths, rule = site_paths(folder), intensity_rule(intensities)
    class_names = classes_of(folder, paths)
    sites = {}
    if size is None or channels is None:
        # Sizes and colours are known only after reading.
        form = ImageForm(class_names, DEFAULT_SIDE, DEFAULT_SIDE, 3, intensities=rule)
        sites = {name: read_site(path, form) for name, path in paths.items()}
    height, width = size or common_size(folder, sites)
    depth = channels or (
        1 if is_grey(info.mode for site in sites.values() for info in site.file_infos) else 3
    )
    people = None if patients is None else parsed_patients(patients)
    form = ImageForm(class_names, height, width, depth, people, rule)
    sites = {name: read_site(path, form, secret=secret_of(name)) for name, path in paths.items()}
    notes = [note for name, site in sites.items() for note in notes_on(name, site)]
    return SitesData(
        np.concatenate([site.x for site in sites.values()]),
        np.concatenate([site.y for site in sites.values()]),
        np.repeat(np.arange(len(sites)), [len(site.y) for site in sites.values()]),
        tuple(sites),
        class_names,
        (*notes, *suspicious_names(class_names)),
        patients_of(sites.values()),
    )


def secret_of(name: str) -> bytes:
    """Returns the key of the hashes of a site's patients: patient 1 of another site is someone else."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


def patients_of(sites: Collection[SiteData]) -> Patients | None:
    """Returns the patients of all sites; None if no site knows them."""
    if all(site.patients is None for site in sites):
        return None
    nobody = [np.zeros(len(site.y), np.uint64) if site.patients is None else site.patients for site in sites]
    return np.concatenate(nobody)


def site_paths(folder: Path) -> dict[str, Path]:
    """Returns the folders and .npz files of the sites by name; refuses the folder of a single site."""
    try:
        found = sorted(path for path in folder.iterdir() if not is_ignored(path.name))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    loose = [
        path.name for path in found if path.suffix.lower() in SUFFIXES or path.name.lower() == LABEL_FILE
    ]
    require(
        not loose,
        f"{folder} holds {some_of(loose, 2)}, as the folder of one site does: expected a folder of sites, "
        "with a folder or an .npz for each",
    )
    sites = [path for path in found if path.is_dir() or path.suffix.lower() == ".npz"]
    require(bool(sites), f"{folder} holds no sites: expected a folder of images, or an .npz, for each site")
    names = Counter(nfc(name_of(path)) for path in sites)
    twice = [name for name, count in names.items() if count > 1]
    require(not twice, f"{folder} holds two sites called {some_of(twice, 1)}: give each its own name")
    return {nfc(name_of(path)): path for path in sites}


def name_of(path: Path) -> str:
    """Returns the name of a site."""
    return path.name if path.is_dir() else path.stem


def classes_of(folder: Path, paths: Mapping[str, Path]) -> tuple[str, ...]:
    """Returns the classes of all sites, sorted; refuses numbers at one site and names at another."""
    by_site = {name: site_classes(path) for name, path in paths.items()}
    found = sorted({one for names in by_site.values() for one in names}, key=natural_order)
    classes = f"have the classes {some_of(found)}" if found else "have no labels"
    require(
        len(found) >= 2,
        f"the sites of {folder} ({some_of(paths)}) {classes}; expected two classes or more: the folder of a "
        f"site has a {LABEL_FILE} or a folder for each class (if this is one site, name the folder above)",
    )
    if not all(name.isdecimal() for name in found):
        numbered = [name for name, own in by_site.items() if own and own == tuple(map(str, range(len(own))))]
        require(
            not numbered,
            f"{folder}: {some_of(numbered)} has numbers for classes, other sites have names: add class_names",
        )
    return tuple(found)


def common_size(folder: Path, sites: Mapping[str, SiteData]) -> Size:
    """Returns the one size that all images have."""
    sizes = {(info.height, info.width) for site in sites.values() for info in site.file_infos}
    shown = some_of((f"{height}×{width}" for height, width in sorted(sizes)), 3)
    require(
        len(sizes) == 1,
        f"the images of {folder} have {len(sizes)} sizes ({shown}): choose one with data.size, such as "
        "data.size=64",
    )
    return sizes.pop()


def notes_on(name: str, site: SiteData) -> Sequence[str]:
    """Returns what a reader should know about a site's files."""
    left_out = skipped(site.problems)
    said = [
        f"{counted(len(left_out), 'file')} skipped, such as {one.path}: {one.what}" for one in left_out[:1]
    ]
    return [f"{name}: {note}" for note in (*said, *site.notes)]
