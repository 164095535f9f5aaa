"""Convolutions of small networks as matrix products.

A batch of convolutions for several jobs, each with a kernel of its own, is a grouped convolution, for which
libraries have slow kernels; a batch of matrix products is one fast kernel. Those for a single job are slow,
too, if an image has few channels: most of a tile of a matrix unit is empty.

A product computes a tile of a few pixels of a row at once, from the rows of the image under them: a *band*.
Its matrix has the kernel once for each pixel, moved by one place. So bands of neighbouring tiles share few
pixels, and less is copied than with a patch for each pixel, for some multiplications by zero.
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
LARGEST = 2**17  # entries of a matrix for a tile of several pixels
ROWS = 1024  # of bands in a product for the gradient of a kernel, about; several products are summed


class AsProducts(Interpreter):
    """Runs the operations of a graph, with convolutions that move by single pixels as matrix products."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._bands: dict[Any, Tensor] = {}  # by the images and the shape of the kernel

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
        bands = self.bands(node.args[0], x, kernel, how[1])  # (N, H, tiles, h·X·C)
        tile = tile_of(kernel, x, how[1])
        z = torch.mm(bands.flatten(0, 2), even(even(banded(kernel, tile), 0), 1))
        z = z[:, : tile * len(kernel)].reshape(*bands.shape[:2], -1, len(kernel)).permute(0, 3, 1, 2)
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
        tile = tile_of(kernel, x, padding)
        rows = gradient.permute(0, 2, 3, 1)
        towards = even(rows.reshape(*rows.shape[:2], -1, tile * len(kernel)), 3)  # (N, H, tiles, tile·planes)
        made: list[Tensor | None] = [None, None, None]
        if needed[0]:
            matrix = even(even(banded(kernel, tile), 0), 1)
            of_bands = torch.mm(towards.flatten(0, 2), matrix.T).reshape(*towards.shape[:3], -1)
            made[0] = with_channels(overlapped(of_bands, kernel, tile, x.shape[2:], padding), empty)
        if needed[1]:
            bands = self.bands(node.args[1], x, kernel, padding)
            made[1] = with_channels(unbanded(product_over_rows(bands, towards), kernel, tile), empty)
        if needed[2]:
            made[2] = gradient.sum((0, 2, 3))
        return tuple(made)

    def view(self, node: Node, x: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor in another shape, copied if need be: products have strides of their own."""
        return x.reshape(shape)

    def bands(self, node: Any, x: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
        """What is under each tile, (N, H, tiles, h·X·C), with zeros up to a multiple of eight."""
        key = node, kernel.shape, tuple(padding)
        if key not in self._bands:
            (top, left), (_, used, down, across) = padding, kernel.shape
            tile, framed = tile_of(kernel, x, padding), F.pad(x[:, :used], (left, left, top, top))
            under = framed.unfold(2, down, 1).unfold(3, tile + across - 1, tile)
            self._bands[key] = even(under.permute(0, 2, 3, 4, 5, 1).flatten(3), 3)
        return self._bands[key]


CONVOLUTIONS: dict[Any, Any] = {
    aten.convolution.default: AsProducts.convolution,
    aten.convolution_backward.default: AsProducts.gradients,
}
RULES = CONVOLUTIONS | {aten.view.default: AsProducts.view}


def convolves(graph: GraphModule) -> bool:
    """True if a graph has convolutions."""
    return any(node.target in CONVOLUTIONS for node in graph.graph.nodes)


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


def even(tensor: Tensor, axis: int) -> Tensor:
    """A tensor with zeros added to an axis, up to a multiple of eight."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - axis) + (0, -tensor.shape[axis] % EIGHT))


def tile_of(kernel: Tensor, x: Tensor, padding: Sequence[int]) -> int:
    """Number of pixels of a tile: as many as divide a row, with a matrix that is not too large."""
    planes, used, down, across = kernel.shape
    columns = x.shape[3] + 2 * padding[1] - across + 1

    def entries(tile: int) -> int:
        return down * (tile + across - 1) * used * tile * planes

    possible = [tile for tile in range(2, columns + 1) if columns % tile == 0 and entries(tile) <= LARGEST]
    return max(possible, default=1)


def banded(kernel: Tensor, tile: int) -> Tensor:
    """The matrix of a kernel, (h·X·C, tile·planes), where X = tile + w − 1: the kernel in `tile` places."""
    across = kernel.shape[3]
    places = F.pad(kernel, (tile - 1, tile - 1)).unfold(3, tile + across - 1, 1).flip(3)
    return places.permute(2, 4, 1, 3, 0).flatten(3).flatten(0, 2)


def unbanded(matrix: Tensor, kernel: Tensor, tile: int) -> Tensor:
    """The kernel (planes, C, h, w) that has the sum of a matrix over all its places."""
    planes, used, down, across = kernel.shape
    width = tile + across - 1
    own = matrix[: down * width * used, : tile * planes].reshape(down, width, used, tile, planes)
    # Entry (s, s + j) of tile × X is entry (s, j) of tile × (X + 1), if both are the same numbers in a row.
    flat = F.pad(own.permute(4, 2, 0, 3, 1).flatten(3), (0, tile))
    skewed = flat.reshape(planes, used, down, tile, width + 1)
    return skewed[..., :across].sum(3).to(kernel.dtype)


def product_over_rows(bands: Tensor, towards: Tensor) -> Tensor:
    """Σ bandᵀ·gradient over all tiles, by products that are added in full precision."""
    images, of_image = len(bands), bands.shape[1] * bands.shape[2]
    together = max(n for n in range(1, images + 1) if images % n == 0 and (n == 1 or n * of_image <= ROWS))
    left, right = (tensor.reshape(images // together, together * of_image, -1) for tensor in (bands, towards))
    return (left.transpose(1, 2) @ right).sum(0, dtype=torch.float32)


def overlapped(
    of_bands: Tensor, kernel: Tensor, tile: int, size: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Sums bands (N, H, tiles, h·X·C) to images (N, C, *size), where they overlap."""
    (height, width), (top, left), (_, used, down, across) = size, padding, kernel.shape
    images, tall, tiles, _ = of_bands.shape
    wide, parts = tiles * tile, -(-(tile + across - 1) // tile)
    own = of_bands[..., : down * (tile + across - 1) * used].reshape(images, tall, tiles, down, -1, used)
    own = F.pad(own, (0, 0, 0, parts * tile - own.shape[4]))

    def at(i: int, part: int) -> Tensor:
        """One row of all bands, and of these rows as many columns as a tile has, at their place."""
        columns = own[:, :, :, i, part * tile : (part + 1) * tile].reshape(images, tall, wide, used)
        start = part * tile - left
        return F.pad(columns, (0, 0, start, width - wide - start, i - top, height - tall - i + top))

    total = at(0, 0)
    for place in range(1, down * parts):
        total = total + at(*divmod(place, parts))
    return total.permute(0, 3, 1, 2)
