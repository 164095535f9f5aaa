"""Networks by name, and any `nn.Module` seen as a function f(x; w) of one flat vector."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from fedhassle.architectures import LeNet, ResNet8, ResNet18, Shape, WideResNet28
from fedhassle.capture import CAPTURE_LOCK
from fedhassle.dropout import SeededDropout
from fedhassle.errors import UserError, require
from fedhassle.randomness import number

CPU = torch.device("cpu")
LEAST_VARIANCE = 0.01  # of a BatchNorm layer whose statistics have noise
# Each tensor of a flat vector starts at a multiple of 8 entries, hence of 16 bytes in both float32 and
# bfloat16. CUDA kernels load 16 bytes at once, and a BatchNorm with unaligned gains fails with "misaligned
# address".
ALIGNED = 8
# Images in one forward pass without gradients. Small passes slow a GPU down by kernel launches (passes of
# 1,000 cost 2 % of a HASSLE round); large passes need memory on each core of a CPU. Images with more than
# `SMALL` pixels go in smaller passes, since their feature maps take more memory.
IMAGES_A_PASS = {"cpu": 1000, "cuda": 2500}
SMALL = 32 * 32
LARGE = 50e6  # operations for an image: kernels of a step of 128 images then take 0.1 ms of a large GPU

# Held while using PyTorch's global random state, from which modules draw their weights and some layers noise.
drawing = threading.RLock()


NETS: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "resnet8": ResNet8,
    "resnet18": ResNet18,
    "wrn-28-2": WideResNet28,
}


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


class Randomness(NamedTuple):
    """The sources of a module's random numbers in training."""

    seeded: bool  # it has dropout, whose masks come from the seed of a step
    globally: bool  # another layer draws from PyTorch's global random state, which all threads share


class OwnCopy:
    """A module that is called with other tensors in place of its parameters and buffers, and keeps its own.

    Same as `torch.func.functional_call`, in a tenth of its time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        tables = [table for layer in module.modules() for table in (layer._parameters, layer._buffers)]
        self.places = {  # a tied weight has several
            name: [(table, key) for table in tables for key, own in table.items() if own is tensor]
            for name, tensor in self.tensors.items()
        }

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The module's output with these tensors."""
        self._set(tensors)
        try:
            z: Tensor = self.module(x)
        finally:
            self._set(self.tensors)
        return z

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for table, key in self.places[name]:
                table[key] = tensor  # type: ignore[assignment] # a parameter may be any tensor


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
        self.view = str(getattr(module, "view", "strong"))  # for methods that leave the choice to the network
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

    @cached_property
    def operations(self) -> int:
        """Multiplications and additions for one image; training takes three times as many."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.logits(self.initial(0), torch.zeros(2, *self.shape))  # as `check_image` does
        return int(counter.get_total_flops()) // 2

    @property
    def is_small(self) -> bool:
        """True if a large GPU takes about as long to start the kernels of a training step as to run them."""
        return self.operations < LARGE

    def projected(self, vector: Tensor) -> Tensor:
        """The nearest vector that a module can have, for one with noise: zero padding, positive variances."""
        found = vector.clone()
        slices = torch.split(found, [*self.weight_sizes, *self.statistic_sizes])
        for piece, flat in zip([*self._weight_pieces, *self._statistic_pieces], slices, strict=True):
            flat[piece.size :] = 0.0
            if piece.name.endswith("running_var"):
                flat[: piece.size].clamp_(min=LEAST_VARIANCE)
        return found

    def cleared(self, weights: Tensor) -> Tensor:
        """The weights with zeros in their padding."""
        flats = zip(self._weight_pieces, torch.split(weights, self.weight_sizes), strict=True)
        return torch.cat([F.pad(flat[: piece.size], (0, piece.room - piece.size)) for piece, flat in flats])

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
            z: Tensor = self.own_copy(training)(tensors, x)
        return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z

    def _lowered(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The slices under autocast, with all kernels cast at once; autocast would cast one by one."""
        low = torch.get_autocast_dtype(weights.device.type)
        kernels, others = torch.split(weights, [self.n_kernels, self.n_weights - self.n_kernels])
        kernel_sizes = self.weight_sizes[: self._n_kernel_pieces]
        other_sizes = self.weight_sizes[self._n_kernel_pieces :]
        return (*torch.split(kernels.to(low), kernel_sizes), *torch.split(others, other_sizes))

    def own_copy(self, training: bool) -> OwnCopy:
        """The copy of the module for this thread and mode, since both its tensors and its mode are state."""
        mode, copies = "training" if training else "evaluation", vars(self._copies)
        if mode not in copies:
            copies[mode] = OwnCopy(copy.deepcopy(self._module).train(training))
        made: OwnCopy = copies[mode]
        return made

    @cached_property
    def randomness(self) -> Randomness:
        """The sources of the module's random numbers in training, found by a forward pass."""
        seeded = SeededDropout(torch.zeros((), dtype=torch.int32))
        with drawing, torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            with seeded:
                copy.deepcopy(self._module).train()(torch.zeros(2, *self.shape))
            return Randomness(seeded.draws > 0, not torch.equal(torch.get_rng_state(), before))

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
        # Not strict: tied weights have two names, and constants are already set.
        module.load_state_dict(tensors, strict=False)
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
