"""Layouts: the number of labels at each client, as in the paper or given explicitly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fedhassle.errors import UserError

Counts = npt.NDArray[np.int64]
LabelLayout = str | Mapping[str, float] | Sequence[float]

Kind = Literal["full", "partial", "unlabelled"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(labelled: int, unlabelled: int) -> Kind:
    """Returns the kind of a client with these numbers of samples."""
    if not labelled:
        return "unlabelled"
    return "partial" if unlabelled else "full"


class Holding(NamedTuple):
    """The numbers of labelled and unlabelled samples of one client."""

    labelled: int
    unlabelled: int

    @property
    def size(self) -> int:
        """The number of all samples, n_k."""
        return self.labelled + self.unlabelled

    @property
    def kind(self) -> Kind:
        """The client's kind."""
        return kind_of(self.labelled, self.unlabelled)


class Mix(NamedTuple):
    """The number of clients of each kind, and the labelled share of the whole data set."""

    full: int = 0
    partial: int = 0
    unlabelled: int = 0
    share: float | None = None

    @property
    def clients(self) -> int:
        """The number of all clients."""
        return self.full + self.partial + self.unlabelled

    def __str__(self) -> str:
        given = [f"{key}={value}" for key, value in self._asdict().items() if value]
        return "{" + ", ".join(given) + "}"


PAPER_CLIENTS = 20
PAPER = {
    "5%": Mix(full=0, partial=2, unlabelled=18, share=0.05),
    "10%": Mix(full=1, partial=9, unlabelled=10, share=0.1),
    "20%": Mix(full=2, partial=8, unlabelled=10, share=0.2),
    "PL": Mix(full=0, partial=20, unlabelled=0, share=0.1),
    "LPL": Mix(full=1, partial=19, unlabelled=0, share=0.1),
    "UPL": Mix(full=0, partial=10, unlabelled=10, share=0.1),
    "LU": Mix(full=2, partial=0, unlabelled=18, share=0.1),
    "ALL": Mix(full=1, partial=9, unlabelled=10, share=0.1),
}


def layout(
    labels: LabelLayout, samples: int, clients: int = 20, size: int | None = None
) -> tuple[Holding, ...]:
    """Returns the holdings of all clients: full, partial, then unlabelled ones, or in the order of a list."""
    sizes = client_sizes(samples, clients, size)
    if isinstance(labels, str):
        labelled = _labels_of_mix(_named(labels, clients), sizes, samples)
    elif isinstance(labels, Mapping):
        labelled = _labels_of_mix(_explicit(labels, clients), sizes, samples)
    else:
        labelled = _labels_of_shares(labels, sizes)
    return tuple(Holding(int(n), int(all_ - n)) for n, all_ in zip(labelled, sizes, strict=True))


def client_sizes(samples: int, clients: int, size: int | None = None) -> Counts:
    """Returns equal sizes n_k: `size`, or an even share of all samples (the first get the remainder)."""
    _require_whole("split.clients", clients)
    if clients > samples:
        raise UserError(f"{clients} clients cannot share {samples} samples; take at most {samples} clients")
    if size is None:
        even, rest = divmod(samples, clients)
        return even + (np.arange(clients) < rest).astype(np.int64)
    _require_whole("split.size", size)
    if size * clients > samples:
        raise UserError(
            f"{clients} clients of split.size={size} need {size * clients} samples, but there are {samples}; "
            f"take split.size={samples // clients} or less, or fewer clients"
        )
    return np.full(clients, size, dtype=np.int64)


def thinned(unlabelled: Counts, labelled: int, ratio: float) -> Counts:
    """Reduces unlabelled counts in proportion to ratio·|D_L| in total; a client with some keeps at least one.

    Counts never fall as the ratio grows, so the data of a smaller ratio are a subset of those of a larger.
    """
    total = int(unlabelled.sum())
    if total == 0:
        raise UserError(f"split.ratio={ratio} thins unlabelled data, but every client is full; leave it out")
    largest = f"{total / labelled:.10g}"
    if not (math.isfinite(ratio * labelled) and ratio > 0 and round(ratio * labelled) <= total):
        raise UserError(
            f"split.ratio={ratio} is impossible: {labelled} labelled and {total} unlabelled samples allow "
            f"ratios above 0 and up to {largest}"
        )
    return apportion(unlabelled, round(ratio * labelled))


