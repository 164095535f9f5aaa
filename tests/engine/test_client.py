"""Local training of one client, against plain loops."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import order_of_epochs
from small import QUICK, hassle, trained
from torch import nn

from fedhassle.architectures import LeNet
from fedhassle.engine.client import train
from fedhassle.engine.labels import label
from fedhassle.method import Stream
from fedhassle.methods import FedAvg, Hassle
from fedhassle.nets import IMAGES_A_PASS
from fedhassle.randomness import generator

# One client of FedAvg is a plain module and an optimiser of torch.optim

SGD = (torch.optim.SGD, {}, {"momentum": 0.9})
OPTIMISERS = [  # PyTorch's, our settings, and PyTorch's
    (torch.optim.SGD, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}),
    (
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    (torch.optim.AdamW, {"optimiser": "adamw"}, {"weight_decay": 0.0}),
    (torch.optim.AdamW, {"optimiser": "adamw", "weight_decay": 0.5}, {"weight_decay": 0.5}),
]


@pytest.mark.parametrize(
    ("build", "clip", "n", "optimiser"),
    [
        *((LeNet, 0.1, n, SGD) for n in (20, 16, 5, 1)),
        *((small.ConvNet, clip, n, SGD) for clip in (0.0, 0.3) for n in (20, 16, 5, 1)),
        *((LeNet, 0.1, 20, optimiser) for optimiser in OPTIMISERS),
        # BatchNorm cancels a bias before it: AdamW would make steps of the rounding errors of its gradient.
        *((small.Normed, 0.0, 20, optimiser) for optimiser in OPTIMISERS),
    ],
)
def test_one_client_is_a_plain_module_with_torch_optim(build, clip, n, optimiser):
    """Compares with `nn.Module`, `clip_grad_norm_` and `torch.optim` on the same batches, with BatchNorm.

    n = 20, 16, 5 and 1 with a batch of 8: an epoch of 3, 2, 1 and 1 steps. In a batch
    larger than the client, samples repeat.
    """
    kind, settings, arguments = optimiser
    lr = 0.05 if kind is torch.optim.SGD else 0.002
    data = small.dataset(flip=True)
    net = small.net(build)
    method = FedAvg(net, batch=8, epochs=3, lr=lr, clip=clip, **settings)
    site = small.site(data, labelled=range(10, 10 + n), name="anna")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = build(net.shape, net.classes)
    start = net.flatten(module)
    update, kept = train(method, site, {"w": start}, None, t=4, seed=9)

    rng = generator(9, 4, "anna", "labelled")
    batches = order_of_epochs(n, 8, 3, rng)
    uniforms = rng.random((len(batches), 8, 3), dtype=np.float32)
    optimiser = kind(module.parameters(), lr, **arguments)
    losses = []
    for batch, u in zip(batches, uniforms, strict=True):
        pixels = data.x_train[[10 + i for i in batch]] / 255.0
        pixels = np.stack(
            [x[:, ::-1] if first < 0.5 else x for x, first in zip(pixels, u[:, 0], strict=True)]
        )
        x = torch.from_numpy(((pixels - 0.5) / 0.25).transpose(0, 3, 1, 2).astype(np.float32))
        y = torch.from_numpy(data.y_train[[10 + i for i in batch]])
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
        losses.append(loss.item())
    # AdamW divides by the size of a gradient, so rounding errors of a small one count.
    atol = 3e-6 if kind is torch.optim.SGD else 1e-5
    torch.testing.assert_close(update.arrays["w"], net.flatten(module), rtol=1e-5, atol=atol)
    assert (update.arrays["w"] - start).abs().max() > 3e-3  # it did train
    assert update.samples == {"w": n}
    assert update.losses["w"].item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert update.client is site.client and kept == {}


# Odd clients


@pytest.mark.parametrize(
    ("labelled", "unlabelled"),
    [([3], [5]), ([3, 7], range(20, 50)), ([0, 4, 8, 12], []), ([], [1]), (range(3), range(30, 33))],
    ids=["one sample each", "two labels", "one class", "one unlabelled sample", "less than a batch"],
)
def test_odd_clients_train_to_finite_models(labelled, unlabelled):
    site = small.site(labelled=labelled, unlabelled=unlabelled)
    method = hassle()
    state = method.initial(0)
    update = trained(method, site, state)
    labels, rest = len(labelled), len(unlabelled)
    expected = {"w_S": labels, "r_US": labels, "w_U": rest, "r_SU": rest}
    assert update.samples == {name: n for name, n in expected.items() if n}
    assert update.arrays.keys() == update.samples.keys() == update.losses.keys()
    for name, vector in update.arrays.items():
        assert vector.shape == state[name].shape
        assert torch.isfinite(vector).all() and not torch.equal(vector, state[name])


@pytest.mark.parametrize(("small_is", "passes"), [(144, [6, 1]), (72, [3, 3, 1])])
def test_pseudo_labels_are_computed_in_small_passes_for_large_images(small_is, passes, monkeypatch):
    monkeypatch.setitem(IMAGES_A_PASS, "cpu", 6)
    monkeypatch.setattr("fedhassle.nets.SMALL", small_is)  # images here have 144 pixels
    seen = []

    def dark(received, x):
        seen.append(len(x))
        return -x.flatten(1)

    site = small.site(unlabelled=range(5, 12))
    y = label(Stream("unlabelled", logits=dark), site, {})
    assert seen == passes
    assert y.tolist() == small.dataset().x_train[5:12].reshape(7, -1).argmin(1).tolist()


# Randomness and order


@dataclass(frozen=True)
class Reordered(Hassle):
    """HASSLE with its phases in another order."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def phases(self, client, t):
        phases = super().phases(client, t)
        return tuple(phases[i] for i in self.order)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_the_four_phases_of_hassle_give_the_same_in_any_order(order):
    site = small.site(labelled=range(11), unlabelled=range(40, 61))
    settings = {**QUICK, "residual_steps": 4}
    state = Hassle(small.net(), **settings).initial(0)
    state |= {"w_S_before": state["w_S"] * 0.9, "w_U_before": state["w_U"] * 1.1}
    first = trained(Hassle(small.net(), **settings), site, state, t=3)
    other = trained(Reordered(small.net(), order=order, **settings), site, state, t=3)
    assert len(first.arrays) == 4
    assert small.same(dict(sorted(first.arrays.items())), dict(sorted(other.arrays.items())))
    assert first.samples == other.samples
    assert torch.equal(first.labelling, other.labelling)


