"""Logits of frozen models for many steps at once: they depend on no step, and a GPU is fast on large batches.

A loss asks models that it received about the very views of its batch. Which ones is found by listening to it
once (`questions`); then all steps of a stretch are answered in one pass (`answer`), and each step gets models
that know their answers (`informed`). The loss is none the wiser, and a question that was not foreseen is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhassle.engine.client import Buffers, Course, Job, local_models, look
from fedhassle.method import Batch, Model, Models, Network, as_models

EVERY = "*"  # among the names asked for: all of them


class Question(NamedTuple):
    """What a received model makes of a view of a stream."""

    model: str
    stream: int
    view: int


Answers = Mapping[Question, Tensor]


class Listening(NamedTuple):
    """A network that notes what it is called on."""

    net: Network
    frozen: tuple[Tensor, Tensor]  # weights and statistics
    inputs: list[Tensor]  # what it was called on, in evaluation mode

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Logits (B, M)."""
        if same(self.frozen, weights, statistics) and not training:
            self.inputs.append(x)
        return self.net(weights, statistics, x, training)


class Informed(NamedTuple):
    """A network with frozen weights, some of whose logits are known."""

    net: Network
    frozen: tuple[Tensor, Tensor]  # weights and statistics
    known: tuple[tuple[Tensor, Tensor], ...]  # (view, its logits)

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Logits (B, M): looked up for a view that is known, on the frozen weights; else computed."""
        frozen = same(self.frozen, weights, statistics) and not training
        found = [z for view, z in self.known if frozen and view is x]
        # A copy: whoever asks may write into what it gets.
        return found[0].clone() if found else self.net(weights, statistics, x, training)


def same(frozen: tuple[Tensor, Tensor], weights: Tensor, statistics: Tensor) -> bool:
    """Whether these are the very tensors that are frozen."""
    return weights is frozen[0] and statistics is frozen[1]


class Noting(dict[str, Any]):
    """Received models that note the names they are asked for, whether they have them or not."""

    def __init__(self, models: Models, names: set[str]) -> None:
        super().__init__(models)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        """The model of a name."""
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name."""
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The model of a name, if there is one."""
        self.names.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """All names: so each of them matters, and those that are not there as well."""
        self.names.add(EVERY)
        return super().__iter__()

    def keys(self) -> Any:
        """All names."""
        self.names.add(EVERY)
        return super().keys()

    def values(self) -> Any:
        """All models."""
        self.names.add(EVERY)
        return super().values()

    def items(self) -> Any:
        """All of both."""
        self.names.add(EVERY)
        return super().items()

    def __len__(self) -> int:
        """How many there are."""
        self.names.add(EVERY)
        return super().__len__()


@torch.no_grad()
def names_asked(job: Job, buffers: Buffers, course: Course) -> set[str]:
    """The received names that a step asks for, found by making one; `EVERY` if it goes through them all."""
    names: set[str] = set()
    received = Noting(as_models(buffers.received, job.networks), names)
    batches = [batch.at(0) for batch in look(job, buffers, received, course)]
    with torch.enable_grad():
        for loss, local in losses_of(job, buffers):
            loss(local, received, *batches, *[draw[0] for draw in course.draws])
    if job.phase.then is not None:
        job.phase.then(local_models(job, buffers), received)
    return names


def questions(
    job: Job, buffers: Buffers, received: Models, batches: Sequence[Batch], draws: Sequence[Tensor]
) -> tuple[Question, ...]:
    """What the losses of a step ask received models, found by computing them once."""
    models = {name: model for name, model in received.items() if isinstance(model, Model)}
    inputs: dict[str, list[Tensor]] = {name: [] for name in models}
    listening = {
        name: model._replace(net=Listening(model.net, (model.weights, model.statistics), inputs[name]))
        for name, model in models.items()
    }
    for loss, local in losses_of(job, buffers):
        loss(local, {**received, **listening}, *batches, *draws)
    return tuple(
        Question(name, stream, view)
        for name, given in inputs.items()
        for stream, batch in enumerate(batches)
        for view, x in enumerate(batch.views)
        if any(x is one for one in given)
    )


def losses_of(job: Job, buffers: Buffers) -> Iterator[tuple[Callable[..., Tensor], Models]]:
    """The losses of a step and the local models to compute them on, without a trace in the buffers."""
    aside = buffers._replace(statistics={k: v.clone() for k, v in buffers.statistics.items()})
    for descent in job.phase.descents:
        leaf = buffers.weights[descent.train].detach().requires_grad_()
        yield descent.loss, local_models(job, aside) | local_models(job, aside, {descent.train: leaf})


@torch.no_grad()
def answer(asked: Sequence[Question], received: Models, batches: Sequence[Batch]) -> dict[Question, Tensor]:
    """Logits (steps, B, M) for each question, of all steps in one pass."""
    answers = {}
    for question in asked:
        x = batches[question.stream].views[question.view]  # (steps, B, C, H, W)
        answers[question] = received[question.model](x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return answers


def informed(received: Models, answers: Answers, batches: Sequence[Batch]) -> Models:
    """The received models, with the answers of one step to questions about its batches."""
    known: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, stream, view), logits in answers.items():
        known.setdefault(name, []).append((batches[stream].views[view], logits))
    knowing = {
        name: model._replace(net=Informed(model.net, (model.weights, model.statistics), tuple(known[name])))
        for name, model in received.items()
        if name in known
    }
    return {**received, **knowing}
