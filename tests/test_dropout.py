"""Masks of dropout from a seed: what they are, and that they are as random as they need to be."""

import threading

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from torch import nn

from fedhassle.dropout import GOLDEN, SeededDropout, dropout_from
from fedhassle.engine.client import visit
from fedhassle.engine.job import draw
from fedhassle.methods import FedAvg, Hassle
from fedhassle.randomness import generator


def seed(number):
    return torch.tensor(number, dtype=torch.int32)


def numpy_mask(number, draws, shape, p):
    """The mask by hand: the mixing function of splitmix32 in unsigned arithmetic, on seed ^ draw ^ place."""
    bits = np.arange(np.prod(shape), dtype=np.uint64) ^ np.uint64((number ^ (draws * GOLDEN)) % 2**32)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor) % np.uint64(2**32)
    bits ^= bits >> np.uint64(15)
    signed = np.where(bits < 2**31, bits.astype(np.int64), bits.astype(np.int64) - 2**32)
    return (signed < p * 2**32 - 2**31).reshape(shape)


@pytest.mark.parametrize("number", [0, 1, -1, 2**31 - 1, -(2**31), 123456789])
def test_the_masks_of_a_step_are_those_of_the_formula(number):
    """Of entries, then of channels, then of entries again: each draw has a mask of its own."""
    x = torch.rand(5, 3, 4, 4) + 0.1
    with SeededDropout(seed(number)):
        found = [F.dropout(x, 0.3), F.dropout2d(x, 0.6), nn.Dropout(0.3)(x)]
    masks = [
        numpy_mask(number, 0, x.shape, 0.3),
        numpy_mask(number, 1, (5, 3, 1, 1), 0.6),
        numpy_mask(number, 2, x.shape, 0.3),
    ]
    for made, mask, p in zip(found, masks, (0.3, 0.6, 0.3), strict=True):
        expected = np.where(mask, 0, x.numpy() / (1 - p))
        np.testing.assert_allclose(made.numpy(), expected, rtol=1e-6)


def test_a_mask_does_not_depend_on_the_memory_format_and_its_gradient_is_the_mask():
    x = torch.rand(4, 6, 5, 5) + 0.1
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        leaf = given.clone().requires_grad_()
        with SeededDropout(seed(7)):
            made = nn.Dropout(0.25)(leaf)
        made.sum().backward()
        mask = torch.from_numpy(numpy_mask(7, 0, x.shape, 0.25))
        torch.testing.assert_close(leaf.grad, torch.where(mask, 0.0, 1 / 0.75))
        torch.testing.assert_close(made, torch.where(mask, 0.0, x / 0.75))


