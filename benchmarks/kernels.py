"""Where a step's time goes, kernel by kernel: `python -m benchmarks.kernels [OPTIONS]`, on a GPU.

Records one step of HASSLE with ResNet-8, of a dual and of a residual, on one lane, and profiles its replays.
Each operation stands beside its floor: the time to move its tensors once, or to compute its products. Then
each convolution is timed alone, on inputs that are in no cache.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.benchmark import LR, synthetic, teller, warnings_to
from benchmarks.floors import (
    FORWARD,
    INPUT,
    KINDS,
    WEIGHTS,
    Launch,
    Part,
    Rates,
    Work,
    convolution,
    launches,
    layer_label,
    matched,
    parts,
    replayed,
)
from benchmarks.measure import FIRST
from benchmarks.report import number, plain_table
from fedhassle.cli.main import guarded
from fedhassle.data.catalogue import CATALOGUE
from fedhassle.engine.client import visit
from fedhassle.engine.cores import available_cores
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.graphs import captured
from fedhassle.engine.gpu.operators import convolve_relu
from fedhassle.engine.gpu.program import STRETCH, Program, Seat, StretchInputs
from fedhassle.engine.gpu.recording import FunctionsByShape
from fedhassle.engine.gpu.shapes import functions_of, shape_of
from fedhassle.engine.gpu.trimming import Trimmer
from fedhassle.engine.job import Job, Samples, Site, draw
from fedhassle.engine.trainer import Trainer
from fedhassle.errors import require
from fedhassle.files import write_json
from fedhassle.method import Client
from fedhassle.methods.hassle import Hassle
from fedhassle.nets import NETS, Net
from fedhassle.provenance import hardware, versions
from fedhassle.vectors import Arrays

PHASES = ("labelled", "labelled residual")  # the other side's steps have the same operations
IMAGES = 5_000
REPLAYS = 30  # that are profiled
TIMED = 50  # replays that are timed
CACHE = 200e6  # bytes that a device certainly does not keep between two uses
SETS = 12  # maximum number of inputs that take turns


def main(
    bandwidth: Annotated[float, typer.Option(help="TB/s that the device copies.")] = Rates().bytes / 1e12,
    peak: Annotated[float, typer.Option(help="TFLOP/s of a matrix product.")] = Rates().flops / 1e12,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Fuse kernels.")] = True,
    alone: Annotated[bool, typer.Option(help="Also time each convolution by itself.")] = True,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Compare the kernels of HASSLE's steps with what they need at least."""
    require(torch.cuda.is_available(), "kernels are timed on a GPU, and PyTorch finds no CUDA device here")
    device, console, rates = torch.device("cuda"), Console(width=150), Rates(1e12 * bandwidth, 1e12 * peak)
    tell, engine = teller(console), Engine(device, "bf16", 1, compiled)
    method = Hassle(net=Net(NETS["resnet8"], CATALOGUE["cifar10"].shape, 10), batch=128, lr=LR)
    report: dict[str, Any] = {
        "format": 1,
        "versions": versions(),
        "hardware": hardware(device, available_cores()),
        "rates": rates._asdict(),
        "steps": {},
        "alone": [],
    }
    with warnings_to(console) as warnings, engine.active():
        if alone:
            tell("each convolution alone")
            for measured in convolutions_alone(method, device):
                report["alone"].append(measured.json(rates))
            console.print(alone_table(report["alone"]))
            write(as_json, report | {"warnings": warnings})
        for job, kept in jobs(method, engine):
            if job.phase.name in PHASES:
                tell(f"{job.phase.name}: recording")
                for name, piece in pieces(job, kept, engine):
                    report["steps"][name] = piece.json(rates)
                    console.print(parts_table(name, piece, rates))
                    console.print(kinds_table(name, piece, rates))
                    write(as_json, report | {"warnings": warnings})
        tell("done")


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Writes the figures so far, if there is a file for them."""
    if path is not None:
        write_json(path, report)


# Steps


class Measured(NamedTuple):
    """A recorded piece of a job: a step, or the inputs of a stretch of steps."""

    steps: int  # that it is for
    parts: list[Part]
    microseconds: float  # of a replay, without the profiler

    def json(self, rates: Rates) -> dict[str, Any]:
        """The form in the JSON file, for all its steps together."""
        lines = [
            {
                "kind": part.kind,
                "label": part.label,
                "kernels": part.kernels,
                "microseconds": part.microseconds,
                "work": None if part.work is None else part.work._asdict(),
                "floor": None if part.work is None else part.work.floor(rates),
            }
            for part in self.parts
        ]
        return {"steps": self.steps, "microseconds": self.microseconds, "parts": lines}


def pieces(job: Job, kept: Arrays, engine: Engine) -> Iterator[tuple[str, Measured]]:
    """The inputs of a stretch of a job, and one of its steps."""
    with on_a_stream():
        job = Trimmer(engine).trimmed(job, functions_of(job, kept), kept)
        weights = min(len(job.networks[name].parts(job.message[name])[0]) for name in job.phase.trained)
        for name, run in recorded(job, kept, FunctionsByShape(engine)):
            steps = STRETCH if name == "inputs" else 1
            replay = captured(run, torch.cuda.graph_pool_handle())
            microseconds = median_of_replays(replay, TIMED)
            # The work that was captured tells which operation launches which kernel.
            kernels = matched(replayed(profiled(replay, REPLAYS), REPLAYS), profiled(run, 1))
            yield f"{job.phase.name}, {name}", Measured(steps, parts(kernels, weights), microseconds)


def jobs(method: Hassle, engine: Engine) -> list[tuple[Job, Arrays]]:
    """The jobs of a client with labelled and unlabelled images, and the arrays that it keeps."""
    trainer = Trainer(synthetic("cifar10", IMAGES), 0, engine)
    rows = torch.arange(IMAGES // 2, device=engine.device)
    samples = Samples(trainer.images, rows, trainer.y[rows], rows + len(rows), trainer.y[rows + len(rows)])
    client = Client("any", len(rows), len(rows))
    method = method.for_run(1, (client,), 1)
    state = {name: vector.to(engine.device) for name, vector in method.initial(0).items()}
    message = method.message(state, client, FIRST + 1)
    with engine.lowered():
        planned = visit(method, Site(client, samples, trainer.views), message, None, FIRST + 1, 0)
    return [(job, planned.kept) for job in planned.jobs]


def recorded(job: Job, kept: Arrays, functions: FunctionsByShape) -> Iterator[tuple[str, Callable[[], None]]]:
    """The inputs of a stretch and one of its steps, as work that can be captured."""
    program = Program(Seat.of(job, job.message | kept, kept, draw(job)))
    made = functions.find(shape_of(job, kept), job, program)
    first = made.inputs(program.buffers, program.schedule).at(0)
    held: list[StretchInputs] = []

    def prepare() -> None:
        held[:] = [made.inputs(program.buffers, program.schedule)]

    def step() -> None:
        made.step(program.buffers, first)

    for name, run in (("inputs", prepare), ("step", step)):
        for _ in range(3):  # libraries choose their kernels now
            run()
        torch.cuda.synchronize()
        yield name, run


def profiled(run: Callable[[], None], times: int) -> list[Launch]:
    """The kernels of several runs."""
    run()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as trace:
            for _ in range(times):
                run()
            torch.cuda.synchronize()
        trace.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text())["traceEvents"])


def median_of_replays(replay: Callable[[], None], times: int) -> float:
    """Median microseconds of a replay, after a warm-up."""
    for _ in range(5):
        replay()
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
    for mark in marks[:-1]:
        mark.record()
        replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(float(one.elapsed_time(two)) for one, two in pairwise(marks))


# Convolutions alone


class Layer(NamedTuple):
    """A convolution of a network on a batch."""

    x: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


class Alone(NamedTuple):
    """The time of a convolution by itself, in one direction."""

    network: str
    kind: str
    label: str
    layers: int  # in one step
    microseconds: float
    work: Work

    def json(self, rates: Rates) -> dict[str, Any]:
        """The form in the JSON file."""
        floor = self.work.floor(rates)
        share = self.work.flops / (1e-6 * self.microseconds) / rates.flops
        return self._asdict() | {"work": self.work._asdict(), "floor": floor, "share_of_peak": share}


class Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the convolutions that run inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Layer] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        if operation is torch.ops.aten.convolution.default:
            x, kernel, _, stride, padding = args[:5]
            self.layers.append(Layer(tuple(x.shape), tuple(kernel.shape), tuple(stride), tuple(padding)))
        return operation(*args, **(kwargs or {}))


def layers_of(module: nn.Module, shape: tuple[int, int, int], batch: int) -> list[Layer]:
    """The convolutions of a network, without the first: in bfloat16 that is a matrix product."""
    with torch.no_grad(), Convolutions() as found:
        module.eval()(torch.zeros(1, *shape))
    return [layer._replace(x=(batch, *layer.x[1:])) for layer in found.layers[1:]]


def convolutions_alone(method: Hassle, device: torch.device) -> Iterator[Alone]:
    """The convolutions of a dual and of a residual, in all directions, and of the frozen dual."""
    whole, narrow = ("w_S", "r_US")
    for network, name, batch, kinds in (
        ("dual", whole, method.batch, (FORWARD, INPUT, WEIGHTS)),
        ("residual", narrow, method.batch, (FORWARD, INPUT, WEIGHTS)),
        ("frozen dual, ten steps", whole, STRETCH * method.batch, (FORWARD,)),
    ):
        net = method.networks()[name]
        found = sorted(layers_of(net.module(seed=0), net.shape, batch))
        for layer, same in groupby(found):
            count = len(list(same))
            z, work = convolution(*layer)
            for kind in kinds:
                alone = time_alone(layer, z, kind, work.bytes, bool(batch != method.batch), device)
                yield Alone(network, kind, layer_label(*layer[:3]), count, alone, work)


def time_alone(
    layer: Layer, z: Sequence[int], kind: str, moved: float, frozen: bool, device: torch.device
) -> float:
    """Microseconds of a convolution in one direction; a frozen one has its bias and ReLU with it."""
    sets = min(SETS, max(2, math.ceil(CACHE / moved)))
    given = [[drawn(size, device) for size in (layer.x, layer.kernel, z)] for _ in range(sets)]
    bias, held = torch.zeros(z[1], device=device, dtype=torch.bfloat16), list[Any]()
    stride, padding = list(layer.stride), list(layer.padding)
    shared: Any = (None, stride, padding, [1, 1], False, [0, 0], 1)

    def run() -> None:
        held.clear()
        for x, kernel, gradient in given:
            if frozen:
                held.append(convolve_relu(x, kernel, bias, None, stride, padding))
            elif kind == FORWARD:
                held.append(torch.ops.aten.convolution(x, kernel, *shared))
            else:
                wanted = [kind == INPUT, kind == WEIGHTS, False]
                held.append(torch.ops.aten.convolution_backward(gradient, x, kernel, *shared, wanted))

    with on_a_stream():
        run()
        torch.cuda.synchronize()
        return median_of_replays(captured(run, torch.cuda.graph_pool_handle()), TIMED) / sets


@contextmanager
def on_a_stream() -> Iterator[None]:
    """Queues work on a stream of its own inside the block, as a capture needs it."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


