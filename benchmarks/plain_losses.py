"""The losses of all methods for the plain loop, as closures over modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.plain import Batch, Loss, flat
from fedhassle.losses import (
    calibrated,
    cross_entropy,
    cross_entropy_each,
    hard_labels,
    kl_divergence,
    kl_divergence_each,
    one_hot,
    sharpen,
    soft_cross_entropy,
)
from fedhassle.nets import normalisation_names

# Labelled data


def supervised(module: nn.Module) -> Loss:
    """Cross-entropy: FedAvg."""

    def loss(batch: Batch) -> Tensor:
        return cross_entropy(module(batch.views[0]), batch.y)

    return loss


def calibrated_sum(module: nn.Module, anchor: nn.Module, weight: float) -> Loss:
    """The sum of the batches' calibrated cross-entropies, in one forward pass, + weight·‖w − w_anchor‖²."""
    proximity = squared_distance(module, anchor)

    def loss(*batches: Batch) -> Tensor:
        views = [batch.views[0] for batch in batches]
        logits = module(torch.cat(views)).split([len(x) for x in views])
        pairs = zip(logits, batches, strict=True)
        losses = torch.stack([cross_entropy(calibrated(z, batch.y), batch.y) for z, batch in pairs])
        return losses.sum() + weight * proximity()

    return loss


def proximal(module: nn.Module, anchor: nn.Module, weight: float) -> Loss:
    """Cross-entropy + weight·‖w − w_anchor‖²: FedProx, and a dual model of HASSLE."""
    proximity = squared_distance(module, anchor)

    def loss(batch: Batch) -> Tensor:
        return cross_entropy(module(batch.views[0]), batch.y) + weight * proximity()

    return loss


def squared_distance(module: nn.Module, anchor: nn.Module) -> Callable[[], Tensor]:
    """‖w − w_anchor‖², of the weights at the time of the call."""
    fixed = flat(anchor.parameters()).detach()
    return lambda: (flat(module.parameters()) - fixed).square().sum()


def residual(module: nn.Module, dual: nn.Module, other: nn.Module, lam: float, tau: float) -> Loss:
    """CE(z + r, y) + λ·KL(softmax((z_other − z)/τ) ‖ softmax(r/τ)): a residual model of HASSLE."""

    def loss(batch: Batch) -> Tensor:
        (x,) = batch.views
        with torch.no_grad():
            z = dual(x)  # (B, M)
            target = other(x) - z
        r = module(x)
        return cross_entropy(z + r, batch.y) + lam * kl_divergence(target / tau, r / tau)

    return loss


# MixMatch


def mixmatch(module: nn.Module, weight: float, temperature: float) -> Loss:
    """Cross-entropy on mixed labelled samples + weight · squared error on mixed unlabelled ones.

    Each step receives λ and, for each sample, the index of the sample to mix with.
    """

    def loss(unlabelled: Batch, labelled: Batch, draw: Tensor) -> Tensor:
        x, u = labelled.views[0], torch.cat(unlabelled.views)
        guess = guessed(module, u, temperature)
        target = torch.cat([one_hot(labelled.y, guess.shape[1]), guess, guess])
        images = torch.cat([x, u])
        other, order = torch.minimum(draw[0], 1 - draw[0]), draw[1:].long()
        z = module(images.lerp(images[order], other))
        target = target.lerp(target[order], other)
        on_labels = soft_cross_entropy(z[: len(x)], target[: len(x)]).mean()
        distance: Tensor = (z[len(x) :].softmax(1) - target[len(x) :]).square().mean()
        return on_labels + weight * distance

    return loss


def guessed(module: nn.Module, u: Tensor, temperature: float) -> Tensor:
    """The sharpened mean (B, M) of a network's own predictions on two views (2·B, C, H, W)."""
    module.eval()
    with torch.no_grad():
        one, other = module(u).softmax(1).chunk(2)
    module.train()
    return sharpen((one + other) / 2, temperature)


