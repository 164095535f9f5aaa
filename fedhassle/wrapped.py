"""A method around another one, which it changes in one respect and otherwise passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from torch import Tensor

from fedhassle.method import Client, Method, Part, Phase, Update
from fedhassle.nets import Net
from fedhassle.vectors import Arrays


@dataclass(frozen=True)
class Wrapped(Method):
    """A method that answers as the method inside; a subclass overrides what it changes."""

    method: Method | None = None  # never None: a field behind fields with defaults needs one

    def __post_init__(self) -> None:
        pass  # the method inside has checked its settings

    @classmethod
    def of(cls, method: Method, **more: Any) -> Self:
        """Returns the method wrapped, with its own settings; `more`: fields of the subclass."""
        settings = {field.name: getattr(method, field.name) for field in fields(Method)}
        return cls(**settings, method=method, **more)

    @property
    def inner(self) -> Method:
        """The method that trains."""
        assert self.method is not None
        return self.method

    @property
    def headline(self) -> str:  # type: ignore[override] # a class has it as a variable
        """The method's own headline."""
        return self.inner.headline

    @property
    def modes(self) -> Mapping[str, str]:  # type: ignore[override]
        """The method's predictions."""
        return self.inner.modes

    @property
    def teachers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The method's models that give pseudo-labels."""
        return self.inner.teachers

    @property
    def pooled(self) -> tuple[Part, ...]:  # type: ignore[override]
        """The parts of the data that lie in one place for the method."""
        return self.inner.pooled

    def for_run(self, rounds: int, clients: Sequence[Client] = (), drawn: int = 0) -> Self:
        """The method adapted to its run."""
        known = super().for_run(rounds, clients, drawn)
        return replace(known, method=self.inner.for_run(rounds, clients, drawn))

    def networks(self) -> dict[str, Net]:
        """The method's networks."""
        return self.inner.networks()

    def initial(self, seed: int) -> Arrays:
        """The method's state before round 1."""
        return self.inner.initial(seed)

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """The method's phases."""
        return self.inner.phases(client, t)

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """The method's message."""
        return self.inner.message(state, client, t)

    def memory(self, client: Client, message: Arrays) -> Arrays:
        """The arrays that a client of the method keeps."""
        return self.inner.memory(client, message)

    def counts(self, update: Update) -> Mapping[str, int]:
        """The method's weights."""
        return self.inner.counts(update)

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """Merges as the method does."""
        return self.inner.merge(state, updates, t, rng)

    def next_state(self, state: Arrays, means: Arrays, t: int) -> Arrays:
        """The method's next state."""
        return self.inner.next_state(state, means, t)

    def merges_means(self) -> bool:
        """True if the method's own merge needs only the means of its updates."""
        return self.inner.merges_means()

    def model(self, state: Arrays) -> Arrays:
        """The method's model."""
        return self.inner.model(state)

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """The method's predictions."""
        return self.inner.predict(state, x)

    def report(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The method's report."""
        return self.inner.report(scores)

    def own_prediction(self, client: str) -> str | None:
        """The method's prediction for one client alone."""
        return self.inner.own_prediction(client)

    def unsent(self) -> float:
        """The method's threshold."""
        return self.inner.unsent()


def unwrapped(method: Method) -> Method:
    """The method that trains, without what is around it."""
    return unwrapped(method.inner) if isinstance(method, Wrapped) else method
