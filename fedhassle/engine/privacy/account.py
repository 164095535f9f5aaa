"""The account of differential privacy: the ε that noisy steps spend, by Rényi's divergences."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np

from fedhassle.errors import UserError, require

ORDERS = (  # α of Rényi's divergence: the best of them is the bound
    *(1 + n / 100 for n in range(1, 10)),
    *(1 + n / 10 for n in range(1, 100)),
    *range(11, 64),
    *(2**n for n in range(6, 14)),
)
# Fewer of them, for an account that is computed for many sequences of steps.
COARSE = (1.25, 1.5, 1.75, *(2 + n / 4 for n in range(24)), *range(8, 64), 80, 100, 128, 256, 512)
MOST_NOISE = 10_000.0
PRECISION = 1e-3  # of the noise that `noise_for` finds, relative
INSTALL = "differential privacy needs the extra: pip install 'fedhassle[privacy]'"


class Guarantee(Protocol):
    """The promise of a run, and the ε that its rounds spend."""

    unit: ClassVar[str]  # whose presence is hidden: a site's, or a sample's
    protects: ClassVar[str]  # what is clipped, in the plural

    @property
    def clip(self) -> float:
        """The largest norm of what one unit adds."""
        ...

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, as a multiple of the clip; 0: clip only."""
        ...

    @property
    def delta(self) -> float:
        """δ."""
        ...

    def epsilon(self, t: int) -> float | None:
        """ε that t rounds have spent; None without noise."""
        ...


def is_noisy(privacy: Guarantee | None) -> bool:
    """True if a run guarantees something: clipping alone does not."""
    return privacy is not None and privacy.noise > 0


Steps = tuple[tuple[float, int], ...]
"""The steps in which a sample may be drawn: (probability in a step, number of steps)."""


@lru_cache(maxsize=100_000)
def spent(noise: float, rate: float, rounds: int, delta: float) -> float:
    """ε of so many Gaussian mechanisms in a row, each on a Poisson sample (Mironov et al., 2019)."""
    if not rounds:
        return 0.0
    rdp = accountant()
    found = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=rounds, orders=ORDERS)
    epsilon, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=found, delta=delta)
    return max(0.0, float(epsilon))


@lru_cache(maxsize=100_000)
def spent_in(steps: Steps, noise: float, delta: float) -> float:
    """ε of such mechanisms with different rates, one after another: their divergences add up."""
    if not sum(count for _, count in steps):
        return 0.0
    total = sum(count * divergences(noise, rate) for rate, count in steps)
    epsilon, _ = accountant().get_privacy_spent(orders=COARSE, rdp=total, delta=delta)
    return max(0.0, float(epsilon))


@lru_cache(maxsize=100_000)
def divergences(noise: float, rate: float) -> np.ndarray:
    """The divergence of one step, for each order in COARSE."""
    rdp = accountant().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=COARSE)
    return np.asarray(rdp)


def accountant() -> Any:
    """Opacus' module for Rényi's divergence; the handlers that Opacus gives the root logger are removed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise UserError(INSTALL) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return rdp


def noise_for(epsilon: float, rate: float, rounds: int, delta: float) -> float:
    """The least noise with which so many rounds spend at most ε, to one part in a thousand."""
    return least_noise(epsilon, lambda noise: spent(noise, rate, rounds, delta), rounds)


def least_noise(epsilon: float, spends: Callable[[float], float], rounds: int) -> float:
    """The least noise that `spends` at most ε, to one part in a thousand."""
    low, high = 0.0, 1.0
    while spends(high) > epsilon:
        low, high = high, 2 * high
        require(high <= MOST_NOISE, f"no noise is enough for ε = {epsilon:g} in {rounds} rounds")
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if middle < 0.05 or spends(middle) > epsilon:
            low = middle
        else:
            high = middle
    return high


def rounds_within(epsilon: float, privacy: Guarantee, most: int) -> int:
    """The number of rounds, `most` or fewer, that spend at most ε."""
    low, high = 0, most  # `low` rounds are within the budget
    while low < high:
        middle = (low + high + 1) // 2
        if (privacy.epsilon(middle) or 0.0) <= epsilon:
            low = middle
        else:
            high = middle - 1
    return low
