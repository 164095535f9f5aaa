"""A job as stretches of a few steps over buffers at fixed addresses.

The steps are those of `engine.client`, with the logits of frozen models computed ahead for a whole stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

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


class Seat:
    """A job's place in a program: its buffers, at addresses that never change, and its schedule."""

    def __init__(self, buffers: Buffers, schedule: Schedule) -> None:
        self.buffers = buffers
        self.schedule = schedule
        written = buffers.optimiser, buffers.losses, buffers.labelling
        self.sums: list[Tensor] = pytree.tree_leaves(written)  # zero before the first step

    @classmethod
    def of(cls, job: Job, start: Arrays, kept: Arrays, schedule: Schedule) -> Self:
        """A seat for jobs of this shape, with this one in it."""
        buffers = prepare(job, start, kept)._replace(received=blank(job.message))
        seat = cls(buffers, stretched(schedule))
        seat.load(job, start)
        return seat

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

    def result(self) -> Buffers:
        """The buffers with copies of what steps write, which further steps leave alone."""
        written = self.buffers.weights, self.buffers.statistics, self.buffers.losses, self.buffers.labelling
        weights, statistics, losses, labelling = pytree.tree_map(torch.clone, written)
        return self.buffers._replace(
            weights=weights, statistics=statistics, losses=losses, labelling=labelling
        )

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


class Program:
    """Jobs of one shape on a lane, one in each seat, and recorded stretches of their steps.

    With several seats each buffer has a leading axis of seats, and so has the schedule after that of steps.
    """

    def __init__(self, example: Seat, seats: int = 1) -> None:
        self.example = example  # the only seat, or one of the same shape
        self.seats, self.buffers, self.schedule = [example], example.buffers, example.schedule
        if seats > 1:
            self.buffers = of_all_seats(partial(copies, n=seats, axis=0), example.buffers)
            self.schedule = pytree.tree_map(partial(copies, n=seats, axis=1), example.schedule)
            self.seats = [self._seat(i) for i in range(seats)]
        self.places: dict[int, list[Tensor]] = {}  # of the tensors of the schedule's first steps, by number
        self.runs: dict[int, Callable[[], None]] = {}

    def _seat(self, i: int) -> Seat:
        buffers = of_all_seats(partial(torch.select, dim=0, index=i), self.buffers)
        return Seat(buffers, pytree.tree_map(partial(torch.select, dim=1, index=i), self.schedule))

    def load_schedules(self, given: Sequence[Sequence[Tensor] | None]) -> None:
        """Copies the tensors of the next steps' schedules into the buffers, one schedule for each seat.

        A seat without one repeats steps of another, since kernels work for all seats.
        """
        known = [tensors for tensors in given if tensors is not None]
        steps = len(known[0][0])
        if steps not in self.places:
            self.places[steps] = [place[:steps] for place in self.schedule.tensors]
        if len(self.seats) == 1:
            copy_all(self.places[steps], known[0])
            return
        empty = [None] * (len(self.seats) - len(given))
        filled = [tensors or known[0] for tensors in (*given, *empty)]
        for place, tensors in zip(self.places[steps], zip(*filled, strict=True), strict=True):
            torch.stack(tensors, 1, out=place)

    def run(self, functions: StretchFunctions, steps: int) -> None:
        """Runs the first steps of the loaded schedules."""
        inputs = functions.inputs(self.buffers, self.schedule.between(0, steps))
        for i in range(steps):
            functions.step(self.buffers, inputs.at(i))

    def try_out(self, functions: StretchFunctions, steps: int) -> None:
        """Runs each kernel of such a run once, by its first step alone."""
        inputs = functions.inputs(self.buffers, self.schedule.between(0, steps))
        functions.step(self.buffers, inputs.at(0))


def of_all_seats(change: Callable[[Tensor], Tensor], buffers: Buffers) -> Buffers:
    """Buffers with a change to every tensor but the images, which all seats share."""
    owned = {name: tensors for name, tensors in buffers._asdict().items() if name != "images"}
    return buffers._replace(**pytree.tree_map(change, owned))


def copies(tensor: Tensor, n: int, axis: int) -> Tensor:
    """Copies of a tensor, stacked along an axis."""
    return torch.stack([tensor] * n, axis)


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


def common_stretches(numbers: Sequence[int]) -> list[int]:
    """Splits numbers of steps into stretches that they have in common, so that each ends with one of them."""
    ends = [0, *sorted(set(numbers))]
    return [size for before, end in pairwise(ends) for size in stretches(end - before)]


def stretches(steps: int) -> list[int]:
    """Splits a number of steps into stretches of few sizes, the largest first.

    The host has work for each stretch, so a client of 5 steps should be one stretch and not five. Rounding
    may depend on the sizes, so they depend on the number of steps alone.
    """
    made: list[int] = []
    for size in SIZES:
        made += [size] * ((steps - sum(made)) // size)
    return made
