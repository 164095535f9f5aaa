"""Steps as recordings: traced, fused and captured once, then replayed for every job of the same shape.

What is recorded are the functions of `local` over buffers at fixed places; no method occurs here. On a CPU,
where there is nothing to capture, the same functions run over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedhassle.ahead import EVERY, Answers, Question, answer, informed, names_asked, questions
from fedhassle.engine import Engine
from fedhassle.graphs import Compiler, UncapturableError, Watch
from fedhassle.local import Buffers, Course, Job, draw, look, prepare, step
from fedhassle.method import Batch, as_models
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

STRETCH = 10  # steps in one graph: frozen models answer for all of them in one batch
RECORDINGS = 8  # of one phase: what changes more often than that is not worth recording


# What a job does


class Sight(NamedTuple):
    """What a stretch of steps sees, made for all of them at once."""

    batches: tuple[Batch, ...]
    draws: tuple[Tensor, ...]
    answers: Answers

    def at(self, i: int) -> Sight:
        """What step i sees."""
        batches = tuple(batch.at(i) for batch in self.batches)
        draws = tuple(draw[i] for draw in self.draws)
        return Sight(batches, draws, {question: logits[i] for question, logits in self.answers.items()})


class Recipe(NamedTuple):
    """What every job of a shape does: the two functions of `local` that its stretches are made of."""

    look: Callable[[Buffers, Course], Sight]
    step: Callable[[Buffers, Sight], None]
    capture: bool  # whether a stretch can become a graph


def recipe(job: Job, asked: tuple[Question, ...], engine: Engine) -> Recipe:
    """The functions of a job, with frozen models asked ahead."""

    def look_ahead(buffers: Buffers, course: Course) -> Sight:
        with engine.lowered():
            received = as_models(buffers.received, job.networks)
            batches = look(job, buffers, received, course)
            return Sight(batches, course.draws, answer(asked, received, batches))

    def step_once(buffers: Buffers, sight: Sight) -> None:
        with engine.lowered():
            received = as_models(buffers.received, job.networks)
            step(job, buffers, informed(received, sight.answers, sight.batches), sight.batches, sight.draws)

    return Recipe(look_ahead, step_once, capture=engine.device.type == "cuda")


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

    def run(self, recipe: Recipe, steps: int) -> None:
        """The steps of the course that lies in its place."""
        sight = recipe.look(self.buffers, self.course.between(0, steps))
        for i in range(steps):
            recipe.step(self.buffers, sight.at(i))

    def try_out(self, recipe: Recipe, steps: int) -> None:
        """Each kernel of such a run, once: its first step alone."""
        recipe.step(self.buffers, recipe.look(self.buffers, self.course.between(0, steps)).at(0))

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


# Which jobs are of one shape


def shape_of(job: Job, kept: Arrays) -> Hashable:
    """Equal for jobs that one recording can serve: the same functions on tensors of the same sizes."""
    phase = job.phase
    streams = tuple((s.part, s.batch, s.views, s.online, identity(s.labels)) for s in phase.streams)
    descents = tuple((d.train, d.sgd, identity(d.loss)) for d in phase.descents)
    sizes = tuple(
        tuple((name, len(v), v.dtype) for name, v in arrays.items()) for arrays in (job.message, kept)
    )
    images = id(job.site.samples.images), id(job.site.views.scale)
    return (phase.name, streams, descents, identity(phase.then), identity(phase.draw), sizes, images)


def identity(value: Any) -> Hashable:
    """Equal for functions that compute the same: those made anew each round are judged by what they hold."""
    if isinstance(value, partial):
        named = tuple((name, identity(v)) for name, v in sorted(value.keywords.items()))
        return (identity(value.func), identity(value.args), named)
    if isinstance(value, MethodType):
        return (value.__func__, id(value.__self__))
    if isinstance(value, FunctionType):
        cells = tuple(identity(cell.cell_contents) for cell in value.__closure__ or ())
        named = tuple((name, identity(v)) for name, v in sorted((value.__kwdefaults__ or {}).items()))
        return (value.__code__, cells, identity(value.__defaults__), named)
    if isinstance(value, tuple):
        return (type(value), *(identity(part) for part in value))
    plain = isinstance(value, int | float | str | None)
    return (type(value), value) if plain else id(value)  # recordings keep it alive, so that its id is its own


class Used(NamedTuple):
    """What the steps of jobs with the same functions use of what they receive."""

    job: Job  # one of them, whose functions stay alive
    names: set[str]  # asked for so far
    heard: set[Hashable]  # selections of them that were listened to

    def selection(self, job: Job) -> Hashable:
        """Those of the names that a job has, and their sizes."""
        names = job.message if EVERY in self.names else self.names & job.message.keys()
        return frozenset((name, len(job.message[name])) for name in names)


class Recipes:
    """The recipe of each shape of job, one for all lanes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._recipes: dict[Hashable, tuple[Job, Recipe]] = {}  # with the job, whose functions it stands for
        self._used: dict[Hashable, Used] = {}  # by functions
        self._compiler = Compiler()
        self._told: set[str] = set()

    def trimmed(self, job: Job, kept: Arrays) -> Job:
        """The job with no more in its message than its steps ask for, so that more jobs are of one shape.

        Which names a step asks for may depend on those that there are: so it is listened to again whenever
        there is another selection of the names that were asked for so far.
        """
        functions = shape_of(job._replace(message={}), kept)
        if functions not in self._used:
            if sum(used.job.phase.name == job.phase.name for used in self._used.values()) >= RECORDINGS:
                return job
            self._used[functions] = Used(job, set(), set())
        used = self._used[functions]
        if used.selection(job) not in used.heard:
            program = Program(job, job.message | kept, kept, draw(job))
            used.names.update(program.names_asked(job, self.engine))
            used.heard.add(used.selection(job))
        wanted = used.names | set(job.phase.trained)
        message = {name: v for name, v in job.message.items() if name in wanted or EVERY in wanted}
        return job._replace(message=message)

    def worth_it(self, key: Hashable, job: Job) -> bool:
        """Whether a shape is known, or its phase has not had too many of them; else it leaves no trace."""
        alike = sum(known.phase.name == job.phase.name for known, _ in self._recipes.values())
        if key in self._recipes or alike < RECORDINGS:
            return True
        self.tell(
            f"phase {job.phase.name!r} runs eagerly: its functions or its messages change from round to "
            "round; what changes should be a tensor in the message, the memory or a draw"
        )
        return False

    def find(self, key: Hashable, job: Job, program: Program) -> Recipe:
        """The recipe of a shape; `program` is one to try it on."""
        if key not in self._recipes:
            self._recipes[key] = job, self._make(job, program)
        return self._recipes[key][1]

    def _make(self, job: Job, program: Program) -> Recipe:
        made = recipe(job, program.questions(job, self.engine), self.engine)
        if made.capture and (reason := why_not(made, program)):
            self.tell(f"phase {job.phase.name!r} runs eagerly: its step cannot be captured ({reason})")
            return made._replace(capture=False)
        return self._fused(made, program) if self.engine.compile else made

    def _fused(self, made: Recipe, program: Program) -> Recipe:
        """The recipe with fused kernels, if the compiler can."""
        try:
            whole = self._compiler(made.look, program.buffers, program.course)
            sight = whole(program.buffers, program.course).at(0)
            step = self._compiler(made.step, program.buffers, sight)
            step(program.buffers, sight)  # it is compiled when it is called
        except Exception as error:  # a compiler may fail in any way, and is not needed
            first = str(error).partition("\n")[0]
            self.tell(f"steps are captured but not compiled ({type(error).__name__}: {first})")
            return made

        def look(buffers: Buffers, course: Course) -> Sight:
            return (whole if course.steps == STRETCH else made.look)(buffers, course)

        return made._replace(look=look, step=step)

    def give_up(self, key: Hashable, job: Job, error: Exception) -> Recipe:
        """The recipe of a shape whose steps cannot be captured: they run eagerly from now on."""
        first = str(error).partition("\n")[0]
        self.tell(f"phase {job.phase.name!r} runs eagerly: its step cannot be captured ({first})")
        known, made = self._recipes[key]
        self._recipes[key] = known, made._replace(capture=False)
        return self._recipes[key][1]

    def tell(self, message: str) -> None:
        """Warns once."""
        if message not in self._told:
            self._told.add(message)
            log.warning("%s", message)


def why_not(recipe: Recipe, program: Program) -> str:
    """Why a step of a recipe cannot be captured; nothing if it can."""
    try:
        with Watch():  # type: ignore[no-untyped-call]
            program.run(recipe, 1)
    except UncapturableError as error:
        return str(error)
    return ""
