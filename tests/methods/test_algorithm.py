"""The optimiser (ruling 9), and three rounds of Algorithm 1 (Eqs. 3, 4 and 9 in the engine) in NumPy."""

import numpy as np
import pytest
import small
import torch
from by_hand import NET, B, ce_gradient, f, other_way, pull_back, softmax

from fedhassle.engine.client import train
from fedhassle.engine.descent import descend, fresh_state
from fedhassle.methods import Hassle
from fedhassle.methods.hassle import SUPERVISED, UNSUPERVISED
from fedhassle.optimiser import SGD, AdamW


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_clips_then_decays_then_adds_momentum(clip, decay, nesterov, rng):
    """First g ← g·min(1, c/‖g‖); g ← g + δ·w; v ← m·v + g; w ← w − η·v: decay is not clipped.

    With Nesterov, w ← w − η·(g + m·v).
    """
    w = rng.normal(size=8)
    v = np.zeros(8)
    weights, momentum = torch.from_numpy(w.copy()), torch.zeros(8, dtype=torch.float64)
    for _ in range(4):
        g = rng.normal(size=8)  # norm about 2.8
        sgd = SGD(0.1, 0.9, decay, clip, nesterov)
        descend(weights, (momentum,), torch.from_numpy(g.copy()), sgd)
        if clip:
            g = g * min(1.0, clip / np.sqrt((g**2).sum()))
        g = g + decay * w
        v = 0.9 * v + g
        w = w - 0.1 * (g + 0.9 * v if nesterov else v)
        np.testing.assert_allclose(weights.numpy(), w, rtol=1e-5)  # 1e-6 is added to ‖g‖, as in PyTorch
        np.testing.assert_allclose(momentum.numpy(), v, rtol=1e-5)


def test_clipping_a_zero_gradient_keeps_it_zero():
    w = torch.ones(3)
    descend(w, (torch.zeros(3),), torch.zeros(3), SGD(0.1, 0.9, 0.0, 1.0))
    assert w.tolist() == [1, 1, 1]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("share", [None, 0.25])
def test_adamw_is_the_formula_of_its_paper(clip, share, rng):
    """Loshchilov and Hutter (2019), Algorithm 2, where the share of the rate is η_t and lr is α.

    m ← β₁·m + (1 − β₁)·g; v ← β₂·v + (1 − β₂)·g²; m̂ = m/(1 − β₁^s); v̂ = v/(1 − β₂^s);
    w ← w − η_t·α·(m̂/(√v̂ + ε) + λ·w). The decay is neither clipped nor part of the moments.
    """
    adamw = AdamW(0.01, decay=0.1, clip=clip, beta1=0.8, beta2=0.95, epsilon=1e-3)
    w, m, v = rng.normal(size=8), np.zeros(8), np.zeros(8)
    weights = torch.from_numpy(w.copy())
    state = fresh_state(adamw, weights)
    rate = None if share is None else torch.tensor(share, dtype=torch.float64)
    for s in range(1, 6):
        g = rng.normal(size=8)
        descend(weights, state, torch.from_numpy(g.copy()), adamw, rate)
        if clip:
            g = g * min(1.0, clip / np.sqrt((g**2).sum()))
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        m_hat, v_hat = m / (1 - 0.8**s), v / (1 - 0.95**s)
        w = w - (1.0 if share is None else share) * 0.01 * (m_hat / (np.sqrt(v_hat) + 1e-3) + 0.1 * w)
        np.testing.assert_allclose(weights.numpy(), w, rtol=1e-6 if clip else 1e-12)


def numpy_round(state, clients, eta, gamma, lam, tau, delta, with_residual):
    """Algorithm 1's round, where a client takes one full-batch step per model (Eqs. 1 to 4 and 6 to 12).

    With the script's target (ruling 3) the other side stands for its w^(t−1) + r^(t) where it has them.
    """
    found = {}
    for (x_l, y_l), x_u in clients:
        known = state.get("w_S_before")
        z = f(x_u, state["w_S"]) if known is None else f(x_u, known) + f(x_u, state["r_US"])
        for x, y, (dual, other, residual, other_residual) in (
            (x_l, y_l, other_way(SUPERVISED)),
            (x_u, z.argmax(1), other_way(UNSUPERVISED)),
        ):
            if not len(x):
                continue
            w, r = state[dual], state[residual]
            step = pull_back(x, ce_gradient(f(x, w), y)) + 2 * gamma * (w - state[other])
            found.setdefault(dual, []).append((len(x), w - eta * step))
            other_logits = f(x, state[other])
            if with_residual and f"{other}_before" in state:
                other_logits = f(x, state[f"{other}_before"]) + f(x, state[other_residual])
            p, q = softmax((other_logits - f(x, w)) / tau), softmax(f(x, r) / tau)
            step = pull_back(x, ce_gradient(f(x, w) + f(x, r), y) + lam * (q - p) / (tau * len(x)))
            found.setdefault(residual, []).append((len(x), r - eta * (step + delta * r)))
    merged = {k: sum(n * w for n, w in v) / sum(n for n, _ in v) for k, v in found.items()}
    return state | merged | {"w_S_before": state["w_S"], "w_U_before": state["w_U"]}


@pytest.mark.parametrize("with_residual", [False, True])
def test_three_rounds_of_algorithm_1_by_hand(with_residual):
    """Three clients whose data is one batch: every model takes one step per round, so momentum has no effect.

    With a batch of n the one epoch is one step over all n samples. A residual takes one step as well, and
    its batch of n holds each sample once. The three rounds pass through Eq. 5 (round 1) and Eq. 11.
    """
    data = small.dataset(side=3)
    holdings = [(range(0, 8), ()), (range(8, 16), range(16, 24)), ((), range(24, 32))]
    hyper = {"gamma": 0.05, "lam": 0.7, "tau": 2.0}
    steps = {"batch": 8, "epochs": 1, "lr": 0.05, "clip": 0, "residual_steps": 1, "residual_decay": 0.01}
    target = "with_residual" if with_residual else "difference"
    method = Hassle(NET, residual_target=target, **steps, **hyper)
    state = method.initial(4)
    expected = {k: v.double().numpy() for k, v in state.items()}
    pixels = (data.x_train.astype(np.float64) / 255 - 0.5) / 0.25
    x = pixels.transpose(0, 3, 1, 2)
    clients = [((x[list(a)], data.y_train[list(a)]), x[list(b)]) for a, b in holdings]
    for t in (1, 2, 3):
        updates = []
        for k, (labelled, unlabelled) in enumerate(holdings):
            here = small.site(data, labelled, unlabelled, name=f"client {k}")
            updates.append(train(method, here, method.message(state, here.client, t), None, t, seed=0)[0])
        state = method.merge(state, updates, t, np.random.default_rng(0))
        expected = numpy_round(expected, clients, 0.05, delta=0.01, with_residual=with_residual, **hyper)
        assert state.keys() == expected.keys()
        for name, vector in expected.items():
            np.testing.assert_allclose(state[name].numpy(), vector, rtol=1e-4, atol=2e-6, err_msg=name)
    test_pixels = torch.from_numpy(x[:B].astype(np.float32))
    found = method.predict(state, test_pixels)
    s = f(x[:B], expected["w_S_before"]) + f(x[:B], expected["r_US"])
    u = f(x[:B], expected["w_U_before"]) + f(x[:B], expected["r_SU"])
    for name, z in (("SM", s), ("UM", u), ("EM", (s + u) / 2)):
        np.testing.assert_allclose(found[name].numpy(), z, rtol=1e-4, atol=1e-5, err_msg=name)
