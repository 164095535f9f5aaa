"""Differential privacy by site: clipped updates, and noise in their mean.

Two federations are neighbours if all that one site sends is replaced by nothing (no change of any model).
What a site sends in a round, all its models and their BatchNorm statistics, counts as one vector of norm
at most `clip`, so one Gaussian mechanism protects all of it. Whatever the server makes of the noisy means
(running means, teachers, a model to predict with) spends nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedhassle.engine.privacy.account import spent
from fedhassle.errors import require
from fedhassle.method import Client, Method, Update
from fedhassle.robust import clipped_jointly, differences
from fedhassle.vectors import Arrays


@dataclass(frozen=True)
class SitePrivacy:
    """The protection of a run's updates."""

    clip: float  # C, largest norm of a site's update, over all its models
    noise: float = 0.0  # z: the standard deviation of the noise in a sum of updates is z·C; 0: clip only
    delta: float = 1e-5
    # Probability with which a client is drawn in a round, each by itself and in secret; 1: whoever sees the
    # models may know who took part.
    rate: float = 1.0
    lost: int = 0  # rounds that were trained and lost, as in a crash: they were seen, so they count
    secret: bool = False  # noise from the operating system; else from the run's seed, to repeat a simulation

    unit: ClassVar[str] = "site"
    protects: ClassVar[str] = "updates"

    def epsilon(self, t: int) -> float | None:
        """ε that t rounds have spent; None without noise, which guarantees nothing."""
        return spent(self.noise, self.rate, t + self.lost, self.delta) if self.noise else None


def drawn_by_chance(clients: Sequence[Client], rate: float, rng: np.random.Generator) -> tuple[Client, ...]:
    """A Poisson sample: each client with the same probability, by itself; it may be empty."""
    return tuple(client for client, u in zip(clients, rng.random(len(clients)), strict=True) if u < rate)


def expected_counts(method: Method, clients: Sequence[Client], share: float, t: int) -> dict[str, float]:
    """By model, the number of clients that train it in a round in which this share is drawn; at least 1.

    The sums of a round are divided by these numbers, which no site can change by what it sends.
    """
    found: dict[str, float] = {}
    for client in clients:
        names = {name for phase in method.phases(client, t) for name in phase.trained}
        for name in sorted(names) if client.labelled + client.unlabelled else ():
            found[name] = found.get(name, 0.0) + share
    return {name: max(1.0, count) for name, count in found.items()}


def clipped_updates(updates: Sequence[Update], state: Arrays, bound: float) -> list[Update]:
    """The updates, each no further from the state than a bound, over all its models together."""
    found = []
    for update in updates:
        near = clipped_jointly(differences(update.arrays, state), bound)
        found.append(update._replace(arrays={name: state[name] + v for name, v in near.items()}))
    return found


def private_means(
    privacy: SitePrivacy,
    method: Method,
    state: Arrays,
    updates: Sequence[Update],
    counts: Mapping[str, float],
    rng: np.random.Generator,
) -> Arrays:
    """Each model: w + (Σ_k clip(w_k − w) + z·C·N(0, 1)) / count (McMahan et al., 2018; each site alike).

    A model that nobody trained gets noise too, or the models would tell who was drawn.
    """
    sums = {name: torch.zeros_like(state[name]) for name in counts}
    for update in updates:
        for name, change in clipped_jointly(differences(update.arrays, state), privacy.clip).items():
            sums[name] += change
    for vector in sums.values():
        vector.add_(normals(len(vector), rng, privacy.secret).to(vector), alpha=privacy.noise * privacy.clip)
    return sound(method, {name: state[name] + sums[name] / counts[name] for name in counts})


def sound(method: Method, arrays: Arrays) -> Arrays:
    """Vectors with noise as their networks can have them."""
    networks = method.networks()
    return {name: networks[name].projected(v) if name in networks else v for name, v in arrays.items()}


def normals(n: int, rng: np.random.Generator, secret: bool) -> Tensor:
    """Independent standard normal numbers (n,), in float64."""
    return torch.from_numpy(secret_normals(n) if secret else rng.standard_normal(n))


def secret_normals(n: int) -> np.ndarray:
    """Normal numbers that nobody can predict: uniform ones from the system, by Box and Muller."""
    bits = np.frombuffer(os.urandom(16 * n), np.uint64).reshape(2, n) >> np.uint64(11)
    u, v = (bits + 0.5) / 2**53
    found: np.ndarray = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    return found


def require_means(method: Method, name: str, what: str) -> None:
    """Refuses a method whose merge is no mean of its updates."""
    require(
        method.merging is None,
        f"{what} needs the sum of all updates, and method.merging={method.merging} needs each of them: leave "
        "one of both out",
    )
    means = method.merges_means() and not method.unsent() and not method.pooled
    require(
        means,
        f"{what} is for methods that merge updates by a weighted mean, and {name} does not: choose fedavg, "
        "fedprox, mixmatch, fixmatch, fixmatch-global, sage, hassle or hassle+",
    )
