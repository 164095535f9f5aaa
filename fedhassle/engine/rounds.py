"""Algorithm 1: rounds of selecting clients, training them and merging their updates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fedhassle.data.split.layout import Kind
from fedhassle.engine.privacy.by_sample import SamplePrivacy
from fedhassle.engine.privacy.by_site import (
    SitePrivacy,
    clipped_updates,
    drawn_by_chance,
    expected_counts,
    private_means,
)
from fedhassle.errors import DivergedError, require
from fedhassle.method import Client, Method, Phase, Update, average
from fedhassle.names import described
from fedhassle.randomness import generator
from fedhassle.vectors import Arrays, all_finite
from fedhassle.wrapped import unwrapped

log = logging.getLogger("fedhassle")


class Reply(NamedTuple):
    """One client's answer in a round, and the bytes sent in each direction."""

    update: Update
    bytes_down: int
    bytes_up: int


class Averages(NamedTuple):
    """The answers of a round whose updates were averaged where clients trained, in the order of the messages.

    The updates of its replies have no arrays.
    """

    replies: tuple[Reply, ...]
    finite: tuple[bool, ...]  # of each reply: whether its update had no NaN or infinity, and counts
    means: tuple[Update, ...]  # of groups of clients: each vector's mean, and the total of its weights


class Federation(Protocol):
    """A set of clients that train, in this process or over a network."""

    def present(self) -> Sequence[Client]:
        """Clients that can take part now, in a fixed order; may wait for them."""
        ...

    def train(
        self, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int
    ) -> Sequence[Reply] | Averages:
        """Trains the clients that receive a message in round t; replies come in the order of the messages.

        If `Method.merges_means`, it may average their updates itself.
        """
        ...

    def rewind(self, t: int) -> None:
        """Removes the clients' state of later rounds than t, from which the run resumes."""
        ...

    def prune(self, rounds: Sequence[int]) -> None:
        """Removes the clients' state that is needed neither now nor to go back to one of these rounds."""
        ...

    def kept(self) -> dict[str, int]:
        """By client, the round whose state is needed to go on from now."""
        ...


class Required(NamedTuple):
    """Clients without which there is no round."""

    names: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()  # one client of each

    def lacking(self, clients: Iterable[Client]) -> list[str]:
        """Returns in words what is missing among some clients."""
        there = list(clients)
        names, kinds = {client.name for client in there}, {client.kind for client in there}
        words = [name for name in self.names if name not in names]
        return words + [f"a site of the kind {kind!r}" for kind in self.kinds if kind not in kinds]


NOBODY = Required()


class Plan(NamedTuple):
    """Length of a run and selection of its clients."""

    rounds: int = 200  # T
    clients_per_round: int = 8  # C
    seed: int = 0
    privacy: SitePrivacy | SamplePrivacy | None = None
    required: Required = NOBODY


class Round(NamedTuple):
    """The outcome of a round."""

    t: int
    state: Arrays
    clients: tuple[Client, ...]  # drawn
    replies: tuple[Reply, ...]  # merged
    dropped: tuple[Reply, ...] = ()  # with NaN or infinity


def federate(
    method: Method, federation: Federation, plan: Plan, state: Arrays, first: int = 1
) -> Iterator[Round]:
    """Runs Algorithm 1 from round `first` on; an interrupted run resumes from any state."""
    federation.rewind(first - 1)
    told: set[Kind] = set()
    said = False
    for t in range(first, plan.rounds + 1):
        present = federation.present()
        clients = select(present, plan, t)
        tell_idle(method, clients, t, told)
        asked = [client for client in clients if takes_part(method, client, t)]
        said = said or tell_nobody(method, present, asked, t)
        messages = [(client, method.message(state, client, t)) for client in asked]
        answers = federation.train(method, messages, t)
        replies, dropped = split_finite(answers, t)
        before = state
        if isinstance(answers, Averages):
            updates = list(answers.means)
            state = method.next_state(state, average(updates), t)
        else:
            updates = [reply.update for reply in replies]
            state = merged(method, plan, state, updates, present, t)
        require_same_shapes(method, before, state, t)
        tell_untrained(method, updates, t)
        yield Round(t, state, clients, replies, dropped)


def select(clients: Sequence[Client], plan: Plan, t: int) -> tuple[Client, ...]:
    """Draws the C clients of round t, in the federation's order; C on average if their secrecy counts."""
    rng = generator(plan.seed, t, "select")
    if plan.privacy is not None and plan.privacy.rate < 1:
        return drawn_by_chance(clients, plan.privacy.rate, rng)
    drawn = rng.choice(len(clients), min(plan.clients_per_round, len(clients)), replace=False).tolist()
    return tuple(clients[k] for k in sorted(with_required(clients, drawn, plan.required, rng)))


