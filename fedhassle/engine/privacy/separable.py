"""Checks that a method can be private by sample: its loss must be a mean of losses of single samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhassle.engine.privacy.by_sample import Chance, Mechanism, OneByOne, private_loss, separable
from fedhassle.errors import UserError, require
from fedhassle.method import Batch, Client, Labelled, Method, Model, Phase, Stream, as_models
from fedhassle.nets import Net
from fedhassle.randomness import generator

UNIT = "privacy.unit=sample needs the gradient of each single image"
INSTEAD = "choose fedavg, fedprox, hassle, local or central, or leave privacy.unit out"
SAMPLES = 16  # of noise, on which losses and labels are tried


def require_separable(method: Method, name: str, clients: Sequence[Client], rounds: int) -> None:
    """Refuses a method, or a network, whose training depends on samples together."""
    for net in method.networks().values():
        require_own_outputs(net)
    require(
        method.prior != "batch",
        f"{UNIT}, but method.prior=batch depends on the classes of a whole batch: set method.prior=none",
    )
    kinds = {client.kind: client for client in reversed(clients)}
    for client in kinds.values():
        for t in dict.fromkeys((1, rounds)):
            for phase in method.phases(client, t):
                require_own_steps(method, name, phase, client, t)


def require_own_outputs(net: Net) -> None:
    """Refuses networks in which samples meet, or that draw random numbers."""
    require(
        not net.n_statistics,
        f"{UNIT}, which a network with BatchNorm does not have: set net=lenet, or your own with GroupNorm "
        "(docs/network.md)",
    )
    random = net.randomness
    require(
        not random.seeded and not random.globally,
        f"{UNIT}, and a network with dropout or other random layers has none that can be repeated: use one "
        "without",
    )


def require_own_steps(method: Method, name: str, phase: Phase, client: Client, t: int) -> None:
    """Refuses a phase whose steps depend on samples together."""
    where = f"{name} (phase {phase.name!r}, {client.kind} clients)"
    require(
        separable(phase),
        f"{UNIT}, but {where} combines images or models in a step: {INSTEAD}; for methods that combine "
        "labelled and unlabelled images, a split without partial clients (split.labels=LU) is another way",
    )
    require_own_labels(phase.streams[0], where)
    message = method.message(method.initial(0), client, t)
    if message.keys() >= set(phase.trained):  # else it depends on earlier rounds
        require_own_loss(method, phase, client, t, where)


def require_own_labels(stream: Stream, where: str) -> None:
    """Refuses labels that depend on other samples than their own."""
    if stream.logits is None:
        return
    z = torch.from_numpy(3 * generator("logits").standard_normal((8 * SAMPLES, 10))).float()
    require(
        torch.equal(stream.labels(z), OneByOne(stream.labels)(z)),
        f"{UNIT}, but {where} labels all images of a client together: switch that off (in hassle+ "
        "method.own_mix=false)",
    )


def require_own_loss(method: Method, phase: Phase, client: Client, t: int, where: str) -> None:
    """Refuses a loss that is no mean over the samples of a batch, or cannot be taken of each by itself."""
    networks, (descent,), (stream,) = method.networks(), phase.descents, phase.streams
    message = method.message(method.initial(0), client, t)
    received = as_models(message, networks)
    arrays = {k: v for k, v in message.items() if k in phase.trained} | method.memory(client, message)
    local = {
        k: Model(networks[k], *networks[k].parts(v), k in phase.trained) if k in networks else v
        for k, v in arrays.items()
    }
    batch = noise_batch(method.net, stream)
    draw = torch.from_numpy(Chance(SAMPLES, SAMPLES)(generator("draw"))).float()

    def loss(part: Batch) -> Tensor:
        found = descent.loss(local, received, part)
        return (found.loss if isinstance(found, Labelled) else found).detach()

    whole = loss(batch)
    singles = [Batch(tuple(view[[i]] for view in batch.views), batch.y[[i]]) for i in range(SAMPLES)]
    each = [loss(single) for single in singles]
    require(
        torch.allclose(torch.stack(each).mean(), whole, rtol=1e-3, atol=1e-5),
        f"{UNIT}, but the loss of {where} is no mean over the images of a batch: {INSTEAD}",
    )
    try:
        private_loss(descent.loss, descent.train, Mechanism(1.0, 1.0), local, received, batch, draw)
    except Exception as error:  # a user's loss may fail in any way
        raise UserError(
            f"{UNIT}, but the loss of {where} cannot be taken of one by itself: {error}"
        ) from error


def noise_batch(net: Net, stream: Stream) -> Batch:
    """A batch of noise with random labels."""
    rng = generator("batch")
    shape = (SAMPLES, *net.shape)
    views = tuple(torch.from_numpy(rng.standard_normal(shape)).float() for _ in stream.views)
    return Batch(views, torch.from_numpy(rng.integers(0, net.classes, SAMPLES)))
