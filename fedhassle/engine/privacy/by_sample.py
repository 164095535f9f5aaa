"""Differential privacy by sample, in simulations: clients train with noisy gradients (Abadi et al., 2016).

Two data sets are neighbours if one sample of one client is replaced by nothing (its gradients are zero). Each
step draws every sample by itself with probability B/n (Poisson sampling, as the account assumes), clips the
gradient of each drawn sample, and adds noise to their sum. So all that leaves a client is private already,
and whatever the server makes of it spends nothing more. A method is changed by its phases alone
(`BySample`): the engine trains them as any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedhassle.dropout import scrambled, shifted
from fedhassle.engine.privacy.account import Steps, spent_in
from fedhassle.errors import UserError
from fedhassle.method import Batch, Client, Labelled, Model, Models, Part, Phase
from fedhassle.nets import Net
from fedhassle.wrapped import Wrapped

# Probability, in one step, that more samples are drawn than a batch has room for, which are then left out.
# It adds to δ: after a million steps at ε = 10 by less than 10⁻⁷.
OVERFLOW = 1e-18

Labels = Callable[[Tensor], Tensor]
Draws = Callable[[np.random.Generator], np.ndarray]


class Mechanism(NamedTuple):
    """The treatment of the gradients of a step."""

    clip: float  # C, largest norm of a sample's gradient
    noise: float  # z: the standard deviation of the noise in a sum of gradients is z·C; 0: clip only


CLIP_ALONE = Mechanism(1.0, 0.0)


class Walk(NamedTuple):
    """A phase in round t as one of its samples sees it: the probability to be drawn in each of its steps."""

    t: int
    rate: float
    steps: int


@dataclass(frozen=True)
class SamplePrivacy:
    """The protection of each sample of a simulated run."""

    clip: float
    noise: float
    delta: float
    walks: tuple[tuple[Walk, ...], ...]  # for each client and part of its data, in the order of rounds

    unit: ClassVar[str] = "sample"
    protects: ClassVar[str] = "gradients of single samples"
    rate: ClassVar[float] = 1.0  # who takes part in a round counts as known

    def epsilon(self, t: int) -> float | None:
        """ε that t rounds have spent on the sample that lost most; None without noise."""
        if not self.noise:
            return None
        totals = {total(walk for walk in walks if walk.t <= t) for walks in self.walks}
        return max((spent_in(steps, self.noise, self.delta) for steps in largest(totals)), default=0.0)

    @property
    def mechanism(self) -> Mechanism:
        """The treatment of the gradients of a step."""
        return Mechanism(self.clip, self.noise)


# The account


def walks_of(
    phases: Callable[[Client, int], tuple[Phase, ...]], drawn: Iterable[Sequence[Client]]
) -> tuple[tuple[Walk, ...], ...]:
    """The walks over each part of each client's data, in rounds in which these clients are drawn.

    Every model that trains on a part counts: each of its phases draws its own batches.
    """
    found: dict[tuple[str, Part], list[Walk]] = {}
    for t, clients in enumerate(drawn, 1):
        for client in clients:
            for phase in phases(client, t):
                stream = phase.streams[0]
                rate = rate_of(stream.batch, client.count(stream.part))
                walks = found.setdefault((client.name, stream.part), [])
                walks.append(Walk(t, rate, phase.length(client)))
    return tuple(map(tuple, found.values()))


def rate_of(batch: int, n: int) -> float:
    """The probability with which each of n samples is drawn, if `batch` of them are expected."""
    return min(1.0, batch / n)


def total(walks: Iterable[Walk]) -> Steps:
    """The number of steps with each rate, the largest rate first."""
    found: dict[float, int] = {}
    for walk in walks:
        found[walk.rate] = found.get(walk.rate, 0) + walk.steps
    return tuple(sorted(found.items(), reverse=True))


def largest(totals: Iterable[Steps]) -> list[Steps]:
    """Those that may spend most: without those of one rate that have neither more steps nor a larger rate."""
    kept = list[Steps]()
    most = 0
    for steps in sorted(totals, reverse=True):
        if len(steps) == 1:
            ((_, count),) = steps
            if count <= most:
                continue
            most = count
        kept.append(steps)
    return kept


# Training


@dataclass(frozen=True)
class BySample(Wrapped):
    """A method whose clients train with clipped and noisy gradients."""

    mechanism: Mechanism = CLIP_ALONE

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """The method's phases, each of whose steps is private."""
        return tuple(private_phase(phase, client, self.mechanism) for phase in self.inner.phases(client, t))


def private_phase(phase: Phase, client: Client, mechanism: Mechanism) -> Phase:
    """A phase with as many steps, whose batches are drawn by chance and whose gradients are private.

    The clip of single gradients takes the place of the optimiser's.
    """
    if not separable(phase):
        return replace(phase, descents=tuple(replace(each, loss=refuse) for each in phase.descents))
    (stream,), (descent,) = phase.streams, phase.descents
    labels = stream.labels if stream.logits is None else cast(Labels, OneByOne(stream.labels))
    walk = replace(stream, batch=room(stream.batch), anew=True, labels=labels)
    loss = partial(private_loss, descent.loss, descent.train, mechanism)
    private = replace(descent, loss=loss, optimiser=descent.optimiser._replace(clip=0.0))
    draw = cast(Draws, Chance(client.count(stream.part), stream.batch))
    steps = phase.length(client)
    return replace(phase, streams=(walk,), descents=(private,), epochs=0, steps=steps, draw=draw)


