"""What arrives of what is sent, where small changes are not worth sending; and the bytes that it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedhassle.engine.client_state import Memory
from fedhassle.vectors import Arrays, all_finite, size_in_bytes

INDEX = 4  # bytes that say which entry has changed
HELD = "\0held by "  # before the name of a client: what it is known to hold, if messages are sparse


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


class Wire(NamedTuple):
    """One end of the wires to clients: what both ends know is remembered where it spares sending."""

    memory: Memory
    device: torch.device

    def known(self, client: str, least: float, t: int) -> Arrays:
        """What a client is known to hold before round t."""
        return (self.memory.load(HELD + client, t, self.device) if least else None) or {}

    def down(self, client: str, message: Arrays, least: float, t: int) -> Arrived:
        """A message as it arrives."""
        return sent(message, self.known(client, least, t), least)

    def up(self, client: str, arrays: Arrays, message: Arrays, least: float, t: int) -> Arrived:
        """An update as it arrives; what the client holds then is known to both ends."""
        arrived = sent(arrays, message, least)
        held = message | arrived.arrays
        if least and all_finite([list(held.values())])[0]:
            self.memory.save(HELD + client, t, held)
        return arrived
