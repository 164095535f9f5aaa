"""The paper's networks, and any `nn.Module` seen as a function f(x; w) of one flat vector."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhassle.errors import UserError, require
from fedhassle.randomness import number

CPU = torch.device("cpu")
# Each tensor of a flat vector starts at a multiple of 8 entries, hence of 16 bytes in both float32 and
# bfloat16. CUDA kernels load 16 bytes at once, and a BatchNorm with unaligned gains fails with "misaligned
# address".
LEAST_VARIANCE = 0.01  # of a BatchNorm layer whose statistics have noise
ALIGNED = 8
# Images in one forward pass without gradients. Small passes slow a GPU down by kernel launches (passes of
# 1,000 cost 2 % of a HASSLE round); large passes need memory on each core of a CPU. Images with more than
# `SMALL` pixels go in smaller passes, since their feature maps take more memory.
IMAGES_A_PASS = {"cpu": 1000, "cuda": 2500}
SMALL = 32 * 32
Shape = tuple[int, int, int]  # channels, height, width of an image


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max-pooling (the paper's network for Fashion-MNIST)."""

    clip = 1.0  # without BatchNorm, its weights diverge at lr 0.1 if the gradient is clipped at 5

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


class ResNet8(nn.Module):
    """ResNet-8 with 64, 128 and 256 planes (the paper's network for CIFAR)."""

    clip = 5.0

    def __init__(self, shape: Shape, classes: int, width: float = 1.0) -> None:
        super().__init__()
        p1, p2, p3 = (math.ceil(width * n) for n in (64, 128, 256))
        self.conv = Stem(shape[0], p1, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(p1)
        self.blocks = nn.Sequential(BasicBlock(p1, p1, 1), BasicBlock(p1, p2, 2), BasicBlock(p2, p3, 2))
        self.output = nn.Linear(p3, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        h = self.blocks(F.relu(self.norm(self.conv(x))))
        z: Tensor = self.output(h.mean((2, 3)))  # (B, M)
        return z


# Held while using PyTorch's global random state, from which modules draw their weights and dropout its masks.
drawing = threading.RLock()


class CaptureLock:
    """Keeps networks that run eagerly apart from CUDA graph captures in other threads.

    A library that times its kernels on new shapes waits for the whole device. CUDA forbids that during a
    capture, and invalidates the capture. So either one thread captures, or any number of threads run
    networks.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing = False
        self._waiting = 0  # captures
        self._eager = 0  # threads
        self._depth = threading.local()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Waits until no graph is being captured; networks may run in the block. Re-entrant."""
        depth = getattr(self._depth, "n", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._capturing and not self._waiting)
                self._eager += 1
        self._depth.n = depth + 1
        try:
            yield
        finally:
            self._depth.n = depth
            if not depth:
                with self._changed:
                    self._eager -= 1
                    self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Waits until no other thread runs networks; a graph may be captured in the block.

        Within it `eager` does not wait. Must not be entered within `eager`, for which it would wait forever.
        """
        assert not getattr(self._depth, "n", 0)
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._capturing and not self._eager)
            self._waiting -= 1
            self._capturing = True
        self._depth.n = 1
        try:
            yield
        finally:
            self._depth.n = 0
            with self._changed:
                self._capturing = False
                self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()

NETS: dict[str, Callable[..., nn.Module]] = {"lenet": LeNet, "resnet8": ResNet8}


def images_a_pass(images: Tensor) -> int:
    """Number of images (N, H, W, C) in one forward pass without gradients."""
    _, height, width, _ = images.shape
    return max(1, IMAGES_A_PASS[images.device.type] * SMALL // max(SMALL, height * width))


def n_parameters(build: Callable[..., nn.Module], shape: Shape, classes: int) -> int:
    """Number of weights of a network at full width, counted without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(shape, classes, 1.0).parameters())


class Piece(NamedTuple):
    """One tensor of a module, as a slice of the flat vector."""

    name: str
    shape: torch.Size

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape.numel()

    @property
    def room(self) -> int:
        """Number of entries of its slice, with zeros at the end that align the next one."""
        return -(-self.size // ALIGNED) * ALIGNED

    def view(self, flat: Tensor) -> Tensor:
        """The tensor as a view of its slice; kernels are in channels_last order."""
        if self.room != self.size:
            flat = flat[: self.size]
        if len(self.shape) != 4:
            return flat.view(self.shape)
        out, into, height, width = self.shape
        return flat.view(out, height, width, into).permute(0, 3, 1, 2)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The slice that `view` turns back into `tensor`."""
        entries = (tensor.permute(0, 2, 3, 1) if len(self.shape) == 4 else tensor).reshape(-1)
        return F.pad(entries, (0, self.room - self.size))


class Net:
    """f(x; w): a network as a function of a flat vector of weights and one of BatchNorm statistics.

    A vector that travels holds, in this order: kernels and biases, BatchNorm's gains and shifts (together
    the weights), running means and variances (the statistics), each tensor padded with zeros that stay zero.
    `build(shape, classes, width)` makes the module: any `nn.Module` whose buffers are BatchNorm statistics or
    constants.
    """

    def __init__(
        self, build: Callable[..., nn.Module], shape: Shape, classes: int, width: float = 1.0
    ) -> None:
        self.build = build
        self.shape = shape
        self.classes = classes
        self.width = width
        self._module = self.module(seed=0)
        self._copies = threading.local()
        module = self._module
        self.clip = float(getattr(module, "clip", 5.0))
        buffers = dict(module.named_buffers())
        self._weight_pieces = list(parameter_pieces(module))
        self._statistic_pieces = [Piece(k, v.shape) for k, v in buffers.items() if v.is_floating_point()]
        self._constants = {CPU: {k: v for k, v in buffers.items() if not v.is_floating_point()}}
        self.n_parameters = sum(piece.size for piece in self._weight_pieces)
        # Sizes in entries: of each tensor, then of the three parts of a vector that the docstring names.
        self.weight_sizes = [piece.room for piece in self._weight_pieces]
        self.statistic_sizes = [piece.room for piece in self._statistic_pieces]
        normed = normalisation_names(module)
        self._n_kernel_pieces = sum(piece.name not in normed for piece in self._weight_pieces)  # the first
        self.n_kernels = sum(self.weight_sizes[: self._n_kernel_pieces])
        self.n_weights = sum(self.weight_sizes)
        self.n_statistics = sum(self.statistic_sizes)

    def projected(self, vector: Tensor) -> Tensor:
        """The nearest vector that a module can have, for one with noise: zero padding, positive variances."""
        found = vector.clone()
        slices = torch.split(found, [*self.weight_sizes, *self.statistic_sizes])
        for piece, flat in zip([*self._weight_pieces, *self._statistic_pieces], slices, strict=True):
            flat[piece.size :] = 0.0
            if piece.name.endswith("running_var"):
                flat[: piece.size].clamp_(min=LEAST_VARIANCE)
        return found

    def __reduce__(self) -> tuple[type[Net], tuple[Callable[..., nn.Module], Shape, int, float]]:
        """Travels to another process as its four arguments."""
        return Net, (self.build, self.shape, self.classes, self.width)

    def scaled(self, width: float) -> Net:
        """The same network with `width` times the channels of the full one."""
        return Net(self.build, self.shape, self.classes, width)

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """Logits (B, M); in training BatchNorm uses the batch and updates `statistics` in place."""
        # One split instead of many slices: its backward pass is one concatenation (a quarter of the time).
        lowered = torch.is_autocast_enabled(x.device.type)
        flats = self._lowered(weights) if lowered else torch.split(weights, self.weight_sizes)
        tensors = {p.name: p.view(flat) for p, flat in zip(self._weight_pieces, flats, strict=True)}
        moments = torch.split(statistics, self.statistic_sizes)
        for piece, flat in zip(self._statistic_pieces, moments, strict=True):
            tensors[piece.name] = piece.view(flat)
        tensors |= self.constants(x.device)
        with CAPTURE_LOCK.eager() if x.is_cuda else nullcontext():
            z: Tensor = torch.func.functional_call(self.own_copy(training), tensors, (x,))
        return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z

    def _lowered(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The slices under autocast, with all kernels cast at once; autocast would cast one by one."""
        low = torch.get_autocast_dtype(weights.device.type)
        kernels, others = torch.split(weights, [self.n_kernels, self.n_weights - self.n_kernels])
        kernel_sizes = self.weight_sizes[: self._n_kernel_pieces]
        other_sizes = self.weight_sizes[self._n_kernel_pieces :]
        return (*torch.split(kernels.to(low), kernel_sizes), *torch.split(others, other_sizes))

    def own_copy(self, training: bool) -> nn.Module:
        """The copy of the module for this thread and mode, since both its tensors and its mode are state."""
        mode, copies = "training" if training else "evaluation", vars(self._copies)
        if mode not in copies:
            copies[mode] = copy.deepcopy(self._module).train(training)
        module: nn.Module = copies[mode]
        return module

    @cached_property
    def draws(self) -> bool:
        """True if the module itself draws random numbers in training, as dropout does."""
        with drawing, torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            copy.deepcopy(self._module).train()(torch.zeros(2, *self.shape))
            return not torch.equal(torch.get_rng_state(), before)

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Buffers other than statistics, copied to a device once."""
        if device not in self._constants:
            self._constants[device] = {k: v.to(device) for k, v in self._constants[CPU].items()}
        return self._constants[device]

    def parts(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the statistics in a vector that travels."""
        return vector[: self.n_weights], vector[self.n_weights :]

    def logits(self, vector: Tensor, x: Tensor) -> Tensor:
        """f(x; w) in evaluation mode, for a vector that travels."""
        return self(*self.parts(vector), x)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum over all tensors, statistics included, of ‖a − b‖, for vectors that travel."""
        gaps = torch.split(a - b, [*self.weight_sizes, *self.statistic_sizes])
        return torch.stack([gap.norm() for gap in gaps]).sum()

    def initial(self, seed: int, slot: int = 0) -> Tensor:
        """Freshly initialised vector; equal (seed, slot) give equal vectors."""
        return self.flatten(self.module(number(seed, slot, "initial")))

    def flatten(self, module: nn.Module) -> Tensor:
        """The vector of a module of this shape."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        pieces = [*self._weight_pieces, *self._statistic_pieces]
        return torch.cat([piece.flatten(tensors[piece.name].detach()) for piece in pieces])

    def filled(self, weights: Tensor, statistics: Tensor) -> nn.Module:
        """A new module in evaluation mode, with a copy of these weights and statistics."""
        flats = [*torch.split(weights, self.weight_sizes), *torch.split(statistics, self.statistic_sizes)]
        pieces = [*self._weight_pieces, *self._statistic_pieces]
        tensors = {piece.name: piece.view(flat) for piece, flat in zip(pieces, flats, strict=True)}
        module = copy.deepcopy(self._module).eval()
        module.load_state_dict(
            tensors, strict=False
        )  # tied weights have two names; constants are already set
        return module

    def module(self, seed: int) -> nn.Module:
        """A new module, with weights drawn from a seed."""
        with drawing, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = self.build(self.shape, self.classes, self.width)
        require(isinstance(module, nn.Module), f"a network must be an nn.Module, got {type(module).__name__}")
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                require(
                    layer.momentum is not None, "BatchNorm with momentum=None keeps a count: set a momentum"
                )
                layer.num_batches_tracked = None  # an unused integer, not worth sending
        return module


def normalisation_names(module: nn.Module) -> set[str]:
    """Names of BatchNorm's gains and shifts."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for name, _ in layer.named_parameters(recurse=False)
    }


def parameter_pieces(module: nn.Module) -> Iterator[Piece]:
    """Kernels and biases, then BatchNorm's gains and shifts."""
    normed = normalisation_names(module)
    named = list(module.named_parameters())
    for last in (False, True):
        yield from (Piece(k, v.shape) for k, v in named if (k in normed) is last)


def check_image(net: Net) -> None:
    """Raises a `UserError` if a network does not map its images to logits."""
    x = torch.zeros(2, *net.shape)
    try:
        z = net.logits(net.initial(0), x)
    except Exception as error:  # a user's network may fail in any way
        raise UserError(f"the network fails on images of shape {net.shape}: {error}") from error
    if not isinstance(z, Tensor) or z.shape != (2, net.classes):
        found = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise UserError(f"the network must return logits of shape (B, {net.classes}), got {found}")
