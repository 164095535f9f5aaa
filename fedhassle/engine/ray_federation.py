"""A federation whose clients train on several GPUs or machines: each worker is a Ray actor with one device.

Every worker has a copy of the images on its device. The rows of a client, its message and the arrays that it
keeps travel to the worker that trains it, so a worker knows no client between rounds, and its memory does
not grow with their number. The clients' state is with the driver, in the same files as in one process.

Up to `GROUPS` clients a round, updates travel whole and are merged in the order of the clients: the result
has the same bits as in one process. Beyond that, if the method merges means, clients form `GROUPS` groups;
a group trains on one worker, which returns its mean. The groups do not depend on the number of workers, and
neither does a bit of the result.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedhassle.data.dataset import Dataset
from fedhassle.data.split.split import Split
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.cluster import (
    Allocation,
    allocation_of,
    cluster_machines,
    require_room,
)
from fedhassle.engine.device import Engine
from fedhassle.engine.ray_worker import (
    Called,
    Failed,
    Note,
    Order,
    Outcome,
    Packed,
    Worker,
    WorkerAbout,
    on_device,
    packed,
    unpacked,
    worker_versions,
)
from fedhassle.engine.rounds import Averages, Reply
from fedhassle.engine.simulator import Message, SimulatedClients
from fedhassle.engine.trainer import Task, steps
from fedhassle.errors import UserError, first_line, require
from fedhassle.method import Client, Method, Update
from fedhassle.names import counted
from fedhassle.nets import CPU
from fedhassle.vectors import Arrays, size_in_bytes

log = logging.getLogger("fedhassle")

GROUPS = 64  # updates, or means of updates, that the driver receives in a round at most
WAVE = 64  # clients that a worker trains in one call: it holds so many updates at once
SMALL = 10_000  # bytes of an array that is sent in place, even if several clients receive it
START_TIMEOUT = 600  # seconds until a cluster that other work fills is given up


class WorkerLostError(Exception):
    """A worker's process or machine died."""

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(why)
        self.worker = worker


class Answer(NamedTuple):
    """A trained client at the driver."""

    update: Update  # without arrays if they were added to a mean
    size: int  # bytes of the update
    finite: bool


