"""A federation over a network, as the rounds see it: `rounds.Federation` on top of sites that answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedhassle.engine.client_state import ClientState
from fedhassle.engine.rounds import Reply
from fedhassle.engine.transfer import HELD, Arrived, Transfer, sent
from fedhassle.errors import UserError
from fedhassle.federation.messages import Content, Failure, Hits, RefusedError, packed, read_hits, read_update
from fedhassle.federation.server.sites import Answers, Sites
from fedhassle.method import Client, Method
from fedhassle.runs.record import Evaluation
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

CPU = torch.device("cpu")


class FlowerFederation:
    """Sites that train where they are; what goes wrong at one costs the round that site alone."""

    def __init__(self, sites: Sites, plan: Mapping[str, Any], memory: ClientState | None = None) -> None:
        self.sites, self.plan, self.audit = sites, dict(plan), sites.audit
        self.memory = ClientState() if memory is None else memory
        self.transfer = Transfer(self.memory, CPU)
        self._merged: dict[str, int] = {}  # of each site the last round that its update was merged in
        self._checkpoints: list[int] = []

    def present(self) -> list[Client]:
        """The sites that are there and free, in the order of their names; waits until there are enough."""
        found = self.sites.gather(self.sites.rules.minimum_sites)
        return [found[name].client for name in sorted(found)]

    def train(self, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int) -> list[Reply]:
        """Round t of the sites that are sent a message: the replies of those that answered well."""
        least = method.unsent()
        known = {client.name: self.transfer.known(client.name, least, t) for client, _ in messages}
        down = {client.name: sent(message, known[client.name], least) for client, message in messages}
        contents = {name: self._letter(name, down[name], known[name], t) for name in down}
        answers = self.sites.ask("train", contents, f"round {t}")
        replies, failed = [], {}
        for client, _ in messages:
            try:
                answer = answers[client.name]
                replies.append(self._reply(method, client, down[client.name], answer, t))
            except RefusedError as refused:
                failed[client.name] = str(refused)
        self._note(failed, [reply.update.client.name for reply in replies], t)
        needed = min(self.sites.rules.minimum_sites, len(messages))
        if len(replies) < needed:
            said = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise UserError(
                f"round {t}: {len(replies)} of at least {needed} sites answered well ({said}); what was "
                "saved before stays: mend that and resume"
            )
        return replies

    def _letter(self, name: str, message: Arrived, known: Arrays, t: int) -> Content:
        """What a site is sent: the vectors, and from which of its rounds it goes on."""
        words = {
            **self.plan,
            "round": t,
            "since": self._merged.get(name, 0),
            "checkpoints": self._checkpoints,
        }
        return Content(words, packed(message.arrays, known))

    def _reply(
        self, method: Method, client: Client, down: Arrived, answer: Content | Failure, t: int
    ) -> Reply:
        """A site's answer as a reply, if it is one."""
        if isinstance(answer, Failure):
            if answer.lost:  # from the next round on it begins anew
                self._merged.pop(client.name, None)
                self.memory.forget(HELD + client.name)
            raise RefusedError(answer.why)
        update = read_update(answer, method, client, down.arrays, t)
        up = self.transfer.up(client.name, update.arrays, down.arrays, method.unsent(), t)
        self._merged[client.name] = t
        return Reply(update, down.size, up.size)

    def _note(self, failed: Mapping[str, str], contributed: Sequence[str], t: int) -> None:
        """Writes down who contributed to a round, and who did not, and why."""
        for name, why in failed.items():
            log.warning("round %d goes on without %s: %s", t, name, why)
            self.audit.write("failed", site=name, round=t, why=why)
        self.audit.write("round", round=t, contributed=list(contributed), failed=list(failed))

    def evaluate(self, method: Method, state: Arrays, t: int) -> Evaluation | None:
        """Accuracy on the sites' validation images, together and by site; None where none answers."""
        there = self.sites.free
        able = [name for name, said in there.items() if said.validation]
        content = Content({**self.plan, "round": t}, packed(method.model(state), {}))
        answers = self.sites.ask("evaluate", dict.fromkeys(able, content), f"round {t}")
        found = self._hits(answers, t)
        if not found:
            log.warning("round %d: no site could evaluate the model", t)
            return None
        by_site = {name: accuracy(method, [hits]) for name, hits in found.items()}
        counts = {name: hits.images for name, hits in found.items()}
        self.audit.write("evaluated", round=t, sites=list(found))
        more = {"sites": {name: {"accuracy": by_site[name], "count": counts[name]} for name in found}}
        return Evaluation(accuracy(method, list(found.values())), more)

    def _hits(self, answers: Answers, t: int) -> dict[str, Hits]:
        """The hits of those that answered well and of the same predictions; the others are named."""
        found: dict[str, Hits] = {}
        for name, answer in answers.items():
            try:
                if isinstance(answer, Failure):
                    raise RefusedError(answer.why)
                hits = read_hits(answer.words)
                if found and hits.right.keys() != next(iter(found.values())).right.keys():
                    raise RefusedError("it has hits of other predictions than the sites before it")
                found[name] = hits
            except RefusedError as refused:
                log.warning("round %d is evaluated without %s: %s", t, name, refused)
                self.audit.write("failed", site=name, round=t, why=f"evaluation: {refused}")
        return found

    def rewind(self, t: int) -> None:
        """Makes sites forget what they kept after round t, when they are next asked."""
        self.memory.rewind(t)
        self.audit.write("resumed" if t else "begun", round=t)
        self._merged = self.audit.contributions(t)
        self._checkpoints = [t]

    def prune(self, rounds: Sequence[int]) -> None:
        """Lets sites forget what is needed neither now nor to go back to one of these rounds."""
        self.memory.prune(rounds)
        self._checkpoints = list(rounds)


def accuracy(method: Method, hits: Sequence[Hits]) -> dict[str, float]:
    """The accuracy of each prediction over the images of several sites."""
    total = sum(hit.images for hit in hits)
    right = {name: sum(hit.right[name] for hit in hits) for name in hits[0].right}
    return method.report({name: n / total for name, n in right.items()})
