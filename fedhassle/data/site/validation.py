"""The images that a site keeps for validation: never trained on, nor any image of the same patient."""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.patients import UNKNOWN, Patients

Numbers = NDArray[np.uint64]
Rows = NDArray[np.intp]
Flags = NDArray[np.bool_]

DIGESTS = 2**64  # the digests of images are below it
FEWEST = 3  # patients of a class, of which one is kept for validation however small the share


class Partition(NamedTuple):
    """The rows of a site's images, by use; unlabelled copies of validation images have none."""

    labelled: Rows
    unlabelled: Rows
    validation: Rows


def partition(x: Images, y: Labels, share: float, patients: Patients | None = None) -> Partition:
    """Divides a site's images into labelled, unlabelled and validation rows; `share` is for validation.

    The choice follows from an image's pixels alone, or from its patient: it is the same after a restart, and
    equal images have equal uses.
    """
    digests = digests_of(x)
    if patients is None:
        held = np.isin(digests, digests[_by_pixels(digests, y, share)])
    else:
        groups, keys = groups_of(patients, digests)
        held = chosen_groups(groups, keys, y, share)[groups]
    labelled = y >= 0
    return Partition(
        np.flatnonzero(labelled & ~held), np.flatnonzero(~labelled & ~held), np.flatnonzero(labelled & held)
    )


def as_begun(x: Images, y: Labels, patients: Patients | None, begun: Numbers) -> Partition:
    """Divides a site's images as a run began: those with these digests stay for validation, and no others.

    Labels, patients and images may have changed since; images of the same patients stay without a use.
    """
    digests = digests_of(x)
    mine = np.isin(digests, begun)
    held = mine
    if patients is not None:
        groups, _ = groups_of(patients, digests)
        held = np.isin(groups, groups[mine])
    labelled = y >= 0
    return Partition(
        np.flatnonzero(labelled & ~held), np.flatnonzero(~labelled & ~held), np.flatnonzero(labelled & mine)
    )


def relabelled(uses: Partition, y: Labels) -> Partition:
    """Returns the uses under new labels: images to train on stay so, and validation images too if labelled.

    So a run never validates on what it has trained on, and all its rounds are compared on the same images.
    """
    pool = np.union1d(uses.labelled, uses.unlabelled)
    return Partition(pool[y[pool] >= 0], pool[y[pool] < 0], uses.validation[y[uses.validation] >= 0])


def digests_of(x: Images) -> Numbers:
    """Returns a number below 2⁶⁴ for each image that depends on its pixels alone."""
    return np.array([digest(image) for image in x], np.uint64)


def digest(image: Images) -> int:
    """Returns a number below 2⁶⁴ that depends on an image's pixels alone."""
    return int.from_bytes(
        hashlib.blake2b(image.tobytes(), digest_size=8, person=b"validation").digest(), "big"
    )


def _by_pixels(digests: Numbers, y: Labels, share: float) -> Rows:
    """Returns the validation rows of a site that does not know its patients."""
    labelled = np.flatnonzero(y >= 0)
    mine = digests[labelled]
    chosen = mine < np.uint64(int(share * DIGESTS))
    if share and not chosen.any() and len(np.unique(mine)) > 1:
        chosen = mine == mine.min()
    if chosen.all():
        chosen[:] = False  # otherwise there would be none to train on
    return labelled[chosen]


def groups_of(patients: Patients, digests: Numbers) -> tuple[Rows, Numbers]:
    """Returns the group of each image, and the key of each group: what may not be divided.

    A group is a patient; an image whose patient is unknown is a group of its own. Groups that share an
    image are one: the same patient has been entered twice.
    """
    keys, groups = np.unique(np.where(patients == UNKNOWN, digests, patients), return_inverse=True)
    _, pictures = np.unique(digests, return_inverse=True)
    parent = list(range(len(keys)))

    def root(group: int) -> int:
        while parent[group] != group:
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    pairs = np.unique(np.stack([pictures, groups], 1), axis=0)  # by picture
    for (one, first), (other, second) in itertools.pairwise(pairs):
        if one == other:
            low, high = sorted((root(int(first)), root(int(second))))
            parent[high] = low  # the lowest key stands for the group
    roots = np.array([root(group) for group in range(len(keys))], np.intp)
    left, numbers = np.unique(roots, return_inverse=True)
    return numbers[groups], keys[left]


def chosen_groups(groups: Rows, keys: Numbers, y: Labels, share: float) -> Flags:
    """Returns which groups are kept for validation: of each class the share with the lowest keys.

    A group with images of several classes counts for the rarest of them.
    """
    chosen, labelled = np.zeros(len(keys), bool), y >= 0
    if not share or not labelled.any():
        return chosen
    has = np.zeros((len(keys), int(y.max()) + 1), bool)
    has[groups[labelled], y[labelled]] = True
    rarity = np.where(has, has.sum(0), len(keys) + 1)  # of a class that a group lacks: more than any
    stratum = np.where(has.any(1), rarity.argmin(1), -1)
    strata = [np.flatnonzero(stratum == k) for k in range(has.shape[1])]
    for members in strata:
        count = max(round(share * len(members)), int(len(members) >= FEWEST))
        lowest = members[np.argsort(keys[members])]
        chosen[lowest[: min(count, len(members) - 1)]] = True
    most = max(strata, key=len)
    if not chosen.any() and len(most) > 1:
        chosen[most[np.argmin(keys[most])]] = True
    return chosen
