"""Local training of one client, against plain loops."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedhassle.local import Job, endless_walk, epochs_walk, give_labels, prepare, step, train
from fedhassle.losses import cross_entropy
from fedhassle.method import Client, Descent, Method, Phase, Stream, as_models
from fedhassle.methods import FedAvg, Hassle
from fedhassle.nets import LeNet
from fedhassle.randomness import generator

QUICK = {"batch": 8, "epochs": 2}


def hassle(**settings):
    return Hassle(small.net(), **{**QUICK, "residual_steps": 5, **settings})


def trained(method, site, state=None, t=1, seed=0):
    state = method.initial(0) if state is None else state
    return train(method, site, method.message(state, site.client, t), None, t, seed)[0]


def order_of_epochs(n, batch, epochs, rng):
    """The documented walk, an index at a time: ⌈n/B⌉ full batches, filled up from the shuffle's start."""
    batches = []
    for _ in range(epochs):
        shuffled = rng.permutation(n).tolist()
        count = int(np.ceil(n / batch))
        cycled = [shuffled[i % n] for i in range(count * batch)]
        batches += [cycled[i * batch : (i + 1) * batch] for i in range(count)]
    return batches


def order_end_to_end(n, batch, steps, rng):
    """Shuffled passes end to end, cut into batches."""
    endless = []
    while len(endless) < steps * batch:
        endless += rng.permutation(n).tolist()
    return [endless[i * batch : (i + 1) * batch] for i in range(steps)]


# One client of FedAvg is a plain module and torch.optim.SGD


@pytest.mark.parametrize(("build", "clip"), [(LeNet, 0.1), (small.ConvNet, 0.0), (small.ConvNet, 0.3)])
@pytest.mark.parametrize("n", [20, 16, 5, 1])
def test_one_client_is_a_plain_module_with_torch_optim(build, clip, n):
    """The same batches and flips to `nn.Module`, `clip_grad_norm_` and `torch.optim.SGD`; BatchNorm as well.

    n = 20, 16, 5 and 1 with a batch of 8: an epoch of 3, 2, 1 and 1 steps. A client with fewer samples than
    a batch sees each of them several times in it.
    """
    data = small.dataset(flip=True)
    net = small.net(build)
    method = FedAvg(net, batch=8, epochs=3, lr=0.05, clip=clip)
    site = small.site(data, labelled=range(10, 10 + n), name="anna")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = build(net.shape, net.classes)
    start = net.flatten(module)
    update, kept = train(method, site, {"w": start}, None, t=4, seed=9)

    rng = generator(9, 4, "anna", "labelled")
    batches = order_of_epochs(n, 8, 3, rng)
    uniforms = rng.random((len(batches), 8, 3), dtype=np.float32)
    optimiser = torch.optim.SGD(module.parameters(), 0.05, 0.9)
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
    torch.testing.assert_close(update.arrays["w"], net.flatten(module), rtol=1e-5, atol=3e-6)
    assert (update.arrays["w"] - start).abs().max() > 3e-3  # it did train
    assert update.samples == {"w": n}
    assert update.losses["w"].item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert update.client is site.client and kept == {}


# Walks


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 4), st.integers(0, 99))
def test_walks_by_epochs(n, batch, epochs, seed):
    """Each epoch shows every sample, the surplus being the start of its own shuffle once more."""
    per_epoch = -(-n // batch)
    walk = epochs_walk(n, batch, epochs * per_epoch, np.random.default_rng(seed))
    assert walk.tolist() == order_of_epochs(n, batch, epochs, np.random.default_rng(seed))
    for epoch in walk.reshape(epochs, -1):
        counts = np.bincount(epoch, minlength=n)
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        assert (epoch[n:] == epoch[: len(epoch) - n]).all()


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 30), st.integers(0, 99))
def test_walks_end_to_end(n, batch, steps, seed):
    """Every n indices in a row, counted from the start, are a permutation."""
    walk = endless_walk(n, batch, steps, np.random.default_rng(seed))
    assert walk.shape == (steps, batch)
    flat = walk.reshape(-1)
    for i in range(0, len(flat) - n + 1, n):
        assert sorted(flat[i : i + n]) == list(range(n))
    assert walk.tolist() == order_end_to_end(n, batch, steps, np.random.default_rng(seed))


