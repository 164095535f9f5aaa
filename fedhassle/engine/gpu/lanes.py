"""A few lanes, each replaying one client's steps on a stream of its own.

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
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from fedhassle.engine.client import (
    Buffers,
    Job,
    Trained,
    Visit,
    draw,
    follow,
    make_steps,
    perform,
    run_to_end,
)
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.chains import Chain, chains, joined
from fedhassle.engine.gpu.graphs import captured
from fedhassle.engine.gpu.program import Program, StretchFunctions, stretches
from fedhassle.engine.gpu.recording import FunctionsByShape
from fedhassle.engine.gpu.shapes import shape_of
from fedhassle.engine.gpu.sharing import FIRST, QUIET, STREAMS, USUAL
from fedhassle.engine.gpu.trimming import Trimmer
from fedhassle.errors import UserError, require
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

SHARE = 0.8  # of the free memory that lanes may take
AHEAD = 2  # stretches that a lane may have before it: one under way, one to go on with
PAUSE = 20e-6  # seconds between two looks at lanes that are all busy

Example = tuple[Job, Arrays]
"""One job of a shape, and what its client keeps."""

# Recording is the business of one thread at a time, whichever run it belongs to.
recording = threading.Lock()


class Lane:
    """A stream, and a program for each shape of job that has come along."""

    def __init__(
        self, functions: FunctionsByShape, stream: torch.cuda.Stream | None = None, small: bool = False
    ) -> None:
        self.functions = functions
        self.stream = stream
        self.small = small  # whether it takes the shortest chains
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
        if not self.functions.worth_it(shape_of(job, kept), job):
            with QUIET.broken(), self.functions.engine.lowered():
                return make_steps(job, start, kept)
        course = draw(job)
        program = self.program(job, start, kept)
        program.load(job, start)
        first = 0
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
        key = shape_of(job, kept)
        sizes = set(stretches(job.steps))
        if key in self.programs and sizes <= set(self.programs[key].runs):
            return self.programs[key]
        with recording:
            if key not in self.programs:
                self.programs[key] = Program(job, start, kept, draw(job))
            program = self.programs[key]
            with QUIET.broken():
                functions = self.functions.find(key, job, program)
            for steps in sorted(sizes - set(program.runs)):
                program.runs[steps] = self.record(key, job, program, functions, steps)
        return program

    def record(
        self, key: Hashable, job: Job, program: Program, functions: StretchFunctions, steps: int
    ) -> Callable[[], None]:
        """A stretch of steps as one graph; where there is no GPU or it cannot be captured, as a function."""
        if self.stream is None or not functions.capture:
            return partial(eagerly, program, functions, steps)
        try:
            with QUIET.broken():
                program.try_out(functions, steps)  # libraries choose their kernels now, not in a capture
                self.stream.synchronize()
            return captured(partial(program.run, functions, steps), self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return partial(eagerly, program, self.functions.give_up(key, job, error), steps)


def eagerly(program: Program, functions: StretchFunctions, steps: int) -> None:
    """A stretch of steps that is not captured."""
    with QUIET.broken():
        program.run(functions, steps)


class Shift:
    """Chains on their way through the lanes: those that wait, those under way and those done."""

    def __init__(self, work: Sequence[Chain], longest_first: Sequence[int]) -> None:
        self.work = work
        self.waiting = deque(longest_first)  # places in `work`, as all that follow
        self.busy: dict[Lane, tuple[int, Generator[None, None, Trained]]] = {}
        self.done: dict[int, Trained] = {}

    def advance(self, lane: Lane) -> bool:
        """Hands a lane its next stretch, of its chain or of one that waits; False where it can take none."""
        if lane.full() or (lane not in self.busy and not self.waiting):
            return False
        if lane not in self.busy:
            i = self.waiting.pop() if lane.small else self.waiting.popleft()
            self.busy[lane] = i, follow(self.work[i].visit, lane.perform)
        i, training = self.busy[lane]
        try:
            with lane.current():
                next(training)
        except StopIteration as end:
            self.done[i] = end.value
            del self.busy[lane]
        return True


class Lanes:
    """A pool of lanes that trains the clients of a round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.functions = FunctionsByShape(engine)
        self.trimmer = Trimmer(engine)
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
        jobs = tuple(self.trimmer.trimmed(job, chain.visit.kept) for job in chain.visit.jobs)
        return chain._replace(visit=chain.visit._replace(jobs=jobs))

    def _side_by_side(self, work: Sequence[Chain]) -> dict[int, Trained]:
        """Chains on all lanes, by their place; whichever lane is free takes the next.

        Every other lane takes the shortest instead of the longest: its kernels, which go before those of
        the others, fill the gaps that these leave.
        """
        shift = Shift(work, sorted(range(len(work)), key=lambda i: -self._cost(work[i])))
        with self._apart():
            while shift.waiting or shift.busy:
                advanced = [shift.advance(lane) for lane in self.lanes]
                if not any(advanced):
                    time.sleep(PAUSE)
        return shift.done

    def _alone(self, visit: Visit) -> Trained:
        """A client whose network draws by itself, from a state that all lanes would share."""
        self.functions.tell("clients train one after another: the network draws random numbers by itself")
        with QUIET.broken(), self.engine.lowered():
            return run_to_end(follow(visit, perform))

    def _get_ready(self, work: Sequence[Chain]) -> None:
        """Records what is new on the first lane, and opens as many lanes as there is work and memory for."""
        if not work:
            return
        new = self._new_shapes(work)
        if self.lanes:
            self._rehearse_all(new)
        else:
            self._open_first(new)
        while len(self.lanes) < min(self.most, len(work)):
            self.lanes += self._opened()

    def _new_shapes(self, work: Sequence[Chain]) -> dict[Hashable, Example]:
        """A job of each shape that was not rehearsed yet and is worth it."""
        jobs = [(job, chain.visit.kept) for chain in work for job in chain.visit.jobs]
        new = {key: example for example in jobs if (key := shape_of(*example)) not in self.seconds}
        return {key: example for key, example in new.items() if self.functions.worth_it(key, example[0])}

    def _open_first(self, new: Mapping[Hashable, Example]) -> None:
        """Opens the first lane and rehearses on it: what it takes says how many more the memory holds."""
        before = self._taken()
        self.lanes = self._opened()
        self._rehearse_all(new)
        taken = self._taken() - before
        if taken > 0:
            room = int(SHARE * torch.cuda.mem_get_info(self.engine.device)[0] / taken)
            self.most = min(self.most, 1 + room)

    def _rehearse_all(self, new: Mapping[Hashable, Example]) -> None:
        """Makes the first lane able to do each of these, and notes how long a step takes."""
        self.seconds |= {key: self._rehearse(job, kept) for key, (job, kept) in new.items()}

    def _opened(self) -> list[Lane]:
        """One more lane; none where the GPU has no stream left, after which there will be no more."""
        small = len(self.lanes) % 2 == 1
        if self.engine.device.type != "cuda":
            return [Lane(self.functions, None, small)]
        stream = STREAMS.take(self.engine.device, FIRST if small else USUAL)
        if stream is not None:
            return [Lane(self.functions, stream, small)]
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
        self.lanes = []
        self.seconds = {}
        gc.collect()
        self._taken()  # gives it back
