"""A worker of a run: a Ray actor that trains clients on its device; and what travels to it and from it."""

from __future__ import annotations

import logging
import platform
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.dataset import Dataset
from fedhassle.engine.cores import on_cores
from fedhassle.engine.device import Engine
from fedhassle.engine.simulator import sound
from fedhassle.engine.trainer import Task, Trainer
from fedhassle.method import Client, Method, Update
from fedhassle.provenance import own_code, versions
from fedhassle.vectors import Arrays, add_to_mean, all_finite, size_in_bytes

log = logging.getLogger("fedhassle")

Packed = dict[str, np.ndarray]
"""Arrays as they travel."""


def packed(arrays: Arrays) -> Packed:
    """Arrays on the way to another process."""
    return {name: vector.cpu().numpy() for name, vector in arrays.items()}


def unpacked(arrays: Packed, device: torch.device) -> Arrays:
    """Arrays that arrived, on a device; copies, since Ray's memory must not be written to."""
    return {name: on_device(array, device) for name, array in arrays.items()}


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device."""
    return torch.tensor(array, device=device)


class Order(NamedTuple):
    """One client's training, as the driver asks a worker for it."""

    client: Client
    labelled: np.ndarray  # rows of the images
    unlabelled: np.ndarray
    own: Packed  # the arrays of its message that only it receives, or that are small
    shared: dict[str, int]  # the others: their place in the call's list of arrays
    kept: Packed | None  # arrays that it kept
    group: int | None  # whose mean its update is added to; None: the update is returned


class Outcome(NamedTuple):
    """A trained client, as the worker returns it."""

    client: Client
    arrays: Packed  # the update; empty if it was added to a mean
    samples: Mapping[str, int]
    losses: Packed
    labelling: np.ndarray
    kept: Packed
    size: int  # bytes of the update
    finite: bool


class Note(NamedTuple):
    """A message in a worker's log."""

    level: int
    text: str


class Called(NamedTuple):
    """The answer to a call: one outcome per order."""

    outcomes: dict[str, Outcome]  # by client
    notes: list[Note]


class Failed(NamedTuple):
    """The answer to a call in which training raised an error.

    Ray would print the errors of calls that nobody waits for any more.
    """

    error: Exception


class GroupMean(NamedTuple):
    """The mean of a group's updates, and the total weight of each vector."""

    arrays: Packed
    weights: dict[str, int]


class WorkerAbout(NamedTuple):
    """A worker's machine, and the versions of its software."""

    machine: str
    versions: dict[str, str | None]


# The actor


class Notes(logging.Handler):
    """Collects log messages, which a worker returns with its next answer."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.collected: list[Note] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a message."""
        self.collected.append(Note(record.levelno, record.getMessage()))

    def taken(self) -> list[Note]:
        """The messages since the last call."""
        found, self.collected = self.collected, []
        return found


class Worker:
    """A Ray actor: trains clients on its device, and averages their updates where the driver wants that."""

    def __init__(
        self, dataset: Dataset, seed: int, engine: Engine, threads: int, paths: Sequence[str] = ()
    ) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)  # of a user's own methods
        self._active = ExitStack()  # as long as the process lives
        self._active.enter_context(engine.active())
        self._active.enter_context(on_cores(1))  # clients run side by side instead
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.trainer = Trainer(dataset, seed, engine, threads)
        self.device = engine.device
        self.method: Method | None = None
        self.means: dict[int, Arrays] = {}
        self.weights: dict[int, dict[str, int]] = {}
        self.notes = Notes()
        log.addHandler(self.notes)
        log.setLevel(logging.INFO)

    def about(self, own: Sequence[str]) -> WorkerAbout:
        """Its machine and versions; `own`: import paths of a user's own code."""
        return WorkerAbout(platform.node(), worker_versions(own))

    def adopt(self, method: Method) -> None:
        """Takes the method of the following rounds; one object, since lanes recognise its functions."""
        self.method = method

    def begin(self) -> None:
        """Begins a round, or begins it again."""
        self.means, self.weights = {}, {}

    def train(self, t: int, orders: Sequence[Order], *shared: np.ndarray) -> Called | Failed:
        """Trains clients in round t."""
        try:
            return self._train(t, orders, shared)
        except Exception as error:
            error.add_note(f"On a worker:\n{traceback.format_exc()}")
            return Failed(error)

    def _train(self, t: int, orders: Sequence[Order], shared: Sequence[np.ndarray]) -> Called:
        """Trains clients, and adds updates to the means of their groups in the order of the orders."""
        assert self.method is not None
        arrays = [on_device(array, self.device) for array in shared]
        tasks = [self._task(order, arrays) for order in orders]
        trained = self.trainer.train(self.method, tasks, t)
        kept = dict(sound(trained))
        finite = all_finite([list(update.arrays.values()) for update, _ in trained])
        found = {update.client.name: (update, ok) for (update, _), ok in zip(trained, finite, strict=True)}
        outcomes = {}
        for order in orders:
            name = order.client.name
            update, ok = found[name]
            if order.group is not None and ok:
                self._average(order.group, update)
            outcomes[name] = outcome(update, kept.get(name, {}), ok, whole=order.group is None)
        return Called(outcomes, self.notes.taken())

    def finish(self) -> dict[int, GroupMean]:
        """The means of the groups that it trained."""
        return {group: GroupMean(packed(mean), self.weights[group]) for group, mean in self.means.items()}

    def _task(self, order: Order, shared: Sequence[Tensor]) -> Task:
        message = unpacked(order.own, self.device) | {name: shared[i] for name, i in order.shared.items()}

        def memory() -> Arrays | None:
            return None if order.kept is None else unpacked(order.kept, self.device)

        return Task(order.client, order.labelled, order.unlabelled, message, memory)

    def _average(self, group: int, update: Update) -> None:
        """Adds an update to the mean of its group."""
        assert self.method is not None
        counts = self.method.counts(update)
        means, weights = self.means.setdefault(group, {}), self.weights.setdefault(group, {})
        for name, vector in update.arrays.items():
            if name in means:
                add_to_mean(means[name], weights[name], vector, counts[name])
            else:
                means[name] = vector.clone()
            weights[name] = weights.get(name, 0) + counts[name]


def outcome(update: Update, kept: Arrays, finite: bool, whole: bool) -> Outcome:
    """A trained client on its way to the driver; its update only if that is to arrive whole."""
    arrays = packed(update.arrays) if whole else {}
    size, labelling = size_in_bytes(update.arrays), update.labelling.cpu().numpy()
    losses = packed(update.losses)
    return Outcome(update.client, arrays, update.samples, losses, labelling, packed(kept), size, finite)


def worker_versions(own: Sequence[str]) -> dict[str, str | None]:
    """The versions that all machines of a run must share, with the hashes of a user's own code."""
    found = versions()
    return {key: found[key] for key in ("code", "torch", "numpy")} | {name: own_code(name) for name in own}
