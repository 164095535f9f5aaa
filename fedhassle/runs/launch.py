"""From settings to a finished run folder: what the command line and `fedhassle.run` share."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import tomli_w
import torch

from fedhassle.settings.build import (
    build_dataset,
    build_engine,
    build_method,
    build_net,
    build_split,
    expected_hash,
    own_code_of,
    settings_hash,
)
from fedhassle.runs.card import model_card
from fedhassle.settings.schema import PER_DEVICE, Settings, method_class, resolve, resolved_device
from fedhassle.engine.gpu.sharing import QUIET
from fedhassle.data.catalogue import Dataset
from fedhassle.data.split.layout import KINDS, kind_of
from fedhassle.data.split.split import Split, pooled, steps_on_labels
from fedhassle.runs.curves import draw_curves
from fedhassle.errors import UserError, require
from fedhassle.engine.evaluate import accuracy, check_predictions
from fedhassle.files import file_name, locked, remove_unfinished, write_json, write_text
from fedhassle.runs.seeds import grouped
from fedhassle.engine.client_state import Memory
from fedhassle.method import Method
from fedhassle.engine.cores import on_cores
from fedhassle.provenance import hardware, machine, versions
from fedhassle.settings.request import Request, flat, from_json, read_tables, to_json
from fedhassle.engine.rounds import Federation, Plan
from fedhassle.runs.record import Evaluation, Folder, Metrics, Step, begin, conduct, finish, way_on
from fedhassle.engine.simulator import Simulator
from fedhassle.runs.trackers import require_installed, tracking
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

Load = Callable[[Settings], Dataset]
"""How the images of a run are had."""

LANES_OF_ALL = 24  # of all runs that share a GPU; one that has it to itself has as many as it asks for


@dataclass(frozen=True)
class Run:
    """A run that is ready to start or to go on."""

    folder: Folder
    settings: Settings
    dataset: Dataset
    split: Split
    method: Method

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return torch.device(self.settings.device)

    @property
    def plan(self) -> Plan:
        """How long it is, and who takes part."""
        return Plan(self.settings.rounds, self.settings.clients_per_round, self.settings.seed)

    @property
    def name(self) -> str:
        """What it is called where several are shown."""
        return self.folder.path.name

    @property
    def rounds(self) -> int:
        """How long it is."""
        return self.settings.rounds

    @property
    def headline(self) -> str:
        """The prediction that stands for it in a line."""
        return self.method.headline


class Identity(NamedTuple):
    """What is known of a run before it is built; runs of one hash and seed are the same run."""

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
        """What tells it from other runs."""
        return self.settings_hash, self.seed


def identify(requested: Request) -> Identity:
    """Checks settings and says which run they make; no images are loaded, but for a user's own."""
    settings = checked(requested)
    device, name = torch.device(settings.device), settings.data.name
    return Identity(
        expected_hash(settings),
        settings.seed,
        settings.method.name,
        Path(name).name,
        settings.rounds,
        settings.device,
        machine(hardware(device, settings.threads)),
        method_class(settings.method.name).headline,
    )


def images(requested: Request) -> Dataset:
    """The images of a run, downloaded if need be."""
    return build_dataset(resolve(requested), progress=False)


def checked(requested: Request) -> Settings:
    """Valid settings, whose tools are installed."""
    settings = resolve(requested)
    require_installed(settings.track or ())
    return settings


def claim(requested: Request, out: Path | None) -> Folder:
    """A folder for a new run; what is asked for is written at once, so that no moment is lost to a crash."""
    folder = Folder(Path(out) if out else new_folder(requested))
    if folder.begun:
        raise UserError(f"{folder.path} holds a run already: {way_on(folder)}, or another --out")
    remove_unfinished(folder.path)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise UserError(f"{folder.path} exists and is not an empty folder: choose another --out")
    write_text(folder.request, to_json(requested))
    return folder


def new_folder(requested: Request) -> Path:
    """A folder of its own for a new run: it is made at once, so that nobody who starts now chooses it too."""
    while True:
        path = default_folder(requested)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            runs = path.parent
            if runs.is_symlink() and not runs.exists():
                missing = runs.readlink()
                raise UserError(
                    f"{runs} is a link to {missing}, which is not there: make it, or name an --out"
                ) from None
        else:
            return path


