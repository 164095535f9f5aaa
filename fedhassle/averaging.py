"""Running means over rounds of the models that predict, for any method (SWA, Izmailov et al., 2018).

A round that misses the clients with most labels throws a merged model back; its mean over rounds hardly
moves. The means stay with the server: they cost no byte and no step, and training does not see them, unless
they are to give pseudo-labels (`teacher=average`): then they are sent to clients that have unlabelled data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedhassle.method import MEAN_OF, Client, Update
from fedhassle.nets import Net
from fedhassle.vectors import Arrays, running_mean
from fedhassle.wrapped import Wrapped

AVERAGED = " averaged"  # behind the name of a prediction by running means


@dataclass(frozen=True)
class Averaged(Wrapped):
    """A method whose server keeps a running mean of each model that predicts, and predicts with both."""

    @property
    def modes(self) -> Mapping[str, str]:  # type: ignore[override]
        """The method's predictions, and each by running means."""
        plain = self.inner.modes or {self.headline: "the merged model"}
        return {**plain, **{name + AVERAGED: f"{text}, mean over rounds" for name, text in plain.items()}}

    def networks(self) -> dict[str, Net]:
        """The method's networks, and the means that are sent."""
        known = self.inner.networks()
        return known | {MEAN_OF + name: known[name] for name in self.teachers if self.teacher}

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """The method's message; with `teacher`, also the means of the models that give pseudo-labels."""
        sent = self.inner.message(plain(state), client, t)
        if self.teacher is None or not client.unlabelled:
            return sent
        means = [MEAN_OF + name for name in self.teachers if name in sent]
        return sent | {name: state[name] for name in means if name in state}

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """Merges as the method does, and moves the running means."""
        return self.with_means(state, self.inner.merge(plain(state), updates, t, rng), t)

    def next_state(self, state: Arrays, means: Arrays, t: int) -> Arrays:
        """The method's next state, and the running means."""
        return self.with_means(state, self.inner.next_state(plain(state), means, t), t)

    def with_means(self, state: Arrays, merged: Arrays, t: int) -> Arrays:
        """Returns m ← a·m + (1 − a)·w for each model w that predicts; a = min(average, 1 − 1/t)."""
        decay, now = self.average or 0.0, self.inner.model(merged).items()
        return merged | {
            MEAN_OF + name: running_mean(state.get(MEAN_OF + name, w), w, decay, t) for name, w in now
        }

    def model(self, state: Arrays) -> Arrays:
        """The method's model, and its means."""
        return self.inner.model(plain(state)) | {k: v for k, v in state.items() if k.startswith(MEAN_OF)}

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """The method's predictions, by the merged models and by their means."""
        means = {k.removeprefix(MEAN_OF): v for k, v in state.items() if k.startswith(MEAN_OF)}
        found = self.inner.predict(plain(state), x)
        averaged = self.inner.predict(plain(state) | means, x)
        return found | {name + AVERAGED: z for name, z in averaged.items()}

    def report(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The method's report, on the predictions of each kind."""
        averaged = {k.removesuffix(AVERAGED): v for k, v in scores.items() if k.endswith(AVERAGED)}
        found = self.inner.report({k: v for k, v in scores.items() if not k.endswith(AVERAGED)})
        return found | {name + AVERAGED: score for name, score in self.inner.report(averaged).items()}


def plain(state: Arrays) -> Arrays:
    """Returns a state without running means."""
    return {name: vector for name, vector in state.items() if not name.startswith(MEAN_OF)}
