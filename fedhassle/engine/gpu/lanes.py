"""A pool of lanes that trains the clients of a round on one GPU.

Jobs of a client that do not depend on each other form separate chains. One thread keeps all lanes busy: it
gives each lane its next stretch of steps as soon as the lane can take it, and never waits for a single lane.
Lanes also run on a CPU, in turns, so that everything but the capture is tested there.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fedhassle.capture import CAPTURE_LOCK
from fedhassle.engine.client import Trained, Visit, collect, run_jobs
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.recording import RECORDING_LOCK, FunctionsByShape, Lane, Trimmer
from fedhassle.engine.gpu.shapes import functions_of, with_message
from fedhassle.engine.gpu.streams import FIRST, STREAMS, USUAL
from fedhassle.engine.job import Job
from fedhassle.engine.labels import no_labels
from fedhassle.errors import UserError, require
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

SHARE = 0.8  # of the free memory that lanes may take
PAUSE = 20e-6  # seconds between two checks of lanes that are all busy

Example = tuple[Job, Arrays]
"""A job of some shape, and the arrays that its client keeps."""


# Chains of jobs


class Chain(NamedTuple):
    """Jobs of one client that depend on each other, as a visit of their own; chains are independent."""

    client: int  # index of the client's visit
    visit: Visit
    shapes: tuple[Hashable, ...] = ()  # of its jobs, once they are trimmed


class Component(NamedTuple):
    """Jobs that depend on each other, and the names that they train."""

    names: set[str]
    places: list[int]  # indices of the jobs in their visit


def chains(visits: Sequence[Visit]) -> list[Chain]:
    """The chains of all clients."""
    return [Chain(i, part) for i, visit in enumerate(visits) for part in connected(visit)]


def connected(visit: Visit) -> list[Visit]:
    """Splits a client's jobs into chains: jobs depend on each other if they train a common name.

    All jobs of a client that keeps arrays form one chain. Labels given before training are counted by
    `joined`.
    """
    components: list[Component] = []
    for place, job in enumerate(visit.jobs):
        new = Component(set(job.phase.trained), [place])
        met = [component for component in components if visit.kept or component.names & new.names]
        for component in met:
            components.remove(component)
            new = Component(new.names | component.names, new.places + component.places)
        components.append(new)
    empty = visit.update._replace(labelling=no_labels(visit.update.labelling.device))
    in_order = [tuple(visit.jobs[place] for place in sorted(component.places)) for component in components]
    return [Visit(jobs, visit.kept, empty) for jobs in in_order]


def joined(visit: Visit, parts: Sequence[Trained]) -> Trained:
    """Joins the results of a client's chains."""
    update = visit.update
    kept = visit.kept
    for part, memory in parts:
        update = update._replace(
            arrays=update.arrays | part.arrays,
            losses=update.losses | part.losses,
            labelling=update.labelling + part.labelling,
        )
        kept = memory
    names = dict.fromkeys(name for job in visit.jobs for name in job.phase.trained)
    arrays = {name: update.arrays[name] for name in names}
    losses = {name: update.losses[name] for name in names}
    return update._replace(arrays=arrays, losses=losses), kept


def run_chain(chain: Chain, lane: Lane) -> Generator[None, None, Trained]:
    """Runs the jobs of a chain on a lane, as `client.run_jobs` does; pauses after each stretch of steps."""
    jobs, kept, update = chain.visit
    for job, shape in zip(jobs, chain.shapes, strict=True):
        buffers = yield from lane.run_job(job, shape, job.message | update.arrays | kept, kept)
        update, kept = collect(job, buffers, update, kept)
    return update, kept


# Lanes


