"""hassle+: HASSLE's two models and proximity, with sure pseudo-labels, no residuals (docs/hassle-plus.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedhassle.losses import class_mix, hard_labels
from fedhassle.method import (
    Batch,
    Client,
    Descent,
    Method,
    Models,
    Phase,
    Stream,
    as_models,
)
from fedhassle.nets import Net
from fedhassle.ranges import BatchSize, Decay, Epochs, FromZero, NotNegative, Ratio, Share
from fedhassle.vectors import Arrays, running_mean, squared_distance

MEANS = {"w_S": "m_S", "w_U": "m_U"}  # each model and its running mean over rounds
OTHER = {"w_S": "w_U", "w_U": "w_S"}
LABELS_ALONE = 0.3  # share of the rounds before w_U starts


@dataclass(frozen=True)
class HasslePlus(Method):
    """w_S learns from labels, later w_U from labels and pseudo-labels; unlabelled clients train w_U alone.

    Full clients train both on labels, partial ones w_S on labels and w_U on all. w_U starts from m_S, the
    mean of w_S over rounds; from then on each stays near the other. The means m_S and m_U give the
    pseudo-labels, and predict.
    """

    # Chosen on held-out images; docs/hassle-plus.md has the figures.

    batch: BatchSize = 64  # labelled samples in a batch
    epochs: Epochs = 20  # passes over the labels a round that train w_S
    unlabelled_epochs: Epochs = 5  # passes that train w_U, over unlabelled data; on full clients over labels
    ratio: Ratio = 2  # unlabelled samples for each labelled one in a step
    gamma: NotNegative = 0.003  # weight of the proximity of the two models, as in Eq. 12 of HASSLE
    confidence: Share = 0.95  # below it a sample gets no pseudo-label
    own_mix: bool = True  # pseudo-labels know the class mix of their client (Saerens et al. 2002)
    start: FromZero | None = None  # rounds on labels alone before w_U starts; default: 0.3 of the run's
    average: Decay = 0.9  # decay of the means; 0: no means
    prior: Literal["batch", "none"] | None = "batch"
    # View of images in training; default: the network's own, strong for ResNet-8, weak for LeNet.
    view: Literal["weak", "strong"] | None = None

    averages: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("m_S", "m_U")
    headline: ClassVar[str] = "EM"
    modes: ClassVar[Mapping[str, str]] = {
        "SM": "supervised, mean over rounds",
        "UM": "unsupervised, mean over rounds",
        "EM": "mean of SM and UM",
    }

    def for_run(self, rounds: int, clients: Sequence[Client] = (), drawn: int = 0) -> Self:
        """The method with the run's own start, unless another is asked for."""
        known = super().for_run(rounds, clients, drawn)
        return known if self.start is not None else replace(known, start=round(LABELS_ALONE * rounds))

    def networks(self) -> dict[str, Net]:
        """Both models and their means."""
        return dict.fromkeys((*MEANS, *MEANS.values()), self.net)

    def initial(self, seed: int) -> Arrays:
        """FedAvg's model, for each of those that exist by round 1."""
        names = ("w_S", "m_S") if self.start else (*MEANS, *MEANS.values())
        return dict.fromkeys(names, self.net.initial(seed))

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """Returns the models that the client trains, those near which they stay, and what labels its data."""
        needed = {name for phase in self.phases(client, t) for name in phase.trained}
        if self.started(t):
            needed |= set(MEANS if self.gamma else ()) | set(self.teachers if client.unlabelled else ())
        return {name: state[name] for name in state if name in needed}

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """w_S on labels; once it exists, w_U on all that the client has."""
        return tuple(self.both_phases(client, self.started(t)))

    def started(self, t: int) -> bool:
        """True if clients train w_U in round t."""
        return t > (self.start or 0)

    def both_phases(self, client: Client, started: bool) -> Iterator[Phase]:
        """The phase of each model that the client can train."""
        views = (self.view or self.net.view,)
        labelled = Stream("labelled", self.batch, views)
        unlabelled = Stream(
            "unlabelled", self.ratio * self.batch, views, logits=self.taught, labels=self.sure
        )
        if client.labelled:
            yield self.phase("labelled", "w_S", (labelled,), self.epochs)
        if started:
            streams = tuple(stream for stream in (unlabelled, labelled) if client.count(stream.part))
            yield self.phase(client.kind, "w_U", streams, self.unlabelled_epochs)

    def phase(self, name: str, model: str, streams: tuple[Stream, ...], epochs: int) -> Phase:
        """A walk that trains one model."""
        descent = Descent(model, partial(self.loss, model), self.local_optimiser())
        return Phase(name, streams, (descent,), epochs)

    def taught(self, received: Models, x: Tensor) -> Tensor:
        """The logits of both means together."""
        return ensemble(received["m_S"](x), received["m_U"](x))

    def sure(self, z: Tensor) -> Tensor:
        """The likeliest class of each sample of a client, given the client's class mix; −1 if not sure."""
        return hard_labels(z + class_mix(z).log() if self.own_mix else z, self.confidence)

    def loss(self, model: str, local: Models, received: Models, *batches: Batch) -> Tensor:
        """The batches' cross-entropies and the proximity of the other model.

        One forward pass, so that BatchNorm sees all batches.
        """
        views = [batch.views[0] for batch in batches]
        logits = local[model](torch.cat(views)).split([len(x) for x in views])
        losses = [self.cross_entropy(z, batch.y) for z, batch in zip(logits, batches, strict=True)]
        if self.gamma and OTHER[model] in received:
            distance = squared_distance(local[model].weights, received[OTHER[model]].weights)
            losses.append(self.gamma * distance)
        return torch.stack(losses).sum()

    def next_state(self, state: Arrays, means: Arrays, t: int) -> Arrays:
        """Averages over clients, then over rounds; after round `start`, w_U starts from m_S."""
        merged = state | means
        for model, mean in MEANS.items():
            if model in state:
                merged[mean] = running_mean(state[mean], merged[model], self.average, t)
        return merged | (dict.fromkeys(("w_U", "m_U"), merged["m_S"]) if t == self.start else {})

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """SM and UM, by the means, and their mean EM; the models themselves."""
        z = {name: model(x) for name, model in as_models(state, self.networks()).items()}
        z = {"w_U": z["w_S"], "m_U": z["m_S"]} | z  # before w_U starts
        ensembled = ensemble(z["m_S"], z["m_U"])
        return {"SM": z["m_S"], "UM": z["m_U"], "EM": ensembled, "w_S": z["w_S"], "w_U": z["w_U"]}


def ensemble(a: Tensor, b: Tensor) -> Tensor:
    """The mean of two models' logits."""
    return (a + b) / 2
