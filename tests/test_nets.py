"""Networks as functions of one flat vector."""

import math
import threading
import time

import pytest
import small
import torch
import torch.nn.functional as F
from torch import nn

from fedhassle import nets
from fedhassle.architectures import LeNet, PreactivatedBlock, ResNet8, ResNet18, WideResNet28
from fedhassle.capture import CaptureLock
from fedhassle.engine.client import train
from fedhassle.engine.cores import side_by_side
from fedhassle.errors import UserError
from fedhassle.layers import Shortcut
from fedhassle.method import Model
from fedhassle.methods import METHODS
from fedhassle.nets import NETS, Net, check_image, images_a_pass

BUILDS = pytest.mark.parametrize(
    ("build", "channels"),
    [(LeNet, 1), (ResNet8, 3), (WideResNet28, 3), (small.ConvNet, 3), (small.NoisyNet, 1)],
    ids=["lenet", "resnet8", "wrn-28-2", "own", "own with an integer"],
)


def made(build, channels, width=0.25):
    return small.net(build, channels, width=width)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module_of(net, seed=5):
    """A module of the network's shape with random tensors, including statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = net.build(net.shape, net.classes, net.width)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.data.copy_(torch.rand_like(tensor) * 0.5 + 0.1)
    return module


# Sizes


@pytest.mark.parametrize(
    ("build", "shape", "classes", "width", "count"),
    [
        (ResNet8, (3, 32, 32), 10, 1, 1_227_594),
        (ResNet8, (3, 32, 32), 100, 1, 1_250_724),
        (ResNet8, (3, 32, 32), 10, 1 / 4, 78_042),
        (LeNet, (1, 28, 28), 10, 1, 61_706),
    ],
)
def test_the_number_of_parameters_is_the_papers(build, shape, classes, width, count):
    assert Net(build, shape, classes, width).n_parameters == count


def test_resnet8_by_hand():
    """Kernels and BatchNorm of 64, 64, 64 | 128, 128, 128 (shortcut) | 256, 256, 256 (shortcut) channels.

    Kernels: 27·64 + 9·64·64·2 + (9·64·128 + 9·128·128 + 64·128) + (9·128·256 + 9·256·256 + 128·256),
    the linear layer 256·10 + 10, BatchNorm two weights and two statistics for each of 1,344 channels.
    """
    first = 27 * 64 + 2 * 9 * 64 * 64
    second = 9 * 64 * 128 + 9 * 128 * 128 + 64 * 128
    third = 9 * 128 * 256 + 9 * 256 * 256 + 128 * 256
    channels = 3 * 64 + 3 * 128 + 3 * 256
    net = Net(ResNet8, (3, 32, 32), 10)
    assert net.n_parameters == first + second + third + 2570 + 2 * channels
    assert net.n_kernels == first + second + third + 2576  # ten biases take the room of sixteen
    assert net.n_weights == net.n_kernels + 2 * channels
    assert net.n_statistics == 2 * channels
    assert net.initial(0).shape == (net.n_weights + net.n_statistics,)


def test_resnet18_and_wrn_28_2_are_as_published():
    """ResNet-18 for CIFAR-10 has 11,173,962 weights (11.2 M), WRN-28-2 has 1,467,610 (1.5 M in its paper)."""
    for name, full, quarter in (("resnet18", 11_173_962, 701_466), ("wrn-28-2", 1_467_610, 92_734)):
        net = Net(NETS[name], (3, 32, 32), 10)
        assert (net.n_parameters, net.scaled(1 / 4).n_parameters) == (full, quarter)
        assert net.clip == 5.0
    layers = [m for m in ResNet18((3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in layers if not isinstance(m, Shortcut)]) == 18
    layers = [m for m in WideResNet28((3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in layers if not isinstance(m, Shortcut)]) == 26  # its paper counts two shortcuts too


@pytest.mark.parametrize(("build", "sides"), [(ResNet18, [32, 16, 8, 4]), (WideResNet28, [32, 16, 8])])
def test_stages_halve_the_image(build, sides):
    network, seen = build((3, 32, 32), 10, 1 / 16).eval(), []
    for block in network.blocks:
        block.register_forward_hook(lambda module, given, made: seen.append(made.shape[-1]))
    network(torch.zeros(1, 3, 32, 32))
    assert seen == [side for side in sides for _ in range(len(network.blocks) // len(sides))]


def test_a_preactivated_block_adds_what_it_was_given():
    """With zero kernels it is its shortcut: x itself, or 1×1 of ReLU(BatchNorm(x)) where shapes change."""
    x = drawn(2, 4, 6, 6)
    same, other = PreactivatedBlock(4, 4, 1).eval(), PreactivatedBlock(4, 8, 2).eval()
    for block in (same, other):
        nn.init.zeros_(block.conv2.weight)
    assert torch.equal(same(x), x)
    active = F.relu(x / math.sqrt(1 + 1e-5))
    expected = F.conv2d(active, other.shortcut.weight, stride=2)
    torch.testing.assert_close(other(x), expected)


def test_the_width_of_lenet_rounds_up():
    """Of 6/16/120/84 units: a quarter is 1.5/4/30/21, a sixteenth 0.375/1/7.5/5.25."""
    for width, units in ((1 / 4, [2, 4, 30, 21]), (1 / 16, [1, 1, 8, 6])):
        lenet = LeNet((1, 28, 28), 10, width)
        found = [lenet.conv1.out_channels, lenet.conv2.out_channels]
        found += [lenet.hidden1.out_features, lenet.hidden2.out_features]
        assert found == units
        assert lenet.output.out_features == 10


def test_scaled_is_relative_to_the_full_network():
    """The width is a share of the dual's channels; scaling twice does not multiply."""
    full = Net(ResNet8, (3, 32, 32), 10)
    assert full.scaled(1 / 4).n_parameters == 78_042
    assert full.scaled(1 / 2).scaled(1 / 4).n_parameters == 78_042


