"""A federation in this process: every client's data in one table of images on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedhassle.data.datasets import Dataset
from fedhassle.data.partition import Split
from fedhassle.data.views import Views, make_views
from fedhassle.local import Samples, Site, train
from fedhassle.method import Client, Method
from fedhassle.parallel import side_by_side
from fedhassle.rounds import Reply, reply
from fedhassle.vectors import Arrays, all_finite


class Simulator:
    """Clients that train on one device; on a CPU several side by side, each on one core."""

    def __init__(
        self, dataset: Dataset, split: Split, seed: int, device: torch.device, workers: int = 1
    ) -> None:
        self.seed = seed
        self.workers = workers if device.type == "cpu" else 1
        self.views = dataset_views(dataset, device)
        self.images = torch.from_numpy(dataset.x_train).to(device)
        self.y = torch.from_numpy(dataset.y_train).to(device)
        self.rows = {
            name: (tensor(labelled, device), tensor(unlabelled, device))
            for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True)
        }
        self.clients: Sequence[Client] = tuple(
            Client(name, len(labelled), len(unlabelled)) for name, (labelled, unlabelled) in self.rows.items()
        )
        self.memory: dict[str, Arrays] = {}  # what clients keep between rounds

    def train(self, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int) -> list[Reply]:
        """Round t of the clients that are sent a message."""

        def work(message: tuple[Client, Arrays]) -> Reply:
            return self._train_one(method, *message, t)

        # A network that draws by itself does so from one global state: no other may train meanwhile.
        alone = any(net.draws for net in method.networks().values())
        longest_first = sorted(messages, key=lambda message: -steps(method, message[0], t))
        done = side_by_side(work, longest_first, 1 if alone else self.workers)
        replies = {reply.update.client.name: reply for reply in done}
        return [replies[client.name] for client, _ in messages]

    def _train_one(self, method: Method, client: Client, message: Arrays, t: int) -> Reply:
        update, kept = train(method, self.site(client), message, self.memory.get(client.name), t, self.seed)
        # A client that drops out of the round keeps what it had.
        if kept and all_finite(update.arrays | kept):
            self.memory[client.name] = kept
        return reply(update, message)

    def site(self, client: Client) -> Site:
        """Where a client trains."""
        labelled, unlabelled = self.rows[client.name]
        samples = Samples(self.images, labelled, self.y[labelled], unlabelled, self.y[unlabelled])
        return Site(client, samples, self.views)


def steps(method: Method, client: Client, t: int) -> int:
    """How many steps a client makes in round t."""
    return sum(phase.length(client) for phase in method.phases(client, t))


def dataset_views(dataset: Dataset, device: torch.device) -> Views:
    """The views of a data set's images, on a device."""
    return make_views(dataset.mean, dataset.std, dataset.flip, dataset.crop, device)


def tensor(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Row numbers as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(device)
