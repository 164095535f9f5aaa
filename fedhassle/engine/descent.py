"""One step of an optimiser, in place, since the buffers of a job must keep their addresses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedhassle.optimiser import SGD, AdamW, Optimiser

State = tuple[Tensor, ...]
"""The state of an optimiser. SGD: its momentum. AdamW: both moments, and the number of steps (1,)."""


def fresh_state(optimiser: Optimiser, weights: Tensor) -> State:
    """Returns the state of an optimiser before its first step: zeros."""
    momentum = torch.zeros_like(weights)
    if isinstance(optimiser, SGD):
        return (momentum,)
    return momentum, torch.zeros_like(weights), weights.new_zeros(1)


@torch.no_grad()
def descend(
    weights: Tensor, state: State, gradient: Tensor, optimiser: Optimiser, rate: Tensor | None = None
) -> None:
    """One step; `rate` is a share of the learning rate."""
    if optimiser.clip:
        gradient = gradient * (optimiser.clip / (gradient.norm() + 1e-6)).clamp(max=1.0)
    if isinstance(optimiser, SGD):
        step_of_sgd(weights, state, gradient, optimiser, rate)
    else:
        step_of_adamw(weights, state, gradient, optimiser, rate)


def step_of_sgd(weights: Tensor, state: State, gradient: Tensor, sgd: SGD, rate: Tensor | None) -> None:
    """Sets w ← w − η·v, where v ← m·v + g + δ·w; with Nesterov, w ← w − η·(g + δ·w + m·v)."""
    (momentum,) = state
    if sgd.decay:
        gradient = gradient.add(weights, alpha=sgd.decay)
    momentum.mul_(sgd.momentum).add_(gradient)
    step = gradient.add(momentum, alpha=sgd.momentum) if sgd.nesterov else momentum
    weights.sub_(step if rate is None else step * rate, alpha=sgd.lr)


def step_of_adamw(weights: Tensor, state: State, gradient: Tensor, adamw: AdamW, rate: Tensor | None) -> None:
    """Sets w ← (1 − η·δ)·w − η·m̂/(√v̂ + ε); m̂, v̂: means of g and g², corrected for their start at zero."""
    mean, square, steps = state
    steps.add_(1)
    mean.lerp_(gradient, 1 - adamw.beta1)
    square.mul_(adamw.beta2).addcmul_(gradient, gradient, value=1 - adamw.beta2)
    lr = adamw.lr if rate is None else adamw.lr * rate
    if adamw.decay:
        weights.mul_(1 - lr * adamw.decay)
    spread = (square / counted(adamw.beta2, steps)).sqrt().add(adamw.epsilon)
    weights.sub_(mean / counted(adamw.beta1, steps) / spread * lr)


def counted(beta: float, steps: Tensor) -> Tensor:
    """1 − β^s, the weight of s steps in a moment; in this form float32 keeps its digits."""
    return -torch.expm1(steps * math.log(beta))
