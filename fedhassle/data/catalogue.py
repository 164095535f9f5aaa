"""Loads data sets: the catalogue of named ones, a user's own .npz file, and a folder of sites."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np

from fedhassle.data import download, npz, published
from fedhassle.data.dataset import (
    Dataset,
    Sites,
    content_hash,
    default_crop,
    default_net,
    own_images,
    statistics,
)
from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.sites import SiteImages, read_sites
from fedhassle.errors import UserError, require
from fedhassle.files import cache_folder
from fedhassle.names import brief, nearest

AS_THEY_ARE = SiteImages()


@dataclass(frozen=True)
class CatalogueEntry:
    """A named data set without its images, and where to get them."""

    name: str
    description: str
    images: tuple[int, int]  # training, test
    shape: tuple[int, int, int]  # (C, H, W)
    class_names: tuple[str, ...]
    net: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    crop: int
    sources: tuple[download.Source, ...]  # empty: the images ship with the package
    read: download.Reader
    # Labels of each class, training and test; default: equally many. Further training images have none.
    labels: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def classes(self) -> int:
        """The number of classes, M."""
        return len(self.class_names)

    def with_images(self, x_train: Images, y_train: Labels, x_test: Images, y_test: Labels) -> Dataset:
        """Returns the data set with these images."""
        return Dataset(
            *(self.name, x_train, y_train, x_test, y_test, self.class_names, self.net),
            *(self.mean, self.std, self.flip, self.crop),
        )


_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_FMNIST = CatalogueEntry(
    name="fmnist",
    description="Fashion-MNIST: clothes in grey",
    images=(60_000, 10_000),
    shape=(1, 28, 28),
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    net="lenet",
    mean=(0.0,),  # not standardised: that diverges at a learning rate of 0.1
    std=(1.0,),
    flip=True,
    crop=0,
    sources=published.FMNIST_SOURCES,
    read=published.read_idx,
)
_FMNIST_MINI = replace(
    _FMNIST,
    name="fmnist-mini",
    description="a fifth of Fashion-MNIST, shipped with the package",
    images=(12_000, 2_000),
    sources=(),
)
_CIFAR10 = CatalogueEntry(
    name="cifar10",
    description="CIFAR-10: small colour photographs",
    images=(50_000, 10_000),
    shape=(3, 32, 32),
    class_names=tuple(_CIFAR10_NAMES.split()),
    net="resnet8",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2471, 0.2435, 0.2616),
    flip=True,
    crop=4,
    sources=published.CIFAR10_SOURCES,
    read=published.read_cifar10,
)
_CIFAR100 = replace(  # with CIFAR-10's mean and std
    _CIFAR10,
    name="cifar100",
    description="CIFAR-100: small colour photographs, fine labels",
    class_names=tuple(_CIFAR100_NAMES.split()),
    sources=published.CIFAR100_SOURCES,
    read=published.read_cifar100,
)

_SVHN = CatalogueEntry(
    name="svhn",
    description="Street View House Numbers: cropped digits in colour",
    images=(73_257, 26_032),
    shape=(3, 32, 32),
    class_names=tuple("0123456789"),
    net="resnet8",
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    flip=False,  # a digit is not its mirror image
    crop=4,
    sources=published.SVHN_SOURCES,
    read=published.read_svhn,
    labels=(
        (4_948, 13_861, 10_585, 8_497, 7_458, 6_882, 5_727, 5_595, 5_045, 4_659),
        (1_744, 5_099, 4_149, 2_882, 2_523, 2_384, 1_977, 2_019, 1_660, 1_595),
    ),
)
_STL10 = CatalogueEntry(
    name="stl10",
    description="STL-10: colour photographs; 100,000 of the training images have no label",
    images=(105_000, 8_000),
    shape=(3, 96, 96),
    class_names=("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
    net="resnet8",
    mean=(0.4467, 0.4398, 0.4066),
    std=(0.2603, 0.2566, 0.2713),
    flip=True,
    crop=12,
    sources=published.STL10_SOURCES,
    read=published.read_stl10,
    labels=((500,) * 10, (800,) * 10),
)

CATALOGUE = {entry.name: entry for entry in (_FMNIST_MINI, _FMNIST, _CIFAR10, _CIFAR100, _SVHN, _STL10)}


def without_pixels(entry: CatalogueEntry) -> Dataset:
    """Returns a named set without pixels, for splitting alone."""
    equal = [(images // entry.classes,) * entry.classes for images in entry.images]
    train, test = (np.repeat(np.arange(entry.classes), counts) for counts in entry.labels or equal)
    if entry.labels is not None:
        train = np.append(train, np.full(entry.images[0] - train.size, -1))
    x_train, x_test = (np.empty((y.size, 0, 0, entry.shape[0]), np.uint8) for y in (train, test))
    return entry.with_images(x_train, train, x_test, test)


def default_entry(channels: int) -> CatalogueEntry:
    """Returns the named set whose network and normalisation suit images with this many channels."""
    return _FMNIST if channels == 1 else _CIFAR10


def load(
    name: str | Path,
    folder: Path | None = None,
    progress: bool = True,
    of_sites: SiteImages = AS_THEY_ARE,
) -> Dataset:
    """Loads a set of the catalogue, which is downloaded on first use; or an .npz or folder of sites by path.

    `of_sites` says how the images of a folder of sites are read; by default they stay as they are.
    """
    entry = CATALOGUE.get(str(name))
    if entry is None and os.path.isdir(name):  # noqa: PTH112 - any string goes
        return _load_sites(Path(name), of_sites)
    given = [key for key, value in of_sites._asdict().items() if value is not None]
    require(not given, f"data.{' and data.'.join(given)} is for a folder of sites; {name} is none")
    if entry is not None:
        return _load_entry(entry, folder, progress)
    if str(name).lower().endswith(".npz"):
        return _load_file(Path(name))
    options = f"known are {', '.join(CATALOGUE)}, or the path of an .npz file or of a folder of sites"
    raise UserError(f"unknown data set {brief(str(name))}{nearest(str(name), CATALOGUE)} ({options})")


def data_folder(folder: Path | None = None) -> Path:
    """Returns the folder for downloads: the argument, $FEDHASSLE_DATA or the user's cache, in this order."""
    chosen = folder or os.environ.get("FEDHASSLE_DATA")
    try:
        return Path(chosen).expanduser() if chosen else cache_folder()
    except RuntimeError as error:  # a user without a home, as in some containers
        raise UserError(f"no data folder ({error}): choose one with $FEDHASSLE_DATA or --data-dir") from error


