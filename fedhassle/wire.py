"""What arrives of what is sent, where small changes are not worth sending; and the bytes that it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedhassle.vectors import Arrays, size_in_bytes

INDEX = 4  # bytes that say which entry has changed


class Arrived(NamedTuple):
    """Arrays at the other end, and what it cost to get them there."""

    arrays: Arrays
    size: int  # bytes


def sent(arrays: Arrays, known: Arrays, least: float) -> Arrived:
    """Arrays at an end that knows `known`: entries that changed by no more than `least` stay as they were.

    An array is sent as index and value of what has changed where that is shorter, else whole.
    """
    if not least:
        return Arrived(arrays, size_in_bytes(arrays))
    made, total = {}, 0
    for name, vector in arrays.items():
        before, whole = known.get(name), size_in_bytes({name: vector})
        if before is None or before.shape != vector.shape:
            made[name], total = vector, total + whole
            continue
        changed = ~((vector - before).abs() <= least)  # NaN is a change
        short = int(changed.sum()) * (vector.element_size() + INDEX)  # one synchronisation with the device
        made[name] = torch.where(changed, vector, before) if short < whole else vector
        total += min(short, whole)
    return Arrived(made, total)
