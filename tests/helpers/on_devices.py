"""One step of every method on a CPU and on a GPU: clients, methods and the tolerances of a comparison."""

from functools import cache

import numpy as np
import small
import torch

from fedhassle.architectures import ResNet8
from fedhassle.engine.client import train
from fedhassle.engine.device import Engine
from fedhassle.engine.job import Samples, Site
from fedhassle.engine.trainer import dataset_views
from fedhassle.methods import METHODS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DATA = small.dataset(channels=3, flip=True, crop=2)
CLOSE = {"rtol": 1e-3, "atol": 1e-5}  # tolerance of a step on two devices
SAME = 1e-5  # tolerance of a step run in two ways on one device
# No sample is near a threshold, and each term exceeds the rounding errors of a device.
STRONG = {
    "fedprox": {"mu": 10.0, "epochs": 2},  # the first step starts at distance 0
    "mixmatch": {"weight": 75.0},
    "fixmatch": {"confidence": 0.1},
    "fedmatch": {"confidence": 0.1, "consistency_weight": 100.0, "clip": 100.0},
    "rscfed": {"consistency_weight": 10.0},
    "hassle": {"gamma": 0.1},
    "hassle+": {"confidence": 0.1},
    "fixmatch-global": {"confidence": 0.1},
    "sage": {"confidence": 0.1},
}
# In ResNet-8 a weight of 100 blows one rounding of the weights up to 2e-5, which is more than `CLOSE` allows.
STRONG_IN_RESNET = {"fedmatch": {"consistency_weight": 10.0, "clip": 5.0}}
# The weight of each term, and the kinds of clients that have it; checked in `test_every_method`.
TERMS = [
    ("fedprox", "mu", ("full", "partial")),
    ("mixmatch", "weight", ("partial",)),
    ("fixmatch", "weight", ("partial",)),
    ("fedmatch", "consistency_weight", ("partial", "unlabelled")),
    ("rscfed", "consistency_weight", ("partial", "unlabelled")),
    ("hassle", "gamma", ("full", "partial", "unlabelled")),
    ("hassle", "lam", ("full", "partial", "unlabelled")),
    ("fixmatch-global", "weight", ("partial", "unlabelled")),
    ("sage", "weight", ("partial", "unlabelled")),
]


def on(device: torch.device, labelled=range(20), unlabelled=range(40, 61), name="ann") -> Site:
    """A client with its data on a device."""
    here = small.site(DATA, labelled=labelled, unlabelled=unlabelled, name=name)
    samples = Samples(*(value.to(device) for value in here.samples))
    return Site(here.client, samples, dataset_views(DATA, device))


def of_each_kind(device: torch.device) -> list[Site]:
    """A partial, a full and an unlabelled client, with one batch each."""
    return [on(device), on(device, range(30), (), "ben"), on(device, (), range(60, 90), "eve")]


def made(name, build, steps=1, lr=0.01):
    """A method with `steps` steps; seven classes give a bias of odd length before BatchNorm's gains.

    FedMatch multiplies its loss by ten, so it gets a tenth of the learning rate.
    """
    lr /= 10 if name == "fedmatch" else 1
    pooled = {name: {"steps": steps} for name in METHODS if METHODS[name].pooled}
    short = {"hassle": {"residual_steps": steps}, **pooled}
    deep = STRONG_IN_RESNET.get(name, {}) if build is ResNet8 else {}
    strong = small.TELLING.get(name, {}) | STRONG.get(name, {}) | deep
    chosen = {"epochs": steps, **strong, **short.get(name, {})}
    net = small.net(build, channels=3, classes=7)
    return METHODS[name](net=net, batch=32, lr=lr, **chosen)


@cache
def after_a_round(method):
    """The state after one round of all kinds of clients on the CPU, and the arrays that each keeps."""
    state = method.initial(0)
    sites = [site for site in of_each_kind(CPU) if method.phases(site.client, 1)]
    with Engine(CPU).active():
        done = [train(method, one, method.message(state, one.client, 1), None, 1, 0) for one in sites]
    merged = method.merge(state, [update for update, _ in done], 1, np.random.default_rng(0))
    return merged, {update.client.name: kept for update, kept in done}


def second_round(method, device):
    """Arguments of `train` in round 2, when FedMatch has helpers and HASSLE earlier duals."""
    state, memory = after_a_round(method)
    there = {k: v.to(device) for k, v in state.items()}
    for site in of_each_kind(device):
        if method.phases(site.client, 2):
            kept = {k: v.to(device) for k, v in memory[site.client.name].items()}
            yield method, site, method.message(there, site.client, 2), kept, 2, 0


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())