def with_required(
    clients: Sequence[Client], drawn: Sequence[int], required: Required, rng: np.random.Generator
) -> list[int]:
    """The drawn clients, of which the last make room for required ones that were not drawn."""
    first = [k for k, client in enumerate(clients) if client.name in required.names]
    for kind in required.kinds:
        able = [k for k, client in enumerate(clients) if client.kind == kind]
        if able and not set(able) & set(first):
            already = [k for k in drawn if k in able]
            first.append(already[0] if already else able[rng.integers(len(able))])
    others = [k for k in drawn if k not in first]
    return [*first, *others[: max(0, len(drawn) - len(first))]]


def merged(
    method: Method,
    plan: Plan,
    state: Arrays,
    updates: Sequence[Update],
    present: Sequence[Client],
    t: int,
) -> Arrays:
    """The state after round t: the method's own merge, or clipped updates and noise."""
    privacy, rng = plan.privacy, generator(plan.seed, t, "server")
    if privacy is None or isinstance(privacy, SamplePrivacy):  # the latter's updates are private already
        return method.merge(state, updates, t, rng)
    if not privacy.noise:
        return method.merge(state, clipped_updates(updates, state, privacy.clip), t, rng)
    share = min(1.0, plan.clients_per_round / len(present))
    counts = expected_counts(method, present, share, t)
    return method.next_state(state, private_means(privacy, method, state, updates, counts, rng), t)


def require_same_shapes(method: Method, before: Arrays, after: Arrays, t: int) -> None:
    """Refuses a state that lacks an array of the one before, or has another shape for it."""
    of = type(unwrapped(method)).__name__
    advice = "return the whole state, such as state | means"
    require(isinstance(after, dict), f"{of}: the state after round {t} is {described(after)}: {advice}")
    for name, old in before.items():
        new = after.get(name)
        found = "is missing" if new is None else f"has the shape {tuple(new.shape)}"
        require(
            new is not None and new.shape == old.shape,
            f"{of}: {name!r} {found} in the state after round {t}; expected {tuple(old.shape)}, as before "
            f"it: {advice}",
        )


def split_finite(answers: Sequence[Reply] | Averages, t: int) -> tuple[tuple[Reply, ...], tuple[Reply, ...]]:
    """Splits replies into those without and those with NaN or infinity; logs the clients of the latter."""
    finite: Sequence[bool]
    if isinstance(answers, Averages):
        replies, finite = answers.replies, answers.finite
    else:
        replies = tuple(answers)
        finite = all_finite([list(reply.update.arrays.values()) for reply in replies])
    good = tuple(reply for reply, ok in zip(replies, finite, strict=True) if ok)
    dropped = tuple(reply for reply, ok in zip(replies, finite, strict=True) if not ok)
    bad = [reply.update.client.name for reply in dropped]
    if bad and not good:
        raise DivergedError(
            f"round {t}: the updates of all clients ({', '.join(bad)}) contain NaN or infinite values; "
            "earlier checkpoints are kept. Start a new run with a smaller method.lr, or with gradient "
            "clipping (method.clip=1)."
        )
    if bad:
        log.warning("round %d: dropped %s: NaN or infinite values in the update", t, ", ".join(bad))
    return good, dropped


def tell_untrained(method: Method, updates: Sequence[Update], t: int) -> None:
    """Logs the models that no update of this round contains; they stay unchanged."""
    missing = sorted(trainable(method, t) - {name for update in updates for name in update.arrays})
    if missing:
        log.info("round %d: no update of %s: kept as before", t, ", ".join(missing))


def trainable(method: Method, t: int) -> set[str]:
    """Names of the models that round t trains if suitable clients are drawn."""
    return {name for phase in method.phases(Client("any", 1, 1), t) for name in phase.trained}


def tell_idle(method: Method, clients: Sequence[Client], t: int, told: set[Kind]) -> None:
    """Logs, once per kind of client, that the method does not train on it."""
    idle = {client.kind for client in clients if not takes_part(method, client, t)}
    for kind in sorted(idle - told):
        log.info("round %d: %s clients do not train: the method does not use them here", t, kind)
    told |= idle


def tell_nobody(method: Method, present: Sequence[Client], asked: Sequence[Client], t: int) -> bool:
    """Logs that the method trains no client at all although some hold data; returns whether that is so."""
    holding = sum(client.labelled + client.unlabelled > 0 for client in present)
    if asked or not holding or any(takes_part(method, client, t) for client in present):
        return False
    log.warning(
        "round %d: nobody trains: the phases of %s are () for all %d clients, though %d hold data",
        *(t, type(unwrapped(method)).__name__, len(present), holding),
    )
    return True


def takes_part(method: Method, client: Client, t: int) -> bool:
    """True if a client holds data that round t trains on."""
    phases: object = client.labelled + client.unlabelled and method.phases(client, t)
    require(
        not isinstance(phases, Phase),
        f"{type(method).__name__}.phases returns a Phase; expected a tuple: (Phase(…),) with its comma",
    )
    return bool(phases)
