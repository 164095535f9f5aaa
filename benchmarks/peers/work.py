"""The work that all contenders do: rounds of FedAvg on random images. Nothing of any framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.peers.networks import Shape

CLASSES = 10
CROP = 4  # pixels by which images are padded before a random crop
MEAN, STD = 0.5, 0.25  # of each channel
Pair = tuple[Tensor, Tensor]  # images (B, C, H, W) and labels (B,)


@dataclass(frozen=True)
class Work:
    """Rounds of FedAvg: each drawn client trains by SGD on its images; updates are averaged by samples."""

    net: str
    shape: Shape
    clients: int
    per_round: int
    images: int  # of a client
    epochs: int
    batch: int
    lr: float
    momentum: float
    augment: bool  # flips and crops
    device: str
    warmup: int  # rounds before those that are timed
    rounds: int  # that are timed

    @property
    def steps(self) -> int:
        """Steps of a round, of all clients."""
        return self.per_round * self.epochs * -(-self.images // self.batch)


def images_of(work: Work, client: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """A client's images (N, H, W, C) and labels: noise over a coarse pattern of the class."""
    channels, height, across = work.shape
    coarse = np.random.default_rng(0).integers(0, 256, (CLASSES, 4, 4, channels))
    patterns = coarse.repeat(height // 4, 1).repeat(across // 4, 2).astype(np.uint16)
    rng = np.random.default_rng((1, client))
    y = rng.permutation(np.arange(work.images) % CLASSES).astype(np.int64)
    noise = rng.integers(0, 256, (work.images, height, across, channels), dtype=np.uint8)
    return ((noise.astype(np.uint16) + patterns[y]) // 2).astype(np.uint8), y


class Seen:
    """A client's images for a peer: on the device; an epoch is shuffled and augmented at once."""

    def __init__(self, work: Work, client: int, channels_last: bool) -> None:
        x, y = images_of(work, client)
        pad = ((0, 0), (CROP, CROP), (CROP, CROP), (0, 0))
        self.pixels = torch.from_numpy(np.pad(x, pad, mode="reflect")).to(work.device)
        self.y = torch.from_numpy(y).to(work.device)
        self.side, self.augment, self.channels_last = x.shape[1], work.augment, channels_last
        self.offsets = torch.arange(self.side, device=work.device)

    def __len__(self) -> int:
        return len(self.y)

    def epoch(self) -> Pair:
        """All images in a new order, each in a new window and mirrored or not, and their labels."""
        device, n = self.y.device, len(self.y)
        order = torch.randperm(n, device=device)
        if self.augment:
            where = torch.randint(2 * CROP + 1, (2, n), device=device)
            down, across = (where[k, :, None] + self.offsets for k in range(2))
            mirrored = torch.rand(n, device=device) < 0.5
            across = torch.where(mirrored[:, None], across.flip(1), across)
            pixels = self.pixels[order[:, None, None], down[:, :, None], across[:, None, :]]
        else:
            inner = slice(CROP, CROP + self.side)
            pixels = self.pixels[order][:, inner, inner]
        x = (pixels * (1 / (255 * STD)) - MEAN / STD).permute(0, 3, 1, 2)
        return x if self.channels_last else x.contiguous(), self.y[order]

    def batches(self, batch: int) -> Iterator[Pair]:
        """An epoch, batch by batch; the last batch has the rest."""
        x, y = self.epoch()
        yield from zip(torch.split(x, batch), torch.split(y, batch), strict=True)
