"""Convolutions as matrix products, for steps that several jobs share.

A batch of convolutions, each with a kernel of its own, is a grouped convolution, for which libraries have
slow kernels. A batch of matrix products is one fast kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

aten: Any = torch.ops.aten
EIGHT = 8  # matrix units want rows and columns of a multiple of this many numbers


class AsProducts(Interpreter):
    """Runs the operations of a graph, with convolutions that move by single pixels as matrix products."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._patches: dict[Any, Tensor] = {}  # by the images and the shape of the kernel

    def run_node(self, node: Node) -> Any:
        """The value of a node."""
        rule = RULES.get(node.target) if node.op == "call_function" else None
        made = None if rule is None else rule(self, node, *self.fetch_args_kwargs_from_env(node)[0])
        return super().run_node(node) if made is None else made

    def convolution(
        self, node: Node, x: Tensor, kernel: Tensor, bias: Tensor | None, *how: Any
    ) -> Tensor | None:
        """The convolution of images (N, C, H, W) with a kernel (planes, C, h, w)."""
        if not moves_by_pixels(how):
            return None
        kernel = kernel[:, : channels(node.args[1], kernel)]
        z = self.patches(node.args[0], x, kernel, how[1]) @ even(even(rows(kernel), 0), 1).T
        z = z[..., : len(kernel)].permute(0, 3, 1, 2)
        return z if bias is None else z + bias[:, None, None]

    def gradients(
        self, node: Node, gradient: Tensor, x: Tensor, kernel: Tensor, _: Any, *given: Any
    ) -> tuple[Tensor | None, ...] | None:
        """Its gradients for images, kernel and bias, as far as they are needed."""
        *how, needed = given
        if not moves_by_pixels(how):
            return None
        padding, empty = how[1], kernel.shape[1] - channels(node.args[2], kernel)
        kernel = kernel[:, : kernel.shape[1] - empty]
        towards = even(gradient.permute(0, 2, 3, 1), 3)  # (N, H, W, planes)
        made: list[Tensor | None] = [None, None, None]
        if needed[0]:
            under = (towards @ even(rows(kernel), 0)).view(*towards.shape[:3], *of_a_row(kernel))
            made[0] = with_channels(overlapped(under, x.shape[2:], padding), empty)
        if needed[1]:
            under = self.patches(node.args[1], x, kernel, padding)
            by_image = towards.flatten(1, 2).transpose(1, 2) @ under.flatten(1, 2)
            own = by_image.sum(0)[: len(kernel), : kernel[0].numel()].reshape(-1, *of_a_row(kernel))
            made[1] = with_channels(own.permute(0, 3, 1, 2), empty)
        if needed[2]:
            made[2] = gradient.sum((0, 2, 3))
        return tuple(made)

    def patches(self, node: Any, x: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
        """What is under the kernel at each place, (N, H, W, h·w·C), with zeros up to a multiple of eight."""
        key = node, kernel.shape[1:], tuple(padding)
        if key not in self._patches:
            (top, left), (_, used, down, across) = padding, kernel.shape
            framed = F.pad(x[:, :used], (left, left, top, top))
            under = framed.unfold(2, down, 1).unfold(3, across, 1).permute(0, 2, 3, 4, 5, 1)
            self._patches[key] = even(under.flatten(3), 3)
        return self._patches[key]


RULES: dict[Any, Any] = {
    aten.convolution.default: AsProducts.convolution,
    aten.convolution_backward.default: AsProducts.gradients,
}


def moves_by_pixels(how: Sequence[Any]) -> bool:
    """True for a convolution with neither stride nor dilation nor groups."""
    stride, _, dilation, transposed, _, groups = how
    return not transposed and groups == 1 and {*stride, *dilation} == {1}


def channels(node: Any, kernel: Tensor) -> int:
    """Number of channels of a kernel, without those that were added as zeros."""
    added = node.target is aten.constant_pad_nd.default and node.args[1][:-1] == [0] * 5
    return kernel.shape[1] - (node.args[1][-1] if added else 0)


def with_channels(tensor: Tensor, more: int) -> Tensor:
    """A tensor with more channels, which are zero."""
    return F.pad(tensor, (0, 0, 0, 0, 0, more)) if more else tensor


def rows(kernel: Tensor) -> Tensor:
    """A kernel as a matrix with a row for each plane, in the order of the patches."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


def of_a_row(kernel: Tensor) -> tuple[int, ...]:
    """The shape of a row of this matrix: (h, w, C)."""
    return *kernel.shape[2:], kernel.shape[1]


def overlapped(under: Tensor, size: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Sums what is under the kernel at all places, (N, H, W, h, w, C), to images (N, C, *size)."""
    (height, width), (top, left) = size, padding
    _, tall, wide, down, across, _ = under.shape

    def at(i: int, j: int) -> Tensor:
        below, right = height - tall - i + top, width - wide - j + left
        return F.pad(under[..., i, j, :], (0, 0, j - left, right, i - top, below))

    total = at(0, 0)
    for place in range(1, down * across):
        total = total + at(*divmod(place, across))
    return total.permute(0, 3, 1, 2)


def even(tensor: Tensor, axis: int) -> Tensor:
    """A tensor with zeros added to an axis, up to a multiple of eight."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - axis) + (0, -tensor.shape[axis] % EIGHT))
