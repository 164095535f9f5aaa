"""From settings to objects: data set, split, network, method, engine, privacy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.averaging import Averaged
from fedhassle.data import catalogue
from fedhassle.data.dataset import Dataset, Sites, hold_out
from fedhassle.data.npz import LARGEST_SIDE
from fedhassle.data.site.sites import SiteImages
from fedhassle.data.split import draw
from fedhassle.data.split.cuts import SPLIT_KINDS
from fedhassle.data.split.split import Split, is_plain
from fedhassle.data.split.table import ClientRow, table
from fedhassle.engine.device import Engine
from fedhassle.engine.metrics import Metric
from fedhassle.engine.privacy.account import Guarantee, least_noise, noise_for, rounds_within
from fedhassle.engine.privacy.by_sample import SamplePrivacy, Walk
from fedhassle.engine.privacy.by_site import SitePrivacy
from fedhassle.errors import UserError, require
from fedhassle.method import Method
from fedhassle.names import find, some_of
from fedhassle.nets import NETS, Net, check_image
from fedhassle.settings.request import Request
from fedhassle.settings.schema import (
    DataSettings,
    PrivacySettings,
    Settings,
    SplitSettings,
    method_class,
    resolve,
)

NO_NOISE = "privacy.delta needs noise: set privacy.epsilon or privacy.noise"
CLIP, DELTA = 1.0, 1e-5  # defaults of privacy.clip and privacy.delta, if there is noise


def build_dataset(settings: Settings, progress: bool = True) -> Dataset:
    """The images, with normalisation and augmentation from the settings."""
    data = settings.data
    folder = None if data.folder is None else Path(data.folder)
    of_sites = SiteImages(image_size(data), data.channels, data.patients, data.intensities)
    dataset = catalogue.load(data.name, folder, progress, of_sites)
    given = {k: v for k in ("mean", "std", "flip", "crop") if (v := getattr(data, k)) is not None}
    for key in ("mean", "std"):
        if key in given:
            given[key] = per_channel(f"data.{key}", given[key], dataset.shape[0])
    if "std" in given and min(given["std"]) <= 0:
        raise UserError(f"data.std must be positive, got {list(given['std'])}")
    if given.get("crop", 0) >= min(dataset.shape[1:]):
        raise UserError(
            f"data.crop must be less than the image's side ({min(dataset.shape[1:])}), got {data.crop}"
        )
    dataset = dataclasses.replace(dataset, **given)
    if data.holdout:
        return hold_out(dataset, data.holdout, settings.seed)
    advice = "hold out a share of the training images with data.holdout, such as data.holdout=0.1"
    require(len(dataset.y_test) > 0, f"{data.name} has no test images: {advice}")
    return dataset


def dataset_to_split(settings: Settings) -> Dataset:
    """The data set as far as a split needs it: without pixels if it is a known one."""
    data, entry = settings.data, catalogue.CATALOGUE.get(settings.data.name)
    if entry is None or (settings.split.file is not None and not entry.sources):
        return build_dataset(settings)
    if settings.split.file is not None:
        raise UserError(f"split.file names images of {entry.name}, which are not available")
    dataset = catalogue.without_pixels(entry)
    return hold_out(dataset, data.holdout, settings.seed) if data.holdout else dataset


def image_size(data: DataSettings) -> tuple[int, int] | None:
    """Height and width of the images of sites, if they are given."""
    sides = [data.size] * 2 if isinstance(data.size, int) else data.size
    if sides is None:
        return None
    fits = len(sides) == 2 and all(1 <= side <= LARGEST_SIDE for side in sides)
    require(
        fits, f"data.size must be a side of 1 to {LARGEST_SIDE} pixels or [height, width], got {data.size}"
    )
    return sides[0], sides[1]


def per_channel(key: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One finite number per channel; an integer of 400 digits is infinite as a float."""
    if len(values) != channels or not all(math.isfinite(value) for value in values):
        raise UserError(f"{key} needs one finite number per channel ({channels}), got {list(values)}")
    return tuple(values)


