"""Each equation of the paper against a literal transcription in float64 NumPy.

The networks are linear, f(x; w) = W·x + b with w = (W, b) in one vector, so that f is a matrix product and
its gradient is by hand: with G the gradient of a loss by the logits (B, M), ∂W = Gᵀ·X and ∂b = Σ_i G_i.
"""

import numpy as np
import pytest
import small
import torch

from fedhassle.local import descend, train
from fedhassle.losses import cross_entropy, hard_labels, kl_divergence
from fedhassle.method import SGD, Batch, Client, Update, as_models, average
from fedhassle.methods import FedAvg, FedProx, Hassle
from fedhassle.methods.hassle import SUPERVISED, UNSUPERVISED
from fedhassle.vectors import distance, mean, squared_distance

B, M, D = 6, 4, 9  # batch, classes, pixels of a 3×3 image
NET = small.net(small.Linear, side=3)
SIDES = pytest.mark.parametrize("side", [SUPERVISED, UNSUPERVISED], ids=["S", "U"])


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def f(x, w):
    """The logits (B, M) of images (B, 1, 3, 3)."""
    return x.reshape(len(x), D) @ w[: M * D].reshape(M, D).T + w[M * D :]


def pull_back(x, G):
    """The gradient by w of a loss whose gradient by the logits is G."""
    return np.concatenate([(G.T @ x.reshape(len(x), D)).reshape(-1), G.sum(0)])


def ce(z, y):
    """ℓ, a sample with y = −1 counting as zero in the sum and as one in the batch."""
    each = [-np.log(softmax(z)[i, y[i]]) if y[i] >= 0 else 0.0 for i in range(len(y))]
    return sum(each) / len(y)


def ce_gradient(z, y):
    one_hot = np.array([[float(y[i] == m) for m in range(z.shape[1])] for i in range(len(y))])
    return (softmax(z) - one_hot) * (y >= 0)[:, None] / len(y)


def kl(p, q):
    """KL(p ‖ q) = Σ_m p_m·log(p_m/q_m), mean over the batch."""
    return sum(p[i, m] * np.log(p[i, m] / q[i, m]) for i in range(len(p)) for m in range(M)) / len(p)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def world(rng):
    """A batch, and every vector of HASSLE, drawn at random in float64."""
    names = ("w_S", "w_U", "r_US", "r_SU", "w_S_before", "w_U_before", "local")
    vectors = {name: rng.normal(size=M * D + M) for name in names}
    return rng.normal(size=(B, 1, 3, 3)), np.array([0, 3, -1, 1, 1, 2]), vectors


def gradient(loss, weights):
    """The value and the gradient by the weights of loss(weights)."""
    leaf = torch.from_numpy(weights).requires_grad_()
    value = loss(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0].numpy()


def received(method, vectors):
    return as_models({k: torch.from_numpy(v) for k, v in vectors.items()}, method.networks())


def descended(method, loss, name, world):
    """The value and the gradient of one of HASSLE's losses by the vector `name`, which stands at `local`."""
    x, y, vectors = world
    known = received(method, vectors)
    batch = Batch((torch.from_numpy(x),), torch.from_numpy(y))
    return gradient(lambda leaf: loss({name: known[name].at(leaf)}, known, batch), vectors["local"])


# Averages: Eqs. 1, 2 and 10


def update(client, samples, **arrays):
    tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
    return Update(client, tensors, {k: samples[k] for k in arrays}, {})


