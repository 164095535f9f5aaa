"""Rewritten steps with fewer kernels compute the same."""

from contextlib import nullcontext

import pytest
import small
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fedhassle.architectures import ResNet8
from fedhassle.engine.gpu import rewriting
from fedhassle.engine.gpu.graphs import Compiler, in_fewer_kernels, traced
from fedhassle.engine.gpu.operators import convolve_relu, gradient_sums, moments
from fedhassle.nets import Net

OURS = ("fedhassle.moments", "fedhassle.gradient_sums", "fedhassle.convolve_relu")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """On a CPU too, where the operations are plain functions."""
    monkeypatch.setattr(rewriting, "DEVICES", {"cpu", "cuda"})


def maps(*shape, seed=0, dtype=torch.float32):
    """Feature maps with a mean far from zero."""
    made = 2 + torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(memory_format=torch.channels_last)


# The operations, against PyTorch's BatchNorm


def test_moments_are_those_of_batch_norm():
    x, mean, variance = maps(6, 5, 4, 3), torch.rand(5), torch.rand(5)
    ours, moved = mean.clone(), variance.clone()
    found = moments(x, ours, moved, 0.1, 1e-5)
    _, centre, narrow = torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)
    torch.testing.assert_close(found, torch.stack([centre, narrow]))
    torch.testing.assert_close((ours, moved), (mean, variance))


