"""Each formula once. Shapes: z (B, M) logits; y (B,) labels, −1 = nothing to learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """ℓ(z, y), mean over the batch; a sample with y = −1 counts as zero."""
    each = F.cross_entropy(z, y, ignore_index=-1, reduction="none")  # (B,)
    return each.mean()


def kl_divergence(target: Tensor, z: Tensor) -> Tensor:
    """KL(softmax target ‖ softmax z), mean over the batch; both are logits."""
    return F.kl_div(z.log_softmax(1), target.log_softmax(1), log_target=True, reduction="batchmean")


def hard_labels(z: Tensor, threshold: float = 0.0) -> Tensor:
    """Argmax of the logits (Eq. 5); −1 where the confidence is below `threshold`."""
    sure = z.softmax(1).amax(1) >= threshold  # of the probabilities; their argmax would have false ties
    return torch.where(sure, z.argmax(1), -1)
