"""The networks themselves, as plain modules `Net(shape, classes, width)`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhassle.errors import UserError

Shape = tuple[int, int, int]  # channels, height, width of an image


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max-pooling (the paper's network for Fashion-MNIST)."""

    clip = 1.0  # without BatchNorm, its weights diverge at lr 0.1 if the gradient is clipped at 5
    view = "weak"  # it is too small for strong views (docs/results.md)

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels, height, across = shape
        if min(height, across) < 12:
            raise UserError(
                f"lenet needs images of at least 12×12 pixels, got {height}×{across}: set net=resnet8"
            )
        c1, c2, d1, d2 = (math.ceil(width * n) for n in (6, 16, 120, 84))
        self.conv1 = Stem(channels, c1, 5, padding=2)
        self.conv2 = nn.Conv2d(c1, c2, 5)
        self.hidden1 = nn.Linear(c2 * ((height // 2 - 4) // 2) * ((across // 2 - 4) // 2), d1)
        self.hidden2 = nn.Linear(d1, d2)
        self.output = nn.Linear(d2, classes)
        # He initialisation: with PyTorch's default, logits hardly depend on the image at first, and training
        # on clients with two or three classes kills the units and stays at chance (docs/paper.md).
        for layer in self.children():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = F.relu(max_pool(self.conv1(x)))  # same as pooling after the ReLU, with a quarter of its work
        x = F.relu(max_pool(self.conv2(x)))
        x = F.relu(self.hidden1(x.flatten(1)))
        z: Tensor = self.output(F.relu(self.hidden2(x)))  # (B, M)
        return z


def max_pool(x: Tensor) -> Tensor:
    """Max-pooling over 2×2 squares."""
    if x.requires_grad and not torch.are_deterministic_algorithms_enabled():
        return F.max_pool2d(x, 2)
    # Slices take a tenth of the time on a CPU for LeNet's few channels, if no gradient is needed. They are
    # also deterministic, while CUDA sums the gradients of `max_pool2d` in any order.
    x = x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
    x = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(x[..., ::2], x[..., 1::2])


class Stem(nn.Conv2d):
    """A convolution of an image's few channels; in bfloat16 padded to multiples of eight for matrix units."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the same features as its parent class, up to rounding."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return self.product(x) if self.out_channels % 8 == 0 else self.padded(x)

    def padded(self, x: Tensor) -> Tensor:
        """Pads the channels with zeros to a multiple of eight."""
        more = (0, 0, 0, 0, 0, -x.shape[1] % 8)
        z: Tensor = self._conv_forward(F.pad(x, more), F.pad(self.weight, more), self.bias)
        return z

    def product(self, x: Tensor) -> Tensor:
        """One product with the patches under the kernel, which is faster for many planes."""
        (height, width), (top, left) = self.kernel_size, map(int, self.padding)
        x = F.pad(x.to(self.weight.dtype), (left, left, top, top))
        under = x.unfold(2, height, self.stride[0]).unfold(3, width, self.stride[1])
        under = under.permute(0, 2, 3, 4, 5, 1)  # (B, H, W, h, w, C)
        kernels = self.weight.permute(0, 2, 3, 1).flatten(1)  # (planes, h·w·C)
        more = (0, -kernels.shape[1] % 8)
        z = F.linear(F.pad(under.flatten(3), more), F.pad(kernels, more), self.bias)  # (B, H, W, planes)
        return z.permute(0, 3, 1, 2)


class Shortcut(nn.Conv2d):
    """A 1×1 convolution of every n-th pixel: pixels are selected first, and the rest is a matrix product.

    Same result as with a stride, in 0.4 times the time on a CPU.
    """

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__(inputs, planes, 1, bias=False)
        self.every = stride

    def forward(self, x: Tensor) -> Tensor:
        """Returns the features of every n-th pixel."""
        taken = x[:, :, :: self.every, :: self.every]
        return super().forward(
            taken.contiguous(memory_format=torch.channels_last)
        )  # one copy for forward and backward


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(Shortcut(inputs, planes, stride), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's features."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """What residual networks share: gradient clipping, strong views, and initial kernels."""

    clip = 5.0
    view = "strong"

    def initialise(self) -> None:
        """Draws the kernels of all convolutions from N(0, 2/(k²·planes)), as He et al. (2015) do."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / fan_out))


class ResNet(ResidualNetwork):
    """A residual network of basic blocks, in its form for small images: 3×3 first, and no max-pooling."""

    stages: ClassVar[tuple[int, ...]]  # planes; each stage after the first halves the image
    blocks_a_stage: ClassVar[int]

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        planes = [math.ceil(width * n) for n in self.stages]
        self.conv = Stem(shape[0], planes[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(planes[0])
        layout = block_layout(planes[0], planes, self.blocks_a_stage)
        self.blocks = nn.Sequential(*(BasicBlock(*block) for block in layout))
        self.output = nn.Linear(planes[-1], classes)
        self.initialise()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        h = self.blocks(F.relu(self.norm(self.conv(x))))
        z: Tensor = self.output(h.mean((2, 3)))  # (B, M)
        return z


class ResNet8(ResNet):
    """ResNet-8 (the paper's network for CIFAR)."""

    stages = (64, 128, 256)
    blocks_a_stage = 1


class ResNet18(ResNet):
    """ResNet-18 (He et al., 2016) in its form for CIFAR."""

    stages = (64, 128, 256, 512)
    blocks_a_stage = 2


class PreactivatedBlock(nn.Module):
    """BatchNorm, ReLU and a 3×3 convolution, twice; a shortcut around both, 1×1 where the shape changes."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != planes
        self.shortcut = Shortcut(inputs, planes, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's features."""
        active = F.relu(self.norm1(x))
        h: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return h + (x if self.shortcut is None else self.shortcut(active))


class WideResNet28(ResidualNetwork):
    """WRN-28-2 (Zagoruyko and Komodakis, 2016): 28 layers, twice the planes of a ResNet; no dropout."""

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        first, *planes = (math.ceil(width * n) for n in (16, 32, 64, 128))
        self.conv = Stem(shape[0], first, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(PreactivatedBlock(*block) for block in block_layout(first, planes, 4)))
        self.norm = nn.BatchNorm2d(planes[-1])
        self.output = nn.Linear(planes[-1], classes)
        self.initialise()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        h = F.relu(self.norm(self.blocks(self.conv(x))))
        z: Tensor = self.output(h.mean((2, 3)))  # (B, M)
        return z


def block_layout(first: int, stages: list[int], blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yields inputs, planes and stride of each block; stages after the first begin with a stride of 2."""
    inputs = first
    for stage, planes in enumerate(stages):
        for block in range(blocks):
            yield inputs, planes, 2 if stage and not block else 1
            inputs = planes
