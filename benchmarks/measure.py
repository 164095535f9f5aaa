"""Measurements: seconds of steps and rounds, FLOPs of a step, the device's peak and its memory."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counterparts import counterpart
from benchmarks.plain import Images, Trainer, switches, walk
from benchmarks.report import MedianRange, Timed, median_range
from fedhassle.engine.client import advance, prepare, visit
from fedhassle.engine.cores import on_cores
from fedhassle.engine.job import Job, Samples, Site, draw, to_device
from fedhassle.engine.rounds import Plan, Round, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.method import Client, Method, Phase
from fedhassle.vectors import Arrays

FIRST = 2  # rounds that record and compile steps; from the second on, messages have their final form
TRIES = 2  # times as many rounds as requested, at most, until enough of them record nothing new
PRODUCTS, REPEATS = 20, 5  # matrix products on a GPU per measurement; number of measurements


def synchronise(device: torch.device) -> None:
    """Waits for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_step(step: Callable[[], None], steps: int, repeats: int, device: torch.device) -> list[float]:
    """Seconds of a step, after a warm-up; each measurement waits for the device."""
    for _ in range(steps):
        step()
    seconds = []
    for _ in range(repeats):
        synchronise(device)
        clock = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise(device)
        seconds.append((time.perf_counter() - clock) / steps)
    return seconds


def better_cores(work: Callable[[], None], device: torch.device, threads: int) -> int:
    """1 or `threads`, whichever is faster; on a busy machine one core is, even for large work."""

    def seconds(n: int) -> float:
        with on_cores(n):
            return min(seconds_of_step(work, 1, 2, device))

    return min((1, threads), key=seconds) if device.type == "cpu" and threads > 1 else 1


# The plain loop


class PlainLoop(NamedTuple):
    """Measurement of the plain loop."""

    images: Images
    samples: int  # of its client
    steps: int  # per measurement
    repeats: int
    threads: int  # maximum on a CPU

    def seconds(self, name: str, method: Method, tf32: bool) -> dict[str, MedianRange] | None:
        """Seconds of a step by phase; None if the method has no plain loop."""
        found = {}
        for phase in phases(method):
            trainer = counterpart(name, method, phase, FIRST + 1, self.images.pixels.device)
            if trainer is None:
                return None
            with switches(tf32):
                found[phase.name] = self.seconds_of(trainer, self.given(phase))
        return found

    def given(self, phase: Phase) -> Iterator[tuple[Any, ...]]:
        """Inputs of each step of a phase: a batch of every stream, and further draws."""
        device = self.images.pixels.device
        rows, draws = torch.arange(self.samples, device=device), torch.Generator(device).manual_seed(0)
        walks = [walk(self.images, rows, s.batch, s.views, draws) for s in phase.streams]
        further = [] if phase.draw is None else [drawn(phase.draw, device)]
        return zip(*walks, *further, strict=True)

    def seconds_of(self, trainer: Trainer, given: Iterator[tuple[Any, ...]]) -> MedianRange:
        """Seconds of a step, on a CPU with the faster number of cores."""
        device = self.images.pixels.device

        def step() -> None:
            trainer.step(*next(given))

        with on_cores(better_cores(step, device, self.threads)):
            return median_range(seconds_of_step(step, self.steps, self.repeats, device))


def drawn(draw: Callable[[np.random.Generator], np.ndarray], device: torch.device) -> Iterator[Tensor]:
    """Further draws, one per step."""
    rng = np.random.default_rng(0)
    while True:
        yield to_device(np.asarray(draw(rng), np.float32), device)


def phases(method: Method, t: int = FIRST + 1) -> tuple[Phase, ...]:
    """Phases of all kinds of clients, one per name."""
    found = {phase.name: phase for client in kinds(1) for phase in method.phases(client, t)}
    return tuple(found.values())


def kinds(n: int) -> list[Client]:
    """A client of each kind, with n samples in each part that it has."""
    return [Client("any", n, n), Client("any", n, 0), Client("any", 0, n)]


# Our rounds


def time_rounds(
    method: Method, simulator: Simulator, plan: Plan, everyone: int
) -> tuple[list[Timed], list[Timed]]:
    """Times the first rounds, with `everyone` taking part, and the rounds after them.

    The latter continue until `plan.rounds` of them have recorded nothing new: lanes record each shape of job
    when they first meet it, which may be late for a rare kind of client.
    """
    state = {k: v.to(simulator.trainer.engine.device) for k, v in method.initial(plan.seed).items()}
    first, rounds = [], []
    with on_cores(1), simulator.trainer.engine.active():  # clients train in parallel instead
        for done, timed in clocked(method, simulator, Plan(FIRST, everyone, plan.seed), state, 1):
            first.append(timed)
            state = done.state
        last = plan._replace(rounds=FIRST + TRIES * plan.rounds)
        for _, timed in clocked(method, simulator, last, state, FIRST + 1):
            rounds.append(timed)
            if sum(not r.recordings for r in rounds if r.steps) == plan.rounds:
                break
    return first, rounds


