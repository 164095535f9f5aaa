"""Was federating worth it? All labelled data in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedhassle.errors import require
from fedhassle.method import Client, Descent, Phase, Stream
from fedhassle.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Central(FedAvg):
    """A reference: the labelled data of all clients in one place, as many steps a round as FedAvg makes."""

    share: float | None = None  # of the clients that take part in a round; None: those of the run

    pooled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.share is None or 0 < self.share <= 1, f"share must be in (0, 1], got {self.share}")

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """The epochs of a round, by the share of clients that would have made them."""
        steps = max(1, round(self.epochs * (self.share or 1.0) * client.labelled / self.batch))
        walk, descent = Stream("labelled", self.batch), Descent("w", self.loss, self.sgd())
        return (Phase("labelled", (walk,), (descent,), steps=steps),) if client.labelled else ()
