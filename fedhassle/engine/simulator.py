"""Simulated clients: what all of them hold and keep, and a federation of them in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedhassle.data.dataset import Dataset
from fedhassle.data.split.split import Split
from fedhassle.engine.client import Trained
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.cores import side_by_side
from fedhassle.engine.device import Engine
from fedhassle.engine.rounds import Reply
from fedhassle.engine.trainer import Task, Trainer
from fedhassle.engine.transfer import Transfer
from fedhassle.method import Client, Method, Update
from fedhassle.vectors import Arrays, all_finite

Message = tuple[Client, Arrays]

WRITERS = 4  # threads that write files of clients; they wait for the disk, not for a core


class SimulatedClients:
    """The clients of a split: their rows, their state between rounds, and the bytes they exchange.

    A federation of them adds `train`.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        client_state: ClientState | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        # Not on the device, whose memory must not grow with the number of clients.
        parts = zip(split.labelled, split.unlabelled, strict=True)
        self.rows = dict(zip(split.names if names is None else names, parts, strict=True))
        self.clients = clients_of(split, names)
        self.device = device
        self.client_state = ClientState() if client_state is None else client_state
        self.transfer = Transfer(self.client_state, device)

    def present(self) -> Sequence[Client]:
        """All clients."""
        return self.clients

    def tasks(self, method: Method, messages: Sequence[Message], t: int) -> tuple[list[Task], list[int]]:
        """The tasks of round t, with the messages as the clients receive them, and the bytes of each."""
        least = method.unsent()
        down = [self.transfer.down(client.name, message, least, t) for client, message in messages]
        tasks = [self._task(client, one.arrays, t) for (client, _), one in zip(messages, down, strict=True)]
        return tasks, [one.size for one in down]

    def _task(self, client: Client, message: Arrays, t: int) -> Task:
        def memory() -> Arrays | None:
            return self.client_state.load(client.name, t, self.device)

        return Task(client, *self.rows[client.name], message, memory)

    def reply(self, method: Method, update: Update, message: Arrays, down: int, t: int) -> Reply:
        """The reply of a client, with its update as the server receives it."""
        up = self.transfer.up(update.client.name, update.arrays, message, method.unsent(), t)
        return Reply(update._replace(arrays=up.arrays), down, up.size)

    def save(self, kept: Sequence[tuple[str, Arrays]], t: int) -> None:
        """Saves the arrays that clients keep after round t."""
        side_by_side(lambda one: self.client_state.save(one[0], t, one[1]), kept, WRITERS)

    def rewind(self, t: int) -> None:
        """Removes the clients' state of later rounds than t."""
        self.client_state.rewind(t)

    def prune(self, rounds: Sequence[int]) -> None:
        """Removes the clients' state that is needed neither now nor to go back to one of these rounds."""
        self.client_state.prune(rounds)

    def kept(self) -> dict[str, int]:
        """By client, the last round in which it saved something."""
        return self.client_state.kept()


class Simulator(SimulatedClients):
    """Clients that train in this process, on one device."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        seed: int,
        engine: Engine,
        threads: int = 1,
        client_state: ClientState | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(split, engine.device, client_state, names)
        self.trainer = Trainer(dataset, seed, engine, threads)

    def train(self, method: Method, messages: Sequence[Message], t: int) -> list[Reply]:
        """Trains the clients that receive a message in round t."""
        tasks, down = self.tasks(method, messages, t)
        done = self.trainer.train(method, tasks, t)
        self.save(sound(done), t)
        updates = {update.client.name: update for update, _ in done}
        return [
            self.reply(method, updates[task.client.name], task.message, size, t)
            for task, size in zip(tasks, down, strict=True)
        ]


def sound(trained: Sequence[Trained]) -> list[tuple[str, Arrays]]:
    """The arrays that clients keep, by client, except for clients with NaN or infinity in this round."""
    keeping = [(update, kept) for update, kept in trained if kept]
    finite = all_finite([[*update.arrays.values(), *kept.values()] for update, kept in keeping])
    return [(update.client.name, kept) for (update, kept), ok in zip(keeping, finite, strict=True) if ok]


def clients_of(split: Split, names: Sequence[str] | None = None) -> Sequence[Client]:
    """The clients of a split; by default with the split's own names."""
    parts = zip(split.names if names is None else names, split.labelled, split.unlabelled, strict=True)
    return tuple(Client(name, len(labelled), len(unlabelled)) for name, labelled, unlabelled in parts)
