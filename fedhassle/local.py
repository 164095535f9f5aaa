"""Local training of one client: the simulator, a GPU lane and a federation's node all call `train`.

A phase is prepared once (`prepare`: its whole walk and all its draws become tensors) and then advanced
step by step (`step`: nothing but tensor operations on buffers at fixed places, so that it can be
captured and replayed). No name of any method occurs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.method import SGD, Batch, Client, Method, Model, Models, Part, Phase, Stream, Update, as_models
from fedhassle.nets import Net
from fedhassle.randomness import generator, number
from fedhassle.vectors import Arrays

LABELLING_BATCH = 1000  # images a pass when labels are given once a round


class Samples(NamedTuple):
    """What one client holds, as rows of a table of images that other clients may share."""

    images: Tensor  # (N, H, W, C) uint8
    labelled: Tensor  # (n_L,) rows
    y: Tensor  # (n_L,) their labels
    unlabelled: Tensor  # (n_U,) rows
    truth: Tensor | None = None  # (n_U,) true labels of the unlabelled rows: read by metrics alone

    def rows(self, part: Part) -> Tensor:
        """The rows of one part of the data."""
        return self.labelled if part == "labelled" else self.unlabelled


class Site(NamedTuple):
    """Where a client trains: who it is, what it holds and how training sees it."""

    client: Client
    samples: Samples
    views: Views


class Job(NamedTuple):
    """One phase on one site in one round."""

    phase: Phase
    site: Site
    networks: Mapping[str, Net]
    message: Arrays
    labels: Mapping[Stream, Tensor]  # those given once a round
    key: tuple[int | str, ...]  # of its randomness

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return self.phase.length(self.site.client)


class Feed(NamedTuple):
    """All that a stream hands to the steps of a phase, drawn before the first one."""

    rows: Tensor  # (steps, B) of the table of images
    y: Tensor  # (steps, B), −1 = nothing to learn
    truth: Tensor  # (steps, B), −1 = not known
    uniforms: tuple[Tensor, ...]  # per view (steps, B, k)


class Buffers(NamedTuple):
    """Everything that the steps of a job read or write, at fixed places."""

    weights: Arrays  # written, as all down to `step`
    statistics: Arrays
    momentum: Arrays
    losses: Arrays
    labelling: Tensor  # (2,): online labels right, given
    step: Tensor  # (1,)
    received: Arrays  # read, as all that follow
    images: Tensor
    feeds: tuple[Feed, ...]
    draws: Tensor | None  # (steps, …)


def train(
    method: Method, site: Site, message: Arrays, memory: Arrays | None, t: int, seed: int
) -> tuple[Update, Arrays]:
    """One client's round: what it sends back, and what it keeps."""
    networks, phases = method.networks(), method.phases(site.client, t)
    labels = give_labels(phases, site, as_models(message, networks))
    samples = samples_by_name(phases, site.client)
    update = Update(site.client, {}, samples, {}, count_labels(labels, site.samples))
    kept = method.memory(site.client, message) if memory is None else memory
    for phase in phases:
        key = (seed, t, site.client.name, phase.name)
        job = Job(phase, site, networks, message, labels, key)
        buffers = prepare(job, message | update.arrays | kept, kept)
        with own_randomness(job):
            for _ in range(job.steps):
                step(job, buffers)
        update, kept = collect(job, buffers, update, kept)
    return update, kept


def samples_by_name(phases: tuple[Phase, ...], client: Client) -> dict[str, int]:
    """How many samples train each name: a part counts once, however often it is walked over."""
    parts: dict[str, set[Part]] = {}
    for phase in phases:
        for name in phase.trained:
            parts.setdefault(name, set()).update(stream.part for stream in phase.streams)
    return {name: sum(client.count(part) for part in walked) for name, walked in parts.items()}


@contextmanager
def own_randomness(job: Job) -> Iterator[None]:
    """What a network of one's own draws by itself (dropout) depends on the key alone, and leaves no trace."""
    if not any(net.draws for net in job.networks.values()):
        yield
        return
    device = job.site.samples.images.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number(*job.key, "network"))
        yield