@given(st.integers(1, 500), st.integers(1, 128), st.integers(1, 10))
def test_the_length_of_a_phase(n, batch, epochs):
    """Ruling 7: ⌈n/B⌉ steps an epoch, so that 278 labels make 3 steps of 128."""
    walk = Stream("labelled", batch)
    assert Phase("p", (walk,), (), epochs=epochs).length(Client("k", n, 3)) == epochs * int(
        np.ceil(n / batch)
    )
    assert Phase("p", (walk,), (), steps=7).length(Client("k", n, 3)) == 7
    assert Phase("p", (Stream("labelled"),), (), epochs=10).length(Client("k", 278, 3)) == 30


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


class QuietNet(small.NoisyNet):
    """The same network without dropout."""

    def __init__(self, shape, classes, width=1.0):
        super().__init__(shape, classes, width)
        self.dropout = nn.Identity()


def test_dropout_in_an_own_network_is_reproducible(global_randomness):
    """The masks too depend on (seed, round, client, phase) alone, whatever the global state is."""
    method = FedAvg(small.net(small.NoisyNet), **QUICK)
    site = small.site(labelled=range(20))
    first = trained(method, site).arrays["w"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert torch.equal(trained(method, site).arrays["w"], first)
    assert not torch.equal(trained(method, site, seed=1).arrays["w"], first)
    quiet = FedAvg(small.net(QuietNet), **QUICK)
    assert torch.equal(quiet.initial(0)["w"], method.initial(0)["w"])
    assert not torch.equal(trained(quiet, site).arrays["w"], first)  # so there was dropout


# Pseudo-labels


def labelled_by_hand(method, state, site):
    """Eq. 5 on clean images, one image at a time; −1 below the threshold."""
    found = []
    for row in site.samples.unlabelled.tolist():
        pixels = site.samples.images[row].numpy().astype(np.float64) / 255
        x = torch.from_numpy(((pixels - 0.5) / 0.25).transpose(2, 0, 1).astype(np.float32))
        z = method.net.logits(state["w_S"], x[None])[0].double().numpy()
        sure = np.exp(z.max()) / np.exp(z).sum() >= method.threshold
        found.append(int(z.argmax()) if sure else -1)
    return found


def with_truth(site, truth):
    return site._replace(samples=site.samples._replace(truth=truth))


@pytest.mark.parametrize("pseudo_labels", ["round", "online"])
def test_true_labels_of_unlabelled_samples_never_influence_training(pseudo_labels):
    method = hassle(pseudo_labels=pseudo_labels)
    site = small.site(labelled=range(11), unlabelled=range(40, 61))
    first = trained(method, site)
    other = trained(method, with_truth(site, (site.samples.truth + 1) % 4))
    blind = trained(method, with_truth(site, None))
    assert small.same(first.arrays, other.arrays) and small.same(first.arrays, blind.arrays)
    assert small.same(first.losses, other.losses) and small.same(first.losses, blind.losses)
    assert blind.labelling is None
    assert not torch.equal(first.labelling, other.labelling)


def test_labels_given_once_a_round_are_counted_against_the_truth():
    """On clean images, although training flips and crops them."""
    method = Hassle(small.net(small.Linear), **QUICK, residual_steps=5)
    site = small.site(small.dataset(flip=True, crop=4), labelled=range(4), unlabelled=range(40, 61))
    state = method.initial(0)
    given = labelled_by_hand(method, state, site)
    assert len(set(given)) > 1
    right = sum(a == b for a, b in zip(given, site.samples.truth.tolist(), strict=True))
    assert trained(method, site, state).labelling.tolist() == [right, 21]
    truth = torch.tensor([(y + 1) % 4 if i % 3 else y for i, y in enumerate(given)])  # each third is right
    assert trained(method, with_truth(site, truth), state).labelling.tolist() == [7, 21]


def test_labels_below_the_threshold_count_as_not_given():
    """At a threshold of 1 an untrained network is sure of nothing: no label given, w_U keeps its weights."""
    method = hassle(threshold=1.0, mpa=False, gra=False)
    site = small.site(unlabelled=range(40, 61))
    state = method.initial(0)
    update = trained(method, site, state)
    assert update.labelling.tolist() == [0, 0]
    weights = method.net.weights
    assert torch.equal(update.arrays["w_U"][:weights], state["w_U"][:weights])
    assert update.losses["w_U"].item() == 0


@pytest.mark.parametrize("threshold", [0.0, 0.35])
def test_online_labels_are_counted_at_every_step(threshold):
    """Without augmentation a label is the same at each step: right and given follow from the walks alone.

    The dual walks 2 epochs of 3 batches of 8, the residual 5 batches: 88 labels in all.
    """
    settings = {"pseudo_labels": "online", "threshold": threshold, "residual_steps": 5}
    method = Hassle(small.net(small.Linear), **QUICK, **settings)
    site = small.site(unlabelled=range(40, 61), name="bo")
    state = method.initial(0)
    labels = np.array(labelled_by_hand(method, state, site))
    given, right = labels >= 0, labels == site.samples.truth.numpy()
    assert given.all() if threshold == 0 else 0 < given.sum() < 21
    dual = order_of_epochs(21, 8, 2, generator(0, 1, "bo", "unlabelled"))
    residual = order_end_to_end(21, 8, 5, generator(0, 1, "bo", "unlabelled residual"))
    expected = [sum(int(found[batch].sum()) for batch in dual + residual) for found in (right, given)]
    assert trained(method, site, state).labelling.tolist() == expected
    assert threshold or expected[1] == 88


def test_without_augmentation_online_labels_are_those_given_once():
    site = small.site(labelled=range(4), unlabelled=range(40, 61))
    once, online = (trained(hassle(pseudo_labels=when), site).arrays for when in ("round", "online"))
    assert small.same(once, online)
    site = small.site(small.dataset(flip=True, crop=3), unlabelled=range(40, 61))
    state = hassle().initial(1)
    once, online = (trained(hassle(pseudo_labels=when), site, state).arrays for when in ("round", "online"))
    assert not small.same(once, online)


# Memory, `then`, `draw`, several streams


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
        descent = Descent("w", self.loss, self.sgd())
        return (Phase("both", streams, (descent,), self.epochs, then=self.follow, draw=self.weight),)

    def weight(self, rng):
        return rng.uniform(0, 2, 1)

    def loss(self, local, received, labelled, unlabelled, c):
        assert (unlabelled.y == -1).all()  # no labels were asked for
        gap = local["w"](unlabelled.views[0]) - local["teacher"](unlabelled.views[1])
        return cross_entropy(local["w"](labelled.views[0]), labelled.y) + (c * gap.square()).mean()

    def follow(self, local, received):
        share = 1 / (local["s"] + 2)
        return {"teacher": local["teacher"].lerp(local["w"], share), "s": local["s"] + 1}

    def predict(self, state, x):
        return {"model": self.net.logits(state["w"], x)}


def tutored_by_hand(data, rows_l, rows_u, w, teacher, s, key, eta):
    """The same in float64 NumPy with a linear student: two epochs of ⌈10/6⌉ = 2 steps."""
    x = ((data.x_train / 255 - 0.5) / 0.25).reshape(len(data.x_train), -1)
    x = np.hstack([x, np.ones((len(x), 1))])  # (N, D + 1)
    classes = np.eye(4)[data.y_train]
    rng = generator(*key)
    order_l = order_of_epochs(len(rows_l), 6, 2, rng)
    rng.random((4, 6, 3), dtype=np.float32)  # the weak view's draws, which change nothing here
    order_u = order_end_to_end(len(rows_u), 4, 4, rng)
    rng.random((4, 4, 3), dtype=np.float32)
    rng.random((4, 4, 0), dtype=np.float32)
    draws = [rng.uniform(0, 2, 1) for _ in range(4)]
    v = np.zeros_like(w)
    for batch_l, batch_u, c in zip(order_l, order_u, draws, strict=True):
        x_l, x_u = x[rows_l[batch_l]], x[rows_u[batch_u]]
        e = np.exp(x_l @ w.T)
        p = e / e.sum(1, keepdims=True)
        gap = x_u @ w.T - x_u @ teacher.T
        g = (p - classes[rows_l[batch_l]]).T @ x_l / 6 + 2 * c * gap.T @ x_u / gap.size
        v = 0.9 * v + g
        w = w - eta * v
        teacher = teacher + (w - teacher) / (s + 2)
        s += 1
    return w, teacher, s


def test_a_method_with_memory_draws_and_two_streams_is_a_plain_loop():
    """Two rounds: the teacher and its steps go on where they were, the student starts from what is sent."""
    data, side = small.dataset(side=3), 9
    net = small.net(small.Linear, side=3)
    method = Tutored(net, epochs=2, lr=0.01, clip=0)
    site = small.site(data, labelled=range(10), unlabelled=range(20, 27), name="cy")

    def matrix(vector):
        return np.hstack([vector[: 4 * side].reshape(4, side), vector[4 * side :, None]])  # (M, D + 1)

    w = matrix(net.initial(0).double().numpy())
    teacher, s, kept = w, 0, None
    for t in (1, 2):
        message = {"w": net.initial(t - 1)}
        update, kept = train(method, site, message, kept, t, seed=0)
        start = matrix(message["w"].double().numpy())
        rows_l, rows_u = np.arange(10), np.arange(20, 27)
        w, teacher, s = tutored_by_hand(data, rows_l, rows_u, start, teacher, s, (0, t, "cy", "both"), 0.01)
        assert update.arrays.keys() == {"w"} and kept.keys() == {"teacher", "s"}
        np.testing.assert_allclose(matrix(update.arrays["w"].numpy()), w, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(matrix(kept["teacher"].numpy()), teacher, rtol=1e-4, atol=1e-5)
        assert kept["s"].tolist() == [s] == [4 * t]
        assert update.samples == {"w": 17}
        assert np.abs(teacher - w).max() > 1e-3  # the teacher is not the student


def test_a_teacher_is_in_evaluation_mode_and_follows_with_its_statistics():
    """One step, s = 0: teacher = (start + student)/2, statistics too, which its own passes do not move."""
    method = Tutored(small.net(), epochs=1)
    site = small.site(labelled=range(6), unlabelled=range(20, 27))
    message = method.initial(0)
    update, kept = train(method, site, message, None, 1, seed=0)
    student, start = update.arrays["w"], message["w"]
    torch.testing.assert_close(kept["teacher"], (start + student) / 2)
    statistics = method.net.weights
    assert (student - start)[statistics:].abs().max() > 0.01


# What lanes rely on


@pytest.mark.parametrize("phase", ["labelled", "labelled residual", "unlabelled", "unlabelled residual"])
@pytest.mark.parametrize("online", [False, True])
def test_a_step_writes_its_buffers_in_place(phase, online):
    """A captured step reads and writes fixed addresses: none may be replaced by a new tensor."""
    method = hassle(pseudo_labels="online" if online else "round")
    site = small.site(small.dataset(flip=True, crop=2), labelled=range(11), unlabelled=range(40, 61))
    message, networks = method.initial(0), method.networks()
    phases = method.phases(site.client, 1)
    labels = give_labels(phases, site, as_models(message, networks))
    (chosen,) = (p for p in phases if p.name == phase)
    job = Job(chosen, site, networks, message, labels, (0, 1, "here", phase))
    buffers = prepare(job, message, {})
    assert all(v.data_ptr() != message[k].data_ptr() for k, v in buffers.weights.items())

    def places():
        written = (buffers.weights, buffers.statistics, buffers.momentum, buffers.losses)
        tensors = [tensor for arrays in written for tensor in arrays.values()]
        return [tensor.data_ptr() for tensor in (*tensors, buffers.labelling, buffers.step)]

    before, first = places(), {k: v.clone() for k, v in buffers.weights.items()}
    for count in (1, 2, 3):
        step(job, buffers)
        assert places() == before
        assert buffers.step.tolist() == [count]
    assert all(not torch.equal(buffers.weights[k], first[k]) for k in first)
    assert all(not v.requires_grad for v in buffers.weights.values())


def test_memory_is_written_in_place_too():
    net = small.net(small.Linear, side=3)
    method = Tutored(net, epochs=2)
    site = small.site(small.dataset(side=3), labelled=range(10), unlabelled=range(20, 27))
    message = method.initial(0)
    kept = method.memory(site.client, message)
    (phase,) = method.phases(site.client, 1)
    job = Job(phase, site, method.networks(), message, {}, (0,))
    buffers = prepare(job, message | kept, kept)
    before = {k: v.data_ptr() for k, v in buffers.weights.items()}
    step(job, buffers)
    step(job, buffers)
    assert {k: v.data_ptr() for k, v in buffers.weights.items()} == before
    assert buffers.weights["s"].tolist() == [2] and kept["s"].tolist() == [0]


def test_settings_of_a_method_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hassle().lr = 1.0
