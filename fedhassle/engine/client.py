"""Local training of one client: the simulator, a GPU lane and a federation's node all use these functions.

A job is one phase on one client. Its whole walk and all its draws become tensors before its first step
(`draw`); a step is then nothing but tensor operations on buffers at fixed places, so that it can be captured
and replayed. No name of any method occurs here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.views import UNIFORMS, Views
from fedhassle.errors import require
from fedhassle.method import SGD, Batch, Client, Method, Model, Models, Part, Phase, Stream, Update, as_models
from fedhassle.nets import Net, drawing, images_a_pass
from fedhassle.randomness import generator, number
from fedhassle.vectors import Arrays

T = TypeVar("T")


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

    @property
    def draws_globally(self) -> bool:
        """Whether a network draws by itself, as dropout does: from a state that all jobs share."""
        return any(net.draws for net in self.networks.values())


class Visit(NamedTuple):
    """One client's round before it begins: its jobs, what it keeps, and an update without arrays."""

    jobs: tuple[Job, ...]
    kept: Arrays
    update: Update


class Feed(NamedTuple):
    """All that a stream hands to a number of steps."""

    rows: Tensor  # (steps, B) of the table of images
    y: Tensor  # (steps, B), −1 = nothing to learn
    truth: Tensor  # (steps, B), −1 = not known
    uniforms: tuple[Tensor, ...]  # per view (steps, B, k)

    def between(self, first: int, last: int) -> Feed:
        """The part for some of the steps."""
        uniforms = tuple(u[first:last] for u in self.uniforms)
        return Feed(self.rows[first:last], self.y[first:last], self.truth[first:last], uniforms)


class Course(NamedTuple):
    """All that a number of steps is handed, drawn before the first of them."""

    feeds: tuple[Feed, ...]  # of each stream
    draws: tuple[Tensor, ...]  # (steps, …): those of the phase, if it has any

    @property
    def steps(self) -> int:
        """How many steps it is for."""
        return len(self.feeds[0].rows)

    def between(self, first: int, last: int) -> Course:
        """The part for some of the steps."""
        feeds = tuple(feed.between(first, last) for feed in self.feeds)
        return Course(feeds, tuple(draw[first:last] for draw in self.draws))


class Buffers(NamedTuple):
    """Everything but the course that the steps of a job read or write, at fixed places."""

    weights: Arrays  # written, as all down to `labelling`
    statistics: Arrays
    momentum: Arrays
    losses: Arrays
    labelling: Tensor  # (2,): online labels right, given
    received: Arrays  # read, as what follows
    images: Tensor


Perform = Callable[["Job", Arrays, Arrays], Generator[None, None, Buffers]]
"""A way to make all steps of a job: (job, what it starts from, what the client keeps) -> its buffers.

It yields wherever it may be left for a while, so that one thread can keep several jobs going.
"""

Trained = tuple[Update, Arrays]
"""What a client sends back, and what it keeps."""


def train(method: Method, site: Site, message: Arrays, memory: Arrays | None, t: int, seed: int) -> Trained:
    """One client's round, step by step."""
    return run_to_end(follow(visit(method, site, message, memory, t, seed), perform))


def run_to_end(work: Generator[None, None, T]) -> T:
    """What work returns that is done without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def visit(method: Method, site: Site, message: Arrays, memory: Arrays | None, t: int, seed: int) -> Visit:
    """What a client is about to do in round t, with the labels that are given once a round."""
    client = site.client
    networks = method.networks()
    phases = tuple(p.with_labelled_view(method.labelled_view) for p in method.phases(client, t))
    kept = method.memory(client, message) if memory is None else memory
    for phase in phases:
        check_phase(phase, client, {*message, *kept})
    labels = give_labels(phases, site, as_models(message, networks))
    keys = [(seed, t, client.name, phase.name) for phase in phases]
    jobs = [Job(p, site, networks, message, labels, key) for p, key in zip(phases, keys, strict=True)]
    counted = count_labels(labels, site.samples)
    return Visit(tuple(jobs), kept, Update(client, {}, samples_by_name(phases, client), {}, counted))


def check_phase(phase: Phase, client: Client, sent: set[str]) -> None:
    """Says what is wrong with a phase of a method of one's own, where it would fail with less to go by."""
    for stream in phase.streams:
        require(
            client.count(stream.part) > 0,
            f"phase {phase.name!r} walks over {stream.part} data, of which {client.name} has none: "
            f"return it from `phases` only if client.{stream.part}",
        )
    for name in phase.trained:
        require(
            name in sent,
            f"phase {phase.name!r} trains {name!r}, but {client.name} was sent {', '.join(sorted(sent))}",
        )


def follow(planned: Visit, way: Perform) -> Generator[None, None, Trained]:
    """A visit's jobs one after another, each on what the one before it left."""
    update, kept = planned.update, planned.kept
    for job in planned.jobs:
        buffers = yield from way(job, job.message | update.arrays | kept, kept)
        update, kept = collect(job, buffers, update, kept)
    return update, kept


