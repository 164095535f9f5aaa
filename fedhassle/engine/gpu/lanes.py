"""A pool of lanes that trains the clients of a round on one GPU.

Chains of jobs train side by side, or in groups that share each kernel. One thread keeps all lanes busy: it
gives each lane its next stretch of steps as soon as the lane can take it, and never waits for a single lane.
Lanes also run on a CPU, in turns, so that everything but the capture is tested there.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fedhassle.capture import CAPTURE_LOCK
from fedhassle.engine.client import Trained, Visit, collect, run_jobs
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.chains import Chain, Form, Group, chains, grouped, joined
from fedhassle.engine.gpu.memory import free_memory, showing_lack_of_memory
from fedhassle.engine.gpu.program import stretches
from fedhassle.engine.gpu.recording import RECORDING_LOCK, FunctionsByShape, Lane
from fedhassle.engine.gpu.shapes import functions_of, with_message
from fedhassle.engine.gpu.stacking import UnstackableError
from fedhassle.engine.gpu.streams import FIRST, STREAMS, USUAL
from fedhassle.engine.gpu.trimming import Trimmer
from fedhassle.engine.job import Job
from fedhassle.errors import UserError, require
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

SHARE = 0.8  # of the memory that is left to a process: what lanes may take
PAUSE = 20e-6  # seconds between two checks of lanes that are all busy

Example = tuple[Job, Arrays]
"""A job of some form, and the arrays that its client keeps."""


def run_group(group: Group, lane: Lane) -> Generator[None, None, list[Trained]]:
    """Runs the jobs of a group on a lane, as `client.run_jobs` does; pauses after each stretch of steps."""
    trained = [(chain.visit.update, chain.visit.kept) for chain in group.chains]
    for place, form in enumerate(group.forms):
        jobs = [chain.visit.jobs[place] for chain in group.chains]
        begun = list(zip(jobs, trained, strict=True))
        starts = [job.message | update.arrays | kept for job, (update, kept) in begun]
        results = yield from lane.run_jobs(jobs, form, starts, [kept for _, kept in trained])
        ended = zip(begun, results, strict=True)
        trained = [collect(job, buffers, *before) for (job, before), buffers in ended]
    return trained


class GroupQueue:
    """Groups of chains that wait for a lane, run on one, or are done."""

    def __init__(self, longest_first: Iterable[Group]) -> None:
        self.waiting = deque(longest_first)
        self.busy: dict[Lane, tuple[Group, Generator[None, None, list[Trained]]]] = {}
        self.done: list[tuple[Chain, Trained]] = []

    def advance(self, lane: Lane) -> bool:
        """Queues the next stretch of a lane's group, or of a waiting one; False if nothing was queued."""
        if lane.full() or (lane not in self.busy and not self.waiting):
            return False
        if lane not in self.busy:
            group = self.waiting.pop() if lane.shortest else self.waiting.popleft()
            self.busy[lane] = group, run_group(group, lane)
        group, training = self.busy[lane]
        try:
            with lane.current():
                next(training)
        except StopIteration as end:
            self.done += zip(group.chains, end.value, strict=True)
            del self.busy[lane]
        return True


