"""Sums over a batch for BatchNorm, as one Triton kernel each; a compiler generates three to five.

Rows are the pixels of all images, columns the channels, in channels_last order. Each program sums a block of
rows; the last one to finish adds up the partial sums in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhassle.layers import channels_last

WIDTH = 32  # maximum number of channels of a tile
ENTRIES = 2048  # of a tile
TILES = 4  # loaded at once, to keep the memory busy
WARPS = 4
STAGES = 3  # of the software pipeline: the next laps are loaded while one is summed
PROGRAMS = 128  # maximum over all columns: about one per multiprocessor of a large GPU
ADDED = 4096  # entries of the partial sums that are loaded at once

# One per stream, whose kernels never overlap; zero between kernels.
counters: dict[tuple[torch.device, int], Tensor] = {}


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x, gradient, mean, variance, spread, gain, shift, left, result, counter,
    rows, channels, laps, count, momentum, eps,
    BACKWARD: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, ADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, programs, column = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    c = column * WIDTH + tl.arange(0, WIDTH)
    inside = c < channels
    if BACKWARD:
        centre = tl.load(mean + c, mask=inside, other=0.0)
        narrow = tl.load(spread + c, mask=inside, other=0.0)
    else:  # any pixel is near enough to the mean for squares to keep their precision
        centre = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        slope = narrow * tl.load(gain + c, mask=inside, other=0.0)
        level = tl.load(shift + c, mask=inside, other=0.0)
    plain = tl.zeros([ROWS, WIDTH], tl.float32)
    product = tl.zeros([ROWS, WIDTH], tl.float32)
    for lap in tl.range(0, laps, num_stages=STAGES):
        for tile in tl.static_range(TILES):
            r = ((block * laps + lap) * TILES + tile) * ROWS + tl.arange(0, ROWS)
            there = (r < rows)[:, None] & inside[None, :]
            at = r[:, None] * channels + c[None, :]
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            centred = tl.where(there, value - centre[None, :], 0.0)
            weight = centred
            if BACKWARD:
                weight = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
            if MASKED:
                weight = tl.where(centred * slope[None, :] + level[None, :] > 0, weight, 0.0)
            plain += weight
            product += weight * centred
    tl.store(left + 2 * block * channels + c, tl.sum(plain, 0), mask=inside)
    tl.store(left + (2 * block + 1) * channels + c, tl.sum(product, 0), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter + column, 1, sem="acq_rel") == programs - 1:
        firsts = tl.zeros([ADDED, WIDTH], tl.float32)
        seconds = tl.zeros([ADDED, WIDTH], tl.float32)
        for start in range(0, programs, ADDED):
            b = start + tl.arange(0, ADDED)
            done = (b < programs)[:, None] & inside[None, :]
            sums = left + 2 * b[:, None] * channels + c[None, :]
            firsts += tl.load(sums, mask=done, other=0.0, cache_modifier=".cg")
            seconds += tl.load(sums + channels, mask=done, other=0.0, cache_modifier=".cg")
        first = tl.sum(firsts, 0)
        second = tl.sum(seconds, 0)
        if BACKWARD:
            second *= narrow
        else:
            off = first / count
            now = tl.maximum(second / count - off * off, 0.0)
            first, second = centre + off, tl.rsqrt(now + eps)
            average = tl.load(mean + c, mask=inside, other=0.0)
            tl.store(mean + c, average + momentum * (first - average), mask=inside)
            average = tl.load(variance + c, mask=inside, other=0.0)
            unbiased = now * count / (count - 1)
            tl.store(variance + c, average + momentum * (unbiased - average), mask=inside)
        tl.store(result + c, first, mask=inside)
        tl.store(result + channels + c, second, mask=inside)
        tl.store(counter + column, 0)


def moments(x: Tensor, mean: Tensor, variance: Tensor, momentum: float, eps: float) -> Tensor:
    """Mean and 1/√(variance + ε) of each channel, (2, C); updates the running statistics."""
    return _launch(channels_last(x), mean=mean, variance=variance, momentum=momentum, eps=eps)


def gradient_sums(
    gradient: Tensor, x: Tensor, moments: Tensor, gain: Tensor | None, shift: Tensor | None
) -> Tensor:
    """Σg and Σg·x̂, (2, C); if gain and shift are given, g is zero where ReLU(gain·x̂ + shift) is zero."""
    mean, spread = moments
    return _launch(
        channels_last(x), mean=mean, spread=spread, gradient=channels_last(gradient), gain=gain, shift=shift
    )


def _launch(
    x: Tensor,
    mean: Tensor,
    variance: Tensor | None = None,
    spread: Tensor | None = None,
    gradient: Tensor | None = None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    momentum: float = 0.0,
    eps: float = 0.0,
) -> Tensor:
    channels = x.shape[1]
    rows = x.numel() // channels
    width = min(WIDTH, triton.next_power_of_2(channels))
    tall, columns = ENTRIES // width, triton.cdiv(channels, width)
    laps = triton.cdiv(rows * columns, TILES * tall * PROGRAMS)
    blocks = triton.cdiv(rows, laps * TILES * tall)
    left = torch.empty(2 * blocks * channels, device=x.device)
    result = torch.empty(2, channels, device=x.device)
    _sums[blocks, columns](
        x, gradient, mean, variance, spread, gain, shift, left, result, _counter(x.device, columns),
        rows, channels, laps, float(rows), momentum, eps,
        BACKWARD=gradient is not None, MASKED=gain is not None, ROWS=tall, WIDTH=width, TILES=TILES,
        ADDED=ADDED // width, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return result


def _counter(device: torch.device, columns: int) -> Tensor:
    """Counters of the current stream, which are zero before and after each kernel."""
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in counters or len(counters[key]) < columns:
        counters[key] = torch.zeros(max(64, columns), dtype=torch.int32, device=device)
    return counters[key]
