"""The server's side of a round under masks: it learns the sum of the sites' vectors, and no single one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fedhassle.engine.client import samples_by_name
from fedhassle.engine.privacy.by_site import expected_counts, sound
from fedhassle.federation.masks.contribution import MaskTerms, means_of, require_length
from fedhassle.federation.masks.protocol import Member, Members, Vectors, summed, unmasked
from fedhassle.federation.masks.shares import SHARE
from fedhassle.federation.masks.words import (
    KEYS,
    REVEAL,
    SHARES,
    VECTORS,
    member_words,
    read_blobs,
    read_member,
    read_revealed,
    read_vectors,
    text,
)
from fedhassle.federation.messages import Failure, Payload, RefusedError, to_json
from fedhassle.federation.server.bounds import with_capped_weights
from fedhassle.federation.server.sites import Answers
from fedhassle.method import Client, Method, Update
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

T = TypeVar("T")

Ask = Callable[[Mapping[str, Payload]], Answers]
"""Sends a message to each site and returns the answers."""


class MaskedSum(NamedTuple):
    """The outcome of a round under masks."""

    means: Arrays
    contributed: tuple[str, ...]  # the sites whose vectors are in the sum
    failed: dict[str, str]  # by site: why
    down: dict[str, int]  # by site: bytes
    up: dict[str, int]


class MaskedRound:
    """One round; `failed` and the bytes add up over its steps."""

    def __init__(self, ask: Ask, terms: MaskTerms, plan: Mapping[str, Any], t: int) -> None:
        self.ask, self.terms = ask, terms
        self.words = {**plan, "round": t}
        self.context = f"{plan['run']} {t}"
        self.failed: dict[str, str] = {}
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}

    def run(
        self,
        method: Method,
        clients: Sequence[Client],
        training: Mapping[str, Payload],
        start: Arrays,
        cap: float,
    ) -> MaskedSum:
        """Trains the sites, and adds their vectors up.

        `training`: the message with which each would train without masks; `start`: the models that they get;
        `cap`: the largest share of the weight that one site may have.
        """
        t = self.words["round"]
        counts = expected_counts(method, clients, 1.0, t)
        models = self._models(method, clients, counts, cap, t)
        lengths = {name: len(start[name]) for name in counts}
        members = self._keys(models)
        shared = self._shares(members)
        masked = self._vectors(members, shared, training, lengths)
        means = self._means(members, shared, masked, start, counts, lengths)
        return MaskedSum(sound(method, means), tuple(masked), self.failed, self.down, self.up)

    def _models(
        self, method: Method, clients: Sequence[Client], counts: Mapping[str, float], cap: float, t: int
    ) -> dict[str, dict[str, int]]:
        """By site, the weight of each model that it is to send."""
        if self.terms.whole:
            return {client.name: dict.fromkeys(sorted(counts), 1) for client in clients}
        updates = [Update(c, {}, samples_by_name(method.phases(c, t), c), {}) for c in clients]
        capped = with_capped_weights(method, updates, cap, t)
        return {update.client.name: dict(method.counts(update)) for update in capped}

    def _keys(self, models: Mapping[str, Mapping[str, int]]) -> dict[str, Member]:
        """Step 1: the sites that answer are the members of the round."""
        answers = self._asked(dict.fromkeys(models, Payload({**self.words, "step": KEYS})))
        return self._read(answers, lambda name, said: read_member(said.words)._replace(models=models[name]))

    def _shares(self, members: Members) -> dict[str, dict[str, bytes]]:
        """Step 2: by site, the encrypted shares of its secrets for its neighbours."""
        told = {name: member_words(member) for name, member in members.items()}
        payload = Payload({**self.words, "step": SHARES, "members": told})
        answers = self._asked(dict.fromkeys(members, payload))
        return self._read(answers, lambda name, said: read_blobs(said.words.get("shares"), "its shares"))

    def _vectors(
        self,
        members: Members,
        shared: Mapping[str, Mapping[str, bytes]],
        training: Mapping[str, Payload],
        lengths: Mapping[str, int],
    ) -> dict[str, Vectors]:
        """Step 3: the sites train, and send their vectors under masks."""
        payloads = {}
        for name in shared:
            mine = {peer: text(sent[name]) for peer, sent in shared.items() if name in sent}
            words = {**training[name].words, "step": VECTORS, "shares": mine, "lengths": dict(lengths)}
            payloads[name] = training[name]._replace(words=words)
        sizes = {model: n + self.terms.counted for model, n in lengths.items()}
        answers = self._asked(payloads)
        return self._read(answers, lambda name, said: read_vectors(said.arrays, name, members, sizes))

    def _means(
        self,
        members: Members,
        shared: Mapping[str, object],
        masked: Mapping[str, Vectors],
        start: Arrays,
        counts: Mapping[str, float],
        lengths: Mapping[str, int],
    ) -> Arrays:
        """Step 4: the survivors reveal what removes the masks from the sum."""
        if not masked:
            raise RefusedError("no site sent its vectors under masks")
        payload = Payload({**self.words, "step": REVEAL, "survivors": list(masked)})
        answers = self._asked(dict.fromkeys(masked, payload))
        revealed = self._read(answers, lambda name, said: read_revealed(said.words.get("revealed"), SHARE))
        alone = sorted({model for sent in masked.values() for model in sent} - set(summed(members, masked)))
        if alone:
            log.warning(
                "round %s: %s stays under masks and is not merged: its sum would show what one site sent",
                *(self.words["round"], ", ".join(alone)),
            )
        try:
            sums = unmasked(members, list(shared), masked, revealed, self.context)
            require_length(sums, members, list(masked), lengths, self.terms)
        except ValueError as error:
            raise RefusedError(f"the masks cannot be removed: {error}") from error
        return means_of(sums, start, members, list(masked), counts, self.terms)

    def _asked(self, payloads: Mapping[str, Payload]) -> Answers:
        """The answers of a step, whose bytes are counted."""
        answers = self.ask(payloads)
        for name, payload in payloads.items():
            self.down[name] = self.down.get(name, 0) + size_of(payload)
            answer = answers[name]
            self.up[name] = self.up.get(name, 0) + (0 if isinstance(answer, Failure) else size_of(answer))
        return answers

    def _read(self, answers: Answers, read: Callable[[str, Payload], T]) -> dict[str, T]:
        """The answers that are as agreed; the others are remembered as failures."""
        found = {}
        for name, answer in answers.items():
            try:
                if isinstance(answer, Failure):
                    raise RefusedError(answer.why)
                found[name] = read(name, answer)
            except RefusedError as refused:
                self.failed[name] = str(refused)
        return found


def size_of(payload: Payload) -> int:
    """The bytes of a message: its arrays, and its words as JSON."""
    return sum(array.nbytes for array in payload.arrays.values()) + len(to_json(payload.words))
