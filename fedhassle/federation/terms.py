"""The federation's file: what its sites hold, what is trained, and by which rules. One TOML text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedhassle.build import build_engine
from fedhassle.config import MethodSettings, Settings, resolve
from fedhassle.data.datasets import Dataset
from fedhassle.engine import Engine
from fedhassle.errors import UserError, require
from fedhassle.method import Method
from fedhassle.requested import Requested, expanded, parsed

ON_SERVER = {"device": "cpu", "threads": 1}  # where nothing is trained


class Rules(NamedTuple):
    """What a round needs to count."""

    minimum_sites: int = 2  # with fewer, the run stops
    timeout: float = 3600.0  # seconds that a site may take for a round
    wait: float = 600.0  # seconds to wait for enough sites


class Agreed(NamedTuple):
    """What every site's images are, and what is kept from training and from others."""

    class_names: tuple[str, ...]
    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop: int = 0
    validation: float = 0.1  # this share of a site's labelled images is never trained on
    coarse_counts: bool = False  # whether sites tell how many images they hold in powers of two alone

    @property
    def hash(self) -> str:
        """Equal for sites that agree."""
        return hashlib.sha256(json.dumps(self._asdict(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Terms:
    """A federation's file as read."""

    name: str
    address: str
    agreed: Agreed
    run: dict[str, Any]  # settings of a run: method, net, rounds, …
    rules: Rules


def read_terms(text: str, where: str = "the federation's file") -> Terms:
    """The terms that a TOML text holds."""
    tables = parsed(text, where)
    try:
        data, rules = dict(tables["data"]), Rules(**tables.get("rules", {}))
        data |= {key: tuple(data[key]) for key in ("class_names", "mean", "std")}
        agreed = Agreed(**data)
        terms = Terms(tables["name"], tables.get("address", ""), agreed, tables.get("run", {}), rules)
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} lacks something, or has what is not known: {error}") from error
    require(agreed.channels in (1, 3), f"{where}: data.channels must be 1 or 3, got {agreed.channels}")
    require(0 <= agreed.validation < 1, f"{where}: data.validation must be in [0, 1)")
    require(rules.minimum_sites >= 1, f"{where}: rules.minimum_sites must be at least 1")
    require(rules.timeout > 0 and rules.wait >= 0, f"{where}: rules.timeout and rules.wait must be positive")
    return terms


def described(terms: Terms) -> Dataset:
    """The federation's data as far as the server knows it: everything but images."""
    agreed = terms.agreed
    none = np.zeros((0, agreed.height, agreed.width, agreed.channels), np.uint8)
    return dataset_of(terms, none, np.zeros(0, np.int64))


def dataset_of(terms: Terms, x: np.ndarray, y: np.ndarray) -> Dataset:
    """Images and labels (−1 = none) seen as the federation has agreed."""
    a = terms.agreed
    net = "resnet8" if a.channels == 3 else "lenet"
    return Dataset(terms.name, x, y, x[:0], y[:0], a.class_names, net, a.mean, a.std, a.flip, a.crop)


def run_settings(terms: Terms) -> Settings:
    """The settings of a federation's run, with every default filled in."""
    a = terms.agreed
    data = {"name": terms.name, "mean": list(a.mean), "std": list(a.std), "flip": a.flip, "crop": a.crop}
    return resolve(Requested((ON_SERVER, {"data": data}, expanded(terms.run))))


def recorded_settings(tables: dict[str, Any]) -> Settings:
    """The settings of a run that was cut, as it wrote them down."""
    return resolve(Requested((tables,)))


def settled(settings: Settings, method: Method) -> Settings:
    """The settings with those of the method as the run has them, none left open."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name != "net"}
    return settings.model_copy(update={"method": MethodSettings(name=settings.method.name, **values)})


def method_settings(words: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method as they came over the wire, checked; without its name."""
    return resolve(Requested(({"method": words}, {"device": "cpu"}))).method.settings


def engine_of(device: str) -> Engine:
    """How a site trains on a device: `auto`, `cpu` or `cuda`."""
    return build_engine(resolve(Requested(({"device": device},))))
