"""Accuracy of each of a method's predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhassle.data.views import Views
from fedhassle.method import Method
from fedhassle.vectors import Arrays

BATCH = 1000  # images a pass


@torch.no_grad()
def accuracy(method: Method, state: Arrays, images: Tensor, y: Tensor, views: Views) -> dict[str, float]:
    """The share of images (N, H, W, C) that each prediction gets right (one synchronisation)."""
    right: dict[str, Tensor] = {}
    for pixels, labels in zip(torch.split(images, BATCH), torch.split(y, BATCH), strict=True):
        for name, z in method.predict(state, views.normalise(pixels)).items():
            hits = (z.argmax(1) == labels).sum()
            right[name] = right[name] + hits if name in right else hits
    return {name: int(hits) / len(y) for name, hits in right.items()}
