"""Each formula once. Shapes: z (B, M) logits; y (B,) labels, −1 = nothing to learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """ℓ(z, y), mean over the batch; a sample with y = −1 counts as zero."""
    return cross_entropy_each(z, y).mean()


def cross_entropy_each(z: Tensor, y: Tensor) -> Tensor:
    """ℓ(z, y) of each sample (B,); 0 where y = −1."""
    return F.cross_entropy(z, y, ignore_index=-1, reduction="none")


def calibrated(z: Tensor, y: Tensor) -> Tensor:
    """Returns z + log p, where p are the shares of the classes in the batch, with one added to each count.

    Its cross-entropy does not teach a model the class mix of the client at hand (balanced softmax, Ren
    et al., 2020; FedLC, Zhang et al., 2022). y are labels (B,) or probabilities (B, M).
    """
    counts = (one_hot(y, z.shape[1]) if y.dim() == 1 else y).sum(0) + 1  # (M,)
    counts = counts.to(torch.promote_types(z.dtype, counts.dtype))  # bfloat16 has too few digits for shares
    return z + (counts / counts.sum()).log()


def soft_cross_entropy(z: Tensor, target: Tensor) -> Tensor:
    """−Σ_m target·log softmax z, of each sample (B,); the target are probabilities (B, M)."""
    return -(target * z.log_softmax(1)).sum(1)


def kl_divergence(target: Tensor, z: Tensor) -> Tensor:
    """KL(softmax target ‖ softmax z), mean over the batch; both are logits."""
    return F.kl_div(z.log_softmax(1), target.log_softmax(1), log_target=True, reduction="batchmean")


def kl_divergence_each(target: Tensor, z: Tensor) -> Tensor:
    """KL(softmax target ‖ softmax z) of each sample (B,)."""
    return F.kl_div(z.log_softmax(1), target.log_softmax(1), log_target=True, reduction="none").sum(1)


def hard_labels(z: Tensor, confidence: float = 0.0) -> Tensor:
    """Argmax of the logits (Eq. 5); −1 where its probability is below `confidence`."""
    sure = z.softmax(1).amax(1) >= confidence  # of the probabilities; their argmax would have false ties
    return torch.where(sure, z.argmax(1), -1)


def class_mix(z: Tensor, steps: int = 10) -> Tensor:
    """The shares of the classes (M,) among a client's samples, from logits (n, M) that expect equal shares.

    Steps of expectation-maximisation (Saerens et al., 2002): Bayes' rule gives each sample's probabilities
    under the shares so far, and their mean is the next estimate.
    """
    mix = z.softmax(1).mean(0)
    for _ in range(steps):
        mix = (z + mix.log()).softmax(1).mean(0)
    return mix


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Labels as probabilities (B, M), for −1 zeros; `F.one_hot` would wait to look at the values."""
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Probabilities (B, M) to the power 1/T, normalised; in logarithms, since a power may underflow."""
    return (p.log() / temperature).softmax(1)
