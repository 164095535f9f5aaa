"""Was federating worth it? All labelled data in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedhassle.method import Client, Method, Part, Phase, mean_steps
from fedhassle.methods.fedavg import FedAvg
from fedhassle.ranges import FromOne


@dataclass(frozen=True)
class Central(FedAvg):
    """A reference: the labels of full and partial clients in one place, FedAvg's number of steps a round.

    Unlabelled data and clients are idle.
    """

    # Steps a round; default: as many as its clients would make, on average; ours.
    steps: FromOne | None = None

    pooled: ClassVar[tuple[Part, ...]] = ("labelled",)

    def for_run(self, rounds: int, clients: Sequence[Client] = (), drawn: int = 0) -> Self:
        """The method with the number of steps that its clients would make, unless another is asked for."""
        known = super().for_run(rounds, clients, drawn)
        if self.steps or not clients:
            return known
        return replace(known, steps=mean_steps(self.federated(), clients, drawn))

    def federated(self) -> Method:
        """Returns the method whose clients' steps it makes."""
        return FedAvg(self.net, self.batch, self.epochs)

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """The walks over data that lie at clients, but with the run's number of steps."""
        walks = super().phases(client, t)
        return tuple(replace(walk, epochs=0, steps=self.steps) for walk in walks) if self.steps else walks
