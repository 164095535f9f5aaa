"""One run on several workers: `python -m benchmarks.workers [OPTIONS]`.

It measures three things. Time: the same rounds with one worker and with several, turn and turn about, so that
other work on the machine slows both. Memory: the peak of a worker with more and more clients. And it computes
how well the steps of the paper's rounds can be divided among GPUs.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from benchmarks.benchmark import CLIENTS, CPU, LR, PER_ROUND, overlapping, synthetic, teller
from fedhassle.cli.main import guarded
from fedhassle.data.catalogue import CATALOGUE, without_pixels
from fedhassle.data.dataset import Dataset
from fedhassle.data.split.draw import split
from fedhassle.data.split.split import Split
from fedhassle.engine.cores import on_cores
from fedhassle.engine.device import Engine
from fedhassle.engine.ray_federation import RayFederation, balanced, totals
from fedhassle.engine.rounds import Federation, Plan, Round, federate, select, takes_part
from fedhassle.engine.simulator import Simulator, clients_of
from fedhassle.engine.trainer import steps
from fedhassle.files import write_json
from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.nets import NETS, Net
from fedhassle.provenance import hardware, versions
from fedhassle.terminal import say

ENGINE = Engine(torch.device("cpu"))
BUSY = 5_000_000  # additions
ROUNDS = 200  # of the paper, for the balance


class Tiny(nn.Module):
    """A linear network, so that clients are many and cheap."""

    def __init__(self, shape: tuple[int, int, int], classes: int, width: float = 1.0) -> None:
        super().__init__()
        self.output = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        z: Tensor = self.output(x.flatten(1))
        return z


# Time


def busy(actor: object = None) -> float:
    """Seconds of some work on one core, as a call to an actor."""
    clock = time.perf_counter()
    total = 0
    for i in range(BUSY):
        total += i
    return time.perf_counter() - clock


def possible_here(federation: RayFederation) -> float:
    """How much faster the workers do the same work at once than in turns: less on a busy machine."""
    import ray

    actors = list(federation.workers.values())
    clock = time.perf_counter()
    for actor in actors:
        ray.get(actor.__ray_call__.remote(busy))
    middle = time.perf_counter()
    asked(federation, busy)
    return (middle - clock) / (time.perf_counter() - middle)


class Turn(NamedTuple):
    """One round on one federation."""

    done: Round
    seconds: float
    busiest: (
        float  # CPU seconds of the worker with most of them, which other work on the machine hardly changes
    )


def turns(method: Method, federations: Sequence[Federation], plan: Plan) -> Iterator[list[Turn]]:
    """Each round on one federation after the other."""
    going = [federate(method, federation, plan, method.initial(0)) for federation in federations]
    for _ in range(plan.rounds):
        yield [one_turn(*both) for both in zip(going, federations, strict=True)]


def one_turn(rounds: Iterator[Round], federation: Federation) -> Turn:
    """The next round."""
    before, clock = cpu_seconds(federation), time.perf_counter()
    done = next(rounds)
    seconds = time.perf_counter() - clock
    return Turn(done, seconds, max(b - a for a, b in zip(before, cpu_seconds(federation), strict=True)))


def cpu_seconds(federation: Federation) -> list[float]:
    """CPU seconds of each worker so far; without workers, of this process."""
    if not isinstance(federation, RayFederation):
        return [time.process_time()]
    return asked(federation, lambda actor: time.process_time())


def asked(federation: RayFederation, question: Callable[[Any], float]) -> list[float]:
    """The answers of all workers to a question."""
    import ray

    found: list[float] = ray.get([a.__ray_call__.remote(question) for a in federation.workers.values()])
    return found


def measure_time(workers: int, rounds: int) -> dict[str, Any]:
    """Seconds of HASSLE rounds in this process, with one worker and with several, on one thread each."""
    like = CATALOGUE["fmnist"]
    dataset = synthetic("fmnist", CPU.images)
    parts = split(dataset.y_train, clients=CLIENTS, labels="10%")
    net = Net(NETS["lenet"], like.shape, like.classes)
    method = METHODS["hassle"](net=net, epochs=CPU.epochs, lr=LR, residual_steps=CPU.residual_steps)  # type: ignore[call-arg]
    common = dataset, parts, 0, ENGINE, 1
    with ExitStack() as stack:
        stack.enter_context(on_cores(1))
        one, several = (
            stack.enter_context(closing(RayFederation(*common, number))) for number in (1, workers)
        )
        machine, found = [], []
        for turn in turns(method, [Simulator(*common), one, several], Plan(rounds + 1, PER_ROUND)):
            found.append(turn)
            machine.append(possible_here(several))
    states = [[one.done.state for one in turn] for turn in found]
    equal = all(same(state, alone) for alone, *others in states for state in others)
    names = ("in one process", "1 worker", f"{workers} workers")
    measured = found[1:]  # the first warms up
    seconds = {name: [turn[i].seconds for turn in measured] for i, name in enumerate(names)}
    ratios = [turn[1].seconds / turn[2].seconds for turn in measured]
    cpu = [turn[1].busiest / turn[2].busiest for turn in measured]
    counts = [[steps(method, c, turn[0].done.t) for c in turn[0].done.clients] for turn in found[1:]]
    possible = [sum(each) / max(totals(each, balanced(each, workers))) for each in counts]
    return {
        "workers": workers,
        "seconds": seconds,
        "same_bits": equal,
        "ratios": ratios,
        "cpu_ratios": cpu,
        "possible_by_balance": possible,
        "possible_on_this_machine": machine[1:],
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if two states have the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Memory


def peak_megabytes(actor: object = None) -> float:
    """The peak of this process's memory; also as a call to an actor."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def measure_memory(clients: int, per_round: int, workers: int, rounds: int) -> dict[str, Any]:
    """The peak memory of each worker after FedAvg rounds of a tiny network with many clients."""
    dataset = tiny_dataset()
    parts = overlapping(clients, 10, len(dataset.y_train))
    method = METHODS["fedavg"](net=Net(Tiny, dataset.shape, dataset.classes), batch=10, epochs=1, lr=LR)
    with closing(RayFederation(dataset, parts, 0, ENGINE, 1, workers)) as federation:
        before = peaks(federation)
        began = time.perf_counter()
        for _ in federate(method, federation, Plan(rounds, per_round), method.initial(0)):
            pass
        seconds = (time.perf_counter() - began) / rounds
        return {
            "clients": clients,
            "clients_per_round": per_round,
            "megabytes_at_start": before,
            "megabytes": peaks(federation),
            "driver_megabytes": peak_megabytes(),
            "seconds_per_round": seconds,
        }


