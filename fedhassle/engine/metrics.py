"""Metrics of each evaluation beyond accuracy and loss: a user's own, and the accuracy of each client."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.errors import UserError, first_line, require
from fedhassle.names import brief, described, has_controls
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

MOST = 100  # numbers that a metric may return: each is a curve
LOWEST = 0.1  # share of the clients behind `lowest_tenth`
OVER_CLIENTS = ("mean", "std", "lowest", "lowest_tenth")  # figures of `spread_of_clients`


class Predictions(NamedTuple):
    """An evaluation, as a metric sees it; tensors are on the device that trains."""

    t: int  # the round; 0 when the metric is tried before training
    state: Arrays  # the server's state: vectors by name
    logits: dict[str, Tensor]  # (N, M) by prediction, on the test images
    y: Tensor  # (N,): the classes of the test images
    main: str  # the prediction that stands for the method: logits[main]
    mixes: Tensor  # (K, M): the share of each class in each client's data

    @property
    def classes(self) -> Tensor:
        """The classes (N,) that the main prediction gives."""
        return self.logits[self.main].argmax(1)

    def copy(self) -> Predictions:
        """The same in tensors of its own: who writes to them changes neither the run nor other metrics."""
        return self._replace(
            state={name: vector.clone() for name, vector in self.state.items()},
            logits={name: z.clone() for name, z in self.logits.items()},
            y=self.y.clone(),
            mixes=self.mixes.clone(),
        )


Metric = Callable[[Predictions], Mapping[str, Any]]
"""A user's own metric: named numbers from an evaluation."""


def try_metrics(metrics: Mapping[str, Metric], seen: Predictions) -> None:
    """Raises a `UserError` if a metric fails, or returns something else than named numbers."""
    owners: dict[str, str] = {}
    for name, metric in metrics.items():
        try:
            found = measured(name, metric, seen)
        except UserError:
            raise
        except Exception as error:  # a user's function may fail in any way
            raise UserError(failure(name, error)) from error
        for key in found:
            other = owners.setdefault(key, name)
            require(other == name, f"metric {name}: {brief(key)} is a number of {other} too: rename one")


def measure(metrics: Mapping[str, Metric], seen: Predictions, failed: set[str]) -> dict[str, float | None]:
    """The numbers of all metrics, without those of one that fails: no reason to lose a run.

    The first failure of each is logged, and noted in `failed`.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            found |= measured(name, metric, seen)
        except Exception as error:
            if name not in failed:
                log.warning("round %d: %s; the run continues without it", seen.t, failure(name, error))
            failed.add(name)
    return found


def failure(name: str, error: Exception) -> str:
    """One line about a metric that raised."""
    said = first_line(error)
    return said if isinstance(error, UserError) else f"metric {name} fails: {type(error).__name__}: {said}"


@torch.no_grad()
def measured(name: str, metric: Metric, seen: Predictions) -> dict[str, float | None]:
    """The numbers of one metric; None if one is unknown, NaN or infinite, which JSON does not have."""
    found: Any = metric(seen.copy())
    expected = 'expected a dict of numbers, such as {"calibration_error": 0.08}'
    require(isinstance(found, Mapping), f"metric {name} returns {described(found)}; {expected}")
    require(bool(found), f"metric {name} returns no number; {expected}")
    require(len(found) <= MOST, f"metric {name} returns {len(found)} numbers; a metric has at most {MOST}")
    numbers: dict[str, float | None] = {}
    for key, value in found.items():
        fits = isinstance(key, str) and bool(key.strip()) and not has_controls(key)
        require(fits, f"metric {name} names a number {brief(key)}: expected a text")
        number = math.nan if value is None else as_number(value)
        if number is None:
            raise UserError(f"metric {name} returns {described(value)} for {key!r}; {expected}")
        numbers[key] = number if math.isfinite(number) else None
    return numbers


def as_number(value: Any) -> float | None:
    """A value as a number: of Python, NumPy or a tensor without dimensions; None for anything else."""
    if isinstance(value, str | bytes) or np.ndim(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# Clients


def class_mixes(counts: np.ndarray) -> np.ndarray:
    """The share of each class in each client's data (K, M), from its counts; zeros without a known class."""
    shares: np.ndarray = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def client_accuracy(mixes: np.ndarray, by_class: Sequence[float | None]) -> list[float | None]:
    """The accuracy on test images of each client's class mix, from the accuracy on each class.

    Classes without test images are left out. None for a client of whose classes nothing is known.
    """
    known = np.array([value is not None for value in by_class])
    right = mixes @ np.array([value or 0.0 for value in by_class])
    weight = mixes @ known
    return [float(a / b) if b > 0 else None for a, b in zip(right, weight, strict=True)]


def spread_of_clients(found: Sequence[float | None]) -> dict[str, float]:
    """Mean, standard deviation and lowest accuracy over clients, and the mean of the lowest tenth of them."""
    known = sorted(value for value in found if value is not None)
    if not known:
        return {}
    tenth = known[: math.ceil(LOWEST * len(known))]
    values = (statistics.fmean(known), statistics.pstdev(known), known[0], statistics.fmean(tenth))
    return dict(zip(OVER_CLIENTS, values, strict=True))
