"""A Ray cluster: joining one or starting one, its machines, and the resources that work on it takes.

Ray is imported inside the functions: it reads its environment when it is first imported, and it is an extra.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from fedhassle.engine.cores import available_cores
from fedhassle.errors import UserError, first_line, require
from fedhassle.names import counted

LOCAL, AUTO = "local", "auto"  # a temporary cluster on this machine; the running cluster that it is part of
NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
LOCALHOST_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # makes Ray listen on 127.0.0.1 alone
OBJECT_STORE_BYTES = 100_000_000  # of a local cluster, for messages; Ray moves what does not fit to the disk
HINT = f"ray start --head starts a cluster, --ray {LOCAL} one for a single command (docs/reproduce.md)"


class Machine(NamedTuple):
    """A machine of a cluster."""

    id: str
    name: str
    gpus: float
    cores: float


class Allocation(NamedTuple):
    """The resources of a task or worker: a part of a GPU, or CPU cores."""

    sharing: int  # tasks on one GPU
    cores: int  # 0: it trains on a GPU

    @property
    def resources(self) -> dict[str, float]:
        """The options of a Ray task. Ray counts ten-thousandths; rounded down, so that all tasks fit."""
        if self.cores:
            return {"num_cpus": self.cores}
        return {"num_cpus": 0, "num_gpus": math.floor(10_000 / self.sharing) / 10_000}

    def devices(self, machine: Machine) -> int:
        """The number of devices of a machine: GPUs, or groups of cores."""
        return int(machine.cores // self.cores if self.cores else machine.gpus)

    def places(self, machines: Sequence[Machine]) -> int:
        """The number of tasks that run at once."""
        return self.sharing * sum(self.devices(machine) for machine in machines)


def allocation_of(device: str, threads: int) -> Allocation:
    """The resources of a worker: a GPU, or as many cores as it has threads."""
    return Allocation(1, threads if device == "cpu" else 0)


def require_room(workers: int, allocation: Allocation, machines: Sequence[Machine]) -> None:
    """Refuses more workers than these machines have devices for."""
    places, there = allocation.places(machines), counted(len(machines), "machine")
    cores = allocation.cores
    needed = f"{counted(cores, 'core')} each" if cores else "a GPU each"
    advice = "set fewer workers" + (", or threads=1" if cores > 1 else "")
    require(
        workers <= places,
        f"workers={workers} need {needed}, but {there} can hold only {places} of them; {advice}",
    )


def this_machine() -> Machine:
    """The machine of this process."""
    return Machine("", platform.node(), torch.cuda.device_count(), available_cores())


def require_address(address: str) -> None:
    """Refuses an address that is not that of a cluster."""
    require(
        address in (LOCAL, AUTO) or re.fullmatch(r"[^/\s]+:\d+", address) is not None,
        f"--ray {address!r} is not a cluster: write {LOCAL}, {AUTO}, or HOST:PORT of a running one",
    )


def require_ray(wanted: str) -> None:
    """Refuses a request that needs Ray if it is not installed."""
    require(
        find_spec("ray") is not None,
        f"{wanted} needs Ray, which is not installed: pip install 'fedhassle[ray]'",
    )


@contextmanager
def connected(address: str, more_bytes: int = 0) -> Iterator[None]:
    """Connects to Ray inside the block; a local cluster is started, and ends with all its processes.

    A process that is connected already, as a user's program may be, stays so. `more_bytes`: memory of a local
    cluster for large objects.
    """
    require_ray("--ray")
    alone = address == LOCAL
    for name, value in {**NO_USAGE_STATS, **(LOCALHOST_ONLY if alone else {})}.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    size = OBJECT_STORE_BYTES + more_bytes
    started = {"include_dashboard": False, "object_store_memory": size} if alone else {}
    try:
        join(address, **started)
        yield
    finally:
        ray.shutdown()


def join(address: str, **started: Any) -> None:
    """Connects this process to a cluster; a failure is a one-line error."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address not in (LOCAL, AUTO):
        require_reachable(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **started)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # No cluster is running, or its version or token differs: Ray's message says which.
        message = f"--ray {address}: the cluster cannot be joined: {first_line(error)}; {HINT}"
        raise UserError(message) from error
    if callable(on_sigterm) and signal.getsignal(signal.SIGTERM) is not on_sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in place, which exits with code 15


def require_reachable(address: str) -> None:
    """Refuses a HOST:PORT that does not answer; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(f"--ray {address}: no answer; {HINT}") from error


def cluster_machines() -> list[Machine]:
    """The machines of the cluster."""
    import ray

    return [
        Machine(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            node["Resources"].get("GPU", 0),
            node["Resources"].get("CPU", 0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
