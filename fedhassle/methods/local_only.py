"""Was federating worth it? Each client by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedhassle.method import Client, Update
from fedhassle.methods.fedavg import FedAvg
from fedhassle.vectors import Arrays

OWN = "w of "  # the name of a client's own model


@dataclass(frozen=True)
class Alone(FedAvg):
    """A reference: each client trains a model of its own on its labels; accuracy is their mean.

    Clients train when they are drawn, so that each makes as many steps as in FedAvg.
    """

    headline: ClassVar[str] = "mean"

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """The client's own model; at first the one that all begin with."""
        return {"w": state.get(OWN + client.name, state["w"])}

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """Nothing is merged."""
        return state | {OWN + update.client.name: update.arrays["w"] for update in updates}

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """The logits of each client's model; under `mean` the logarithm of their mean probabilities."""
        models = {k: v for k, v in state.items() if k.startswith(OWN)} or {"w": state["w"]}
        logits = {name: self.net.logits(vector, x) for name, vector in models.items()}
        mean = torch.stack([z.softmax(1) for z in logits.values()]).mean(0)
        return logits | {"mean": mean.log()}

    def report(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The mean accuracy of the clients' models, which is not that of their mean."""
        each = [score for name, score in scores.items() if name != "mean"]
        return {"mean": sum(each) / len(each)}

    def own_prediction(self, client: str) -> str:
        """The prediction by the client's own model, which exists once the client has trained."""
        return OWN + client
