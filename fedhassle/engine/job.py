"""Jobs, one phase on one client each, and the inputs of their steps, drawn before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
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

    def between(self, first: int, last: int) -> Schedule:
        """The part for steps `first` to `last`, exclusive."""
        feeds = tuple(feed.between(first, last) for feed in self.feeds)
        draws, seeds = (tuple(part[first:last] for part in parts) for parts in (self.draws, self.seeds))
        return Schedule(feeds, draws, seeds)


def draw(job: Job) -> Schedule:
    """Draws the schedule of all steps of a job."""
    phase = job.phase
    rng = generator(*job.key)
    device = job.site.samples.images.device
    feeds = tuple(feed(job, stream, rng) for stream in phase.streams)
    if phase.draw is None:
        return Schedule(feeds, (), seeds(job))
    draws = np.stack([np.asarray(phase.draw(rng), np.float32) for _ in range(job.steps)])
    return Schedule(feeds, (to_device(draws, device),), seeds(job))


def seeds(job: Job) -> tuple[Tensor, ...]:
    """Draws the seed of dropout in each step, if a network has any."""
    if not job.seeded:
        return ()
    drawn = generator(*job.key, "dropout").integers(0, 2**32, job.steps, np.uint32).view(np.int32)
    return (to_device(drawn, job.site.samples.images.device),)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array to a device, without waiting for the copy or for earlier work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def feed(job: Job, stream: Stream, rng: np.random.Generator) -> Feed:
    """Draws the inputs that one stream provides for all steps of a job."""
    samples = job.site.samples
    steps = job.steps
    rows = samples.rows(stream.part)
    walk = walk_of(job.phase, stream)
    order = to_device(walk(len(rows), stream.batch, steps, rng), rows.device)  # (steps, B)
    true = samples.y if stream.part == "labelled" else samples.truth
    given = job.labels.get(stream) if stream.logits or stream.part == "unlabelled" else samples.y
    unknown = torch.full_like(rows, -1)
    shapes = [(steps, stream.batch, UNIFORMS[view]) for view in stream.views]
    return Feed(
        rows=rows[order],
        y=(unknown if given is None else given)[order],
        truth=true[order],
        uniforms=tuple(to_device(rng.random(s, dtype=np.float32), rows.device) for s in shapes),
    )


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
