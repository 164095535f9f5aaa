"""The messages between server and sites: a few JSON values and flat arrays. Pure, and without Flower.

The server trusts nothing that a site sends: anything but exactly what was agreed is a `RefusedError` that
says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.engine.client import samples_by_name
from fedhassle.method import NO_LABELS, Client, Method, Phase, Update
from fedhassle.names import some_of
from fedhassle.vectors import Arrays, all_finite

WHOLE, INDEX, VALUE = "whole ", "index ", "value "  # prefix of a vector's name: how it is sent
TYPES = {WHOLE: np.dtype("<f4"), INDEX: np.dtype("<i4"), VALUE: np.dtype("<f4")}
LONGEST_NAME = 100
LONGEST_REASON = 500
MOST_SAMPLES = 10**12
PATIENTS = ("patients", "validation_patients")  # of a site's introduction: all, and those in validation
COARSE = 2  # two counts that are rounded to powers of two differ by at most this factor more than they did


class RefusedError(ValueError):
    """A site sent something that is not as agreed."""


class Payload(NamedTuple):
    """The payload of a message: values that JSON can hold, and flat arrays by name."""

    words: dict[str, Any]
    arrays: dict[str, np.ndarray] = {}  # noqa: RUF012 - never written to


class Failure(NamedTuple):
    """The error that a site reports instead of an answer."""

    why: str
    lost: bool = False  # the site no longer has what it kept for this run, and can start afresh
    gone: bool = False  # it has said nothing: its node or its message was lost


class Introduction(NamedTuple):
    """A site's description of itself."""

    client: Client
    validation: int  # labelled samples that it keeps for validation
    agreed: str  # the hash of its agreement
    versions: dict[str, str]
    patients: dict[str, int] = {}  # noqa: RUF012 - never written to; numbers of patients, if it knows them

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of its images, by use."""
        images = {"labelled": self.client.labelled, "unlabelled": self.client.unlabelled}
        return {**images, "validation": self.validation}


class Hits(NamedTuple):
    """A model's correct predictions on a site's validation images."""

    right: dict[str, int]  # by prediction
    images: int
    effective: int | None = None  # independent images that tell as much, if the site knows its patients


def to_json(words: Mapping[str, Any]) -> str:
    """Serialises words; NaN is an error."""
    return json.dumps(words, allow_nan=False, sort_keys=True)


def from_json(text: str) -> dict[str, Any]:
    """Parses a JSON object; refuses anything else, and NaN."""

    def refuse(word: str) -> float:
        raise RefusedError(f"its JSON contains {word}")

    try:
        words = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"it did not send valid JSON: {error}") from error
    if not isinstance(words, dict):
        raise RefusedError("it did not send a JSON object")
    return words


# Vectors


def packed(arrays: Arrays, known: Arrays) -> dict[str, np.ndarray]:
    """Packs vectors for a receiver that has `known`: whole, or only the changes where that is shorter."""
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
    """Unpacks vectors; `known` are those that the sender assumed here."""
    for key, array in arrays.items():
        kind = next((kind for kind in TYPES if key.startswith(kind)), None)
        if kind is None or array.dtype != TYPES[kind] or array.ndim != 1:
            raise RefusedError(f"it sent an array {short(key)} of {array.dtype} and shape {array.shape}")
    # Copies: arrays that were read from bytes are read-only.
    whole = {
        k.removeprefix(WHOLE): torch.from_numpy(v.copy()) for k, v in arrays.items() if k.startswith(WHOLE)
    }
    parts = {k.removeprefix(INDEX): v for k, v in arrays.items() if k.startswith(INDEX)}
    if parts.keys() != {k.removeprefix(VALUE) for k in arrays if k.startswith(VALUE)} or parts.keys() & whole:
        raise RefusedError("it sent vectors with parts missing or duplicated")
    return whole | {k: patched(k, known, index, arrays[VALUE + k]) for k, index in parts.items()}


def patched(name: str, known: Arrays, index: np.ndarray, value: np.ndarray) -> torch.Tensor:
    """A copy of a known vector with some entries replaced."""
    if name not in known:
        raise RefusedError(f"it sent changes of {short(name)}, which is not known here")
    vector = known[name].clone()
    inside = not len(index) or (index.min() >= 0 and index.max() < len(vector))
    if len(index) != len(value) or not inside:
        raise RefusedError(f"it sent changes outside the range of {short(name)}")
    vector[torch.from_numpy(index.astype(np.int64))] = torch.from_numpy(value.copy()).to(vector)
    return vector


# Requests of the server and answers of a site


def introduction(words: Mapping[str, Any]) -> Introduction:
    """Reads a site's description of itself."""
    name = words.get("site")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise RefusedError(f"its name is {short(name)}")
    labelled, unlabelled, validation = (
        count_of(words.get(key), key) for key in ("labelled", "unlabelled", "validation")
    )
    agreed, versions = words.get("agreed"), words.get("versions")
    if not isinstance(agreed, str) or not isinstance(versions, dict):
        raise RefusedError("it did not send the hash of its agreement, or its versions")
    plain = {str(k)[:LONGEST_NAME]: str(v)[:LONGEST_NAME] for k, v in list(versions.items())[:20]}
    patients = read_patients(words, labelled + unlabelled + validation, validation)
    return Introduction(Client(name, labelled, unlabelled), validation, agreed, plain, patients)


