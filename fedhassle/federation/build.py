"""Builds a run from an agreement: its settings, data set, method and engine."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedhassle.data.dataset import Dataset, default_net
from fedhassle.engine.device import Engine
from fedhassle.engine.privacy.by_site import SitePrivacy, require_means
from fedhassle.engine.rounds import Required
from fedhassle.errors import require
from fedhassle.federation.agreement import Agreement, run_request
from fedhassle.federation.masks.contribution import MaskTerms
from fedhassle.method import Method
from fedhassle.runs.folder import Folder
from fedhassle.settings.build import build_engine, build_method, build_net, build_privacy, rounds_of
from fedhassle.settings.hashing import own_code_of
from fedhassle.settings.request import Request, read_tables
from fedhassle.settings.schema import MethodSettings, Settings, method_class, resolve
from fedhassle.wrapped import unwrapped

ENTRY = 4  # bytes of a number in a message
MARGIN = 1_000_000  # bytes of an answer beside its vectors
ON_SERVER = {"device": "cpu", "threads": 1}  # the server trains nothing
AGREEMENT = "federation.toml"  # where the agreed settings are


def empty_dataset(agreement: Agreement) -> Dataset:
    """The federation's data as the server knows it: everything but images."""
    data = agreement.data
    none = np.zeros((0, data.height, data.width, data.channels), np.uint8)
    return dataset_of(agreement, none, np.zeros(0, np.int64))


def dataset_of(agreement: Agreement, x: np.ndarray, y: np.ndarray) -> Dataset:
    """A data set of images and labels (−1 = none), normalised and augmented as agreed."""
    a = agreement.data
    net = default_net(a.channels)
    return Dataset(
        *(agreement.name, x, y, x[:0], y[:0], a.class_names, net, a.mean, a.std, a.flip, a.crop),
        intensities=a.intensities,
    )


def run_settings(agreement: Agreement) -> Settings:
    """Resolves the settings of a federation's run; settings that cannot work are an error."""
    a = agreement.data
    data = {"name": agreement.name, "mean": list(a.mean), "std": list(a.std), "flip": a.flip, "crop": a.crop}
    settings = resolve(Request((ON_SERVER, {"data": data}, *run_request(agreement).layers)))
    name = settings.method.name
    require(
        not method_class(name).pooled,
        f"method {name!r} needs all data in one place, so a federation cannot train it: choose another "
        "method, or try it with fedhassle run",
    )
    return settings


def agreed_method(settings: Settings, dataset: Dataset) -> Method:
    """Builds the method of a federation's run, with its network; raises if that is impossible here."""
    method = build_method(settings.method.name, settings.method.settings, build_net(settings, dataset))
    return method.for_run(rounds_of(settings, agreed_privacy(settings, method)))


def agreed_privacy(settings: Settings, method: Method) -> SitePrivacy | None:
    """The protection of updates in a federation's run, None if there is none."""
    privacy = build_privacy(settings)
    if privacy is not None or settings.privacy.masks:
        require_means(method, settings.method.name, "[privacy]")
    return privacy


def mask_terms(agreement: Agreement, settings: Settings, where: str = AGREEMENT) -> MaskTerms | None:
    """Returns the terms of the agreement about masks; None without any.

    `where`: where the user writes settings, for an error.
    """
    privacy, chosen = build_privacy(settings), settings.privacy
    if not chosen.masks:
        return None
    require(
        privacy is None or not privacy.noise or chosen.noise is not None,
        "with masks the sites add the noise, so all must know it: add privacy.noise="
        f"{0.0 if privacy is None else privacy.noise:.4g} to {where}, beside privacy.epsilon",
    )
    require(
        not chosen.hide or not agreement.data.validation,
        "privacy.hide needs validation = 0.0 under [data], since the number of validation images tells who "
        "has labels: evaluate with labelled images at the coordinator (--test)",
    )
    if privacy is None:
        return MaskTerms(hide=bool(chosen.hide))
    return MaskTerms(privacy.clip, privacy.noise, bool(chosen.hide))


def require_buildable(agreement: Agreement, where: str = AGREEMENT) -> None:
    """Raises if the method or network cannot be built here, as when the user's own module is missing.

    `where`: where the user writes settings, for an error.
    """
    settings = run_settings(agreement)
    agreed_method(settings, empty_dataset(agreement))
    mask_terms(agreement, settings, where)


def required_in(agreement: Agreement) -> Required:
    """The sites without which there is no round."""
    return Required(agreement.rules.required_sites, agreement.rules.required_kinds)


def largest_answer(agreement: Agreement) -> int:
    """The most bytes that a site's answer may have: twice those of the agreed models, and a margin."""
    method = agreed_method(run_settings(agreement), empty_dataset(agreement))
    entries = sum(vector.numel() for vector in method.initial(0).values())
    entries += sum(net.n_weights + net.n_statistics for net in method.networks().values())
    return 2 * ENTRY * entries + MARGIN


def own_code_in(agreement: Agreement) -> dict[str, str]:
    """The name and code hash of the user's own method and network, if the agreement names any."""
    return own_code_of(run_settings(agreement))


def settings_in(folder: Folder, agreement: Agreement) -> Settings:
    """The settings that a run's folder holds; the agreed ones for a new run."""
    if not folder.config.exists():
        return run_settings(agreement)
    return resolve(Request((read_tables(folder.config),)))


def headline_of(settings: Settings) -> str:
    """The prediction that one-line summaries show."""
    return method_class(settings.method.name).headline


def with_settings_of(method: Method, settings: Settings) -> Settings:
    """The settings with the values that the built method has, so that none is left open."""
    of = unwrapped(method)
    values = {f.name: getattr(of, f.name) for f in dataclasses.fields(of) if f.name != "net"}
    return settings.model_copy(update={"method": MethodSettings(name=settings.method.name, **values)})


def engine_of(agreement: Agreement, device: str) -> Engine:
    """The engine of a site on a device (`auto`, `cpu` or `cuda`); long runs may compile kernels."""
    agreed = {key: value for key, value in agreement.run.items() if key == "rounds"}
    return build_engine(resolve(Request((agreed, {"device": device}))))
