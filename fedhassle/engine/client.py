"""Local training of one client, shared by the simulator, the GPU lanes and the nodes of a real federation.

A round of a client is a few jobs (`job.py`), whose samples and random draws are tensors before the first
step. A step is then only tensor operations on buffers with fixed addresses, so a CUDA graph can capture and
replay it. Nothing here depends on a particular method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.dropout import dropout_from
from fedhassle.engine.descent import State, descend, fresh_state
from fedhassle.engine.job import Feed, Job, Schedule, Site, draw
from fedhassle.engine.labels import count_given, count_labels, give_labels
from fedhassle.errors import require
from fedhassle.method import (
    Batch,
    Client,
    Labelled,
    Method,
    Model,
    Models,
    Part,
    Phase,
    Stream,
    Update,
    as_models,
)
from fedhassle.names import described
from fedhassle.nets import drawing
from fedhassle.randomness import number
from fedhassle.vectors import Arrays


class Visit(NamedTuple):
    """One client's round before training: its jobs, its kept arrays, and an update that is still empty."""

    jobs: tuple[Job, ...]
    kept: Arrays
    update: Update


class Buffers(NamedTuple):
    """The tensors that the steps of a job read or write besides its schedule, at fixed addresses."""

    weights: Arrays  # written, like all down to `labelling`
    statistics: Arrays
    optimiser: dict[str, State]
    losses: Arrays
    labelling: Tensor  # (4,): labels of the steps, as `count_labels` counts them
    rate: tuple[Tensor, ...]  # only read, like all below: the share of the learning rate, if it changes
    received: Arrays
    images: Tensor


STRETCH = 8  # steps whose images are prepared at once on a CPU; more would leave its cache

Trained = tuple[Update, Arrays]
"""A client's update, and the arrays that it keeps."""


def train(method: Method, site: Site, message: Arrays, memory: Arrays | None, t: int, seed: int) -> Trained:
    """Trains one client in round t, step by step."""
    return run_jobs(visit(method, site, message, memory, t, seed))


def run_jobs(planned: Visit) -> Trained:
    """Runs the jobs of a client one after another, each from where the previous one ended."""
    update, kept = planned.update, planned.kept
    for job in planned.jobs:
        buffers = run_job(job, job.message | update.arrays | kept, kept)
        update, kept = collect(job, buffers, update, kept)
    return update, kept


def run_job(job: Job, start: Arrays, kept: Arrays) -> Buffers:
    """Runs all steps of a job one by one and returns its buffers."""
    buffers = prepare(job, start, kept)
    schedule = draw(job)
    # A network that labels a stream sees one batch at a time: its bits may depend on the number of images.
    stretch = 1 if any(stream.online for stream in job.phase.streams) else STRETCH
    with own_randomness(job):
        for i in range(0, job.steps, stretch):
            advance(job, buffers, schedule.between(i, i + stretch))
    return buffers


def visit(method: Method, site: Site, message: Arrays, memory: Arrays | None, t: int, seed: int) -> Visit:
    """Plans the round of a client: its jobs, with the pseudo-labels that are given once per round."""
    client = site.client
    networks = method.networks()
    phases = tuple(p.with_labelled_view(method.labelled_view) for p in method.phases(client, t))
    kept = method.memory(client, message) if memory is None else memory
    for phase in phases:
        check_phase(phase, client, {*message, *kept})
    labels = give_labels(phases, site, as_models(message, networks))
    keys = [(seed, t, client.name, phase.name) for phase in phases]
    rate = method.rate(t)
    jobs = [Job(p, site, networks, message, labels, key, rate) for p, key in zip(phases, keys, strict=True)]
    counted = count_given(labels, site.samples)
    return Visit(tuple(jobs), kept, Update(client, {}, samples_by_name(phases, client), {}, counted))


def check_phase(phase: Phase, client: Client, sent: set[str]) -> None:
    """Raises a `UserError` for a phase that would fail later with a less helpful message."""
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


def samples_by_name(phases: tuple[Phase, ...], client: Client) -> dict[str, int]:
    """Number of samples that train each name; a part that several phases use counts once."""
    parts: dict[str, set[Part]] = {}
    for phase in phases:
        for name in phase.trained:
            parts.setdefault(name, set()).update(stream.part for stream in phase.streams)
    return {name: sum(client.count(part) for part in walked) for name, walked in parts.items()}


@contextmanager
def own_randomness(job: Job) -> Iterator[None]:
    """Seeds the global random state, if a network draws from it, by the job's key; restores it afterwards."""
    if not job.draws_globally:
        yield
        return
    device = job.site.samples.images.device
    with drawing, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number(*job.key, "network"))
        yield


def prepare(job: Job, start: Arrays, kept: Arrays) -> Buffers:
    """Buffers of a job, with its start vectors and fresh optimisers."""
    phase = job.phase
    networks = job.networks
    device = job.site.samples.images.device
    names = dict.fromkeys([*phase.trained, *kept])
    parts = {k: networks[k].parts(start[k]) if k in networks else (start[k], start[k][:0]) for k in names}
    return Buffers(
        weights={k: w.clone() for k, (w, _) in parts.items()},
        statistics={k: s.clone() for k, (_, s) in parts.items()},
        optimiser={d.train: fresh_state(d.optimiser, parts[d.train][0]) for d in phase.descents},
        losses={k: torch.zeros(1, device=device) for k in phase.trained},
        labelling=torch.zeros(4, device=device),
        rate=() if job.rate is None else (torch.full((), job.rate, device=device),),
        received=job.message,
        images=job.site.samples.images,
    )


