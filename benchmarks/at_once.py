"""Runs per hour on one device: `python -m benchmarks.at_once [OPTIONS]`.

HASSLE with LeNet on random images of Fashion-MNIST's size, the paper's settings: 1, 4, 8 and 16 runs at once,
as threads of one process and as processes, on a GPU under NVIDIA's MPS. It takes a few minutes. On a CPU,
where runs of one process take turns, only processes are measured: one has all cores, several share them.
`--settings 'method=hassle net=resnet8' --ways threads --counts 1,3` measures a larger network.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.benchmark import synthetic, teller
from fedhassle.cli.main import guarded
from fedhassle.engine.cores import available_cores
from fedhassle.errors import require
from fedhassle.files import write_json
from fedhassle.provenance import hardware, versions
from fedhassle.runs import mps
from fedhassle.runs.events import Event
from fedhassle.runs.processes import in_processes
from fedhassle.runs.run import Run, start_several
from fedhassle.runs.several import in_threads
from fedhassle.settings.build import build_engine
from fedhassle.settings.request import request

ROUNDS = 200  # of a run
WARMUP = {"cpu": 3, "cuda": 10}  # first rounds of each run; on a GPU most steps are recorded in them
HERE = Path(__file__).parent
WAYS = {"threads": in_threads, "processes": in_processes}


def main(
    counts: Annotated[str, typer.Option(help="Runs at once.")] = "1,4,8,16",
    ways: Annotated[str | None, typer.Option(help="threads, processes (default: both on a GPU).")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to count rounds, after the warm-up.")] = 10.0,
    limit: Annotated[float, typer.Option(help="Seconds that a warm-up may take.")] = 180.0,
    images: Annotated[int, typer.Option(help="Random training images.")] = 60_000,
    settings: Annotated[str, typer.Option(help="Settings beside the paper's.")] = "method=hassle",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[Path, typer.Option("--json", help="File to write all figures to.")] = (
        HERE / "results" / "at-once.json"
    ),
) -> None:
    """Measure runs per hour for different numbers of runs at once."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = (ways or ("threads,processes" if device == "cuda" else "processes")).split(",")
    require(set(chosen) <= set(WAYS), f"--ways {ways!r}: choose from {', '.join(WAYS)}")
    pairs = [(way, int(word)) for way in chosen for word in counts.split(",")]
    console = Console()
    tell, found = teller(console), list[dict[str, Any]]()
    report = {
        "format": 1,
        "versions": versions(),
        "hardware": hardware(torch.device(device), available_cores()),
        "settings": settings,
        "mps": mps.available(),
        "ways": found,
    }
    with tempfile.TemporaryDirectory(prefix="at-once-") as folder:
        data = written(Path(folder), images)
        words = [f"data={data}", "net=lenet", f"device={device}", *settings.split()]
        for way, count in pairs:
            runs = prepared(words, count, Path(folder) / str(len(found)))
            found.append({"way": way, "runs": count, **measured(way, runs, seconds, limit)})
            tell(in_words(found[-1], found[0]))
            write_json(as_json, report)
    console.print(f"figures  {as_json}", soft_wrap=True, markup=False, highlight=False)


def written(folder: Path, images: int) -> Path:
    """The file of random images."""
    dataset, path = synthetic("fmnist", images), folder / "random.npz"
    few = dataset.x_train[:1000], dataset.y_train[:1000]
    np.savez(path, x_train=dataset.x_train, y_train=dataset.y_train, x_test=few[0], y_test=few[1])
    return path


def prepared(words: Iterable[str], count: int, folder: Path) -> list[Run]:
    """Runs with these settings that differ by their seeds."""
    requests = [(f"seed-{seed}", request("paper", [*words, f"seed={seed}"])) for seed in range(count)]
    return start_several(requests, folder)


def measured(way: str, runs: list[Run], seconds: float, limit: float) -> dict[str, Any]:
    """Rounds per second and runs per hour of all runs at once; or an error."""
    with contextlib.ExitStack() as stack:
        if way == "threads":
            stack.enter_context(build_engine(runs[0].settings).active())
        elif runs[0].device.type == "cuda":
            stack.enter_context(mps.mps())
        events: Generator[Event] = stack.enter_context(contextlib.closing(WAYS[way](runs, len(runs))))
        return counted_rounds(events, len(runs), WARMUP[runs[0].device.type], seconds, limit)


def counted_rounds(
    events: Iterable[Event], runs: int, warmup: int, seconds: float, limit: float
) -> dict[str, Any]:
    """Rates of the rounds in a time that begins when each run has done its first rounds."""
    begun, rounds = time.monotonic(), Counter[int]()
    ready, before = None, 0
    for event in events:
        now = time.monotonic()
        if event.ended:
            return {"error": f"a run ended: {event.error or 'it has too few rounds'}"}
        rounds[event.run] += event.step is not None
        if ready is None and min(rounds.values()) >= warmup and len(rounds) == runs:
            ready, before = now, rounds.total()
        elif ready is None and now > begun + limit:
            return {"error": f"the first {warmup} rounds took more than {limit:.0f} s"}
        elif ready is not None and now >= ready + seconds:
            rate = (rounds.total() - before) / (now - ready)
            return {
                "warmup": ready - begun,
                "rounds_per_second": rate,
                "runs_per_hour": 3600 * rate / ROUNDS,
            }
    return {"error": "no run began"}


def in_words(one: dict[str, Any], first: dict[str, Any]) -> str:
    """A measurement in a line."""
    what = f"{one['runs']} at once, {one['way']}"
    if "error" in one:
        return f"{what}: {one['error']}"
    times = f", {one['runs_per_hour'] / first['runs_per_hour']:.2f} times one" if "error" not in first else ""
    return f"{what}: {one['runs_per_hour']:.1f} runs per hour{times} (ready after {one['warmup']:.0f} s)"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
