"""The interface of a method. It knows no device, transport, engine or particular method.

Rulings, by their numbers here and elsewhere, are in docs/paper.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.split.layout import Kind, kind_of
from fedhassle.data.views import UNIFORMS
from fedhassle.errors import require
from fedhassle.losses import calibrated, cross_entropy, hard_labels
from fedhassle.nets import Net
from fedhassle.optimiser import SGD, AdamW, Optimiser, RateSchedule, share_of_rate
from fedhassle.ranges import (
    BatchSize,
    Decay,
    Epochs,
    FromOne,
    FromZero,
    NotNegative,
    Positive,
    Trim,
    require_in_ranges,
)
from fedhassle.robust import TRIM, Merging, merged
from fedhassle.vectors import Arrays

Part = Literal["labelled", "unlabelled"]

LARGEST = torch.finfo(torch.float32).max
MEAN_OF = "mean of "  # before the name of a model: its running mean over rounds


class Client(NamedTuple):
    """A client as the server knows it: its name, n_L and n_U."""

    name: str
    labelled: int
    unlabelled: int

    @property
    def kind(self) -> Kind:
        """Full, partial or unlabelled, by what it holds."""
        return kind_of(self.labelled, self.unlabelled)

    def count(self, part: Part) -> int:
        """The samples of one part of its data."""
        return self.labelled if part == "labelled" else self.unlabelled


class Network(Protocol):
    """Logits (B, M) from weights, statistics and images (B, C, H, W): a `Net`, or what stands in for one."""

    def __call__(self, weights: Tensor, statistics: Tensor, x: Tensor, training: bool = False) -> Tensor: ...  # noqa: D102


class Model(NamedTuple):
    """f(·; w): in training BatchNorm uses the batch and moves `statistics`, else a pure function."""

    net: Network
    weights: Tensor
    statistics: Tensor
    training: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (B, M)."""
        return self.net(self.weights, self.statistics, x, self.training)

    def at(self, weights: Tensor) -> Model:
        """The same model with other weights."""
        return self._replace(weights=weights)

    def lerp(self, end: Model, share: Tensor) -> Model:
        """Returns the model at a share of the way from this one to `end`."""
        weights = self.weights.lerp(end.weights, share)
        return self._replace(weights=weights, statistics=self.statistics.lerp(end.statistics, share))


Models = Mapping[str, Any]
"""Names to values: a `Model` where the name is in `Method.networks`, else a 1-D tensor."""


def as_models(arrays: Arrays, networks: Mapping[str, Net]) -> Models:
    """Arrays as a method sees them: those that are networks as models in evaluation mode."""
    return {k: Model(networks[k], *networks[k].parts(v)) if k in networks else v for k, v in arrays.items()}


class Batch(NamedTuple):
    """B samples: a tensor (B, C, H, W) per view; labels (B,), −1 = nothing to learn."""

    views: tuple[Tensor, ...]
    y: Tensor

    def at(self, i: int) -> Batch:
        """Returns batch i of several, which have one more axis in front."""
        return Batch(tuple(view[i] for view in self.views), self.y[i])


@dataclass(frozen=True)
class Stream:
    """A shuffled walk over one part of a client's data, in full batches.

    A stream with `logits` gets pseudo-labels. Once a round, the logits of all its clean images are computed,
    in chunks whose size depends on the device, and `labels` turns all of them together into labels: it may
    depend on the whole client, as a class mix does. With `online`, both happen at every step instead, on the
    first view of the step's batch.
    """

    part: Part
    batch: int = 128
    views: tuple[str, ...] = ("weak",)  # independent augmentations of each sample
    logits: Callable[[Models, Tensor], Tensor] | None = None  # (received, x) -> z (n, M)
    labels: Callable[[Tensor], Tensor] = hard_labels  # z (n, M) of all samples -> y (n,), −1 = no label
    online: bool = False
    anew: bool = False  # each batch starts a new order of all samples, in place of passes over them

    def __post_init__(self) -> None:
        parts = get_args(Part)
        require(self.part in parts, f"a stream's part must be {' or '.join(parts)}, got {self.part!r}")
        require(self.batch >= 1, f"a stream's batch must be at least 1, got {self.batch}")
        *others, last = UNIFORMS
        for view in self.views:
            require(
                view in UNIFORMS,
                f"there is no view {view!r}: a stream takes {', '.join(others)} or {last}",
            )
        require(
            self.logits is not None or self.labels is hard_labels,
            "a stream whose labels are computed needs their logits: Stream(…, logits=…, labels=…)",
        )

    def label(self, z: Tensor) -> Tensor:
        """Returns the labels (n,) of logits (n, M) that belong together."""
        y = self.labels(z)
        wanted, found = tuple(z.shape[:1]), tuple(y.shape)
        require(found == wanted, f"a stream's labels for logits {tuple(z.shape)} are {found}, not {wanted}")
        return y