class Lanes:
    """A pool of lanes that trains the clients of a round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.functions = FunctionsByShape(engine)
        self.trimmer = Trimmer(engine)
        self.lanes: list[Lane] = []
        self.max_lanes = max(1, engine.lanes)
        self.seats = engine.stack  # of a group
        self.unstackable: set[Hashable] = set()  # shapes whose jobs cannot share kernels
        self.seconds: dict[Form, float] = {}  # of one step of each form, with the device to itself

    def train(self, visits: Sequence[Visit]) -> list[Trained]:
        """Trains clients and returns their results in order; the device may still be computing them."""
        while True:
            try:
                with showing_lack_of_memory():
                    return self._train(visits)
            except torch.OutOfMemoryError as error:  # a visit has no side effects, so it can run again
                if len(self.lanes) <= 1 and self.seats == 1:
                    raise UserError(
                        "not enough GPU memory to train one client: try a smaller method.batch, "
                        "precision=bf16, or device=cpu"
                    ) from error
            self._shrink()  # not in the handler, where the traceback keeps the memory alive

    def _train(self, visits: Sequence[Visit]) -> list[Trained]:
        alone = [i for i, visit in enumerate(visits) if any(job.draws_globally for job in visit.jobs)]
        with CAPTURE_LOCK.eager():
            work = [self._trimmed(chain) for chain in chains(visits) if chain.client not in alone]
        parts: list[list[Trained]] = [[] for _ in visits]
        for chain, trained in self._side_by_side(self._prepared(work)):
            parts[chain.client].append(trained)
        return [
            self._alone(visit) if i in alone else joined(visit, parts[i]) for i, visit in enumerate(visits)
        ]

    def _trimmed(self, chain: Chain) -> Chain:
        """A chain whose jobs receive only the arrays that they read."""
        jobs, kept, _ = chain.visit
        functions = [functions_of(job, kept) for job in jobs]
        trimmed = [self.trimmer.trimmed(job, of, kept) for job, of in zip(jobs, functions, strict=True)]
        shapes = tuple(with_message(of, job) for job, of in zip(trimmed, functions, strict=True))
        return Chain(chain.client, chain.visit._replace(jobs=tuple(trimmed)), shapes)

    def _side_by_side(self, groups: Sequence[Group]) -> list[tuple[Chain, Trained]]:
        """Runs groups on all lanes and returns their results; a free lane takes the next group.

        Every other lane takes the shortest group instead of the longest. Its kernels have a higher priority
        and fill the gaps that the other lanes leave.
        """
        queue = GroupQueue(sorted(groups, key=self._cost, reverse=True))
        with self._ordered():
            while queue.waiting or queue.busy:
                advanced = [queue.advance(lane) for lane in self.lanes]
                if not any(advanced):
                    time.sleep(PAUSE)
        return queue.done

    def _alone(self, visit: Visit) -> Trained:
        """Trains a client whose network draws from the global random state, which all lanes share."""
        self.functions.warn_once(
            "clients train one by one: a layer of the network draws from PyTorch's global random state"
        )
        with CAPTURE_LOCK.eager(), self.engine.lowered():
            return run_jobs(visit)

    def _prepared(self, work: Sequence[Chain]) -> list[Group]:
        """Groups of chains whose jobs are all recorded, as far as they are worth it."""
        groups = grouped(work, self.seats, self.unstackable)
        self._prepare_lanes(groups)
        if any(group.seats > 1 and not self.unstackable.isdisjoint(group.shapes) for group in groups):
            return self._prepared(work)
        return groups

    def _prepare_lanes(self, groups: Sequence[Group]) -> None:
        """Records new forms on the first lane, and opens as many lanes as work and memory allow."""
        if not groups:
            return
        new = self._new_forms(groups)
        if self.lanes:
            self._record_all(new)
        else:
            self._open_first(new)
        while len(self.lanes) < min(self.max_lanes, len(groups)):
            self.lanes += self._open_lane()

    def _new_forms(self, groups: Sequence[Group]) -> dict[Form, Example]:
        """A job of each form that is not recorded yet and worth recording."""
        return {
            form: (job, group.chains[0].visit.kept)
            for group in groups
            for form, job in zip(group.forms, group.chains[0].visit.jobs, strict=True)
            if form not in self.seconds and self.functions.worth_recording(form, job)
        }

    def _open_first(self, new: Mapping[Form, Example]) -> None:
        """Opens the first lane and records on it; the memory that this takes limits the number of lanes."""
        before = self._memory_in_use()
        self.lanes = self._open_lane()
        self._record_all(new)
        taken = self._memory_in_use() - before
        if taken > 0:
            room = int(SHARE * free_memory(self.engine.device) / taken)
            self.max_lanes = min(self.max_lanes, 1 + room)

    def _record_all(self, new: Mapping[Form, Example]) -> None:
        """Records each of these forms on the first lane, and stores the seconds of a step."""
        for form, (job, kept) in new.items():
            try:
                self.seconds[form] = self._record(job, form, kept)
            except UnstackableError as error:
                self.unstackable.add(form.shape)
                self.lanes[0].programs.pop(form)
                log.info("phase %r trains clients one by one: %s", job.phase.name, error)

    def _open_lane(self) -> list[Lane]:
        """A list with one more lane; empty if the GPU has no stream left, and then for good."""
        shortest = len(self.lanes) % 2 == 1
        if self.engine.device.type != "cuda":
            return [Lane(self.functions, None, shortest)]
        stream = STREAMS.take(self.engine.device, FIRST if shortest else USUAL)
        if stream is not None:
            return [Lane(self.functions, stream, shortest)]
        require(bool(self.lanes), "too many runs at once on one GPU: no stream is left for this one")
        self.max_lanes = len(self.lanes)
        return []

    def _record(self, job: Job, form: Form, kept: Arrays) -> float:
        """Records a job on the first lane and returns the seconds of a step."""
        lane = self.lanes[0]
        lane.catch_up()
        with lane.current():
            program = lane.program(job, form, job.message | kept, kept, stretches(job.steps))
            if lane.stream is None:
                return 1.0
            steps = max(program.runs)
            lane.stream.synchronize()
            clock = time.perf_counter()
            program.runs[steps]()
            lane.stream.synchronize()
            return (time.perf_counter() - clock) / steps

    def _cost(self, group: Group) -> float:
        """Estimated seconds of a group; a step that is not recorded counts like the longest one."""
        most = max(self.seconds.values(), default=1.0)
        formed = zip(group.steps, group.forms, strict=True)
        return sum(steps * self.seconds.get(form, most) for steps, form in formed)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Makes lanes wait for work queued before the block, and work queued after it wait for the lanes."""
        for lane in self.lanes:
            lane.catch_up()
        yield
        for lane in self.lanes:
            if lane.stream is not None:
                torch.cuda.current_stream(self.engine.device).wait_stream(lane.stream)

    def _memory_in_use(self) -> int:
        """Bytes in use on the device, after the allocator has returned its cached memory."""
        if self.engine.device.type != "cuda":
            return 0
        with RECORDING_LOCK:  # the allocator cannot return memory during a capture
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved(self.engine.device)

    def _shrink(self) -> None:
        """Closes all lanes, returns their memory, and allows half as many; after the last, no groups."""
        if len(self.lanes) > 1:
            few, many = len(self.lanes) // 2, len(self.lanes)
            log.warning("out of memory: repeating the round with %d of %d lanes", few, many)
            self.max_lanes = few
        else:
            log.warning("out of memory: repeating the round with kernels for one client each (stack=1)")
            self.max_lanes, self.seats = max(1, self.engine.lanes), 1
        for lane in self.lanes:
            lane.wait()
        self.lanes = []
        self.seconds = {}
        gc.collect()
        self._memory_in_use()  # returns the memory