class ChainQueue:
    """Chains that wait for a lane, run on one, or are done."""

    def __init__(self, work: Sequence[Chain], longest_first: Sequence[int]) -> None:
        self.work = work
        self.waiting = deque(longest_first)  # indices in `work`, here and below
        self.busy: dict[Lane, tuple[int, Generator[None, None, Trained]]] = {}
        self.done: dict[int, Trained] = {}

    def advance(self, lane: Lane) -> bool:
        """Queues the next stretch of a lane's chain, or of a waiting chain; False if nothing was queued."""
        if lane.full() or (lane not in self.busy and not self.waiting):
            return False
        if lane not in self.busy:
            i = self.waiting.pop() if lane.shortest else self.waiting.popleft()
            self.busy[lane] = i, run_chain(self.work[i], lane)
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
        self.max_lanes = max(1, engine.lanes)
        self.seconds: dict[Hashable, float] = {}  # of one step per shape, with the device to itself

    def train(self, visits: Sequence[Visit]) -> list[Trained]:
        """Trains clients and returns their results in order; the device may still be computing them."""
        while True:
            try:
                return self._train(visits)
            except torch.OutOfMemoryError as error:  # a visit has no side effects, so it can run again
                if len(self.lanes) <= 1:
                    raise UserError(
                        "not enough GPU memory to train one client: try a smaller method.batch, "
                        "precision=bf16, or device=cpu"
                    ) from error
            self._halve()  # not in the handler, where the traceback keeps the memory alive

    def _train(self, visits: Sequence[Visit]) -> list[Trained]:
        alone = [i for i, visit in enumerate(visits) if any(job.draws_globally for job in visit.jobs)]
        with CAPTURE_LOCK.eager():
            work = [self._trimmed(chain) for chain in chains(visits) if chain.client not in alone]
        self._prepare_lanes(work)
        done = self._side_by_side(work)
        parts: list[list[Trained]] = [[] for _ in visits]
        for i, chain in enumerate(work):
            parts[chain.client].append(done[i])
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

    def _side_by_side(self, work: Sequence[Chain]) -> dict[int, Trained]:
        """Runs chains on all lanes and returns their results by index; a free lane takes the next chain.

        Every other lane takes the shortest chain instead of the longest. Its kernels have a higher priority
        and fill the gaps that the other lanes leave.
        """
        queue = ChainQueue(work, sorted(range(len(work)), key=lambda i: -self._cost(work[i])))
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

    def _prepare_lanes(self, work: Sequence[Chain]) -> None:
        """Records new shapes on the first lane, and opens as many lanes as work and memory allow."""
        if not work:
            return
        new = self._new_shapes(work)
        if self.lanes:
            self._record_all(new)
        else:
            self._open_first(new)
        while len(self.lanes) < min(self.max_lanes, len(work)):
            self.lanes += self._open_lane()

    def _new_shapes(self, work: Sequence[Chain]) -> dict[Hashable, Example]:
        """A job of each shape that is not recorded yet and worth recording."""
        return {
            shape: (job, chain.visit.kept)
            for chain in work
            for shape, job in zip(chain.shapes, chain.visit.jobs, strict=True)
            if shape not in self.seconds and self.functions.worth_recording(shape, job)
        }

    def _open_first(self, new: Mapping[Hashable, Example]) -> None:
        """Opens the first lane and records on it; the memory that this takes limits the number of lanes."""
        before = self._memory_in_use()
        self.lanes = self._open_lane()
        self._record_all(new)
        taken = self._memory_in_use() - before
        if taken > 0:
            room = int(SHARE * torch.cuda.mem_get_info(self.engine.device)[0] / taken)
            self.max_lanes = min(self.max_lanes, 1 + room)

    def _record_all(self, new: Mapping[Hashable, Example]) -> None:
        """Records each of these shapes on the first lane, and stores the seconds of a step."""
        self.seconds |= {shape: self._record(job, shape, kept) for shape, (job, kept) in new.items()}

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

    def _record(self, job: Job, shape: Hashable, kept: Arrays) -> float:
        """Records a job on the first lane and returns the seconds of a step."""
        lane = self.lanes[0]
        lane.catch_up()
        with lane.current():
            program = lane.program(job, shape, job.message | kept, kept)
            if lane.stream is None:
                return 1.0
            steps = max(program.runs)
            lane.stream.synchronize()
            clock = time.perf_counter()
            program.runs[steps]()
            lane.stream.synchronize()
            return (time.perf_counter() - clock) / steps

    def _cost(self, chain: Chain) -> float:
        """Estimated seconds of a chain; a step that is not recorded counts like the longest one."""
        most = max(self.seconds.values(), default=1.0)
        shaped = zip(chain.visit.jobs, chain.shapes, strict=True)
        return sum(job.steps * self.seconds.get(shape, most) for job, shape in shaped)

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

    def _halve(self) -> None:
        """Closes all lanes, returns their memory, and allows half as many."""
        self.max_lanes = len(self.lanes) // 2
        log.warning("out of memory: repeating the round with %d of %d lanes", self.max_lanes, len(self.lanes))
        for lane in self.lanes:
            lane.wait()
        self.lanes = []
        self.seconds = {}
        gc.collect()
        self._memory_in_use()  # returns the memory