@pytest.mark.parametrize("gated", [False, True])
def test_gradient_sums_are_the_gradients_of_gain_and_shift(gated):
    x, g = maps(6, 5, 4, 3), maps(6, 5, 4, 3, seed=1)
    gain, shift = (v.clone().requires_grad_() for v in maps(2, 5, 1, 1, seed=2).flatten(1) - 2)
    z = F.batch_norm(x, None, None, gain, shift, True)
    (F.relu(z) if gated else z).backward(g)
    now = moments(x, torch.zeros(5), torch.ones(5), 0.1, 1e-5)
    found = gradient_sums(g, x, now, *((gain.detach(), shift.detach()) if gated else (None, None)))
    torch.testing.assert_close(found, torch.stack([shift.grad, gain.grad]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("added", [False, True])
def test_a_convolution_with_relu(added):
    x, kernel, bias = maps(2, 3, 6, 6), maps(4, 3, 3, 3, seed=1), torch.randn(4)
    other = maps(2, 4, 3, 3, seed=2) - 4 if added else None
    found = convolve_relu(x, kernel, bias, other, [2, 2], [1, 1])
    expected = F.conv2d(x, kernel, bias, 2, 1) + (0 if other is None else other)
    torch.testing.assert_close(found, expected.clamp(min=0))
    assert found.is_contiguous(memory_format=torch.channels_last)


# Whole steps


def step_of(net, low):
    """A step: the gradient and the statistics of one model in training, and the logits of a frozen one."""

    def step(weights, statistics, frozen, x, y):
        leaf = weights.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if low else nullcontext():
            loss = F.cross_entropy(net(leaf, statistics, x, training=True), y)
            asked = net.logits(frozen, x).detach()
        return torch.autograd.grad(loss, leaf)[0], asked

    return step


def inputs_of(net):
    """Tensors for a step; the frozen model's statistics are no longer zeros and ones."""
    for training in (True, False):
        net.own_copy(training)  # a copy cannot be made while a step is traced
    (weights, statistics), frozen = net.parts(net.initial(0)), net.initial(1)
    frozen[net.n_weights :] += torch.rand(net.n_statistics, generator=torch.Generator().manual_seed(2))
    return weights, statistics.clone(), frozen, maps(8, *net.shape), torch.arange(8) % net.classes


def operations(graph):
    return [str(node.target).rpartition(".")[0] for node in graph.graph.nodes if node.op == "call_function"]


class Odd(nn.Module):
    """BatchNorm that matches no rule: without gains, after a bias or groups, twice in a row, on vectors."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 4, 3)
        self.norm1 = nn.BatchNorm2d(4, affine=False)
        self.conv2 = nn.Conv2d(4, 4, 3, groups=2, bias=False)
        self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.output, self.norm4 = nn.Linear(4, classes), nn.BatchNorm1d(classes)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(1.0 + self.norm3(self.norm2(self.conv2(x))))
        return self.norm4(self.output(F.relu(x + x).mean((2, 3))))


@pytest.mark.parametrize("build", [ResNet8, small.ConvNet, Odd])
def test_a_rewritten_step_is_the_same_step(build):
    net = Net(build, (3, 12, 12), 4, 0.25 if build is ResNet8 else 1.0)
    step, given, plain = step_of(net, low=False), inputs_of(net), inputs_of(net)
    graph = in_fewer_kernels(traced(step, given), given)
    assert "fedhassle.moments" in operations(graph)
    for found, expected in zip(graph(*given), step(*plain), strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()
    torch.testing.assert_close(given[1], plain[1])


def test_a_residual_network_is_rewritten_as_far_as_it_goes():
    """All nine BatchNorms in training; frozen, those with a convolution before and a ReLU after them.

    The shortcuts' two have no ReLU, and in bfloat16 the stem is a matrix product.
    """
    net = Net(ResNet8, (3, 12, 12), 4, 0.25)
    given = inputs_of(net)
    made = operations(in_fewer_kernels(traced(step_of(net, low=True), given), given))
    assert [made.count(name) for name in OURS] == [9, 9, 6]
    assert "aten._native_batch_norm_legit" not in made and "aten.native_batch_norm_backward" not in made


@pytest.mark.parametrize(("shape", "fits"), [((2, 4, 6, 6), True), ((1, 4, 1, 1), False), ((4, 1, 1), False)])
def test_a_frozen_norm_is_folded_only_with_an_addition_of_the_same_shape(shape, fits):
    """A smaller tensor would have to be broadcast, which cuDNN does not do."""

    def step(x, kernel, moments, other):
        z = F.batch_norm(F.conv2d(x, kernel, padding=1), moments[0], moments[1], moments[2], moments[3])
        return F.relu(z + other)

    low = {"dtype": torch.bfloat16}
    other = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    given = maps(2, 3, 6, 6, **low), maps(4, 3, 3, 3, seed=1, **low), torch.rand(4, 4) + 0.5, other
    graph = in_fewer_kernels(traced(step, given), given)
    assert ("fedhassle.convolve_relu" in operations(graph)) == fits
    torch.testing.assert_close(graph(*given).float(), step(*given).float(), rtol=0.05, atol=0.5)


def test_in_bfloat16_it_is_as_accurate_as_the_original():
    net = Net(ResNet8, (3, 12, 12), 4, 0.25)
    given, low = inputs_of(net), step_of(net, low=True)
    exact = step_of(net, low=False)(*[v.clone() for v in given])
    ours = in_fewer_kernels(traced(low, given), given)(*[v.clone() for v in given])
    plain = low(*[v.clone() for v in given])
    for truth, found, expected in zip(exact, ours, plain, strict=True):
        assert (found - truth).norm() < 1.5 * (expected - truth).norm()


def test_the_compiler_rewrites_and_keeps_statistics_in_place(monkeypatch):
    """Compiled as one graph, which updates the given statistics."""
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda graph, **options: compile_(graph, backend=counter, **options)
    )
    net = Net(ResNet8, (3, 12, 12), 4, 0.25)
    step, given, plain = step_of(net, low=False), inputs_of(net), inputs_of(net)
    place = given[1].data_ptr()
    found, expected = Compiler()(step, *given)(*given), step(*plain)
    assert counter.frame_count == 1 and given[1].data_ptr() == place
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(given[1], plain[1])


def test_on_other_devices_nothing_is_rewritten(monkeypatch):
    monkeypatch.setattr(rewriting, "DEVICES", {"cuda"})
    net = Net(ResNet8, (3, 12, 12), 4, 0.25)
    given = inputs_of(net)
    graph = traced(step_of(net, low=False), given)
    assert in_fewer_kernels(graph, given) is graph


# The kernels, on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "shape", [(128, 64, 32, 32), (128, 256, 8, 8), (128, 16, 32, 32), (3, 20, 5, 7), (1, 1, 2, 2)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compute_what_the_functions_do(shape, dtype):
    x, g = maps(*shape, dtype=dtype), maps(*shape, seed=1, dtype=dtype)
    mean, variance, gain, shift = torch.rand(4, shape[1])
    ours = [v.to("cuda") for v in (x, g, mean, variance, gain, shift)]
    for _ in range(2):  # the counters are zero again
        now, expected = moments(ours[0], *ours[2:4], 0.1, 1e-5), moments(x, mean, variance, 0.1, 1e-5)
        torch.testing.assert_close(now.cpu(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.stack(ours[2:4]).cpu(), torch.stack([mean, variance]))
        for gate in ((None, None), (4, 5)):
            given = [None if i is None else ours[i] for i in gate]
            found = gradient_sums(ours[1], ours[0], now, *given)
            same = gradient_sums(g, x, expected, *[None if v is None else v.cpu() for v in given])
            torch.testing.assert_close(found.cpu(), same, rtol=2e-4, atol=2e-3 * float(same.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gradient_may_have_any_memory_layout():
    """The gradient of a mean over pixels is an expanded tensor."""
    x, spread_out = maps(8, 16, 4, 4), torch.rand(8, 16, 1, 1).expand(8, 16, 4, 4)
    now = moments(x, torch.zeros(16), torch.ones(16), 0.1, 1e-5)
    expected = gradient_sums(spread_out, x, now, None, None)
    for gradient in (spread_out, spread_out.contiguous()):
        found = gradient_sums(gradient.to("cuda"), x.to("cuda"), now.to("cuda"), None, None)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("added", [False, True])
def test_cudnns_convolution_with_relu(added):
    low = {"dtype": torch.bfloat16}
    x, kernel, bias = (
        maps(8, 16, 8, 8, **low),
        maps(32, 16, 3, 3, seed=1, **low) - 2,
        torch.randn(32).bfloat16(),
    )
    other = maps(8, 32, 4, 4, seed=2, **low) if added else None
    ours = [None if v is None else v.to("cuda") for v in (x, kernel, bias, other)]
    found = convolve_relu(*ours, [2, 2], [1, 1])
    expected = convolve_relu(x, kernel, bias, other, [2, 2], [1, 1])
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=0.1)
    assert found.is_contiguous(memory_format=torch.channels_last)
