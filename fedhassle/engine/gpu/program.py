"""A job as stretches of a few steps over buffers at fixed addresses.

The steps are those of `engine.client`, with the logits of frozen models computed ahead for a whole stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedhassle.dropout import dropout_from
from fedhassle.engine.client import Buffers, batches_of, prepare, step
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.precompute import Answers, Question, answer, names_read, questions, with_answers
from fedhassle.engine.job import Job, Schedule
from fedhassle.method import Batch, as_models
from fedhassle.vectors import Arrays

# Steps in one graph; frozen models run on the batches of all of them at once. Multiples of 5, the numbers of
# steps of 5 or 10 epochs, need two sizes at most. Each size is recorded on each lane, so there are few.
SIZES = 10, 5, 2, 1
STRETCH = SIZES[0]


class StretchInputs(NamedTuple):
    """Inputs of a stretch of steps, computed for all of them at once."""

    batches: tuple[Batch, ...]
    draws: tuple[Tensor, ...]
    truths: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    answers: Answers

    def at(self, i: int) -> StretchInputs:
        """Inputs of step i."""
        batches = tuple(batch.at(i) for batch in self.batches)
        draws = tuple(draw[i] for draw in self.draws)
        truths = tuple(truth[i] for truth in self.truths)
        seeds = tuple(seed[i] for seed in self.seeds)
        answers = {question: logits[i] for question, logits in self.answers.items()}
        return StretchInputs(batches, draws, truths, seeds, answers)


class StretchFunctions(NamedTuple):
    """The two functions that a stretch consists of, the same for every job of a shape."""

    inputs: Callable[[Buffers, Schedule], StretchInputs]
    step: Callable[[Buffers, StretchInputs], None]
    capture: bool  # True if a stretch can become a graph


def stretch_functions(job: Job, asked: tuple[Question, ...], engine: Engine) -> StretchFunctions:
    """The functions of a job; `asked` is computed ahead for a whole stretch."""

    def inputs_of(buffers: Buffers, schedule: Schedule) -> StretchInputs:
        with engine.lowered():
            received = as_models(buffers.received, job.networks)
            batches = batches_of(job, buffers, received, schedule)
            answers = answer(asked, received, batches)
            return StretchInputs(batches, schedule.draws, schedule.truths, schedule.seeds, answers)

    def step_once(buffers: Buffers, inputs: StretchInputs) -> None:
        with engine.lowered(), dropout_from(inputs.seeds):
            received = as_models(buffers.received, job.networks)
            answering = with_answers(received, inputs.answers, inputs.batches)
            step(job, buffers, answering, inputs.batches, inputs.draws, inputs.truths)

    return StretchFunctions(inputs_of, step_once, capture=engine.device.type == "cuda")


class Program:
    """A shape of job on one lane: buffers at fixed addresses, and recorded stretches that run on them."""

    def __init__(self, job: Job, start: Arrays, kept: Arrays, schedule: Schedule) -> None:
        self.buffers = prepare(job, start, kept)._replace(received=blank(job.message))
        self.schedule = blank(stretched(schedule))
        self.places: dict[int, list[Tensor]] = {}  # of the tensors of the schedule's first steps, by number
        written = self.buffers.optimiser, self.buffers.losses, self.buffers.labelling
        self.sums: list[Tensor] = pytree.tree_leaves(written)  # zero before the first step
        self.runs: dict[int, Callable[[], None]] = {}
        self.load(job, start)
        self.load_schedule(stretched(schedule).tensors)

    def load(self, job: Job, start: Arrays) -> None:
        """Copies the start vectors and the message of a job into the buffers."""
        weights, received = self.buffers.weights, self.buffers.received
        begun = [(start[name][: len(w)], start[name][len(w) :]) for name, w in weights.items()]
        sent = [job.message[name] for name in received]
        places = [*weights.values(), *self.buffers.statistics.values(), *received.values()]
        copy_all(places, [*(w for w, _ in begun), *(s for _, s in begun), *sent])
        torch._foreach_zero_(self.sums)
        for rate in self.buffers.rate:
            assert job.rate is not None  # jobs of one shape all have a rate, or none has
            rate.fill_(job.rate)

    def load_schedule(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors of the schedule of the next steps into the buffers."""
        steps = len(tensors[0])
        if steps not in self.places:
            self.places[steps] = [place[:steps] for place in self.schedule.tensors]
        copy_all(self.places[steps], tensors)

    def run(self, functions: StretchFunctions, steps: int) -> None:
        """Runs the first steps of the loaded schedule."""
        inputs = functions.inputs(self.buffers, self.schedule.between(0, steps))
        for i in range(steps):
            functions.step(self.buffers, inputs.at(i))

    def try_out(self, functions: StretchFunctions, steps: int) -> None:
        """Runs each kernel of such a run once, by its first step alone."""
        inputs = functions.inputs(self.buffers, self.schedule.between(0, steps))
        functions.step(self.buffers, inputs.at(0))

    def names_read(self, job: Job, engine: Engine) -> set[str]:
        """Received names that a step reads."""
        with engine.lowered(), dropout_from([seed[0] for seed in self.schedule.seeds]):
            return names_read(job, self.buffers, self.schedule)

    def questions(self, job: Job, engine: Engine) -> tuple[Question, ...]:
        """Calls of frozen models by a step."""
        with engine.lowered(), dropout_from([seed[0] for seed in self.schedule.seeds]):
            received = as_models(self.buffers.received, job.networks)
            batches = batches_of(job, self.buffers, received, self.schedule)
            first = [batch.at(0) for batch in batches]
            return questions(job, self.buffers, received, first, [draw[0] for draw in self.schedule.draws])


def copy_all(places: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copies tensors to as many places: on a GPU in one kernel for each type, not one for each tensor."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        if place.numel():
            into, made = pairs.setdefault(place.dtype, ([], []))
            into.append(place)
            made.append(tensor)
    for into, made in pairs.values():
        torch._foreach_copy_(into, made)


def blank(tree: Any) -> Any:
    """Zero tensors of the same shapes."""
    return pytree.tree_map(torch.zeros_like, tree)


def stretched(schedule: Schedule) -> Schedule:
    """A schedule of exactly one stretch: the first steps, repeated if there are fewer."""
    index = torch.arange(STRETCH, device=schedule.feeds[0].rows.device) % schedule.steps
    made: Schedule = pytree.tree_map(lambda tensor: tensor.index_select(0, index), schedule)
    return made


def stretches(steps: int) -> list[int]:
    """Splits a number of steps into stretches of few sizes, the largest first.

    The host has work for each stretch, so a client of 5 steps should be one stretch and not five. Rounding
    may depend on the sizes, so they depend on the number of steps alone.
    """
    made: list[int] = []
    for size in SIZES:
        made += [size] * ((steps - sum(made)) // size)
    return made
