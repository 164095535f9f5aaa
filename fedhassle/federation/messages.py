"""What travels between server and sites: a few words and flat arrays. Pure, and without Flower.

Nothing that a site sends is believed: whatever is not exactly as agreed is a `RefusedError` that says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.engine.client import samples_by_name
from fedhassle.method import Client, Method, Update
from fedhassle.names import some_of
from fedhassle.vectors import Arrays, all_finite

WHOLE, INDEX, VALUE = "whole ", "index ", "value "  # before the name of a vector: how it is sent
TYPES = {WHOLE: np.dtype("<f4"), INDEX: np.dtype("<i4"), VALUE: np.dtype("<f4")}
LONGEST_NAME = 100
LONGEST_REASON = 500
MOST_SAMPLES = 10**12


class RefusedError(ValueError):
    """Something that a site sent and that is not as agreed."""


class Content(NamedTuple):
    """A message: words that JSON can hold, and flat arrays by name."""

    words: dict[str, Any]
    arrays: dict[str, np.ndarray] = {}  # noqa: RUF012 - never written to


class Failure(NamedTuple):
    """What went wrong, in place of an answer."""

    why: str
    lost: bool = False  # whether the site no longer has what it held: it can begin anew


class Introduction(NamedTuple):
    """What a site says of itself."""

    client: Client
    validation: int  # labelled samples that it keeps for validation
    agreed: str  # the hash of what it takes the federation's data to be
    versions: dict[str, str]


class Hits(NamedTuple):
    """What a site's validation images say of a model."""

    right: dict[str, int]  # by prediction
    images: int


def to_json(words: Mapping[str, Any]) -> str:
    """Words as they travel; NaN is an error."""
    return json.dumps(words, allow_nan=False, sort_keys=True)


def from_json(text: str) -> dict[str, Any]:
    """What `to_json` wrote."""

    def refuse(word: str) -> float:
        raise RefusedError(f"its words hold {word}")

    try:
        words = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"its words are no JSON: {error}") from error
    if not isinstance(words, dict):
        raise RefusedError("its words are no JSON object")
    return words


# Vectors


def packed(arrays: Arrays, known: Arrays) -> dict[str, np.ndarray]:
    """Vectors for an end that knows `known`: whole, or what differs where that is shorter."""
    made = {}
    for name, vector in arrays.items():
        before = known.get(name)
        if before is not None and before.shape == vector.shape:
            index = (vector != before).nonzero()[:, 0]
            if len(index) * 2 < len(vector):
                made[INDEX + name] = index.to("cpu", torch.int32).numpy()
                made[VALUE + name] = vector[index].cpu().numpy()
                continue
        made[WHOLE + name] = vector.detach().cpu().numpy()
    return made


def unpacked(arrays: Mapping[str, np.ndarray], known: Arrays) -> Arrays:
    """Vectors that were packed for this end."""
    for key, array in arrays.items():
        kind = next((kind for kind in TYPES if key.startswith(kind)), None)
        if kind is None or array.dtype != TYPES[kind] or array.ndim != 1:
            raise RefusedError(f"it sent an array {short(key)} of {array.dtype} and shape {array.shape}")
    # Copies: what came out of bytes cannot be written to.
    whole = {
        k.removeprefix(WHOLE): torch.from_numpy(v.copy()) for k, v in arrays.items() if k.startswith(WHOLE)
    }
    parts = {k.removeprefix(INDEX): v for k, v in arrays.items() if k.startswith(INDEX)}
    if parts.keys() != {k.removeprefix(VALUE) for k in arrays if k.startswith(VALUE)} or parts.keys() & whole:
        raise RefusedError("it sent vectors of which parts are missing, or there twice")
    return whole | {k: patched(k, known, index, arrays[VALUE + k]) for k, index in parts.items()}


def patched(name: str, known: Arrays, index: np.ndarray, value: np.ndarray) -> torch.Tensor:
    """A known vector with some of its entries replaced."""
    if name not in known:
        raise RefusedError(f"it sent changes of {short(name)}, which is not known here")
    vector = known[name].clone()
    inside = not len(index) or (index.min() >= 0 and index.max() < len(vector))
    if len(index) != len(value) or not inside:
        raise RefusedError(f"it sent changes of {short(name)} that lie outside it")
    vector[torch.from_numpy(index.astype(np.int64))] = torch.from_numpy(value.copy()).to(vector)
    return vector


# What the server asks, and what a site answers


def introduction(words: Mapping[str, Any]) -> Introduction:
    """Who a site says that it is."""
    name = words.get("site")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise RefusedError(f"its name is {short(name)}")
    labelled, unlabelled, validation = (
        count_of(words.get(key), key) for key in ("labelled", "unlabelled", "validation")
    )
    agreed, versions = words.get("agreed"), words.get("versions")
    if not isinstance(agreed, str) or not isinstance(versions, dict):
        raise RefusedError("it does not say what it has agreed to, or with which versions it runs")
    plain = {str(k)[:LONGEST_NAME]: str(v)[:LONGEST_NAME] for k, v in list(versions.items())[:20]}
    return Introduction(Client(name, labelled, unlabelled), validation, agreed, plain)


