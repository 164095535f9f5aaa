"""Local training as one writes it by hand, to be measured against: modules, `torch.optim`, step after step.

Nothing of the engine occurs here. It is a good loop, not a straw man: the images lie on the device as bytes,
batches are drawn and augmented there, networks and images are channels_last, gradients are clipped and
weights moved by PyTorch's multi-tensor kernels, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedhassle.losses import cross_entropy, kl_divergence

Loss = Callable[[Tensor, Tensor], Tensor]
"""(x (B, C, H, W), y (B,)) -> the loss of a step."""


class Images(NamedTuple):
    """A table of images on a device, and how training sees them."""

    pixels: Tensor  # (N, H + 2·crop, W + 2·crop, C) uint8, reflected at the borders
    y: Tensor  # (N,)
    scale: Tensor  # (C,): pixel · scale + shift is the normalised value
    shift: Tensor  # (C,)
    flip: bool
    crop: int

    def batch(self, rows: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """The images of some rows, augmented and normalised (B, C, H, W), channels_last; their labels."""
        pixels = self.cropped(rows, draws) if self.crop else self.pixels[rows]  # (B, H, W, C)
        if self.flip:
            mirrored = self.drawn(rows, 2, draws).bool()
            pixels = torch.where(mirrored[:, None, None, None], pixels.flip(2), pixels)
        return (pixels * self.scale + self.shift).permute(0, 3, 1, 2), self.y[rows]

    def cropped(self, rows: Tensor, draws: torch.Generator) -> Tensor:
        """A random window of each image, of the size that it had before it was padded."""
        high, wide = (side - 2 * self.crop for side in self.pixels.shape[1:3])
        down, across = (self.drawn(rows, 2 * self.crop + 1, draws) for _ in range(2))  # (B,)
        down = down[:, None] + torch.arange(high, device=rows.device)  # (B, H)
        across = across[:, None] + torch.arange(wide, device=rows.device)  # (B, W)
        return self.pixels[rows[:, None, None], down[:, :, None], across[:, None, :]]

    def drawn(self, rows: Tensor, below: int, draws: torch.Generator) -> Tensor:
        """A whole number from 0 for each row."""
        return torch.randint(below, rows.shape, device=rows.device, generator=draws)


def images_on(
    device: torch.device,
    x: npt.NDArray[np.uint8],
    y: npt.NDArray[np.int64],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    flip: bool,
    crop: int,
) -> Images:
    """Images (N, H, W, C) and their labels on a device, padded once."""
    padded = np.pad(x, ((0, 0), (crop, crop), (crop, crop), (0, 0)), mode="reflect")
    spread = torch.tensor(std)
    return Images(
        torch.from_numpy(padded).to(device),
        torch.from_numpy(y).to(device),
        (1 / (255 * spread)).to(device),
        (-torch.tensor(mean) / spread).to(device),
        flip,
        crop,
    )


def walk(images: Images, rows: Tensor, batch: int, draws: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """A client's batches without end, epoch after epoch; the last of each is filled up from its start."""
    full = -(-len(rows) // batch) * batch
    while True:
        order = torch.randperm(len(rows), device=rows.device, generator=draws)
        filled = order[torch.arange(full, device=rows.device) % len(rows)]
        for chosen in rows[filled].view(-1, batch):
            yield images.batch(chosen, draws)


class Trainer:
    """One model under SGD: clip the gradient, weight decay, momentum."""

    def __init__(
        self, module: nn.Module, loss: Loss, lr: float, momentum: float, decay: float, clip: float
    ) -> None:
        self.module, self.loss, self.clip = module, loss, clip
        self.parameters = list(module.parameters())
        self.optimiser = torch.optim.SGD(self.parameters, lr, momentum, weight_decay=decay)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a batch; nothing waits for the device."""
        self.optimiser.zero_grad()
        self.loss(x, y).backward()  # type: ignore[no-untyped-call]
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()


def supervised(module: nn.Module) -> Loss:
    """Cross-entropy: FedAvg."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(module(x), y)

    return loss


def proximal(module: nn.Module, anchor: nn.Module, weight: float) -> Loss:
    """Cross-entropy + weight·‖w − w_anchor‖²: FedProx, and a dual model of HASSLE."""
    fixed = flat(anchor).detach()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(module(x), y) + weight * (flat(module) - fixed).square().sum()

    return loss


def flat(module: nn.Module) -> Tensor:
    """All weights in one vector: a norm of it takes a few kernels instead of some for every layer."""
    return torch.cat([parameter.flatten() for parameter in module.parameters()])


def residual(module: nn.Module, dual: nn.Module, other: nn.Module, lam: float, tau: float) -> Loss:
    """CE(z + r, y) + λ·KL(softmax((z_other − z)/τ) ‖ softmax(r/τ)): a residual model of HASSLE."""
    dual.eval()
    other.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = dual(x)  # (B, M)
            target = other(x) - z
        r = module(x)
        return cross_entropy(z + r, y) + lam * kl_divergence(target / tau, r / tau)

    return loss


@contextmanager
def switches(tf32: bool) -> Iterator[None]:
    """PyTorch's libraries as one sets them for speed, with or without TF32; afterwards as they were."""
    cudnn: Any = torch.backends.cudnn  # whose stubs know no `conv`
    places = (cudnn.conv, torch.backends.cuda.matmul)
    before = cudnn.benchmark, *(place.fp32_precision for place in places)
    cudnn.benchmark = True
    for place in places:
        place.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        cudnn.benchmark = before[0]
        for place, precision in zip(places, before[1:], strict=True):
            place.fp32_precision = precision
