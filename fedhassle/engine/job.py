"""Jobs, one phase on one client each, and the inputs of their steps, drawn before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.views import UNIFORMS, Views
from fedhassle.method import Client, Part, Phase, Stream
from fedhassle.nets import Net
from fedhassle.randomness import generator
from fedhassle.vectors import Arrays


class Samples(NamedTuple):
    """The samples of one client, as rows of a table of images that clients may share."""

    images: Tensor  # (N, H, W, C) uint8
    labelled: Tensor  # (n_L,) rows
    y: Tensor  # (n_L,) their labels
    unlabelled: Tensor  # (n_U,) rows
    truth: Tensor  # (n_U,) true labels of the unlabelled rows, for metrics only; −1 = unknown

    def rows(self, part: Part) -> Tensor:
        """Rows of one part of the data."""
        return self.labelled if part == "labelled" else self.unlabelled


class Site(NamedTuple):
    """A client with its samples and their augmentations."""

    client: Client
    samples: Samples
    views: Views


class Job(NamedTuple):
    """One phase on one site in one round."""

    phase: Phase
    site: Site
    networks: Mapping[str, Net]
    message: Arrays
    labels: Mapping[Stream, Tensor]  # pseudo-labels given once per round
    key: tuple[int | str, ...]  # of its random draws
    rate: float | None = None  # share of the learning rate; None: it never changes

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.phase.length(self.site.client)

    @property
    def has_short_kernels(self) -> bool:
        """True if all of its networks are small, and have no BatchNorm."""
        return all(net.is_small and not net.n_statistics for net in self.networks.values())

    @property
    def draws_globally(self) -> bool:
        """True if a network draws from the global random state itself."""
        return any(net.randomness.globally for net in self.networks.values())

    @property
    def seeded(self) -> bool:
        """True if a network has dropout, which needs a seed for each step."""
        return any(net.randomness.seeded for net in self.networks.values())


class Feed(NamedTuple):
    """The inputs that one stream provides for a number of steps."""

    rows: Tensor  # (steps, B) in the table of images
    y: Tensor  # (steps, B), −1 = nothing to learn
    truth: Tensor  # (steps, B), −1 = unknown
    uniforms: tuple[Tensor, ...]  # (steps, B, k) per view

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.rows, self.y, self.truth, *self.uniforms)

    def between(self, first: int, last: int) -> Feed:
        """The part for steps `first` to `last`, exclusive."""
        uniforms = tuple(u[first:last] for u in self.uniforms)
        return Feed(self.rows[first:last], self.y[first:last], self.truth[first:last], uniforms)


class Schedule(NamedTuple):
    """The inputs of a number of steps, drawn before the first of them."""

    feeds: tuple[Feed, ...]  # one per stream
    draws: tuple[Tensor, ...]  # (steps, …): the draws of the phase, if any
    seeds: tuple[Tensor, ...]  # (steps,) int32: of dropout, if a network has any

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.feeds[0].rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them; `tree_leaves` would take longer than a launch."""
        return (*chain.from_iterable(feed.tensors for feed in self.feeds), *self.draws, *self.seeds)

    @property
    def truths(self) -> tuple[Tensor, ...]:
        """True labels (steps, B) of each stream, −1 = unknown; a loss does not see them."""
        return tuple(feed.truth for feed in self.feeds)

    def split(self, sizes: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
        """The tensors for the first steps, for those after them, and so on: as many as the sizes say."""
        return zip(*(torch.split(tensor, list(sizes)) for tensor in self.tensors), strict=True)

    def between(self, first: int, last: int) -> Schedule:
        """The part for steps `first` to `last`, exclusive."""
        feeds = tuple(feed.between(first, last) for feed in self.feeds)
        draws, seeds = (tuple(part[first:last] for part in parts) for parts in (self.draws, self.seeds))
        return Schedule(feeds, draws, seeds)


def draw(job: Job) -> Schedule:
    """Draws the schedule of all steps of a job."""
    phase, device = job.phase, job.site.samples.images.device
    rng = generator(*job.key)
    drawn = [array for stream in phase.streams for array in walked(job, stream, rng)]
    if phase.draw is not None:
        drawn.append(np.stack([np.asarray(phase.draw(rng), np.float32) for _ in range(job.steps)]))
    if job.seeded:
        rng = generator(*job.key, "dropout")
        drawn.append(rng.integers(0, 2**32, job.steps, np.uint32).view(np.int32))
    there = iter(together(drawn, device))
    feeds = [feed(job, stream, next(there), islice(there, len(stream.views))) for stream in phase.streams]
    draws = tuple(islice(there, phase.draw is not None))
    return Schedule(tuple(feeds), draws, seeds=tuple(there))


def walked(job: Job, stream: Stream, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws the order of a stream's samples (steps, B), and the uniforms (steps, B, k) of each view."""
    walk, n = walk_of(job.phase, stream), len(job.site.samples.rows(stream.part))
    order = walk(n, stream.batch, job.steps, rng)
    shapes = [(job.steps, stream.batch, UNIFORMS[view]) for view in stream.views]
    return [order, *(rng.random(shape, dtype=np.float32) for shape in shapes)]


def feed(job: Job, stream: Stream, order: Tensor, uniforms: Iterable[Tensor]) -> Feed:
    """The inputs that one stream provides for all steps of a job."""
    samples = job.site.samples
    rows = samples.rows(stream.part)
    true = samples.y if stream.part == "labelled" else samples.truth
    given = job.labels.get(stream) if stream.logits or stream.part == "unlabelled" else samples.y
    truth = true[order]
    if given is None:
        return Feed(rows[order], torch.full_like(truth, -1), truth, tuple(uniforms))
    return Feed(rows[order], truth if given is true else given[order], truth, tuple(uniforms))


def walk_of(phase: Phase, stream: Stream) -> Callable[[int, int, int, np.random.Generator], np.ndarray]:
    """The kind of walk that a stream of a phase makes."""
    if stream.anew:
        return anew_walk
    return epochs_walk if phase.epochs and stream is phase.streams[0] else endless_walk


def anew_walk(n: int, batch: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Indices (steps, B), each row the start of an order of its own; of fewer than B samples repeated."""
    return np.stack([np.resize(rng.permutation(n), batch) for _ in range(steps)])


def epochs_walk(n: int, batch: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Indices (steps, B) of epochs of ⌈n/B⌉ full batches; the last is filled up from the epoch's start."""
    per_epoch = -(-n // batch)
    epochs = [np.resize(rng.permutation(n), per_epoch * batch) for _ in range(steps // per_epoch)]
    return np.concatenate(epochs).reshape(steps, batch)


def endless_walk(n: int, batch: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Indices (steps, B) of shuffled passes, end to end."""
    passes = [rng.permutation(n) for _ in range(-(-steps * batch // n))]
    return np.concatenate(passes)[: steps * batch].reshape(steps, batch)


# To the device

ROOM = 16  # bytes: kernels load as many at once


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array to a device, without waiting for the copy or for earlier work."""
    (tensor,) = together([array], device)
    return tensor


def together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies arrays to a device in one transfer, since each costs the host more than a few kernels."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[np.ndarray], pinned: bool = False) -> Tensor:
    """The bytes of arrays, one after the other."""
    whole = torch.empty(sum(map(room, arrays)), dtype=torch.uint8, pin_memory=pinned)
    places = whole.numpy()
    for array in arrays:
        places[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        places = places[room(array) :]
    return whole


def unpacked(whole: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The tensors of packed arrays, as views of their bytes."""
    flats = torch.split(whole, [room(array) for array in arrays])
    types = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [
        flat[: array.nbytes].view(kind).view(array.shape)
        for flat, kind, array in zip(flats, types, arrays, strict=True)
    ]


def room(array: np.ndarray) -> int:
    """The bytes of an array, rounded up."""
    return -(-array.nbytes // ROOM) * ROOM