@pytest.mark.parametrize(
    ("layer", "shape", "dropped"),
    [
        (nn.Dropout(0.5), (6, 7), (6, 7)),
        (nn.Dropout1d(0.5), (6, 7, 8), (6, 7, 1)),
        (nn.Dropout1d(0.5), (6, 7), (6, 1)),
        (nn.Dropout2d(0.5), (6, 7, 3, 3), (6, 7, 1, 1)),
        (nn.Dropout3d(0.5), (6, 7, 2, 2, 2), (6, 7, 1, 1, 1)),
        (nn.Dropout3d(0.5), (7, 2, 2, 2), (7, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_every_layer_drops_what_pytorchs_does(layer, shape, dropped, inplace):
    """Zeros lie together where PyTorch's lie together, and nothing happens in evaluation mode."""
    layer = type(layer)(layer.p, inplace)
    x = torch.ones(shape)
    with SeededDropout(seed(3)):
        made = layer(x)
        still = layer.eval()(torch.ones(shape))
    assert (made is x) == inplace and torch.equal(still, torch.ones(shape))
    mask = torch.from_numpy(numpy_mask(3, 0, dropped, 0.5)).expand(shape)
    assert torch.equal(made, torch.where(mask, 0.0, 2.0))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_can_be_dropped(p):
    with SeededDropout(seed(3)) as mode:
        assert F.dropout(torch.ones(50), p).tolist() == [1.0 - p] * 50
        assert torch.empty(50).bernoulli_(p).tolist() == [p] * 50
    assert mode.draws == 0


def test_what_has_a_generator_of_its_own_keeps_it():
    x, y = torch.empty(50), torch.empty(50)
    with SeededDropout(seed(3)) as mode:
        x.bernoulli_(0.5, generator=torch.Generator().manual_seed(4))
    y.bernoulli_(0.5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(x, y) and mode.draws == 0


def test_a_probability_beyond_1_is_refused():
    with SeededDropout(seed(3)), pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        F.dropout(torch.ones(3), 1.5)


def test_masks_are_random_enough():
    """Shares, neighbours, draws and steps: each count is within five standard deviations."""
    n, rows = 20_000, []
    numbers = generator("steps").integers(0, 2**32, 20, np.uint32).view(np.int32)
    for number in [0, 1, 2, *numbers.tolist()]:
        with SeededDropout(seed(number)) as mode:
            rows += [mode.chosen((n,), 0.3).double() for _ in range(3)]
    masks = torch.stack(rows) - 0.3  # (69, n)
    share, variance = masks.mean(1), 0.3 * 0.7
    assert share.abs().max() < 5 * (variance / n) ** 0.5
    limit = 5 * variance / n**0.5
    for lag in (1, 2, 3, 16, 32, 128):
        assert (masks[:, lag:] * masks[:, :-lag]).mean(1).abs().max() < limit
    between = masks @ masks.T / n
    assert (between - between.diag().diag()).abs().max() < limit


def test_other_random_numbers_stay_those_of_pytorch():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = torch.rand(3), torch.randn(3)
        torch.manual_seed(1)
        with SeededDropout(seed(1)) as mode:
            found = torch.rand(3), torch.randn(3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)) and mode.draws == 0


def test_threads_do_not_see_each_others_seeds():
    made, both = {}, threading.Barrier(2)

    def work(number):
        with SeededDropout(seed(number)):
            both.wait()
            made[number] = [F.dropout(torch.ones(40)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, rows in made.items():
        for i, row in enumerate(rows):
            assert ((row == 0).numpy() == numpy_mask(number, i, (40,), 0.5)).all()


# In training


def test_a_step_of_a_client_uses_the_masks_of_its_key():
    """Dropout, then linear: the gradient by hand, with the mask of (seed, round, client, phase), step 0."""
    net = small.net(small.NoisyNet)
    method = FedAvg(net, batch=8, epochs=1, lr=1.0, momentum=0.0, clip=0.0)
    here = small.site(labelled=range(8), name="anna")
    start = method.initial(0)["w"]
    (job,) = visit(method, here, {"w": start}, None, 4, 9).jobs
    (number,) = generator(9, 4, "anna", "labelled", "dropout").integers(0, 2**32, 1, np.uint32)
    order = draw(job).feeds[0].rows[0].numpy()
    data = small.dataset()
    x = ((data.x_train[order] / 255 - 0.5) / 0.25).reshape(8, -1)[:, ::-1]
    x = np.where(numpy_mask(int(number), 0, x.shape, 0.5), 0, 2 * x)
    module = net.filled(*net.parts(start))
    weight, bias = (
        module.output.weight.detach().double().numpy(),
        module.output.bias.detach().double().numpy(),
    )
    z = x @ weight.T + bias
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    gap = (p - np.eye(4)[data.y_train[order]]) / 8
    trained = net.filled(*net.parts(small.trained(method, here, {"w": start}, t=4, seed=9).arrays["w"]))
    np.testing.assert_allclose(trained.output.weight.detach(), weight - gap.T @ x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trained.output.bias.detach(), bias - gap.sum(0), rtol=1e-4, atol=1e-6)


def test_steps_and_phases_have_seeds_of_their_own():
    method = Hassle(small.net(small.Dropping), **small.QUICK, residual_steps=5)
    here = small.site(labelled=range(20), unlabelled=range(40, 60))
    jobs = visit(method, here, method.initial(0), None, 1, 0).jobs
    seeds = [number for job in jobs for number in draw(job).seeds[0].tolist()]
    assert len(set(seeds)) == len(seeds) == sum(job.steps for job in jobs) > 4
    plain = visit(small.hassle(), here, small.hassle().initial(0), None, 1, 0).jobs
    assert all(draw(job).seeds == () for job in plain)  # without dropout there is nothing to draw


def test_without_a_seed_nothing_changes():
    with dropout_from(()):
        x = torch.ones(4)
        assert F.dropout(x, 0.5, training=False) is x