def test_resnet8_starts_with_the_papers_spread():
    """Kernels N(0, 2/(k²·out)): the last 3×3 kernel has 589,824 entries, so its spread is known to 0.4 %."""
    net = Net(ResNet8, (3, 32, 32), 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kernel = net.build(*(net.shape, 10)).blocks[2].conv2.weight.detach().double()
    assert kernel.std().item() == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.004)
    assert abs(kernel.mean().item()) < 4 * math.sqrt(2 / (9 * 256)) / math.sqrt(kernel.numel())


@pytest.mark.parametrize("side", [11, 8, 4])
def test_lenet_refuses_images_that_its_kernels_do_not_fit(side):
    with pytest.raises(UserError, match=rf"at least 12×12.*got {side}×20"):
        Net(LeNet, (1, side, 20), 10)


def test_lenet_takes_the_smallest_image_and_odd_or_oblong_ones():
    for height, width in ((12, 12), (13, 15), (12, 31)):
        net = Net(LeNet, (1, height, width), 10)
        assert net.logits(net.initial(0), torch.zeros(2, 1, height, width)).shape == (2, 10)


# The vector


@BUILDS
def test_a_vector_holds_kernels_then_gains_and_shifts_then_statistics(build, channels):
    """Each tensor is filled with its own number; the vector must hold the numbers in the documented order.

    Zeros follow each tensor up to a multiple of eight entries.
    """
    net = made(build, channels)
    module = module_of(net)
    norms = {name for name, layer in module.named_modules() if isinstance(layer, nn.BatchNorm2d)}

    def rank(name):
        owner, _, leaf = name.rpartition(".")
        return (2 if leaf.startswith("running") else 1) if owner in norms else 0

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    for number, tensor in enumerate(tensors.values()):
        tensor.data.fill_(number + 1)
    vector = net.flatten(module).tolist()
    parts = vector[: net.n_kernels], vector[net.n_kernels : net.n_weights], vector[net.n_weights :]
    for level, part in enumerate(parts):
        expected = []
        for number, (name, tensor) in enumerate(tensors.items()):
            if rank(name) == level:
                expected += [number + 1.0] * tensor.numel() + [0.0] * (-tensor.numel() % 8)
        assert part == expected