def failure(why: str, lost: bool = False) -> Content:
    """What a site answers that cannot do what it was asked."""
    return Content({"error": why, "lost": lost})


def answered(content: Content | None, error: str) -> Content | Failure:
    """An answer, or what went wrong, if need be in the site's own words."""
    if content is None:
        return Failure(readable(error))
    said = content.words.get("error")
    return content if said is None else Failure(readable(said), content.words.get("lost") is True)


def count_of(value: Any, what: str) -> int:
    """A count of samples, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SAMPLES:
        raise RefusedError(f"its count of {what} samples is {short(value)}")
    return value


def update_words(update: Update) -> dict[str, Any]:
    """What goes back beside the vectors: losses, and how many pseudo-labels were right, if that is known."""
    losses = {name: float(loss) for name, loss in update.losses.items()}
    counts = None if update.labelling is None else [int(n) for n in update.labelling.tolist()]
    # JSON has neither NaN nor infinity.
    finite = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
    return {"losses": finite, "labelling": counts}


def read_update(content: Content, method: Method, client: Client, message: Arrays, t: int) -> Update:
    """A site's update, if it is one: exactly the vectors that it was to train, of their lengths and finite.

    By how many samples each was trained follows from what is known of the site: it is not asked.
    """
    phases = method.phases(client, t)
    samples = samples_by_name(phases, client)
    arrays = unpacked(content.arrays, message)
    if arrays.keys() != samples.keys():
        raise RefusedError(f"it sent {short_names(arrays)} in place of {short_names(samples)}")
    networks = method.networks()
    for name, vector in arrays.items():
        net = networks.get(name)
        length = len(message[name]) if net is None else net.n_weights + net.n_statistics
        if len(vector) != length:
            raise RefusedError(f"its {short(name)} has {len(vector):,} entries in place of {length:,}")
    bad = [name for name in arrays if not all_finite([[arrays[name]]])[0]]
    if bad:
        raise RefusedError(
            f"its {short_names(bad)} holds NaN or infinite values "
            "(method.clip=1 or a smaller method.lr may help)"
        )
    losses = read_losses(content.words.get("losses"), samples)
    return Update(client, arrays, samples, losses, read_labelling(content.words.get("labelling")))


def read_losses(words: Any, names: Mapping[str, int]) -> Arrays:
    """Mean losses by model."""
    if not isinstance(words, dict) or words.keys() != names.keys():
        raise RefusedError(f"its losses are {short(words)}")
    if not all(loss is None or is_number(loss) for loss in words.values()):
        raise RefusedError(f"its losses are {short(words)}")
    return {name: torch.tensor([math.nan if loss is None else loss]) for name, loss in words.items()}


def read_labelling(counts: Any) -> torch.Tensor | None:
    """How many pseudo-labels were right, and how many were given."""
    if counts is None:
        return None
    if not isinstance(counts, list) or len(counts) != 2:
        raise RefusedError(f"its counts of pseudo-labels are {short(counts)}")
    right, given = (count_of(count, "pseudo-labelled") for count in counts)
    if right > given:
        raise RefusedError(f"its counts of pseudo-labels are {short(counts)}")
    return torch.tensor([float(right), float(given)])


def read_hits(words: Mapping[str, Any]) -> Hits:
    """What a site's validation images say of a model."""
    right, count = words.get("right"), count_of(words.get("count"), "validation")
    if not isinstance(right, dict) or not right:
        raise RefusedError(f"its hits are {short(right)}")
    checked = {str(name): count_of(hit, "right") for name, hit in right.items()}
    if not count or max(checked.values()) > count:
        raise RefusedError(f"its hits are {short(right)} of {count} samples")
    return Hits(checked, count)


def coarse(count: int) -> int:
    """A count rounded to a power of two, so that it says little; none stays none, some stays some."""
    return count and 2 ** round(math.log2(count))


def is_number(value: Any) -> bool:
    """Whether JSON gave a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def short(value: Any) -> str:
    """Something that a site sent, not longer than a line of a log should be."""
    text = repr(value)
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…"


def readable(said: Any) -> str:
    """What a site says, as it says it: in one line, and not without end."""
    text = said if isinstance(said, str) else repr(said)
    line = "".join(letter if letter.isprintable() else " " for letter in text[: LONGEST_REASON + 1])
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def short_names(names: Iterable[str]) -> str:
    """Names in one line, the first of them where there are many."""
    return some_of(map(short, names)) or "nothing"
