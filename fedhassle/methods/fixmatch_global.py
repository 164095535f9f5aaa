"""FixMatch with the labels of the global model, which makes every unlabelled client useful."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhassle.losses import hard_labels
from fedhassle.method import Batch, Client, Descent, Labelled, Model, Models, Phase, Update
from fedhassle.methods.fixmatch import FixMatch


@dataclass(frozen=True)
class FixMatchGlobal(FixMatch):
    """FixMatch with labels of the global model: unlabelled clients train too, on those labels alone.

    Full clients train on labels, partial ones on all.
    """

    teachers: ClassVar[tuple[str, ...]] = ("w",)

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """As FixMatch's, and for an unlabelled client its term alone."""
        if client.kind != "unlabelled":
            return super().phases(client, t)
        descent = Descent("w", self.alone, self.local_optimiser())
        return (Phase("unlabelled", (self.unlabelled(),), (descent,), self.epochs),)

    def counts(self, update: Update) -> Mapping[str, int]:
        """By all samples: unlabelled clients have no labels to go by."""
        return update.samples

    def alone(self, local: Models, received: Models, unlabelled: Batch) -> Labelled:
        """The consistency of an unlabelled client."""
        weak, strong = unlabelled.views
        z_weak, z_strong = local["w"](torch.cat([weak, strong])).chunk(2)
        loss, y = self.consistency(z_weak.detach(), self.teaching(received, "w"), weak, z_strong)
        return Labelled(self.weight * loss, y)

    def consistency(self, z_weak: Tensor, teacher: Model, weak: Tensor, z_strong: Tensor) -> Labelled:
        """Cross-entropy of the strong view with the pseudo-label of the received model for the weak one."""
        y = hard_labels(teacher(weak), self.confidence)
        return Labelled(self.cross_entropy(z_strong, y), y)