def read_patients(words: Mapping[str, Any], images: int, validation: int) -> dict[str, int]:
    """Reads the numbers of a site's patients, and of those in validation; none if it does not know them.

    Coarse counts may be off by a factor of √2 each way.
    """
    if PATIENTS[0] not in words:
        return {}
    found = {key: count_of(words.get(key), key) for key in PATIENTS}
    for key, most in zip(PATIENTS, (images, validation), strict=True):
        if found[key] > 2 * most:
            raise RefusedError(f"it has {found[key]:,} {key} in {most:,} images")
    return found


def recounted(said: Introduction, words: Any, coarse_counts: bool, images: int) -> Introduction:
    """A site's introduction after its labels have changed; refuses counts of more images than it joined with.

    Labels move images from one use to another: the sum cannot grow. Coarse counts hide the sum: each lies
    within a factor √2 of its number, so that their sum may double, however often labels change.
    """
    if not isinstance(words, dict) or words.keys() != said.counts.keys():
        raise RefusedError(f"its new counts are {short(words)}")
    labelled, unlabelled, validation = (count_of(words[key], key) for key in said.counts)
    now = labelled + unlabelled + validation
    if now > images * (2 if coarse_counts else 1):
        raise RefusedError(
            f"it joined with {images:,} images, and with its new labels it counts {now:,}: to use other "
            "images, its node must be restarted"
        )
    return said._replace(client=Client(said.client.name, labelled, unlabelled), validation=validation)


def failure(why: str, lost: bool = False) -> Payload:
    """The answer of a site that cannot do what the server asks."""
    return Payload({"error": why, "lost": lost})


def answered(payload: Payload | None, error: str) -> Payload | Failure:
    """A site's answer, or the failure that it reports, or the error of the transport."""
    if payload is None:
        return Failure(readable(error), gone=True)
    said = payload.words.get("error")
    return payload if said is None else Failure(readable(said), payload.words.get("lost") is True)


