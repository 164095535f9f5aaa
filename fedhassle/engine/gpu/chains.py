"""Which jobs of a round must wait for each other: chains of one client's jobs, which are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedhassle.engine.client import Trained, Visit


class Chain(NamedTuple):
    """Jobs of one client that build on each other, as a visit of their own; chains are independent."""

    client: int  # whose, by its place among the visits
    visit: Visit


class Group(NamedTuple):
    """Jobs that have to follow each other, and the names that they train."""

    names: set[str]
    places: list[int]  # of the jobs in their visit


def chains(visits: Sequence[Visit]) -> list[Chain]:
    """The jobs of all clients: together those that train one name, or belong to a client that keeps any."""
    return [Chain(i, part) for i, visit in enumerate(visits) for part in connected(visit)]


def connected(visit: Visit) -> list[Visit]:
    """One client's jobs, by what builds on what; labels given before are counted by `joined`."""
    groups: list[Group] = []
    for place, job in enumerate(visit.jobs):
        new = Group(set(job.phase.trained), [place])
        met = [group for group in groups if visit.kept or group.names & new.names]
        for group in met:
            groups.remove(group)
            new = Group(new.names | group.names, new.places + group.places)
        groups.append(new)
    counted = visit.update.labelling
    empty = visit.update._replace(labelling=None if counted is None else torch.zeros_like(counted))
    in_order = [tuple(visit.jobs[place] for place in sorted(group.places)) for group in groups]
    return [Visit(jobs, visit.kept, empty) for jobs in in_order]


def joined(visit: Visit, parts: Sequence[Trained]) -> Trained:
    """One client's update and memory, from those of its chains."""
    update = visit.update
    kept = visit.kept
    for part, memory in parts:
        update = update._replace(arrays=update.arrays | part.arrays, losses=update.losses | part.losses)
        if update.labelling is not None and part.labelling is not None:
            update = update._replace(labelling=update.labelling + part.labelling)
        kept = memory
    names = dict.fromkeys(name for job in visit.jobs for name in job.phase.trained)
    arrays = {name: update.arrays[name] for name in names}
    losses = {name: update.losses[name] for name in names}
    return update._replace(arrays=arrays, losses=losses), kept
