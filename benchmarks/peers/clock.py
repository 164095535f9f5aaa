"""Seconds of rounds, by the wall and of the CPU, and how a contender reports them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.work import Work
from fedhassle.engine.device import STACK

RESULT = "RESULT "  # before the line with a contender's result


@dataclass(frozen=True)
class How:
    """How a contender runs."""

    processes: int = 1  # that share the device; of ours: workers; of Flower: clients at once
    compile: str = "none"  # mode of torch.compile, of the network's loss
    precision: str = "fp32"  # of matrix products: fp32 or bf16
    stack: int = STACK  # clients of ours that share each kernel
    mps: bool = False  # under NVIDIA's MPS, by which processes use a GPU at the same time


@dataclass
class Clock:
    """Seconds of rounds; between `stop` and `start` nothing counts."""

    device: str
    root: int = field(default_factory=os.getpid)  # the process whose children count, too
    rounds: list[dict[str, float]] = field(default_factory=list)

    def start(self) -> None:
        """Begins a round."""
        synchronise(self.device)
        self._cpu, self._wall = cpu_seconds(self.root), time.perf_counter()

    def stop(self) -> None:
        """Ends a round."""
        synchronise(self.device)
        wall = time.perf_counter() - self._wall
        self.rounds.append({"seconds": wall, "cpu_seconds": cpu_seconds(self.root) - self._cpu})


def synchronise(device: str) -> None:
    """Waits for all work on a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and of its descendants that are alive."""
    ticks, children, spent = os.sysconf("SC_CLK_TCK"), dict[int, list[int]](), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks
    total, left = 0.0, [root]
    while left:
        one = left.pop()
        total += spent.get(one, 0.0)
        left += children.get(one, [])
    return total


def told() -> tuple[Work, How]:
    """The work and how to do it, from the command line of a contender."""
    return read(sys.argv[1])


def written(work: Work, how: How) -> str:
    """A work and how to do it, as JSON."""
    return json.dumps({"work": asdict(work), "how": asdict(how)})


def read(text: str) -> tuple[Work, How]:
    """A work and how to do it that were JSON."""
    given = json.loads(text)
    return Work(**(given["work"] | {"shape": tuple(given["work"]["shape"])})), How(**given["how"])


def command(module: str, work: Work, how: How) -> list[str]:
    """The command that runs a contender in a process of its own."""
    return [sys.executable, "-m", module, written(work, how)]


def report(clock: Clock, work: Work, steps: int, parameters: int, **more: Any) -> None:
    """Prints a contender's result, for the process that started it."""
    memory = torch.cuda.max_memory_reserved() if work.device == "cuda" else None
    result = {
        "warmup": clock.rounds[: work.warmup],
        "rounds": clock.rounds[work.warmup :],
        "steps": steps,
        "parameters": parameters,
        "gpu_memory": memory,
        **more,
    }
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()
