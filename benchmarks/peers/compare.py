"""Runs the contenders of a part in turn, each in a process of its own, and compares their times."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers.clock import RESULT, command
from benchmarks.peers.parts import Contender, Part
from benchmarks.peers.work import Work
from benchmarks.report import memory, number, plain_table, with_range
from fedhassle.engine.cores import available_cores
from fedhassle.errors import UserError
from fedhassle.files import write_json
from fedhassle.provenance import hardware, versions
from fedhassle.runs import mps

Result = dict[str, Any]

TAIL = 2000  # characters of a failed contender's output that are kept


def compare(part: Part, path: Path, limit: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measures a part and returns the report, which is also written to a file after each contender."""
    device = torch.device(part.work.device)
    skipped = {one.name: missing(one) for one in part.contenders if missing(one)}
    for name, package in skipped.items():
        tell(f"{name}: skipped, since {package} is not installed")
    report: dict[str, Any] = {
        "format": 1,
        "part": part.about,
        "published": part.published,
        "versions": versions(),
        "hardware": hardware(device, available_cores()),
        "work": asdict(part.work) | {"steps": part.work.steps},
        "skipped": skipped,
    }
    results: dict[str, list[Result]] = {}
    present = [one for one in part.contenders if one.name not in skipped]
    for one, result in in_turn(present, part.work, part.repeats, limit):
        results.setdefault(one.name, []).append(result)
        tell(f"{one.name}: {summed_up(result)}")
        report |= {"contenders": results, "figures": figures(results, part.contenders[0].name)}
        write_json(path, report)
    return report


def missing(contender: Contender) -> str:
    """The first package that a contender needs and that is not installed; empty if there is none."""
    if contender.how.mps and not mps.available():
        return mps.CONTROL
    return next((name for name in contender.needs if importlib.util.find_spec(name) is None), "")


def in_turn(
    contenders: Sequence[Contender], work: Work, repeats: int, limit: float
) -> Iterator[tuple[Contender, Result]]:
    """Results of the contenders in turn; a contender that failed is not started again."""
    failed: set[str] = set()
    for _ in range(repeats):
        for one in contenders:
            if one.name not in failed:
                result = measured(one, work, limit) | {"load": os.getloadavg()}
                if "error" in result:
                    failed.add(one.name)
                yield one, result


def measured(contender: Contender, work: Work, limit: float) -> Result:
    """The result of a contender, under MPS if that is how it runs."""
    try:
        with mps.mps() if contender.how.mps else contextlib.nullcontext():
            return result_of(command(contender.module, work, contender.how), limit)
    except UserError as error:  # of MPS
        return {"error": str(error)}


def result_of(started: Sequence[str], limit: float) -> Result:
    """The result that a command prints, or its error; the command may take `limit` seconds."""
    process = subprocess.Popen(
        started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:  # Ctrl-C, too: its processes are in a group of their own
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return {"error": f"took more than {limit:.0f} s"}
        raise
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}", "output": output[-TAIL:]}
    found: Result = json.loads(lines[-1].removeprefix(RESULT))
    return found


def summed_up(result: Result) -> str:
    """A result in a few words."""
    if "error" in result:
        return f"failed: {result['error']}"
    seconds = [one["seconds"] for one in result["rounds"]]
    return f"{statistics.median(seconds):.3g} s per round, {result['steps']:,} steps"


def figures(results: dict[str, list[Result]], reference: str) -> dict[str, Any]:
    """Seconds and CPU seconds of a round of each contender, and how many times as long as ours they are."""
    found: dict[str, Any] = {}
    for name, mine in results.items():
        done = [result for result in mine if "error" not in result]
        if not done:
            found[name] = {"error": mine[-1]["error"]}
            continue
        found[name] = {"steps": done[-1]["steps"], "gpu_memory": done[-1]["gpu_memory"]}
        for key in ("seconds", "cpu_seconds"):
            each = [median_of(result, key) for result in done]
            base = [median_of(result, key) for result in results[reference] if "error" not in result]
            pairs = zip(each, base, strict=False)
            ratios = [a / b for a, b in pairs if b]
            found[name] |= {key: spread(each), f"{key}_over_ours": spread(ratios) if ratios else None}
    return found


def median_of(result: Result, key: str) -> float:
    """Median over the timed rounds of a result."""
    return float(statistics.median(one[key] for one in result["rounds"]))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest and highest of some values, with the values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}


def table(report: dict[str, Any]) -> Table:
    """The figures as a table with a line per contender."""
    columns = ["", "s per round", "times ours", "CPU s per round", "times ours", "steps", "GPU memory"]
    made = plain_table(report["part"], columns)
    for name, one in report.get("figures", {}).items():
        if "error" in one:
            made.add_row(name, one["error"])
            continue
        pairs = [
            cell
            for key in ("seconds", "cpu_seconds")
            for cell in (with_range(one[key]), ratio(one[f"{key}_over_ours"]))
        ]
        made.add_row(name, *pairs, number(one["steps"]), memory(one["gpu_memory"]))
    return made


def ratio(found: dict[str, Any] | None) -> str:
    """A ratio with its range; a dash if there is none."""
    return "–" if found is None else with_range(found)


def show(report: dict[str, Any], path: Path, console: Console) -> None:
    """Prints the table of a report."""
    console.print(table(report))
    for line in (report["published"], f"figures  {path}"):
        if line:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
