"""Many clients at once on one GPU: a few lanes, each replaying one client's steps on a stream of its own.

One thread keeps all lanes going: it hands each its next stretch of steps as soon as the lane can take it, and
never waits for one of them. Lanes run on a CPU too, in turns, so that all but the capturing is tested there.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from fedhassle.cuda_sharing import FIRST, QUIET, STREAMS, USUAL
from fedhassle.engine import Engine
from fedhassle.errors import UserError, require
from fedhassle.graphs import captured
from fedhassle.local import Buffers, Job, Trained, Visit, draw, follow, perform, run_to_end
from fedhassle.recording import Program, Recipe, Recipes, shape_of, stretches
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

SHARE = 0.8  # of the free memory that lanes may take
AHEAD = 2  # stretches that a lane may have before it: one under way, one to go on with
PAUSE = 20e-6  # seconds between two looks at lanes that are all busy

# Recording is the business of one thread at a time, whichever run it belongs to.
recording = threading.Lock()


class Chain(NamedTuple):
    """Jobs of one client that build on each other, as a visit of their own; chains are independent."""

    client: int  # whose, by its place among the visits
    visit: Visit


def chains(visits: Sequence[Visit]) -> list[Chain]:
    """The jobs of all clients: together those that train one name, or belong to a client that keeps any."""
    return [Chain(i, part) for i, visit in enumerate(visits) for part in connected(visit)]


def connected(visit: Visit) -> list[Visit]:
    """One client's jobs, by what builds on what; labels given before are counted by `joined`."""
    groups: list[tuple[set[str], list[Job]]] = []
    for job in visit.jobs:
        names, jobs = set(job.phase.trained), [job]
        for group in [g for g in groups if visit.kept or g[0] & names]:
            groups.remove(group)
            names, jobs = names | group[0], group[1] + jobs
        groups.append((names, jobs))
    counted = visit.update.labelling
    empty = visit.update._replace(labelling=None if counted is None else torch.zeros_like(counted))
    return [Visit(tuple(sorted(jobs, key=visit.jobs.index)), visit.kept, empty) for _, jobs in groups]


def joined(visit: Visit, parts: Sequence[Trained]) -> Trained:
    """One client's update and memory, from those of its chains."""
    update, kept = visit.update, visit.kept
    for part, memory in parts:
        update = update._replace(arrays=update.arrays | part.arrays, losses=update.losses | part.losses)
        if update.labelling is not None and part.labelling is not None:
            update = update._replace(labelling=update.labelling + part.labelling)
        kept = memory
    names = dict.fromkeys(name for job in visit.jobs for name in job.phase.trained)
    arrays, losses = ({k: made[k] for k in names} for made in (update.arrays, update.losses))
    return update._replace(arrays=arrays, losses=losses), kept


