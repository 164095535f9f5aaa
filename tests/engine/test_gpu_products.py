"""Convolutions as matrix products compute the same, alone and for several jobs."""

import pytest
import torch
import torch.nn.functional as F

from fedhassle.engine.gpu import products
from fedhassle.engine.gpu.graphs import traced
from fedhassle.engine.gpu.products import AsProducts
from fedhassle.layers import Stem

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(convolve):
    """A function of images, kernel, bias and the gradient above, which returns the features and gradients."""

    def function(x, kernel, bias, towards):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, kernel, bias)]
        with torch.enable_grad():
            z = convolve(*leaves)
        return [z.detach(), *torch.autograd.grad(z, leaves, towards)]

    return function


def convolution(**how):
    return with_gradients(lambda x, kernel, bias: F.conv2d(x, kernel, bias, **how))


class Seen(AsProducts):
    """Notes which convolutions run as such."""

    def call_function(self, target, args, kwargs):
        assert target not in CONVOLUTIONS
        return super().call_function(target, args, kwargs)


SIZES = {  # of images and kernels; all but the first have rows of four or eight pixels
    "odd": ((3, 2, 9, 8), (6, 2, 3, 4), {"padding": (2, 1)}),
    "wide": ((3, 2, 6, 9), (6, 2, 3, 4), {"padding": (2, 1)}),
    "single": ((2, 8, 4, 4), (8, 8, 1, 1), {}),
    "one channel": ((2, 1, 8, 8), (3, 1, 5, 5), {"padding": 2}),
}


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SIZES)
def test_features_and_gradients_are_those_of_a_convolution(name, tile, monkeypatch):
    """Also in tiles of fewer pixels than a row has, and with a product for each image."""
    shape, kernel, how = SIZES[name]
    entries = kernel[2] * (tile + kernel[3] - 1) * kernel[1] * tile * kernel[0]
    monkeypatch.setattr(products, "LARGEST", entries)
    monkeypatch.setattr(products, "ROWS", 4 * tile)
    function = convolution(**how)
    tensors = [numbers(*shape), numbers(*kernel, seed=1), numbers(kernel[0], seed=2)]
    tensors.append(numbers(*F.conv2d(*tensors, **how).shape, seed=3))
    found = Seen(traced(function, tensors)).run(*tensors)
    torch.testing.assert_close(found, function(*tensors), rtol=1e-4, atol=1e-4)


def test_several_at_once_are_those_of_each():
    function = convolution(padding=1)
    tensors = [numbers(4, 2, 3, 6, 6), numbers(4, 5, 3, 3, 3), numbers(4, 5), numbers(4, 2, 5, 6, 6)]
    graph = traced(function, [tensor[0] for tensor in tensors])
    found = torch.vmap(Seen(graph).run)(*tensors)
    for i, made in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(list(made), function(*[t[i] for t in tensors]), rtol=1e-4, atol=1e-4)


OTHERS = [{"stride": 2}, {"dilation": 2}, {"groups": 2}]


@pytest.mark.parametrize("how", OTHERS, ids=["stride", "dilation", "groups"])
def test_other_convolutions_stay_as_they_are(how):
    function = convolution(**how)
    tensors = [numbers(2, 4, 7, 7), numbers(4, 4 // how.get("groups", 1), 3, 3), numbers(4)]
    tensors.append(numbers(*F.conv2d(*tensors, **how).shape, seed=3))
    graph = traced(function, tensors)
    assert {node.target for node in graph.graph.nodes} >= CONVOLUTIONS
    torch.testing.assert_close(AsProducts(graph).run(*tensors), function(*tensors))


def test_channels_of_zeros_are_left_out_of_the_bands():
    """A first layer in bfloat16 has its one channel padded to eight."""
    stem = Stem(1, 6, 5, padding=2)

    def features(x, kernel, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(stem, {"weight": kernel, "bias": bias}, (x,))

    function = with_gradients(features)
    tensors = [numbers(3, 1, 8, 8), *(tensor.detach().bfloat16() for tensor in (stem.weight, stem.bias))]
    tensors.append(numbers(3, 6, 8, 8).bfloat16())
    graph = traced(function, tensors)
    rewritten = AsProducts(graph)
    found = rewritten.run(*tensors)
    torch.testing.assert_close(found, function(*tensors), rtol=0.05, atol=0.1)
    (bands,) = rewritten._bands.values()
    assert bands.shape == (
        3,
        8,
        1,
        64,
    )  # a tile is a row of eight pixels: five rows of twelve, and four zeros


def test_a_convolution_without_bias():
    def function(x, kernel, towards):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, kernel)]
        with torch.enable_grad():
            z = F.conv2d(*leaves)
        return [z.detach(), *torch.autograd.grad(z, leaves, towards)]

    tensors = [numbers(2, 2, 6, 6), numbers(4, 2, 3, 3), numbers(2, 4, 4, 4)]
    found = Seen(traced(function, tensors)).run(*tensors)
    torch.testing.assert_close(found, function(*tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("images", "kernel", "padding", "tile"),
    [
        ((1, 28, 28), (6, 1, 5, 5), 2, 28),  # LeNet's layers: whole rows
        ((6, 14, 14), (16, 6, 5, 5), 0, 10),
        ((32, 30, 30), (64, 32, 3, 3), 0, 2),  # many channels: a matrix for whole rows would be too large
        ((512, 8, 8), (512, 512, 3, 3), 1, 1),
    ],
)
def test_a_tile_is_as_many_pixels_of_a_row_as_its_matrix_allows(images, kernel, padding, tile):
    assert products.tile_of(torch.empty(kernel), torch.empty(1, *images), (padding, padding)) == tile