def separable(phase: Phase) -> bool:
    """True if each step makes one descent on one stream of samples that are not mixed."""
    return len(phase.streams) == 1 and len(phase.descents) == 1 and phase.draw is None


def refuse(*_: Any) -> Tensor:
    """The loss of a phase that cannot be private, which a run has refused before it starts."""
    raise UserError("this phase combines samples: it cannot be private by sample")


class OneByOne(NamedTuple):
    """Labels of samples, each from its own logits alone."""

    labels: Labels

    def __call__(self, z: Tensor) -> Tensor:
        """Labels (n,) of logits (n, M)."""
        found: Tensor = torch.vmap(lambda own: self.labels(own[None])[0])(z)
        return found


class Chance(NamedTuple):
    """The draws of a step: how many samples it takes, one over how many are expected, and a key of 64 bits.

    A batch is a new random order of the samples. Its first k, where k is binomial, are a Poisson sample.
    """

    n: int
    batch: int

    def __call__(self, rng: np.random.Generator) -> np.ndarray:
        """The draws of one step, (6,); the key in pieces that a float32 can hold."""
        taken = rng.binomial(self.n, rate_of(self.batch, self.n))
        return np.array([taken, 1 / min(self.batch, self.n), *rng.integers(0, 2**16, 4)])


def room(batch: int) -> int:
    """A size that a Poisson sample of `batch` on average exceeds with a probability of at most OVERFLOW.

    By Chernoff's bound, P(X ≥ s) ≤ exp(−(s·log(s/B) − s + B)), for any number of samples.
    """
    size = batch + 1
    while size * math.log(size / batch) - size + batch < -math.log(OVERFLOW):
        size += 1
    return size


def private_loss(
    loss: Callable[..., Tensor | Labelled],
    name: str,
    mechanism: Mechanism,
    local: Models,
    received: Models,
    batch: Batch,
    draw: Tensor,
) -> Tensor | Labelled:
    """The mean loss of the samples drawn, with a gradient that is private: clipped sums and noise.

    g = (Σ_i min(1, C/‖g_i‖)·g_i + z·C·N(0, 1)) / expected batch. Only the loss's gradient is g: its value is
    what is reported.
    """
    taken, share = torch.arange(len(batch.y), device=draw.device) < draw[0], draw[1]
    weights = weights_of(local[name])
    gradients, (losses, y) = per_sample(loss, name, local, received, batch)
    summed = clipped_sum(gradients, taken, mechanism.clip)
    noise = mechanism.noise * mechanism.clip * normals(draw[2:], len(summed)) if mechanism.noise else 0.0
    gradient = without_padding(local[name], (summed + noise) * share)
    value = torch.where(taken, losses, 0.0).sum() * share
    shown = value + ((weights - weights.detach()) * gradient).sum()
    return shown if y is None else Labelled(shown, y)


def per_sample(
    loss: Callable[..., Tensor | Labelled], name: str, local: Models, received: Models, batch: Batch
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The gradient (B, D) of each sample's own loss, that loss (B,), and labels (B,) if it returns any."""
    gives = list[bool]()

    def own(weights: Tensor, views: tuple[Tensor, ...], y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        model = local[name]
        # Without BatchNorm and dropout, evaluation mode computes the same; training mode has layers for whole
        # batches that `vmap` does not know.
        model = model._replace(weights=weights, training=False) if isinstance(model, Model) else weights
        one = Batch(tuple(view[None] for view in views), y[None])
        found = loss({**local, name: model}, received, one)
        gives.append(isinstance(found, Labelled))
        value, given = found if isinstance(found, Labelled) else (found, one.y)
        return value, (value, given[0])

    each = torch.vmap(torch.func.grad(own, has_aux=True), in_dims=(None, 0, 0))
    gradients, (losses, y) = each(weights_of(local[name]).detach(), batch.views, batch.y)
    return gradients, (losses, y if gives[-1] else None)


def clipped_sum(gradients: Tensor, taken: Tensor, clip: float) -> Tensor:
    """Σ_i min(1, C/‖g_i‖)·g_i over the rows that are taken; one that is not finite counts as zero."""
    norms = gradients.norm(dim=1)
    kept = taken & norms.isfinite()
    factors = torch.where(kept, (clip / norms.clamp_min(1e-12)).clamp(max=1.0), 0.0)
    with torch.autocast(gradients.device.type, enabled=False):  # a product of float32 numbers
        return factors @ torch.where(kept[:, None], gradients, 0.0)


def weights_of(model: Any) -> Tensor:
    """The weights of a model, or a vector itself."""
    weights: Tensor = model.weights if isinstance(model, Model) else model
    return weights


def without_padding(model: Any, gradient: Tensor) -> Tensor:
    """A gradient that is zero where the weights of a network are only padding."""
    net = model.net if isinstance(model, Model) else None
    return net.cleared(gradient) if isinstance(net, Net) else gradient


def normals(key: Tensor, n: int) -> Tensor:
    """Standard normal numbers (n,) from a key (4,) of 16 bits each: a hash, then Box and Muller.

    On every device the same, but for rounding, and without a state. To measure what noise costs: whoever
    knows the seed of a run knows its noise.
    """
    first, second, third, fourth = key.to(torch.int32)
    place = torch.arange(2 * n, dtype=torch.int32, device=key.device)
    bits = scrambled(scrambled(place ^ (first * 65536 + second)) ^ (third * 65536 + fourth))
    u, v = ((shifted(bits, 8) + 0.5) / 2**24).view(2, n)
    found: Tensor = (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()
    return found
