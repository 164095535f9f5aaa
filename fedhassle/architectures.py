"""The networks themselves, as plain modules `Net(shape, classes, width)`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedhassle.errors import UserError
from fedhassle.layers import Inner, Shortcut, Stem, max_pool

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
        self.conv2 = Inner(c1, c2, 5)
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
        x = F.relu(self.conv1.pooled(x))  # same as pooling after the ReLU, with a quarter of its work
        x = F.relu(max_pool(self.conv2(x)))
        x = F.relu(self.hidden1(x.flatten(1)))
        z: Tensor = self.output(F.relu(self.hidden2(x)))  # (B, M)
        return z


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
    """The common part of residual networks: gradient clipping, strong views, and initial kernels."""

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
