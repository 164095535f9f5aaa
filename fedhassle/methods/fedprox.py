"""FedProx (Li et al., 2020): FedAvg that stays close to what it was sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedhassle.method import Batch, Models
from fedhassle.methods.fedavg import FedAvg
from fedhassle.ranges import NotNegative
from fedhassle.vectors import squared_distance


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term; unlabelled data and clients are idle."""

    mu: NotNegative = 0.001  # μ, weight of the proximal term; ours: the paper gives none

    def loss(self, local: Models, received: Models, batch: Batch) -> Tensor:
        """ℓ(f(x; w), y) + μ/2·‖w − w^(t)‖²."""
        proximity = squared_distance(local["w"].weights, received["w"].weights)
        return super().loss(local, received, batch) + self.mu / 2 * proximity