def build_split(settings: Settings, dataset: Dataset) -> Split:
    """The split from a file, or a new one."""
    chosen = settings.split
    if chosen.file is not None:
        found = Split.load(chosen.file, None if settings.data.holdout else dataset.y_train)
        require(
            not (settings.data.holdout and is_plain(Path(chosen.file))),
            f"split.file={chosen.file} counts all training images, but data.holdout={settings.data.holdout} "
            "takes some of them away: give the data set test images of its own, and leave data.holdout out",
        )
        found.check(dataset.y_train)
        labels = any(part.size for part in found.labelled)
        require(labels, f"split.file={chosen.file} has no labelled row: there is nothing to learn from")
        return found
    if dataset.sites is not None:
        return split_of_sites(chosen, dataset.sites, dataset)
    return draw.split(
        dataset.y_train,
        kind=chosen.kind,
        annotation=chosen.annotation,
        alpha=chosen.alpha,
        clients=chosen.clients,
        labels=chosen.labels,
        size=chosen.size,
        ratio=chosen.ratio,
        seed=split_seed(settings),
    )


def requested_split(request: Request) -> tuple[Dataset, Split, str]:
    """The data set and the split of a request, and the split in words."""
    settings = resolve(request)
    dataset, chosen = build_dataset(settings), settings.split
    about = given_split(chosen, dataset) or f"{chosen.labels}, {mixing_of(chosen)}"
    return dataset, build_split(settings, dataset), about


def given_split(chosen: SplitSettings, dataset: Dataset) -> str | None:
    """A split that is not drawn, in words: its file, or the sites; None for one that is drawn."""
    if chosen.file is not None:
        return Path(chosen.file).name
    return None if dataset.sites is None else "each site's own images"


def mixing_of(chosen: SplitSettings) -> str:
    """The division of the classes in a split that is drawn, in words."""
    return "equal class mixes" if chosen.kind == "iid" else f"α = {chosen.alpha:g}"


def split_of_sites(chosen: SplitSettings, sites: Sites, dataset: Dataset) -> Split:
    """The split whose clients are the sites, with the labels that they have."""
    default = SplitSettings()
    changed = [key for key in SplitSettings.model_fields if getattr(chosen, key) != getattr(default, key)]
    keys = some_of(f"split.{key}" for key in changed)
    require(not changed, f"{dataset.name} has sites, which are the clients: leave out {keys}")
    rows = [np.flatnonzero(sites.of == k) for k in range(len(sites.names))]
    labelled = [part[dataset.y_train[part] >= 0] for part in rows]
    unlabelled = [part[dataset.y_train[part] < 0] for part in rows]
    return dataclasses.replace(Split.of(labelled, unlabelled, sites.names), notes=sites.notes)


def split_seed(settings: Settings) -> int:
    """The seed of a new split: split.seed, the seed of its kind, or the run's."""
    candidates = (settings.split.seed, SPLIT_KINDS[settings.split.kind].seed, settings.seed)
    return next(seed for seed in candidates if seed is not None)


class Holdings(NamedTuple):
    """The images of each client of a run."""

    data: str
    class_names: tuple[str, ...]
    mixing: str  # the division of the classes, in words
    clients: tuple[ClientRow, ...]


def holdings(request: Request) -> Holdings | None:
    """The images of each client; None if the images are not available, or cannot be split that way."""
    settings = resolve(request)
    try:
        dataset = dataset_to_split(settings)
        rows = table(build_split(settings, dataset), dataset.y_train, dataset.classes)
    except UserError:
        return None
    drawn = f"{mixing_of(settings.split)}, seed {split_seed(settings)}"
    mixing = given_split(settings.split, dataset) or drawn
    return Holdings(dataset.name, dataset.class_names, mixing, tuple(rows))


def build_engine(settings: Settings) -> Engine:
    """The engine: device, precision, lanes."""
    assert settings.precision != "auto" and settings.compile is not None  # the settings are resolved
    return Engine(
        torch.device(settings.device),
        settings.precision,
        settings.lanes,
        settings.compile,
        settings.deterministic,
        settings.stack,
    )


