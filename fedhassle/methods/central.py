"""Was federating worth it? All labelled data in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fedhassle.errors import require
from fedhassle.method import Client, Phase
from fedhassle.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Central(FedAvg):
    """A reference: the labels of full and partial clients in one place, FedAvg's number of steps a round.

    Unlabelled data and clients are idle.
    """

    steps: int | None = None  # a round; None: as many as FedAvg's clients make in the run, on average; ours

    pooled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps is None or self.steps >= 1, f"steps must be at least 1, got {self.steps}")

    def for_run(self, rounds: int, steps: int | None = None) -> Self:
        """With FedAvg's steps, unless others are asked for."""
        return self if self.steps else replace(self, steps=steps)

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """FedAvg's walk, but so many steps of it."""
        walks = super().phases(client, t)
        return tuple(replace(walk, epochs=0, steps=self.steps) for walk in walks) if self.steps else walks
