"""A data set: images, labels and defaults for training; a user's own images, and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data import npz
from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.patients import Patients
from fedhassle.data.site.validation import chosen_groups, digests_of, groups_of
from fedhassle.errors import UserError, require
from fedhassle.files import atomic
from fedhassle.names import counted


class Sites(NamedTuple):
    """The sites that hold the training images."""

    of: Labels  # (N,), from 0: the site of each image
    names: tuple[str, ...]
    notes: tuple[str, ...]  # for the reader
    patients: Patients | None = None  # (N,), 0 = unknown


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class Dataset:
    """Images, their labels, and their defaults for training."""

    name: str
    x_train: Images  # (N, H, W, C)
    y_train: Labels  # (N,), −1 = no label
    x_test: Images
    y_test: Labels
    class_names: tuple[str, ...]
    net: str  # the default network
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    flip: bool  # weak augmentation: random horizontal flip
    crop: int  # weak augmentation: random crop after reflect padding by this many pixels; 0 = none
    content: str | None = None  # hash of a user's own files, before anything is held out
    sites: Sites | None = None  # in a folder of sites: they are the clients
    intensities: str | None = None  # the rule by which deep grey images became 0 … 255

    @classmethod
    def of(
        cls,
        x_train: npt.ArrayLike,
        y_train: npt.ArrayLike,
        x_test: npt.ArrayLike | None = None,
        y_test: npt.ArrayLike | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "own",
    ) -> Dataset:
        """Returns your own images (N, H, W[, C]) and labels (N,), checked, with defaults as from a file."""
        given = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
        arrays = {key: np.asarray(array) for key, array in given.items() if array is not None}
        require(("x_test" in arrays) == ("y_test" in arrays), "give both x_test and y_test, or neither")
        if class_names is not None:
            arrays["class_names"] = np.array(list(class_names), dtype=str)
        return own_images(f"{name}.npz", npz.checked(arrays, Path(f"Dataset {name}")))

    def save(self, path: str | Path) -> None:
        """Writes images, labels and class names to an .npz file, which `data=PATH` reads."""
        require(self.sites is None, f"{self.name} has sites, which an .npz file cannot hold: use its folder")
        arrays: dict[str, Any] = {"x_train": self.x_train, "y_train": self.y_train}
        arrays["class_names"] = np.array(self.class_names)
        if len(self.y_test):
            arrays |= {"x_test": self.x_test, "y_test": self.y_test}
        with atomic(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @property
    def classes(self) -> int:
        """The number of classes, M."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image as a network sees it: (C, H, W)."""
        height, width, channels = self.x_train.shape[1:]
        return channels, height, width


def own_images(name: str, arrays: npz.NpzData) -> Dataset:
    """A user's own images; their channels decide the network, the training images the pixel statistics."""
    height, width, channels = arrays.x_train.shape[1:]
    mean, std = statistics(arrays.x_train)
    net, crop = default_net(channels), default_crop(height, width)
    return Dataset(name, *arrays, net, mean, std, True, crop, content_hash(*arrays[:4]))


def default_net(channels: int) -> str:
    """Returns the name of the network that suits images with this many channels."""
    return "lenet" if channels == 1 else "resnet8"


def default_crop(height: int, width: int) -> int:
    """Returns the crop for images of any size, in CIFAR's proportion: 4 pixels of 32."""
    return min(height, width) // 8


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Replaces the test set by a share of the training images of each class, at least one.

    Settings are chosen on these images, never on the test set. Images without a label are never held out. If
    patients are known, a share of the patients of each class is held out, with all of their images.
    """
    if not 0 < share < 1:
        raise UserError(f"the share to hold out must lie between 0 and 1, got {share}")
    if seed < 0:
        raise UserError(f"the seed must not be negative, got {seed}")
    generator, held = np.random.default_rng(seed), np.zeros(len(dataset.y_train), bool)
    if dataset.sites is not None and dataset.sites.patients is not None:
        return _hold_out_patients(dataset, dataset.sites, dataset.sites.patients, share, generator)
    for label, name in enumerate(dataset.class_names):
        members = generator.permutation(np.flatnonzero(dataset.y_train == label))
        if len(members) < 2:
            has = counted(len(members), "labelled image")
            raise UserError(f"{dataset.name}: class {name!r} has {has}; 2 are needed to hold one out")
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held[members[:count]] = True
    x, y, sites = dataset.x_train, dataset.y_train, dataset.sites
    left = None if sites is None else sites._replace(of=sites.of[~held])
    return replace(dataset, x_train=x[~held], y_train=y[~held], x_test=x[held], y_test=y[held], sites=left)


def _hold_out_patients(
    dataset: Dataset, sites: Sites, patients: Patients, share: float, generator: np.random.Generator
) -> Dataset:
    """Replaces the test set by the labelled images of some patients; their other images are left out."""
    x, y = dataset.x_train, dataset.y_train
    groups, keys = groups_of(patients, digests_of(x))
    drawn = generator.permutation(len(keys)).astype(np.uint64)
    held = chosen_groups(groups, drawn, y, share)[groups]
    require(bool(held.any()), f"{dataset.name}: too few patients to hold some out")
    left, test = sites._replace(of=sites.of[~held], patients=patients[~held]), held & (y >= 0)
    return replace(dataset, x_train=x[~held], y_train=y[~held], x_test=x[test], y_test=y[test], sites=left)


def content_hash(*arrays: npt.NDArray[np.generic]) -> str:
    """Returns a short hash of the arrays' bytes."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(array.tobytes())
    return content.hexdigest()[:16]


def statistics(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of each channel in [0, 1], exact: from counts of the 256 values."""
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
