"""Chains of jobs that depend on each other, and groups of chains that train together."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

from fedhassle.engine.client import Trained, Visit
from fedhassle.engine.labels import no_labels

IMAGES = 4096  # in the steps of a group together: more take much memory (docs/speed.md)

# Chains of jobs


class Chain(NamedTuple):
    """Jobs of one client that depend on each other, as a visit of their own; chains are independent."""

    client: int  # index of the client's visit
    visit: Visit
    shapes: tuple[Hashable, ...] = ()  # of its jobs, once they are trimmed


class Component(NamedTuple):
    """Jobs that depend on each other, and the names that they train."""

    names: set[str]
    places: list[int]  # indices of the jobs in their visit


def chains(visits: Sequence[Visit]) -> list[Chain]:
    """The chains of all clients."""
    return [Chain(i, part) for i, visit in enumerate(visits) for part in connected(visit)]


def connected(visit: Visit) -> list[Visit]:
    """Splits a client's jobs into chains: jobs depend on each other if they train a common name.

    All jobs of a client that keeps arrays form one chain. Labels given before training are counted by
    `joined`.
    """
    components: list[Component] = []
    for place, job in enumerate(visit.jobs):
        new = Component(set(job.phase.trained), [place])
        met = [component for component in components if visit.kept or component.names & new.names]
        for component in met:
            components.remove(component)
            new = Component(new.names | component.names, new.places + component.places)
        components.append(new)
    empty = visit.update._replace(labelling=no_labels(visit.update.labelling.device))
    in_order = [tuple(visit.jobs[place] for place in sorted(component.places)) for component in components]
    return [Visit(jobs, visit.kept, empty) for jobs in in_order]


def joined(visit: Visit, parts: Sequence[Trained]) -> Trained:
    """Joins the results of a client's chains."""
    update = visit.update
    kept = visit.kept
    for part, memory in parts:
        update = update._replace(
            arrays=update.arrays | part.arrays,
            losses=update.losses | part.losses,
            labelling=update.labelling + part.labelling,
        )
        kept = memory
    names = dict.fromkeys(name for job in visit.jobs for name in job.phase.trained)
    arrays = {name: update.arrays[name] for name in names}
    losses = {name: update.losses[name] for name in names}
    return update._replace(arrays=arrays, losses=losses), kept


# Groups of chains


class Form(NamedTuple):
    """A shape of jobs, and the number of seats for them: as many share each kernel."""

    shape: Hashable
    seats: int = 1


class Group(NamedTuple):
    """Chains of the same shapes that train together on a lane, each in a seat; some seats may be empty."""

    chains: tuple[Chain, ...]
    seats: int = 1

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """The shape of each job of a chain."""
        return self.chains[0].shapes

    @property
    def forms(self) -> list[Form]:
        """The form of each job of a chain."""
        return [Form(shape, self.seats) for shape in self.shapes]

    @property
    def steps(self) -> list[int]:
        """The largest number of steps of each job of a chain."""
        side_by_side = zip(*(chain.visit.jobs for chain in self.chains), strict=True)
        return [max(job.steps for job in jobs) for jobs in side_by_side]


def grouped(work: Sequence[Chain], seats: int, alone: Container[Hashable]) -> list[Group]:
    """Groups chains that have the same shapes, none of which is in `alone`, and about as many steps.

    A group fills at least half of its seats. Its longest chain has at most twice the steps of its shortest,
    since the seat of one that has ended stays empty. Other chains train alone, and so do those of large
    networks, whose kernels fill a GPU by themselves, of networks with BatchNorm, which has no batched form,
    and of steps with very many images.
    """
    alike: dict[tuple[Hashable, ...], list[Chain]] = {}
    for chain in work:
        alike.setdefault(chain.shapes, []).append(chain)
    groups = []
    for shapes, chains in alike.items():
        short = all(job.has_short_kernels for job in chains[0].visit.jobs)
        possible = short and not any(shape in alone for shape in shapes)
        size = min(seats, most_seats(chains[0])) if possible else 1
        waiting = sorted(chains, key=steps_of, reverse=True)
        while waiting:
            together = [chain for chain in waiting[:size] if 2 * steps_of(chain) >= steps_of(waiting[0])]
            if 2 * len(together) < size:
                together = waiting[:1]
            groups.append(Group(tuple(together), size if len(together) > 1 else 1))
            del waiting[: len(together)]
    return groups


def steps_of(chain: Chain) -> int:
    """Number of steps of a chain."""
    return sum(job.steps for job in chain.visit.jobs)


def most_seats(chain: Chain) -> int:
    """The most seats of a group of such chains, by the images in a step."""
    return max(1, IMAGES // max(job.phase.images for job in chain.visit.jobs))
