"""Each equation of the paper against a literal transcription in float64 NumPy, by gradients too."""

import numpy as np
import pytest
import small
import torch
from by_hand import NET, SIDES, B, D, M, ce, ce_gradient, f, flat, gradient, kl, other_way, pull_back, softmax

from fedhassle.losses import cross_entropy, hard_labels, kl_divergence
from fedhassle.method import Batch, Client, Update, as_models, average
from fedhassle.methods import FedAvg, FedProx, Hassle
from fedhassle.methods.hassle import SUPERVISED
from fedhassle.vectors import distance, mean, squared_distance


@pytest.fixture
def world(rng):
    """A batch, and every vector of HASSLE, drawn at random in float64."""
    names = ("w_S", "w_U", "r_US", "r_SU", "w_S_before", "w_U_before", "local")
    vectors = {name: flat(rng.normal(size=(M, D)), rng.normal(size=M)) for name in names}
    return rng.normal(size=(B, 1, 3, 3)), np.array([0, 3, -1, 1, 1, 2]), vectors


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
        z = method.teacher_logits(received(method, {k: vectors[k] for k in known}), torch.from_numpy(x))
        y = method.pseudo_label(z)
        assert y.tolist() == f(x, vectors["w_S"]).argmax(1).tolist()


def test_eq_11_adds_the_residual_to_the_model_that_it_was_trained_against(world):
    """ŷ = argmax_j f(u, w_S^(t−1))_j + f(u, r_{U−S}^(t))_j."""
    x, _, vectors = world
    method = Hassle(NET)
    expected = (f(x, vectors["w_S_before"]) + f(x, vectors["r_US"])).argmax(1)
    others = [f(x, vectors["w_S"]).argmax(1), (f(x, vectors["w_S"]) + f(x, vectors["r_US"])).argmax(1)]
    assert all((expected != other).any() for other in others)  # else the test could not tell
    z = method.teacher_logits(received(method, vectors), torch.from_numpy(x))
    assert method.pseudo_label(z).tolist() == expected.tolist()


def test_a_threshold_leaves_samples_without_a_label(world):
    """Confidence max_j σ(z)_j: of (ln 3, 0) exactly 3/4, of (0, 0) 1/2; on the threshold counts."""
    z = torch.tensor([[np.log(3.0), 0.0], [0.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    assert hard_labels(z).tolist() == [0, 0, 1]
    assert hard_labels(z, 0.5).tolist() == [0, 0, 1]
    assert hard_labels(z, 0.7).tolist() == [0, -1, 1]
    assert hard_labels(z, 0.9).tolist() == [-1, -1, 1]
    x, _, vectors = world
    logits = f(x, vectors["w_S_before"]) + f(x, vectors["r_US"])
    confidence = float(np.median(softmax(logits).max(1)))
    expected = np.where(softmax(logits).max(1) >= confidence, logits.argmax(1), -1)
    assert 0 < (expected == -1).sum() < B
    method = Hassle(NET, confidence=confidence)
    z = method.teacher_logits(received(method, vectors), torch.from_numpy(x))
    assert method.pseudo_label(z).tolist() == expected.tolist()


# Residuals: Eqs. 6 to 9


@SIDES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("tau", "lam"), [(2.0, 1.0), (1.0, 0.3), (0.5, 2.0)])
def test_eqs_6_to_9_are_the_loss_of_a_residual(side, with_residual, tau, lam, world):
    """L_CE + λ·L_res, with z = f(x; w_S) and r = f(x; r_{U−S}).

    Eq. 6: d = f(x; w_U) − z, or with the script's target f(x; w_U^(t−1)) + f(x; r_{S−U}) − z.
    Eq. 7 (ruling 4): L_res = KL(σ(d/τ) ‖ σ(r/τ)), batch mean; by r: (σ(r/τ) − σ(d/τ))/(τ·B).
    Eq. 8: L_CE = ℓ(z + r, y); by r: (σ(z + r) − onehot y)/B.
    """
    x, y, vectors = world
    dual, other, residual, other_residual = other_way(side)
    z, r = f(x, vectors[dual]), f(x, vectors["local"])
    before = f(x, vectors[f"{other}_before"]) + f(x, vectors[other_residual])
    d = (before if with_residual else f(x, vectors[other])) - z
    p, q = softmax(d / tau), softmax(r / tau)
    target = "with_residual" if with_residual else "difference"
    method = Hassle(NET, tau=tau, lam=lam, residual_target=target)
    value, grad = descended(method, lambda *a: method.residual_loss(side, *a), residual, world)
    np.testing.assert_allclose(value, ce(z + r, y) + lam * kl(p, q), rtol=1e-12)
    np.testing.assert_allclose(
        grad, pull_back(x, ce_gradient(z + r, y) + lam * (q - p) / (tau * B)), rtol=1e-10, atol=1e-14
    )


@SIDES
def test_until_the_other_residual_is_trained_its_dual_alone_is_the_target(side, world):
    """Round 1, where no w^(t−1) exists: with the script's target, too, d = f(x; w_U) − f(x; w_S)."""
    x, y, vectors = world
    dual, other, residual, _ = other_way(side)
    del vectors[f"{other}_before"]
    z, r = f(x, vectors[dual]), f(x, vectors["local"])
    p, q = softmax((f(x, vectors[other]) - z) / 2), softmax(r / 2)
    method = Hassle(NET, residual_target="with_residual")
    value, grad = descended(method, lambda *a: method.residual_loss(side, *a), residual, world)
    np.testing.assert_allclose(value, ce(z + r, y) + kl(p, q), rtol=1e-12)
    np.testing.assert_allclose(
        grad, pull_back(x, ce_gradient(z + r, y) + (q - p) / (2 * B)), rtol=1e-10, atol=1e-14
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
    w_U[net.n_weights :] += 3.0
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
