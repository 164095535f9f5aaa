"""Small data, networks, federations and runs for tests, which train in milliseconds."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

import fedhassle
from fedhassle.cli.main import app, guarded
from fedhassle.data.dataset import Dataset
from fedhassle.data.split.split import Split
from fedhassle.engine.client import train
from fedhassle.engine.device import Engine
from fedhassle.engine.job import Samples, Site
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.tensor_files import read_arrays
from fedhassle.engine.trainer import dataset_views
from fedhassle.losses import cross_entropy
from fedhassle.method import Client, Descent, Method, Phase, Stream
from fedhassle.methods import METHODS, Hassle
from fedhassle.nets import Net
from fedhassle.runs.folder import claim
from fedhassle.runs.resume import reopen
from fedhassle.runs.run import method_for_run
from fedhassle.runs.train import train_run
from fedhassle.settings.build import build_dataset, build_split
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

CPU = torch.device("cpu")
ENGINE = Engine(CPU)
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
    """Convolution, BatchNorm, linear: the smallest network with every kind of tensor that is sent."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        planes = max(1, round(8 * width))
        self.norm = nn.BatchNorm2d(planes)  # before the convolution, so that the layout must reorder them
        self.conv = nn.Conv2d(shape[0], planes, 3, stride=2)
        self.output = nn.Linear(planes, classes)

    def forward(self, x):
        return self.output(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Normed(nn.Module):
    """BatchNorm of each pixel, then linear: the smallest network in which samples of a batch interact."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        self.norm = nn.BatchNorm1d(int(np.prod(shape)))
        self.output = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.output(self.norm(x.flatten(1)))


class NoisyNet(nn.Module):
    """Dropout, then linear, with a constant integer buffer."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        pixels = int(np.prod(shape))
        self.register_buffer("order", torch.arange(pixels - 1, -1, -1))
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(pixels, classes)

    def forward(self, x):
        return self.output(self.dropout(x.flatten(1)[:, self.order]))


class Dropping(nn.Module):
    """Dropout of channels and of entries, as a layer and as a function, in place, and of whole samples."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__()
        planes = max(1, round(8 * width))
        self.conv = nn.Conv2d(shape[0], planes, 3, stride=2)
        self.norm = nn.BatchNorm2d(planes)
        self.channels = nn.Dropout2d(0.2)
        self.entries = nn.Dropout(0.3, inplace=True)
        self.hidden = nn.Linear(planes, 16)
        self.output = nn.Linear(16, classes)

    def forward(self, x):
        h = self.entries(self.channels(torch.relu(self.norm(self.conv(x))))).mean((2, 3))
        h = self.entries(h + 1.0)
        if self.training:  # stochastic depth
            h = h * torch.empty(len(h), 1, device=h.device).bernoulli_(0.9)
        return self.output(torch.nn.functional.dropout(torch.relu(self.hidden(h)), 0.1, self.training))


class Jittery(Linear):
    """A linear network that adds Gaussian noise, from the global random state, to its inputs in training."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


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
FULL, PARTIAL, UNLABELLED = "client 1", "client 2", "client 5"


def simulator(data=None, seed=0, only=None):
    """The six clients of `SPLIT`, or those named in `only`."""
    made = Simulator(dataset() if data is None else data, SPLIT, seed, ENGINE)
    if only is not None:
        made.clients = tuple(c for c in made.clients if c.name in only)
    return made


def simulate(method, rounds, seed=0, per_round=4, state=None, first=1, only=None, data=None):
    """Returns the rounds of a small run."""
    plan = Plan(rounds, per_round, seed)
    state = method.initial(seed) if state is None else state
    return list(federate(method, simulator(data, seed, only), plan, state, first))


def site(data=None, labelled=(), unlabelled=(), name="here", truth=True):
    """Returns a client with the given rows."""
    data = dataset() if data is None else data
    y = torch.from_numpy(np.asarray(data.y_train, np.int64))
    known, unknown = (torch.tensor(list(part), dtype=torch.long) for part in (labelled, unlabelled))
    true = y[unknown] if truth else torch.full_like(unknown, -1)
    samples = Samples(torch.from_numpy(data.x_train), known, y[known], unknown, true)
    return Site(Client(name, len(known), len(unknown)), samples, dataset_views(data, CPU))


def beside(*sites):
    """Returns the same clients with a shared array of images, as in a simulator."""
    images, views = sites[0].samples.images, sites[0].views
    return [Site(client, samples._replace(images=images), views) for client, samples, _ in sites]


def same(a, b):
    """True if two mappings of names to tensors are bit-identical."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Local training

QUICK = {"batch": 8, "epochs": 2}


def hassle(**settings):
    return Hassle(net(), **{**QUICK, "residual_steps": 5, **settings})


def trained(method, here, state=None, t=1, seed=0):
    """Returns a client's update, by default from the initial state."""
    state = method.initial(0) if state is None else state
    return train(method, here, method.message(state, here.client, t), None, t, seed)[0]


# All methods

# Settings that use every part of a method within few steps on small networks.
TELLING = {
    "mixmatch": {"rounds": 4},
    "fixmatch": {"confidence": 0.3},
    "fedmatch": {"confidence": 0.3, "helper_rounds": 2, "least_change": 0.001, "unlabelled": True},
    "rscfed": {"subsets": 2, "subset_size": 3, "partial": "mixed"},
    "hassle": {"residual_steps": 2},
    "hassle+": {"confidence": 0.3, "unlabelled_epochs": 1},
    "fixmatch-global": {"confidence": 0.3},
    "sage": {"confidence": 0.3, "halving": 0.3},
    "central": {"steps": 2},
    "central-fixmatch": {"steps": 2, "confidence": 0.3},
}


def made(name, **settings):
    """Returns a method on the small network, with settings that use every part of it in few steps."""
    return METHODS[name](net=net(), **{"batch": 8, "epochs": 1, **TELLING.get(name, {}), **settings})


# A method with client memory, draws, `then` and two streams


@dataclass(frozen=True)
class Tutored(Method):
    """A student on labelled batches of 6 and unlabelled ones of 4, and a teacher that averages it.

    Loss: ℓ(student(x_L), y) + c·mean (student(x_U) − teacher(x_U))², c a draw for each step. The teacher and
    its count s of steps stay with the client: teacher ← teacher + (student − teacher)/(s + 2).
    """

    def networks(self):
        return {"w": self.net, "teacher": self.net}

    def initial(self, seed):
        return {"w": self.net.initial(seed)}

    def memory(self, client, message):
        return {"teacher": message["w"], "s": torch.zeros(1)}

    def phases(self, client, t):
        streams = (Stream("labelled", 6), Stream("unlabelled", 4, views=("weak", "clean")))
        descent = Descent("w", self.loss, self.local_optimiser())
        return (Phase("both", streams, (descent,), self.epochs, then=self.follow, draw=self.weight),)

    def weight(self, rng):
        return rng.uniform(0, 2, 1)

    def loss(self, local, received, labelled, unlabelled, c):
        gap = local["w"](unlabelled.views[0]) - local["teacher"](unlabelled.views[1])
        return cross_entropy(local["w"](labelled.views[0]), labelled.y) + (c * gap.square()).mean()

    def follow(self, local, received):
        share = 1 / (local["s"] + 2)
        return {"teacher": local["teacher"].lerp(local["w"], share), "s": local["s"] + 1}

    def predict(self, state, x):
        return {"model": self.net.logits(state["w"], x)}


# Settings

SETTINGS = {  # fit the images of the fixture `images`
    "split.clients": 6,
    "split.labels": {"full": 1, "partial": 2, "unlabelled": 3, "share": 0.3},
    "clients_per_round": 4,
    "method.batch": 16,
}


def save_images(path, data):
    """Writes a data set as a user's .npz file."""
    np.savez(path, x_train=data.x_train, y_train=data.y_train, x_test=data.x_test, y_test=data.y_test)


def resolved(*words, config="paper"):
    """Returns the settings of a preset with KEY=VALUE words."""
    return resolve(request(config, words))


def built(settings):
    """Returns the data set, split and method that a run builds before it trains."""
    made = build_dataset(settings, progress=False)
    split = build_split(settings, made)
    return made, split, method_for_run(settings, made, split)


# The command line

PNG = b"\x89PNG\r\n\x1a\n"
LIMIT = 600  # seconds after which a process or a thread counts as hung, however busy the machine is


def call(*words, prog=None):
    """Runs a command like the console script; returns its exit code, output and error output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = guarded(lambda: app([str(word) for word in words], prog_name=prog))
        except SystemExit as exit_:
            code = exit_.code or 0
    return code, out.getvalue(), err.getvalue()


def command(words, output):
    """Runs a command as the main function of a process, with its output in a file."""
    with open(output, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):  # noqa: PTH123
        sys.exit(guarded(lambda: app(words)))


def kill_when(process, folder, condition, delay):
    """Kills a process with SIGKILL, `delay` seconds after a condition holds; it may end by itself before."""
    deadline = time.monotonic() + LIMIT
    while process.is_alive() and not condition(folder):
        assert time.monotonic() < deadline, "the process hangs"
    time.sleep(delay)
    process.kill()
    process.join(LIMIT)
    assert process.exitcode in (0, -signal.SIGKILL)


def environment(**changes):
    """Returns the environment for a process that runs this checkout."""
    root = str(Path(fedhassle.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **changes}


def interruptible(*words):
    """Returns the command line of a process that reacts to Ctrl-C, even if the tests ignore it."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; from fedhassle.cli.main import main; main()"
    return [sys.executable, "-c", code, *map(str, words)]


def process(*words, **changes):
    """Runs a command in its own process."""
    command = [sys.executable, "-m", "fedhassle", *map(str, words)]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, timeout=LIMIT, check=False
    )