def apportion(capacity: Counts, total: int) -> Counts:
    """Divides a total in proportion to the capacities, with at least one for each that is not zero.

    Units are dealt in one fixed order (Webster's divisor method), so that counts grow with the total;
    rounding each share would not ensure that.
    """
    owner, rank = units(capacity)
    turn = np.where(rank == 0, 0.0, (rank + 0.5) / capacity[owner])
    dealt = owner[np.argsort(turn, kind="stable")][: max(total, int((capacity > 0).sum()))]
    return np.bincount(dealt, minlength=capacity.size)


def units(counts: Counts) -> tuple[Counts, Counts]:
    """Lists every unit of the counts, owner by owner: its owner, and its rank from 0 among the owner's."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]


def relabelled(labels: LabelLayout, holdings: Sequence[Holding], sizes: Counts, most: Counts) -> Counts:
    """Returns labelled counts for clients whose sizes differ from the plan, and of which `most` have labels.

    A list of shares applies to the actual sizes. Otherwise full clients label everything, and the remaining
    planned labels are spread over the partial clients in proportion to their sizes.
    """
    most = np.minimum(most, sizes - 1)  # of a partial client
    kinds = np.array([holding.kind for holding in holdings])
    partial = kinds == "partial"
    counts = np.where(kinds == "full", sizes, 0)
    if not isinstance(labels, str | Mapping):
        some = np.clip(np.rint(np.asarray(labels) * sizes).astype(np.int64), 1, most)
        return np.where(partial, some, counts)
    if not partial.any():
        return counts
    planned = sum(holding.labelled for holding in holdings)
    rest = planned - int(counts.sum())
    room = most[partial]
    if not room.size <= rest <= room.sum():
        raise UserError(
            f"the drawn sizes leave {rest} of {planned} labels to {room.size} partial clients that can take "
            f"{room.size} to {room.sum()}; try another split.seed, split.kind=balanced, or another share "
            f"({'larger' if rest < room.size else 'smaller'} than now)"
        )
    counts[partial] = apportion(room, rest)
    return counts


def _labels_of_mix(mix: Mix, sizes: Counts, samples: int) -> Counts:
    """Returns labelled counts: full clients label everything, partial ones share the rest equally."""
    if mix.full + mix.partial == 0:
        raise UserError(f"split.labels={mix} has no labels to learn from; add a full or a partial client")
    labelled = np.where(np.arange(sizes.size) < mix.full, sizes, 0)
    partial = slice(mix.full, mix.full + mix.partial)
    if mix.share is None and mix.partial:
        raise UserError(f"split.labels={mix} needs the labelled share of all data, for example share=0.1")
    if mix.share is not None:
        rest = round(mix.share * samples) - int(labelled.sum())
        _require_budget(mix, rest, sizes, samples)
        if mix.partial:
            even, more = divmod(rest, mix.partial)
            labelled[partial] = even + (np.arange(mix.partial) < more)
    return labelled


def _require_budget(mix: Mix, rest: int, sizes: Counts, samples: int) -> None:
    """Raises for a share that the full and partial clients cannot hold."""
    held = int(sizes[: mix.full].sum())
    room = int((sizes[mix.full : mix.full + mix.partial] - 1).sum())
    if room < mix.partial:
        raise UserError(
            f"a partial client needs 2 samples, one with a label and one without; {sizes.size} clients hold "
            f"{sizes[-1]} each; take at most {samples // 2} clients, or a larger split.size"
        )
    # Without partial clients the full ones hold the whole budget: only rounding may differ.
    slack = mix.full if mix.partial == 0 else 0
    low, high = mix.partial - slack, room + slack
    if not low <= rest <= high:
        lowest, highest = (f"{(held + labels) / samples:.10g}" for labels in (mix.partial, room))
        works = f"share={lowest}" if lowest == highest else f"a share from {lowest} to {highest}"
        raise UserError(
            f"split.labels={mix} asks for {rest + held} labels of {samples} samples, but {mix.full} full and "
            f"{mix.partial} partial clients hold {held + mix.partial} to {held + room}; take {works}, "
            "or other numbers of clients"
        )


def _labels_of_shares(labels: Sequence[float], sizes: Counts) -> Counts:
    """Returns each client's share of its size, rounded."""
    if not isinstance(labels, Sequence | np.ndarray):
        raise UserError(
            f"split.labels={labels!r} is not a layout; take one of {', '.join(PAPER)}, a list of shares, or "
            f"{Mix(partial=sizes.size, share=0.1)}"
        )
    if len(labels) != sizes.size:
        raise UserError(
            f"split.labels lists {len(labels)} shares for {sizes.size} clients; give one for each client, "
            f"or set split.clients={len(labels)}"
        )
    for client, share in enumerate(labels, start=1):
        _require_share(f"split.labels of client {client}", share)
    shares = np.asarray(labels, dtype=np.float64)
    labelled = np.rint(shares * sizes).astype(np.int64)
    empty = (shares > 0) & (shares < 1) & ((labelled == 0) | (labelled == sizes))
    if empty.any():
        k = int(np.argmax(empty))
        raise UserError(
            f"share {shares[k]} of client {k + 1} rounds to {labelled[k]} of its {sizes[k]} samples; take 0, "
            f"1 or a share from {1 / sizes[k]:.10g} to {(sizes[k] - 1) / sizes[k]:.10g}"
        )
    if not labelled.any():
        raise UserError("split.labels are all 0: no labels to learn from; give a client a share above 0")
    return labelled


