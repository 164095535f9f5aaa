"""A sweep over several GPUs or machines: each cell is a task of Ray. All that knows Ray is here.

Ray is imported where it is used: it reads its environment when it is first imported, and it is an extra.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import platform
import re
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedhassle.errors import DivergedError, UserError, require
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.sweep import RUNS, SIDE_BY_SIDE, Work, clear, prepare, summary_of
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, Step
from fedhassle.runs.run import Identity, load_images
from fedhassle.runs.several import Event
from fedhassle.runs.train import train_run
from fedhassle.settings.request import PATHS, Request

log = logging.getLogger("fedhassle")

LOCAL, RUNNING = "local", "auto"  # a cluster of this machine alone, for the time of a command; one that runs
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is sent to anybody
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # by which Ray listens on 127.0.0.1 alone
STORE = 100_000_000  # bytes of shared memory of a cluster of this machine: what travels is small
HINT = f"ray start --head starts a cluster, --ray {LOCAL} one for a single command (docs/reproduce.md)"
RETRIES = 1  # of a cell whose machine or process died
PATIENCE = 600  # seconds in which a run that is told to stop ends its round


class Node(NamedTuple):
    """A machine of a cluster."""

    id: str
    name: str
    gpus: float
    cores: float


class Share(NamedTuple):
    """What a cell takes of its machine: a part of a GPU, or cores."""

    sharing: int  # cells on one GPU
    cores: int  # 0: it trains on a GPU

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts them, in ten-thousandths; rounded down, so that all that share a GPU fit."""
        if self.cores:
            return {"num_cpus": self.cores}
        return {"num_cpus": 0, "num_gpus": math.floor(10_000 / self.sharing) / 10_000}

    def devices(self, node: Node) -> int:
        """How many devices a machine has: GPUs, or bundles of cores."""
        return int(node.cores // self.cores if self.cores else node.gpus)

    def places(self, nodes: Sequence[Node]) -> int:
        """How many cells train at once."""
        return self.sharing * sum(self.devices(node) for node in nodes)

    def applied(self, requested: Request) -> Request:
        """Settings that keep to the share; a device that was asked for stays."""
        layer: dict[str, Any] = {"threads": self.cores} if self.cores else {}
        if requested.top("device", "auto") == "auto":
            layer["device"] = "cpu" if self.cores else "cuda"
        return Request((*requested.layers, layer))


def share_of(cells: Sequence[Cell], nodes: Sequence[Node], together: int | None) -> Share:
    """A part of a GPU where the cluster has any, else a core, or as many as the settings have threads."""
    devices = {cell.requested.top("device", "auto") for cell in cells}
    gpus = sum(int(node.gpus) for node in nodes)
    require(gpus > 0 or "cuda" not in devices, "device=cuda: the Ray cluster has no GPU")
    if gpus and devices != {"cpu"}:
        return Share(together or SIDE_BY_SIDE, 0)
    share = Share(1, max(int(cell.requested.top("threads", 0)) or 1 for cell in cells))
    require(
        share.places(nodes) > 0,
        f"no machine of the Ray cluster has {share.cores} cores: ask for fewer with threads=N",
    )
    return share


# On the machine where a cell is trained


class Errand(NamedTuple):
    """A cell on its way to another machine."""

    cell: Cell  # with the settings that suit its share
    identity: Identity  # by the machine that sends it
    home: str  # its folder there
    sharing: int

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.cell)

    @property
    def rounds(self) -> int:
        """How long its run is."""
        return self.identity.rounds

    @property
    def headline(self) -> str:
        """The prediction that stands for it in a line."""
        return self.identity.headline


class Outcome(NamedTuple):
    """What comes back: a summary, or an error in words, or neither from a run that was stopped."""

    summary: Metrics | None = None
    error: str | None = None


class Seen(NamedTuple):
    """What a machine says of itself: what decides how long a run takes, and why it cannot take part."""

    machine: str = ""
    error: str | None = None


def look(errands: Sequence[Errand]) -> Seen:
    """Whether the runs would be the same here; their images are loaded, and so downloaded if need be."""
    try:
        for errand in errands:
            require_same(errand)
            load_images(errand.cell.requested)
            make_room(Path(errand.home).parent)
    except Exception as error:
        return Seen(error=in_words(error))
    return Seen(errands[0].cell.identity.machine)


def require_same(errand: Errand) -> None:
    """Refuses to make another run than the sender means."""
    require(
        errand.cell.identity.key == errand.identity.key,
        f"{errand.cell} would be another run there: its images or the version of fedhassle are others",
    )


