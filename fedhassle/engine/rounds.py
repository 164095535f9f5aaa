"""Algorithm 1: rounds of selecting, training and merging, wherever the clients are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from fedhassle.data.split.layout import Kind
from fedhassle.engine.gpu.sharing import QUIET
from fedhassle.errors import DivergedError
from fedhassle.method import Client, Method, Update
from fedhassle.randomness import generator
from fedhassle.vectors import Arrays, all_finite

log = logging.getLogger("fedhassle")


class Reply(NamedTuple):
    """One client's answer in a round, and the bytes that went each way."""

    update: Update
    bytes_down: int
    bytes_up: int


class Federation(Protocol):
    """Where clients train: in this process, or over a network."""

    def present(self) -> Sequence[Client]:
        """Those who can take part now, in a fixed order; may wait for them."""
        ...

    def train(self, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int) -> Sequence[Reply]:
        """Round t of the clients that are sent a message, in the order of the messages."""
        ...

    def rewind(self, t: int) -> None:
        """Makes clients forget what they kept after round t: the run goes on from there."""
        ...

    def prune(self, rounds: Sequence[int]) -> None:
        """Lets clients forget what is needed neither now nor to go back to one of these rounds."""
        ...


class Plan(NamedTuple):
    """How long a run is, and who takes part."""

    rounds: int = 200  # T
    clients_per_round: int = 8  # C
    seed: int = 0


class Round(NamedTuple):
    """What a round left behind."""

    t: int
    state: Arrays
    clients: tuple[Client, ...]  # those drawn
    replies: tuple[Reply, ...]  # those merged
    dropped: tuple[Reply, ...] = ()  # those with NaN or infinity


def federate(
    method: Method, federation: Federation, plan: Plan, state: Arrays, first: int = 1
) -> Iterator[Round]:
    """Algorithm 1, from round `first` on; a run that is cut goes on from any state."""
    federation.rewind(first - 1)
    told: set[Kind] = set()
    for t in range(first, plan.rounds + 1):
        clients = select(federation.present(), plan, t)
        tell_idle(method, clients, t, told)
        asked = [client for client in clients if takes_part(method, client, t)]
        messages = [(client, method.message(state, client, t)) for client in asked]
        replies, dropped = split_finite(federation.train(method, messages, t), t)
        updates = [reply.update for reply in replies]
        with QUIET.broken():  # it may ask a network
            state = method.merge(state, updates, t, generator(plan.seed, t, "server"))
        tell_untrained(method, updates, t)
        yield Round(t, state, clients, replies, dropped)


def select(clients: Sequence[Client], plan: Plan, t: int) -> tuple[Client, ...]:
    """The C clients of round t, in the federation's order."""
    rng = generator(plan.seed, t, "select")
    drawn = rng.choice(len(clients), min(plan.clients_per_round, len(clients)), replace=False)
    return tuple(clients[k] for k in sorted(drawn.tolist()))


def split_finite(replies: Sequence[Reply], t: int) -> tuple[tuple[Reply, ...], tuple[Reply, ...]]:
    """The replies without NaN or infinity, and the others, whose clients are named and drop out."""
    finite = all_finite([list(reply.update.arrays.values()) for reply in replies])
    good = tuple(reply for reply, ok in zip(replies, finite, strict=True) if ok)
    dropped = tuple(reply for reply, ok in zip(replies, finite, strict=True) if not ok)
    bad = [reply.update.client.name for reply in dropped]
    if bad and not good:
        raise DivergedError(
            f"round {t}: the updates of all clients ({', '.join(bad)}) hold NaN or infinite values; what "
            "was saved before stays. Try a smaller method.lr, or gradient clipping (method.clip=1)."
        )
    if bad:
        log.warning("round %d: dropped %s: NaN or infinite values in the update", t, ", ".join(bad))
    return good, dropped


def tell_untrained(method: Method, updates: Sequence[Update], t: int) -> None:
    """Logs which models no update of this round has: those stay as they were."""
    missing = sorted(trainable(method, t) - {name for update in updates for name in update.arrays})
    if missing:
        log.info("round %d: no update of %s: kept as before", t, ", ".join(missing))


def trainable(method: Method, t: int) -> set[str]:
    """The models that round t trains, if the right clients are drawn."""
    return {name for phase in method.phases(Client("any", 1, 1), t) for name in phase.trained}


def tell_idle(method: Method, clients: Sequence[Client], t: int, told: set[Kind]) -> None:
    """Logs, once for each kind, that a method has no use for a kind of client."""
    idle = {client.kind for client in clients if not takes_part(method, client, t)}
    for kind in sorted(idle - told):
        log.info("round %d: %s clients are not asked: the method has no use for them here", t, kind)
    told |= idle


def takes_part(method: Method, client: Client, t: int) -> bool:
    """Whether a client holds anything that round t trains on."""
    return bool(client.labelled + client.unlabelled and method.phases(client, t))
