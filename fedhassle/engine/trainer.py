"""Training of clients on one device, with the images of all of them in one table there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedhassle.capture import CAPTURE_LOCK
from fedhassle.data.dataset import Dataset
from fedhassle.data.views import Views, make_views
from fedhassle.engine.client import Trained, train, visit
from fedhassle.engine.cores import keep_memory, side_by_side
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.job import Samples, Site, to_device
from fedhassle.method import Client, Method
from fedhassle.vectors import Arrays


class Task(NamedTuple):
    """One client's training in a round."""

    client: Client
    labelled: np.ndarray  # rows of the table of images
    unlabelled: np.ndarray
    message: Arrays
    memory: Callable[[], Arrays | None]  # loads the arrays that the client keeps; None in its first round


class Trainer:
    """Trains clients in parallel on one device: one per core of a CPU, or on the lanes of a GPU."""

    def __init__(self, dataset: Dataset, seed: int, engine: Engine, threads: int = 1) -> None:
        device = engine.device
        if device.type == "cpu":
            keep_memory()
        self.seed, self.engine = seed, engine
        self.threads = threads if device.type == "cpu" else 1
        self.lanes = Lanes(engine) if device.type != "cpu" else None
        self.views = dataset_views(dataset, device)
        self.images = torch.from_numpy(dataset.x_train).to(device)
        self.y = torch.from_numpy(dataset.y_train).to(device)

    def train(self, method: Method, tasks: Sequence[Task], t: int) -> list[Trained]:
        """Trains clients in round t; the longest come first on a CPU, the order stays on a GPU."""
        if self.lanes is None:
            return self._on_cores(method, tasks, t)
        return self._on_lanes(self.lanes, method, tasks, t)

    def _on_lanes(self, lanes: Lanes, method: Method, tasks: Sequence[Task], t: int) -> list[Trained]:
        with CAPTURE_LOCK.eager(), self.engine.lowered():
            visits = [
                visit(method, site, task.message, task.memory(), t, self.seed)
                for task, site in zip(tasks, self.sites(tasks), strict=True)
            ]
        return lanes.train(visits)

    def _on_cores(self, method: Method, tasks: Sequence[Task], t: int) -> list[Trained]:
        def work(task: Task) -> Trained:
            return train(method, self.site(task), task.message, task.memory(), t, self.seed)

        # The global random state has one user at a time, so no other client may train meanwhile.
        alone = any(net.randomness.globally for net in method.networks().values())
        longest_first = sorted(tasks, key=lambda task: -steps(method, task.client, t))
        return side_by_side(work, longest_first, 1 if alone else self.threads)

    def site(self, task: Task) -> Site:
        """The site of a client; its rows are on the device only while it trains."""
        (site,) = self.sites([task])
        return site

    def sites(self, tasks: Sequence[Task]) -> list[Site]:
        """The sites of clients, with one transfer and one look-up for all of them."""
        if not tasks:
            return []
        parts = [np.asarray(part, np.int64) for task in tasks for part in (task.labelled, task.unlabelled)]
        rows = to_device(np.concatenate(parts), self.engine.device)
        sizes = [len(part) for part in parts]
        # In a real federation the labels of unlabelled rows, their truth, are −1: unknown.
        split, labels = (torch.split(tensor, sizes) for tensor in (rows, self.y[rows]))
        samples = [
            Samples(self.images, split[i], labels[i], split[i + 1], labels[i + 1])
            for i in range(0, len(parts), 2)
        ]
        return [Site(task.client, own, self.views) for task, own in zip(tasks, samples, strict=True)]


def steps(method: Method, client: Client, t: int) -> int:
    """Number of steps of a client in round t."""
    return sum(phase.length(client) for phase in method.phases(client, t))


def dataset_views(dataset: Dataset, device: torch.device) -> Views:
    """Augmentations of a data set's images, on a device."""
    return make_views(dataset.mean, dataset.std, dataset.flip, dataset.crop, device)
