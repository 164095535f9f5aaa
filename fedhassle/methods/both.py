"""What FixMatch and MixMatch share: FedAvg whose partial clients learn from both parts of their data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedhassle.errors import require
from fedhassle.method import Batch, Client, Descent, Models, Phase, Stream
from fedhassle.methods.fedavg import FedAvg


@dataclass(frozen=True)
class BothParts(FedAvg):
    """FedAvg with a loss on both parts for partial clients; unlabelled clients are idle."""

    ratio: int = 1  # unlabelled samples for each labelled one in a step; MixMatch's paper
    weight: float = 1.0  # λ_u, of the unlabelled part; FixMatch's paper

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.ratio <= 16, f"ratio must be from 1 to 16, got {self.ratio}")
        require(self.weight >= 0, f"weight must be at least 0, got {self.weight}")

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """A pass over the unlabelled data is an epoch; labelled batches come round again."""
        return (self.on_both(),) if client.kind == "partial" else super().phases(client, t)

    def on_both(self) -> Phase:
        """The walk of a partial client."""
        streams = (self.unlabelled(), Stream("labelled", self.batch))
        return Phase("both", streams, (Descent("w", self.joint, self.sgd()),), self.epochs)

    def unlabelled(self) -> Stream:
        """The walk over the unlabelled data."""
        raise NotImplementedError

    def joint(
        self, local: Models, received: Models, unlabelled: Batch, labelled: Batch, *draws: Tensor
    ) -> Tensor:
        """The loss of a step on both parts."""
        raise NotImplementedError