@pytest.mark.parametrize("method", [FedAvg(NET), Hassle(NET, gra=False)], ids=["fedavg", "hassle"])
def test_eqs_1_and_2_are_means_by_samples_over_those_who_have_them(method, rng):
    """Σ n_k·w_k / Σ n_k over A_L for w_S, over A_U for w_U; what nobody trained stays."""
    a, b, c, u1, u2, old = rng.normal(size=(6, 5))
    updates = [
        update(Client("full", 7, 0), {"w_S": 7}, w_S=a),
        update(Client("partial", 2, 30), {"w_S": 2, "w_U": 30}, w_S=b, w_U=u1),
        update(Client("other", 5, 11), {"w_S": 5, "w_U": 11}, w_S=c, w_U=u2),
    ]
    state = {k: torch.from_numpy(old) for k in ("w_S", "w_U", "else")}
    merged = method.merge(state, updates, 5, rng)
    np.testing.assert_allclose(merged["w_S"].numpy(), (7 * a + 2 * b + 5 * c) / 14, rtol=1e-13)
    np.testing.assert_allclose(merged["w_U"].numpy(), (30 * u1 + 11 * u2) / 41, rtol=1e-13)
    assert torch.equal(merged["else"], state["else"])
    assert torch.equal(state["w_S"], torch.from_numpy(old))  # the state before is not written to


def test_eq_10_averages_each_residual_by_the_samples_of_its_side(rng):
    """r_{U−S} = Σ n_L,k·r_k / Σ n_L,k, and r_{S−U} with n_U,k."""
    r1, r2, s1, s2, old = rng.normal(size=(5, 5))
    updates = [
        update(Client("a", 9, 1), {"r_US": 9, "r_SU": 1}, r_US=r1, r_SU=s1),
        update(Client("b", 3, 4), {"r_US": 3, "r_SU": 4}, r_US=r2, r_SU=s2),
    ]
    state = {k: torch.from_numpy(old) for k in ("w_S", "w_U", "r_US", "r_SU")}
    merged = Hassle(NET).merge(state, updates, 5, rng)
    np.testing.assert_allclose(merged["r_US"].numpy(), (9 * r1 + 3 * r2) / 12, rtol=1e-13)
    np.testing.assert_allclose(merged["r_SU"].numpy(), (1 * s1 + 4 * s2) / 5, rtol=1e-13)


def test_the_mean_of_one_is_the_one_bit_for_bit(rng):
    """n·w/n: normalised weights (n/n = 1) leave no rounding, unlike (n·w)/n in float32 for n = 49."""
    w = torch.from_numpy(rng.normal(size=100).astype(np.float32))
    assert torch.equal(mean([w], [49]), w)
    assert torch.equal(average([Update(Client("k", 49, 0), {"w": w}, {"w": 49}, {})])["w"], w)


# Pseudo-labels: Eqs. 5 and 11


def test_eq_5_is_the_argmax_of_the_supervised_model(world):
    """ŷ = argmax_j f(u, w_S)_j as long as there is no residual."""
    x, _, vectors = world
    for method, known in (
        (Hassle(NET, gra=False), ("w_S", "w_U")),
        (Hassle(NET), ("w_S", "w_U", "r_US", "r_SU")),  # round 1: no residual was trained yet
    ):
        y = method.pseudo_label(received(method, {k: vectors[k] for k in known}), torch.from_numpy(x))
        assert y.tolist() == f(x, vectors["w_S"]).argmax(1).tolist()


def test_eq_11_adds_the_residual_to_the_model_that_it_was_trained_against(world):
    """ŷ = argmax_j f(u, w_S^(t−1))_j + f(u, r_{U−S}^(t))_j."""
    x, _, vectors = world
    method = Hassle(NET)
    expected = (f(x, vectors["w_S_before"]) + f(x, vectors["r_US"])).argmax(1)
    others = [f(x, vectors["w_S"]).argmax(1), (f(x, vectors["w_S"]) + f(x, vectors["r_US"])).argmax(1)]
    assert all((expected != other).any() for other in others)  # else the test could not tell
    assert method.pseudo_label(received(method, vectors), torch.from_numpy(x)).tolist() == expected.tolist()