def advance(job: Job, buffers: Buffers, schedule: Schedule) -> None:
    """Runs the steps of a schedule."""
    received = as_models(buffers.received, job.networks)
    batches = batches_of(job, buffers, received, schedule)
    for i in range(schedule.steps):
        now = [batch.at(i) for batch in batches]
        draws, truths = [draw[i] for draw in schedule.draws], [truth[i] for truth in schedule.truths]
        with dropout_from([seed[i] for seed in schedule.seeds]):
            step(job, buffers, received, now, draws, truths)


def batches_of(job: Job, buffers: Buffers, received: Models, schedule: Schedule) -> tuple[Batch, ...]:
    """The batches of every stream, for all steps of a schedule at once."""
    walks = zip(job.phase.streams, schedule.feeds, strict=True)
    return tuple(stream_batches(stream, feed, job.site.views, received, buffers) for stream, feed in walks)


@torch.no_grad()
def stream_batches(stream: Stream, feed: Feed, views: Views, received: Models, buffers: Buffers) -> Batch:
    """The batches of one stream, with a leading axis of steps."""
    pixels = buffers.images.index_select(0, feed.rows.flatten())  # (steps·B, H, W, C)
    draws = zip(stream.views, feed.uniforms, strict=True)
    seen = [views(pixels, view, uniforms.flatten(0, 1)) for view, uniforms in draws]
    y = feed.y
    if stream.logits is not None and stream.online:
        z = stream.logits(received, seen[0])  # (steps·B, M)
        y = torch.stack([stream.label(of_step) for of_step in torch.split(z, stream.batch)])
        if stream.part == "unlabelled":
            buffers.labelling.add_(count_labels(y, feed.truth))
    return Batch(tuple(x.view(*feed.rows.shape, *x.shape[1:]) for x in seen), y)


def step(
    job: Job,
    buffers: Buffers,
    received: Models,
    batches: Sequence[Batch],
    draws: Sequence[Tensor],
    truths: Sequence[Tensor],
) -> None:
    """One training step: only tensor operations on the buffers."""
    for descent in job.phase.descents:
        leaf = buffers.weights[descent.train].detach().requires_grad_()
        local = local_models(job, buffers) | local_models(job, buffers, {descent.train: leaf})
        loss = descent.loss(local, received, *batches, *draws)
        if isinstance(loss, Labelled):
            buffers.labelling.add_(count_labels(loss.y, truth_of(loss.y, job.phase, truths)))
            loss = loss.loss
        check_loss(loss, job.phase)
        (gradient,) = torch.autograd.grad(loss, leaf)
        weights, state = buffers.weights[descent.train], buffers.optimiser[descent.train]
        descend(weights, state, gradient, descent.optimiser, *buffers.rate)
        buffers.losses[descent.train].add_(loss.detach())
    if job.phase.then is not None:
        with torch.no_grad():
            store(job.phase.then(local_models(job, buffers), received), buffers)


def check_loss(loss: object, phase: Phase) -> None:
    """Raises a `UserError` if a loss is not one number with a gradient."""
    require(
        isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad,
        f"a loss of phase {phase.name!r} returned {described(loss)}; expected a tensor of one number with a "
        "gradient, such as the mean over the batch, computed from `local`",
    )


def truth_of(y: Tensor, phase: Phase, truths: Sequence[Tensor]) -> Tensor:
    """The true labels (B,) of the first unlabelled stream, to which a loss gave the labels y."""
    pairs = zip(phase.streams, truths, strict=True)
    found = [truth for stream, truth in pairs if stream.part == "unlabelled"]
    require(
        bool(found), f"a loss of phase {phase.name!r} returned labels, but the phase has no unlabelled stream"
    )
    wanted, shape = tuple(found[0].shape), tuple(y.shape)
    require(
        shape == wanted,
        f"a loss of phase {phase.name!r} returned labels of shape {shape}; expected {wanted}, "
        "one for each sample of its first unlabelled stream",
    )
    return found[0]


def local_models(job: Job, buffers: Buffers, weights: Arrays | None = None) -> dict[str, Model | Tensor]:
    """Models that the job trains (in training mode) or keeps, on these weights (default: the buffers')."""
    networks, trained = job.networks, job.phase.trained
    return {
        k: Model(networks[k], w, buffers.statistics[k], k in trained) if k in networks else w
        for k, w in (buffers.weights if weights is None else weights).items()
    }


def store(new: Mapping[str, Model | Tensor], buffers: Buffers) -> None:
    """Copies the values that a phase's `then` returned into the buffers."""
    for name, value in new.items():
        buffers.weights[name].copy_(value.weights if isinstance(value, Model) else value)
        if isinstance(value, Model):
            buffers.statistics[name].copy_(value.statistics)


def collect(job: Job, buffers: Buffers, update: Update, kept: Arrays) -> tuple[Update, Arrays]:
    """The update and the kept arrays after a job."""
    done = {k: torch.cat([w, buffers.statistics[k]]) for k, w in buffers.weights.items()}
    trained = job.phase.trained
    update = update._replace(
        arrays=update.arrays | {k: done[k] for k in trained},
        losses=update.losses | {k: buffers.losses[k] / job.steps for k in trained},
        labelling=update.labelling + buffers.labelling,
    )
    return update, {k: done[k] for k in kept}
