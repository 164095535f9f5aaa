"""Settings as Python has them: classes, functions, data sets and NumPy's numbers, as the words of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhassle.data.dataset import Dataset, content_hash
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError
from fedhassle.files import file_name
from fedhassle.methods import METHODS
from fedhassle.names import described, name_of
from fedhassle.nets import NETS
from fedhassle.settings.request import Tables, layer

ABOUT_IMAGES = ("mean", "std", "flip", "crop")  # fields of a data set that are settings too


def in_words(settings: Mapping[str, Any], home: Path) -> tuple[Tables, Tables]:
    """Settings given in Python, as in a file; and the defaults that a data set given among them brings.

    A data set or a split is written to the folder `home`, under a name that has its hash: once for all runs.
    """
    words = layer(settings)
    if isinstance(words.get("split"), Split):
        words["split"] = {"file": words["split"]}
    data = words.get("data", {}).get("name")
    defaults = defaults_of(data) if isinstance(data, Dataset) else {}
    return plain(words, (), home), plain(defaults, (), home)


def defaults_of(data: Dataset) -> Tables:
    """The settings in which a data set differs from the same images in a file."""
    usual = Dataset.of(data.x_train, data.y_train, data.x_test, data.y_test, data.class_names)
    own = {key: value for key in ABOUT_IMAGES if (value := getattr(data, key)) != getattr(usual, key)}
    return ({"data": own} if own else {}) | ({"net": data.net} if data.net != usual.net else {})


def plain(value: Any, key: tuple[str, ...], home: Path) -> Any:
    """A value as a file has it; `key` is the path to it."""
    if isinstance(value, Mapping):
        return {name: plain(one, (*key, str(name)), home) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, key, home) for one in value]
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Dataset):
        return saved(value, content_hash(value.x_train, value.y_train, value.x_test, value.y_test), home)
    if isinstance(value, Split):
        return saved(value, value.hash[:16], home)
    return named(value, key)


def named(value: Any, key: tuple[str, ...]) -> str:
    """The name of a class or function; anything else is refused, without its contents."""
    known: dict[tuple[str, ...], tuple[Mapping[str, Any], str]] = {
        ("method", "name"): (METHODS, "method"),
        ("net",): (NETS, "network"),
        ("metrics",): ({}, "metric"),
    }
    if key in known:
        return name_of(value, *known[key])
    dotted = ".".join(key).removesuffix(".name")
    hint = ": for your own images, data=fedhassle.Dataset.of(x_train, y_train, x_test, y_test)"
    raise UserError(
        f"{dotted}: {described(value)} is no value of a setting{hint if key[0] == 'data' else ''}"
    )


def saved(value: Dataset | Split, digest: str, home: Path) -> str:
    """Writes a data set or a split beside the runs, unless it is there already; returns the path."""
    what = file_name(value.name.removesuffix(".npz")) if isinstance(value, Dataset) else "split"
    path = home.absolute() / f"{what}-{digest}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        value.save(path)
    return str(path)
