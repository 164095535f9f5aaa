"""A sweep over several GPUs or machines: each cell is a Ray task (`ray_task.py`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhassle.engine.cluster import (
    Allocation,
    Machine,
    cluster_machines,
    connected,
    require_address,
)
from fedhassle.errors import UserError, first_line, require
from fedhassle.names import counted
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.ray_task import CellTask, MachineCheck, TaskResult, check_machine, train
from fedhassle.reproduce.sweep import RUNS, Sweep
from fedhassle.runs.events import Event
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, Step
from fedhassle.runs.run import Identity
from fedhassle.runs.several import SIDE_BY_SIDE
from fedhassle.settings.request import PATHS, Request

log = logging.getLogger("fedhassle")

RETRIES = 1  # of a cell whose machine or process died
STOP_TIMEOUT = 600  # seconds that a run has to end its round after a request to stop


def placed(requested: Request, allocation: Allocation) -> Request:
    """Settings with the allocated threads and device; a device that the user chose stays."""
    layer: dict[str, Any] = {"threads": allocation.cores} if allocation.cores else {}
    if requested.top("device", "auto") == "auto":
        layer["device"] = "cpu" if allocation.cores else "cuda"
    return Request((*requested.layers, layer))


def allocation_for(cells: Sequence[Cell], machines: Sequence[Machine], together: int | None) -> Allocation:
    """A part of a GPU if the cluster has GPUs, otherwise as many cores as the settings have threads."""
    spread = any(cell.requested.top("workers", 1) != 1 for cell in cells)
    require(not spread, "workers=N spreads each run, --ray spreads the runs: leave out one of them")
    devices = {cell.requested.top("device", "auto") for cell in cells}
    gpus = sum(int(machine.gpus) for machine in machines)
    require(gpus > 0 or "cuda" not in devices, "device=cuda: the Ray cluster has no GPU")
    if gpus and devices != {"cpu"}:
        return Allocation(together or SIDE_BY_SIDE, 0)
    allocation = Allocation(1, max(int(cell.requested.top("threads", 0)) or 1 for cell in cells))
    require(
        allocation.places(machines) > 0,
        f"no machine of the Ray cluster has {allocation.cores} cores: ask for fewer with threads=N",
    )
    return allocation


# Between the machines


class ProgressBoard:
    """A Ray actor beside the driver: tasks report their rounds to it and learn whether to stop."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[tuple[int, Step | None]] = asyncio.Queue()
        self._begun: set[int] = set()
        self._stopped = False

    async def note(self, place: int, step: Step | None) -> bool:
        """Records the start (no step) or a round of a run; True if the run should stop."""
        if step is not None or place in self._begun:
            self._news.put_nowait((place, step))
        self._begun.add(place)
        return self._stopped

    async def news(self) -> list[tuple[int, Step | None]]:
        """Waits for news, then returns the rounds and restarts since the last call, by run index."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    async def stop(self) -> set[int]:
        """Asks every run to stop after its round; returns those that have started."""
        self._stopped = True
        return self._begun


# On the machine that sends the cells


class RaySweep(Sweep):
    """A sweep in which each cell trains on any machine of a Ray cluster that has room.

    Summaries come back to this ledger, so the machines need no shared disk. Runs are in the same folder on
    every machine; if it is on a shared disk, any machine can resume an interrupted run.
    """

    def __init__(
        self,
        address: str,
        ledger: Ledger,
        cells: Sequence[Cell],
        runs: Path = RUNS,
        together: int | None = None,
        budget: float | None = None,
    ) -> None:
        require_address(address)
        super().__init__(ledger, cells, runs.absolute(), together, budget)
        self._address = address
        self._allocation = Allocation(1, 1)
        self._machines: list[tuple[str, int]] = []  # hardware and number of devices of each machine
        self._returned: dict[tuple[str, int], Metrics] = {}

    @property
    def about(self) -> str:
        """The machines, the device and the number of runs at once, in words."""
        device = "cpu" if self._allocation.cores else "cuda"
        places = self._allocation.places(cluster_machines())
        return f"with Ray on {counted(len(self._machines), 'machine')}, on {device}, {places} at once"

    def seconds(self, run: Identity) -> float | None:
        """The expected time per run of all machines together, from those with earlier runs."""
        times = [(self.ledger.seconds(run._replace(machine=name)), n) for name, n in self._machines]
        speed = sum(n / seconds for seconds, n in times if seconds)
        return 1 / speed if speed else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Joins the cluster, or starts one, and checks that every machine can take part."""
        with connected(self._address):
            machines = cluster_machines()
            self._allocation = allocation_for(self.cells, machines, self.together)
            able = [machine for machine in machines if self._allocation.devices(machine)]
            hardware = check_machines(able, self._allocation, self._samples())
            self._machines = [(hardware[machine], self._allocation.devices(machine)) for machine in able]
            yield

    def _samples(self) -> list[CellTask]:
        """A task for each set of images."""
        found: dict[tuple[str, ...], Cell] = {}
        for cell in self.cells:
            files = [cell.requested.get(*key, "") for key in PATHS]
            found.setdefault(tuple(files), cell)
        return [self._task(cell, Folder(self._home(cell))) for cell in found.values()]

    def _task(self, cell: Cell, folder: Folder) -> CellTask:
        sent = replace(cell, requested=placed(cell.requested, self._allocation))
        return CellTask(sent, cell.identity, str(folder.path), self._allocation.sharing)

    def _events(self) -> Generator[Event]:
        """The events of the training; closing the generator ends each run after its round."""
        import ray

        board = on_this_machine(ProgressBoard)
        send = ray.remote(train).options(
            **self._allocation.resources, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        waiting = enumerate(self._ready(self._task))
        going: dict[Any, int] = {}
        news, room = board.news.remote(), self._allocation.places(cluster_machines())
        try:
            while True:
                # No more than fit at once: a task that waits would still start after the budget is spent.
                for place, task in itertools.islice(waiting, max(room, 0)):
                    yield Event(place, begun=task, together=self._allocation.sharing)
                    going[send.remote(task, place, board)] = place
                if not going:
                    return
                (ready,), _ = ray.wait([news, *going])
                if ready in going:
                    place = going.pop(ready)
                    yield Event(place, error=self._receive(place, ready))
                    room = self._allocation.places(cluster_machines()) - len(going)  # machines come and go
                    continue
                room = 0
                for place, step in ray.get(news):
                    if step is None:
                        log.warning("%s resumes: its process or machine died", self._taken[place].cell)
                    elif place in going.values():
                        yield Event(place, step=step)
                news = board.news.remote()
        finally:
            if going:
                self._stop(board, going)

    def _receive(self, place: int, task: Any) -> UserError | None:
        """Keeps the summary that a task returned, or returns its error."""
        import ray

        try:
            outcome: TaskResult = ray.get(task)
        except ray.exceptions.RayError as error:
            return UserError(lost(error))
        if outcome.summary is not None:
            self._returned[self._taken[place].cell.identity.key] = outcome.summary
        return None if outcome.error is None else UserError(outcome.error)

    def _stop(self, board: Any, going: dict[Any, int]) -> None:
        """Stops the runs after their rounds, and keeps the results of those that are finished."""
        import ray

        begun = ray.get(board.stop.remote())
        for task, place in going.items():
            if place not in begun:
                ray.cancel(task)
        done, late = ray.wait([*going], num_returns=len(going), timeout=STOP_TIMEOUT)
        for task in done:
            self._receive(going[task], task)
        for task in late:
            ray.cancel(task, force=True)

    def _result(self, cell: Cell) -> Metrics | None:
        """The summary that a task returned, or the one in the run's folder."""
        return self._returned.pop(cell.identity.key, None) or super()._result(cell)


def check_machines(
    able: Sequence[Machine], allocation: Allocation, samples: Sequence[CellTask]
) -> dict[Machine, str]:
    """The hardware of each machine; raises if one of them cannot take part."""
    import ray

    ask, options = ray.remote(check_machine), {**allocation.resources, "max_retries": 0}
    tasks = {machine: on_machine(ask, machine.id, **options).remote(samples) for machine in able}
    checks: dict[Machine, MachineCheck] = {}
    for machine, task in tasks.items():
        try:
            checks[machine] = ray.get(task)
        except ray.exceptions.RayError as error:
            checks[machine] = MachineCheck(error=lost(error))
    wrong = [f"{machine.name}: {check.error}" for machine, check in checks.items() if check.error is not None]
    require(not wrong, "\n".join(["not every machine of the Ray cluster can take part:", *wrong]))
    return {machine: check.machine for machine, check in checks.items()}


def on_this_machine(actor: type) -> Any:
    """An actor on this machine, so that it lives as long as the driver."""
    import ray

    return on_machine(ray.remote(actor), ray.get_runtime_context().get_node_id(), num_cpus=0).remote()


def on_machine(remote: Any, node: str, **options: Any) -> Any:
    """A Ray task or actor bound to one machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def lost(error: Exception) -> str:
    """Ray's error about a task that returned nothing, in a line."""
    return f"Ray lost the task: {first_line(error)}"