# FixMatch and its variants

Consistency = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits of the weak view, without gradient; the weak view; logits of the strong view) -> a loss term."""


def own_labels(confidence: float) -> Consistency:
    """Pseudo-labels from the network's own confident predictions on the weak view: FixMatch."""

    def consistency(z_weak: Tensor, weak: Tensor, z_strong: Tensor) -> Tensor:
        return cross_entropy(z_strong, hard_labels(z_weak, confidence))

    return consistency


def labels_of(teacher: nn.Module, confidence: float) -> Consistency:
    """Pseudo-labels from the received model's confident predictions."""

    def consistency(z_weak: Tensor, weak: Tensor, z_strong: Tensor) -> Tensor:
        with torch.no_grad():
            z = teacher(weak)
        return cross_entropy(z_strong, hard_labels(z, confidence))

    return consistency


def labels_between(teacher: nn.Module, confidence: float, halving: float) -> Consistency:
    """A mean of both labels, weighted by the similarity of their confidences: SAGE."""

    def consistency(z_weak: Tensor, weak: Tensor, z_strong: Tensor) -> Tensor:
        with torch.no_grad():
            q, theirs = teacher(weak).softmax(1).max(1)  # (B,) each
        p, own = z_weak.softmax(1).max(1)
        sure, classes = p >= confidence, z_strong.shape[1]
        share = (sure * torch.exp(-math.log(2) / halving * (p - q).abs()))[:, None]
        target = one_hot(theirs, classes).lerp(one_hot(own, classes), share)
        either: Tensor = sure | (q >= confidence)
        return (soft_cross_entropy(z_strong, target) * either).mean()

    return consistency


def fixmatch(module: nn.Module, consistency: Consistency, weight: float) -> Loss:
    """Cross-entropy + weight · consistency, in one forward pass over all views."""

    def loss(unlabelled: Batch, labelled: Batch) -> Tensor:
        views = (*labelled.views, *unlabelled.views)
        z, z_weak, z_strong = module(torch.cat(views)).split([len(x) for x in views])
        agreement = consistency(z_weak.detach(), unlabelled.views[0], z_strong)
        return cross_entropy(z, labelled.y) + weight * agreement

    return loss


def fixmatch_alone(module: nn.Module, consistency: Consistency, weight: float) -> Loss:
    """Weight · consistency, on a client without labels."""

    def loss(unlabelled: Batch) -> Tensor:
        z_weak, z_strong = module(torch.cat(unlabelled.views)).chunk(2)
        return weight * consistency(z_weak.detach(), unlabelled.views[0], z_strong)

    return loss


# RSCFed


def taught(module: nn.Module, teacher: nn.Module, weight: float, temperature: float) -> Loss:
    """Weight · squared distance from the sharpened teacher on another view."""

    def loss(unlabelled: Batch) -> Tensor:
        one, other = unlabelled.views
        with torch.no_grad():
            target = sharpen(teacher(one).softmax(1), temperature)
        gap: Tensor = (module(other).softmax(1) - target).square().sum(1).mean()
        return weight * gap

    return loss


def on_both(unlabelled: Loss, labelled: Loss) -> Loss:
    """The sum of a loss on unlabelled and one on labelled data."""

    def loss(without: Batch, having: Batch) -> Tensor:
        return labelled(having) + unlabelled(without)

    return loss


def following(teacher: nn.Module, module: nn.Module, ema: float) -> Callable[[], None]:
    """A function that moves the teacher towards the model, with statistics, by steps that get shorter."""
    steps, behind, ahead = count(1), floating(teacher), floating(module)

    @torch.no_grad()
    def follow() -> None:
        torch._foreach_lerp_(behind, ahead, max(1 / next(steps), 1 - ema))

    return follow


def floating(module: nn.Module) -> list[Tensor]:
    """Parameters and statistics, without BatchNorm's count of batches."""
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]


# FedMatch


