"""Versions and hardware: the things beside its settings that a result depends on."""

from __future__ import annotations

import hashlib
import inspect
import operator
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhassle.errors import UserError
from fedhassle.names import SESSION, counted, imported
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
    """Returns a hash of the file that `module:Name` or `file.py:Name` is from; None if there is none.

    In a notebook it is a hash of the class or function alone.
    """
    if ":" not in name:
        return None
    module, _, attribute = name.rpartition(":")
    found = imported(module)
    if module == SESSION:
        content = source(operator.attrgetter(attribute)(found)).encode()
    elif (file := getattr(found, "__file__", None)) is not None:
        content = Path(file).read_bytes()
    else:
        return None
    return hashlib.sha256(content).hexdigest()[:12]


def source(thing: Any) -> str:
    """Returns the source of a function, or of a class: of its own functions, and the values of its fields.

    Python cannot tell where a class in a notebook begins; of functions it can.
    """
    members = [thing] if inspect.isfunction(thing) else [*vars(thing).values()]
    bare = [getattr(one, "__func__", getattr(one, "fget", one)) for one in members]
    functions = [inspect.unwrap(one) for one in bare if inspect.isfunction(one)]
    written = [one for one in functions if one.__code__.co_filename != "<string>"]  # a dataclass makes others
    fields = [] if inspect.isfunction(thing) else [(k, v) for k, v in vars(thing).items() if is_plain(k, v)]
    try:
        return "\n".join([*map(inspect.getsource, written), repr(fields)])
    except OSError as error:
        raise UserError(
            f"the source of {thing.__qualname__} cannot be read here, so that a run could not tell if it has "
            "changed: write it to a file (in a notebook: %%writefile my_file.py) and import it"
        ) from error


def is_plain(name: str, value: object) -> bool:
    """True for an attribute of a class that a user wrote, and whose repr says all of it."""
    return not name.startswith("__") and isinstance(value, str | int | float | tuple | type(None))


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