def default_folder(requested: Request) -> Path:
    """`runs/METHOD-DATA-TIME`, with a number behind it where that is taken."""
    method, data = requested.method, Path(requested.data).stem
    words = [file_name(method), file_name(data), datetime.now().strftime("%Y%m%d-%H%M%S")]
    name = "-".join(words)
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def release(folder: Folder) -> None:
    """Gives back a folder whose request turned out to be impossible."""
    folder.request.unlink(missing_ok=True)
    made = [folder.path, *([Path("runs")] if folder.path.parent == Path("runs") else [])]
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def start(requested: Request, out: Path | None = None, load: Load = build_dataset) -> Run:
    """A new run in its own folder."""
    folder = claim(requested, out)
    try:
        return prepare(folder, requested, load)
    except Exception:
        release(folder)
        raise


def start_several(requests: Sequence[tuple[str, Request]], out: Path | None = None) -> list[Run]:
    """New runs, each in a folder of its own beneath one for all."""
    require(bool(requests), "there is no run to make: each setting that varies needs a value at least")
    twice = sorted({name for name, _ in requests if [n for n, _ in requests].count(name) > 1})
    if twice:
        raise UserError(f"{twice[0]!r} is there twice: each run needs a name of its own")
    there = out is not None and Path(out).exists()
    home = Path(out) if out else new_folder(requests[0][1])
    started, load = list[Run](), Loader()
    try:
        for name, (_, requested) in zip(folder_names([n for n, _ in requests]), requests, strict=True):
            started.append(start(requested, home / name, load))
    except Exception:
        for run in started:
            release(run.folder)
        if not there and home.is_dir() and not any(home.iterdir()):
            home.rmdir()
        raise
    return started


def folder_names(names: Sequence[str]) -> list[str]:
    """Names of folders for runs of these names, with a number behind those that would be the same."""
    made: list[str] = []
    for name in names:
        plain = file_name(name) or "run"
        tries = itertools.chain([plain], (f"{plain}-{n}" for n in itertools.count(2)))
        made.append(next(name for name in tries if name not in made))
    return made


