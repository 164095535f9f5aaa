"""A federation in this process: every client's data in one table of images on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedhassle.data.catalogue import Dataset
from fedhassle.data.split.split import Split
from fedhassle.data.views import Views, make_views
from fedhassle.engine.client import Samples, Site, Trained, to_device, train, visit
from fedhassle.engine.client_state import Memory
from fedhassle.engine.cores import side_by_side
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.gpu.sharing import QUIET
from fedhassle.engine.rounds import Reply
from fedhassle.engine.transfer import Wire
from fedhassle.method import Client, Method, Update
from fedhassle.vectors import Arrays, all_finite

Message = tuple[Client, Arrays]

WRITERS = 4  # files of clients that are written at once: the disk is waited for, not a core


class Simulator:
    """Clients that train side by side on one device: on a CPU each on one core, on a GPU each on a lane."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        seed: int,
        engine: Engine,
        workers: int = 1,
        memory: Memory | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        device = engine.device
        self.seed, self.engine = seed, engine
        self.workers = workers if device.type == "cpu" else 1
        self.lanes = Lanes(engine) if device.type != "cpu" else None
        self.views = dataset_views(dataset, device)
        self.images = torch.from_numpy(dataset.x_train).to(device)
        self.y = torch.from_numpy(dataset.y_train).to(device)
        self.truth_known = bool((dataset.y_train >= 0).all())  # in a real federation nobody knows it
        # Not on the device: what lies there does not grow with the number of clients.
        parts = zip(split.labelled, split.unlabelled, strict=True)
        self.rows = dict(zip(split.names if names is None else names, parts, strict=True))
        self.clients: Sequence[Client] = tuple(
            Client(name, len(labelled), len(unlabelled)) for name, (labelled, unlabelled) in self.rows.items()
        )
        self.memory = Memory() if memory is None else memory
        self.wire = Wire(self.memory, device)

    def present(self) -> Sequence[Client]:
        """All of them."""
        return self.clients

    def train(self, method: Method, messages: Sequence[Message], t: int) -> list[Reply]:
        """Round t of the clients that are sent a message."""
        least = method.unsent()
        down = [self.wire.down(client.name, message, least, t) for client, message in messages]
        received = [(client, one.arrays) for (client, _), one in zip(messages, down, strict=True)]
        if self.lanes is None:
            done = self._on_cores(method, received, t)
        else:
            done = self._on_lanes(self.lanes, method, received, t)
        self._keep(done, t)
        updates = {update.client.name: update for update, _ in done}
        return [
            self._reply(method, updates[client.name], message, one.size, t)
            for (client, message), one in zip(received, down, strict=True)
        ]

    def _reply(self, method: Method, update: Update, message: Arrays, down: int, t: int) -> Reply:
        """An update as it arrives."""
        up = self.wire.up(update.client.name, update.arrays, message, method.unsent(), t)
        return Reply(update._replace(arrays=up.arrays), down, up.size)

    def _on_lanes(self, lanes: Lanes, method: Method, messages: Sequence[Message], t: int) -> list[Trained]:
        with QUIET.broken(), self.engine.lowered():
            visits = [
                visit(method, self.site(client), message, self._kept(client, t), t, self.seed)
                for client, message in messages
            ]
        return lanes.train(visits)

    def _on_cores(self, method: Method, messages: Sequence[Message], t: int) -> list[Trained]:
        def work(message: Message) -> Trained:
            client, received = message
            return train(method, self.site(client), received, self._kept(client, t), t, self.seed)

        # A network that draws by itself does so from one global state: no other may train meanwhile.
        alone = any(net.draws for net in method.networks().values())
        longest_first = sorted(messages, key=lambda message: -steps(method, message[0], t))
        return side_by_side(work, longest_first, 1 if alone else self.workers)

    def _kept(self, client: Client, t: int) -> Arrays | None:
        return self.memory.load(client.name, t, self.engine.device)

    def _keep(self, trained: Sequence[Trained], t: int) -> None:
        """Saves what clients keep; one that drops out of the round for NaN keeps what it had."""
        keeping = [(update, kept) for update, kept in trained if kept]
        finite = all_finite([[*update.arrays.values(), *kept.values()] for update, kept in keeping])
        sound = [(update.client.name, kept) for (update, kept), ok in zip(keeping, finite, strict=True) if ok]
        side_by_side(lambda one: self.memory.save(one[0], t, one[1]), sound, WRITERS)

    def rewind(self, t: int) -> None:
        """Makes clients forget what they kept after round t."""
        self.memory.rewind(t)

    def prune(self, rounds: Sequence[int]) -> None:
        """Lets clients forget what is needed neither now nor to go back to one of these rounds."""
        self.memory.prune(rounds)

    def site(self, client: Client) -> Site:
        """Where a client trains; its rows come onto the device for as long as it does."""
        rows = [np.ascontiguousarray(part, np.int64) for part in self.rows[client.name]]
        labelled, unlabelled = (to_device(part, self.engine.device) for part in rows)
        truth = self.y[unlabelled] if self.truth_known else None
        return Site(client, Samples(self.images, labelled, self.y[labelled], unlabelled, truth), self.views)


def steps(method: Method, client: Client, t: int) -> int:
    """How many steps a client makes in round t."""
    return sum(phase.length(client) for phase in method.phases(client, t))


def dataset_views(dataset: Dataset, device: torch.device) -> Views:
    """The views of a data set's images, on a device."""
    return make_views(dataset.mean, dataset.std, dataset.flip, dataset.crop, device)
