"""The sites of a federation as the server sees them: who is there, and what each answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedhassle.errors import UserError
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.flower.transport import Grid, Letter, Node
from fedhassle.federation.messages import (
    LONGEST_NAME,
    Content,
    Failure,
    Introduction,
    RefusedError,
    answered,
    introduction,
    short,
)
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.terms import own_code_in

log = logging.getLogger("fedhassle")

POLL = 0.1  # seconds between two looks for answers: a look costs about 10 ms of one core
LOOK = 5.0  # seconds between two looks whether those that are waited for are still there
AWAY = 15.0  # seconds that one may be away and still be waited for: a line may break for a moment
GONE = "its node is gone, or has started anew"
TOLD_EVERY = 10.0  # seconds between two lines about what is waited for
ASK_AGAIN = 10.0  # seconds until a node that could not say who it is is asked again
LIFETIME = 12 * 3600.0  # seconds that a site may be late before its answer is given up for good


class Clock(NamedTuple):
    """Time, so that tests need not wait."""

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


class Present(NamedTuple):
    """A site that is there, and the node that it is."""

    node: Node
    introduction: Introduction


Answers = dict[str, Content | Failure]
"""By site: a content, or what went wrong."""


class Sites:
    """Who is there. Sites go by their own names, in the order of these: a node's number is random."""

    def __init__(self, grid: Grid, agreement: Agreement, audit: Audit, clock: Clock | None = None) -> None:
        self.grid, self.rules, self.audit = grid, agreement.rules, audit
        self.agreed, self.own = agreement_hash(agreement), own_code_in(agreement)
        self.clock = Clock() if clock is None else clock
        self.there: dict[str, Present] = {}
        self._asked: dict[str, Node] = {}  # by letter: nodes that have not said yet who they are
        self._met: dict[Node, float] = {}  # that have been asked, and when they may be asked again
        self._late: dict[str, str] = {}  # by letter: sites that have not answered in time

    @property
    def free(self) -> dict[str, Introduction]:
        """The sites that are there and not still busy with an old round, by name."""
        busy = set(self._late.values())
        return {k: self.there[k].introduction for k in sorted(self.there) if k not in busy}

    def gather(self, wanted: int, patience: float = 0.0) -> dict[str, Introduction]:
        """The sites that are free, once there are so many; to wait for them has a limit.

        `patience`: seconds to wait for nodes that have not said who they are, though there are enough.
        """
        self.refresh()
        began = told = self.clock.now()
        while len(self.free) < wanted or (self._asked and self.clock.now() - began < patience):
            if self.clock.now() - began > self.rules.wait:
                self._too_few(wanted)
            if self.clock.now() - told >= TOLD_EVERY:
                told = self.clock.now()
                log.info("waiting for sites: %s", self._state(wanted))
            self.clock.pause(POLL)
            self.refresh()
        return self.free

    def refresh(self) -> None:
        """Looks who has come and gone; whoever is new is asked who it is. Does not wait."""
        nodes = set(self.grid.nodes())
        for name, present in list(self.there.items()):
            if present.node not in nodes:
                self._leaves(name, GONE)
        now = self.clock.now()
        self._met = {node: again for node, again in self._met.items() if node in nodes and again > now}
        self._asked = {letter: node for letter, node in self._asked.items() if node in nodes}
        new = sorted(nodes - self._met.keys())
        query = Content({"kind": "query"})
        ids = self.grid.push([Letter(node.id, "query", query, "hello", self.rules.timeout) for node in new])
        for node, letter in zip(new, ids, strict=True):
            if letter is not None:  # else it is asked the next time
                self._met[node] = math.inf
                self._asked[letter] = node
        for answer in self.grid.pull([*self._asked, *self._late]):
            late = self._late.pop(answer.to, None)
            if late is not None:
                log.info("%s is back: it has answered an earlier round, too late to count", late)
                self.audit.write("back", site=late)
            if answer.to in self._asked:
                self._greet(self._asked.pop(answer.to), answer.content, answer.error)

    def _greet(self, node: Node, content: Content | None, error: str) -> None:
        """Takes in what a node says of itself, or refuses it."""
        name, answer = node.name or f"node {node.id}", answered(content, error)
        if isinstance(answer, Failure):
            log.warning("%s does not say who it is: %s", name, answer.why)
            self.audit.write("failed", site=name, why=answer.why)
            self._met[node] = self.clock.now() + ASK_AGAIN
            return
        try:
            said = introduction(answer.words)
            self._check(node, said)
        except RefusedError as refused:
            log.warning("%s is not admitted: %s", name, refused)
            self.audit.write("refused", site=name, why=str(refused))
            told = Content({"kind": "query", "refused": str(refused)})
            self.grid.push([Letter(node.id, "query", told, "hello", self.rules.timeout)])
            return
        client = said.client
        self.there[client.name] = Present(node, said)
        log.info(
            "%s has joined: %d labelled, %d unlabelled, %d for validation",
            *(client.name, client.labelled, client.unlabelled, said.validation),
        )
        self.audit.write(
            "joined",
            site=client.name,
            **{"labelled": client.labelled, "unlabelled": client.unlabelled, "validation": said.validation},
            versions=said.versions,
        )

    def _check(self, node: Node, said: Introduction) -> None:
        """Refuses a site that is not what it says, or that has agreed to something else."""
        name = said.client.name
        if node.name and node.name != name:
            raise RefusedError(
                f"it calls itself {short(name)}, but its key was admitted as {short(node.name)}: admit it "
                "again under the name that it has"
            )
        if name in self.there:
            raise RefusedError(f"there is a site called {short(name)} already")
        if said.agreed != self.agreed:
            raise RefusedError(
                f"its federation's file is another one ({short(said.agreed)} in place of {self.agreed!r}): "
                "send it the coordinator's"
            )
        for path, code in self.own.items():
            found = said.versions.get(path[:LONGEST_NAME], "nothing")
            if found != code:
                raise RefusedError(
                    f"its code of {short(path)} is another one ({short(found)} in place of {code!r}): send "
                    "it the coordinator's file, and let it start its node again"
                )

    def _gone(self, waiting: Mapping[str, str], absent: dict[str, float], now: float) -> list[str]:
        """The letters to sites that have been away too long; `absent`: since when each is away."""
        nodes = set(self.grid.nodes())
        away = {letter: name for letter, name in waiting.items() if self.there[name].node not in nodes}
        for name in absent.keys() - away.values():
            del absent[name]
        return [letter for letter, name in away.items() if now - absent.setdefault(name, now) >= AWAY]

    def _leaves(self, name: str, why: str) -> None:
        del self.there[name]
        self._late = {letter: site for letter, site in self._late.items() if site != name}
        log.info("%s has left: %s", name, why)
        self.audit.write("left", site=name, why=why)

    def _state(self, wanted: int) -> str:
        late = sorted(set(self._late.values()))
        words = [f"{len(self.free)} of at least {wanted} are there ({', '.join(self.free) or 'none'})"]
        words += [f"{len(self._asked)} have not said who they are"] if self._asked else []
        words += [f"still busy with an earlier round: {', '.join(late)}"] if late else []
        return "; ".join(words)

    def _too_few(self, wanted: int) -> None:
        raise UserError(
            f"after {self.rules.wait:.0f} s too few sites: {self._state(wanted)}; start the missing "
            "nodes, or lower rules.minimum_sites, and resume"
        )

    def ask(self, kind: str, contents: Mapping[str, Content], group: str) -> Answers:
        """What sites answer, within the time that they have; one that does not is late, and says so."""
        names = [name for name in contents if name in self.there]
        answers: Answers = {name: Failure("it has left") for name in contents if name not in self.there}
        letters = [
            Letter(self.there[name].node.id, kind, contents[name], group, self.rules.timeout + LIFETIME)
            for name in names
        ]
        waiting: dict[str, str] = {}
        for name, letter in zip(names, self.grid.push(letters), strict=True):
            if letter is None:
                answers[name] = Failure("the message could not be sent to it")
            else:
                waiting[letter] = name
        began = looked = self.clock.now()
        deadline, absent = began + self.rules.timeout, dict[str, float]()
        while waiting:
            for answer in self.grid.pull(list(waiting)):
                name = waiting.pop(answer.to)
                answers[name] = answered(answer.content, answer.error)
            if waiting and self.clock.now() - looked >= LOOK:
                looked = self.clock.now()
                for letter in self._gone(waiting, absent, looked):
                    self._late[letter] = name = waiting.pop(letter)
                    answers[name] = Failure(GONE)
            if waiting and self.clock.now() > deadline:
                self._late |= waiting
                late = Failure(f"it did not answer within {self.rules.timeout:g} s (rules.timeout)")
                answers |= dict.fromkeys(waiting.values(), late)
                break
            if waiting:
                self.clock.pause(POLL)
        return {name: answers[name] for name in contents}