def count_of(value: Any, what: str) -> int:
    """A valid count; `what` is counted."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SAMPLES:
        raise RefusedError(f"its count of {what} samples is {short(value)}")
    return value


def update_words(update: Update, rounded: bool = False) -> dict[str, Any]:
    """The rest of an update: losses, and counts of pseudo-labels given and asked for.

    With `rounded`, the latter is a power of two, and the former the same share of it.
    """
    losses = {name: float(loss) for name, loss in update.losses.items()}
    # JSON has neither NaN nor infinity.
    finite = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
    _, given, asked, _ = update.labelling.tolist()
    told = coarse(int(asked)) if rounded else int(asked)
    return {"losses": finite, "pseudo_labels": [round(given * told / asked) if asked else 0, told]}


def read_update(payload: Payload, method: Method, client: Client, message: Arrays, t: int) -> Update:
    """Reads a site's update; refuses any but the expected vectors, of their lengths and finite.

    The number of samples behind each vector follows from the site's introduction; the update does not say it.
    """
    phases = method.phases(client, t)
    samples = samples_by_name(phases, client)
    arrays = unpacked(payload.arrays, message)
    if arrays.keys() != samples.keys():
        raise RefusedError(f"it sent {short_names(arrays)} instead of {short_names(samples)}")
    networks = method.networks()
    for name, vector in arrays.items():
        net = networks.get(name)
        length = len(message[name]) if net is None else net.n_weights + net.n_statistics
        if len(vector) != length:
            raise RefusedError(f"its {short(name)} has {len(vector):,} entries instead of {length:,}")
    bad = [name for name in arrays if not all_finite([[arrays[name]]])[0]]
    if bad:
        raise RefusedError(
            f"its {short_names(bad)} contains NaN or infinite values "
            "(method.clip=1 or a smaller method.lr may help)"
        )
    losses = read_losses(payload.words.get("losses"), samples)
    labelling = read_labelling(payload.words.get("pseudo_labels"), most_labels(phases, client))
    return Update(client, arrays, samples, losses, labelling)


def read_losses(words: Any, names: Mapping[str, int]) -> Arrays:
    """Reads the mean loss of each model."""
    if not isinstance(words, dict) or words.keys() != names.keys():
        raise RefusedError(f"its losses are {short(words)}")
    if not all(loss is None or is_number(loss) for loss in words.values()):
        raise RefusedError(f"its losses are {short(words)}")
    return {name: torch.tensor([math.nan if loss is None else float(loss)]) for name, loss in words.items()}


def most_labels(phases: Sequence[Phase], client: Client) -> int:
    """The most pseudo-labels that a client's training can ask for: once, and at each step."""
    walks = [
        client.unlabelled + phase.length(client) * stream.batch
        for phase in phases
        for stream in phase.streams
        if stream.part == "unlabelled"
    ]
    return COARSE * sum(walks)


def read_labelling(counts: Any, most: int) -> torch.Tensor:
    """Reads the counts of pseudo-labels given and asked for, which a site of an older version does not send.

    Only a simulation knows how many are right.
    """
    if counts is None:
        return NO_LABELS
    if not isinstance(counts, list) or len(counts) != 2:
        raise RefusedError(f"its counts of pseudo-labels are {short(counts)}")
    given, asked = (count_of(count, "pseudo-labelled") for count in counts)
    if not given <= asked <= most:
        raise RefusedError(f"its counts of pseudo-labels are {short(counts)}")
    return torch.tensor([0.0, given, asked, 0.0])


def read_hits(words: Mapping[str, Any], images: int, predictions: Collection[str]) -> Hits:
    """Reads a site's evaluation of a model.

    Refuses another number of images than the site has introduced, and other predictions than the model makes.
    """
    right, count = words.get("right"), count_of(words.get("count"), "validation")
    if not isinstance(right, dict) or right.keys() != set(predictions):
        raise RefusedError(f"its hits are {short(right)}, not those of {short_names(predictions)}")
    checked = {str(name): count_of(hit, "right") for name, hit in right.items()}
    if count != images:
        raise RefusedError(f"it evaluated on {count:,} images, but joined with {images:,} for validation")
    if not count or max(checked.values()) > count:
        raise RefusedError(f"its hits are {short(right)} of {count} samples")
    if "effective" not in words:
        return Hits(checked, count)
    effective = count_of(words["effective"], "effective")
    if not 0 < effective <= 2 * count:  # coarse counts may be off by a factor of √2 each way
        raise RefusedError(f"its {count:,} images are worth {effective:,}")
    return Hits(checked, count, min(effective, count))


def coarse(count: int) -> int:
    """Rounds a count to a power of two, so that it reveals little; 0 stays 0."""
    return count and 2 ** round(math.log2(count))


def is_number(value: Any) -> bool:
    """True for a finite number, as JSON has it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def short(value: Any) -> str:
    """A value that a site sent, cut to the length of a log line."""
    text = repr(value)
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…"


def readable(said: Any) -> str:
    """A site's own words on one line, cut to a readable length."""
    text = said if isinstance(said, str) else repr(said)
    line = "".join(letter if letter.isprintable() else " " for letter in text[: LONGEST_REASON + 1])
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def short_names(names: Iterable[str]) -> str:
    """Names on one line, only the first of them if there are many."""
    return some_of(map(short, names)) or "nothing"