def give_labels(phases: tuple[Phase, ...], site: Site, received: Models) -> dict[Stream, Tensor]:
    """The labels that streams ask for once a round, on clean images."""
    streams = dict.fromkeys(stream for phase in phases for stream in phase.streams)
    once = [stream for stream in streams if stream.labels is not None and not stream.online]
    return {stream: label(stream, site, received) for stream in once}


@torch.no_grad()
def label(stream: Stream, site: Site, received: Models) -> Tensor:
    """One stream's labels (n,), in large batches."""
    assert stream.labels is not None
    batches = torch.split(site.samples.rows(stream.part), LABELLING_BATCH)
    images = (site.views.normalise(site.samples.images[rows]) for rows in batches)
    return torch.cat([stream.labels(received, x) for x in images])


def count_labels(labels: Mapping[Stream, Tensor], samples: Samples) -> Tensor | None:
    """How many of the labels given to unlabelled samples are right, and how many were given."""
    if samples.truth is None:
        return None
    given = [y for stream, y in labels.items() if stream.part == "unlabelled"]
    counts = [right_and_given(y, samples.truth) for y in given]
    return torch.stack(counts).sum(0).float() if counts else torch.zeros(2, device=samples.images.device)


def right_and_given(y: Tensor, truth: Tensor) -> Tensor:
    """How many labels are right, and how many there are."""
    return torch.stack([((y == truth) & (y >= 0)).sum(), (y >= 0).sum()])


def prepare(job: Job, start: Arrays, kept: Arrays) -> Buffers:
    """Buffers for all steps of a job: start vectors, fresh momentum, the whole walk, every draw."""
    phase, networks, device = job.phase, job.networks, job.site.samples.images.device
    names = dict.fromkeys([*phase.trained, *kept])
    parts = {k: networks[k].parts(start[k]) if k in networks else (start[k], start[k][:0]) for k in names}
    rng = generator(*job.key)
    feeds = tuple(feed(job, stream, rng) for stream in phase.streams)
    draws = [np.asarray(phase.draw(rng), np.float32) for _ in range(job.steps)] if phase.draw else []
    return Buffers(
        weights={k: w.clone() for k, (w, _) in parts.items()},
        statistics={k: s.clone() for k, (_, s) in parts.items()},
        momentum={k: torch.zeros_like(parts[k][0]) for k in phase.trained},
        losses={k: torch.zeros(1, device=device) for k in phase.trained},
        labelling=torch.zeros(2, device=device),
        step=torch.zeros(1, dtype=torch.long, device=device),
        received=job.message,
        images=job.site.samples.images,
        feeds=feeds,
        draws=torch.from_numpy(np.stack(draws)).to(device) if draws else None,
    )


def feed(job: Job, stream: Stream, rng: np.random.Generator) -> Feed:
    """One stream's walk through a job."""
    samples, views, steps = job.site.samples, job.site.views, job.steps
    rows = samples.rows(stream.part)
    walk = epochs_walk if job.phase.epochs and stream is job.phase.streams[0] else endless_walk
    order = torch.from_numpy(walk(len(rows), stream.batch, steps, rng)).to(rows.device)  # (steps, B)
    true = samples.y if stream.part == "labelled" else samples.truth
    given = job.labels.get(stream) if stream.labels or stream.part == "unlabelled" else samples.y
    unknown = torch.full_like(rows, -1)
    shapes = [(steps, stream.batch, views.uniforms(view)) for view in stream.views]
    return Feed(
        rows=rows[order],
        y=(unknown if given is None else given)[order],
        truth=(unknown if true is None else true)[order],
        uniforms=tuple(torch.from_numpy(rng.random(s, dtype=np.float32)).to(rows.device) for s in shapes),
    )


