"""Sparse transfer of messages and updates, and byte counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedhassle.engine.client_state import ClientState
from fedhassle.vectors import Arrays, all_finite, size_in_bytes

INDEX = 4  # bytes of the index of a changed entry
HELD = "\0held by "  # prefix of a client's name, for the arrays that the server knows it holds


class Arrived(NamedTuple):
    """Arrays as the receiver has them, and their size on the wire."""

    arrays: Arrays
    size: int  # bytes


def sent(arrays: Arrays, known: Arrays, least: float) -> Arrived:
    """Arrays at a receiver that has `known`; entries that changed by at most `least` keep their old value.

    An array is sent as pairs of index and value of the changed entries if that is shorter, otherwise whole.
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


class Transfer(NamedTuple):
    """Transfer between server and clients; if it is sparse, both ends remember the arrays a client holds."""

    client_state: ClientState
    device: torch.device

    def known(self, client: str, least: float, t: int) -> Arrays:
        """Arrays that a client holds before round t, as far as the server knows."""
        return (self.client_state.load(HELD + client, t, self.device) if least else None) or {}

    def down(self, client: str, message: Arrays, least: float, t: int) -> Arrived:
        """A message as the client receives it."""
        return sent(message, self.known(client, least, t), least)

    def up(self, client: str, arrays: Arrays, message: Arrays, least: float, t: int) -> Arrived:
        """An update as the server receives it; remembers the arrays that the client then holds."""
        arrived = sent(arrays, message, least)
        held = message | arrived.arrays
        if least and all_finite([list(held.values())])[0]:
            self.client_state.save(HELD + client, t, held)
        return arrived
