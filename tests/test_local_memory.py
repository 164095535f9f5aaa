"""Methods whose clients keep something, and steps that write in place."""

from dataclasses import dataclass

import numpy as np
import pytest
import small
import torch
from by_hand import order_end_to_end, order_of_epochs
from small import hassle

from fedhassle.local import Job, give_labels, prepare, step, train
from fedhassle.losses import cross_entropy
from fedhassle.method import Descent, Method, Phase, Stream, as_models
from fedhassle.randomness import generator

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
