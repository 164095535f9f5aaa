"""Small things to test with: data, networks and federations that train in milliseconds."""

import numpy as np
import torch
from torch import nn

from fedhassle.data.datasets import Dataset
from fedhassle.data.partition import Split
from fedhassle.local import Samples, Site
from fedhassle.method import Client
from fedhassle.nets import Net
from fedhassle.rounds import Plan, federate
from fedhassle.simulator import Simulator, dataset_views

CPU = torch.device("cpu")
CLASSES = 4
SIDE = 12


class Linear(nn.Module):
    """f(x; w) = W·x + b of the flattened image: a matrix product that NumPy can repeat. Has no width."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        self.output = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.output(x.flatten(1))


class ConvNet(nn.Module):
    """Convolution, BatchNorm, linear: the smallest network with every kind of tensor that travels."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        planes = max(1, round(8 * width))
        self.norm = nn.BatchNorm2d(planes)  # before the convolution, so that the layout has to reorder
        self.conv = nn.Conv2d(shape[0], planes, 3, stride=2)
        self.output = nn.Linear(planes, classes)

    def forward(self, x):
        return self.output(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class NoisyNet(nn.Module):
    """A linear network behind dropout, with an integer buffer that is a constant."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        pixels = int(np.prod(shape))
        self.register_buffer("order", torch.arange(pixels - 1, -1, -1))
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(pixels, classes)

    def forward(self, x):
        return self.output(self.dropout(x.flatten(1)[:, self.order]))


def net(build=ConvNet, channels=1, side=SIDE, classes=CLASSES, width=1.0):
    return Net(build, (channels, side, side), classes, width)


def dataset(channels=1, side=SIDE, train=120, flip=False, crop=0, seed=0):
    """Class centres plus noise, so that a few steps learn something and labels are not random."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(60, 196, (CLASSES, side, side, channels))

    def images(n):
        y = np.arange(n) % CLASSES
        x = centres[y] + rng.normal(0, 25, (n, side, side, channels))
        return np.clip(x, 0, 255).astype(np.uint8), y

    names = tuple("abcd")
    return Dataset(
        "small",
        *images(train),
        *images(40),
        names,
        "lenet",
        (0.5,) * channels,
        (0.25,) * channels,
        flip,
        crop,
    )


def rows(start, stop):
    return np.arange(start, stop)


SPLIT = Split(  # one full client, three partial ones, two unlabelled ones, of unequal sizes
    labelled=(rows(0, 20), rows(20, 26), rows(26, 35), rows(35, 36), rows(0, 0), rows(0, 0)),
    unlabelled=(rows(0, 0), rows(36, 50), rows(50, 61), rows(61, 80), rows(80, 97), rows(97, 120)),
)
FULL, PARTIAL, LONE_LABEL, UNLABELLED = "client 1", "client 2", "client 4", "client 5"


def simulator(data=None, seed=0, only=None):
    """The six clients of `SPLIT`, or those named in `only`."""
    made = Simulator(dataset() if data is None else data, SPLIT, seed, CPU)
    if only is not None:
        made.clients = tuple(c for c in made.clients if c.name in only)
    return made


def simulate(method, rounds, seed=0, per_round=4, state=None, first=1, only=None, data=None):
    """The rounds of a small run."""
    plan = Plan(rounds, per_round, seed)
    state = method.initial(seed) if state is None else state
    return list(federate(method, simulator(data, seed, only), plan, state, first))


def site(data=None, labelled=(), unlabelled=(), name="here", truth=True):
    """One client that holds the given rows."""
    data = dataset() if data is None else data
    y = torch.from_numpy(np.asarray(data.y_train, np.int64))
    known, unknown = (torch.tensor(list(part), dtype=torch.long) for part in (labelled, unlabelled))
    samples = Samples(torch.from_numpy(data.x_train), known, y[known], unknown, y[unknown] if truth else None)
    return Site(Client(name, len(known), len(unknown)), samples, dataset_views(data, CPU))


def same(a, b):
    """Whether two mappings of names to tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
