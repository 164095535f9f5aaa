"""Versions and hardware: the things beside its settings that a result depends on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhassle.names import counted, imported
from fedhassle.version import package_version


def versions() -> dict[str, str]:
    """Returns the versions of the software that a result depends on."""
    return {
        "fedhassle": package_version(),
        "code": code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


@cache
def code() -> str:
    """Returns a hash of this package's source: in a checkout, the version says little."""
    home, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        found.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def own_code(name: str) -> str | None:
    """Returns a hash of the file that `module:Name` or `file.py:Name` is from; None if there is none."""
    if ":" not in name:
        return None
    file = getattr(imported(name.rpartition(":")[0]), "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def hardware(device: torch.device, threads: int, workers: int = 1) -> dict[str, Any]:
    """Describes the machine, as far as results and run times depend on it."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": device.type,
        "gpu": gpu,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "workers": workers,
        "system": platform.system(),
    }


def machine(hardware: Mapping[str, Any]) -> str:
    """Returns what decides the run time: the GPU, or the processor and its threads; and several workers."""
    one = str(hardware["gpu"] or f"{hardware['cpu']}, {counted(hardware['threads'], 'thread')}")
    workers = hardware.get("workers", 1)  # not in old summaries
    return one if workers == 1 else f"{workers} × {one}"


@cache
def processor() -> str:
    """Returns the name of the processor, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
