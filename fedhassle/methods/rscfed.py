"""RSCFed (Liang et al., CVPR 2022): the consensus of random subsets, and teachers at unlabelled clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedhassle.losses import sharpen
from fedhassle.method import Batch, Client, Descent, Labelled, Models, Phase, Stream, Update
from fedhassle.methods.fedavg import FedAvg
from fedhassle.nets import Net
from fedhassle.ranges import Decay, NotNegative, Positive, Range
from fedhassle.vectors import Arrays, mean


@dataclass(frozen=True)
class RSCFed(FedAvg):
    """RSCFed: labelled data by cross-entropy, unlabelled clients by a mean teacher that each of them keeps.

    A partial client trains on both parts, or on its labels alone (`partial="labelled_only"`).
    """

    # Values are its authors' (paper and code), but where it says that they are ours: docs/methods.md.

    lr: Positive = 0.03  # learning rate of clients with labels
    unlabelled_lr: Positive = 0.021  # learning rate of unlabelled clients
    unlabelled_clip: NotNegative = 5.0  # largest norm of an unlabelled client's gradient; 0: off
    partial: Literal["labelled_only", "mixed"] = "mixed"  # what partial clients train on; ours
    consistency_weight: NotNegative = 0.02  # λ of the teacher's term
    temperature: Positive = 0.5  # T, which sharpens the teacher's probabilities
    ema: Decay = 0.999  # decay of the teacher, reached with its steps
    subsets: Annotated[int, Range(1, 10_000)] = 3  # K, random subsets of a round's clients
    subset_size: Annotated[int, Range(1, 10_000)] = 5  # M, clients in each subset
    weights: Literal["labels", "samples"] = "labels"  # f_i: its labels, if any, or all that it holds; ours
    boost: Positive = 6.0  # factor on the weight of a client with labels, after distances
    boost_mean: bool = False  # the factor on f_i too: in their code, but off by the command that they publish
    beta_labelled: NotNegative = 100.0  # β of a subset that has a client with labels
    beta_unlabelled: NotNegative = 10_000.0  # β of a subset that has none

    learning_rates: ClassVar[tuple[str, ...]] = ("lr", "unlabelled_lr")

    def networks(self) -> dict[str, Net]:
        """The model w and a client's teacher."""
        return {"w": self.net, "teacher": self.net}

    def has_teacher(self, client: Client) -> bool:
        """True if a client trains on unlabelled data."""
        return client.kind == "unlabelled" or (client.kind == "partial" and self.partial == "mixed")

    def memory(self, client: Client, message: Arrays) -> Arrays:
        """A teacher, which begins as the model received, and how many steps it has made."""
        if not self.has_teacher(client):
            return {}
        return {"teacher": message["w"], "steps": torch.zeros_like(message["w"][:1])}

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """Labels, or the teacher, or both."""
        if not self.has_teacher(client):
            return super().phases(client, t)
        walk = Stream("unlabelled", self.batch, ("weak", "weak"))
        if client.labelled:
            streams = (walk, Stream("labelled", self.batch))
            return (self.taught("both", streams, Descent("w", self.mixed, self.local_optimiser())),)
        optimiser = self.local_optimiser()._replace(lr=self.unlabelled_lr, clip=self.unlabelled_clip)
        return (self.taught("unlabelled", (walk,), Descent("w", self.consistency, optimiser)),)

    def taught(self, name: str, streams: tuple[Stream, ...], descent: Descent) -> Phase:
        """A walk on which the teacher follows."""
        return Phase(name, streams, (descent,), self.epochs, then=self.teach)

    def consistency(self, local: Models, received: Models, batch: Batch) -> Labelled:
        """The model on one weak view is to agree with the sharpened teacher on another."""
        one, other = batch.views
        target = sharpen(local["teacher"](one).softmax(1), self.temperature)
        gap: Tensor = (local["w"](other).softmax(1) - target).square().sum(1).mean()
        return Labelled(self.consistency_weight * gap, target.argmax(1))

    def mixed(self, local: Models, received: Models, batch: Batch, labelled: Batch) -> Labelled:
        """Both losses of a partial client."""
        supervised = self.loss(local, received, labelled)
        consistency, y = self.consistency(local, received, batch)
        return Labelled(supervised + consistency, y)

    def teach(self, local: Models, received: Models) -> Models:
        """The teacher follows the model, the slower the more steps it has made; its statistics too."""
        keep = (1 - 1 / (local["steps"] + 1)).clamp(max=self.ema)
        return {"teacher": local["w"].lerp(local["teacher"], keep), "steps": local["steps"] + 1}

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """The mean of the consensus of random subsets of the updates."""
        if not updates:
            return state
        size = min(self.subset_size, len(updates))
        drawn = [sorted(rng.choice(len(updates), size, replace=False)) for _ in range(self.subsets)]
        found = [self.consensus([updates[i] for i in subset]) for subset in drawn]
        return state | {"w": mean(found, [1.0] * len(found))}

    def boost_of(self, client: Client) -> float:
        """b_i, the factor on the weight of a client with labels."""
        return self.boost if client.labelled else 1.0

    def first_weight(self, client: Client) -> float:
        """f_i, a client's weight before distances; with `boost_mean` times b_i."""
        held = client.labelled + client.unlabelled
        samples = client.labelled or held if self.weights == "labels" else held
        return samples * self.boost_of(client) if self.boost_mean else samples

    def consensus(self, updates: Sequence[Update]) -> Tensor:
        """Distance-reweighted averaging: w_i ∝ f_i · exp(−β·d_i/n_i) · b_i, d_i from the mean by f_i."""
        vectors, clients = [update.arrays["w"] for update in updates], [update.client for update in updates]
        sizes = [client.labelled + client.unlabelled for client in clients]  # n_i
        weights = [self.first_weight(client) for client in clients]  # f_i
        boosts = [self.boost_of(client) for client in clients]  # b_i
        centre = mean(vectors, weights)
        distances = torch.stack([self.net.distance(vector, centre) for vector in vectors]).tolist()
        beta = self.beta_labelled if any(client.labelled for client in clients) else self.beta_unlabelled
        # In logarithms: exp(−β·d/n) underflows.
        logs = [
            math.log(f) - beta * d / n + math.log(b)
            for f, d, n, b in zip(weights, distances, sizes, boosts, strict=True)
        ]
        return mean(vectors, [math.exp(value - max(logs)) for value in logs])
