"""FedMatch (Jeong et al., ICLR 2021), with labels at the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fedhassle.losses import cross_entropy_each, kl_divergence_each, one_hot
from fedhassle.method import (
    Batch,
    Client,
    Descent,
    Labelled,
    Method,
    Model,
    Models,
    Phase,
    Stream,
    Update,
)
from fedhassle.nets import Net
from fedhassle.randomness import generator
from fedhassle.ranges import Decay, FromOne, NotNegative, Positive, Range, Ratio, Share
from fedhassle.vectors import Arrays, squared_distance

HELPER, PSI, OUTPUT = "helper ", "psi of ", "output of "  # names: helpers of a message; what the server keeps


@dataclass(frozen=True)
class FedMatch(Method):
    """FedMatch: θ = σ + ψ; σ learns from labels, ψ from unlabelled data; unlabelled clients are idle.

    ψ follows σ, and agrees with the models of the nearest clients; at a full client it only follows. With
    `unlabelled=true` unlabelled clients train it too. BatchNorm, its statistics included, belongs to σ.
    """

    # Values are its authors' (paper and code), but where it says that they are ours: docs/methods.md.

    # Learning rate; ours: with λ_s = 10, σ goes half as far in a step as at 0.1 with momentum 0.9.
    lr: Positive = 0.05
    momentum: Decay = 0.0  # momentum of SGD
    confidence: Share = 0.75  # below it a sample teaches nothing
    helpers: Annotated[int, Range(0, 1000)] = 2  # H, the clients that answer most alike
    helper_rounds: FromOne = 10  # helpers are sent in every n-th round
    supervised_weight: NotNegative = 10.0  # λ_s, weight of the cross-entropy on labels
    consistency_weight: NotNegative = 1.0  # λ_ICCS; ours: theirs, 0.01, leaves ψ next to nothing to learn
    sparsity_weight: NotNegative = 0.0001  # λ_L1, weight of |ψ|
    proximity_weight: NotNegative = 0.01  # λ_L2; ours: with theirs, 10, ψ becomes σ in one step
    first_psi: Share = 0.2  # ψ^(0) as a share of σ^(0)
    ratio: Ratio = 6  # unlabelled samples for each labelled one in a step: with 10 % a pass over both; ours
    unlabelled: bool = False  # whether unlabelled clients train ψ; ours: its authors have none
    # Weight of a client in means; ours, as clients differ in size.
    weights: Literal["labels", "clients"] = "labels"
    least_change: NotNegative = 5e-5  # changes of an entry up to this size are not sent, in either direction

    def networks(self) -> dict[str, Net]:
        """σ is a network; ψ and the helpers' are vectors that are added to its kernels."""
        return {"sigma": self.net}

    def initial(self, seed: int) -> Arrays:
        """σ^(0), and ψ^(0) as a share of it."""
        sigma = self.net.initial(seed)
        return {"sigma": sigma, "psi": self.first_psi * sigma[: self.net.n_kernels]}

    def theta(self, sigma: Model, psi: Tensor) -> Model:
        """The model σ + ψ."""
        kernels, normalisation = torch.split(sigma.weights, [len(psi), len(sigma.weights) - len(psi)])
        return sigma.at(torch.cat([kernels + psi, normalisation]))

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """First σ on labels, then ψ, at every step; labels pace the epochs."""
        optimiser = self.local_optimiser()
        weighted = optimiser._replace(clip=self.supervised_weight * optimiser.clip)  # as if of ℓ alone
        labelled = Stream("labelled", self.batch)
        sigma = Descent("sigma", self.supervised, weighted)
        if client.kind == "full":
            follows = Descent("psi", self.following, optimiser)
            return (Phase("labelled", (labelled,), (sigma, follows), self.epochs),)
        unlabelled = Stream("unlabelled", self.batch, ("weak", "strong"))
        if client.kind == "partial":
            rest = replace(unlabelled, batch=self.ratio * self.batch)
            psi = Descent("psi", self.agreement, optimiser)
            return (Phase("both", (labelled, rest), (sigma, psi), self.epochs),)
        psi = Descent("psi", self.agreement_alone, optimiser)
        return (Phase("unlabelled", (unlabelled,), (psi,), self.epochs),) if self.unlabelled else ()

    def supervised(self, local: Models, received: Models, labelled: Batch, *rest: Batch) -> Tensor:
        """λ_s·ℓ(f(x; σ + ψ), y), for σ."""
        z = self.theta(local["sigma"], local["psi"])(labelled.views[0])
        return self.supervised_weight * self.cross_entropy(z, labelled.y)

    def following(self, local: Models, received: Models, labelled: Batch) -> Tensor:
        """The loss of ψ where no data is unlabelled."""
        return self.norms(local["sigma"], local["psi"])

    def norms(self, sigma: Model, psi: Tensor) -> Tensor:
        """λ_L1·|ψ| + λ_L2·‖σ − ψ‖², for ψ."""
        distance = squared_distance(psi, sigma.weights.detach()[: len(psi)])
        return self.sparsity_weight * psi.abs().sum() + self.proximity_weight * distance

    def agreement(self, local: Models, received: Models, labelled: Batch, unlabelled: Batch) -> Labelled:
        """The loss of ψ beside σ, whose BatchNorm statistics it leaves as they are."""
        sigma = local["sigma"]
        aside = sigma._replace(statistics=sigma.statistics.clone())
        return self.psi_loss(aside, local["psi"], received, unlabelled)

    def agreement_alone(self, local: Models, received: Models, unlabelled: Batch) -> Labelled:
        """The loss of ψ on the σ received."""
        return self.psi_loss(received["sigma"], local["psi"], received, unlabelled)

    def psi_loss(self, sigma: Model, psi: Tensor, received: Models, unlabelled: Batch) -> Labelled:
        """Inter-client consistency, agreement labels, and the norms of ψ."""
        weak, strong = unlabelled.views
        theta = self.theta(sigma, psi)
        z = theta(weak)  # (B, M)
        experts = [
            self.theta(received["sigma"], vector)(weak)
            for name, vector in received.items()
            if name.startswith(HELPER)
        ]
        sure = (z.detach().softmax(1).amax(1) >= self.confidence).float()  # (B,), a mask: shapes stay

        def over_the_sure(each: Tensor) -> Tensor:
            return (sure * each).sum() / sure.sum().clamp_min(1)

        consistency = sum(
            (over_the_sure(kl_divergence_each(expert, z)) for expert in experts), torch.zeros_like(sure[0])
        )
        label = majority([z.detach(), *experts])
        y = torch.where(sure > 0, label, -1)
        z_strong = self.calibrated(theta(strong), y)
        labelling = over_the_sure(cross_entropy_each(z_strong, label))
        between_clients = consistency / max(1, len(experts)) + labelling
        return Labelled(self.consistency_weight * between_clients + self.norms(sigma, psi), y)

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """σ and ψ; for unlabelled data, every `helper_rounds` rounds, also the ψ of the nearest clients."""
        sent = {"sigma": state["sigma"], "psi": state["psi"]}
        if not client.unlabelled or t % self.helper_rounds or OUTPUT + client.name not in state:
            return sent
        nearest = self.nearest(state, client.name)
        return sent | {f"{HELPER}{i}": state[PSI + name] for i, name in enumerate(nearest)}

    def nearest(self, state: Arrays, client: str) -> list[str]:
        """The clients whose models' outputs on noise are nearest: what a search in a KD-tree finds."""
        outputs = {k.removeprefix(OUTPUT): v for k, v in state.items() if k.startswith(OUTPUT)}
        others = [name for name in outputs if name != client]
        if not others or not self.helpers:
            return []
        gaps = (torch.stack([outputs[name] for name in others]) - outputs[client]).norm(dim=1).tolist()
        order = sorted(range(len(others)), key=lambda i: (gaps[i], others[i]))
        return [others[i] for i in order[: self.helpers]]

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """Means of σ and ψ; each client's ψ and output are remembered."""
        known = {k: v for update in updates for k, v in self.remembered(state, update).items()}
        return super().merge(state, updates, t, rng) | known

    def counts(self, update: Update) -> dict[str, int]:
        """By labels, or each client as much as any other.

        A client without labels weighs as if it had those that go with its data in the steps of a partial
        client: one for each `ratio` samples.
        """
        client = update.client
        labels = client.labelled or -(-client.unlabelled // self.ratio)
        return dict.fromkeys(update.arrays, labels if self.weights == "labels" else 1)

    def remembered(self, state: Arrays, update: Update) -> Arrays:
        """Returns what the server keeps of a client: its ψ, and its model's output on a fixed noise image."""
        sigma, psi = update.arrays.get("sigma", state["sigma"]), update.arrays["psi"]
        noise = generator("FedMatch's noise").random((1, *self.net.shape), dtype=np.float32)
        with torch.no_grad():
            output = self.predict({"sigma": sigma, "psi": psi}, torch.from_numpy(noise).to(psi.device))
        return {PSI + update.client.name: psi, OUTPUT + update.client.name: output["model"].softmax(1)[0]}

    def unsent(self) -> float:
        """Sparse communication."""
        return self.least_change

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """f(x; σ + ψ)."""
        sigma = Model(self.net, *self.net.parts(state["sigma"]))
        return {"model": self.theta(sigma, state["psi"])(x)}

    def model(self, state: Arrays) -> Arrays:
        """σ and ψ, without what the server remembers of each client."""
        return {"sigma": state["sigma"], "psi": state["psi"]}


def majority(logits: Sequence[Tensor]) -> Tensor:
    """The class (B,) that most models vote for; of several the lowest."""
    classes = logits[0].shape[1]
    votes = torch.stack([one_hot(z.argmax(1), classes) for z in logits]).sum(0)  # (B, M)
    # By rank: argmax may return any of equal ones.
    rank = votes * classes + torch.arange(classes - 1, -1, -1, device=votes.device)
    return rank.argmax(1)
