"""The networks of the comparison as plain modules, as a user of any simulator would write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width of an image


class LeNet(nn.Module):
    """LeNet-5: with padding 2 the one of `fedhassle.nets`, without padding BlazeFL's."""

    padding = 2

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels, side, _ = shape
        left = ((side + 2 * self.padding - 4) // 2 - 4) // 2  # side of the last feature maps
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=self.padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.hidden1 = nn.Linear(16 * left * left, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.output = nn.Linear(84, classes)
        for layer in (self.conv1, self.conv2, self.hidden1, self.hidden2, self.output):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.hidden1(x.flatten(1)))
        z: Tensor = self.output(F.relu(self.hidden2(x)))
        return z


class UnpaddedLeNet(LeNet):
    """LeNet-5 of BlazeFL's benchmark: 62,006 parameters on colour images of 32×32 pixels."""

    padding = 0


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != planes:
            convolution = nn.Conv2d(inputs, planes, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's features."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet8(nn.Module):
    """ResNet-8 with 64, 128 and 256 planes, as in `fedhassle.nets`."""

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.blocks = nn.Sequential(Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2))
        self.output = nn.Linear(256, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        h = self.blocks(F.relu(self.norm(self.conv(x))))
        z: Tensor = self.output(h.mean((2, 3)))
        return z


class DropoutCNN(nn.Module):
    """The network of pfl's CIFAR-10 benchmark: 1,626,442 parameters on images of 32×32 pixels."""

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels, height, across = shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.hidden = nn.Linear(64 * ((height - 4) // 2) * ((across - 4) // 2), 128)
        self.dropout2 = nn.Dropout(0.5)
        self.output = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        z: Tensor = self.output(self.dropout2(F.relu(self.hidden(x))))
        return z


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "lenet": LeNet,
    "unpadded lenet": UnpaddedLeNet,
    "resnet8": ResNet8,
    "dropout cnn": DropoutCNN,
}


def build(name: str, shape: Shape, classes: int, seed: int = 0) -> nn.Module:
    """A freshly initialised network; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return NETWORKS[name](shape, classes)


def n_parameters(module: nn.Module) -> int:
    """Number of trained weights."""
    return sum(parameter.numel() for parameter in module.parameters())
