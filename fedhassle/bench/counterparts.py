"""Which plain loop does the same as a phase of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedhassle.bench.plain import Loss, Trainer, proximal, residual, supervised
from fedhassle.method import Method, Phase
from fedhassle.methods.hassle import SIDES
from fedhassle.nets import Net

Build = Callable[[Net], nn.Module]
"""A network of this kind as a plain module on the device, freshly initialised."""


def fedavg(method: Any, phase: Phase, module: nn.Module, build: Build) -> Loss:
    """FedAvg's loss."""
    return supervised(module)


def fedprox(method: Any, phase: Phase, module: nn.Module, build: Build) -> Loss:
    """FedProx's, around the weights received."""
    return proximal(module, build(method.net), method.mu / 2)


def hassle(method: Any, phase: Phase, module: nn.Module, build: Build) -> Loss:
    """A dual model's, or a residual model's with the two duals frozen."""
    if phase.trained[0] in {side.residual for side in SIDES}:
        return residual(module, build(method.net), build(method.net), method.lam, method.tau)
    return proximal(module, build(method.net), method.gamma)


LOSSES: dict[str, Callable[[Any, Phase, nn.Module, Build], Loss]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "hassle": hassle,
}


def counterpart(name: str, method: Method, phase: Phase, device: torch.device) -> Trainer | None:
    """The plain trainer of a phase with the same settings; None where nobody has written one."""
    if name not in LOSSES:
        return None

    def build(net: Net) -> nn.Module:
        module = net.build(net.shape, net.classes, net.width).to(device)
        return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    (descent,) = phase.descents
    lr, momentum, decay, clip = descent.sgd
    with torch.random.fork_rng(devices=[]):  # modules draw their weights on the CPU
        module = build(method.networks()[descent.train])
        loss = LOSSES[name](method, phase, module, build)
    return Trainer(module, loss, lr, momentum, decay, clip)
