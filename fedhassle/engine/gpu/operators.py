"""Our own operations in compiled steps: opaque to the compiler, one kernel each.

On a GPU they use Triton and cuDNN; on a CPU, for tests, plain functions that compute the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PIXELS = (0, 2, 3)  # axes of a batch of feature maps, without channels


@torch.library.custom_op("fedhassle::moments", mutates_args=("mean", "variance"))
def moments(x: Tensor, mean: Tensor, variance: Tensor, momentum: float, eps: float) -> Tensor:
    """Mean and 1/√(variance + ε) of each channel, (2, C); updates the running statistics."""
    if x.is_cuda:
        from fedhassle.engine.gpu import kernels  # needs Triton, which only comes with PyTorch for GPUs

        return kernels.moments(x, mean, variance, momentum, eps)
    now, centre = torch.var_mean(x.float(), PIXELS, correction=0)
    pixels = x.numel() // x.shape[1]
    mean.lerp_(centre, momentum)
    variance.lerp_(now * (pixels / (pixels - 1)), momentum)
    return torch.stack([centre, torch.rsqrt(now + eps)])


@moments.register_fake
def _(x: Tensor, mean: Tensor, variance: Tensor, momentum: float, eps: float) -> Tensor:
    return x.new_empty(2, x.shape[1], dtype=torch.float32)


@torch.library.custom_op("fedhassle::gradient_sums", mutates_args=())
def gradient_sums(
    gradient: Tensor, x: Tensor, moments: Tensor, gain: Tensor | None, shift: Tensor | None
) -> Tensor:
    """Σg and Σg·x̂, (2, C); if gain and shift are given, g is zero where ReLU(gain·x̂ + shift) is zero."""
    if x.is_cuda:
        from fedhassle.engine.gpu import kernels

        return kernels.gradient_sums(gradient, x, moments, gain, shift)
    normal, g = standardised(x, moments), gradient.float()
    if gain is not None and shift is not None:
        g = torch.where(normal * per_channel(gain) + per_channel(shift) > 0, g, 0)
    return torch.stack([g.sum(PIXELS), (g * normal).sum(PIXELS)])


@gradient_sums.register_fake
def _(gradient: Tensor, x: Tensor, moments: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    return x.new_empty(2, x.shape[1], dtype=torch.float32)


@torch.library.custom_op("fedhassle::convolve_relu", mutates_args=())
def convolve_relu(
    x: Tensor, kernel: Tensor, bias: Tensor, other: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    """ReLU(x * kernel + bias + other), in channels_last."""
    if x.is_cuda and other is None:
        return torch.cudnn_convolution_relu(x, kernel, bias, stride, padding, [1, 1], 1)
    if x.is_cuda and other is not None:
        return torch.cudnn_convolution_add_relu(x, kernel, other, 1, bias, stride, padding, [1, 1], 1)
    z = F.conv2d(x, kernel, bias, stride, padding)
    return F.relu(z if other is None else z + other).contiguous(memory_format=torch.channels_last)


@convolve_relu.register_fake
def _(
    x: Tensor, kernel: Tensor, bias: Tensor, other: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    made = F.conv2d(x, kernel, bias, stride, padding)
    return torch.empty_like(made, memory_format=torch.channels_last)


def standardised(x: Tensor, moments: Tensor) -> Tensor:
    """x̂: feature maps with mean 0 and variance 1 per channel."""
    return (x.float() - per_channel(moments[0])) * per_channel(moments[1])


def per_channel(vector: Tensor) -> Tensor:
    """A vector (C,) that broadcasts over feature maps (B, C, H, W)."""
    return vector[:, None, None]
