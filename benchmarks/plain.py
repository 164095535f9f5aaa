"""Local training as one writes it by hand, to be measured against: modules, `torch.optim`, step after step.

Nothing of the engine occurs here. It is a good loop, not a straw man: the images lie on the device as bytes,
batches are drawn and augmented there, networks and images are channels_last, gradients are clipped and
weights moved by PyTorch's multi-tensor kernels, and no step waits for the device.
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
"""(a batch of each stream, what else a step draws) -> the loss of the step."""


# What is shown


class Batch(NamedTuple):
    """B samples: a tensor (B, C, H, W) per view, channels_last; labels (B,)."""

    views: tuple[Tensor, ...]
    y: Tensor


class Images(NamedTuple):
    """A table of images on a device, and how training sees them."""

    pixels: Tensor  # (N, H + 2·crop, W + 2·crop, C) uint8, reflected at the borders
    y: Tensor  # (N,)
    scale: Tensor  # (C,): pixel · scale + shift is the normalised value
    shift: Tensor  # (C,)
    flip: bool
    crop: int

    def batch(self, rows: Tensor, views: Sequence[str], draws: torch.Generator) -> Batch:
        """Independent views of some rows, `weak` or `strong`, and their labels."""
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


def walk(
    images: Images, rows: Tensor, batch: int, views: Sequence[str], draws: torch.Generator
) -> Iterator[Batch]:
    """A client's batches without end, epoch after epoch; the last of each is filled up from its start."""
    full = -(-len(rows) // batch) * batch
    while True:
        order = torch.randperm(len(rows), device=rows.device, generator=draws)
        filled = order[torch.arange(full, device=rows.device) % len(rows)]
        for chosen in rows[filled].view(-1, batch):
            yield images.batch(chosen, views, draws)


# What trains


class Descent:
    """Some parameters under SGD: clip the gradient of a loss, weight decay, momentum."""

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
        """One step on what it is given, and the loss before it; nothing waits for the device."""
        self.optimiser.zero_grad()
        loss = self.loss(*given)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
        return loss.detach()


class Trainer(NamedTuple):
    """A step makes all descents in order, then what comes after them."""

    descents: Sequence[Descent]
    then: Callable[[], None] | None = None

    def step(self, *given: Any) -> list[Tensor]:
        """One step on a batch of each stream and what else it draws; the loss of each descent."""
        losses = [descent.step(*given) for descent in self.descents]
        if self.then is not None:
            self.then()
        return losses


def frozen(module: nn.Module) -> nn.Module:
    """A network that is asked and does not learn."""
    return module.eval().requires_grad_(False)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one vector: a norm of it takes a few kernels instead of some for every layer.

    In the order of channels_last, in which kernels lie: so none is copied for it.
    """
    laid = (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor for tensor in tensors)
    return torch.cat([tensor.reshape(-1) for tensor in laid])


# How PyTorch is set


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
