"""Facts about a run: for its summary, and for its model file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhassle.data.site.patients import count_patients
from fedhassle.data.split.layout import KINDS, kind_of
from fedhassle.engine.privacy.account import is_noisy
from fedhassle.provenance import hardware, versions
from fedhassle.runs.record import EPSILON, Metrics
from fedhassle.runs.run import Run
from fedhassle.settings.hashing import own_code_of, settings_hash
from fedhassle.settings.schema import Settings


def about_run(run: Run) -> Metrics:
    """The origin of a result: everything that a summary holds beside the figures."""
    settings = run.settings.as_toml()
    settings["data"].pop("folder", None)  # a path on this machine is nobody else's business
    settings.pop("track", None)  # nor are its trackers
    settings.pop("ray", None)  # nor is the address of its cluster
    return {
        "format": 1,
        "method": run.settings.method.name,
        "data": run.dataset.name,
        "seed": run.settings.seed,
        "settings": settings,
        "settings_hash": settings_hash(run.settings, run.dataset, run.split),
        "split_hash": run.split.hash,
        **about_privacy(run),
        "versions": versions_of(run.settings),
        "hardware": hardware(run.device, run.settings.threads, run.settings.workers),
    }


def about_privacy(run: Run) -> Metrics:
    """The entry of a summary about noise, if there is any: what was guaranteed, and how."""
    privacy = run.privacy
    if privacy is None or not is_noisy(privacy):
        return {}
    return {
        "privacy": {
            EPSILON: privacy.epsilon(run.rounds),
            "delta": privacy.delta,
            "unit": privacy.unit,
            "noise": privacy.noise,
            "clip": privacy.clip,
            "rate": privacy.rate,
        }
    }


def about_model(run: Run, sites: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, Any]:
    """Everything that prediction needs beside the arrays; `sites`: the sites of a federation."""
    return {
        "format": 1,
        "method": run.settings.method.model_dump(),
        "net": run.settings.net or run.dataset.net,
        "shape": list(run.dataset.shape),
        "class_names": list(run.dataset.class_names),
        "mean": list(run.dataset.mean),
        "std": list(run.dataset.std),
        "headline": run.method.headline,
        "sites": client_counts(run, sites),
        "versions": versions_of(run.settings),
        **({} if run.dataset.intensities is None else {"intensities": run.dataset.intensities}),
    }


def versions_of(settings: Settings) -> dict[str, str]:
    """The versions that a result depends on, with the hashes of own code."""
    return versions() | own_code_of(settings)


def client_counts(run: Run, sites: Mapping[str, Mapping[str, int]] | None) -> dict[str, int]:
    """The number of clients of each kind, and of their images; of sites, those that contributed."""
    if sites is None:
        images = [(len(a), len(b)) for a, b in zip(run.split.labelled, run.split.unlabelled, strict=True)]
    else:
        images = [(site["labelled"], site["unlabelled"]) for site in sites.values() if site["rounds"]]
    kinds: list[str] = [kind_of(*pair) for pair in images]
    known = None if run.dataset.sites is None else run.dataset.sites.patients
    people = patient_counts(sites or {}) if known is None else {"patients": count_patients(known)}
    totals = {"labelled_images": sum(a for a, _ in images), "unlabelled_images": sum(b for _, b in images)}
    return {kind: kinds.count(kind) for kind in KINDS} | totals | people


def patient_counts(sites: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The number of patients of the sites that contributed and know them; nothing if none does."""
    known = [site["patients"] for site in sites.values() if site["rounds"] and "patients" in site]
    return {"patients": sum(known)} if known else {}