def clocked(
    method: Method, simulator: Simulator, plan: Plan, state: Arrays, first: int
) -> Iterator[tuple[Round, Timed]]:
    """Rounds with their times; each time includes all work on the device."""
    rounds, device = federate(method, simulator, plan, state, first), simulator.trainer.engine.device
    while True:
        before = recordings(simulator)
        synchronise(device)
        clock = time.perf_counter()
        done = next(rounds, None)
        synchronise(device)
        seconds = time.perf_counter() - clock
        if done is None:
            return
        new = abs(recordings(simulator) - before)  # fewer than before if memory ran out
        yield done, Timed(done.t, seconds, dict(steps_of(method, done.clients, done.t)), new)


def recordings(simulator: Simulator) -> int:
    """Number of stretches of steps that the lanes have recorded."""
    lanes = simulator.trainer.lanes.lanes if simulator.trainer.lanes is not None else []
    return sum(len(program.runs) for lane in lanes for program in lane.programs.values())


def steps_of(method: Method, clients: Sequence[Client], t: int) -> Counter[str]:
    """Number of steps of clients in a round, by phase."""
    counted: Counter[str] = Counter()
    for client in clients:
        counted.update({phase.name: phase.length(client) for phase in method.phases(client, t)})
    return counted


def average_steps(method: Method, clients: Sequence[Client], per_round: int) -> dict[str, float]:
    """Expected number of steps of a round, by phase."""
    share = min(1.0, per_round / len(clients))
    return {name: share * n for name, n in steps_of(method, clients, FIRST + 1).items()}


# FLOPs and the device


def flops_of_step(method: Method, simulator: Simulator) -> dict[str, float]:
    """FLOPs of one eager step by phase: of convolutions and matrix products, as PyTorch counts them.

    They are those of the method itself in full precision, without operations that a faster implementation
    adds (padding) or saves.
    """
    rows = torch.arange(min(method.batch, len(simulator.trainer.y)), device=simulator.trainer.y.device)
    y = simulator.trainer.y[rows]
    state = {k: v.to(rows.device) for k, v in method.initial(0).items()}
    found: dict[str, float] = {}
    for client in kinds(len(rows)):
        labelled, unlabelled = (rows[: client.count(part)] for part in ("labelled", "unlabelled"))
        samples = Samples(
            simulator.trainer.images, labelled, y[: len(labelled)], unlabelled, y[: len(unlabelled)]
        )
        site = Site(client, samples, simulator.trainer.views)
        planned = visit(method, site, method.message(state, client, FIRST + 1), None, FIRST + 1, 0)
        for job in planned.jobs:
            if job.phase.name not in found:
                found[job.phase.name] = flops_of(job, planned.kept)
    return found


def flops_of(job: Job, kept: Arrays) -> float:
    """FLOPs of the first step of a job."""
    buffers, schedule = prepare(job, job.message | kept, kept), draw(job).between(0, 1)
    with FlopCounterMode(display=False) as counter:
        advance(job, buffers, schedule)
    return float(counter.get_total_flops())


def samples_of_step(method: Method) -> dict[str, float]:
    """Number of samples in a step, by phase."""
    return {phase.name: float(sum(s.batch for s in phase.streams)) for phase in phases(method)}


def matrix_peak(device: torch.device, side: int, threads: int) -> float:
    """Highest FLOP/s of a square matrix product: bfloat16 on a GPU, float32 on a CPU."""
    gpu = device.type == "cuda"
    draws = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn((side, side), device=device, generator=draws) for _ in range(2)]
    a, b = (matrix.bfloat16() if gpu else matrix for matrix in drawn)

    def multiply() -> None:
        torch.mm(a, b)

    with on_cores(better_cores(multiply, device, threads)):
        seconds = seconds_of_step(multiply, PRODUCTS if gpu else 1, REPEATS, device)
    return float(2 * side**3 / min(seconds))


def reset_memory(device: torch.device) -> None:
    """Frees unused memory, and resets the peak of memory in use."""
    gc.collect()  # recordings and their jobs refer to each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Peak of a GPU's memory in use, in bytes; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
