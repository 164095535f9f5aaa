"""The hash of settings, equal for runs that differ only in seed and machine, and what goes into it."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.data.dataset import Dataset, content_hash
from fedhassle.data.split.split import Split
from fedhassle.files import Stamp, stamp
from fedhassle.names import find
from fedhassle.nets import NETS
from fedhassle.provenance import own_code
from fedhassle.settings.build import build_dataset, build_metrics
from fedhassle.settings.request import MACHINE, flat
from fedhassle.settings.schema import DataSettings, Settings, without_empty


def settings_hash(settings: Settings, dataset: Dataset, split: Split) -> str:
    """A hash that is equal for runs that differ only in seed and machine."""
    return digest(settings, fingerprint(dataset), hash_of_file(settings, split))


def binding_settings(settings: Settings, dataset: Dataset, split: Split) -> dict[str, Any]:
    """The settings on which a result depends, with dotted keys; own images and splits by their content."""
    plain = binding(settings, fingerprint(dataset), hash_of_file(settings, split))
    return {**dict(flat(plain)), "seed": settings.seed}


def expected_hash(settings: Settings) -> str:
    """The same hash before the run is built: reads images and split only if they are a user's own."""
    name, file = settings.data.name, settings.split.file
    known = name in CATALOGUE
    images = name if known else file_fingerprint(settings.data.model_dump_json(), stamp(Path(name)))
    return digest(settings, images, None if file is None else Split.load(Path(file)).hash)


def is_machine_setting(key: str) -> bool:
    """True for a dotted key that says how a run is computed, not what: the hash leaves it out."""
    return key == "data.folder" or key.partition(".")[0] in MACHINE


def digest(settings: Settings, images: str, split: str | None) -> str:
    """The hash of settings, and of own code."""
    plain = binding(settings, images, split)
    if own := own_code_of(settings):
        plain["own_code"] = own
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def binding(settings: Settings, images: str, split: str | None) -> dict[str, Any]:
    """The settings on which a result depends, beside its seed; images and a split in a file by their content.

    None does not count: a new option that is None by default keeps the hashes of finished runs.
    """
    plain = without_empty(settings.model_dump(mode="json", exclude={"seed", *MACHINE}, exclude_none=True))
    plain["data"] = {k: v for k, v in plain["data"].items() if k != "folder"} | {"name": images}
    if split is not None:
        plain["split"] = {"hash": split}
    return plain


def fingerprint(dataset: Dataset) -> str:
    """The name of a known data set; the hash of the images and labels of a user's own."""
    if dataset.name in CATALOGUE:
        return dataset.name
    arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    return dataset.content or content_hash(*arrays)


@functools.lru_cache
def file_fingerprint(data: str, written: Stamp) -> str:
    """The fingerprint of a user's own images, cached by [data] as JSON and the file's stamp."""
    return fingerprint(build_dataset(Settings(data=DataSettings.model_validate_json(data))))


def hash_of_file(settings: Settings, split: Split) -> str | None:
    """The hash of a split in a file; None for one that the settings describe."""
    return None if settings.split.file is None else split.hash


def own_code_of(settings: Settings) -> dict[str, str]:
    """Hashes of the source of a user's own method, network and metrics, by name."""
    net = settings.net or ""
    if ":" in net:  # raises if it cannot be imported; the method was imported already
        find(net, NETS, "network")
    found = {name: own_code(name) for name in (settings.method.name, net, *build_metrics(settings))}
    return {name: code for name, code in found.items() if code is not None}