def peaks(federation: RayFederation) -> list[float]:
    """The peak memory of each worker."""
    return [round(found, 1) for found in asked(federation, peak_megabytes)]


def tiny_dataset() -> Dataset:
    """Random images of 4×4 pixels."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2_000, 4, 4, 1), dtype=np.uint8)
    y = np.arange(len(x)) % 10
    return Dataset("tiny", x, y, x[:1], y[:1], tuple("0123456789"), "lenet", (0.5,), (0.25,), False, 0)


# Balance


def balance(name: str, numbers: Sequence[int]) -> dict[str, Any]:
    """By number of workers, over the rounds of the paper on CIFAR-10: how many times fewer steps in a row."""
    entry = CATALOGUE["cifar10"]
    parts: Split = split(without_pixels(entry).y_train, kind="authors", clients=CLIENTS, labels="10%", seed=0)
    method = METHODS[name](net=Net(NETS["resnet8"], entry.shape, entry.classes))
    method = method.for_run(ROUNDS, clients_of(parts), PER_ROUND)
    loads: dict[int, list[int]] = {number: [] for number in numbers}
    for t in range(2, ROUNDS + 1):
        drawn = select(clients_of(parts), Plan(ROUNDS, PER_ROUND, 0), t)
        costs = [steps(method, client, t) for client in drawn if takes_part(method, client, t)]
        for number in numbers:
            loads[number].append(max(totals(costs, balanced(costs, number)), default=0))
    means = {number: statistics.fmean(each) for number, each in loads.items()}
    return {
        "steps": {str(number): round(mean, 1) for number, mean in means.items()},
        "times_fewer": {str(number): round(means[1] / mean, 2) for number, mean in means.items()},
    }


# The command


@contextmanager
def cluster(cores: int) -> Iterator[None]:
    """A cluster on this machine that lends more cores than there may be: federations train in turns."""
    import ray

    ray.init(
        "local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        yield
    finally:
        ray.shutdown()


def main(
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds to time.")] = 8,
    clients: Annotated[
        str, typer.Option(help="Numbers of clients to measure memory with.")
    ] = "100,10000,100000",
    per_round: Annotated[str, typer.Option(help="Clients per round, for each of them.")] = "100,10000,10000",
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Measure one run on several workers of this machine's CPU."""
    console = Console()
    tell = teller(console)
    report: dict[str, Any] = {
        "versions": versions(),
        "hardware": hardware(ENGINE.device, 1, workers),
        "balance": {name: balance(name, (1, 2, 4, 8)) for name in ("fedavg", "hassle", "hassle+")},
    }
    for name, found in report["balance"].items():
        tell(f"{name} on CIFAR-10, times fewer steps in a row by workers: {found['times_fewer']}")
    with cluster(2 * workers + 1):
        timed = report["time"] = measure_time(workers, rounds)
        for name, seconds in timed["seconds"].items():
            tell(f"{name}: {described(seconds)} s per round")
        tell(f"1 worker / {workers} workers: {described(timed['ratios'])}; same bits: {timed['same_bits']}")
        tell(f"the same for CPU seconds of the busiest worker: {described(timed['cpu_ratios'])}")
        tell(f"possible by the balance of steps: {described(timed['possible_by_balance'])}")
        tell(f"possible on this machine now: {described(timed['possible_on_this_machine'])}")
        report["memory"] = []
        for many, drawn in zip(clients.split(","), per_round.split(","), strict=True):
            one = measure_memory(int(many), int(drawn), workers, 2)
            report["memory"].append(one)
            tell(f"{one['clients']:,} clients, {one['clients_per_round']:,} per round: {one}")
    if as_json is not None:
        write_json(as_json, report)
        say(console, f"figures  {as_json}")


def described(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
