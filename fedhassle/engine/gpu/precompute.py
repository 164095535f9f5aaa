"""Logits of frozen models, computed for many steps at once, since a GPU is fastest on large batches.

A loss calls received models on the views of its batch. Running it once with recorders finds these calls
(`questions`). One forward pass then computes the logits of a whole stretch of steps (`answer`), and each step
gets models that return them (`with_answers`). The loss does not notice; a call that was not foreseen is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhassle.engine.client import Buffers, batches_of, local_models
from fedhassle.engine.job import Job, Schedule
from fedhassle.method import Batch, Labelled, Model, Models, Network, as_models

EVERY = "*"  # among the names read: all of them


class Question(NamedTuple):
    """The logits of a received model on a view of a stream."""

    model: str
    stream: int
    view: int


Answers = Mapping[Question, Tensor]


class InputRecorder(NamedTuple):
    """A network that records the inputs of its calls."""

    net: Network
    frozen: tuple[Tensor, Tensor]  # weights and statistics
    inputs: list[Tensor]  # of calls in evaluation mode

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Logits (B, M)."""
        if same(self.frozen, weights, statistics) and not training:
            self.inputs.append(x)
        return self.net(weights, statistics, x, training)


class AnsweringNetwork(NamedTuple):
    """A network with frozen weights, some of whose logits are already known."""

    net: Network
    frozen: tuple[Tensor, Tensor]  # weights and statistics
    known: tuple[tuple[Tensor, Tensor], ...]  # (view, its logits)

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Logits (B, M): looked up for a known view and the frozen weights, otherwise computed."""
        frozen = same(self.frozen, weights, statistics) and not training
        found = [z for view, z in self.known if frozen and view is x]
        # A copy, since the caller may write into its logits.
        return found[0].clone() if found else self.net(weights, statistics, x, training)


def same(frozen: tuple[Tensor, Tensor], weights: Tensor, statistics: Tensor) -> bool:
    """True if these are the frozen tensors themselves, not only equal ones."""
    return weights is frozen[0] and statistics is frozen[1]


class NameRecorder(dict[str, Any]):
    """Received models that record which names are read, present or not."""

    def __init__(self, models: Models, names: set[str]) -> None:
        super().__init__(models)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        """The model of a name."""
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """True if the name is present."""
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The model of a name, or a default."""
        self.names.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        """All names. An iteration depends on absent names too, so it counts as reading every name."""
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
        """All names and models."""
        self.names.add(EVERY)
        return super().items()

    def __len__(self) -> int:
        """Number of models."""
        self.names.add(EVERY)
        return super().__len__()


@torch.no_grad()
def names_read(job: Job, buffers: Buffers, schedule: Schedule) -> set[str]:
    """Received names that a step reads, found by running one; with `EVERY` if it iterates over them."""
    names: set[str] = set()
    received = NameRecorder(as_models(buffers.received, job.networks), names)
    batches = [batch.at(0) for batch in batches_of(job, buffers, received, schedule)]
    with torch.enable_grad():
        for loss, local in losses_of(job, buffers):
            loss(local, received, *batches, *[draw[0] for draw in schedule.draws])
    if job.phase.then is not None:
        job.phase.then(local_models(job, buffers), received)
    return names


def questions(
    job: Job, buffers: Buffers, received: Models, batches: Sequence[Batch], draws: Sequence[Tensor]
) -> tuple[Question, ...]:
    """Calls of received models by the losses of a step, found by computing the losses once."""
    models = {name: model for name, model in received.items() if isinstance(model, Model)}
    inputs: dict[str, list[Tensor]] = {name: [] for name in models}
    recorders = {
        name: model._replace(net=InputRecorder(model.net, (model.weights, model.statistics), inputs[name]))
        for name, model in models.items()
    }
    for loss, local in losses_of(job, buffers):
        loss(local, {**received, **recorders}, *batches, *draws)
    return tuple(
        Question(name, stream, view)
        for name, given in inputs.items()
        for stream, batch in enumerate(batches)
        for view, x in enumerate(batch.views)
        if any(x is one for one in given)
    )


def losses_of(job: Job, buffers: Buffers) -> Iterator[tuple[Callable[..., Tensor | Labelled], Models]]:
    """The losses of a step with their local models, which leave the buffers unchanged."""
    aside = buffers._replace(statistics={k: v.clone() for k, v in buffers.statistics.items()})
    for descent in job.phase.descents:
        leaf = buffers.weights[descent.train].detach().requires_grad_()
        yield descent.loss, local_models(job, aside) | local_models(job, aside, {descent.train: leaf})


@torch.no_grad()
def answer(asked: Sequence[Question], received: Models, batches: Sequence[Batch]) -> dict[Question, Tensor]:
    """Logits (steps, B, M) for each question, of all steps in one forward pass."""
    answers = {}
    for question in asked:
        x = batches[question.stream].views[question.view]  # (steps, B, C, H, W)
        answers[question] = received[question.model](x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return answers


def with_answers(received: Models, answers: Answers, batches: Sequence[Batch]) -> Models:
    """The received models, with the answers to the questions of one step about its batches."""
    known: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, stream, view), logits in answers.items():
        known.setdefault(name, []).append((batches[stream].views[view], logits))
    answering = {
        name: model._replace(
            net=AnsweringNetwork(model.net, (model.weights, model.statistics), tuple(known[name]))
        )
        for name, model in received.items()
        if name in known
    }
    return {**received, **answering}