def test_a_threshold_leaves_samples_without_a_label(world):
    """Confidence max_j σ(z)_j: of (ln 3, 0) exactly 3/4, of (0, 0) 1/2; on the threshold counts."""
    z = torch.tensor([[np.log(3.0), 0.0], [0.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    assert hard_labels(z).tolist() == [0, 0, 1]
    assert hard_labels(z, 0.5).tolist() == [0, 0, 1]
    assert hard_labels(z, 0.7).tolist() == [0, -1, 1]
    assert hard_labels(z, 0.9).tolist() == [-1, -1, 1]
    x, _, vectors = world
    logits = f(x, vectors["w_S_before"]) + f(x, vectors["r_US"])
    threshold = float(np.median(softmax(logits).max(1)))
    expected = np.where(softmax(logits).max(1) >= threshold, logits.argmax(1), -1)
    assert 0 < (expected == -1).sum() < B
    method = Hassle(NET, threshold=threshold)
    assert method.pseudo_label(received(method, vectors), torch.from_numpy(x)).tolist() == expected.tolist()


# Residuals: Eqs. 6 to 9


def other_way(side):
    """The names of one side and of the other, spelt out: r_{U−S} adds to w_S what w_U knows."""
    return ("w_S", "w_U", "r_US", "r_SU") if side is SUPERVISED else ("w_U", "w_S", "r_SU", "r_US")


@SIDES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("tau", "lam"), [(2.0, 1.0), (1.0, 0.3), (0.5, 2.0)])
def test_eqs_6_to_9_are_the_loss_of_a_residual(side, with_residual, tau, lam, world):
    """L_CE + λ·L_res, with z = f(x; w_S) and r = f(x; r_{U−S}).

    Eq. 6: d = f(x; w_U) − z [+ f(x; r_{S−U}) with the script's target].
    Eq. 7 (ruling 4): L_res = KL(σ(d/τ) ‖ σ(r/τ)), batch mean; by r: (σ(r/τ) − σ(d/τ))/(τ·B).
    Eq. 8: L_CE = ℓ(z + r, y); by r: (σ(z + r) − onehot y)/B.
    """
    x, y, vectors = world
    dual, other, residual, other_residual = other_way(side)
    z, r = f(x, vectors[dual]), f(x, vectors["local"])
    d = f(x, vectors[other]) - z + (f(x, vectors[other_residual]) if with_residual else 0)
    p, q = softmax(d / tau), softmax(r / tau)
    target = "with_residual" if with_residual else "difference"
    method = Hassle(NET, tau=tau, lam=lam, residual_target=target)
    value, grad = descended(method, lambda *a: method.residual_loss(side, *a), residual, world)
    np.testing.assert_allclose(value, ce(z + r, y) + lam * kl(p, q), rtol=1e-12)
    np.testing.assert_allclose(
        grad, pull_back(x, ce_gradient(z + r, y) + lam * (q - p) / (tau * B)), rtol=1e-10, atol=1e-14
    )


def test_the_divergence_is_of_the_student_from_the_target():
    """For p = (3/4, 1/4), q = (1/2, 1/2): KL(p ‖ q) = ¾·ln(3/2) + ¼·ln(1/2) = 0.1308, KL(q ‖ p) = 0.1438."""
    target, z = torch.tensor([[np.log(3.0), 0.0]]), torch.zeros(1, 2, dtype=torch.float64)
    expected = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert kl_divergence(target.double(), z).item() == pytest.approx(expected, rel=1e-6)


# Dual models: Eq. 12, and FedProx


def test_samples_without_a_label_count_as_zero_and_as_a_sample(rng):
    """ℓ = −log σ(z)_y over the batch of B, where y = −1 adds 0; none labelled: zero loss and gradient."""
    z, y = rng.normal(size=(5, 3)), np.array([2, -1, 0, -1, 1])
    value, grad = gradient(lambda leaf: cross_entropy(leaf, torch.from_numpy(y)), z)
    np.testing.assert_allclose(value, ce(z, y), rtol=1e-13)
    np.testing.assert_allclose(grad, ce_gradient(z, y), rtol=1e-12, atol=1e-16)
    value, grad = gradient(lambda leaf: cross_entropy(leaf, torch.full((5,), -1)), z)
    assert value == 0 and (grad == 0).all()


@SIDES
@pytest.mark.parametrize("proximity", ["squared", "norm"])
def test_eq_12_is_the_loss_of_a_dual(side, proximity, world):
    """ℓ(f(x; w), y) + γ·‖w − w'‖² (by w: 2γ(w − w')) or γ·‖w − w'‖ (by w: γ(w − w')/‖w − w'‖)."""
    x, y, vectors = world
    dual, other, *_ = other_way(side)
    gamma, w = 0.3, vectors["local"]
    gap = w - vectors[other]
    length = np.sqrt(sum(g * g for g in gap))
    term, by_w = (length**2, 2 * gap) if proximity == "squared" else (length, gap / length)
    method = Hassle(NET, gamma=gamma, proximity=proximity)
    value, grad = descended(method, lambda *a: method.dual_loss(side, *a), dual, world)
    np.testing.assert_allclose(value, ce(f(x, w), y) + gamma * term, rtol=1e-12)
    np.testing.assert_allclose(
        grad, pull_back(x, ce_gradient(f(x, w), y)) + gamma * by_w, rtol=1e-10, atol=1e-14
    )
    method = Hassle(NET, mpa=False)
    value, grad = descended(method, lambda *a: method.dual_loss(side, *a), dual, world)
    np.testing.assert_allclose(value, ce(f(x, w), y), rtol=1e-12)
    np.testing.assert_allclose(grad, pull_back(x, ce_gradient(f(x, w), y)), rtol=1e-10, atol=1e-14)


def test_fedprox_adds_half_mu_times_the_squared_distance(world):
    """ℓ(f(x; w), y) + μ/2·‖w − w^(t)‖²; by w: μ(w − w^(t))."""
    x, y, vectors = world
    w, gap = vectors["local"], vectors["local"] - vectors["w_S"]
    method = FedProx(NET, mu=0.4)
    vectors["w"] = vectors["w_S"]
    value, grad = descended(method, method.loss, "w", world)
    np.testing.assert_allclose(value, ce(f(x, w), y) + 0.4 / 2 * (gap**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(
        grad, pull_back(x, ce_gradient(f(x, w), y)) + 0.4 * gap, rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("proximity", ["squared", "norm"])
def test_proximity_is_over_parameters_and_leaves_batchnorm_statistics_out(proximity, rng):
    """The parameters lie at a distance of 0.5 in one entry; the statistics, far apart, do not count."""
    net = small.net(small.ConvNet)
    w_S, w_U = net.initial(0), net.initial(0)
    w_U[5] += 0.5
    w_U[net.weights :] += 3.0
    x = torch.from_numpy(rng.normal(size=(4, 1, 12, 12)).astype(np.float32))
    batch = Batch((x,), torch.tensor([0, 1, 2, 3]))

    def loss(gamma):
        method = Hassle(net, gamma=gamma, proximity=proximity)
        known = as_models({"w_S": w_S, "w_U": w_U}, method.networks())
        return method.dual_loss(SUPERVISED, known, known, batch).item()

    assert loss(100.0) - loss(0.0) == pytest.approx(25.0 if proximity == "squared" else 50.0, rel=1e-5)


@pytest.mark.parametrize("measure", [squared_distance, distance])
def test_at_zero_distance_the_gradient_is_zero_and_not_nan(measure, rng):
    w = rng.normal(size=7)
    value, grad = gradient(lambda leaf: measure(leaf, torch.from_numpy(w)), w)
    assert value == 0 and (grad == 0).all()


# The optimiser (ruling 9), and Eqs. 3, 4 and 9 in the engine


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_clips_then_decays_then_adds_momentum(clip, decay, rng):
    """First g ← g·min(1, c/‖g‖); g ← g + δ·w; v ← m·v + g; w ← w − η·v: decay is not clipped."""
    w = rng.normal(size=8)
    v = np.zeros(8)
    weights, momentum = torch.from_numpy(w.copy()), torch.zeros(8, dtype=torch.float64)
    for _ in range(4):
        g = rng.normal(size=8)  # norm about 2.8
        descend(weights, momentum, torch.from_numpy(g.copy()), SGD(0.1, 0.9, decay, clip))
        if clip:
            g = g * min(1.0, clip / np.sqrt((g**2).sum()))
        v = 0.9 * v + (g + decay * w)
        w = w - 0.1 * v
        np.testing.assert_allclose(weights.numpy(), w, rtol=1e-5)  # 1e-6 is added to ‖g‖, as in PyTorch
        np.testing.assert_allclose(momentum.numpy(), v, rtol=1e-5)


def test_clipping_a_zero_gradient_keeps_it_zero():
    w = torch.ones(3)
    descend(w, torch.zeros(3), torch.zeros(3), SGD(0.1, 0.9, 0.0, 1.0))
    assert w.tolist() == [1, 1, 1]


def numpy_round(state, clients, eta, gamma, lam, tau, delta):
    """Algorithm 1's round, where a client takes one full-batch step per model (Eqs. 1 to 4 and 6 to 12)."""
    found = {}
    for (x_l, y_l), x_u in clients:
        known = state.get("w_S_before")
        z = f(x_u, state["w_S"]) if known is None else f(x_u, known) + f(x_u, state["r_US"])
        for x, y, (dual, other, residual, _) in (
            (x_l, y_l, other_way(SUPERVISED)),
            (x_u, z.argmax(1), other_way(UNSUPERVISED)),
        ):
            if not len(x):
                continue
            w, r = state[dual], state[residual]
            step = pull_back(x, ce_gradient(f(x, w), y)) + 2 * gamma * (w - state[other])
            found.setdefault(dual, []).append((len(x), w - eta * step))
            p, q = softmax((f(x, state[other]) - f(x, w)) / tau), softmax(f(x, r) / tau)
            step = pull_back(x, ce_gradient(f(x, w) + f(x, r), y) + lam * (q - p) / (tau * len(x)))
            found.setdefault(residual, []).append((len(x), r - eta * (step + delta * r)))
    merged = {k: sum(n * w for n, w in v) / sum(n for n, _ in v) for k, v in found.items()}
    return state | merged | {"w_S_before": state["w_S"], "w_U_before": state["w_U"]}


def test_three_rounds_of_algorithm_1_by_hand():
    """Three clients whose data is one batch: every model takes one step a round, momentum does not show.

    With a batch of n the one epoch is one step over all n samples. A residual takes one step as well, and
    its batch of n holds each sample once. The three rounds pass through Eq. 5 (round 1) and Eq. 11.
    """
    data = small.dataset(side=3)
    holdings = [(range(0, 8), ()), (range(8, 16), range(16, 24)), ((), range(24, 32))]
    hyper = {"gamma": 0.05, "lam": 0.7, "tau": 2.0}
    method = Hassle(NET, batch=8, epochs=1, lr=0.05, clip=0, residual_steps=1, residual_decay=0.01, **hyper)
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
        expected = numpy_round(expected, clients, eta=0.05, delta=0.01, **hyper)
        assert state.keys() == expected.keys()
        for name, vector in expected.items():
            np.testing.assert_allclose(state[name].numpy(), vector, rtol=1e-4, atol=2e-6, err_msg=name)
    test_pixels = torch.from_numpy(x[:B].astype(np.float32))
    found = method.predict(state, test_pixels)
    s = f(x[:B], expected["w_S_before"]) + f(x[:B], expected["r_US"])
    u = f(x[:B], expected["w_U_before"]) + f(x[:B], expected["r_SU"])
    for name, z in (("SM", s), ("UM", u), ("EM", (s + u) / 2)):
        np.testing.assert_allclose(found[name].numpy(), z, rtol=1e-4, atol=1e-5, err_msg=name)