def is_available(name: str, folder: Path | None = None) -> bool:
    """True if loading a data set downloads nothing: it is shipped, downloaded, or a user's own file."""
    entry = CATALOGUE.get(name)
    return entry is None or not entry.sources or (data_folder(folder) / f"{name}.npz").exists()


def _load_entry(entry: CatalogueEntry, folder: Path | None, progress: bool) -> Dataset:
    """Loads a set of the catalogue and checks its sizes."""
    if entry.sources:
        path = download.fetch(entry.name, entry.sources, entry.read, data_folder(folder), progress)
        try:
            arrays = npz.read(path)
        except UserError as error:
            raise UserError(f"{error}; delete the file to download it again") from error
    else:
        with resources.as_file(resources.files("fedhassle.data") / f"{entry.name}.npz") as path:
            arrays = npz.read(path)
    (train, *size), test = arrays.x_train.shape, len(arrays.x_test)
    found = (train, test, *size, len(arrays.class_names))
    channels, height, width = entry.shape
    expected = (*entry.images, height, width, channels, entry.classes)
    if found != expected:
        raise UserError(
            f"{path}: training images, test images, height, width, channels, classes are {found}; expected "
            f"{expected} for {entry.name}; delete the file, or load your own images by their path"
        )
    return entry.with_images(*arrays[:4])


def _load_file(path: Path) -> Dataset:
    """Loads a user's file."""
    # With its suffix the name differs from those of the catalogue.
    return own_images(path.name, npz.read(path))


def _load_sites(path: Path, how: SiteImages) -> Dataset:
    """Loads a folder of sites, without test images; defaults as for a user's file."""
    found = read_sites(path, how)
    height, width, depth = found.x.shape[1:]
    mean, std = statistics(found.x)
    net, crop = default_net(depth), default_crop(height, width)
    content = content_hash(found.x, found.y, found.site, np.array(found.names), np.array(found.class_names))
    return Dataset(
        f"{path.name}/",  # with a slash it differs from the names of the catalogue
        *(found.x, found.y, found.x[:0], found.y[:0], found.class_names, net, mean, std, True, crop, content),
        Sites(found.site, found.names, found.notes, found.patients),
        how.intensities,
    )
