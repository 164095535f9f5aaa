"""FedAvg (McMahan et al., 2017) on the labelled data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedhassle.method import Batch, Client, Descent, Method, Models, Phase, Stream
from fedhassle.nets import Net
from fedhassle.vectors import Arrays


@dataclass(frozen=True)
class FedAvg(Method):
    """One model, trained on labels and averaged by their number; unlabelled data and clients are idle."""

    def networks(self) -> dict[str, Net]:
        """The model w."""
        return {"w": self.net}

    def initial(self, seed: int) -> Arrays:
        """w^(0)."""
        return {"w": self.net.initial(seed)}

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """Labelled data alone; a client without any is not asked."""
        descent = Descent("w", self.loss, self.local_optimiser())
        walk = Stream("labelled", self.batch)
        return (Phase("labelled", (walk,), (descent,), self.epochs),) if client.labelled else ()

    def loss(self, local: Models, received: Models, batch: Batch) -> Tensor:
        """ℓ(f(x; w), y)."""
        return self.cross_entropy(local["w"](batch.views[0]), batch.y)

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """f(x; w)."""
        return {"model": self.net.logits(state["w"], x)}