class Labelled(NamedTuple):
    """The value of a loss and the labels behind it, which are counted; a loss may return it for a tensor.

    The labels (B,) are of the samples of the phase's first unlabelled stream: −1 = none; of a soft label, its
    likeliest class.
    """

    loss: Tensor
    y: Tensor


@dataclass(frozen=True)
class Descent:
    """One step of the vector `train` down `loss(local, received, *batches[, draw])`."""

    train: str
    loss: Callable[..., Tensor | Labelled]
    optimiser: Optimiser


@dataclass(frozen=True)
class Phase:
    """A walk: each step makes every descent in order, then stores what `then` returns.

    Phases that train no common name and keep no memory are independent: an engine may run them side by
    side. A Python value is a constant of the run; whatever differs between two steps or rounds (a ramp,
    an EMA's coefficient) is a tensor in the message, the memory or a draw.
    """

    name: str  # with (seed, round, client) the key of its randomness
    streams: tuple[Stream, ...]  # the first paces the epochs, the others walk on end to end
    descents: tuple[Descent, ...]
    epochs: int = 0  # passes over the first stream, each in ⌈n/B⌉ full batches
    steps: int = 0  # number of batches, in place of epochs; passes follow end to end
    then: Callable[[Models, Models], Mapping[str, Any]] | None = None  # (local, received) -> new local values
    draw: Callable[[np.random.Generator], np.ndarray] | None = None  # further randomness of a step, as data

    def __post_init__(self) -> None:
        require(bool(self.streams), f"phase {self.name!r} needs a stream to walk over")
        require(
            (self.epochs > 0) != (self.steps > 0),
            f"phase {self.name!r} needs either epochs or steps, got {self.epochs} and {self.steps}",
        )

    def length(self, client: Client) -> int:
        """The number of steps on a client."""
        pace = self.streams[0]
        return self.steps or self.epochs * -(-client.count(pace.part) // pace.batch)

    @property
    def images(self) -> int:
        """The number of images in a step, in all views."""
        return sum(stream.batch * len(stream.views) for stream in self.streams)

    def with_labelled_view(self, view: str | None) -> Phase:
        """Returns the phase with this view of labelled images; None leaves it as it is."""
        if view is None:
            return self
        seen = {stream: replace(stream, views=(view,) * len(stream.views)) for stream in self.streams}
        streams = tuple(seen[each] if each.part == "labelled" else each for each in self.streams)
        return replace(self, streams=streams)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names that it trains."""
        return tuple(dict.fromkeys(descent.train for descent in self.descents))


NO_LABELS = torch.zeros(4)  # never written to


class Update(NamedTuple):
    """A client's answer to a message."""

    client: Client
    arrays: Arrays  # each vector that it trained
    samples: Mapping[str, int]  # how many samples trained each
    losses: Arrays  # mean loss over the steps of the last phase that trained it
    # (4,): pseudo-labels right, given, asked for, and given to samples whose true label is known
    labelling: Tensor = NO_LABELS


@dataclass(frozen=True)
class Method:
    """A federated method: pure functions, state → message → phases on a client → update → state.

    The fields are its hyper-parameters, and its settings on the command line. A whole method that trains
    one model on labelled data, and pulls it towards zero:

    >>> from fedhassle.losses import cross_entropy
    >>> @dataclass(frozen=True)
    ... class Ridge(Method):
    ...     strength: float = 0.01
    ...
    ...     def networks(self):
    ...         return {"w": self.net}
    ...
    ...     def initial(self, seed):
    ...         return {"w": self.net.initial(seed)}
    ...
    ...     def phases(self, client, t):
    ...         descent = Descent("w", self.loss, self.local_optimiser())
    ...         walk = Stream("labelled", self.batch)
    ...         return (Phase("labelled", (walk,), (descent,), self.epochs),) if client.labelled else ()
    ...
    ...     def loss(self, local, received, batch):
    ...         z = local["w"](batch.views[0])
    ...         return cross_entropy(z, batch.y) + self.strength * local["w"].weights.square().sum()
    ...
    ...     def predict(self, state, x):
    ...         return {"model": self.net.logits(state["w"], x)}
    """

    net: Net
    batch: BatchSize = 128  # samples in a batch (Sec. 5.1)
    epochs: Epochs = 10  # local epochs per round (ruling 7)
    lr: Positive = 0.1  # η, the learning rate (Sec. 5.1); AdamW needs another one, such as 0.001
    momentum: Decay = 0.9  # momentum of SGD (Sec. 5.1)
    nesterov: bool | None = None  # Nesterov's momentum in SGD; default: false
    optimiser: Literal["sgd", "adamw"] | None = None  # optimiser of local training; default: sgd (Sec. 5.1)
    weight_decay: NotNegative | None = None  # weight decay; with adamw decoupled; default: 0 (ruling 9)
    # The learning rate over rounds: cosine to 0, or a step to a tenth after a half and after three quarters;
    # default: constant.
    schedule: RateSchedule | None = None
    horizon: FromOne | None = None  # rounds over which a schedule lowers the rate; default: all of the run
    lr_warmup: FromZero | None = None  # number of first rounds over which the rate rises to lr; default: 0
    # Largest norm of a gradient, 0: off (ruling 9); default: the network's own, 5 for ResNet-8, 1 for LeNet.
    clip: NotNegative | None = None
    average: Decay | None = None  # decay of a running mean over rounds of each model that predicts
    # What gives pseudo-labels if received models do: their running means; default: the models themselves.
    teacher: Literal["average"] | None = None
    # Calibrates cross-entropies by the class mix of the batch (balanced softmax, Ren et al. 2020).
    prior: Literal["batch", "none"] | None = None
    # View of labelled images; default: the method's own.
    labelled_view: Literal["weak", "strong"] | None = None
    # Takes the place of the weighted mean of the clients' models: the mean without the largest and smallest
    # values of each weight, or their median; default: the mean (docs/federation-reference.md).
    merging: Merging | None = None
    trim: Trim | None = None  # share of the clients left out at each end with merging=trimmed; default: 0.2

    learning_rates: ClassVar[tuple[str, ...]] = ("lr",)  # the settings that are learning rates
    averages: ClassVar[bool] = False  # whether it keeps the running means of `average` itself
    teachers: ClassVar[tuple[str, ...]] = ()  # the models received that give pseudo-labels
    pooled: ClassVar[tuple[Part, ...]] = ()  # parts of all clients' data in one place: no federation has that
    headline: ClassVar[str] = "model"  # the prediction that stands for the method in one-line summaries
    modes: ClassVar[Mapping[str, str]] = {}  # predictions to choose from and what each is; {}: the headline

    def __post_init__(self) -> None:
        for field in fields(self):
            require_float32(field.name, getattr(self, field.name))
        require_in_ranges(type(self), self)
        self.require_one_optimiser()
        require(self.horizon is None or self.falls, "horizon needs a schedule: schedule=cosine")
        if self.horizon is not None:
            self.require_rounds_after_warmup(self.horizon, "horizon")
        require(
            self.teacher is None or bool(self.average is not None and self.teachers),
            "teacher=average needs a decay (average=0.9), and a method that has its models label samples",
        )
        require(
            self.merging is None or type(self).merge is Method.merge,
            f"merging={self.merging} takes the place of a weighted mean, but {type(self).__name__} merges in "
            "its own way: leave merging out, or choose another method",
        )
        require(self.trim is None or self.merging == "trimmed", "trim needs a trimmed mean: merging=trimmed")

    def for_run(self, rounds: int, clients: Sequence[Client] = (), drawn: int = 0) -> Self:
        """Returns the method adapted to its run; `drawn`: the number of clients that a round draws.

        `clients` is empty if nobody knows all of them beforehand, as in a federation. A method that
        overrides it starts from what this one returns.
        """
        self.require_rounds_after_warmup(rounds, "rounds")
        return replace(self, horizon=rounds) if self.falls and self.horizon is None else self

    def networks(self) -> dict[str, Net]:
        """Every name that is a network, wherever it occurs."""
        raise NotImplementedError

    def initial(self, seed: int) -> Arrays:
        """The server's state before round 1."""
        raise NotImplementedError

    def phases(self, client: Client, t: int) -> tuple[Phase, ...]:
        """Returns the training of a client in round t; () = it is not asked."""
        raise NotImplementedError

    def predict(self, state: Arrays, x: Tensor) -> dict[str, Tensor]:
        """Logits by the name under which they are reported."""
        raise NotImplementedError

    def message(self, state: Arrays, client: Client, t: int) -> Arrays:
        """Returns the arrays that a client is sent, whose bytes are counted."""
        return state

    def memory(self, client: Client, message: Arrays) -> Arrays:
        """Returns the first values of the arrays that a client keeps between rounds."""
        return {}

    def counts(self, update: Update) -> Mapping[str, int]:
        """Returns the weight of an update in the mean of each vector: the samples that trained it."""
        return update.samples

    def merge(self, state: Arrays, updates: Sequence[Update], t: int, rng: np.random.Generator) -> Arrays:
        """Each vector: the mean over those who trained it, by `counts`; else unchanged (Eqs. 1, 2, 10)."""
        weighted = [update._replace(samples=self.counts(update)) for update in updates]
        means = average(weighted, self.merging, TRIM if self.trim is None else self.trim)
        return self.next_state(state, means, t)

    def next_state(self, state: Arrays, means: Arrays, t: int) -> Arrays:
        """Returns the state after round t, from the mean of each vector that was trained."""
        return state | means

    def merges_means(self) -> bool:
        """True if a round needs only the weighted means of its updates: `merge` is the one above."""
        return type(self).merge is Method.merge and self.merging is None

    def model(self, state: Arrays) -> Arrays:
        """Returns the part of the state that prediction needs."""
        return state

    def report(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The accuracies that are reported, from those of the predictions."""
        return dict(scores)

    def own_prediction(self, client: str) -> str | None:
        """The prediction that only the client of this name uses; None if it uses the headline's."""
        return None

    def unsent(self) -> float:
        """Changes of an entry up to this size are sent in neither direction."""
        return 0.0

    def teaching(self, received: Models, name: str) -> Any:
        """Returns a model that gives pseudo-labels: its running mean if that was sent, or the model."""
        mean = MEAN_OF + name
        return received[mean] if mean in received else received[name]

    def cross_entropy(self, z: Tensor, y: Tensor) -> Tensor:
        """Returns ℓ(z, y), mean over the batch; with `prior`, of calibrated logits."""
        return cross_entropy(self.calibrated(z, y), y)

    def calibrated(self, z: Tensor, y: Tensor) -> Tensor:
        """Returns the logits that a cross-entropy on labels y is taken of: with `prior`, calibrated ones."""
        return calibrated(z, y) if self.prior == "batch" else z

    def rate(self, t: int) -> float | None:
        """Returns the share of the learning rate that round t has; None if all rounds have all of it."""
        if not self.falls and not self.lr_warmup:
            return None
        return share_of_rate(t, self.schedule, self.horizon, self.lr_warmup or 0)

    def local_optimiser(self, decay: float | None = None) -> Optimiser:
        """The optimiser of this method's descents; `decay` replaces the setting `weight_decay`."""
        clip = self.net.clip if self.clip is None else self.clip
        decay = self.weight_decay or 0.0 if decay is None else decay
        if self.optimiser == "adamw":
            return AdamW(self.lr, decay, clip)
        return SGD(self.lr, self.momentum, decay, clip, bool(self.nesterov))

    @property
    def falls(self) -> bool:
        """True if the learning rate falls over rounds."""
        return self.schedule not in (None, "constant")

    def require_one_optimiser(self) -> None:
        """Raises `UserError` for settings of one optimiser beside another."""
        if self.optimiser != "adamw":
            require(not self.nesterov or self.momentum > 0, "nesterov=true needs momentum: set momentum=0.9")
            return
        require(not self.nesterov, "nesterov=true is for SGD: leave it out with optimiser=adamw")
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        momentum = f"momentum={self.momentum}"
        require("momentum" not in given, f"{momentum} is for SGD: leave it out with optimiser=adamw")
        for name in self.learning_rates:
            require(
                name in given,
                f"{name}={getattr(self, name)} is made for SGD: optimiser=adamw needs another one, such as "
                f"{name}=0.001",
            )

    def require_rounds_after_warmup(self, rounds: int, name: str) -> None:
        """Raises `UserError` if the learning rate would still rise in the last round."""
        require(
            (self.lr_warmup or 0) < rounds,
            f"lr_warmup={self.lr_warmup} must be less than {name}={rounds}: the rate would never reach lr",
        )


def mean_steps(method: Method, clients: Sequence[Client], drawn: int) -> int:
    """Returns the mean number of steps of a round that draws `drawn` of the clients; at least 1."""
    total = sum(phase.length(client) for client in clients for phase in method.phases(client, 1))
    return max(1, round(drawn / len(clients) * total))


def require_float32(name: str, value: object) -> None:
    """Raises `UserError` if a number is infinite in the float32 of training, as 1e39 is."""
    beyond = isinstance(value, int | float) and abs(value) > LARGEST  # NaN is left to the checks of a setting
    require(not beyond, f"{name} must be at most {LARGEST:.1e}, the largest number of float32, got {value}")


def average(updates: Sequence[Update], merging: Merging | None = None, trim: float = TRIM) -> Arrays:
    """The mean of each vector over the clients that trained it, weighted by the samples that they used.

    `merging`: a statistic that takes the place of the mean.
    """
    names = dict.fromkeys(name for update in updates for name in update.arrays)
    by_name = {name: [update for update in updates if name in update.arrays] for name in names}
    return {
        name: merged([u.arrays[name] for u in found], [u.samples[name] for u in found], merging, trim)
        for name, found in by_name.items()
    }
