"""A run that is ready to train: new, resumed, or one of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import tomli_w
import torch

from fedhassle.data.dataset import Dataset
from fedhassle.data.split.split import Split, pooled
from fedhassle.engine.cluster import LOCAL, allocation_of, require_ray, require_room, this_machine
from fedhassle.engine.privacy.by_sample import BySample, SamplePrivacy, walks_of
from fedhassle.engine.privacy.by_site import SitePrivacy, require_means
from fedhassle.engine.privacy.separable import require_separable
from fedhassle.engine.rounds import NOBODY, Plan, Required, select
from fedhassle.engine.simulator import clients_of
from fedhassle.errors import UserError, require
from fedhassle.files import write_text
from fedhassle.method import Method
from fedhassle.names import SESSION, counted, some_of
from fedhassle.provenance import hardware, machine
from fedhassle.runs.folder import (
    Folder,
    claim,
    folder_names,
    new_folder,
    release,
    resume_command,
)
from fedhassle.runs.trackers import require_installed
from fedhassle.settings.build import (
    build_dataset,
    build_method,
    build_metrics,
    build_net,
    build_privacy,
    build_sample_privacy,
    build_split,
    rounds_of,
)
from fedhassle.settings.hashing import expected_hash, own_code_of
from fedhassle.settings.request import Request, varied
from fedhassle.settings.schema import (
    Settings,
    method_class,
    resolve,
)

Load = Callable[[Settings], Dataset]
"""A function that loads the images of a run."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to start or to resume."""

    folder: Folder
    settings: Settings
    dataset: Dataset
    split: Split
    method: Method
    privacy: SitePrivacy | SamplePrivacy | None = None
    required: Required = NOBODY
    share: int = 1  # of a CPU's threads, or of a GPU's memory, one part in so many is its own

    @property
    def threads(self) -> int:
        """The number of clients that it trains in parallel on a CPU."""
        return max(1, self.settings.threads // self.share)

    @property
    def device(self) -> torch.device:
        """The device it trains on."""
        return torch.device(self.settings.device)

    @property
    def plan(self) -> Plan:
        """Its rounds, clients per round, seed, privacy and required clients."""
        settings = self.settings
        return Plan(self.rounds, settings.clients_per_round, settings.seed, self.privacy, self.required)

    @property
    def name(self) -> str:
        """Its name among several runs."""
        return self.folder.path.name

    @property
    def rounds(self) -> int:
        """The number of its rounds: those of the settings, or fewer if its privacy's budget ends before."""
        return rounds_of(self.settings, self.privacy)

    @property
    def headline(self) -> str:
        """The prediction that stands for it in a line."""
        return self.method.headline


# New runs


def start(request: Request, out: Path | None = None, load: Load = build_dataset) -> Run:
    """A new run in its own folder."""
    folder = claim(request, out)
    try:
        return prepare(folder, request, load)
    except Exception:
        release(folder)
        raise


def start_several(requests: Sequence[tuple[str, Request]], out: Path | None = None) -> list[Run]:
    """New runs by name, each in its own subfolder of one folder."""
    require(bool(requests), "there is no run to start: each setting that varies needs at least one value")
    names = [name for name, _ in requests]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{twice[0]!r} occurs twice: each run needs a name of its own")
    existed = out is not None and Path(out).exists()
    home = Path(out) if out else new_folder(requests[0][1])
    places = [home / name for name in folder_names(names)]
    require_none_begun(places)
    started, load = list[Run](), Loader()
    try:
        differing = varied([request for _, request in requests])
        for place, (_, request), words in zip(places, requests, differing, strict=True):
            started.append(start(request, place, load))
            write_text(started[-1].folder.varied, "".join(f"{word}\n" for word in words))
    except Exception:
        for run in started:
            release(run.folder)
        if not existed and home.is_dir() and not any(home.iterdir()):
            home.rmdir()
        raise
    return started


def require_none_begun(places: Sequence[Path]) -> None:
    """Refuses folders of which some hold runs, as those of a sweep that was cut; says how to finish these."""
    begun = [folder for place in places if (folder := Folder(place)).begun]
    cut = [folder for folder in begun if not folder.finished]
    advice = f"resume those that are not finished with {resume_command(*cut)}" if cut else "all are finished"
    require(
        not begun,
        f"{places[0].parent} already holds {len(begun)} of {counted(len(places), 'run')}: {advice}, "
        "or choose another --out",
    )


class Loader:
    """Loads the images of several runs: once for all that use them at a time. Remembers failures."""

    def __init__(self) -> None:
        self._loaded: WeakValueDictionary[str, Dataset] = WeakValueDictionary()
        self._failures: dict[str, UserError] = {}

    def __call__(self, settings: Settings) -> Dataset:
        """The images of one run, or the same error each time."""
        seed = settings.seed if settings.data.holdout else None  # it draws the held-out images
        key = f"{settings.data.model_dump_json()} {seed}"
        if key in self._failures:
            raise self._failures[key]
        found = self._loaded.get(key)
        if found is None:
            try:
                found = self._loaded[key] = build_dataset(settings)
            except UserError as error:
                self._failures[key] = error
                raise
        return found


def load_images(request: Request) -> Dataset:
    """The images of a run, downloaded if necessary."""
    return build_dataset(resolve(request), progress=False)


def prepare(folder: Folder, request: Request, load: Load = build_dataset) -> Run:
    """Builds everything that a run needs."""
    settings = runnable(request)
    if settings.distributed:
        require_workers(settings)
    dataset = load(settings)
    build_metrics(settings)  # raises if one cannot be imported
    split = Split.load(folder.split) if folder.split.exists() else build_split(settings, dataset)
    method, privacy = protected(settings, method_for_run(settings, dataset, split), split)
    return Run(folder, settings, dataset, split, method, privacy)


def runnable(request: Request) -> Settings:
    """Valid settings, whose trackers are installed."""
    settings = resolve(request)
    require_installed(settings.track or ())
    return settings


def require_workers(settings: Settings) -> None:
    """Refuses workers without Ray, or, if they are on this machine, more than it has devices for."""
    require_ray(f"workers={settings.workers}" if settings.ray is None else f"--ray {settings.ray}")
    here = [name for name in own_code_of(settings) if name.startswith(f"{SESSION}:")]
    named = some_of(name.partition(":")[2] for name in here)
    require(not here, f"workers cannot import {named}, defined in a notebook or session: write it to a file")
    if settings.ray in (None, LOCAL):
        allocation = allocation_of(settings.device, settings.threads)
        require_room(settings.workers, allocation, [this_machine()])


def method_for_run(settings: Settings, dataset: Dataset, split: Split) -> Method:
    """The method of a run, adapted to its length and its clients."""
    split.check(dataset.y_train)
    per_round, clients = settings.clients_per_round, len(split.names)
    if per_round > clients:
        raise UserError(f"clients_per_round={per_round} is more than the {clients} clients of the split")
    method = build_method(settings.method.name, settings.method.settings, build_net(settings, dataset))
    return method.for_run(rounds_before(settings, split), clients_of(split), per_round)


def rounds_before(settings: Settings, split: Split) -> int:
    """The rounds that a method is made for: those of the settings, or fewer if a budget ends before.

    An account by sample depends on the method, so such a budget ends a run that was made for all rounds.
    """
    if settings.privacy.unit == "sample":
        return settings.rounds
    return rounds_of(settings, build_privacy(settings, len(split.names)))


def protected(
    settings: Settings, method: Method, split: Split
) -> tuple[Method, SitePrivacy | SamplePrivacy | None]:
    """The method of a simulated run as its privacy has it, and that privacy."""
    if settings.privacy.unit == "sample":
        return protected_by_sample(settings, method, split)
    privacy = build_privacy(settings, len(split.names))
    if privacy is not None:
        require_means(method, settings.method.name, "[privacy]")
    return method, privacy


def protected_by_sample(settings: Settings, method: Method, split: Split) -> tuple[BySample, SamplePrivacy]:
    """The method with private gradients, and the account of its rounds, whose clients are drawn before."""
    clients = clients_of(pooled(split, method.pooled) if method.pooled else split)
    require_separable(method, settings.method.name, clients, settings.rounds)
    plan = Plan(settings.rounds, settings.clients_per_round, settings.seed)
    drawn = [select(clients, plan, t) for t in range(1, plan.rounds + 1)]
    privacy = build_sample_privacy(settings, walks_of(method.phases, drawn))
    return BySample.of(method, mechanism=privacy.mechanism), privacy


def write_settings(run: Run) -> None:
    """Writes the split, the resolved settings in place of the request, and the hashes of own code."""
    run.folder.summary.unlink(missing_ok=True)  # of a finished run that goes on; first: a kill leaves no mix
    run.split.save(run.folder.split)
    write_text(run.folder.config, tomli_w.dumps(run.settings.as_toml()))
    if own := own_code_of(run.settings):
        write_text(run.folder.own_code, own_code_text(own))
    run.folder.request.unlink(missing_ok=True)


def own_code_text(own: Mapping[str, str]) -> str:
    """One line for each `module:Name` or `file.py:Name` and the hash of its code."""
    return "".join(f"{name} {code}\n" for name, code in own.items())


# Runs that are not built yet


class Identity(NamedTuple):
    """A run before it is built; runs with equal hash and seed are the same run."""

    settings_hash: str
    seed: int
    method: str
    data: str
    rounds: int
    device: str
    machine: str
    headline: str = Method.headline

    @property
    def key(self) -> tuple[str, int]:
        """Hash and seed, which tell it from other runs."""
        return self.settings_hash, self.seed


def identify(request: Request) -> Identity:
    """Checks settings and returns the run they describe; loads no images, except a user's own."""
    settings = runnable(request)
    return Identity(
        settings_hash=expected_hash(settings),
        seed=settings.seed,
        method=settings.method.name,
        data=Path(settings.data.name).name,
        rounds=settings.rounds,
        device=settings.device,
        machine=machine(hardware(torch.device(settings.device), settings.threads, settings.workers)),
        headline=method_class(settings.method.name).headline,
    )