class RayFederation(SimulatedClients):
    """Clients that train on the workers of a Ray cluster; Ray must be connected."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        seed: int,
        engine: Engine,
        threads: int,
        workers: int,
        client_state: ClientState | None = None,
        own: Iterable[str] = (),
        whole: bool = False,
    ) -> None:
        super().__init__(split, engine.device, client_state)
        allocation = allocation_of(engine.device.type, threads)
        require_room(workers, allocation, cluster_machines())
        self.workers = start(workers, allocation, dataset, seed, engine, threads)
        self._machines = check(self.workers, tuple(own))
        self._whole = whole  # the driver needs each update, as to clip it
        self._method: Method | None = None
        self._told: set[Note] = set()

    def close(self) -> None:
        """Ends the workers."""
        import ray

        for actor in self.workers.values():
            ray.kill(actor)
        self.workers = {}

    def train(self, method: Method, messages: Sequence[Message], t: int) -> list[Reply] | Averages:
        """Trains the clients that receive a message in round t.

        If a worker dies, the round is repeated on the others, with the same result: training changes nothing
        but the clients' files of this round.
        """
        tasks, down = self.tasks(method, messages, t)
        sums = method.merges_means() and not method.unsent() and not self._whole
        averaged = sums and len(tasks) > GROUPS
        while True:
            try:
                answers, means = self._round(method, tasks, averaged, t)
                break
            except WorkerLostError as lost:
                self._go_on_without(lost, t)
        found = [(task, answers[task.client.name], size) for task, size in zip(tasks, down, strict=True)]
        if not averaged:
            return [self.reply(method, one.update, task.message, size, t) for task, one, size in found]
        replies = tuple(Reply(one.update, size, one.size) for _, one, size in found)
        return Averages(replies, tuple(one.finite for _, one, _ in found), means)

    def _round(
        self, method: Method, tasks: Sequence[Task], averaged: bool, t: int
    ) -> tuple[dict[str, Answer], tuple[Update, ...]]:
        """Trains a round on the workers that are left: answers by client, and the means of groups."""
        import ray

        self._prepare(method)
        costs = [steps(method, task.client, t) for task in tasks]
        groups = balanced(costs, GROUPS) if averaged else list(range(len(tasks)))
        waves = {n: deque(mine) for n, mine in zip(self.workers, self._waves(costs, groups), strict=True)}
        arrays = RoundArrays([task.message for task in tasks])

        def send(worker: int) -> Any:
            wave = waves[worker].popleft()
            orders = [self._order(tasks[i], groups[i] if averaged else None, arrays, t) for i in wave]
            return self.workers[worker].train.remote(t, orders, *arrays.taken())

        going = {send(worker): worker for worker, mine in waves.items() if mine}
        answers: dict[str, Answer] = {}
        while going:
            (ready,), _ = ray.wait([*going])
            worker = going.pop(ready)
            answers |= self._receive(fetched(worker, ready), t)
            if waves[worker]:
                going[send(worker)] = worker
        return answers, self._means() if averaged else ()

    def _prepare(self, method: Method) -> None:
        """Sends the method, unless the workers have it, and begins a round."""
        import ray

        if method is not self._method:
            self._ask_all("adopt", ray.put(method))
            self._method = method
        self._ask_all("begin")

    def _waves(self, costs: Sequence[int], groups: Sequence[int]) -> list[list[list[int]]]:
        """For each worker the clients of each of its calls, longest first; a group stays on one worker."""
        places = balanced(totals(costs, groups), len(self.workers))
        longest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
        by_worker: list[list[int]] = [[] for _ in self.workers]
        for i in longest_first:
            by_worker[places[groups[i]]].append(i)
        return [[mine[i : i + WAVE] for i in range(0, len(mine), WAVE)] for mine in by_worker]

    def _order(self, task: Task, group: int | None, arrays: RoundArrays, t: int) -> Order:
        """One client's training on its way to a worker."""
        kept = self.client_state.load(task.client.name, t, CPU)
        own, shared = arrays.parts(task.message)
        return Order(
            *(task.client, task.labelled, task.unlabelled, own, shared),
            None if kept is None else packed(kept),
            group,
        )

    def _receive(self, called: Called, t: int) -> dict[str, Answer]:
        """Saves what clients keep, repeats the worker's messages, and returns the answers by client."""
        kept = [(name, unpacked(one.kept, CPU)) for name, one in called.outcomes.items() if one.kept]
        self.save(kept, t)
        for note in called.notes:
            if note not in self._told:
                log.log(note.level, "%s", note.text)
        self._told.update(called.notes)
        return {name: self._answer(one) for name, one in called.outcomes.items()}

    def _answer(self, one: Outcome) -> Answer:
        arrays, losses = unpacked(one.arrays, self.device), unpacked(one.losses, self.device)
        labelling = on_device(one.labelling, self.device)
        update = Update(one.client, arrays, one.samples, losses, labelling)
        return Answer(update, one.size, one.finite)

    def _means(self) -> tuple[Update, ...]:
        """The means of all groups, in the order of the groups."""
        found = {k: mean for means in self._ask_all("finish").values() for k, mean in means.items()}
        return tuple(
            Update(Client(f"group {k}", 0, 0), unpacked(found[k].arrays, self.device), found[k].weights, {})
            for k in sorted(found)
        )

    def _ask_all(self, what: str, *given: Any) -> dict[int, Any]:
        """The answers of all workers to one call."""
        calls = {worker: getattr(actor, what).remote(*given) for worker, actor in self.workers.items()}
        return {worker: fetched(worker, call) for worker, call in calls.items()}

    def _go_on_without(self, lost: WorkerLostError, t: int) -> None:
        """Drops a worker that died; raises if it was the last one."""
        del self.workers[lost.worker]
        which = f"round {t}: worker {lost.worker} on {self._machines[lost.worker]} died ({lost})"
        require(
            bool(self.workers),
            f"{which}, and no other is left; earlier rounds are saved: resume the run",
        )
        log.warning("%s: repeating the round on %s", which, counted(len(self.workers), "worker"))