@pytest.mark.parametrize(("build", "channels"), [(LeNet, 1), (ResNet8, 3), (small.ConvNet, 3)])
def test_every_tensor_is_aligned_to_16_bytes(build, channels, monkeypatch):
    """A BatchNorm after a bias of odd length made CUDA fail with "misaligned address".

    In bfloat16 an entry has two bytes, so 16 bytes are eight entries, which are 32 bytes in float32.
    """
    net = Net(build, (channels, 12, 12), 7, 0.3)
    weights, statistics = net.parts(net.initial(0))
    seen = {}

    def see(own, tensors, x):
        seen.update(tensors)
        return x[0]

    monkeypatch.setattr(nets.OwnCopy, "__call__", see)
    net(weights, statistics, torch.zeros(2, channels, 12, 12))
    assert len(seen) == len(list(net.build(net.shape, 7, 0.3).parameters())) + len(net.statistic_sizes)
    start = weights.data_ptr()
    assert start % 16 == 0 and [name for name, v in seen.items() if (v.data_ptr() - start) % 32] == []


def test_the_padding_stays_zero_in_training():
    """Nothing reads it, so its gradient, momentum and decay are zero."""
    data = small.dataset()
    net = Net(small.ConvNet, (1, 12, 12), 7, 0.9)  # 7 planes
    marked = net.flatten(module_of(net)) != 0
    method = METHODS["hassle"](net=net, batch=8, epochs=2, residual_steps=3, residual_width=0.9)
    site = small.site(data, labelled=range(20), unlabelled=range(40, 61))
    update, _ = train(method, site, method.message(method.initial(0), site.client, 1), None, 1, 0)
    assert not marked.all()
    for vector in update.arrays.values():
        assert vector[~marked].eq(0).all() and not vector[marked].eq(0).all()


