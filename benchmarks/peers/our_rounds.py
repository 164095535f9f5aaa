"""FedAvg rounds of fedhassle: its simulator or its workers, and its `federate`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import cast

import numpy as np
import torch

from benchmarks.measure import steps_of
from benchmarks.peers.clock import Clock, How, report, told
from benchmarks.peers.networks import NETWORKS, build
from benchmarks.peers.work import CLASSES, CROP, MEAN, STD, Work, images_of
from fedhassle.data.dataset import Dataset
from fedhassle.data.split.split import Split
from fedhassle.engine.cluster import LOCAL, connected
from fedhassle.engine.cores import available_cores, on_cores
from fedhassle.engine.device import LANES, Engine, Precision
from fedhassle.engine.ray_federation import RayFederation
from fedhassle.engine.rounds import Federation, Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.methods import METHODS
from fedhassle.nets import NETS, Net


def main() -> None:
    """Trains rounds and reports their times."""
    work, how = told()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    device = torch.device(work.device)
    dataset, split = data(work)
    net = Net(NETS.get(work.net) or NETWORKS[work.net], work.shape, CLASSES)
    method = METHODS["fedavg"](
        net=net, batch=work.batch, epochs=work.epochs, lr=work.lr, momentum=work.momentum, clip=0.0
    )
    engine = Engine(device)
    if device.type == "cuda":
        engine = Engine(device, cast(Precision, how.precision), LANES, how.compile != "none", stack=how.stack)
    module = build(work.net, work.shape, CLASSES)
    state, clock = {"w": net.flatten(module).to(device)}, Clock(work.device)
    # On lanes more clients take part in the first rounds, so that every lane records its steps.
    everyone = min(work.clients, 2 * work.per_round) if device.type == "cuda" else work.per_round
    warmup = Plan(work.warmup, everyone), 1
    timed = Plan(work.warmup + work.rounds, work.per_round), work.warmup + 1
    steps = 0
    with on_cores(1), engine.active(), federation(dataset, split, engine, how) as clients:
        for plan, first in (warmup, timed):
            clock.start()
            for done in federate(method, clients, plan, state, first):
                clock.stop()
                state = done.state
                steps = sum(steps_of(method, done.clients, done.t).values())
                clock.start()
    report(clock, work, steps, net.n_parameters, engine={k: str(v) for k, v in engine._asdict().items()})


@contextmanager
def federation(dataset: Dataset, split: Split, engine: Engine, how: How) -> Iterator[Federation]:
    """The clients, in this process or on as many workers as `how` has processes."""
    if how.processes == 1:
        yield Simulator(dataset, split, 0, engine, available_cores())
        return
    threads = max(1, available_cores() // how.processes)
    with (
        connected(LOCAL),
        closing(RayFederation(dataset, split, 0, engine, threads, how.processes)) as workers,
    ):
        yield workers


def data(work: Work) -> tuple[Dataset, Split]:
    """The images of all clients, and the rows of each."""
    pairs = [images_of(work, k) for k in range(work.clients)]
    x, y = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    names, channels = tuple(map(str, range(CLASSES))), work.shape[0]
    about = (names, work.net, (MEAN,) * channels, (STD,) * channels, work.augment, work.augment * CROP)
    rows = tuple(np.arange(work.images) + k * work.images for k in range(work.clients))
    nothing = (np.empty(0, np.int64),) * work.clients
    return Dataset("random", x, y, x[:1], y[:1], *about), Split(rows, nothing)


if __name__ == "__main__":
    main()
