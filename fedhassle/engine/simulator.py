"""A federation in this process, with the data of all clients in one table of images on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedhassle.data.catalogue import Dataset
from fedhassle.data.split.split import Split
from fedhassle.data.views import Views, make_views
from fedhassle.engine.client import Samples, Site, Trained, to_device, train, visit
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.cores import side_by_side
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.rounds import Reply
from fedhassle.engine.transfer import Transfer
from fedhassle.method import Client, Method, Update
from fedhassle.nets import CAPTURE_LOCK
from fedhassle.vectors import Arrays, all_finite

Message = tuple[Client, Arrays]

WRITERS = 4  # threads that write files of clients; they wait for the disk, not for a core


class Simulator:
    """Clients that train in parallel on one device: one per core of a CPU, or on the lanes of a GPU."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        seed: int,
        engine: Engine,
        workers: int = 1,
        client_state: ClientState | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        device = engine.device
        self.seed, self.engine = seed, engine
        self.workers = workers if device.type == "cpu" else 1
        self.lanes = Lanes(engine) if device.type != "cpu" else None
        self.views = dataset_views(dataset, device)
        self.images = torch.from_numpy(dataset.x_train).to(device)
        self.y = torch.from_numpy(dataset.y_train).to(device)
        # Not on the device, whose memory must not grow with the number of clients.
        parts = zip(split.labelled, split.unlabelled, strict=True)
        self.rows = dict(zip(split.names if names is None else names, parts, strict=True))
        self.clients = clients_of(split, names)
        self.client_state = ClientState() if client_state is None else client_state
        self.transfer = Transfer(self.client_state, device)

    def present(self) -> Sequence[Client]:
        """All clients."""
        return self.clients

    def train(self, method: Method, messages: Sequence[Message], t: int) -> list[Reply]:
        """Trains the clients that receive a message in round t."""
        least = method.unsent()
        down = [self.transfer.down(client.name, message, least, t) for client, message in messages]
        received = [(client, one.arrays) for (client, _), one in zip(messages, down, strict=True)]
        if self.lanes is None:
            done = self._on_cores(method, received, t)
        else:
            done = self._on_lanes(self.lanes, method, received, t)
        self._save(done, t)
        updates = {update.client.name: update for update, _ in done}
        return [
            self._reply(method, updates[client.name], message, one.size, t)
            for (client, message), one in zip(received, down, strict=True)
        ]

    def _reply(self, method: Method, update: Update, message: Arrays, down: int, t: int) -> Reply:
        """The reply of a client, with its update as the server receives it."""
        up = self.transfer.up(update.client.name, update.arrays, message, method.unsent(), t)
        return Reply(update._replace(arrays=up.arrays), down, up.size)

    def _on_lanes(self, lanes: Lanes, method: Method, messages: Sequence[Message], t: int) -> list[Trained]:
        with CAPTURE_LOCK.eager(), self.engine.lowered():
            visits = [
                visit(method, self.site(client), message, self._load(client, t), t, self.seed)
                for client, message in messages
            ]
        return lanes.train(visits)

    def _on_cores(self, method: Method, messages: Sequence[Message], t: int) -> list[Trained]:
        def work(message: Message) -> Trained:
            client, received = message
            return train(method, self.site(client), received, self._load(client, t), t, self.seed)

        # A network with dropout draws from one global random state, so no other client may train meanwhile.
        alone = any(net.draws for net in method.networks().values())
        longest_first = sorted(messages, key=lambda message: -steps(method, message[0], t))
        return side_by_side(work, longest_first, 1 if alone else self.workers)

    def _load(self, client: Client, t: int) -> Arrays | None:
        return self.client_state.load(client.name, t, self.engine.device)

    def _save(self, trained: Sequence[Trained], t: int) -> None:
        """Saves the arrays that clients keep, except for clients with NaN or infinity in this round."""
        keeping = [(update, kept) for update, kept in trained if kept]
        finite = all_finite([[*update.arrays.values(), *kept.values()] for update, kept in keeping])
        sound = [(update.client.name, kept) for (update, kept), ok in zip(keeping, finite, strict=True) if ok]
        side_by_side(lambda one: self.client_state.save(one[0], t, one[1]), sound, WRITERS)

    def rewind(self, t: int) -> None:
        """Removes the clients' state of later rounds than t."""
        self.client_state.rewind(t)

    def prune(self, rounds: Sequence[int]) -> None:
        """Removes the clients' state that is needed neither now nor to go back to one of these rounds."""
        self.client_state.prune(rounds)

    def kept(self) -> dict[str, int]:
        """By client, the last round in which it saved something."""
        return self.client_state.kept()

    def site(self, client: Client) -> Site:
        """The site of a client; its rows are on the device only while it trains."""
        rows = [np.ascontiguousarray(part, np.int64) for part in self.rows[client.name]]
        labelled, unlabelled = (to_device(part, self.engine.device) for part in rows)
        y, truth = self.y[labelled], self.y[unlabelled]  # in a real federation the truth is −1, unknown
        return Site(client, Samples(self.images, labelled, y, unlabelled, truth), self.views)


def clients_of(split: Split, names: Sequence[str] | None = None) -> Sequence[Client]:
    """The clients of a split; by default with the split's own names."""
    parts = zip(split.names if names is None else names, split.labelled, split.unlabelled, strict=True)
    return tuple(Client(name, len(labelled), len(unlabelled)) for name, labelled, unlabelled in parts)


def steps(method: Method, client: Client, t: int) -> int:
    """Number of steps of a client in round t."""
    return sum(phase.length(client) for phase in method.phases(client, t))


def dataset_views(dataset: Dataset, device: torch.device) -> Views:
    """Augmentations of a data set's images, on a device."""
    return make_views(dataset.mean, dataset.std, dataset.flip, dataset.crop, device)