def make_room(folder: Path) -> None:
    """Makes a folder for runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    require(writable, f"{folder} cannot be written there: choose another --runs, one that every machine has")


def train(errand: Errand, place: int, board: Any) -> Outcome:
    """Makes a cell on this machine, as a task."""
    import ray

    def told_to_stop(step: Step | None) -> bool:
        stop: bool = ray.get(board.note.remote(place, step))
        return stop

    try:
        return Outcome(carried_out(errand, told_to_stop))
    except Exception as error:
        return Outcome(error=f"{in_words(error)} (on {platform.node()}, {ray.util.get_node_ip_address()})")


def carried_out(errand: Errand, told_to_stop: Callable[[Step | None], bool]) -> Metrics | None:
    """The summary of a cell, whose run may lie here, finished or cut; None if it was stopped."""
    if told_to_stop(None):
        return None
    require_same(errand)
    cell, folder = errand.cell, Folder(Path(errand.home))
    if not folder.summary.exists():
        with closing(train_run(prepare(cell, folder), errand.sharing)) as steps:
            for step in steps:
                if told_to_stop(step):
                    return None
    summary = summary_of(cell, folder)
    clear(folder)
    return summary


def in_words(error: Exception) -> str:
    """An error in a line, with its kind where its message was not written for a user."""
    known = isinstance(error, UserError | DivergedError)
    return str(error) if known else f"{type(error).__name__}: {error}"


# Between the machines


class Board:
    """Where the tasks tell of their rounds and hear that they should stop: an actor beside the driver."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[tuple[int, Step | None]] = asyncio.Queue()
        self._begun: set[int] = set()
        self._stopped = False

    async def note(self, place: int, step: Step | None) -> bool:
        """Takes in a beginning (no step) or a round of a run; says whether that should stop."""
        if step is not None or place in self._begun:
            self._news.put_nowait((place, step))
        self._begun.add(place)
        return self._stopped

    async def news(self) -> list[tuple[int, Step | None]]:
        """Rounds, and second beginnings, since it was last asked, by the place of the run: at least one."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    async def stop(self) -> set[int]:
        """Has every run stop after its round; says which have begun."""
        self._stopped = True
        return self._begun


# On the machine that sends the cells


class SpreadWork(Work):
    """The cells that a ledger lacks, each made on whichever machine of a Ray cluster has room for it.

    Summaries come back to this ledger, so the machines need no common disk. Runs lie in the same folder on
    all of them: where that is on a common disk, any of them goes on with a run that was cut.
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
        require(
            address in (LOCAL, RUNNING) or re.fullmatch(r"[^/\s]+:\d+", address) is not None,
            f"--ray {address!r} is no cluster: write {LOCAL}, {RUNNING}, or HOST:PORT of one that runs",
        )
        super().__init__(ledger, cells, runs.absolute(), together, budget)
        self._address, self._together = address, together
        self._share = Share(1, 1)
        self._machines: list[tuple[str, int]] = []  # what decides how long runs take, and how many devices
        self._returned: dict[tuple[str, int], Metrics] = {}

    @property
    def about(self) -> str:
        """Where the cells are made."""
        number = len(self._machines)
        machines = "1 machine" if number == 1 else f"{number} machines"
        device = "cpu" if self._share.cores else "cuda"
        return f"with Ray on {machines}, on {device}, {self._share.places(nodes())} at once"

    def seconds(self, run: Identity) -> float | None:
        """How long a run takes all machines together, by those of which something was measured."""
        times = [(self.ledger.seconds(run._replace(machine=name)), n) for name, n in self._machines]
        speed = sum(n / seconds for seconds, n in times if seconds)
        return 1 / speed if speed else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Joins the cluster, or starts one, and sees to it that each machine can take part."""
        with connected(self._address):
            there = nodes()
            self._share = share_of(self.cells, there, self._together)
            self.width = self._share.sharing
            able = [node for node in there if self._share.devices(node)]
            seen = looked_at(able, self._share, self._samples())
            self._machines = [(seen[node], self._share.devices(node)) for node in able]
            yield

    def _samples(self) -> list[Errand]:
        """A cell for each set of images."""
        found: dict[tuple[str, ...], Cell] = {}
        for cell in self.cells:
            files = [cell.requested.get(*key, "") for key in PATHS]
            found.setdefault(tuple(files), cell)
        return [self._errand(cell, Folder(self._home(cell))) for cell in found.values()]

    def _errand(self, cell: Cell, folder: Folder) -> Errand:
        sent = replace(cell, requested=self._share.applied(cell.requested))
        return Errand(sent, cell.identity, str(folder.path), self._share.sharing)

    def _events(self) -> Generator[Event]:
        """What happens while the cells are trained; closed, it ends each run after its round."""
        import ray

        board = beside_the_driver(Board)
        send = ray.remote(train).options(
            **self._share.resources, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        waiting = enumerate(self._ready(self._errand))
        going: dict[Any, int] = {}
        news, room = board.news.remote(), self._share.places(nodes())
        try:
            while True:
                # No more than there is room for: what waits is not begun when the budget is spent.
                for place, errand in itertools.islice(waiting, max(room, 0)):
                    yield Event(place, begun=errand)
                    going[send.remote(errand, place, board)] = place
                if not going:
                    return
                (ready,), _ = ray.wait([news, *going])
                if ready in going:
                    place = going.pop(ready)
                    yield Event(place, error=self._receive(place, ready))
                    room = self._share.places(nodes()) - len(going)  # machines come and go
                    continue
                room = 0
                for place, step in ray.get(news):
                    if step is None:
                        log.warning("%s goes on: its process or machine died", self._taken[place].cell)
                    elif place in going.values():
                        yield Event(place, step=step)
                news = board.news.remote()
        finally:
            if going:
                self._stop(board, going)

    def _receive(self, place: int, task: Any) -> UserError | None:
        """Takes the summary that a task has brought, or what went wrong."""
        import ray

        try:
            outcome: Outcome = ray.get(task)
        except ray.exceptions.RayError as error:
            return UserError(lost(error))
        if outcome.summary is not None:
            self._returned[self._taken[place].cell.identity.key] = outcome.summary
        return None if outcome.error is None else UserError(outcome.error)

    def _stop(self, board: Any, going: dict[Any, int]) -> None:
        """Has the runs stop after their rounds, and takes what is finished by then."""
        import ray

        begun = ray.get(board.stop.remote())
        for task, place in going.items():
            if place not in begun:
                ray.cancel(task)
        done, late = ray.wait([*going], num_returns=len(going), timeout=PATIENCE)
        for task in done:
            self._receive(going[task], task)
        for task in late:
            ray.cancel(task, force=True)

    def _result(self, cell: Cell) -> Metrics | None:
        """The summary that came back, or one that lies here."""
        return self._returned.pop(cell.identity.key, None) or super()._result(cell)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Ray, quiet; on this machine alone it is started, and ended with all its processes."""
    alone = address == LOCAL
    for name, value in {**QUIET, **(LOOPBACK if alone else {})}.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        message = "--ray needs Ray, which is not installed: pip install 'fedhassle[ray]'"
        raise UserError(message) from error
    started = {"include_dashboard": False, "object_store_memory": STORE} if alone else {}
    try:
        join(address, **started)
        yield
    finally:
        ray.shutdown()


