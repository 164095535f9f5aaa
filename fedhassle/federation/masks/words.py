"""The messages of a round under masks, as JSON holds them; anything else is refused."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhassle.federation.masks.protocol import Member, Members, Revealed, Vectors
from fedhassle.federation.masks.ring import WORD
from fedhassle.federation.messages import RefusedError, count_of, short

KEYS, SHARES, VECTORS, REVEAL = STEPS = ("keys", "shares", "vectors", "reveal")
MASKED = "masked "  # prefix of the name of a vector under masks
KEY = 32  # bytes of a public key
SIGNATURE = 200  # most bytes of a signature


def text(blob: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(blob).decode()


def blob(value: Any, what: str, size: int | None = None) -> bytes:
    """The bytes of `text`; of a certain number if it is given."""
    try:
        found = base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except (binascii.Error, ValueError):
        found = None
    if found is None or size not in (None, len(found)):
        raise RefusedError(f"it sent {short(value)} for {what}")
    return found


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RefusedError(f"it sent {short(value)} for {what}")
    return value


def member_words(member: Member) -> dict[str, Any]:
    """A site's keys and the signature under them, models and weights."""
    keys = {"cipher": member.cipher, "mask": member.mask, "signature": member.signature}
    return {**{name: text(value) for name, value in keys.items()}, "models": dict(member.models)}


def read_member(words: Mapping[str, Any]) -> Member:
    """Reads a site's keys, models and weights."""
    cipher, mask = (blob(words.get(key), "its key", KEY) for key in ("cipher", "mask"))
    models = table(words.get("models", {}), "its models")
    signature = blob(words.get("signature", ""), "its signature")
    if len(signature) > SIGNATURE:
        raise RefusedError(f"it sent a signature of {len(signature)} bytes")
    return Member(cipher, mask, {name: count_of(weight, name) for name, weight in models.items()}, signature)


def read_members(value: Any) -> dict[str, Member]:
    """Reads the sites of a round."""
    return {name: read_member(table(words, "a site")) for name, words in table(value, "the sites").items()}


def read_blobs(value: Any, what: str) -> dict[str, bytes]:
    """Reads bytes by site."""
    return {name: blob(one, what) for name, one in table(value, what).items()}


def revealed_words(revealed: Revealed) -> dict[str, Any]:
    """A site's shares."""
    return {
        owner: {name: text(share) for name, share in shares.items()}
        for owner, shares in revealed.shares.items()
    }


def read_revealed(value: Any, size: int) -> Revealed:
    """Reads a site's shares, each of so many bytes."""
    shares = {
        owner: {name: blob(share, "a share", size) for name, share in table(found, "shares").items()}
        for owner, found in table(value, "its shares").items()
    }
    return Revealed(shares)


def vector_arrays(vectors: Vectors) -> dict[str, np.ndarray]:
    """Vectors under masks, as the arrays of a message."""
    return {MASKED + name: vector for name, vector in vectors.items()}


def read_vectors(
    arrays: Mapping[str, np.ndarray], name: str, members: Members, sizes: Mapping[str, int]
) -> Vectors:
    """Reads a site's vectors under masks; refuses any but those that it announced, of their lengths."""
    found = {key.removeprefix(MASKED): v for key, v in arrays.items() if key.startswith(MASKED)}
    expected = members[name].models
    if found.keys() != expected.keys() or len(found) != len(arrays):
        raise RefusedError(f"it sent {short(list(arrays))} under masks instead of {short(list(expected))}")
    for model, vector in found.items():
        if vector.dtype != WORD or vector.shape != (sizes[model],):
            raise RefusedError(f"its {short(model)} under masks is {vector.dtype} of shape {vector.shape}")
    return found