def perform(job: Job, start: Arrays, kept: Arrays) -> Generator[None, None, Buffers]:
    """All steps of a job, one by one; may be left after the last, since others draw from the same state."""
    buffers = make_steps(job, start, kept)
    yield
    return buffers


def make_steps(job: Job, start: Arrays, kept: Arrays) -> Buffers:
    """All steps of a job, one by one."""
    buffers = prepare(job, start, kept)
    course = draw(job)
    with own_randomness(job):
        for i in range(job.steps):
            advance(job, buffers, course.between(i, i + 1))
    return buffers


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
    if not job.draws_globally:
        yield
        return
    device = job.site.samples.images.device
    with drawing, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
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
    rows = site.samples.rows(stream.part)
    batches = torch.split(rows, images_a_pass(site.samples.images))
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
    """Buffers of a job: start vectors and fresh momentum."""
    phase = job.phase
    networks = job.networks
    device = job.site.samples.images.device
    names = dict.fromkeys([*phase.trained, *kept])
    parts = {k: networks[k].parts(start[k]) if k in networks else (start[k], start[k][:0]) for k in names}
    return Buffers(
        weights={k: w.clone() for k, (w, _) in parts.items()},
        statistics={k: s.clone() for k, (_, s) in parts.items()},
        momentum={k: torch.zeros_like(parts[k][0]) for k in phase.trained},
        losses={k: torch.zeros(1, device=device) for k in phase.trained},
        labelling=torch.zeros(2, device=device),
        received=job.message,
        images=job.site.samples.images,
    )


def draw(job: Job) -> Course:
    """The whole walk of a job, and every draw."""
    phase = job.phase
    rng = generator(*job.key)
    device = job.site.samples.images.device
    feeds = tuple(feed(job, stream, rng) for stream in phase.streams)
    if phase.draw is None:
        return Course(feeds, ())
    draws = np.stack([np.asarray(phase.draw(rng), np.float32) for _ in range(job.steps)])
    return Course(feeds, (to_device(draws, device),))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device; no one waits for the copy, nor for the work that it is queued behind."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def feed(job: Job, stream: Stream, rng: np.random.Generator) -> Feed:
    """One stream's walk through a job."""
    samples = job.site.samples
    steps = job.steps
    rows = samples.rows(stream.part)
    walk = epochs_walk if job.phase.epochs and stream is job.phase.streams[0] else endless_walk
    order = to_device(walk(len(rows), stream.batch, steps, rng), rows.device)  # (steps, B)
    true = samples.y if stream.part == "labelled" else samples.truth
    given = job.labels.get(stream) if stream.labels or stream.part == "unlabelled" else samples.y
    unknown = torch.full_like(rows, -1)
    shapes = [(steps, stream.batch, UNIFORMS[view]) for view in stream.views]
    return Feed(
        rows=rows[order],
        y=(unknown if given is None else given)[order],
        truth=(unknown if true is None else true)[order],
        uniforms=tuple(to_device(rng.random(s, dtype=np.float32), rows.device) for s in shapes),
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


def advance(job: Job, buffers: Buffers, course: Course) -> None:
    """The steps of a course."""
    received = as_models(buffers.received, job.networks)
    batches = look(job, buffers, received, course)
    for i in range(course.steps):
        now = [batch.at(i) for batch in batches]
        step(job, buffers, received, now, [draws[i] for draws in course.draws])


def look(job: Job, buffers: Buffers, received: Models, course: Course) -> tuple[Batch, ...]:
    """What the streams show to the steps of a course, made for all of them at once."""
    walks = zip(job.phase.streams, course.feeds, strict=True)
    return tuple(see(stream, feed, job.site.views, received, buffers) for stream, feed in walks)


@torch.no_grad()
def see(stream: Stream, feed: Feed, views: Views, received: Models, buffers: Buffers) -> Batch:
    """The batches of one stream, with an axis of steps in front."""
    pixels = buffers.images.index_select(0, feed.rows.flatten())  # (steps·B, H, W, C)
    draws = zip(stream.views, feed.uniforms, strict=True)
    seen = [views(pixels, view, uniforms.flatten(0, 1)) for view, uniforms in draws]
    y = feed.y
    if stream.labels is not None and stream.online:
        y = stream.labels(received, seen[0]).view_as(feed.y)
        if stream.part == "unlabelled":
            buffers.labelling.add_(right_and_given(y, feed.truth))
    return Batch(tuple(x.view(*feed.rows.shape, *x.shape[1:]) for x in seen), y)


def step(
    job: Job, buffers: Buffers, received: Models, batches: Sequence[Batch], draws: Sequence[Tensor]
) -> None:
    """One step: tensor operations on the buffers and nothing else."""
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