def join(address: str, **started: Any) -> None:
    """Connects this process; a cluster that cannot be joined is an error in a line."""
    import ray

    if address not in (LOCAL, RUNNING):
        knock(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **started)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # None runs, it has another version or another token: Ray says which.
        message = f"--ray {address}: the cluster cannot be joined: {first_line(error)}; {HINT}"
        raise UserError(message) from error


def knock(address: str) -> None:
    """Refuses a HOST:PORT where nobody answers; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(f"--ray {address}: nobody answers there; {HINT}") from error


def nodes() -> list[Node]:
    """The machines of the cluster."""
    import ray

    return [
        Node(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            node["Resources"].get("GPU", 0),
            node["Resources"].get("CPU", 0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def looked_at(able: Sequence[Node], share: Share, errands: Sequence[Errand]) -> dict[Node, str]:
    """What decides how long runs take on each machine; raises if one of them cannot take part."""
    import ray

    ask, options = ray.remote(look), {**share.resources, "max_retries": 0}
    tasks = {node: on_node(ask, node.id, **options).remote(errands) for node in able}
    found = {}
    for node, task in tasks.items():
        try:
            found[node] = ray.get(task)
        except ray.exceptions.RayError as error:
            found[node] = Seen(error=lost(error))
    wrong = [f"{node.name}: {seen.error}" for node, seen in found.items() if seen.error is not None]
    require(not wrong, "\n".join(["not every machine of the Ray cluster can take part:", *wrong]))
    return {node: seen.machine for node, seen in found.items()}


def beside_the_driver(actor: type) -> Any:
    """An actor on this machine, so that it is there for as long as the driver is."""
    import ray

    return on_node(ray.remote(actor), ray.get_runtime_context().get_node_id(), num_cpus=0).remote()


def on_node(remote: Any, node: str, **options: Any) -> Any:
    """A task or actor for one machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def lost(error: Exception) -> str:
    """What Ray says of a task that brought nothing back, in a line."""
    return f"Ray lost it: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The first line of a message, or what kind of error it is."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
