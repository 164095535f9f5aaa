"""Methods whose clients keep arrays between rounds, and steps that write in place."""

import itertools

import numpy as np
import pytest
import small
import torch
from by_hand import order_end_to_end, order_of_epochs
from small import Tutored, hassle
from torch.utils import _pytree as pytree

from fedhassle.engine.client import advance, prepare, train, visit
from fedhassle.engine.job import draw
from fedhassle.randomness import generator

# Memory, `then`, `draw`, several streams


def tutored_by_hand(data, rows_l, rows_u, w, teacher, s, key, eta):
    """`Tutored` in float64 NumPy with a linear student: two epochs of ⌈10/6⌉ = 2 steps."""
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
    """Two rounds: the teacher and its steps continue, the student starts from the message."""
    data, side = small.dataset(side=3), 9
    net = small.net(small.Linear, side=3)
    method = Tutored(net, epochs=2, lr=0.01, clip=0)
    site = small.site(data, labelled=range(10), unlabelled=range(20, 27), name="cy")

    def matrix(vector):
        """(M, D + 1): the 36 entries of W take the room of 40, the 4 of b that of 8."""
        assert vector.shape == (48,) and not vector[36:40].any() and not vector[44:].any()
        return np.hstack([vector[:36].reshape(4, side), vector[40:44, None]])

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
    """One step, s = 0: teacher = (start + student)/2, with statistics, which its own passes do not change."""
    method = Tutored(small.net(), epochs=1)
    site = small.site(labelled=range(6), unlabelled=range(20, 27))
    message = method.initial(0)
    update, kept = train(method, site, message, None, 1, seed=0)
    student, start = update.arrays["w"], message["w"]
    torch.testing.assert_close(kept["teacher"], (start + student) / 2)
    statistics = method.net.n_weights
    assert (student - start)[statistics:].abs().max() > 0.01


def test_a_stream_without_labels_has_none():
    site = small.site(labelled=range(6), unlabelled=range(20, 27))
    (job,) = visit(Tutored(small.net(), epochs=2), site, {"w": small.net().initial(0)}, None, 1, 0).jobs
    labelled, unlabelled = draw(job).feeds
    assert (unlabelled.y == -1).all() and unlabelled.y.shape == (2, 4)
    assert torch.equal(unlabelled.truth, torch.from_numpy(small.dataset().y_train)[unlabelled.rows])
    assert torch.equal(labelled.y, labelled.truth) and (labelled.y >= 0).all()


# Requirements of lanes


def places(buffers):
    """Addresses of the tensors that a step writes."""
    written = (buffers.weights, buffers.statistics, buffers.optimiser, buffers.losses, buffers.labelling)
    return [tensor.data_ptr() for tensor in pytree.tree_leaves(written)]


@pytest.mark.parametrize("phase", ["labelled", "labelled residual", "unlabelled", "unlabelled residual"])
@pytest.mark.parametrize("online", [False, True])
def test_a_step_writes_its_buffers_in_place(phase, online):
    """A captured step reads and writes fixed addresses: none may be replaced by a new tensor."""
    method = hassle(pseudo_labels="online" if online else "round")
    site = small.site(small.dataset(flip=True, crop=2), labelled=range(11), unlabelled=range(40, 61))
    message = method.initial(0)
    (job,) = (job for job in visit(method, site, message, None, 1, 0).jobs if job.phase.name == phase)
    buffers, schedule = prepare(job, message, {}), draw(job)
    assert all(v.data_ptr() != message[k].data_ptr() for k, v in buffers.weights.items())
    before, first = places(buffers), {k: v.clone() for k, v in buffers.weights.items()}
    for i in range(3):
        advance(job, buffers, schedule.between(i, i + 1))
        assert places(buffers) == before
    assert all(not torch.equal(buffers.weights[k], first[k]) for k in first)
    assert all(not v.requires_grad for v in buffers.weights.values())
    given = 3 * 8 if online and job.phase.streams[0].part == "unlabelled" else 0
    assert buffers.labelling[1] == given


def test_memory_is_written_in_place_too():
    net = small.net(small.Linear, side=3)
    site = small.site(small.dataset(side=3), labelled=range(10), unlabelled=range(20, 27))
    message = {"w": net.initial(0)}
    planned = visit(Tutored(net, epochs=2), site, message, None, 1, 0)
    (job,), kept = planned.jobs, planned.kept
    buffers = prepare(job, message | kept, kept)
    before = places(buffers)
    advance(job, buffers, draw(job).between(0, 2))
    assert places(buffers) == before
    assert buffers.weights["s"].tolist() == [2] and kept["s"].tolist() == [0]


@pytest.mark.parametrize("cuts", [(0, 3, 4), (0, 1, 2, 3, 4)])
def test_steps_in_one_call_equal_steps_one_by_one(cuts):
    """Batches of several steps are computed at once, with the same bits for any grouping."""
    method = Tutored(small.net(), epochs=2)
    site = small.site(small.dataset(flip=True, crop=2), labelled=range(10), unlabelled=range(20, 27))
    message = method.initial(0)
    planned = visit(method, site, message, None, 1, 0)
    (job,), kept = planned.jobs, planned.kept
    schedule, made = draw(job), []
    for marks in ((0, 4), cuts):
        buffers = prepare(job, message | kept, kept)
        for first, last in itertools.pairwise(marks):
            assert schedule.between(first, last).steps == last - first
            advance(job, buffers, schedule.between(first, last))
        made.append(buffers)
    assert job.steps == schedule.steps == 4
    for one, other in zip(*map(pytree.tree_leaves, made), strict=True):
        assert torch.equal(one, other)
