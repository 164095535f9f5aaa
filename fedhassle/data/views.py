"""Views of images for training: normalised, and augmented; random draws are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhassle.data import strong

WEAK = 3  # uniform numbers: one for the flip, two for the crop
UNIFORMS = {"clean": 0, "weak": WEAK, "strong": WEAK + strong.UNIFORMS}  # per image, for each view


class Views(NamedTuple):
    """The views of a data set's images: `clean`; `weak` (random flip, random crop); and `strong`.

    Strong is weak, then two of fourteen random operations and cutout, as in FixMatch.

    An augmentation draws nothing itself: it takes `UNIFORMS[view]` numbers in [0, 1) per image. So it gives
    the same result on every device, in the simulator and at a site, and inside a captured step.
    """

    scale: Tensor  # (C,): pixel · scale + shift is the normalised value
    shift: Tensor  # (C,)
    flip: bool
    crop: int  # reflect padding before a random crop; 0 = none

    def __call__(self, pixels: Tensor, view: str, u: Tensor) -> Tensor:
        """Maps pixels (B, H, W, C) uint8 and draws (B, k) to (B, C, H, W), channels_last."""
        if UNIFORMS[view]:
            pixels = self.weak(pixels, u)
        if view == "strong":
            pixels = strong.augmented(pixels, u[:, WEAK:])
        return self.normalise(pixels)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Maps pixels (B, H, W, C) to (B, C, H, W) without a copy: NHWC memory is channels_last."""
        return (pixels * self.scale + self.shift).permute(0, 3, 1, 2)

    def weak(self, pixels: Tensor, u: Tensor) -> Tensor:
        """Flips horizontally with probability ½, then crops the reflect-padded image."""
        mirrored = u[:, 0] < 0.5 if self.flip else None
        if self.crop:
            return random_crop(pixels, self.crop, u[:, 1], u[:, 2], mirrored)
        if mirrored is None:
            return pixels
        return torch.where(mirrored[:, None, None, None], pixels.flip(2), pixels)


def make_views(
    mean: Sequence[float], std: Sequence[float], flip: bool, crop: int, device: torch.device
) -> Views:
    """Returns the views for pixels in 0 … 255; `mean` and `std` of each channel are for pixels in [0, 1]."""
    spread = torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * spread), -torch.tensor(mean, dtype=torch.float64) / spread
    return Views(scale.float().to(device), shift.float().to(device), flip, crop)


def random_crop(
    pixels: Tensor, padding: int, down: Tensor, across: Tensor, mirrored: Tensor | None = None
) -> Tensor:
    """Returns a window of the image's own size from the reflect-padded image, placed by uniforms (B,).

    Images that are `mirrored` (B,) are flipped first.
    """
    n, height, width, channels = pixels.shape
    rows = window(height, padding, down)  # (B, H)
    columns = window(width, padding, across)  # (B, W)
    if mirrored is not None:
        columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    rows = rows + height * torch.arange(n, device=pixels.device)[:, None]  # of all images
    index = width * rows[:, :, None] + columns[:, None, :]  # (B, H, W)
    # One index per pixel takes a quarter of the time of one per axis, on a CPU with three channels.
    # A vector takes a fifth of the time of a table with one column.
    table = pixels.reshape(-1, channels).squeeze(1)
    return table.index_select(0, index.flatten()).view(pixels.shape)


def window(side: int, padding: int, u: Tensor) -> Tensor:
    """Returns indices (B, side) of a random window in a side that is reflected at both ends."""
    if padding >= side:
        raise ValueError(
            f"an image of side {side} cannot be reflected by {padding} pixels: the crop must be smaller"
        )
    offset = (u * (2 * padding + 1)).long() - padding  # (B,), from −padding to padding
    index = offset[:, None] + torch.arange(side, device=u.device)
    return (side - 1) - ((side - 1) - index.abs()).abs()
