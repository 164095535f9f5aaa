"""Local training written by hand with modules and `torch.optim`, as the baseline of the benchmark.

It uses nothing of the engine. It is a good loop, not a straw man: images are on the device as bytes, batches
are drawn and augmented there, networks and images are channels_last, gradients are clipped and weights
updated by PyTorch's multi-tensor kernels, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedhassle.data.strong import UNIFORMS, augmented

Loss = Callable[..., Tensor]
"""(a batch of each stream, further draws) -> the loss of the step."""


# Images


class Batch(NamedTuple):
    """B samples: a tensor (B, C, H, W) per view, channels_last; labels (B,)."""

    views: tuple[Tensor, ...]
    y: Tensor


class Images(NamedTuple):
    """A table of images on a device, with its normalisation and augmentation."""

    pixels: Tensor  # (N, H + 2·crop, W + 2·crop, C) uint8, with reflected borders
    y: Tensor  # (N,)
    scale: Tensor  # (C,): pixel · scale + shift is the normalised value
    shift: Tensor  # (C,)
    flip: bool
    crop: int

    def batch(self, rows: Tensor, views: Sequence[str], draws: torch.Generator) -> Batch:
        """A batch of some rows, with independent views, `weak` or `strong`."""
        return Batch(tuple(self.view(rows, view, draws) for view in views), self.y[rows])

    def view(self, rows: Tensor, view: str, draws: torch.Generator) -> Tensor:
        """The images of some rows, augmented and normalised (B, C, H, W), channels_last."""
        pixels = self.cropped(rows, draws) if self.crop else self.pixels[rows]  # (B, H, W, C)
        if self.flip:
            mirrored = self.drawn(rows, 2, draws).bool()
            pixels = torch.where(mirrored[:, None, None, None], pixels.flip(2), pixels)
        if view == "strong":
            u = torch.rand((len(rows), UNIFORMS), device=rows.device, generator=draws)
            pixels = augmented(pixels, u)
        return (pixels * self.scale + self.shift).permute(0, 3, 1, 2)

    def cropped(self, rows: Tensor, draws: torch.Generator) -> Tensor:
        """A random window of each padded image, in the original size."""
        high, wide = (side - 2 * self.crop for side in self.pixels.shape[1:3])
        down, across = (self.drawn(rows, 2 * self.crop + 1, draws) for _ in range(2))  # (B,)
        down = down[:, None] + torch.arange(high, device=rows.device)  # (B, H)
        across = across[:, None] + torch.arange(wide, device=rows.device)  # (B, W)
        return self.pixels[rows[:, None, None], down[:, :, None], across[:, None, :]]

    def drawn(self, rows: Tensor, below: int, draws: torch.Generator) -> Tensor:
        """A random integer from 0 to `below`, exclusive, for each row."""
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
    """Copies images (N, H, W, C) and labels to a device; pads the images once."""
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


def walk(
    images: Images, rows: Tensor, batch: int, views: Sequence[str], draws: torch.Generator
) -> Iterator[Batch]:
    """Endless batches of a client; the last of each epoch is filled up from the epoch's start."""
    full = -(-len(rows) // batch) * batch
    while True:
        order = torch.randperm(len(rows), device=rows.device, generator=draws)
        filled = order[torch.arange(full, device=rows.device) % len(rows)]
        for chosen in rows[filled].view(-1, batch):
            yield images.batch(chosen, views, draws)


# Training


class Descent:
    """SGD on some parameters: gradient clipping, weight decay, momentum."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        loss: Loss,
        lr: float,
        momentum: float,
        decay: float,
        clip: float,
    ) -> None:
        self.parameters, self.loss, self.clip = list(parameters), loss, clip
        self.optimiser = torch.optim.SGD(self.parameters, lr, momentum, weight_decay=decay)

    def step(self, *given: Any) -> Tensor:
        """One step on the given inputs; returns the loss before it, without waiting for the device."""
        self.optimiser.zero_grad()
        loss = self.loss(*given)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
        return loss.detach()


class Trainer(NamedTuple):
    """Runs all descents in order in each step, then `then`."""

    descents: Sequence[Descent]
    then: Callable[[], None] | None = None

    def step(self, *given: Any) -> list[Tensor]:
        """One step on a batch of each stream and further draws; returns the loss of each descent."""
        losses = [descent.step(*given) for descent in self.descents]
        if self.then is not None:
            self.then()
        return losses


def frozen(module: nn.Module) -> nn.Module:
    """The network in evaluation mode, without gradients."""
    return module.eval().requires_grad_(False)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one vector, whose norm takes a few kernels instead of several per layer.

    In channels_last order, like the convolution kernels, so that none has to be copied first.
    """
    laid = (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor for tensor in tensors)
    return torch.cat([tensor.reshape(-1) for tensor in laid])


# Switches


@contextmanager
def switches(tf32: bool) -> Iterator[None]:
    """Sets PyTorch's backend switches for speed inside the block, with or without TF32."""
    cudnn: Any = torch.backends.cudnn  # its stubs lack `conv`
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