def drawn(size: Sequence[int], device: torch.device) -> Tensor:
    """A random tensor in bfloat16 and channels_last order; zeros would be faster than real data."""
    made = torch.randn(tuple(size), device=device).to(torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last)


# Tables


class Line(NamedTuple):
    """Parts of a step that do the same, or are of the same kind."""

    name: str
    parts: int
    kernels: int
    microseconds: float
    floor: float | None  # of those whose work is known; None: of none


def lines(parts: Sequence[Part], rates: Rates, key: Callable[[Part], str], steps: int) -> list[Line]:
    """Parts with the same key together, per step, in the order of the kinds."""
    found = []
    in_order = sorted(parts, key=lambda part: (KINDS.index(part.kind), key(part)))
    for name, group in groupby(in_order, key):
        members = list(group)
        floors = [part.work.floor(rates) for part in members if part.work is not None]
        found.append(
            Line(
                name,
                len(members),
                sum(len(part.kernels) for part in members),
                sum(part.microseconds for part in members) / steps,
                sum(floors) / steps if floors else None,
            )
        )
    return found


def parts_table(name: str, measured: Measured, rates: Rates) -> Table:
    """A line for each different operation."""
    return lines_table(
        f"{name}: operations, µs a step",
        lines(measured.parts, rates, lambda part: f"{part.kind}: {part.label}", measured.steps),
    )


