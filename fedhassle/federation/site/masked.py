"""A site's answers in a round under masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedhassle.errors import UserError, require
from fedhassle.federation.masks.contribution import MaskTerms, contribution
from fedhassle.federation.masks.protocol import Masker
from fedhassle.federation.masks.signatures import Signer
from fedhassle.federation.masks.words import (
    KEYS,
    REVEAL,
    SHARES,
    STEPS,
    member_words,
    read_blobs,
    read_members,
    revealed_words,
    table,
    text,
    vector_arrays,
)
from fedhassle.federation.messages import Payload, count_of
from fedhassle.method import Update
from fedhassle.vectors import Arrays

Trained = tuple[Update, Arrays]
"""A site's update, and the vectors that it received."""


class MaskedRounds:
    """Answers the four steps of a round; the secrets of the last one are in memory only."""

    def __init__(self, name: str, terms: MaskTerms, signer: Signer | None = None) -> None:
        self.name, self.terms, self._signer = name, terms, signer
        self._context, self._masker = "", Masker(name, "")
        self._seen = set[bytes]()  # all keys of earlier rounds

    def answer(self, payload: Payload, train: Callable[[], Trained]) -> Payload:
        """Answers a step; only the third one trains."""
        words = payload.words
        step, context = words.get("step"), f"{words.get('run')} {words.get('round')}"
        require(
            step in STEPS, "this site's federation.toml says privacy.masks: it sends no update without masks"
        )
        if step == KEYS:
            self._context, self._masker = context, Masker(self.name, context, self._signer)
            return Payload(member_words(self._masker.public({})))
        if context != self._context:
            raise UserError("its secrets of this round are lost, as after a restart: it joins the next round")
        steps = {SHARES: self._share, REVEAL: self._reveal}
        return steps[step](words) if step in steps else self._vectors(words, train)

    def _share(self, words: Mapping[str, Any]) -> Payload:
        members = read_members(words.get("members"))
        keys = {member.mask for member in members.values()}
        require(not keys & self._seen, "the server repeats a key of an earlier round, which it may know")
        self._seen |= keys
        shared = self._masker.share(members)
        return Payload({"shares": {peer: text(blob) for peer, blob in shared.items()}})

    def _vectors(self, words: Mapping[str, Any], train: Callable[[], Trained]) -> Payload:
        lengths = {name: count_of(n, name) for name, n in table(words.get("lengths"), "lengths").items()}
        received = read_blobs(words.get("shares"), "shares")
        update, start = train()
        members = self._masker.members
        require(
            self.terms.whole or update.arrays.keys() == members[self.name].models.keys(),
            "this site has trained other models than the server announced",
        )
        made = contribution(self.name, update.arrays, start, members, lengths, self.terms)
        return Payload({}, vector_arrays(self._masker.masked(received, made)))

    def _reveal(self, words: Mapping[str, Any]) -> Payload:
        survivors = words.get("survivors")
        if not isinstance(survivors, list) or not all(isinstance(name, str) for name in survivors):
            raise UserError("the server sent no list of survivors")
        return Payload({"revealed": revealed_words(self._masker.reveal(survivors))})