def test_draws_depend_on_seed_round_and_client():
    """The same key gives the same bits; another seed, round or name gives another walk."""
    method, rows = FedAvg(small.net(), **QUICK), range(20)
    first = trained(method, small.site(labelled=rows), t=1, seed=0).arrays["w"]
    assert torch.equal(trained(method, small.site(labelled=rows), t=1, seed=0).arrays["w"], first)
    for site, t, seed in (
        (small.site(labelled=rows), 2, 0),
        (small.site(labelled=rows), 1, 1),
        (small.site(labelled=rows, name="elsewhere"), 1, 0),
    ):
        assert not torch.equal(trained(method, site, t=t, seed=seed).arrays["w"], first)


@pytest.mark.parametrize("pseudo_labels", ["round", "online"])
def test_training_leaves_global_randomness_and_its_inputs_alone(pseudo_labels, global_randomness):
    method = hassle(pseudo_labels=pseudo_labels)
    state = method.initial(0)
    before = {k: v.clone() for k, v in state.items()}
    site = small.site(labelled=range(11), unlabelled=range(40, 61))
    images = site.samples.images.clone()
    trained(method, site, state)
    assert small.same(state, before)
    assert torch.equal(site.samples.images, images)


class WithoutDropout(small.NoisyNet):
    """The same network without dropout."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__(shape, classes, width)
        self.dropout = nn.Identity()


def test_dropout_in_an_own_network_is_reproducible(global_randomness):
    """The masks depend on (seed, round, client, phase) alone, not on the global state."""
    method = FedAvg(small.net(small.NoisyNet), **QUICK)
    site = small.site(labelled=range(20))
    first = trained(method, site).arrays["w"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert torch.equal(trained(method, site).arrays["w"], first)
    assert not torch.equal(trained(method, site, seed=1).arrays["w"], first)
    plain = FedAvg(small.net(WithoutDropout), **QUICK)
    assert torch.equal(plain.initial(0)["w"], method.initial(0)["w"])
    assert not torch.equal(trained(plain, site).arrays["w"], first)  # so there was dropout


def test_settings_of_a_method_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hassle().lr = 1.0
