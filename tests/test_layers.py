"""Layers that are faster than PyTorch's, compared with PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhassle.layers import Inner, RowPairs, Shortcut, Stem, max_pool


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("height", "width"), [(6, 6), (7, 7), (7, 4), (2, 5), (3, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pool_is_pytorchs(height, width, layout):
    x = drawn(3, 2, height, width).contiguous(memory_format=layout)
    expected = F.max_pool2d(x, 2)
    assert torch.equal(max_pool(x), expected)
    leaf = x.clone().requires_grad_()
    assert torch.equal(max_pool(leaf), expected)
    (gradient,) = torch.autograd.grad(max_pool(leaf).sum(), leaf)
    assert gradient.sum() == expected.numel()  # each maximum passes one


@pytest.mark.parametrize(("channels", "planes", "side"), [(1, 6, 28), (3, 6, 13), (1, 2, 12), (2, 5, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pooled_stem_is_a_convolution_and_then_pooling(channels, planes, side, bias):
    """In training on a CPU it is computed in another way; odd sizes lose their last row and column."""
    stem = Stem(channels, planes, 5, padding=2, bias=bias)
    x = drawn(4, side, side + 1, channels).permute(0, 3, 1, 2)
    weights = list(stem.parameters())
    expected = F.max_pool2d(F.conv2d(x, stem.weight, stem.bias, padding=2), 2)
    found, towards = stem.pooled(x), drawn(*expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * towards).sum(), weights)
    wanted = torch.autograd.grad((expected * towards).sum(), weights)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(stem.pooled(x), max_pool(stem(x)))


def test_of_equal_pixels_the_first_of_a_square_passes_the_gradient():
    stem = Stem(1, 2, 1, bias=False)
    x = torch.ones(1, 1, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(stem.pooled(x).sum(), x)
    assert gradient.count_nonzero() == gradient[0, 0, 0, 0].count_nonzero() == 1


@pytest.mark.parametrize(("height", "width"), [(14, 14), (6, 9), (7, 8)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_inner_convolution_is_pytorchs(height, width, layout):
    """An odd height takes PyTorch's way."""
    inner, plain = Inner(6, 16, 5), nn.Conv2d(6, 16, 5)
    plain.load_state_dict(inner.state_dict())
    x = drawn(3, 6, height, width).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = (
        (z, *torch.autograd.grad(z.square().sum(), [x, *layer.parameters()]))
        for layer in (inner, plain)
        for z in [layer(x)]
    )
    assert isinstance(inner(x).grad_fn, RowPairs._backward_cls) is (height % 2 == 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(inner(x), plain(x))


@pytest.mark.parametrize(("height", "width"), [(6, 6), (7, 5), (1, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_shortcut_is_a_convolution_with_a_stride(height, width, stride):
    """With the same weights, values and gradients are equal."""
    shortcut, plain = Shortcut(3, 4, stride), nn.Conv2d(3, 4, 1, stride, bias=False)
    plain.load_state_dict(shortcut.state_dict())
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours, theirs = (
        (z, *torch.autograd.grad(z.square().sum(), [x, layer.weight]))
        for layer in (shortcut, plain)
        for z in [layer(x)]
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)
