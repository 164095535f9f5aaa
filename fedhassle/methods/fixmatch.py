"""FedAvg with FixMatch (Sohn et al., 2020) on the clients that have both kinds of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhassle.losses import hard_labels
from fedhassle.method import (
    Batch,
    Client,
    Descent,
    Labelled,
    Model,
    Models,
    Phase,
    Stream,
    Update,
)
from fedhassle.methods.fedavg import FedAvg
from fedhassle.ranges import NotNegative, Ratio, Share


@dataclass(frozen=True)
class FixMatch(FedAvg):
    """FedAvg + FixMatch: full clients train on labels, partial ones on all; unlabelled ones are idle."""

    # Unlabelled samples for each labelled one in a step; ours: with its paper's 7 a partial client would make
    # a third of the steps.
    ratio: Ratio = 2
    weight: NotNegative = 1.0  # λ_u, weight of the unlabelled term; its paper
    confidence: Share = 0.95  # τ, below which a sample gets no pseudo-label; its paper

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """A partial client's epoch is a pass over its unlabelled data; labelled batches come round again."""
        if client.kind != "partial":
            return super().phases(client, t)
        streams = (self.unlabelled(), Stream("labelled", self.batch))
        return (Phase("both", streams, (Descent("w", self.joint, self.local_optimiser()),), self.epochs),)

    def counts(self, update: Update) -> Mapping[str, int]:
        """By labels: by samples partial clients, with few labels of few classes, drown full ones."""
        return {"w": update.client.labelled}

    def unlabelled(self) -> Stream:
        """A weak and a strong view of each sample."""
        return Stream("unlabelled", self.ratio * self.batch, ("weak", "strong"))

    def joint(self, local: Models, received: Models, unlabelled: Batch, labelled: Batch) -> Labelled:
        """Cross-entropy on labels + λ_u · consistency; one forward pass, so that BatchNorm sees all."""
        views = (*labelled.views, *unlabelled.views)
        z, z_weak, z_strong = local["w"](torch.cat(views)).split([len(x) for x in views])
        consistency, y = self.consistency(
            z_weak.detach(), self.teaching(received, "w"), unlabelled.views[0], z_strong
        )
        return Labelled(self.cross_entropy(z, labelled.y) + self.weight * consistency, y)

    def consistency(self, z_weak: Tensor, teacher: Model, weak: Tensor, z_strong: Tensor) -> Labelled:
        """Cross-entropy of the strong view with the pseudo-label of the model itself for the weak one."""
        y = hard_labels(z_weak, self.confidence)
        return Labelled(self.cross_entropy(z_strong, y), y)