class Sum:
    """θ = σ + ψ of two networks: ψ is added to the kernels of σ, and θ shares the BatchNorm of σ.

    θ is a network whose kernels are set in each descent; `functional_call` would make a forward pass of a
    small network 1.5 times as long.
    """

    def __init__(self, sigma: nn.Module, psi: nn.Module) -> None:
        normed = normalisation_names(sigma)
        names = [name for name, _ in sigma.named_parameters() if name not in normed]
        self.sigma, self.psi = (
            tuple(module.get_parameter(name) for name in names) for module in (sigma, psi)
        )
        self.norms = [(x, x.momentum) for x in sigma.modules() if isinstance(x, _BatchNorm)]
        shared: dict[int, Any] = {id(x): x for x, _ in self.norms}
        self.theta = copy.deepcopy(sigma, shared)
        paths = [name.rpartition(".") for name in names]
        self.places = [(self.theta.get_submodule(layer), name) for layer, _, name in paths]
        for layer, name in self.places:
            delattr(layer, name)  # now a tensor, no longer a parameter

    def at(self, sigma: tuple[Tensor, ...], psi: tuple[Tensor, ...], still: bool = False) -> nn.Module:
        """θ with these kernels, of which either may have gradients; `still`: statistics stay unchanged."""
        for norm, momentum in self.norms:
            norm.momentum = 0.0 if still else momentum
        for (layer, name), kernel in zip(self.places, torch._foreach_add(sigma, psi), strict=True):
            setattr(layer, name, kernel)
        return self.theta


def supervised_sum(both: Sum, weight: float) -> Loss:
    """Weight · cross-entropy of θ, for σ."""
    psi = detached(both.psi)

    def loss(labelled: Batch, *rest: Batch) -> Tensor:
        return weight * cross_entropy(both.at(both.sigma, psi)(labelled.views[0]), labelled.y)

    return loss


class Weights(NamedTuple):
    """Weights of the terms in the loss of ψ."""

    consistency: float
    sparsity: float
    proximity: float


def agreement(both: Sum, helpers: Sequence[nn.Module], confidence: float, weights: Weights) -> Loss:
    """Agreement with helpers and with the majority label, and the norms, for ψ."""
    sigma, norm = detached(both.sigma), norms(both, weights)

    def loss(*batches: Batch) -> Tensor:
        weak, strong = batches[-1].views
        theta = both.at(sigma, both.psi, still=True)
        z, experts = theta(weak), answers(helpers, weak)
        own = z.detach()
        sure = (own.softmax(1).amax(1) >= confidence).float()  # (B,)
        each = cross_entropy_each(theta(strong), voted([own, *experts]))
        for expert in experts:
            each = each + kl_divergence_each(expert, z) / len(experts)
        agreed: Tensor = weights.consistency * (sure * each).sum() / sure.sum().clamp_min(1)
        return agreed + norm()

    return loss


def norms(both: Sum, weights: Weights) -> Loss:
    """λ_1·|ψ| + λ_2·‖σ − ψ‖², for ψ; does not depend on the batches."""
    sigma = detached(both.sigma)

    def loss(*batches: Batch) -> Tensor:
        psi = flat(both.psi)
        total: Tensor = (
            weights.sparsity * psi.abs().sum() + weights.proximity * (psi - flat(sigma)).square().sum()
        )
        return total

    return loss


@torch.no_grad()
def answers(models: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Logits of frozen models."""
    return [model(x) for model in models]


def voted(logits: Sequence[Tensor]) -> Tensor:
    """The class (B,) with the most votes; of several, the lowest."""
    classes = logits[0].shape[1]
    votes = torch.stack([one_hot(z.argmax(1), classes) for z in logits]).sum(0)  # (B, M)
    return (votes * classes - torch.arange(classes, device=logits[0].device)).argmax(1)


def detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors without gradients; they share memory with those that an optimiser updates."""
    return tuple(tensor.detach() for tensor in tensors)