@BUILDS
@pytest.mark.parametrize("training", [False, True])
def test_f_of_x_and_w_is_the_plain_module(build, channels, training):
    """Logits, and in training the running statistics; evaluation does not change them."""
    net = made(build, channels)
    module = module_of(net).train(training)
    weights, statistics = (part.clone() for part in net.parts(net.flatten(module)))
    before = statistics.clone()
    x = drawn(5, *net.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # for dropout
        expected = module(x)
        torch.manual_seed(3)
        found = Model(net, weights, statistics, training)(x)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    moved = net.parts(net.flatten(module))[1]  # after the module's own pass
    torch.testing.assert_close(statistics, moved, rtol=1e-5, atol=1e-6)
    assert torch.equal(statistics, before) != (training and net.n_statistics > 0)


@BUILDS
def test_the_gradient_is_the_plain_modules(build, channels):
    """∂/∂w Σ z·c, as one vector in the layout of w."""
    net = made(build, channels)
    module = module_of(net).eval()
    x, c = drawn(4, *net.shape), drawn(4, net.classes, seed=1)
    weights, statistics = net.parts(net.flatten(module))
    leaf = weights.clone().requires_grad_()
    (found,) = torch.autograd.grad((net(leaf, statistics, x) * c).sum(), leaf)
    (module(x) * c).sum().backward()
    for parameter in module.parameters():
        parameter.data.copy_(parameter.grad)
    torch.testing.assert_close(found, net.parts(net.flatten(module))[0], rtol=1e-4, atol=1e-5)


def test_kernels_are_channels_last_views_of_the_vector():
    """A 3×3 kernel (out, in, 3, 3) lies as (out, 3, 3, in): strides (9·in, 1, 3·in, in), no copy."""
    seen = {}

    class Spy(small.ConvNet):
        def forward(self, x):
            seen.update(self.named_parameters())
            return super().forward(x)

    net = Net(Spy, (3, 12, 12), 4)
    vector = net.initial(0)
    net.logits(vector, torch.zeros(2, 3, 12, 12))
    kernel = seen["conv.weight"]
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert kernel.stride() == (27, 1, 9, 3)
    start, end = vector.data_ptr(), vector.data_ptr() + 4 * len(vector)
    assert all(start <= tensor.data_ptr() < end for tensor in seen.values())


def test_a_vector_of_double_precision_works():
    net = made(LeNet, 1)
    z = net.logits(net.initial(0).double(), drawn(2, *net.shape).double())
    assert z.dtype == torch.float64


# Initial vectors


@BUILDS
def test_initial_vectors_depend_on_seed_and_slot_alone(build, channels, global_randomness):
    net = made(build, channels)
    first = net.initial(7, slot=1)
    assert torch.equal(made(build, channels).initial(7, slot=1), first)
    others = [net.initial(7, 0), net.initial(8, 1), net.initial(8, 0), net.initial(7, 2)]
    assert not any(torch.equal(first, other) for other in others)


def test_initial_vectors_are_the_same_in_threads():
    """Parallel runs initialise at the same time."""
    net = made(LeNet, 1)
    expected = [net.initial(seed) for seed in range(4)]
    found = side_by_side(lambda i: net.initial(i % 4), range(400), 4)
    assert all(torch.equal(vector, expected[i % 4]) for i, vector in enumerate(found))


def test_initial_vectors_are_the_modules_own_initialisation():
    """PyTorch's default for a linear layer: U(−1/√fan_in, 1/√fan_in); BatchNorm starts at 1, 0, 0, 1."""
    net = made(small.ConvNet, 3, width=1)
    vector = net.initial(0)
    kernels, norm, statistics = vector.split([net.n_kernels, net.n_weights - net.n_kernels, net.n_statistics])
    bound = max(1 / math.sqrt(27), 1 / math.sqrt(8))
    assert 0.5 * bound < kernels.abs().max() <= bound
    assert norm.tolist() == [1.0] * 8 + [0.0] * 8
    assert statistics.tolist() == [0.0] * 8 + [1.0] * 8


# Custom networks


def test_an_integer_buffer_is_a_constant_that_does_not_travel():
    net = made(small.NoisyNet, 1)
    assert net.n_statistics == 0
    assert len(net.initial(0)) == 144 * 4 + 8  # four biases take the room of eight
    x = drawn(2, *net.shape)
    w = net.initial(0)
    kernel, bias = w[: 144 * 4].view(4, 144), w[144 * 4 :][:4]
    torch.testing.assert_close(net.logits(w, x), x.flatten(1).flip(1) @ kernel.T + bias)


def test_a_network_that_does_not_fit_the_images_is_a_user_error():
    with pytest.raises(UserError, match=r"must return logits of shape \(B, 4\), got \(2, 9\)"):
        check_image(
            Net(lambda shape, classes, width: nn.Sequential(nn.Flatten(), nn.Linear(9, 9)), (1, 3, 3), 4)
        )
    with pytest.raises(UserError, match=r"fails on images of shape \(1, 3, 3\)"):
        check_image(
            Net(lambda shape, classes, width: nn.Sequential(nn.Flatten(), nn.Linear(7, 4)), (1, 3, 3), 4)
        )
    check_image(made(small.ConvNet, 1))


def test_the_clip_of_networks():
    """Ruling 9: 1 for LeNet, 5 for residual networks and for a network without a value."""
    clips = [Net(build, (1, 12, 12), 4, 0.25).clip for build in (*NETS.values(), small.ConvNet)]
    assert clips == [1.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        *((12, 12, 1000), (28, 28, 1000), (32, 32, 1000)),  # must not change: bits may depend on it
        *((64, 64, 250), (224, 224, 20), (16, 128, 500), (2000, 2000, 1)),
    ],
)
def test_large_images_go_in_smaller_passes(height, width, expected):
    for channels in (1, 3):
        images = torch.zeros(1, 1, 1, channels, dtype=torch.uint8).expand(5, height, width, channels)
        assert images_a_pass(images) == expected


