"""From what a federation has agreed on to what a run is made of: settings, a data set, an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedhassle.data.catalogue import Dataset, default_entry
from fedhassle.engine.device import Engine
from fedhassle.errors import require
from fedhassle.federation.agreement import Agreement, run_request
from fedhassle.method import Method
from fedhassle.runs.record import Folder
from fedhassle.settings.build import build_engine, build_method, build_net, own_code_of
from fedhassle.settings.request import Requested, read_tables
from fedhassle.settings.schema import MethodSettings, Settings, method_class, resolve

ON_SERVER = {"device": "cpu", "threads": 1}  # where nothing is trained


def described(agreement: Agreement) -> Dataset:
    """The federation's data as far as the server knows it: everything but images."""
    data = agreement.data
    none = np.zeros((0, data.height, data.width, data.channels), np.uint8)
    return dataset_of(agreement, none, np.zeros(0, np.int64))


def dataset_of(agreement: Agreement, x: np.ndarray, y: np.ndarray) -> Dataset:
    """Images and labels (−1 = none) seen as the federation has agreed."""
    a = agreement.data
    net = default_entry(a.channels).net
    return Dataset(agreement.name, x, y, x[:0], y[:0], a.class_names, net, a.mean, a.std, a.flip, a.crop)


def run_settings(agreement: Agreement) -> Settings:
    """The settings of a federation's run, with every default filled in; what cannot work is an error."""
    a = agreement.data
    data = {"name": agreement.name, "mean": list(a.mean), "std": list(a.std), "flip": a.flip, "crop": a.crop}
    settings = resolve(Requested((ON_SERVER, {"data": data}, *run_request(agreement).layers)))
    name = settings.method.name
    require(
        not method_class(name).pooled,
        f"method {name!r} needs all data in one place: it is no federation's (try fedhassle run)",
    )
    return settings


def agreed_method(settings: Settings, dataset: Dataset) -> Method:
    """The method of a federation's run, with its network; what cannot be built is an error."""
    method = build_method(settings.method.name, settings.method.settings, build_net(settings, dataset))
    return method.for_run(settings.rounds)


def require_buildable(agreement: Agreement) -> None:
    """Refuses an agreement whose method or network cannot be built here, as without a file of one's own."""
    agreed_method(run_settings(agreement), described(agreement))


def own_code_in(agreement: Agreement) -> dict[str, str]:
    """Of each method and network that is agreed on and is no one of ours: its import path and code's hash."""
    return own_code_of(run_settings(agreement))


def settings_in(folder: Folder, agreement: Agreement) -> Settings:
    """The settings of the run that a folder holds, as it wrote them down; of a new one, those agreed on."""
    if not folder.config.exists():
        return run_settings(agreement)
    return resolve(Requested((read_tables(folder.config),)))


def headline_of(settings: Settings) -> str:
    """The prediction that stands for the method in one-line summaries."""
    return method_class(settings.method.name).headline


def settled(settings: Settings, method: Method) -> Settings:
    """The settings with those of the method as the run has them, none left open."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name != "net"}
    return settings.model_copy(update={"method": MethodSettings(name=settings.method.name, **values)})


def method_settings(words: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method as they came over the wire, checked; without its name."""
    return resolve(Requested(({"method": words}, {"device": "cpu"}))).method.settings


def engine_of(agreement: Agreement, device: str) -> Engine:
    """How a site trains on a device (`auto`, `cpu` or `cuda`), which may depend on how long the run is."""
    agreed = {key: value for key, value in agreement.run.items() if key == "rounds"}
    return build_engine(resolve(Requested((agreed, {"device": device}))))