class Loader:
    """Loads the images of runs: once for all that hold them at a time; what cannot be had, not again."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, Dataset] = WeakValueDictionary()
        self._failures: dict[str, UserError] = {}

    def __call__(self, settings: Settings) -> Dataset:
        """The images of one run; the same error each time where there are none."""
        drawn = settings.seed if settings.data.holdout else None  # what is held out
        key = f"{settings.data.model_dump_json()} {drawn}"
        if key in self._failures:
            raise self._failures[key]
        found = self._held.get(key)
        if found is None:
            try:
                found = self._held[key] = build_dataset(settings)
            except UserError as error:
                self._failures[key] = error
                raise
        return found


def reopen(path: Path, device: str | None = None, load: Load = build_dataset) -> Run:
    """A run that was cut, from whatever it left behind; `device` where it is not the one it began on."""
    folder = Folder(path)
    if folder.audit.exists():
        raise UserError(f"{path} is a federation's run: it goes on with {way_on(folder)}")
    if not folder.begun:
        raise UserError(f"{path} holds no run (no config.toml): start one with fedhassle run --out {path}")
    requested = recorded(folder)
    run = prepare(folder, requested if device is None else moved(requested, device), load)
    require_same_code(run)
    return run


def require_same_code(run: Run) -> None:
    """Refuses to go on with a method or network that is another one by now."""
    noted, own = run.folder.own_code, own_code_of(run.settings)
    if not noted.exists() or noted.read_text("utf-8") == own_code_text(own):
        return
    files = " or ".join(name.partition(":")[0] for name in own)
    raise UserError(
        f"{files} has changed since {run.folder.path} began: its rounds would be of two methods. Run anew in "
        f"another folder, or put the code back; or remove {noted} to go on all the same"
    )


def moved(requested: Request, device: str) -> Request:
    """A request on another device, for which what suits that is chosen anew."""
    if resolved_device(device) == recorded_device(requested):
        return requested
    layers = [{k: v for k, v in layer.items() if k not in PER_DEVICE} for layer in requested.layers]
    return Request((*layers, {"device": device}))


def prepare(folder: Folder, requested: Request, load: Load = build_dataset) -> Run:
    """Builds all that a run needs."""
    settings = checked(requested)
    dataset = load(settings)
    split = Split.load(folder.split) if folder.split.exists() else build_split(settings, dataset)
    return Run(folder, settings, dataset, split, method_of(settings, dataset, split))


def method_of(settings: Settings, dataset: Dataset, split: Split) -> Method:
    """The method of a run, whose clients there are."""
    split.check(len(dataset.y_train))
    drawn, there = settings.clients_per_round, len(split.names)
    if drawn > there:
        raise UserError(f"clients_per_round={drawn} is more than the {there} clients that there are")
    name, values = settings.method.name, settings.method.settings
    method = build_method(name, values, build_net(settings, dataset))
    steps = steps_on_labels(split, drawn, method.epochs, method.batch)
    return method.for_run(settings.rounds, steps)


def recorded_device(requested: Request) -> str:
    """The device that settings name; where it is left to the machine, that of this one."""
    named = str(requested.top("device", "auto"))
    return resolved_device(named) if named == "auto" else named


def recorded(folder: Folder) -> Request:
    """The settings that a folder holds, resolved or as they were asked for."""
    if folder.config.exists():
        return Request((read_tables(folder.config),))
    try:
        return from_json(folder.request.read_text("utf-8"))
    except ValueError as error:
        raise UserError(
            f"{folder.request} is damaged ({error}): remove {folder.path} and run again"
        ) from error


def carry_out(run: Run, sharing: int = 1) -> Generator[Step]:
    """Trains to the end, round by round, then writes the summary, the model and the picture.

    `sharing`: how many runs share the process and its GPU, this one included.
    """
    settings = run.settings
    memory = Memory(run.folder.memory)
    engine = build_engine(settings)
    if sharing > 1:
        engine = engine._replace(lanes=min(engine.lanes, max(1, LANES_OF_ALL // sharing)))
    split = pooled(run.split) if run.method.pooled else run.split
    simulator = Simulator(run.dataset, split, settings.seed, engine, settings.threads, memory)
    images = torch.from_numpy(run.dataset.x_test).to(run.device)
    y = torch.from_numpy(run.dataset.y_test).to(run.device)

    def evaluate(state: Arrays, t: int) -> Evaluation:
        with QUIET.broken():
            return Evaluation(accuracy(run.method, state, images, y, simulator.views, simulator.workers))

    with (
        locked(run.folder.path),
        logging_to(run.folder.log, sharing == 1, run.name),
        engine.active(),
        on_cores(1),  # clients run side by side instead: `side_by_side` says why
    ):
        record(run)
        yield from carry_on(run, simulator, evaluate)


def carry_on(
    run: Run,
    federation: Federation,
    evaluate: Callable[[Arrays, int], Evaluation | None],
    about: Metrics | None = None,
    took_part: Callable[[], Metrics] | None = None,
) -> Iterator[Step]:
    """The rounds that are left of a run, wherever its clients are, and then what it leaves behind.

    `about`: what its summary is to say of it beyond, or in place of, what it says of every run; `took_part`:
    what it is to say of its sites, where no split tells of them: it is known at the end alone.
    """
    for note in run.split.notes:
        log.info("split: %s", note)
    every, how = run.settings.evaluate_every, about_run(run) | (about or {})
    start = begin(run.folder, run.method, run.plan.seed, run.device)
    with QUIET.broken():
        blank = torch.zeros(2, *run.dataset.shape, device=run.device)
        check_predictions(run.method, start.state, blank, run.dataset.classes)
    with tracking(run.settings.track or (), run.folder) as trackers:
        trackers.begin(dict(flat(how["settings"])) | {"settings_hash": how["settings_hash"]}, start.history)
        for step in conduct(run.folder, run.method, federation, run.plan, evaluate, every, start):
            if step.metrics is not None:
                trackers.evaluated(step.metrics)
            yield step
        sites = took_part() if took_part is not None else {}
        model = about_model(run, sites.get("sites"))
        summary = finish(run.folder, run.method, run.plan.rounds, how | sites, model)
        write_text(run.folder.card, model_card(summary, model))
        draw_picture(run, summary)
        write_json(run.folder.summary, summary)  # last: its presence says that the run is finished
        trackers.end(summary)


def draw_picture(run: Run, summary: Metrics) -> None:
    """Draws the accuracy by round; a picture that cannot be drawn is no reason to lose a result."""
    try:
        draw_curves(grouped([summary]), run.folder.curves)
    except Exception as error:
        log.warning("%s could not be drawn: %s: %s", run.folder.curves, type(error).__name__, error)


def record(run: Run) -> None:
    """Writes the split, the settings as resolved, in place of what was asked for, and whose code it is."""
    run.split.save(run.folder.split)
    write_text(run.folder.config, tomli_w.dumps(run.settings.as_toml()))
    if own := own_code_of(run.settings):
        write_text(run.folder.own_code, own_code_text(own))
    run.folder.request.unlink(missing_ok=True)


@contextmanager
def logging_to(path: Path, alone: bool, name: str = "") -> Iterator[None]:
    """Adds what the run has to say to its own file; if it is not alone, what is said in its own thread.

    Each record of it has the run's name, for those who show several.
    """
    handler, thread = logging.FileHandler(path, encoding="utf-8"), threading.get_ident()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: alone or record.thread == thread)

    def named(record: logging.LogRecord) -> bool:
        if alone or record.thread == thread:
            record.run = name
        return True

    log.addFilter(named)
    log.addHandler(handler)
    try:
        with heard():
            yield
    finally:
        log.removeHandler(handler)
        log.removeFilter(named)
        handler.close()


@contextmanager
def heard() -> Iterator[None]:
    """What the library has to say is passed on, down to what is merely good to know."""
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)


def about_run(run: Run) -> Metrics:
    """How a result came about: all that a table of results needs beside the figures."""
    settings = run.settings.as_toml()
    settings["data"].pop("folder", None)  # where the images lay on this machine is nobody else's business
    settings.pop("track", None)  # and neither is who looked on
    return {
        "format": 1,
        "method": run.settings.method.name,
        "data": run.dataset.name,
        "seed": run.settings.seed,
        "settings": settings,
        "settings_hash": settings_hash(run.settings, run.dataset, run.split),
        "split_hash": run.split.hash,
        "versions": versions_of(run.settings),
        "hardware": hardware(run.device, run.settings.threads),
    }


def versions_of(settings: Settings) -> dict[str, str]:
    """Of what a result depends on, own code included."""
    return versions() | own_code_of(settings)


def own_code_text(own: Mapping[str, str]) -> str:
    """A line for each import path and the hash of its code."""
    return "".join(f"{name} {code}\n" for name, code in own.items())


def about_model(run: Run, sites: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, Any]:
    """All that prediction needs beside the arrays; `sites`: who took part, where no split tells of them."""
    counts = held(run.split) if sites is None else contributed(sites)
    return {
        "format": 1,
        "method": run.settings.method.model_dump(),
        "net": run.settings.net or run.dataset.net,
        "shape": list(run.dataset.shape),
        "class_names": list(run.dataset.class_names),
        "mean": list(run.dataset.mean),
        "std": list(run.dataset.std),
        "headline": run.method.headline,
        "sites": site_counts(counts),
        "versions": versions_of(run.settings),
    }


def held(split: Split) -> tuple[tuple[int, int], ...]:
    """How many labelled and unlabelled images each client of a split holds."""
    return tuple((len(a), len(b)) for a, b in zip(split.labelled, split.unlabelled, strict=True))


def contributed(sites: Mapping[str, Mapping[str, int]]) -> tuple[tuple[int, int], ...]:
    """The same of the sites of a federation that contributed to a round."""
    return tuple((site["labelled"], site["unlabelled"]) for site in sites.values() if site["rounds"])


def site_counts(counts: Sequence[tuple[int, int]]) -> dict[str, int]:
    """How many clients there are of each kind, and the images that they hold with and without labels."""
    found: list[str] = [kind_of(*pair) for pair in counts]
    images = {"labelled_images": sum(a for a, _ in counts), "unlabelled_images": sum(b for _, b in counts)}
    return {kind: found.count(kind) for kind in KINDS} | images