def build_net(settings: Settings, dataset: Dataset) -> Net:
    """The network of the settings; default: the data set's."""
    name = settings.net or dataset.net
    build = find(name, NETS, "network")
    try:
        net = Net(build, dataset.shape, dataset.classes)
        check_image(net)
    except Exception as error:  # a user's class may fail in any way
        raise UserError(
            f"net {name!r} cannot be built as Net(shape, classes, width) and run: {error}"
        ) from error
    return net


def build_metrics(settings: Settings) -> dict[str, Metric]:
    """A user's own metrics, by name."""
    found = {name: find(name, {}, "metric", "function") for name in settings.metrics or ()}
    for name, metric in found.items():
        fits = callable(metric) and not isinstance(metric, type)
        require(fits, f"metric {name} is {type(metric).__name__}, not a function")
    return found


def build_method(name: str, values: Mapping[str, Any], net: Net) -> Method:
    """A method with its settings."""
    try:
        method = method_class(name)(net=net, **values)
        return method if method.average is None or method.averages else Averaged.of(method)
    except (ValueError, TypeError) as error:
        raise UserError(f"method.{error}") from error


def build_privacy(settings: Settings, clients: int | None = None) -> SitePrivacy | None:
    """The protection of a run's updates, None if there is none; `clients`: of a simulation.

    A simulation draws its clients in secret, which counts; in a federation the coordinator knows who takes
    part, and noise must not follow from a seed.
    """
    chosen = settings.privacy
    if clients is not None:
        require_no_masks(chosen)
    require(
        clients is not None or chosen.unit != "sample",
        "privacy.unit=sample is for simulations (fedhassle run): without it, noise protects whole sites",
    )
    require(chosen.masks or not chosen.hide, "privacy.hide needs privacy.masks=true")
    if chosen.epsilon is None and chosen.noise is None:
        require(chosen.delta is None, NO_NOISE)
        return None if chosen.clip is None else SitePrivacy(chosen.clip)
    delta = DELTA if chosen.delta is None else chosen.delta
    rate = 1.0 if clients is None else min(1.0, settings.clients_per_round / clients)
    noise = chosen.noise
    if noise is None:
        assert chosen.epsilon is not None
        noise = noise_for(chosen.epsilon, rate, settings.rounds, delta)
    clip = CLIP if chosen.clip is None else chosen.clip
    return SitePrivacy(clip, noise, delta, rate, secret=clients is None)


def build_sample_privacy(settings: Settings, walks: tuple[tuple[Walk, ...], ...]) -> SamplePrivacy:
    """The protection of a simulated run's samples, which are walked over in this way."""
    chosen = settings.privacy
    require_no_masks(chosen)
    noisy = chosen.epsilon is not None or chosen.noise is not None
    require(noisy or chosen.delta is None, NO_NOISE)
    require(
        noisy or chosen.clip is not None,
        "privacy.unit=sample needs a budget or noise: set privacy.epsilon or privacy.noise",
    )
    clip = CLIP if chosen.clip is None else chosen.clip
    delta = DELTA if chosen.delta is None else chosen.delta
    made = SamplePrivacy(clip, chosen.noise or 0.0, delta, walks)
    if chosen.epsilon is None or chosen.noise is not None:
        return made

    def spends(noise: float) -> float:
        return dataclasses.replace(made, noise=noise).epsilon(settings.rounds) or 0.0

    return dataclasses.replace(made, noise=least_noise(chosen.epsilon, spends, settings.rounds))


def require_no_masks(chosen: PrivacySettings) -> None:
    """Refuses masks in a simulation."""
    require(
        not (chosen.masks or chosen.hide),
        "privacy.masks and privacy.hide are for a real federation: in a simulation all is in one place",
    )


def rounds_of(settings: Settings, privacy: Guarantee | None) -> int:
    """The rounds of a run: all, or as many as its budget allows; refuses a budget too small for one."""
    budget = settings.privacy.epsilon
    if privacy is None or budget is None:
        return settings.rounds
    found = rounds_within(budget, privacy, settings.rounds)
    require(
        found > 0,
        f"privacy.epsilon={budget:g} is spent before the first round with privacy.noise={privacy.noise:g}: "
        "allow more, add noise, or leave privacy.noise out",
    )
    return found
