"""The data sets by name, and a user's own images in an .npz."""

import hashlib
import os
import sys
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedhassle.data import download, npz
from fedhassle.data.npz import Images, Labels
from fedhassle.errors import UserError
from fedhassle.names import nearest


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class Dataset:
    """Images, their labels, and what training on them needs to know."""

    name: str
    x_train: Images  # (N, H, W, C)
    y_train: Labels  # (N,)
    x_test: Images
    y_test: Labels
    class_names: tuple[str, ...]
    net: str  # the network that goes with it
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    flip: bool  # weak augmentation: random horizontal flip
    crop: int  # weak augmentation: random crop after reflect padding by so many pixels; 0 is none
    content: str | None = None  # the hash of a user's own file, whatever was held out of it since

    @property
    def classes(self) -> int:
        """The number of classes, M."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image as a network sees it: (C, H, W)."""
        height, width, channels = self.x_train.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class Entry:
    """A named data set: what is known without its images, and where they come from."""

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
    sources: tuple[download.Source, ...]  # none: the images ship with the package
    read: download.Reader

    @property
    def classes(self) -> int:
        """The number of classes, M."""
        return len(self.class_names)


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

_FMNIST = Entry(
    name="fmnist",
    description="Fashion-MNIST: clothes in grey",
    images=(60_000, 10_000),
    shape=(1, 28, 28),
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    net="lenet",
    mean=(0.0,),  # in [0, 1] as it is: standardised inputs diverge at a learning rate of 0.1
    std=(1.0,),
    flip=True,
    crop=0,
    sources=download.FMNIST_SOURCES,
    read=download.read_idx,
)
_FMNIST_MINI = replace(
    _FMNIST,
    name="fmnist-mini",
    description="a fifth of Fashion-MNIST, shipped with the package",
    images=(12_000, 2_000),
    sources=(),
)
_CIFAR10 = Entry(
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
    sources=download.CIFAR10_SOURCES,
    read=download.read_cifar10,
)
_CIFAR100 = replace(  # with CIFAR-10's mean and std
    _CIFAR10,
    name="cifar100",
    description="CIFAR-100: small colour photographs, fine labels",
    class_names=tuple(_CIFAR100_NAMES.split()),
    sources=download.CIFAR100_SOURCES,
    read=download.read_cifar100,
)

CATALOGUE = {entry.name: entry for entry in (_FMNIST_MINI, _FMNIST, _CIFAR10, _CIFAR100)}


