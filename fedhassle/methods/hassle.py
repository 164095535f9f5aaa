"""HASSLE with SUMA (Shang et al., arXiv 2303.02445): the paper, equation by equation.

Where the paper is silent or its script differs, a field is the ruling; docs/paper.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedhassle.errors import require
from fedhassle.losses import hard_labels, kl_divergence
from fedhassle.method import (
    Batch,
    Client,
    Descent,
    Method,
    Models,
    Part,
    Phase,
    Stream,
    as_models,
)
from fedhassle.nets import Net
from fedhassle.ranges import FromZero, NotNegative, Positive, Range, Share
from fedhassle.vectors import Arrays, distance, squared_distance


class Side(NamedTuple):
    """One of the two halves of HASSLE; the paper writes one and says "exchange U and S" for the other."""

    part: Part  # the data that it learns from
    dual: str  # its dual model
    other: str  # the dual model of the other side
    residual: str  # what `other` knows and `dual` lacks
    before: str  # the dual that `residual` was trained against: w^(t−1) beside r^(t)


SUPERVISED = Side("labelled", "w_S", "w_U", "r_US", "w_S_before")
UNSUPERVISED = Side("unlabelled", "w_U", "w_S", "r_SU", "w_U_before")
SIDES = (SUPERVISED, UNSUPERVISED)


def opposite(side: Side) -> Side:
    """Returns the other half."""
    return UNSUPERVISED if side is SUPERVISED else SUPERVISED


def behind_logits(side: Side, state: Arrays) -> set[str]:
    """Returns the names of the models whose outputs `Hassle.logits` adds up."""
    return {side.before, side.residual} if side.before in state else {side.dual}


@dataclass(frozen=True)
class Hassle(Method):
    """Dual models w_S (labelled data) and w_U (unlabelled data), residuals r_US = r_{U−S} and r_SU = r_{S−U}.

    A full client trains w_S and r_US, an unlabelled one w_U and r_SU, a partial one all four.
    """

    gra: bool = True  # global residual alignment: the residual models
    mpa: bool = True  # model proximity alignment: the term of Eq. 12
    gamma: NotNegative = 0.001  # γ in Eq. 12, weight of the proximity (ruling 1)
    proximity: Literal["squared", "norm"] = "squared"  # ‖·‖² or the paper's ‖·‖ in Eq. 12 (ruling 1)
    # Target of Eq. 7: as in the paper, or as in its script (ruling 3).
    residual_target: Literal["difference", "with_residual"] = "difference"
    tau: Positive = 2.0  # τ, temperature in Eq. 7 (ruling 5)
    lam: NotNegative = 1.0  # λ in Eq. 9
    residual_steps: Annotated[int, Range(1, 100_000)] = 100  # batches per round for a residual (ruling 8)
    residual_decay: NotNegative = 0.0001  # weight decay of the residuals (ruling 8)
    # Channels of a residual, as a share of the dual's (ruling 13).
    residual_width: Annotated[float, Range(0.0, 1.0, above=True)] = 0.25
    pseudo_labels: Literal["round", "online"] = "round"  # once a round, or each augmented batch (ruling 10)
    confidence: Share = 0.0  # below it a sample gets no pseudo-label (ruling 12)
    shared_start: bool = False  # w_S with w_U, and r_US with r_SU, start from one initialisation (ruling 14)
    # First rounds that train the residuals alone (ruling 14); needs gra=true and warmup=0.
    residual_rounds: FromZero = 0
    warmup: FromZero = 0  # first rounds in which only w_S trains and w_U is its copy (ruling 14)

    teachers: ClassVar[tuple[str, ...]] = ("w_S_before", "r_US")
    headline: ClassVar[str] = "EM"
    modes: ClassVar[Mapping[str, str]] = {
        "SM": "supervised + residual",
        "UM": "unsupervised + residual",
        "EM": "mean of SM and UM",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = self.residual_rounds and (self.warmup or not self.gra)
        require(not idle, "residual_rounds trains residuals alone: it needs gra=true and warmup=0")

    @cached_property
    def residual_net(self) -> Net:
        """The compact network of the residual models."""
        return self.net.scaled(self.residual_width)

    def networks(self) -> dict[str, Net]:
        """The dual models, now and before, and the residual models."""
        duals = dict.fromkeys(("w_S", "w_U", "w_S_before", "w_U_before"), self.net)
        return duals | ({"r_US": self.residual_net, "r_SU": self.residual_net} if self.gra else {})

    def initial(self, seed: int) -> Arrays:
        """Four independent initialisations (ruling 14); slot 0 is also FedAvg's."""
        slots = {"w_S": 0, "w_U": 1, "r_US": 2, "r_SU": 3}
        if self.shared_start:
            slots |= {"w_U": 0, "r_SU": 2}
        if self.warmup:
            slots |= {"w_U": 0}
        networks = self.networks()
        return {name: networks[name].initial(seed, slot) for name, slot in slots.items() if name in networks}

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """Returns the models that the client's phases use and no more (ruling 21)."""
        needed: set[str] = set()
        for side in self.sides(client, t):
            needed.add(side.dual)
            needed |= {side.other} if self.mpa else set()
            if self.trains_residuals(t):
                with_residual = self.residual_target == "with_residual"
                needed.add(side.residual)
                needed |= behind_logits(opposite(side), state) if with_residual else {side.other}
            if side is UNSUPERVISED:  # for the pseudo-labels
                needed |= behind_logits(SUPERVISED, state)
        return {name: vector for name, vector in state.items() if name in needed}

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """Algorithm 1, lines 4–12, on the data that the client has."""
        return tuple(phase for side in self.sides(client, t) for phase in self.side_phases(side, t))

    def sides(self, client: Client, t: int) -> tuple[Side, ...]:
        """The sides that a client trains in round t."""
        trained = (SUPERVISED,) if t <= self.warmup else SIDES
        return tuple(side for side in trained if client.count(side.part))

    def trains_residuals(self, t: int) -> bool:
        """True if round t trains the residual models."""
        return self.gra and t > self.warmup

    def side_phases(self, side: Side, t: int) -> Iterator[Phase]:
        """Algorithm 1, lines 5 and 6; with the roles exchanged, lines 9 to 11."""
        walk = self.walk(side)
        if t > self.residual_rounds:
            dual = Descent(side.dual, partial(self.dual_loss, side), self.local_optimiser())
            yield Phase(side.part, (walk,), (dual,), self.epochs)
        if self.trains_residuals(t):
            loss = partial(self.residual_loss, side)
            residual = Descent(side.residual, loss, self.local_optimiser(self.residual_decay))
            yield Phase(f"{side.part} residual", (walk,), (residual,), steps=self.residual_steps)

    def walk(self, side: Side) -> Stream:
        """The data of a side; unlabelled samples get pseudo-labels."""
        if side is SUPERVISED:
            return Stream(side.part, self.batch)
        online = self.pseudo_labels == "online"
        return Stream(
            side.part, self.batch, logits=self.teacher_logits, labels=self.pseudo_label, online=online
        )

    def teacher_logits(self, received: Models, x: Tensor) -> Tensor:
        """f(x; w_S^(t−1)) + f(x; r_US^(t)) (Eq. 11), in the absence of residuals f(x; w_S) (Eq. 5)."""
        names = self.teachers if SUPERVISED.before in received else (SUPERVISED.dual,)
        known = {name: self.teaching(received, name) for name in names}
        return self.logits(SUPERVISED, known, x)

    def pseudo_label(self, z: Tensor) -> Tensor:
        """ŷ = argmax z (Eqs. 5 and 11); −1 where its probability is below `confidence`."""
        return hard_labels(z, self.confidence)

    def dual_loss(self, side: Side, local: Models, received: Models, batch: Batch) -> Tensor:
        """L_S: cross-entropy and the proximity of the other dual (Eq. 12)."""
        loss = self.cross_entropy(local[side.dual](batch.views[0]), batch.y)
        if not self.mpa:
            return loss
        measure = squared_distance if self.proximity == "squared" else distance
        return loss + self.gamma * measure(local[side.dual].weights, received[side.other].weights)

    def residual_loss(self, side: Side, local: Models, received: Models, batch: Batch) -> Tensor:
        """L_CE + λ·L_res (Eq. 9); `with_residual` puts the other side's logits of Eq. 11 into the target."""
        x = batch.views[0]
        z, r = received[side.dual](x), local[side.residual](x)  # (B, M) each
        with_residual = self.residual_target == "with_residual"
        other = self.logits(opposite(side), received, x) if with_residual else received[side.other](x)
        target = other - z  # Eq. 6
        complement = self.cross_entropy(z + r, batch.y)  # L_CE (Eq. 8)
        difference = kl_divergence(target / self.tau, r / self.tau)  # L_res (Eq. 7)
        return complement + self.lam * difference

    def next_state(self, state: Arrays, means: Arrays, t: int) -> Arrays:
        """Eqs. 1, 2 and 10; the dual that a residual was trained against stays with it (ruling 11)."""
        before = {side.before: state[side.dual] for side in SIDES if side.residual in means}
        merged = state | means | before
        return merged | ({"w_U": merged["w_S"]} if t <= self.warmup else {})

    def logits(self, side: Side, known: Models, x: Tensor) -> Tensor:
        """f(x; w^(t−1)) + f(x; r^(t)); f(x; w^(t)) as long as no residual has been trained."""
        trained = side.before in known
        z: Tensor = known[side.before](x) + known[side.residual](x) if trained else known[side.dual](x)
        return z

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """SM, UM and their mean EM; the dual models without their residuals."""
        known = as_models(state, self.networks())
        z_s, z_u = (self.logits(side, known, x) for side in SIDES)
        ensemble = (z_s + z_u) / 2
        return {"SM": z_s, "UM": z_u, "EM": ensemble, "w_S": known["w_S"](x), "w_U": known["w_U"](x)}
