"""Recordings of steps: traced, fused and captured once, then replayed for every job of the same shape.

One example: HASSLE's `labelled residual`, on a client with labelled and unlabelled data.

1. Trim (`trimming.py`): the client received w_S, w_U, r_US, r_SU and w_S_before. One step runs with a message
   that records which names are read: w_S and w_U. The job keeps these and r_US, which it trains.
2. Shape (`shapes.py`): jobs then differ only by their phase, with its functions, and the sizes of their
   vectors. So this phase has one shape for all clients and rounds.
3. Program (`program.py`): a lane allocates buffers for the shape, with addresses that never change: r_US with
   its momentum, the message, and the schedule (rows, labels, draws) of a stretch of ten steps.
4. Functions (`FunctionsByShape`): `inputs` computes the ten batches and the logits of w_S and w_U on all of
   them (`precompute.py`), `step` is one step. Both are tested and fused once for all lanes.
5. Replay (`Lane`): each lane captures `inputs` and ten times `step` as one graph. The 100 steps of the job
   are then: copy its vectors into the buffers, and ten times copy the next part of its schedule and replay
   the graph. What is left of a job that has no whole number of stretches is replayed from shorter ones
   (`stretches`), recorded when they are first needed.

With `stack`, a program has seats for several jobs of a shape, and both functions work for all of them at once
(`stacking.py`). A group of jobs runs until the longest has ended.

A step that cannot be compiled is captured uncompiled; a step that cannot be captured, or changes too often,
runs eagerly. On a CPU, which cannot capture, the same functions run over the same buffers.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, zip_longest

import torch

from fedhassle.capture import CAPTURE_LOCK
from fedhassle.engine.client import Buffers, run_job
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.chains import Form
from fedhassle.engine.gpu.graphs import Compiler, SyncDetector, UncapturableError, captured
from fedhassle.engine.gpu.memory import showing_lack_of_memory
from fedhassle.engine.gpu.program import (
    STRETCH,
    Program,
    Seat,
    StretchFunctions,
    StretchInputs,
    common_stretches,
    stretch_functions,
)
from fedhassle.engine.gpu.stacking import for_all_seats
from fedhassle.engine.gpu.streams import STREAMS
from fedhassle.engine.job import Job, Schedule, draw
from fedhassle.errors import first_line
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

RECORDINGS = 8  # maximum per phase; recording pays only for a phase that seldom changes
AHEAD = 2  # maximum number of stretches queued on a lane: one that runs, and the next

# Held by the thread that records, or returns memory to the device; shared by all runs of the process.
RECORDING_LOCK = threading.Lock()


# Functions


class FunctionsByShape:
    """The functions of each shape of job, shared by all lanes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # With the first job of each shape, to keep the objects alive that the shape identifies by id.
        self._known: dict[Hashable, tuple[Job, StretchFunctions]] = {}
        self._compiler = Compiler()
        self._warned: set[str] = set()

    def worth_recording(self, key: Hashable, job: Job) -> bool:
        """True if the shape is known, or its phase does not have too many shapes yet."""
        if key in self._known:
            return True
        if sum(known.phase.name == job.phase.name for known, _ in self._known.values()) < RECORDINGS:
            return True
        self.warn_once(
            f"phase {job.phase.name!r} runs eagerly: its functions or messages change from round to round; "
            "a value that changes should be a tensor in the message, the memory or a draw"
        )
        return False

    def find(self, key: Hashable, job: Job, program: Program) -> StretchFunctions:
        """The functions of a shape; `program` is one to test them on."""
        if key not in self._known:
            self._known[key] = job, self._make(job, program)
        return self._known[key][1]

    def _make(self, job: Job, program: Program) -> StretchFunctions:
        made = stretch_functions(job, program.example.questions(job, self.engine), self.engine)
        if len(program.seats) > 1:
            made = for_all_seats(made, program)
        if made.capture and (reason := capture_obstacle(made, program)):
            self._warn_uncapturable(job, reason)
            return made._replace(capture=False)
        return self._fused(made, program, job) if self.engine.compile else made

    def _fused(self, made: StretchFunctions, program: Program, job: Job) -> StretchFunctions:
        """The functions with fused kernels, or unchanged if the compiler fails."""
        compiled = partial(self._compiler, as_products=job.has_short_kernels)
        try:
            with showing_lack_of_memory():
                whole = compiled(made.inputs, program.buffers, program.schedule)
                first = whole(program.buffers, program.schedule).at(0)
                step = compiled(made.step, program.buffers, first)
                step(program.buffers, first)  # the first call compiles
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may fail in any way, and is optional
            self.warn_once(
                f"steps are captured but not compiled ({type(error).__name__}: {first_line(error)})"
            )
            return made

        def inputs(buffers: Buffers, schedule: Schedule) -> StretchInputs:
            return (whole if schedule.steps == STRETCH else made.inputs)(buffers, schedule)

        return made._replace(inputs=inputs, step=step)

    def stop_capturing(self, key: Hashable, job: Job, error: Exception) -> StretchFunctions:
        """The functions of a shape whose capture failed, which run eagerly from now on."""
        self._warn_uncapturable(job, first_line(error))
        known, made = self._known[key]
        self._known[key] = known, made._replace(capture=False)
        return self._known[key][1]

    def _warn_uncapturable(self, job: Job, reason: str) -> None:
        self.warn_once(f"phase {job.phase.name!r} runs eagerly: its step cannot be captured ({reason})")

    def warn_once(self, message: str) -> None:
        """Logs a warning, unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


def capture_obstacle(functions: StretchFunctions, program: Program) -> str:
    """The reason why a step cannot be captured; empty if it can."""
    try:
        with SyncDetector():  # type: ignore[no-untyped-call]
            program.run(functions, 1)
    except UncapturableError as error:
        return str(error)
    return ""


# Replay


class Lane:
    """A stream, with a program for each shape of job that it has run."""

    def __init__(
        self, functions: FunctionsByShape, stream: torch.cuda.Stream | None = None, shortest: bool = False
    ) -> None:
        self.functions = functions
        self.stream = stream
        self.shortest = shortest  # True if it takes the shortest chains first
        self.pool = None
        if stream is not None:
            self.pool = torch.cuda.graph_pool_handle()  # shared by all graphs of a lane, which never overlap
            weakref.finalize(self, STREAMS.give_back, stream)
        self.programs: dict[Hashable, Program] = {}
        self.marks: deque[torch.cuda.Event] = deque()  # one after each queued stretch

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queues work on this lane's stream inside the block."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def catch_up(self) -> None:
        """Makes this lane wait for all work queued so far, whose results or memory it may use."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def wait(self) -> None:
        """Waits for the queued work."""
        if self.stream is not None:
            self.stream.synchronize()

    def full(self) -> bool:
        """True if `AHEAD` stretches are queued; a call that added another would block."""
        while self.marks and self.marks[0].query():  # type: ignore[no-untyped-call]
            self.marks.popleft()
        return len(self.marks) >= AHEAD

    def run_jobs(
        self, jobs: Sequence[Job], form: Form, starts: Sequence[Arrays], kept: Sequence[Arrays]
    ) -> Generator[None, None, list[Buffers]]:
        """Runs all steps of jobs of one form by replaying stretches; pauses after each stretch."""
        if not self.functions.worth_recording(form, jobs[0]):
            with CAPTURE_LOCK.eager(), self.functions.engine.lowered():
                return [run_job(*given) for given in zip(jobs, starts, kept, strict=True)]
        sizes = common_stretches([job.steps for job in jobs])
        ends = list(accumulate(sizes))
        schedules = [draw(job).split(sizes[: bisect(ends, job.steps)]) for job in jobs]
        program = self.program(jobs[0], form, starts[0], kept[0], sizes)
        for seat, job, start in zip(program.seats, jobs, starts, strict=False):  # some seats may stay empty
            seat.load(job, start)
        results = {}
        for steps, end, given in zip(sizes, ends, zip_longest(*schedules), strict=True):
            program.load_schedules(given)
            program.runs[steps]()
            ended = [i for i, job in enumerate(jobs) if job.steps == end < ends[-1]]
            results.update({i: program.seats[i].result() for i in ended})
            if self.stream is not None:
                self.marks.append(self.stream.record_event())
            yield
        return [results.get(i, program.seats[i].buffers) for i in range(len(jobs))]

    def program(self, job: Job, form: Form, start: Arrays, kept: Arrays, sizes: Collection[int]) -> Program:
        """The program of a form, with a recording for each of these sizes of stretches."""
        if form in self.programs and set(sizes) <= set(self.programs[form].runs):
            return self.programs[form]
        with RECORDING_LOCK:
            if form not in self.programs:
                self.programs[form] = Program(Seat.of(job, start, kept, draw(job)), form.seats)
            program = self.programs[form]
            with CAPTURE_LOCK.eager():
                functions = self.functions.find(form, job, program)
            for steps in sorted(set(sizes) - set(program.runs)):
                program.runs[steps] = self.record(form, job, program, functions, steps)
        return program

    def record(
        self, form: Form, job: Job, program: Program, functions: StretchFunctions, steps: int
    ) -> Callable[[], None]:
        """A stretch of steps as a CUDA graph, or as a function if it cannot be captured."""
        if self.stream is None or not functions.capture:
            return partial(run_eagerly, program, functions, steps)
        try:
            with showing_lack_of_memory():
                with CAPTURE_LOCK.eager():
                    program.try_out(functions, steps)  # libraries choose their kernels now, not in a capture
                    self.stream.synchronize()
                return captured(partial(program.run, functions, steps), self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return partial(run_eagerly, program, self.functions.stop_capturing(form, job, error), steps)


def run_eagerly(program: Program, functions: StretchFunctions, steps: int) -> None:
    """Runs a stretch of steps that is not captured."""
    with CAPTURE_LOCK.eager():
        program.run(functions, steps)
