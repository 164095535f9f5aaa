"""Runs per hour on one device: `python -m benchmarks.at_once [OPTIONS]`.

HASSLE with LeNet on random images of Fashion-MNIST's size, the paper's settings: 1, 4, 8 and 16 runs at once,
as threads of one process and as processes under NVIDIA's MPS. On a GPU it takes less than four minutes. On a
CPU, where runs of one process take turns, only processes are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.benchmark import synthetic, teller
from fedhassle.cli.main import guarded
from fedhassle.engine.cores import available_cores
from fedhassle.files import write_json
from fedhassle.provenance import hardware, versions
from fedhassle.reproduce.sharing import CONTROL, mps
from fedhassle.runs.run import Loader, start
from fedhassle.runs.several import train_several
from fedhassle.settings.request import request

ROUNDS = 200  # of a run
WARMUP = 3  # rounds of each run, in which steps are recorded
HERE = Path(__file__).parent


def main(
    counts: Annotated[str, typer.Option(help="Runs at once.")] = "1,4,8,16",
    seconds: Annotated[float, typer.Option(help="Seconds to count rounds, after the warm-up.")] = 10.0,
    limit: Annotated[float, typer.Option(help="Seconds that a warm-up may take.")] = 60.0,
    images: Annotated[int, typer.Option(help="Random training images.")] = 60_000,
    settings: Annotated[str, typer.Option(help="Settings beside the paper's.")] = "method=hassle",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[Path, typer.Option("--json", help="File to write all figures to.")] = (
        HERE / "results" / "at-once.json"
    ),
) -> None:
    """Measure runs per hour for different numbers of runs at once."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    numbers = [int(word) for word in counts.split(",")]
    ways = [(1, n) for n in numbers if n == 1 or device == "cuda"] + [(n, 1) for n in numbers if n > 1]
    console = Console()
    tell, found = teller(console), list[dict[str, Any]]()
    report = {
        "format": 1,
        "versions": versions(),
        "hardware": hardware(torch.device(device), available_cores()),
        "settings": settings,
        "mps": shutil.which(CONTROL) is not None,
        "ways": found,
    }
    with tempfile.TemporaryDirectory(prefix="at-once-") as folder:
        data = written(Path(folder), images)
        words = [*settings.split(), f"data={data}", "net=lenet", f"device={device}", "threads=1"]
        for processes, threads in ways:
            one = measured(processes, threads, [*words, "compile=false"], Path(folder), seconds, limit)
            found.append({"processes": processes, "threads": threads, **one})
            tell(in_words(found[-1], found[0]))
            write_json(as_json, report)
    console.print(f"figures  {as_json}", soft_wrap=True, markup=False, highlight=False)


def written(folder: Path, images: int) -> Path:
    """The file of random images."""
    dataset, path = synthetic("fmnist", images), folder / "random.npz"
    few = dataset.x_train[:1000], dataset.y_train[:1000]
    np.savez(path, x_train=dataset.x_train, y_train=dataset.y_train, x_test=few[0], y_test=few[1])
    return path


def measured(
    processes: int, threads: int, words: Sequence[str], folder: Path, seconds: float, limit: float
) -> dict[str, Any]:
    """Rounds per second and runs per hour of some processes with some threads each; or an error."""
    shared = mps() if processes > 1 and shutil.which(CONTROL) else contextlib.nullcontext()
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    with shared, contextlib.ExitStack() as stack:
        for k in range(processes):
            given = json.dumps({"threads": threads, "words": words, "seed": k * threads})
            command = [sys.executable, "-m", "benchmarks.at_once", "--worker", given]
            environment = os.environ | {"TMPDIR": str(folder)}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(end, process)
            threading.Thread(target=listen, args=(k, process.stdout, lines), daemon=True).start()
        begun = time.monotonic()
        rounds, ready = Counter[tuple[int, str]](), None
        while ready is None or time.monotonic() < ready + seconds:
            if ready is None and time.monotonic() > begun + limit:
                return {"error": f"the first {WARMUP} rounds took more than {limit:.0f} s"}
            with contextlib.suppress(queue.Empty):
                k, line = lines.get(timeout=0.05)
                if not line:
                    return {"error": f"process {k} ended"}
                rounds[k, line] += 1
            warm = sum(count >= WARMUP for count in rounds.values())
            if ready is None and warm == processes * threads:
                ready, before = time.monotonic(), rounds.total()
        rate = (rounds.total() - before) / (time.monotonic() - ready)
    return {"warmup": ready - begun, "rounds_per_second": rate, "runs_per_hour": 3600 * rate / ROUNDS}


def listen(k: int, output: IO[str] | None, lines: queue.SimpleQueue[tuple[int, str]]) -> None:
    """Passes the lines of a process on, and an empty one at its end."""
    for line in output or ():
        lines.put((k, line))
    lines.put((k, ""))


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process."""
    process.kill()
    process.wait()


def worker(given: str) -> None:
    """Trains runs at once, and prints the number of the run after each of its rounds."""
    told, load = json.loads(given), Loader()
    threads, seed = told["threads"], told["seed"]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            start(request("paper", told["words"], {"seed": seed + k}), Path(folder) / str(k), load)
            for k in range(threads)
        ]
        for event in train_several(runs, threads):
            if event.error is not None:
                raise event.error
            if event.step is not None:
                sys.stdout.write(f"{event.run}\n")
                sys.stdout.flush()


def in_words(one: dict[str, Any], first: dict[str, Any]) -> str:
    """A measurement in a line."""
    what = f"{one['processes']} processes" if one["processes"] > 1 else f"1 process, {one['threads']} at once"
    if "error" in one:
        return f"{what}: {one['error']}"
    times = f", {one['runs_per_hour'] / first['runs_per_hour']:.2f} times one" if "error" not in first else ""
    return f"{what}: {one['runs_per_hour']:.1f} runs per hour{times} (ready after {one['warmup']:.0f} s)"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
        sys.exit()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
