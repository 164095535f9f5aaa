"""Clocks and counters: seconds of steps and rounds, FLOPs of a step, the device's peak and its memory."""

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
from benchmarks.figures import Spread, Timed, spread
from benchmarks.plain import Images, Trainer, switches, walk
from fedhassle.engine.client import Job, Samples, Site, advance, draw, prepare, to_device, visit
from fedhassle.engine.cores import on_cores
from fedhassle.engine.rounds import Plan, Round, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.method import Client, Method, Phase
from fedhassle.vectors import Arrays

FIRST = 2  # rounds in which steps are recorded and compiled: by the second, messages have their last form
TRIES = 2  # times as many rounds as wanted, at most, until so many of them have recorded nothing new
PRODUCTS, REPEATS = 20, 5  # matrix products on a GPU between two looks at the clock; times that it is done


def synchronise(device: torch.device) -> None:
    """Waits for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_step(step: Callable[[], None], steps: int, repeats: int, device: torch.device) -> list[float]:
    """Seconds of a step after warming up, by clocks that stop when the device has done them all."""
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
    """One core or so many, whichever is faster: on a busy machine one is, however large the work."""

    def seconds(n: int) -> float:
        with on_cores(n):
            return min(seconds_of_step(work, 1, 2, device))

    return min((1, threads), key=seconds) if device.type == "cpu" and threads > 1 else 1


# The plain loop


class PlainLoop(NamedTuple):
    """How the plain loop is measured."""

    images: Images
    samples: int  # of the client that it trains on
    steps: int  # between two looks at the clock
    repeats: int
    threads: int  # on a CPU, at most

    def seconds(self, name: str, method: Method, tf32: bool) -> dict[str, Spread] | None:
        """Seconds of a step by phase; None where nobody has written one for the method."""
        found = {}
        for phase in phases(method):
            trainer = counterpart(name, method, phase, FIRST + 1, self.images.pixels.device)
            if trainer is None:
                return None
            with switches(tf32):
                found[phase.name] = self.seconds_of(trainer, self.given(phase))
        return found

    def given(self, phase: Phase) -> Iterator[tuple[Any, ...]]:
        """What each step of a phase is handed: a batch of every stream, and what else it draws."""
        device = self.images.pixels.device
        rows, draws = torch.arange(self.samples, device=device), torch.Generator(device).manual_seed(0)
        walks = [walk(self.images, rows, s.batch, s.views, draws) for s in phase.streams]
        further = [] if phase.draw is None else [drawn(phase.draw, device)]
        return zip(*walks, *further, strict=True)

    def seconds_of(self, trainer: Trainer, given: Iterator[tuple[Any, ...]]) -> Spread:
        """Seconds of a step, on a CPU on as many cores as suit it better."""
        device = self.images.pixels.device

        def step() -> None:
            trainer.step(*next(given))

        with on_cores(better_cores(step, device, self.threads)):
            return spread(seconds_of_step(step, self.steps, self.repeats, device))


def drawn(draw: Callable[[np.random.Generator], np.ndarray], device: torch.device) -> Iterator[Tensor]:
    """The further draws of step after step."""
    rng = np.random.default_rng(0)
    while True:
        yield to_device(np.asarray(draw(rng), np.float32), device)


def phases(method: Method, t: int = FIRST + 1) -> tuple[Phase, ...]:
    """All that clients do, of whatever kind; a name stands for one phase."""
    found = {phase.name: phase for client in kinds(1) for phase in method.phases(client, t)}
    return tuple(found.values())


def kinds(n: int) -> list[Client]:
    """A client of each kind, with so many samples of a part."""
    return [Client("any", n, n), Client("any", n, 0), Client("any", 0, n)]


# Our rounds


def time_rounds(
    method: Method, simulator: Simulator, plan: Plan, everyone: int
) -> tuple[list[Timed], list[Timed]]:
    """The first rounds, with `everyone` taking part, and those after them.

    The latter go on until `plan.rounds` of them have recorded nothing new: lanes record what they meet for
    the first time, which may be late for a rare kind of client.
    """
    state = {k: v.to(simulator.engine.device) for k, v in method.initial(plan.seed).items()}
    first, rounds = [], []
    with on_cores(1), simulator.engine.active():  # clients train side by side instead
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
    """Rounds, each with the seconds until the device has done all of it."""
    rounds, device = federate(method, simulator, plan, state, first), simulator.engine.device
    while True:
        before = recordings(simulator)
        synchronise(device)
        clock = time.perf_counter()
        done = next(rounds, None)
        synchronise(device)
        seconds = time.perf_counter() - clock
        if done is None:
            return
        new = abs(recordings(simulator) - before)  # fewer than before: memory ran out, all was recorded anew
        yield done, Timed(done.t, seconds, dict(steps_of(method, done.clients, done.t)), new)


def recordings(simulator: Simulator) -> int:
    """How many stretches of steps its lanes have recorded."""
    lanes = simulator.lanes.lanes if simulator.lanes is not None else []
    return sum(len(program.runs) for lane in lanes for program in lane.programs.values())


def steps_of(method: Method, clients: Sequence[Client], t: int) -> Counter[str]:
    """The steps of clients in a round, by phase."""
    counted: Counter[str] = Counter()
    for client in clients:
        counted.update({phase.name: phase.length(client) for phase in method.phases(client, t)})
    return counted


def average_steps(method: Method, clients: Sequence[Client], per_round: int) -> dict[str, float]:
    """The steps by phase of a round on average, whoever is drawn."""
    share = min(1.0, per_round / len(clients))
    return {name: share * n for name, n in steps_of(method, clients, FIRST + 1).items()}


# The work and the device


def flops_of_step(method: Method, simulator: Simulator) -> dict[str, float]:
    """FLOPs of one eager step by phase: of convolutions and matrix products, as PyTorch counts them.

    They are those of the method itself, in full precision: what a faster way to run it adds (padding) or
    leaves out does not count.
    """
    rows = torch.arange(min(method.batch, len(simulator.y)), device=simulator.y.device)
    y = simulator.y[rows]
    state = {k: v.to(rows.device) for k, v in method.initial(0).items()}
    found: dict[str, float] = {}
    for client in kinds(len(rows)):
        labelled, unlabelled = (rows[: client.count(part)] for part in ("labelled", "unlabelled"))
        samples = Samples(simulator.images, labelled, y[: len(labelled)], unlabelled, y[: len(unlabelled)])
        site = Site(client, samples, simulator.views)
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
    """Samples that a step sees, by phase."""
    return {phase.name: float(sum(s.batch for s in phase.streams)) for phase in phases(method)}


def matrix_peak(device: torch.device, side: int, threads: int) -> float:
    """The most FLOPs a second of a square matrix product: bfloat16 on a GPU, float32 on a CPU."""
    gpu = device.type == "cuda"
    draws = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn((side, side), device=device, generator=draws) for _ in range(2)]
    a, b = (matrix.bfloat16() if gpu else matrix for matrix in drawn)

    def multiply() -> None:
        torch.mm(a, b)

    with on_cores(better_cores(multiply, device, threads)):
        seconds = seconds_of_step(multiply, PRODUCTS if gpu else 1, REPEATS, device)
    return float(2 * side**3 / min(seconds))


def forget_memory(device: torch.device) -> None:
    """Gives back what is not used any more, and measures the most in use from here on."""
    gc.collect()  # recordings and their jobs refer to each other
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def most_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that were taken at most."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
