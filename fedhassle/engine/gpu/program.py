"""What a job does, in stretches of a few steps over buffers at fixed places.

The steps are those of `local`, with frozen models asked ahead for a whole stretch; no method occurs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedhassle.engine.client import Buffers, Course, Job, look, prepare, step
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.ahead import Answers, Question, answer, informed, names_asked, questions
from fedhassle.method import Batch, as_models
from fedhassle.vectors import Arrays

STRETCH = 10  # steps in one graph: frozen models answer for all of them in one batch


class StretchInputs(NamedTuple):
    """What a stretch of steps sees, made for all of them at once."""

    batches: tuple[Batch, ...]
    draws: tuple[Tensor, ...]
    answers: Answers

    def at(self, i: int) -> StretchInputs:
        """What step i sees."""
        batches = tuple(batch.at(i) for batch in self.batches)
        draws = tuple(draw[i] for draw in self.draws)
        answers = {question: logits[i] for question, logits in self.answers.items()}
        return StretchInputs(batches, draws, answers)


class StretchFunctions(NamedTuple):
    """What every job of a shape does: the two functions that its stretches are made of."""

    look: Callable[[Buffers, Course], StretchInputs]
    step: Callable[[Buffers, StretchInputs], None]
    capture: bool  # whether a stretch can become a graph


def stretch_functions(job: Job, asked: tuple[Question, ...], engine: Engine) -> StretchFunctions:
    """The functions of a job, with frozen models asked ahead."""

    def look_ahead(buffers: Buffers, course: Course) -> StretchInputs:
        with engine.lowered():
            received = as_models(buffers.received, job.networks)
            batches = look(job, buffers, received, course)
            return StretchInputs(batches, course.draws, answer(asked, received, batches))

    def step_once(buffers: Buffers, inputs: StretchInputs) -> None:
        with engine.lowered():
            received = as_models(buffers.received, job.networks)
            knowing = informed(received, inputs.answers, inputs.batches)
            step(job, buffers, knowing, inputs.batches, inputs.draws)

    return StretchFunctions(look_ahead, step_once, capture=engine.device.type == "cuda")


class Program:
    """A shape of job on one lane: buffers at fixed places, and the recorded stretches that run over them."""

    def __init__(self, job: Job, start: Arrays, kept: Arrays, course: Course) -> None:
        self.buffers = prepare(job, start, kept)._replace(received=blank(job.message))
        self.course = blank(stretched(course))
        self.runs: dict[int, Callable[[], None]] = {}
        self.load(job, start)
        self.feed(stretched(course))

    def load(self, job: Job, start: Arrays) -> None:
        """Puts what a job starts from into the buffers."""
        buffers = self.buffers
        for name, weights in buffers.weights.items():
            weights.copy_(start[name][: len(weights)])
            buffers.statistics[name].copy_(start[name][len(weights) :])
        for sums in (*buffers.momentum.values(), *buffers.losses.values(), buffers.labelling):
            sums.zero_()
        for name, vector in buffers.received.items():
            vector.copy_(job.message[name])

    def feed(self, course: Course) -> None:
        """Puts the course of the next steps into its place."""
        for place, tensor in zip(pytree.tree_leaves(self.course), pytree.tree_leaves(course), strict=True):
            place[: len(tensor)].copy_(tensor)

    def run(self, functions: StretchFunctions, steps: int) -> None:
        """The steps of the course that lies in its place."""
        inputs = functions.look(self.buffers, self.course.between(0, steps))
        for i in range(steps):
            functions.step(self.buffers, inputs.at(i))

    def try_out(self, functions: StretchFunctions, steps: int) -> None:
        """Each kernel of such a run, once: its first step alone."""
        inputs = functions.look(self.buffers, self.course.between(0, steps))
        functions.step(self.buffers, inputs.at(0))

    def names_asked(self, job: Job, engine: Engine) -> set[str]:
        """The received names that a step asks for."""
        with engine.lowered():
            return names_asked(job, self.buffers, self.course)

    def questions(self, job: Job, engine: Engine) -> tuple[Question, ...]:
        """What a step asks frozen models."""
        with engine.lowered():
            received = as_models(self.buffers.received, job.networks)
            batches = look(job, self.buffers, received, self.course)
            first = [batch.at(0) for batch in batches]
            return questions(job, self.buffers, received, first, [draw[0] for draw in self.course.draws])


def blank(tree: Any) -> Any:
    """Tensors of the same shapes, at places of their own."""
    return pytree.tree_map(torch.zeros_like, tree)


def stretched(course: Course) -> Course:
    """A course of exactly one stretch: the first steps, over and over if there are fewer."""
    index = torch.arange(STRETCH, device=course.feeds[0].rows.device) % course.steps
    made: Course = pytree.tree_map(lambda tensor: tensor.index_select(0, index), course)
    return made


def stretches(steps: int) -> list[int]:
    """A number of steps as stretches of a few sizes, each of which is recorded once."""
    return [STRETCH] * (steps // STRETCH) + [1] * (steps % STRETCH)
