"""Dropout as data: masks are a hash of a step's seed, so that every device and every replay sees the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedhassle.errors import require

# The mixing function of splitmix32: xor with a shift, then multiply, twice.
MIXING = ((16, 0x21F0AAAD), (15, 0x735A2D97))
LAST_SHIFT = 15
GOLDEN = 0x9E3779B9  # 2³² divided by the golden ratio: sets the draws of a step apart


def scrambled(bits: Tensor) -> Tensor:
    """Returns 32 random bits for each int32, which look independent for different ones; products wrap."""
    for shift, factor in MIXING:
        bits = (bits ^ shifted(bits, shift)) * factor
    return bits ^ shifted(bits, LAST_SHIFT)


def shifted(bits: Tensor, shift: int) -> Tensor:
    """Returns the bits shifted to the right, as if they had no sign."""
    return torch.bitwise_and(bits >> shift, 2 ** (32 - shift) - 1)


def as_int32(number: int) -> int:
    """Returns the lowest 32 bits of a number, as a signed number."""
    return (number + 2**31) % 2**32 - 2**31


class SeededDropout(TorchFunctionMode):
    """Inside the block, dropout draws its masks from a seed instead of PyTorch's global random state.

    The seed is an int32 tensor without axes. A mask depends on it, on the number of draws before it in the
    block, and on the place of each entry: on neither device nor memory format.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed = seed
        self.draws = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of PyTorch, or its seeded counterpart."""
        seeded = SEEDED.get(function)
        return function(*args, **kwargs or {}) if seeded is None else seeded(self, *args, **kwargs or {})

    def chosen(self, shape: tuple[int, ...], share: float) -> Tensor:
        """Returns a mask of this shape, true with a probability of `share`, which is neither 0 nor 1."""
        place = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=self.seed.device)
        key = self.seed ^ as_int32(self.draws * GOLDEN)
        self.draws += 1
        return (scrambled(place ^ key) < as_int32(round(share * 2**32) + 2**31)).view(shape)

    def dropped(self, x: Tensor, shape: tuple[int, ...], p: float, training: bool, inplace: bool) -> Tensor:
        """Returns x with entries set to 0 with probability p, and the others divided by 1 − p."""
        require(0 <= p <= 1, f"the probability of dropout must be from 0 to 1, got {p}")
        if not training or p == 0:
            return x
        if p == 1:
            return x.mul_(0) if inplace else x * 0
        mask = self.chosen(shape, p)
        return x.masked_fill_(mask, 0).div_(1 - p) if inplace else x.masked_fill(mask, 0) / (1 - p)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops single entries."""
        return self.dropped(x, tuple(x.shape), p, training, inplace)

    def dropout1d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops channels of (B, C, L) or (C, L)."""
        return self.dropped(x, per_channel(x, 1 if x.dim() == 2 else 2), p, training, inplace)

    def dropout2d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops channels of (B, C, …)."""
        return self.dropped(x, per_channel(x, 2), p, training, inplace)

    def dropout3d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops channels of (B, C, D, H, W) or (C, D, H, W)."""
        return self.dropped(x, per_channel(x, 1 if x.dim() == 4 else 2), p, training, inplace)

    def bernoulli_(
        self, x: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Fills x with ones with probability p, and with zeros: stochastic depth drops blocks by it."""
        if generator is not None or isinstance(p, Tensor):
            return x.bernoulli_(p, generator=generator)  # as PyTorch does
        return x.fill_(p) if p in (0, 1) else x.copy_(self.chosen(tuple(x.shape), p))


def per_channel(x: Tensor, axes: int) -> tuple[int, ...]:
    """Returns the shape of one value for each channel: the first axes of x, then ones."""
    return (*x.shape[:axes], *[1] * (x.dim() - axes))


SEEDED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: SeededDropout.dropout,
    F.dropout1d: SeededDropout.dropout1d,
    F.dropout2d: SeededDropout.dropout2d,
    F.dropout3d: SeededDropout.dropout3d,
    torch.Tensor.bernoulli_: SeededDropout.bernoulli_,
}


def dropout_from(seeds: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Inside the block, dropout draws from the seed of a step, if there is one."""
    return SeededDropout(*seeds) if seeds else nullcontext()
