"""SAGE (Liu et al., CVPR 2025): labels between those of the local and of the global model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhassle.losses import one_hot, soft_cross_entropy
from fedhassle.method import Labelled, Model
from fedhassle.methods.fixmatch_global import FixMatchGlobal
from fedhassle.ranges import Positive


@dataclass(frozen=True)
class Sage(FixMatchGlobal):
    """SAGE: FixMatch with labels between the local and the global model's; unlabelled clients train too.

    Full clients train on labels, partial ones on all. A label that is given is λ·local + (1 − λ)·global,
    λ = 1 where both models are equally confident.
    """

    halving: Positive = 0.05  # the difference of confidences that halves λ; its paper's

    def consistency(self, z_weak: Tensor, teacher: Model, weak: Tensor, z_strong: Tensor) -> Labelled:
        """Cross-entropy with the mixed label, over the samples of which either model is sure."""
        (p, y), (q, v) = z_weak.softmax(1).max(1), teacher(weak).softmax(1).max(1)  # (B,) each
        alike = torch.exp(-math.log(2) / self.halving * (p - q).abs())
        share = torch.where(p >= self.confidence, alike, 0.0)[:, None]  # λ
        classes = z_strong.shape[1]
        target = share * one_hot(y, classes) + (1 - share) * one_hot(v, classes)
        sure = (p >= self.confidence) | (q >= self.confidence)
        z = self.calibrated(z_strong, target * sure[:, None])
        loss = (soft_cross_entropy(z, target) * sure).mean()
        return Labelled(loss, torch.where(sure, target.argmax(1), -1))