def kinds_table(name: str, measured: Measured, rates: Rates) -> Table:
    """A line for each kind of operation, and one for all."""
    found = lines(measured.parts, rates, lambda part: part.kind, measured.steps)
    floors = [line.floor or 0.0 for line in found]
    total = sum(line.microseconds for line in found)
    operations, kernels = sum(line.parts for line in found), sum(line.kernels for line in found)
    found.append(Line("all kernels", operations, kernels, total, sum(floors)))
    found.append(Line("a replay", 1, kernels, measured.microseconds / measured.steps, None))
    return lines_table(f"{name}: in all, µs a step", found)


def lines_table(title: str, found: Sequence[Line]) -> Table:
    """A table of times and floors."""
    table = plain_table(title, ["", "count", "kernels", "µs", "floor", "time / floor"])
    for line in found:
        floor = "–" if line.floor is None else number(line.floor)
        ratio = number(line.microseconds / line.floor) if line.floor else "–"
        table.add_row(line.name, str(line.parts), str(line.kernels), number(line.microseconds), floor, ratio)
    return table


def alone_table(found: Sequence[dict[str, Any]]) -> Table:
    """A line for each convolution and direction."""
    columns = ["each convolution alone", "direction", "in a step", "µs", "floor", "time / floor", "% of peak"]
    table = plain_table("", columns)
    for line in found:
        table.add_row(
            f"{line['network']}: {line['label']}",
            line["kind"].removeprefix("convolution, "),
            str(line["layers"]),
            number(line["microseconds"]),
            number(line["floor"]),
            number(line["microseconds"] / line["floor"]),
            number(100 * line["share_of_peak"]),
        )
    return table


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