class Lane:
    """A stream, and a program for each shape of job that has come along."""

    def __init__(
        self, recipes: Recipes, stream: torch.cuda.Stream | None = None, small: bool = False
    ) -> None:
        self.recipes, self.stream, self.small = recipes, stream, small
        self.pool = None
        if stream is not None:
            self.pool = torch.cuda.graph_pool_handle()  # one for all graphs of a lane: they take turns
            weakref.finalize(self, STREAMS.give_back, stream)
        self.programs: dict[Hashable, Program] = {}
        self.marks: deque[torch.cuda.Event] = deque()  # behind each stretch that is under way

    @contextmanager
    def current(self) -> Iterator[None]:
        """Work goes to this lane's stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def catch_up(self) -> None:
        """What it does next comes after all that is queued now: it may read that, or take its memory."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def wait(self) -> None:
        """Until all that it has before it is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def full(self) -> bool:
        """Whether it has as much before it as it may: more, and the call that adds it would wait."""
        while self.marks and self.marks[0].query():  # type: ignore[no-untyped-call]
            self.marks.popleft()
        return len(self.marks) >= AHEAD

    def perform(self, job: Job, start: Arrays, kept: Arrays) -> Generator[None, None, Buffers]:
        """All steps of a job, by replaying stretches of them; may be left after each."""
        if not self.recipes.worth_it(shape_of(job, kept), job):
            with QUIET.broken(), self.recipes.engine.lowered():
                return run_to_end(perform(job, start, kept))
        course, first = draw(job), 0
        program = self.program(job, start, kept)
        program.load(job, start)
        for steps in stretches(job.steps):
            program.feed(course.between(first, first + steps))
            program.runs[steps]()
            first += steps
            if self.stream is not None:
                self.marks.append(self.stream.record_event())
            yield
        return program.buffers

    def program(self, job: Job, start: Arrays, kept: Arrays) -> Program:
        """The program of a job's shape, with a recording for each size of its stretches."""
        key, sizes = shape_of(job, kept), set(stretches(job.steps))
        if key in self.programs and sizes <= set(self.programs[key].runs):
            return self.programs[key]
        with recording:
            if key not in self.programs:
                self.programs[key] = Program(job, start, kept, draw(job))
            program = self.programs[key]
            with QUIET.broken():
                recipe = self.recipes.find(key, job, program)
            for steps in sorted(sizes - set(program.runs)):
                program.runs[steps] = self.record(key, job, program, recipe, steps)
        return program

    def record(
        self, key: Hashable, job: Job, program: Program, recipe: Recipe, steps: int
    ) -> Callable[[], None]:
        """A stretch of steps as one graph; where there is no GPU or it cannot be captured, as a function."""
        if self.stream is None or not recipe.capture:
            return partial(eagerly, program, recipe, steps)
        try:
            with QUIET.broken():
                program.try_out(recipe, steps)  # libraries choose their kernels now, not in a capture
                self.stream.synchronize()
            return captured(partial(program.run, recipe, steps), self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return partial(eagerly, program, self.recipes.give_up(key, job, error), steps)


def eagerly(program: Program, recipe: Recipe, steps: int) -> None:
    """A stretch of steps that is not captured."""
    with QUIET.broken():
        program.run(recipe, steps)


class Lanes:
    """A pool of lanes that trains the clients of a round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.recipes = Recipes(engine)
        self.lanes: list[Lane] = []
        self.most = max(1, engine.lanes)
        self.seconds: dict[Hashable, float] = {}  # of one step of each shape, alone on the device

    def train(self, visits: Sequence[Visit]) -> list[Trained]:
        """What each client sends back and keeps; the last of it may still be under way on the device."""
        while True:
            try:
                return self._train(visits)
            except torch.OutOfMemoryError as error:  # a visit can be made again: it changed nothing
                if len(self.lanes) <= 1:
                    raise UserError(
                        "the GPU has not enough memory to train one client: try a smaller method.batch, "
                        "precision=bf16, or device=cpu"
                    ) from error
            self._halve()  # here, where the error does not keep alive what is given back

    def _train(self, visits: Sequence[Visit]) -> list[Trained]:
        alone = [i for i, visit in enumerate(visits) if any(job.draws_globally for job in visit.jobs)]
        with QUIET.broken():
            work = [self._trimmed(chain) for chain in chains(visits) if chain.client not in alone]
        self._get_ready(work)
        done = self._side_by_side(work)
        parts: list[list[Trained]] = [[] for _ in visits]
        for i, chain in enumerate(work):
            parts[chain.client].append(done[i])
        return [
            self._alone(visit) if i in alone else joined(visit, parts[i]) for i, visit in enumerate(visits)
        ]

    def _trimmed(self, chain: Chain) -> Chain:
        """A chain whose jobs receive what they use alone."""
        jobs = tuple(self.recipes.trimmed(job, chain.visit.kept) for job in chain.visit.jobs)
        return chain._replace(visit=chain.visit._replace(jobs=jobs))

    def _side_by_side(self, work: Sequence[Chain]) -> dict[int, Trained]:
        """Chains on all lanes, by their place; whichever lane is free takes the next.

        Every other lane takes the shortest instead of the longest: its kernels, which go before those of
        the others, fill the gaps that these leave.
        """
        waiting = deque(sorted(range(len(work)), key=lambda i: -self._cost(work[i])))
        busy: dict[Lane, tuple[int, Generator[None, None, Trained]]] = {}
        done: dict[int, Trained] = {}
        with self._apart():
            while waiting or busy:
                idle = True
                for lane in self.lanes:
                    if lane.full() or (lane not in busy and not waiting):
                        continue
                    idle = False
                    if lane not in busy:
                        i = waiting.pop() if lane.small else waiting.popleft()
                        busy[lane] = i, follow(work[i].visit, lane.perform)
                    i, training = busy[lane]
                    try:
                        with lane.current():
                            next(training)
                    except StopIteration as end:
                        done[i] = end.value
                        del busy[lane]
                if idle:
                    time.sleep(PAUSE)
        return done

    def _alone(self, visit: Visit) -> Trained:
        """A client whose network draws by itself, from a state that all lanes would share."""
        self.recipes.tell("clients train one after another: the network draws random numbers by itself")
        with QUIET.broken(), self.engine.lowered():
            return run_to_end(follow(visit, perform))

    def _get_ready(self, work: Sequence[Chain]) -> None:
        """Records what is new on the first lane, and opens as many lanes as there is work and memory for."""
        if not work:
            return
        jobs = [(job, chain.visit.kept) for chain in work for job in chain.visit.jobs]
        new = {key: pair for pair in jobs if (key := shape_of(*pair)) not in self.seconds}
        new = {key: pair for key, pair in new.items() if self.recipes.worth_it(key, pair[0])}
        first = not self.lanes
        before = self._taken() if first else 0
        self.lanes = self.lanes or self._opened()
        self.seconds |= {key: self._rehearse(job, kept) for key, (job, kept) in new.items()}
        if first and (taken := self._taken() - before) > 0:
            room = int(SHARE * torch.cuda.mem_get_info(self.engine.device)[0] / taken)
            self.most = min(self.most, 1 + room)
        while len(self.lanes) < min(self.most, len(work)):
            self.lanes += self._opened()

    def _opened(self) -> list[Lane]:
        """One more lane; none where the GPU has no stream left, after which there will be no more."""
        small = len(self.lanes) % 2 == 1
        if self.engine.device.type != "cuda":
            return [Lane(self.recipes, None, small)]
        stream = STREAMS.take(self.engine.device, FIRST if small else USUAL)
        if stream is not None:
            return [Lane(self.recipes, stream, small)]
        require(bool(self.lanes), "too many runs at once on one GPU: it has no stream left for this one")
        self.most = len(self.lanes)
        return []

    def _rehearse(self, job: Job, kept: Arrays) -> float:
        """The seconds of a step, on the first lane, which is then able to make it."""
        lane = self.lanes[0]
        lane.catch_up()
        with lane.current():
            program = lane.program(job, job.message | kept, kept)
            if lane.stream is None:
                return 1.0
            steps = max(program.runs)
            lane.stream.synchronize()
            clock = time.perf_counter()
            program.runs[steps]()
            lane.stream.synchronize()
            return (time.perf_counter() - clock) / steps

    def _cost(self, chain: Chain) -> float:
        """About how many seconds it takes; what is never recorded counts like the longest step."""
        most = max(self.seconds.values(), default=1.0)
        shapes = [(job.steps, shape_of(job, chain.visit.kept)) for job in chain.visit.jobs]
        return sum(steps * self.seconds.get(shape, most) for steps, shape in shapes)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """The lanes begin after what is queued now; what is queued afterwards waits for the lanes."""
        for lane in self.lanes:
            lane.catch_up()
        yield
        for lane in self.lanes:
            if lane.stream is not None:
                torch.cuda.current_stream(self.engine.device).wait_stream(lane.stream)

    def _taken(self) -> int:
        """The memory in use; what the allocator merely holds is given back, or it would count."""
        if self.engine.device.type != "cuda":
            return 0
        with recording:  # the allocator cannot give back while anything is being recorded
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved(self.engine.device)

    def _halve(self) -> None:
        """Half as many lanes, with the memory of all given back."""
        self.most = len(self.lanes) // 2
        log.warning("out of memory: the round is made again with %d of %d lanes", self.most, len(self.lanes))
        for lane in self.lanes:
            lane.wait()
        self.lanes, self.seconds = [], {}
        gc.collect()
        self._taken()  # gives it back