# A user's method with client memory under the name NAME

KEEPS = """
    from dataclasses import dataclass
    from fedhassle import Phase
    from fedhassle.methods.fedavg import FedAvg

    @dataclass(frozen=True)
    class Keeps(FedAvg):
        "FedAvg whose clients are pulled towards an average of their models from earlier rounds."

        def memory(self, client, message):
            return {"NAME": message["w"].clone()}

        def networks(self):
            return {**super().networks(), "NAME": self.net}

        def phases(self, client, t):
            return tuple(self.keeping(phase) for phase in super().phases(client, t))

        def keeping(self, phase):
            (descent,) = phase.descents
            pulled = type(descent)("w", self.pull, descent.optimiser)
            return Phase(phase.name, phase.streams, (pulled,), phase.epochs, then=self.keep)

        def pull(self, local, received, batch):
            gap = local["w"].weights - local["NAME"].weights
            return super().loss(local, received, batch) + 0.1 * gap.square().sum()

        def keep(self, local, received):
            return {"NAME": local["NAME"].lerp(local["w"], 0.3)}
"""


# Run folders


def strict(text):
    """Parses standard JSON, which has no NaN and infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def summary_of(folder):
    return strict((folder / "summary.json").read_text("utf-8"))


def metrics_of(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def but_seconds(metrics):
    """Returns lines of metrics without their seconds."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics]


def tensors_of(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def kept_by(folder):
    """Returns the memory of a run's clients: arrays by (client, round)."""
    found = [read_arrays(path) for path in sorted((folder / "memory").rglob("round-*"))]
    return {(about["client"], about["round"]): arrays for arrays, about in found}


def cut(words, folder, rounds):
    """Runs some rounds and stops, as if the process had ended there."""
    steps = train_run(reopen(claim(request(None, words), folder).path))
    for _ in range(rounds):
        next(steps)
    steps.close()


def assert_same_result(folder, whole):
    """Asserts bit-identical metrics, accuracies and model, and that no partial file is left."""
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(whole))
    mine, other = summary_of(folder), summary_of(whole)
    for key in ("accuracy", "rounds", "settings", "settings_hash", "split_hash", "seed"):
        assert mine[key] == other[key]
    assert same(tensors_of(folder / "model.safetensors"), tensors_of(whole / "model.safetensors"))
    kept, expected = kept_by(folder), kept_by(whole)
    assert kept.keys() == expected.keys() and all(same(kept[k], expected[k]) for k in kept)
    assert paths_in(folder) == paths_in(whole)


def paths_in(folder):
    """Returns all files and folders below a folder, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*")}