def _named(name: str, clients: int) -> Mix:
    """Returns the paper's layout of that name, which needs 20 clients."""
    if name not in PAPER:
        example = _scaled(PAPER["10%"], clients)
        raise UserError(
            f"split.labels={name!r} is unknown; take {', '.join(PAPER)}, or for example {example}"
        )
    if clients != PAPER_CLIENTS:
        raise UserError(
            f"split.labels={name!r} is a layout of {PAPER_CLIENTS} clients; for {clients} write "
            f"split.labels={_scaled(PAPER[name], clients)}"
        )
    return PAPER[name]


def _scaled(mix: Mix, clients: int) -> Mix:
    """Scales a layout to another number of clients, such that its labels always fit."""
    full = mix.full * clients // PAPER_CLIENTS  # rounded down: the budget must not run out on full clients
    if mix.partial == 0:
        full = max(full, 1)
        return Mix(full=full, unlabelled=clients - full)
    partial = min(max(round(mix.partial * clients / PAPER_CLIENTS), 1), clients - full)
    if mix.unlabelled == 0:
        partial = clients - full
    return Mix(full, partial, clients - full - partial, mix.share)


def _explicit(labels: Mapping[str, float], clients: int) -> Mix:
    """Returns the layout given as counts of clients and a share."""
    unknown = [key for key in labels if key not in Mix._fields]
    if unknown:
        raise UserError(f"split.labels has no {unknown[0]!r}; take {', '.join(Mix._fields)}")
    counts = {key: labels.get(key, 0) for key in KINDS}
    for key, count in counts.items():
        _require_whole(f"split.labels.{key}", count, least=0)
    share = labels.get("share")
    if share is not None:
        _require_share("split.labels.share", share)
    full, partial, unlabelled = (int(count) for count in counts.values())
    mix = Mix(full, partial, unlabelled, None if share is None else float(share))
    if mix.clients != clients:
        raise UserError(
            f"split.labels={mix} counts {mix.clients} clients, but split.clients is {clients}; "
            f"make the counts add up to {clients}, or set split.clients={mix.clients}"
        )
    return mix


def _require_whole(name: str, value: object, least: int = 1) -> None:
    """Raises unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _require_share(name: str, value: object) -> None:
    """Raises unless the value is a number from 0 to 1; NaN is not."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # type: ignore[operator]
        raise UserError(f"{name} must be a number from 0 to 1, got {value!r}")