# Calls with other tensors


class Tied(nn.Module):
    """Two layers with one weight; fails on a batch of one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        if len(x) == 1:
            raise ZeroDivisionError
        return self.second(self.first(x))


def test_a_copy_is_called_with_other_tensors_and_keeps_its_own():
    module = Tied()
    own, before = nets.OwnCopy(module), {k: v.clone() for k, v in module.state_dict().items()}
    weight, first, second, x = drawn(3, 3), drawn(3), drawn(3), drawn(2, 3)
    tensors = {"first.weight": weight, "first.bias": first, "second.bias": second}
    assert torch.allclose(own(tensors, x), (x @ weight.T + first) @ weight.T + second)
    with pytest.raises(ZeroDivisionError):
        own(tensors, x[:1])
    after = module.state_dict()
    assert isinstance(module.first.weight, nn.Parameter) and module.first.weight is module.second.weight
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)


# Captures


def test_a_capture_waits_for_eager_networks_and_they_wait_for_a_capture():
    lock, order, running, go = CaptureLock(), [], threading.Event(), threading.Event()

    def first():
        with lock.eager():
            running.set()
            assert go.wait(small.LIMIT)
            with lock.eager():  # re-entrant, even while a capture waits
                order.append("first")

    def capture():
        with lock.capturing(), lock.eager():  # a network runs within its own capture
            order.append("capture")

    def second():
        with lock.eager():
            order.append("second")

    threads = [threading.Thread(target=target) for target in (first, capture, second)]
    threads[0].start()
    assert running.wait(small.LIMIT)
    threads[1].start()
    while not lock._waiting:
        time.sleep(0.001)
    threads[2].start()
    assert order == []
    go.set()
    for thread in threads:
        thread.join(small.LIMIT)
    assert order == ["first", "capture", "second"]  # a waiting capture goes before new eager work


def test_the_capture_lock_is_released_after_an_error():
    lock = CaptureLock()
    for enter in (lock.capturing, lock.eager, lock.capturing):
        with pytest.raises(ZeroDivisionError), enter():
            raise ZeroDivisionError


def test_a_capture_that_is_interrupted_while_it_waits_leaves_the_lock(monkeypatch):
    """In a notebook the process lives on after Ctrl-C: no network could run in it any more."""
    lock = CaptureLock()

    def interrupted(ready):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(lock._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), lock.capturing():
            pass
    monkeypatch.setattr(lock._changed, "wait", interrupted)
    with lock.eager():  # does not wait
        pass


def test_a_capture_within_eager_work_is_refused():
    """It would wait for itself forever."""
    lock = CaptureLock()
    with lock.eager(), pytest.raises(AssertionError), lock.capturing():
        pass


def test_a_network_on_a_gpu_holds_the_capture_lock(monkeypatch):
    """Wherever it is called, as FedMatch does where updates are merged; on a CPU the lock is not touched."""
    net, held = made(small.ConvNet, 1), []
    lock = CaptureLock()
    monkeypatch.setattr(nets, "CAPTURE_LOCK", lock)
    call = nets.OwnCopy.__call__
    monkeypatch.setattr(nets.OwnCopy, "__call__", lambda *args: held.append(lock._eager) or call(*args))

    class OnGpu(torch.Tensor):
        is_cuda = True

    x = drawn(2, *net.shape)
    net.logits(net.initial(0), x)
    net.logits(net.initial(0), x.as_subclass(OnGpu))
    assert held == [0, 1] and lock._eager == 0
