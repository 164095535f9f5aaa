"""The sites of a federation as the server sees them: their presence and their answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedhassle.errors import UserError
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.build import own_code_in, required_in
from fedhassle.federation.flower.transport import ConnectedNode, SiteRequest, Transport
from fedhassle.federation.messages import (
    LONGEST_NAME,
    Failure,
    Introduction,
    Payload,
    RefusedError,
    answered,
    introduction,
    recounted,
    short,
)
from fedhassle.federation.server.audit import AGREED, Audit

log = logging.getLogger("fedhassle")

POLL = 0.1  # seconds between two looks for answers; one look costs about 10 ms of one core
CHECK_ONLINE = 5.0  # seconds between two checks that the awaited sites are still online
AWAY = 15.0  # seconds that an awaited site may be offline: a connection may break for a moment
GONE = "its node is offline, or was restarted or admitted anew"
LOG_EVERY = 10.0  # seconds between two log lines while waiting
ASK_AGAIN = 10.0  # seconds until a node that failed to introduce itself is asked again
LIFETIME = 12 * 3600.0  # seconds after the timeout in which a late answer is still awaited


class Clock(NamedTuple):
    """A clock that tests can replace."""

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


class JoinedSite(NamedTuple):
    """A site that has joined, and its node."""

    node: ConnectedNode
    introduction: Introduction
    images: int  # that it joined with, for any use


Answers = dict[str, Payload | Failure]
"""The answer or failure of each site."""


class Sites:
    """The sites that have joined, by their own names: a node's number is random."""

    def __init__(
        self,
        transport: Transport,
        agreement: Agreement,
        audit: Audit,
        clock: Clock | None = None,
        run: str | None = None,
    ) -> None:
        self.transport, self.rules, self.audit = transport, agreement.rules, audit
        self.agreed, self.own = agreement_hash(agreement), own_code_in(agreement)
        self.required = required_in(agreement)
        self.coarse_counts = agreement.data.coarse_counts
        # The classes of which sites report figures, if that is agreed.
        self.figures_of = () if agreement.data.class_figures is None else agreement.data.class_names
        self.clock = Clock() if clock is None else clock
        # Names the run, so that a site that comes back in the middle of it validates on the same images.
        self._query = {"kind": "query", **({} if run is None else {"run": run})}
        self.joined: dict[str, JoinedSite] = {}
        self._asked: dict[str, ConnectedNode] = {}  # by request: nodes that have not introduced themselves
        self._met: dict[ConnectedNode, float] = {}  # nodes that were asked, and the time to ask again
        self._refused: dict[ConnectedNode, str] = {}  # nodes that are online but refused, and their names
        self._late: dict[str, str] = {}  # by request: sites that have not answered in time
        self._announced: dict[str, Any] = {}  # by site: the counts that it last announced with new labels

    @property
    def free(self) -> dict[str, Introduction]:
        """The joined sites that are not busy with an earlier round, sorted by name."""
        busy = set(self._late.values())
        return {k: self.joined[k].introduction for k in sorted(self.joined) if k not in busy}

    def gather(self, wanted: int, patience: float = 0.0) -> dict[str, Introduction]:
        """Waits until enough sites are free, and returns them; raises after `rules.wait` seconds.

        `patience`: seconds to wait for nodes that have not introduced themselves, even if there are enough.
        """
        self.refresh()
        began = told = self.clock.now()
        while self._lacks(wanted) or (self._asked and self.clock.now() - began < patience):
            if self.clock.now() - began > self.rules.wait:
                raise UserError(
                    f"too few sites after {self.rules.wait:.0f} s: {self._state(wanted)}; start the missing "
                    "nodes, or change minimum_sites or required_sites under [rules] in federation.toml, and "
                    "resume the run"
                )
            if self.clock.now() - told >= LOG_EVERY:
                told = self.clock.now()
                log.info("waiting for sites: %s", self._state(wanted))
            self.clock.pause(POLL)
            self.refresh()
        return self.free

    def _lacks(self, wanted: int) -> bool:
        """True while too few sites are free, or a required one is not."""
        return len(self.free) < wanted or bool(self.lacking())

    def lacking(self) -> list[str]:
        """The required sites, and kinds of site, that are not free."""
        return self.required.lacking(said.client for said in self.free.values())

    def refresh(self) -> None:
        """Notes the sites that left, and asks new nodes to introduce themselves. Does not wait."""
        nodes = set(self.transport.nodes())
        for name, present in list(self.joined.items()):
            if present.node not in nodes:
                self._remove(name, GONE)
        self._count_labels()
        now = self.clock.now()
        self._met = {node: again for node, again in self._met.items() if node in nodes and again > now}
        self._asked = {request: node for request, node in self._asked.items() if node in nodes}
        self._refused = {node: name for node, name in self._refused.items() if node in nodes}
        new = sorted(nodes - self._met.keys())
        query = Payload(self._query)
        ids = self.transport.push(
            [SiteRequest(node.id, "query", query, "hello", self.rules.timeout) for node in new]
        )
        for node, request in zip(new, ids, strict=True):
            if request is not None:  # otherwise it is asked the next time
                self._met[node] = math.inf
                self._asked[request] = node
        for answer in self.transport.pull([*self._asked, *self._late]):
            late = self._late.pop(answer.to, None)
            if late is not None:
                log.info("%s is free again: its answer to an earlier round came too late to count", late)
                self.audit.write("back", site=late)
            if answer.to in self._asked:
                self._introduce(self._asked.pop(answer.to), answer.payload, answer.error)

    def _introduce(self, node: ConnectedNode, payload: Payload | None, error: str) -> None:
        """Lets a node join by its introduction, or refuses it."""
        name, answer = node.name or f"node {node.id}", answered(payload, error)
        if isinstance(answer, Failure):
            log.warning("%s failed to introduce itself: %s", name, answer.why)
            self.audit.write("failed", site=name, why=answer.why)
            self._met[node] = self.clock.now() + ASK_AGAIN
            return
        try:
            said = introduction(answer.words)
            self._check(node, said)
        except RefusedError as refused:
            log.warning("%s is refused: %s", name, refused)
            self.audit.write("refused", site=name, why=str(refused))
            self._refused[node] = name
            told = Payload({**self._query, "refused": str(refused)})
            self.transport.push([SiteRequest(node.id, "query", told, "hello", self.rules.timeout)])
            return
        client = said.client
        self.joined[client.name] = JoinedSite(node, said, sum(said.counts.values()))
        log.info(
            "%s has joined: %d labelled, %d unlabelled, %d for validation", client.name, *said.counts.values()
        )
        agreed = {} if node.images is None else {AGREED: node.images}
        self.audit.write(
            "joined", site=client.name, **said.counts, **said.patients, **agreed, versions=said.versions
        )

    def _count_labels(self) -> None:
        """Takes over the counts of sites with new labels; those that cannot be are logged, and do not count.

        Between rounds only, so that a round has one set of labels. A site uses its new labels when the
        server's messages have the new counts.
        """
        for name, words in self._announced.items():
            node, said, images = self.joined[name]
            try:
                new = recounted(said, words, self.coarse_counts, images)
                self._check_counts(node, new)
            except RefusedError as refused:
                log.warning("the new labels of %s are not used: %s", name, refused)
                self.audit.write("failed", site=name, why=f"new labels: {refused}")
                continue
            self.joined[name] = JoinedSite(node, new, images)
            counts = new.counts
            log.info(
                "%s has new labels: %d labelled, %d unlabelled, %d for validation", name, *counts.values()
            )
            self.audit.write("relabelled", site=name, **counts, **new.patients)
        self._announced = {}

    def _check(self, node: ConnectedNode, said: Introduction) -> None:
        """Refuses a site whose name, agreement or code is not the expected one."""
        name = said.client.name
        if node.name and node.name != name:
            raise RefusedError(
                f"it calls itself {short(name)}, but its key was admitted as {short(node.name)}: the "
                "coordinator runs fedhassle federation admit again, with the site's own name"
            )
        self._check_counts(node, said)
        if name in self.joined:
            raise RefusedError(f"another site called {short(name)} is online already")
        if said.agreed != self.agreed:
            raise RefusedError(
                f"its federation.toml differs from the coordinator's (hash {short(said.agreed)} instead of "
                f"{self.agreed!r}): send it the coordinator's file"
            )
        for path, code in self.own.items():
            found = said.versions.get(path[:LONGEST_NAME], "nothing")
            if found != code:
                raise RefusedError(
                    f"its code of {short(path)} differs from the coordinator's (hash {short(found)} instead "
                    f"of {code!r}): send it the coordinator's Python file, and restart its node"
                )

    def _check_counts(self, node: ConnectedNode, said: Introduction) -> None:
        """Refuses a site with more images than it was admitted with, or than the rules allow.

        Coarse counts may be off by a factor of √2 each.
        """
        total = sum(said.counts.values())
        if node.images is not None and total > node.images * (math.sqrt(2) if self.coarse_counts else 1):
            raise RefusedError(
                f"it counts {total:,} images, but was admitted with {node.images:,}: if it has more, the "
                f"coordinator runs fedhassle federation admit again, with --images {total}"
            )
        for what, count in (("labelled", said.client.labelled), ("unlabelled", said.client.unlabelled)):
            if count + said.validation > self.rules.most_images:
                raise RefusedError(
                    f"it says that it has {count + said.validation:,} {what} images, but a site can have at "
                    f"most {self.rules.most_images:,}: if that is true, the coordinator raises most_images "
                    "under [rules] in federation.toml"
                )

    def _gone(self, waiting: Mapping[str, str], absent: dict[str, float], now: float) -> list[str]:
        """The requests to sites that are offline for too long; `absent`: since when each is offline."""
        nodes = set(self.transport.nodes())
        away = {request: name for request, name in waiting.items() if self.joined[name].node not in nodes}
        for name in absent.keys() - away.values():
            del absent[name]
        return [request for request, name in away.items() if now - absent.setdefault(name, now) >= AWAY]

    def _remove(self, name: str, why: str) -> None:
        del self.joined[name]
        self._announced.pop(name, None)
        self._late = {request: site for request, site in self._late.items() if site != name}
        log.info("%s has left: %s", name, why)
        self.audit.write("left", site=name, why=why)

    def _state(self, wanted: int) -> str:
        late, refused = sorted(set(self._late.values())), sorted(self._refused.values())
        words = [f"{len(self.free)} of at least {wanted} are online ({', '.join(self.free) or 'none'})"]
        missing = self.lacking()
        words += [f"required and missing: {', '.join(missing)}"] if missing else []
        words += [f"online but refused: {', '.join(refused)}"] if refused else []
        words += [f"{len(self._asked)} have not introduced themselves"] if self._asked else []
        words += [f"still busy with an earlier round: {', '.join(late)}"] if late else []
        return "; ".join(words)

    def _request(self, kind: str, name: str, payload: Payload, group: str) -> SiteRequest:
        """A message to a site, with the counts of its images that the server goes by."""
        node, said, _ = self.joined[name]
        told = payload._replace(words={**payload.words, "counts": said.counts})
        return SiteRequest(node.id, kind, told, group, self.rules.timeout + LIFETIME)

    def ask(self, kind: str, payloads: Mapping[str, Payload], group: str) -> Answers:
        """Sends a request to each site and waits for the answers; failures stand for missing ones."""
        names = [name for name in payloads if name in self.joined]
        answers: Answers = {
            name: Failure("it has left", gone=True) for name in payloads if name not in self.joined
        }
        requests = [self._request(kind, name, payloads[name], group) for name in names]
        waiting: dict[str, str] = {}
        for name, request in zip(names, self.transport.push(requests), strict=True):
            if request is None:
                answers[name] = Failure("the message could not be sent", gone=True)
            else:
                waiting[request] = name
        began = checked = self.clock.now()
        deadline, absent = began + self.rules.timeout, dict[str, float]()
        while waiting:
            for answer in self.transport.pull(list(waiting)):
                name = waiting.pop(answer.to)
                answers[name] = answered(answer.payload, answer.error)
                if answer.payload is not None and "labels" in answer.payload.words:
                    self._announced[name] = answer.payload.words["labels"]
            if waiting and self.clock.now() - checked >= CHECK_ONLINE:
                checked = self.clock.now()
                for request in self._gone(waiting, absent, checked):
                    self._late[request] = name = waiting.pop(request)
                    answers[name] = Failure(GONE, gone=True)
            if waiting and self.clock.now() > deadline:
                self._late |= waiting
                late = Failure(f"it did not answer within {self.rules.timeout:g} s (rules.timeout)")
                answers |= dict.fromkeys(waiting.values(), late)
                break
            if waiting:
                self.clock.pause(POLL)
        return {name: answers[name] for name in payloads}