def epochs_walk(n: int, batch: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, B) indices: epochs of ⌈n/B⌉ full batches, the last filled up from the start of its shuffle."""
    per_epoch = -(-n // batch)
    epochs = [np.resize(rng.permutation(n), per_epoch * batch) for _ in range(steps // per_epoch)]
    return np.concatenate(epochs).reshape(steps, batch)


def endless_walk(n: int, batch: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, B) indices: shuffled passes end to end."""
    passes = [rng.permutation(n) for _ in range(-(-steps * batch // n))]
    return np.concatenate(passes)[: steps * batch].reshape(steps, batch)


def step(job: Job, buffers: Buffers) -> None:
    """One step: tensor operations on the buffers and nothing else, so that it can be captured."""
    received = as_models(buffers.received, job.networks)
    walks = zip(job.phase.streams, buffers.feeds, strict=True)
    batches = [batch(stream, feed, job.site.views, received, buffers) for stream, feed in walks]
    draws = [] if buffers.draws is None else [now(buffers.draws, buffers)]
    for descent in job.phase.descents:
        leaf = buffers.weights[descent.train].detach().requires_grad_()
        local = local_models(job, buffers) | local_models(job, buffers, {descent.train: leaf})
        loss = descent.loss(local, received, *batches, *draws)
        (gradient,) = torch.autograd.grad(loss, leaf)
        descend(buffers.weights[descent.train], buffers.momentum[descent.train], gradient, descent.sgd)
        buffers.losses[descent.train].add_(loss.detach())
    if job.phase.then is not None:
        with torch.no_grad():
            store(job.phase.then(local_models(job, buffers), received), buffers)
    buffers.step.add_(1)


def now(walk: Tensor, buffers: Buffers) -> Tensor:
    """The row of the step that the buffers stand at."""
    return walk.index_select(0, buffers.step)[0]


def batch(stream: Stream, feed: Feed, views: Views, received: Models, buffers: Buffers) -> Batch:
    """The samples of the step that the buffers stand at."""
    pixels = buffers.images.index_select(0, now(feed.rows, buffers))  # (B, H, W, C)
    draws = zip(stream.views, feed.uniforms, strict=True)
    seen = tuple(views(pixels, view, now(uniforms, buffers)) for view, uniforms in draws)
    if stream.labels is None or not stream.online:
        return Batch(seen, now(feed.y, buffers))
    with torch.no_grad():
        y = stream.labels(received, seen[0])
    if stream.part == "unlabelled":
        buffers.labelling.add_(right_and_given(y, now(feed.truth, buffers)))
    return Batch(seen, y)


def local_models(job: Job, buffers: Buffers, weights: Arrays | None = None) -> dict[str, Model | Tensor]:
    """What the job trains (in training mode) or keeps, on the buffers' weights or on others."""
    networks, trained = job.networks, job.phase.trained
    return {
        k: Model(networks[k], w, buffers.statistics[k], k in trained) if k in networks else w
        for k, w in (buffers.weights if weights is None else weights).items()
    }


@torch.no_grad()
def descend(weights: Tensor, momentum: Tensor, gradient: Tensor, sgd: SGD) -> None:
    """One step of SGD, in place: the buffers keep their addresses."""
    if sgd.clip:
        gradient = gradient * (sgd.clip / (gradient.norm() + 1e-6)).clamp(max=1.0)
    if sgd.decay:
        gradient = gradient.add(weights, alpha=sgd.decay)
    momentum.mul_(sgd.momentum).add_(gradient)
    weights.sub_(momentum, alpha=sgd.lr)


def store(new: Mapping[str, Model | Tensor], buffers: Buffers) -> None:
    """Writes what a phase's `then` returned into the buffers."""
    for name, value in new.items():
        buffers.weights[name].copy_(value.weights if isinstance(value, Model) else value)
        if isinstance(value, Model):
            buffers.statistics[name].copy_(value.statistics)


def collect(job: Job, buffers: Buffers, update: Update, kept: Arrays) -> tuple[Update, Arrays]:
    """The update and the memory after a job."""
    done = {k: torch.cat([w, buffers.statistics[k]]) for k, w in buffers.weights.items()}
    trained = job.phase.trained
    update = update._replace(
        arrays=update.arrays | {k: done[k] for k in trained},
        losses=update.losses | {k: buffers.losses[k] / job.steps for k in trained},
        labelling=None if update.labelling is None else update.labelling + buffers.labelling,
    )
    return update, {k: done[k] for k in kept}