class RoundArrays:
    """The arrays of a round's messages: large ones that several clients receive are sent to Ray once."""

    def __init__(self, messages: Sequence[Arrays]) -> None:
        uses = Counter(id(vector) for message in messages for vector in message.values())
        self._several = {key for key, n in uses.items() if n > 1}
        self._stored: dict[int, Any] = {}  # references to arrays in Ray's memory, by id of the vector
        self._needed: dict[int, int] = {}  # places in the list of the next call, by id of the vector

    def parts(self, message: Arrays) -> tuple[Packed, dict[str, int]]:
        """Arrays of a message that travel by themselves, and the places of the others in the call's list."""
        import ray

        own, shared = {}, {}
        for name, vector in message.items():
            key = id(vector)  # all messages of the round are alive, so an id is one vector's
            if key not in self._several or size_in_bytes({name: vector}) < SMALL:
                own[name] = vector
                continue
            if key not in self._stored:
                self._stored[key] = ray.put(vector.cpu().numpy())
            shared[name] = self._needed.setdefault(key, len(self._needed))
        return packed(own), shared

    def taken(self) -> list[Any]:
        """References to the arrays of the call whose orders were made since the last one."""
        found = [self._stored[key] for key in self._needed]
        self._needed = {}
        return found


def balanced(costs: Sequence[int], bins: int) -> list[int]:
    """The bin of each item: the costliest first, each into the bin with the least so far, the first if equal.

    No bin then has more than 4/3 of the least possible (Graham, 1969).
    """
    loads = [(0, k) for k in range(bins)]
    found = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, k = heapq.heappop(loads)
        found[i] = k
        heapq.heappush(loads, (load + costs[i], k))
    return found


def totals(costs: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The total cost of each group."""
    found = [0] * (max(groups, default=-1) + 1)
    for cost, group in zip(costs, groups, strict=True):
        found[group] += cost
    return found


def start(
    workers: int, allocation: Allocation, dataset: Dataset, seed: int, engine: Engine, threads: int
) -> dict[int, Any]:
    """Starts the workers, by number from 1."""
    import ray

    images = ray.put(replace(dataset, x_test=dataset.x_test[:0], y_test=dataset.y_test[:0]))
    make = ray.remote(Worker).options(**allocation.resources, scheduling_strategy="SPREAD")
    paths = [str(Path(path).absolute()) for path in sys.path]
    return {n: make.remote(images, seed, engine, threads, paths) for n in range(1, workers + 1)}


def check(workers: Mapping[int, Any], own: Sequence[str]) -> dict[int, str]:
    """Waits for the workers, refuses those with other software, and returns the machine of each."""
    import ray

    calls = {worker: actor.about.remote(own) for worker, actor in workers.items()}
    mine, machines = worker_versions(own), {}
    for worker, call in calls.items():
        try:
            about: WorkerAbout = ray.get(call, timeout=START_TIMEOUT)
        except ray.exceptions.GetTimeoutError as error:
            message = "has no free device; wait until other work on the cluster ends, or set fewer workers"
            raise UserError(f"worker {worker} {message}") from error
        except ray.exceptions.RayError as error:
            raise UserError(f"worker {worker} could not start: {last_line(error)}") from error
        require_same(worker, about, mine)
        machines[worker] = about.machine
    return machines


def require_same(worker: int, about: WorkerAbout, mine: Mapping[str, str | None]) -> None:
    """Refuses a worker whose software differs from this machine's: its results would, too."""
    theirs = about.versions
    differing = [f"{key} {theirs[key]} instead of {mine[key]}" for key in mine if theirs[key] != mine[key]]
    require(
        not differing,
        f"worker {worker} on {about.machine} has other software than this machine: {', '.join(differing)}",
    )


def fetched(worker: int, call: Any) -> Any:
    """The answer to a call; raises the error of a failed one, or a `WorkerLostError`."""
    import ray

    try:
        answer = ray.get(call)
    except ray.exceptions.RayTaskError as error:  # such as a method that the worker cannot import
        raise UserError(f"worker {worker} failed: {last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(worker, first_line(error)) from error
    if isinstance(answer, Failed):
        raise answer.error
    return answer


def last_line(error: Exception) -> str:
    """The last line of an error's message, where Ray puts the cause."""
    return str(error).strip().rpartition("\n")[2]
