"""The benchmark: measures the device, the plain loop, our rounds and their scaling, and writes the report."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.measure import (
    PlainLoop,
    average_steps,
    flops_of_step,
    matrix_peak,
    peak_memory,
    reset_memory,
    samples_of_step,
    time_rounds,
)
from benchmarks.plain import images_on
from benchmarks.report import (
    Costs,
    MedianRange,
    method_figures,
    methods_table,
    scaling_figures,
    scaling_table,
)
from fedhassle.data.catalogue import CATALOGUE
from fedhassle.data.dataset import Dataset
from fedhassle.data.split.draw import split
from fedhassle.data.split.split import Split, pooled
from fedhassle.engine.cores import available_cores
from fedhassle.engine.device import LANES, Engine, Precision
from fedhassle.engine.rounds import Plan
from fedhassle.engine.simulator import Simulator, clients_of
from fedhassle.errors import UserError, require
from fedhassle.files import write_json
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.names import counted, nearest
from fedhassle.nets import NETS, Net
from fedhassle.provenance import hardware, versions
from fedhassle.terminal import say

log = logging.getLogger("fedhassle")

DEFAULT = ("fedavg", "hassle")
ALL = "all"
LIKE = {"resnet8": "cifar10", "lenet": "fmnist"}  # data set whose image format a network is measured on
LR = 0.01  # small, so that training on random labels does not diverge; the speed does not depend on it
CLIENTS, PER_ROUND = 20, 8  # the paper's

NOTE = (
    "Our seconds include pseudo-labels, sending and averaging models; those of the plain loop and the FLOPs "
    "do not. The first rounds record and compile steps; on a GPU all clients take part in them."
)

Plains = dict[str, dict[str, MedianRange]]
"""Seconds of a step of the plain loop, by precision and phase."""


@dataclass(frozen=True)
class Options:
    """Options of a benchmark."""

    methods: tuple[str, ...] = DEFAULT  # or ("all",)
    net: str | None = None  # default: resnet8 on a GPU, lenet on a CPU
    rounds: int | None = None  # to measure per method (default: by the device)
    quick: bool = False  # fewer and shorter rounds
    scaling: bool = True  # also measure scaling with the number of clients
    compile: bool = True  # fuse kernels on a GPU
    threads: int | None = None  # clients in parallel on a CPU (default: its cores)
    device: str | None = None  # cpu or cuda (default: a GPU if there is one)
    json: Path | None = None  # file to write all figures to


@dataclass(frozen=True)
class Size:
    """Size of a benchmark."""

    images: int = 50_000
    batch: int = 128
    epochs: int = 10
    residual_steps: int = 100
    rounds: int = 4
    plain_steps: int = 40  # per measurement
    repeats: int = 3
    side: int = 8192  # of the matrices whose product measures the peak
    scaling_samples: int = 1280  # per client
    scaling_per_round: tuple[int, ...] = (1, 2, 4, 8, 16)  # of the paper's 20 clients
    scaling_clients: tuple[int, ...] = (20, 100, 1_000, 10_000)
    scaling_drawn: int = 20  # of these, per round


GPU = Size()
GPU_QUICK = Size(epochs=2, residual_steps=20, rounds=3, scaling_clients=(20, 10_000))
CPU = Size(
    images=8_000,
    epochs=2,
    residual_steps=10,
    plain_steps=20,
    side=2048,
    scaling_samples=256,
)
CPU_QUICK = dataclasses.replace(
    CPU, images=4_000, epochs=1, residual_steps=4, rounds=3, scaling_clients=(20, 10_000)
)


def run(options: Options, console: Console, size: Size | None = None) -> dict[str, Any]:
    """Measures, prints the tables, and returns the report; writes it to a file if one is given.

    The file is rewritten after each measurement, so an interrupted benchmark leaves its results so far.
    """
    device, threads = device_of(options), options.threads or available_cores()
    size = size or size_for(device, options.quick)
    if options.rounds is not None:
        require(options.rounds >= 1, f"rounds must be at least 1, got {options.rounds}")
        size = dataclasses.replace(size, rounds=options.rounds)
    bench = Bench(options, size, device, threads, teller(console))
    report = {"format": 1, "versions": versions(), "hardware": hardware(device, threads), "note": NOTE}
    with warnings_to(console) as warnings:
        for measured in bench.measured():
            report |= measured | {"warnings": warnings}
            if options.json is not None:
                write_json(options.json, report)
    show(report, console)
    if options.json is not None:
        say(console, f"figures  {options.json}")
    return report


@dataclass(frozen=True)
class Bench:
    """A benchmark on one machine."""

    options: Options
    size: Size
    device: torch.device
    threads: int
    tell: Callable[[str], None]

    def measured(self) -> Iterator[dict[str, Any]]:
        """Parts of the report as they are measured; first the settings, so that a bad path fails early."""
        began = time.perf_counter()
        net = self.net()
        dataset = synthetic(LIKE[self.net_name], self.size.images)
        parts = split(dataset.y_train, clients=CLIENTS, labels="10%")
        methods = {name: self.method(name, net, parts) for name in chosen(self.options.methods)}
        yield {"settings": self.settings()}
        self.tell("the device's matrix peak")
        peak = matrix_peak(self.device, self.size.side, self.threads)
        about = {"peak": {"flops_per_second": peak, "side": self.size.side}}
        plains = self.plains(methods, dataset)
        figures: dict[str, Any] = {}
        for name, method in methods.items():
            figures[name] = self.rounds(name, method, dataset, parts, plains[name], peak)
            self.tell(summed_up(name, figures[name]))
            yield about | {"methods": figures, "scaling": {}, "seconds": time.perf_counter() - began}
        if self.options.scaling:
            scaling = self.scaling(net, dataset)
            yield {"scaling": scaling, "seconds": time.perf_counter() - began}

    @property
    def net_name(self) -> str:
        """Name of the network."""
        name = self.options.net or ("lenet" if self.device.type == "cpu" else "resnet8")
        require(name in LIKE, f"net must be {' or '.join(LIKE)}, got {name!r}")
        return name

    def net(self) -> Net:
        """The network for the benchmark's images."""
        like = CATALOGUE[LIKE[self.net_name]]
        return Net(NETS[self.net_name], like.shape, like.classes)

    def method(self, name: str, net: Net, parts: Split) -> Method:
        """A method with those settings of this benchmark that it has."""
        size, kind = self.size, METHODS[name]
        wanted = {"batch": size.batch, "epochs": size.epochs, "residual_steps": size.residual_steps, "lr": LR}
        known = {field.name for field in dataclasses.fields(kind)}
        made = kind(net=net, **{key: value for key, value in wanted.items() if key in known})  # type: ignore[arg-type]
        return made.for_run(1, clients_of(parts), PER_ROUND)  # one round, like the last of a long run

    @property
    def engine(self) -> Engine:
        """Our engine, with the defaults of a long run."""
        if self.device.type == "cpu":
            return Engine(self.device)
        precision: Precision = "bf16" if torch.cuda.is_bf16_supported() else "tf32"
        return Engine(self.device, precision, LANES, self.options.compile)

    def settings(self) -> dict[str, Any]:
        """Settings of the benchmark, for the report."""
        about = asdict(self.options) | {"json": None, "methods": list(chosen(self.options.methods))}
        engine = self.engine._asdict() | {"device": self.device.type}
        clients = {"clients": CLIENTS, "clients_per_round": PER_ROUND, "labels": "10%", "lr": LR}
        size = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self.size).items()}
        return about | {"net": self.net_name, "size": size, "engine": engine} | clients

    def plains(self, methods: Mapping[str, Method], dataset: Dataset) -> dict[str, Plains]:
        """Seconds of each method's plain loop, in float32 and, on a GPU, in TF32."""
        d, size = dataset, self.size
        images = images_on(self.device, d.x_train, d.y_train.astype(np.int64), d.mean, d.std, d.flip, d.crop)
        precisions = {"fp32": False} | ({"tf32": True} if self.device.type == "cuda" else {})
        loop = PlainLoop(images, size.images // CLIENTS, size.plain_steps, size.repeats, self.threads)
        found: dict[str, Plains] = {name: {} for name in methods}
        for name, method in methods.items():
            for precision, tf32 in precisions.items():
                self.tell(f"{name}: the plain loop, {precision}")
                each = loop.seconds(name, method, tf32)
                if each is not None:
                    found[name][precision] = each
        return found

    def rounds(
        self, name: str, method: Method, dataset: Dataset, parts: Split, plain: Plains, peak: float
    ) -> dict[str, Any]:
        """Figures of our rounds of one method."""
        self.tell(f"{name}: our rounds{' (compiling takes a while)' if self.engine.compile else ''}")
        parts = pooled(parts, method.pooled) if method.pooled else parts
        simulator = Simulator(dataset, parts, 0, self.engine, self.threads)
        costs = Costs(
            samples_of_step(method),
            flops_of_step(method, simulator),
            average_steps(method, simulator.clients, PER_ROUND),
            plain,
        )
        reset_memory(self.device)  # of the steps whose FLOPs were counted
        # On lanes all clients take part at first, so that each lane records every shape.
        everyone = CLIENTS if simulator.trainer.lanes is not None else PER_ROUND
        first, rounds = time_rounds(method, simulator, Plan(self.size.rounds, PER_ROUND), everyone)
        memory = peak_memory(self.device)
        return method_figures(first, rounds, costs, peak) | {"gpu_memory": memory}

    def scaling(self, net: Net, dataset: Dataset) -> dict[str, Any]:
        """Scaling of a FedAvg round of one epoch with the clients per round, and with all clients."""
        size = self.size
        by_round = [self.scaled(net, dataset, CLIENTS, drawn) for drawn in size.scaling_per_round]
        by_total = [
            self.scaled(net, dataset, clients, min(size.scaling_drawn, clients))
            for clients in size.scaling_clients
        ]
        return {"clients_per_round": by_round, "clients": by_total}

    def scaled(self, net: Net, dataset: Dataset, clients: int, per_round: int) -> dict[str, Any]:
        """Figures of uncompiled rounds with `per_round` of `clients` clients."""
        self.tell(f"scaling: {per_round} of {clients:,} clients per round")
        reset_memory(self.device)
        method = METHODS["fedavg"](net=net, batch=self.size.batch, epochs=1, lr=LR)
        parts = overlapping(clients, self.size.scaling_samples, len(dataset.y_train))
        simulator = Simulator(dataset, parts, 0, self.engine._replace(compile=False), self.threads)
        _, rounds = time_rounds(method, simulator, Plan(self.size.rounds, per_round), per_round)
        return scaling_figures(clients, per_round, rounds, peak_memory(self.device))


# Inputs


def device_of(options: Options) -> torch.device:
    """The device to measure."""
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require(name in ("cpu", "cuda"), f"device must be cpu or cuda, got {name!r}")
    require(name == "cpu" or torch.cuda.is_available(), "device=cuda: PyTorch finds no CUDA device here")
    return torch.device(name)


def size_for(device: torch.device, quick: bool) -> Size:
    """The size for a device: about a minute on two cores, the paper's rounds on a GPU."""
    if device.type == "cpu":
        return CPU_QUICK if quick else CPU
    return GPU_QUICK if quick else GPU


def chosen(methods: Sequence[str]) -> tuple[str, ...]:
    """Names of the requested methods."""
    names = tuple(METHODS) if ALL in methods else tuple(dict.fromkeys(methods))
    for name in names:
        if name not in METHODS:
            raise UserError(
                f"unknown method {name!r}{nearest(name, METHODS)} (known: {', '.join(METHODS)}, {ALL})"
            )
    return names


def synthetic(like: str, images: int) -> Dataset:
    """Random images and labels in the format of a known data set; speed does not depend on the content."""
    entry, rng = CATALOGUE[like], np.random.default_rng(0)
    channels, height, width = entry.shape
    x = rng.integers(0, 256, (images, height, width, channels), dtype=np.uint8)
    y = rng.permutation(np.arange(images) % entry.classes)
    about = (entry.class_names, entry.net, entry.mean, entry.std, entry.flip, entry.crop)
    return Dataset(f"random, like {like}", x, y, x[:1], y[:1], *about)


def overlapping(clients: int, samples: int, images: int) -> Split:
    """A split into labelled clients that take consecutive images, starting over at the end."""
    held = tuple((np.arange(samples) + k * samples) % images for k in range(clients))
    return Split(held, (np.empty(0, np.int64),) * clients)


# Output


def summed_up(name: str, figures: Mapping[str, Any]) -> str:
    """One line with a method's figures."""
    medians = {precision: plain["ratio"]["median"] for precision, plain in figures["plain"].items()}
    ratios = [f"{ratio:.2f} times as fast as plain {precision}" for precision, ratio in medians.items()]
    return ", ".join([f"{name}: {figures['seconds']['median']:.3g} s per round", *ratios])


def teller(console: Console) -> Callable[[str], None]:
    """A function that prints a line with the seconds since the start."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        seconds = time.perf_counter() - began
        say(console, f"{seconds:5.0f} s  {what}")

    return tell


class Warnings(logging.Handler):
    """Stores and prints warnings of the engine, such as a step that cannot be captured."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console, self.said = console, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Stores and prints a warning."""
        self.said.append(record.getMessage())
        say(self.console, f"warning: {self.said[-1]}")


@contextmanager
def warnings_to(console: Console) -> Iterator[list[str]]:
    """Prints warnings of the engine inside the block; yields the list of them."""
    handler = Warnings(console)
    log.addHandler(handler)
    try:
        yield handler.said
    finally:
        log.removeHandler(handler)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the tables of a report."""
    machine, settings = report["hardware"], report["settings"]
    engine, size = settings["engine"], settings["size"]
    side_by_side = (
        f"{machine['threads']} threads" if machine["gpu"] is None else f"up to {engine['lanes']} lanes"
    )
    how = f"{engine['precision']}, {side_by_side}{', compiled' if engine['compile'] else ''}"
    say(
        console,
        f"\n{machine['gpu'] or machine['cpu']}, torch {report['versions']['torch']}; "
        f"{settings['net']}, {how}; {size['images']:,} random images, {settings['clients']} clients "
        f"({settings['clients_per_round']} per round), {counted(size['epochs'], 'epoch')}, "
        f"batch {size['batch']}",
    )
    console.print(methods_table(report["methods"], report["peak"]["flops_per_second"]))
    say(console, f"{NOTE}\n")
    titles = {"clients_per_round": "by clients per round", "clients": "by number of clients"}
    for key, lines in report["scaling"].items():
        samples = size["scaling_samples"]
        console.print(scaling_table(f"{titles[key]}: FedAvg, 1 epoch, {samples:,} samples per client", lines))
    say(console, f"{report['seconds']:.0f} s in total")
