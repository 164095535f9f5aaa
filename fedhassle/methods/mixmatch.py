"""FedAvg with MixMatch (Berthelot et al., 2019) on the clients that have both kinds of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedhassle.losses import one_hot, sharpen, soft_cross_entropy
from fedhassle.method import Batch, Client, Descent, Labelled, Models, Phase, Stream, Update
from fedhassle.methods.fedavg import FedAvg
from fedhassle.ranges import FromOne, NotNegative, Positive, Ratio
from fedhassle.vectors import Arrays


@dataclass(frozen=True)
class MixMatch(FedAvg):
    """FedAvg + MixMatch: full clients train on labels, partial ones on all; unlabelled ones are idle."""

    ratio: Ratio = 1  # unlabelled samples for each labelled one in a step; its paper
    weight: NotNegative = 1.0  # λ_u at the end of its growth; ours: with its authors' 75 it breaks down
    temperature: Positive = 0.5  # T, which sharpens guessed labels; its paper
    alpha: Positive = 0.75  # α of Beta(α, α), which mixes samples; its paper
    rounds: FromOne | None = None  # rounds over which λ_u grows; default: those of the run; ours
    # Weight of a client in means: its labels, or all its samples; ours.
    weights: Literal["labels", "samples"] = "labels"

    def for_run(self, rounds: int, clients: Sequence[Client] = (), drawn: int = 0) -> Self:
        """The method with a λ_u that grows to the run's last round, unless it is to stop earlier."""
        known = super().for_run(rounds, clients, drawn)
        return known if self.rounds else replace(known, rounds=rounds)

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """Like FixMatch's, with two weak views of each unlabelled sample (K = 2 guesses); steps are mixed."""
        if client.kind != "partial":
            return super().phases(client, t)
        guessed = Stream("unlabelled", self.ratio * self.batch, ("weak", "weak"))
        streams = (guessed, Stream("labelled", self.batch))
        descent = Descent("w", self.joint, self.local_optimiser())
        return (Phase("both", streams, (descent,), self.epochs, draw=self.mixing),)

    def mixing(self, rng: np.random.Generator) -> np.ndarray:
        """λ, and for each sample whom it is mixed with."""
        share = rng.beta(self.alpha, self.alpha, 1)
        return np.concatenate([share, rng.permutation(self.batch * (1 + 2 * self.ratio))])

    def counts(self, update: Update) -> Mapping[str, int]:
        """By labels: with a small λ_u little else teaches; by samples partial clients drown full ones."""
        return {"w": update.client.labelled} if self.weights == "labels" else update.samples

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """The model, and how far λ_u has grown: a tensor, since it changes from round to round."""
        share = min(1.0, t / (self.rounds or t))
        return state | {"ramp": torch.full((1,), share, device=state["w"].device)}

    def joint(
        self, local: Models, received: Models, unlabelled: Batch, labelled: Batch, draw: Tensor
    ) -> Labelled:
        """Cross-entropy on mixed labelled samples + λ_u · squared error on mixed unlabelled ones."""
        x, u = labelled.views[0], torch.cat(unlabelled.views)
        now = local["w"]._replace(weights=local["w"].weights.detach(), training=False)
        guesses = now(u).softmax(1).chunk(2)
        guess = sharpen((guesses[0] + guesses[1]) / 2, self.temperature)
        target = torch.cat([one_hot(labelled.y, guess.shape[1]), guess, guess])
        both, target = self.mixed(torch.cat([x, u]), target, draw)
        z = local["w"](both)  # one pass: BatchNorm sees all, so nothing need be interleaved
        on_labels, wanted = z[: len(x)], target[: len(x)]
        supervised = soft_cross_entropy(self.calibrated(on_labels, wanted), wanted).mean()
        distance = (z[len(x) :].softmax(1) - target[len(x) :]).square().mean()
        return Labelled(supervised + self.weight * received["ramp"][0] * distance, guess.argmax(1))

    def mixed(self, x: Tensor, target: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample and its target, mixed with another's; its own share is λ' = max(λ, 1 − λ)."""
        share, order = torch.maximum(draw[0], 1 - draw[0]), draw[1:].long()
        return x.lerp(x[order], 1 - share), target.lerp(target[order], 1 - share)
