"""The plain training loop for each phase of each method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.plain import Descent, Loss, Trainer, frozen
from benchmarks.plain_losses import (
    Consistency,
    Sum,
    Weights,
    agreement,
    calibrated_sum,
    fixmatch,
    fixmatch_alone,
    following,
    labels_between,
    labels_of,
    mixmatch,
    norms,
    on_both,
    own_labels,
    proximal,
    residual,
    supervised,
    supervised_sum,
    taught,
)
from fedhassle.method import Method, Phase
from fedhassle.nets import Net
from fedhassle.optimiser import SGD, Optimiser

Build = Callable[[Net], nn.Module]
"""A function that builds a network as a plain module on the device."""

Make = Callable[[Any, Phase, int, Build], Trainer]
"""(method, phase, round, build) -> the plain trainer, whose trained networks are built first."""

Goal = tuple[Iterable[nn.Parameter], Loss]
"""Parameters, and the loss that they minimise."""


def towards(phase: Phase, *goals: Goal, then: Callable[[], None] | None = None) -> Trainer:
    """A trainer with the settings of a phase and a goal for each of its descents."""
    pairs = zip(goals, phase.descents, strict=True)
    return Trainer([Descent(*goal, *plain_sgd(descent.optimiser)) for goal, descent in pairs], then)


def plain_sgd(optimiser: Optimiser) -> tuple[float, float, float, float]:
    """The settings of SGD, with which every method is measured: lr, momentum, decay, clip."""
    assert isinstance(optimiser, SGD) and not optimiser.nesterov
    return optimiser[:4]


def fedavg(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """FedAvg, and other methods on a client with only labelled data."""
    module = build(method.net)
    return towards(phase, (module.parameters(), supervised(module)))


def fedprox(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """FedProx, with the received weights as anchor."""
    module, received = build(method.net), build(method.net)
    return towards(phase, (module.parameters(), proximal(module, received, method.mu / 2)))


def hassle_dual(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """A dual model of HASSLE, with the other as anchor."""
    module, other = build(method.net), build(method.net)
    return towards(phase, (module.parameters(), proximal(module, other, method.gamma)))


def hassle_residual(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """A residual model of HASSLE, with the two duals frozen."""
    module, dual, other = build(method.residual_net), frozen(build(method.net)), frozen(build(method.net))
    return towards(phase, (module.parameters(), residual(module, dual, other, method.lam, method.tau)))


def hassle_plus(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """A model of hassle+, on labels, pseudo-labels or both, with the other as anchor once both exist."""
    module, other = build(method.net), build(method.net)
    weight = method.gamma if method.started(t) else 0.0
    return towards(phase, (module.parameters(), calibrated_sum(module, other, weight)))


def mixmatch_both(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """MixMatch, with the weight of round t."""
    module, weight = build(method.net), method.weight * min(1.0, t / (method.rounds or t))
    return towards(phase, (module.parameters(), mixmatch(module, weight, method.temperature)))


def matching(make: Callable[..., Loss], labels: Callable[[Any, Build], Consistency]) -> Make:
    """`fixmatch` or `fixmatch_alone`, with one of the ways to give pseudo-labels."""

    def made(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
        module = build(method.net)
        loss = make(module, labels(method, build), method.weight)
        return towards(phase, (module.parameters(), loss))

    return made


def own(method: Any, build: Build) -> Consistency:
    """FixMatch's pseudo-labels."""
    return own_labels(method.confidence)


def received(method: Any, build: Build) -> Consistency:
    """Pseudo-labels of the received model."""
    return labels_of(frozen(build(method.net)), method.confidence)


def between(method: Any, build: Build) -> Consistency:
    """SAGE's pseudo-labels."""
    return labels_between(frozen(build(method.net)), method.confidence, method.halving)


def fedmatch_labels(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """First σ on labels, then ψ, which only follows σ."""
    sigma, psi = build(method.net), build(method.net)
    both = Sum(sigma, psi)
    labels = supervised_sum(both, method.supervised_weight)
    return towards(phase, (sigma.parameters(), labels), (both.psi, norms(both, fedmatch_weights(method))))


def fedmatch_both(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """First σ, then ψ."""
    sigma, psi = build(method.net), build(method.net)
    both = Sum(sigma, psi)
    labels = supervised_sum(both, method.supervised_weight)
    agreed = fedmatch_agreement(method, t, both, build)
    return towards(phase, (sigma.parameters(), labels), (both.psi, agreed))


def fedmatch_psi(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """ψ alone, on the received σ."""
    psi, sigma = build(method.net), frozen(build(method.net))
    both = Sum(sigma, psi)
    return towards(phase, (both.psi, fedmatch_agreement(method, t, both, build)))


def fedmatch_agreement(method: Any, t: int, both: Sum, build: Build) -> Loss:
    """The loss of ψ, with helpers in rounds that have them; each is one network, since it does not learn."""
    helpers = 0 if t % method.helper_rounds else method.helpers
    experts = [frozen(build(method.net)) for _ in range(helpers)]
    return agreement(both, experts, method.confidence, fedmatch_weights(method))


def fedmatch_weights(method: Any) -> Weights:
    """Weights of the terms in the loss of ψ."""
    return Weights(method.consistency_weight, method.sparsity_weight, method.proximity_weight)


def rscfed(method: Any, phase: Phase, t: int, build: Build) -> Trainer:
    """The mean teacher in a client's first round, with labels if there are any."""
    module, teacher = build(method.net), frozen(build(method.net))
    loss = taught(module, teacher, method.consistency_weight, method.temperature)
    if len(phase.streams) > 1:
        loss = on_both(loss, supervised(module))
    return towards(phase, (module.parameters(), loss), then=following(teacher, module, method.ema))


COUNTERPARTS: dict[str, dict[str, Make]] = {  # by method and phase
    "fedavg": {"labelled": fedavg},
    "fedprox": {"labelled": fedprox},
    "mixmatch": {"labelled": fedavg, "both": mixmatch_both},
    "fixmatch": {"labelled": fedavg, "both": matching(fixmatch, own)},
    "fedmatch": {"labelled": fedmatch_labels, "both": fedmatch_both, "unlabelled": fedmatch_psi},
    "rscfed": {"labelled": fedavg, "both": rscfed, "unlabelled": rscfed},
    "hassle": {
        "labelled": hassle_dual,
        "labelled residual": hassle_residual,
        "unlabelled": hassle_dual,
        "unlabelled residual": hassle_residual,
    },
    "hassle+": dict.fromkeys(("labelled", "full", "partial", "unlabelled"), hassle_plus),
    "fixmatch-global": {
        "labelled": fedavg,
        "both": matching(fixmatch, received),
        "unlabelled": matching(fixmatch_alone, received),
    },
    "sage": {
        "labelled": fedavg,
        "both": matching(fixmatch, between),
        "unlabelled": matching(fixmatch_alone, between),
    },
    "central": {"labelled": fedavg},
    "central-fixmatch": {"labelled": fedavg, "both": matching(fixmatch, own)},
    "local": {"labelled": fedavg},
}


def counterpart(name: str, method: Method, phase: Phase, t: int, device: torch.device) -> Trainer | None:
    """The plain trainer of a phase in round t with the same settings; None if there is none."""
    make = COUNTERPARTS.get(name, {}).get(phase.name)
    if make is None:
        return None

    def build(net: Net) -> nn.Module:
        module = net.build(net.shape, net.classes, net.width).to(device)
        return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        return make(method, phase, t, build)