def without_pixels(entry: Entry) -> Dataset:
    """A named set that can be divided but not seen: its classes, of which each has as many images."""
    train, test = (np.repeat(np.arange(entry.classes), images // entry.classes) for images in entry.images)
    x_train, x_test = (np.empty((y.size, 0, 0, entry.shape[0]), np.uint8) for y in (train, test))
    return Dataset(
        *(entry.name, x_train, train, x_test, test, entry.class_names, entry.net),
        *(entry.mean, entry.std, entry.flip, entry.crop),
    )


def like(channels: int) -> Entry:
    """The named set whose network and normalisation suit images of so many channels."""
    return _FMNIST if channels == 1 else _CIFAR10


def usual_crop(height: int, width: int) -> int:
    """The crop of images of any size: CIFAR's, 4 pixels of 32."""
    return min(height, width) // 8


def load(name: str | Path, folder: Path | None = None, progress: bool = True) -> Dataset:
    """Loads a set of the catalogue, downloaded into the folder the first time, or the .npz at a path."""
    entry = CATALOGUE.get(str(name))
    if entry is not None:
        return _named(entry, folder, progress)
    if str(name).lower().endswith(".npz"):
        return _own(Path(name))
    if os.path.isdir(name):  # noqa: PTH112 - any string goes
        raise UserError(f"{str(name)!r} is a folder, and no data set; {npz.SIMULATED}")
    options = f"known are {', '.join(CATALOGUE)}, or the path of an .npz file"
    raise UserError(f"unknown data set {str(name)!r}{nearest(str(name), CATALOGUE)} ({options})")


def data_folder(folder: Path | None = None) -> Path:
    """The folder of the downloaded sets: the argument, else $FEDHASSLE_DATA, else the user's cache."""
    chosen = folder or os.environ.get("FEDHASSLE_DATA")
    try:
        return Path(chosen).expanduser() if chosen else _cache() / "fedhassle"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise UserError(f"no data folder ({error}): choose one with $FEDHASSLE_DATA or --data-dir") from error


def _cache() -> Path:
    """The folder that the platform keeps for a user's caches."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Puts a share of the training images of each class, at least one, in the place of the test set.

    Settings are chosen on these images, never on the test set.
    """
    if not 0 < share < 1:
        raise UserError(f"the share to hold out must lie between 0 and 1, got {share}")
    if seed < 0:
        raise UserError(f"the seed must not be negative, got {seed}")
    generator, held = np.random.default_rng(seed), np.zeros(len(dataset.y_train), bool)
    for label, name in enumerate(dataset.class_names):
        members = generator.permutation(np.flatnonzero(dataset.y_train == label))
        if len(members) < 2:
            raise UserError(
                f"{dataset.name}: class {name!r} has {len(members)} image; 2 are needed to hold out"
            )
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held[members[:count]] = True
    x, y = dataset.x_train, dataset.y_train
    return replace(dataset, x_train=x[~held], y_train=y[~held], x_test=x[held], y_test=y[held])


def _named(entry: Entry, folder: Path | None, progress: bool) -> Dataset:
    """Loads a set of the catalogue and makes sure that it is the one of that name."""
    if entry.sources:
        path = download.fetch(entry.name, entry.sources, entry.read, data_folder(folder), progress)
        try:
            arrays = npz.read(path)
        except UserError as error:
            raise UserError(f"{error}; remove the file to have it fetched again") from error
    else:
        with resources.as_file(resources.files("fedhassle.data") / f"{entry.name}.npz") as path:
            arrays = npz.read(path)
    (train, *size), test = arrays.x_train.shape, len(arrays.x_test)
    found = (train, test, *size, len(arrays.class_names))
    channels, height, width = entry.shape
    expected = (*entry.images, height, width, channels, entry.classes)
    if found != expected:
        raise UserError(
            f"{path}: training images, test images, height, width, channels, classes are {found}, those of "
            f"{entry.name} {expected}; remove the file, or load your own images by their path"
        )
    return Dataset(
        *(entry.name, *arrays[:4], entry.class_names, entry.net),
        *(entry.mean, entry.std, entry.flip, entry.crop),
    )


def _own(path: Path) -> Dataset:
    """Loads a user's file, with a network by its colours and pixel statistics of its training images."""
    arrays = npz.read(path)
    height, width, channels = arrays.x_train.shape[1:]
    mean, std = statistics(arrays.x_train)
    net, crop = like(channels).net, usual_crop(height, width)
    # With its suffix the name cannot pass for one of the catalogue.
    return Dataset(path.name, *arrays, net, mean, std, True, crop, hashed(*arrays[:4]))


def hashed(*arrays: npt.NDArray[np.generic]) -> str:
    """A short hash of what arrays hold."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(array.tobytes())
    return content.hexdigest()[:16]


def statistics(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1]; exact, from counts of the 256 values."""
    values, means, deviations = np.arange(256) / 255, [], []
    for channel in range(x.shape[3]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(x), 1000):  # bincount copies to int64: a slice at a time
            counts += np.bincount(x[start : start + 1000, ..., channel].ravel(), minlength=256)
        mean = np.average(values, weights=counts)
        spread = np.sqrt(np.average((values - mean) ** 2, weights=counts))
        means.append(float(mean))
        deviations.append(float(spread) if np.count_nonzero(counts) > 1 else 1.0)
    return tuple(means), tuple(deviations)
