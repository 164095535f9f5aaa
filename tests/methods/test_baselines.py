"""Losses, gradients and merges of the baselines against a literal transcription in float64 NumPy."""

import itertools
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import small
import torch
from by_hand import (
    NET,
    NORMED,
    B,
    D,
    M,
    ce,
    ce_gradient,
    f,
    flat,
    gradient,
    labels_of,
    moved,
    normed,
    normed_vector,
    one_hot,
    order_end_to_end,
    order_of_epochs,
    pull_back,
    soft_ce,
    softmax,
)

from fedhassle import losses
from fedhassle.data.split.split import pooled
from fedhassle.data.views import UNIFORMS
from fedhassle.engine.client import train
from fedhassle.method import Batch, Client, Model, Update, as_models, mean_steps
from fedhassle.methods import (
    METHODS,
    Alone,
    Central,
    CentralFixMatch,
    FedAvg,
    FedMatch,
    FixMatch,
    FixMatchGlobal,
    MixMatch,
    RSCFed,
    Sage,
)
from fedhassle.methods.fedmatch import majority
from fedhassle.randomness import generator
from fedhassle.runs.run import start
from fedhassle.settings.request import request
from fedhassle.vectors import size_in_bytes

FULL, PARTIAL, UNLABELLED = Client("f", 40, 0), Client("p", 10, 70), Client("u", 0, 90)
CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def tensors(**arrays):
    return {k: torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}


def batch(y, *views):
    return Batch(tuple(torch.from_numpy(view) for view in views), torch.from_numpy(y))


def nothing(n):
    return np.full(n, -1)


def vector(rng, size=1.0):
    return flat(size * rng.normal(size=(M, D)), size * rng.normal(size=M))


def pictures(rng, n=B):
    return rng.normal(size=(n, 1, 3, 3))


def middle(z):
    """A confidence that about half the samples reach, one of them exactly."""
    return float(np.sort(softmax(z).max(1))[len(z) // 2])


def through_softmax(p, G):
    """The gradient by the logits of a loss whose gradient by the probabilities p is G."""
    return p * (G - (p * G).sum(1, keepdims=True))


class World:
    """One labelled and one unlabelled batch, and vectors for a linear network."""

    def __init__(self, rng, ratio=2):
        self.x, self.y = pictures(rng), np.array([0, 3, 1, 1, 2, 0])
        self.weak, self.strong = pictures(rng, ratio * B), pictures(rng, ratio * B)
        self.w, self.sent = vector(rng), vector(rng)
        self.labelled = batch(self.y, self.x)
        self.unlabelled = batch(nothing(ratio * B), self.weak, self.strong)

    def descended(self, method, loss, *batches):
        """The value of a loss and its gradient by w, for a client that received another vector."""
        known = as_models(tensors(w=self.sent), method.networks())
        return gradient(lambda leaf: loss({"w": known["w"].at(leaf)}, known, *batches), self.w)

    def labels(self, method, loss, *batches):
        """The labels that a loss gives to the unlabelled samples, for the same client."""
        known = as_models(tensors(w=self.sent), method.networks())
        return loss({"w": known["w"].at(torch.from_numpy(self.w))}, known, *batches).y.tolist()


@pytest.fixture
def world(rng):
    return World(rng)


# Losses


def test_losses_of_each_sample(rng):
    """ℓ_i = −log σ(z_i)_y, 0 where y = −1; with probabilities t, −Σ_m t_m·log σ(z)_m."""
    z, y = rng.normal(size=(5, 3)), np.array([2, -1, 0, -1, 1])
    each = [-np.log(softmax(z)[i, y[i]]) if y[i] >= 0 else 0.0 for i in range(5)]
    found = losses.cross_entropy_each(torch.from_numpy(z), torch.from_numpy(y))
    np.testing.assert_allclose(found.numpy(), each, rtol=1e-13)
    target = softmax(rng.normal(size=(5, 3)))
    found = losses.soft_cross_entropy(torch.from_numpy(z), torch.from_numpy(target))
    np.testing.assert_allclose(found.numpy(), soft_ce(z, target), rtol=1e-13)
    hot = losses.one_hot(torch.from_numpy(y), 3)
    assert hot.tolist() == one_hot(y, 3).tolist() and hot.sum(1).tolist() == [1, 0, 1, 0, 1]
    found = losses.soft_cross_entropy(torch.from_numpy(z), hot)
    np.testing.assert_allclose(found.numpy(), each, rtol=1e-13)


def test_sharpening_is_a_power_that_is_normalised():
    """(0.6, 0.3, 0.1) at T = ½ is (0.36, 0.09, 0.01)/0.46; at T = 1 itself; a certain one stays certain."""
    p = torch.tensor([[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    expected = [[0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46], [1, 0, 0]]
    np.testing.assert_allclose(losses.sharpen(p, 0.5).numpy(), expected, rtol=1e-13)
    np.testing.assert_allclose(losses.sharpen(p, 1.0).numpy(), p.numpy(), rtol=1e-13)


def test_strong_sharpening_gives_no_nan():
    """T = 0.01: of four equal ones each stays ¼; of 0.3 and 0.2 the first wins by (3/2)^100."""
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.3, 0.2, 0.2, 0.3]])
    expected = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.0, 0.5]]
    np.testing.assert_allclose(losses.sharpen(p, 0.01).numpy(), expected, atol=1e-5)


# FixMatch


def test_fixmatch_adds_the_labels_of_the_weak_view_to_the_strong_one(world):
    """ℓ(f(x), y) + λ_u·ℓ(f(s), ŷ), ŷ of f(a) where its confidence is at least the threshold, else −1.

    Both are means over whole batches, of B and of 2·B; no gradient flows through ŷ. By w: the pull-back of
    (σ(f(x)) − onehot y)/B and of λ_u·(σ(f(s)) − onehot ŷ)/2B.
    """
    z, weak, strong = (f(v, world.w) for v in (world.x, world.weak, world.strong))
    sure = middle(weak)
    labels = labels_of(weak, sure)
    assert 0 < (labels < 0).sum() < len(labels)
    method = FixMatch(NET, confidence=sure - 1e-12, weight=0.7)
    value, grad = world.descended(method, method.joint, world.unlabelled, world.labelled)
    np.testing.assert_allclose(value, ce(z, world.y) + 0.7 * ce(strong, labels), rtol=1e-12)
    by_hand = pull_back(world.x, ce_gradient(z, world.y))
    by_hand += 0.7 * pull_back(world.strong, ce_gradient(strong, labels))
    np.testing.assert_allclose(grad, by_hand, **CLOSE)
    assert world.labels(method, method.joint, world.unlabelled, world.labelled) == labels.tolist()


def test_fixmatch_is_one_pass_in_which_batchnorm_sees_all(world, rng):
    """All 6 + 12 + 12 images share one mean and variance; the running ones move once, towards theirs."""
    w, statistics = normed_vector(rng)
    everything = np.concatenate([world.x, world.weak, world.strong])
    z, weak, strong = np.split(normed(everything, w), [B, 3 * B])
    sure = middle(weak) - 1e-12
    method = FixMatch(NORMED, confidence=sure)
    model = Model(NORMED, *tensors(w=w, s=statistics.copy()).values(), training=True)
    found = method.joint({"w": model}, {"w": model}, world.unlabelled, world.labelled).loss.item()
    np.testing.assert_allclose(found, ce(z, world.y) + ce(strong, labels_of(weak, sure)), rtol=1e-10)
    np.testing.assert_allclose(model.statistics.numpy(), moved(statistics, everything), rtol=1e-10)


def plain_descent(w, gradients, lr, momentum=0.9):
    """SGD with momentum: m ← 0.9·m + g, w ← w − lr·m."""
    m = np.zeros_like(w)
    for gradient_at in gradients:
        m = momentum * m + gradient_at(w)
        w = w - lr * m
    return w


def clean(data, rows):
    """Normalised images, without flips and crops: (pixel/255 − ½)/¼."""
    return ((data.x_train[rows] / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)


def test_fixmatch_that_is_never_sure_is_a_plain_loop_on_labels():
    """With a confidence of 1 the cross-entropy alone is left, on the labelled batches of the walk.

    Of 7 labelled and 21 unlabelled samples, in batches of 4 and 8: ⌈21/8⌉ = 3 steps an epoch. The walk over
    unlabelled data is drawn first with its views, then the labelled one, end to end.
    """
    data, net = small.dataset(side=3), NET
    here = small.site(data, range(7), range(30, 51))
    method = FixMatch(net, batch=4, epochs=2, lr=0.05, clip=0.0, confidence=1.0)
    found = small.trained(method, here)
    rng = generator(0, 1, "here", "both")
    order_of_epochs(21, 8, 2, rng)
    for view in ("weak", "strong"):
        rng.random((6, 8, UNIFORMS[view]), dtype=np.float32)
    walk = [np.array(rows) for rows in order_end_to_end(7, 4, 6, rng)]

    def step(rows):
        x, y = clean(data, rows), data.y_train[rows]
        return lambda w: pull_back(x, ce_gradient(f(x, w), y))

    expected = plain_descent(net.initial(0).double().numpy(), map(step, walk), 0.05)
    np.testing.assert_allclose(found.arrays["w"].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(found.arrays["w"].numpy() - net.initial(0).numpy()).max() > 0.01


@pytest.mark.parametrize("kind", [FixMatch, MixMatch, FixMatchGlobal, Sage])
def test_a_pass_over_the_unlabelled_data_is_an_epoch_of_fixmatch_and_variants(kind):
    """⌈70/(ratio·8)⌉ steps each; all samples count, n_L + n_U."""
    method = kind(NET, batch=8, epochs=3)
    (both,) = method.phases(PARTIAL, 1)
    assert both.length(PARTIAL) == 3 * (9 if kind is MixMatch else 5)
    here = small.site(small.dataset(side=3), range(5), range(20, 33))
    assert small.trained(method, here).samples == {"w": 18}


# FixMatch with global labels, and SAGE


def test_global_labels_are_those_of_the_model_received(world):
    """ℓ(f(x; w), y) + λ_u·ℓ(f(s; w), ŷ) with ŷ of f(a; w^(t)); an unlabelled client has its term alone."""
    z, strong, teacher = f(world.x, world.w), f(world.strong, world.w), f(world.weak, world.sent)
    sure = middle(teacher)
    labels = labels_of(teacher, sure)
    assert (labels != labels_of(f(world.weak, world.w), sure)).any()
    method = FixMatchGlobal(NET, confidence=sure - 1e-12, weight=0.7)
    value, grad = world.descended(method, method.joint, world.unlabelled, world.labelled)
    np.testing.assert_allclose(value, ce(z, world.y) + 0.7 * ce(strong, labels), rtol=1e-12)
    term = 0.7 * pull_back(world.strong, ce_gradient(strong, labels))
    np.testing.assert_allclose(grad, pull_back(world.x, ce_gradient(z, world.y)) + term, **CLOSE)
    value, grad = world.descended(method, method.alone, world.unlabelled)
    np.testing.assert_allclose(value, 0.7 * ce(strong, labels), rtol=1e-12)
    np.testing.assert_allclose(grad, term, **CLOSE)
    assert world.labels(method, method.joint, world.unlabelled, world.labelled) == labels.tolist()
    assert world.labels(method, method.alone, world.unlabelled) == labels.tolist()


@pytest.mark.parametrize("kind", [FixMatchGlobal, Sage])
def test_the_global_model_labels_by_its_statistics_and_the_local_one_sees_all(kind, world, rng):
    """An unlabelled client: one pass of both views in training mode, the teacher's in evaluation mode."""
    (w, s), (g, r) = normed_vector(rng), normed_vector(rng)
    both = np.concatenate([world.weak, world.strong])
    weak, strong = np.split(normed(both, w), 2)
    teacher = normed(world.weak, g, r)
    sure = middle(teacher) - 1e-12
    local = Model(NORMED, *tensors(w=w, s=s.copy()).values(), training=True)
    received = Model(NORMED, *tensors(g=g, r=r.copy()).values())
    method = kind(NORMED, confidence=sure)
    found = method.alone({"w": local}, {"w": received}, world.unlabelled).loss.item()
    expected = ce(strong, labels_of(teacher, sure))
    if kind is Sage:
        expected = sage(weak, teacher, strong, sure, 0.05)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(local.statistics.numpy(), moved(s, both), rtol=1e-10)
    assert (received.statistics.numpy() == r).all()


def sage(weak, teacher, strong, sure, halving):
    """SAGE's consistency, its gradient by the logits of the strong view, its labels: one sample at a time.

    Target λ·onehot(local) + (1 − λ)·onehot(global), λ = exp(−(ln 2/h)·|p − q|), 0 where the local confidence
    p is below the threshold; a sample counts if p or the global q reaches it; mean over the whole batch. By
    z: (σ(z) − target)/n of those that count, since a target sums to 1.
    """
    value, G, n, labels = 0.0, np.zeros_like(strong), len(strong), []
    for i in range(n):
        (p, y), (q, v) = ((softmax(z)[i].max(), int(z[i].argmax())) for z in (weak, teacher))
        if p < sure and q < sure:
            labels.append(-1)
            continue
        share = 2.0 ** (-abs(p - q) / halving) if p >= sure else 0.0
        target = np.zeros(M)
        target[y] += share
        target[v] += 1 - share
        value += soft_ce(strong[i : i + 1], target[None])[0] / n
        G[i] = (softmax(strong)[i] - target) / n
        labels.append(y if share > 0.5 else v)
    return value, G, labels


def test_sage_mixes_the_labels_of_both_models(rng):
    world = World(rng, ratio=6)
    z, weak, strong = (f(v, world.w) for v in (world.x, world.weak, world.strong))
    teacher = f(world.weak, world.sent)
    sure = middle(np.concatenate([weak, teacher])) - 1e-12
    known = [softmax(z).max(1) >= sure for z in (weak, teacher)]
    cases = {(bool(a), bool(b)) for a, b in zip(*known, strict=True)}
    assert cases == set(itertools.product([True, False], repeat=2))  # else the test could not tell
    value, G, labels = sage(weak, teacher, strong, sure, 0.3)
    method = Sage(NET, confidence=sure, halving=0.3, weight=0.7)
    found, grad = world.descended(method, method.joint, world.unlabelled, world.labelled)
    np.testing.assert_allclose(found, ce(z, world.y) + 0.7 * value, rtol=1e-12)
    by_hand = pull_back(world.x, ce_gradient(z, world.y)) + 0.7 * pull_back(world.strong, G)
    np.testing.assert_allclose(grad, by_hand, **CLOSE)
    found, grad = world.descended(method, method.alone, world.unlabelled)
    np.testing.assert_allclose(found, 0.7 * value, rtol=1e-12)
    np.testing.assert_allclose(grad, 0.7 * pull_back(world.strong, G), **CLOSE)
    assert world.labels(method, method.joint, world.unlabelled, world.labelled) == labels
    assert world.labels(method, method.alone, world.unlabelled) == labels
    others = [np.where(np.array(labels) < 0, -1, z.argmax(1)).tolist() for z in (weak, teacher)]
    assert labels not in others  # else the test could not tell


@pytest.mark.parametrize(
    ("p", "q", "share"),
    [
        *((0.96, 0.96, 1.0), (0.97, 0.92, 0.5), (0.96, 0.86, 0.25), (0.94, 0.99, 0.0)),
        *((0.95, 0.6, 2.0**-7), (0.6, 0.95, 0.0)),  # exactly at the threshold
    ],
)
def test_sage_halves_its_share_with_every_twentieth_of_confidence(p, q, share):
    """Local class 0 with confidence p, global class 1 with q; the strong view says σ(z) = (½, ¼, ¼)."""

    def sure_of(k, confidence):
        rest = (1 - confidence) / 2
        return torch.tensor([[confidence if m == k else rest for m in range(3)]], dtype=torch.float64).log()

    strong = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    method = Sage(NET, confidence=sure_of(0, 0.95).softmax(1).max().item())  # 0.95, but for its last bit
    found = method.consistency(sure_of(0, p), lambda _: sure_of(1, q), None, strong).loss.item()
    assert found == pytest.approx((share * 1 + (1 - share) * 2) * np.log(2), rel=1e-9)


def test_sage_whose_local_model_is_never_sure_is_fixmatch_with_global_labels(world):
    """λ = 0 everywhere: the target is the global label where the global model is sure, else nothing."""
    flat_w, teacher = 0.01 * world.w, f(world.weak, world.sent)
    confidence = max(softmax(f(world.weak, flat_w)).max() + 1e-9, middle(teacher) - 1e-12)
    world.w = flat_w
    results = []
    for kind in (Sage, FixMatchGlobal):
        method = kind(NET, confidence=confidence)
        results.append(world.descended(method, method.joint, world.unlabelled, world.labelled))
    (value, grad), (other, its) = results
    assert value == pytest.approx(other, rel=1e-13) and value > ce(f(world.x, flat_w), world.y) + 1e-3
    np.testing.assert_allclose(grad, its, **CLOSE)


# MixMatch


def mixmatch(world, draw, z_of, guess_of, weight, temperature=0.5):
    """MixMatch's loss of logits, the mixed images, and its gradient by the logits.

    Guess: mean of both views' probabilities by `guess_of`, sharpened. Images (x, a, b) and targets (y, ĝ, ĝ)
    are mixed with those that are drawn, λ' = max(λ, 1 − λ) of their own. Loss: soft ℓ over the
    B labelled + weight · mean over 2·B samples and M classes of (σ(z) − target)².
    """
    guess = (softmax(guess_of(world.weak)) + softmax(guess_of(world.strong))) / 2
    guess = guess ** (1 / temperature)
    guess /= guess.sum(1, keepdims=True)
    images = np.concatenate([world.x, world.weak, world.strong])
    target = np.concatenate([one_hot(world.y), guess, guess])
    share, order = max(draw[0], 1 - draw[0]), draw[1:].astype(int)
    images = share * images + (1 - share) * images[order]
    target = share * target + (1 - share) * target[order]
    z, p = z_of(images), softmax(z_of(images))
    gap = p[B:] - target[B:]
    value = soft_ce(z[:B], target[:B]).mean() + weight * (gap**2).mean()
    G = np.concatenate([(p[:B] - target[:B]) / B, through_softmax(p[B:], weight * 2 * gap / gap.size)])
    return value, images, G


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_mixmatch_mixes_all_samples_and_sharpens_its_guesses(share, rng):
    world = World(rng, ratio=1)
    draw = np.concatenate([[share], rng.permutation(3 * B)])
    value, images, G = mixmatch(world, draw, lambda x: f(x, world.w), lambda x: f(x, world.w), 75 * 0.4)
    method = MixMatch(NET, weight=75.0)
    ramp, drawn = torch.tensor([0.4], dtype=torch.float64), torch.from_numpy(draw)

    def loss(leaf):
        model = Model(NET, leaf, leaf[:0])
        return method.joint({"w": model}, {"ramp": ramp}, world.unlabelled, world.labelled, drawn)

    found, grad = gradient(loss, world.w)
    np.testing.assert_allclose(found, value, rtol=1e-10)
    np.testing.assert_allclose(grad, pull_back(images, G), rtol=1e-8, atol=1e-12)
    guess = sum(softmax(f(view, world.w)) for view in (world.weak, world.strong)).argmax(1)
    assert loss(torch.from_numpy(world.w)).y.tolist() == guess.tolist()


def test_mixmatch_guesses_by_statistics_and_trains_in_one_pass(rng):
    """Guesses in evaluation mode change nothing; all mixed images are normalised in one batch."""
    world, (w, statistics) = World(rng, ratio=1), normed_vector(rng)
    draw = np.concatenate([[0.35], rng.permutation(3 * B)])
    value, images, _ = mixmatch(
        world, draw, lambda x: normed(x, w), lambda x: normed(x, w, statistics), 10 * 0.5, temperature=0.7
    )
    model = Model(NORMED, *tensors(w=w, s=statistics.copy()).values(), training=True)
    method, ramp = MixMatch(NORMED, weight=10.0, temperature=0.7), torch.tensor([0.5], dtype=torch.float64)
    drawn = torch.from_numpy(draw)
    found = method.joint({"w": model}, {"ramp": ramp}, world.unlabelled, world.labelled, drawn).loss.item()
    np.testing.assert_allclose(found, value, rtol=1e-10)
    np.testing.assert_allclose(model.statistics.numpy(), moved(statistics, images), rtol=1e-10)


def test_mixmatch_draws_a_share_and_an_order_for_each_step():
    """Beta(α, α), then an order of the B + 2·ratio·B samples, from the phase's own generator."""
    method = MixMatch(NET, batch=4, ratio=2, alpha=0.6)
    drawn, rng = method.mixing(np.random.default_rng(7)), np.random.default_rng(7)
    assert drawn[0] == rng.beta(0.6, 0.6) and (drawn[1:] == rng.permutation(20)).all() and len(drawn) == 21
    (both,) = method.phases(PARTIAL, 1)
    assert both.draw == method.mixing and method.phases(FULL, 1)[0].draw is None


def test_the_weight_of_mixmatch_grows_with_the_rounds():
    """By t/T, up to the full weight; without T it is full from the start."""
    state = {"w": NET.initial(0)}
    sent = [MixMatch(NET, rounds=8).message(state, PARTIAL, t) for t in (1, 4, 8, 9)]
    assert [message["ramp"].tolist() for message in sent] == [[0.125], [0.5], [1.0], [1.0]]
    assert all(torch.equal(message["w"], state["w"]) for message in sent) and state.keys() == {"w"}
    assert MixMatch(NET).message(state, PARTIAL, 3)["ramp"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        (MixMatch(NET), (90, 10)),
        (MixMatch(NET, weights="samples"), (90, 90)),
        (FixMatch(NET), (90, 10)),
        (FixMatchGlobal(NET), (90, 90)),
    ],
    ids=["mixmatch", "mixmatch by samples", "fixmatch", "fixmatch-global"],
)
def test_means_are_weighted_by_labels_or_by_all_samples(method, counts, rng):
    """A full client of 90 and a partial one that trained on 10 labels and 80 others."""
    vectors = [vector(rng) for _ in range(2)]
    clients, trained = (Client("a", 90, 0), Client("b", 10, 80)), (90, 90)
    updates = [
        Update(client, tensors(w=w), {"w": n}, {})
        for client, w, n in zip(clients, vectors, trained, strict=True)
    ]
    merged = method.merge(tensors(w=vectors[0]), updates, 1, rng)
    np.testing.assert_allclose(merged["w"].numpy(), np.average(vectors, 0, counts), rtol=1e-10)


# FedMatch


def test_fedmatch_begins_with_psi_as_a_share_of_the_kernels_of_sigma():
    """ψ^(0) = 0.2·σ^(0), over kernels and biases: 40 + 8 entries of 80 + 32 with BatchNorm."""
    for net, entries in ((NET, 48), (NORMED, 48)):
        state = FedMatch(net).initial(3)
        assert torch.equal(state["sigma"], FedAvg(net).initial(3)["w"])
        assert len(state["psi"]) == entries
        assert torch.equal(state["psi"], 0.2 * state["sigma"][:entries])


def test_sigma_descends_ten_times_the_cross_entropy_of_sigma_plus_psi(world, rng):
    """10·ℓ(f(x; σ + ψ), y), by σ, with or without unlabelled data."""
    psi, sent = vector(rng), vector(rng)
    method = FedMatch(NET)
    known = as_models(tensors(sigma=world.sent, psi=sent), method.networks())
    for batches in ((world.labelled, world.unlabelled), (world.labelled,)):

        def loss(leaf, batches=batches):
            local = {"sigma": known["sigma"].at(leaf), **tensors(psi=psi)}
            return method.supervised(local, known, *batches)

        value, grad = gradient(loss, world.w)
        z = f(world.x, world.w + psi)
        np.testing.assert_allclose(value, 10 * ce(z, world.y), rtol=1e-12)
        np.testing.assert_allclose(grad, 10 * pull_back(world.x, ce_gradient(z, world.y)), **CLOSE)


def test_psi_of_a_full_client_descends_its_norms_alone(world, rng):
    """0.3·|ψ|₁ + 0.7·‖σ − ψ‖², with the σ of the step and not the one received."""
    psi = vector(rng)
    method = FedMatch(NET, sparsity_weight=0.3, proximity_weight=0.7)
    known = as_models(tensors(sigma=world.sent, psi=vector(rng)), method.networks())
    sigma = known["sigma"].at(torch.from_numpy(world.w))
    value, grad = gradient(
        lambda leaf: method.following({"sigma": sigma, "psi": leaf}, known, world.labelled), psi
    )
    expected = 0.3 * np.abs(psi).sum() + 0.7 * ((world.w - psi) ** 2).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(grad, 0.3 * np.sign(psi) + 1.4 * (psi - world.w), rtol=1e-12)


AUTHORS_WEIGHTS = {"consistency_weight": 0.01, "proximity_weight": 10.0}  # in which the terms show


def psi_by_hand(world, sigma, psi, helpers, sure):
    """FedMatch's loss of ψ and its gradient.

    z = f(a; σ + ψ) on weak views, h_j = f(a; σ^(t) + ψ_j); over the n samples with max softmax(z) ≥ sure:
    0.01/|H|·Σ_j Σ KL(h_j ‖ z)/n, by z (softmax z − softmax h_j)/n; 0.01·Σ ℓ(f(s; σ + ψ), vote)/n, the vote
    being the most frequent argmax, of several the lowest; always 10⁻⁴·|ψ|₁ + 10·‖σ − ψ‖².
    """
    z, strong = f(world.weak, sigma + psi), f(world.strong, sigma + psi)
    experts = [f(world.weak, world.sent + helper) for helper in helpers]
    mask = softmax(z).max(1) >= sure
    n = max(1, mask.sum())
    value, G, votes = 0.0, np.zeros_like(z), []
    for h in experts:
        p, q = softmax(h), softmax(z)
        value += (
            0.01 / len(experts) * sum((p[i] * np.log(p[i] / q[i])).sum() for i in np.flatnonzero(mask)) / n
        )
        G += 0.01 / len(experts) * mask[:, None] * (q - p) / n
    for i in range(len(z)):
        classes = [int(logits[i].argmax()) for logits in (z, *experts)]
        votes.append(min(set(classes), key=lambda m: (-classes.count(m), m)))
    labels = np.where(mask, votes, -1)
    value += 0.01 * ce(strong, labels) * len(z) / n
    grad = pull_back(world.weak, G)
    grad += 0.01 * pull_back(world.strong, ce_gradient(strong, labels)) * len(z) / n
    value += 1e-4 * np.abs(psi).sum() + 10 * ((sigma - psi) ** 2).sum()
    return value, grad + 1e-4 * np.sign(psi) + 20 * (psi - sigma), votes


@pytest.mark.parametrize("alone", [False, True], ids=["beside sigma", "alone"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_psi_descends_towards_its_helpers_and_sigma(count, alone, world, rng):
    """The threshold is exactly the confidence of one sample, which counts."""
    psi, helpers = vector(rng), [vector(rng) for _ in range(count)]
    sigma = world.sent if alone else world.w
    z = f(world.weak, sigma + psi)
    value, by_hand, votes = psi_by_hand(world, sigma, psi, helpers, middle(z) - 1e-12)
    assert count < 2 or votes != z.argmax(1).tolist()  # the helpers outvote the client somewhere
    own = Model(NET, *tensors(w=sigma + psi, s=sigma[:0]).values())(torch.from_numpy(world.weak))
    sure = own.softmax(1).amax(1).sort().values[len(own) // 2].item()
    assert sure == pytest.approx(middle(z), rel=1e-14)
    method = FedMatch(NET, confidence=sure, **AUTHORS_WEIGHTS)
    sent = {"sigma": world.sent, "psi": psi} | {f"helper {i}": v for i, v in enumerate(helpers)}
    known = as_models(tensors(**sent), method.networks())
    local = {"sigma": known["sigma"].at(torch.from_numpy(world.w))}

    def loss(method, leaf):
        if alone:
            return method.agreement_alone({"psi": leaf}, known, world.unlabelled)
        return method.agreement({**local, "psi": leaf}, known, world.labelled, world.unlabelled)

    found, grad = gradient(partial(loss, method), psi)
    np.testing.assert_allclose(found, value, rtol=1e-12)
    np.testing.assert_allclose(grad, by_hand, **CLOSE)
    labels = np.where(softmax(z).max(1) >= middle(z) - 1e-12, votes, -1)
    assert loss(method, torch.from_numpy(psi)).y.tolist() == labels.tolist() and (labels < 0).any()
    # The norms are of hundreds: what is left without them must agree as well.
    without = FedMatch(
        NET, confidence=sure, consistency_weight=0.01, proximity_weight=0.0, sparsity_weight=0.0
    )
    _, grad = gradient(partial(loss, without), psi)
    np.testing.assert_allclose(
        grad, by_hand - 1e-4 * np.sign(psi) - 20 * (psi - sigma), rtol=1e-7, atol=1e-12
    )


def test_without_confident_samples_only_the_norms_move_psi(world, rng):
    """No division by zero: 10⁻⁴·|ψ|₁ + 10·‖σ − ψ‖² remain, with their gradient."""
    psi = vector(rng)
    value, by_hand, _ = psi_by_hand(world, world.w, psi, [], 1.0)
    method = FedMatch(NET, confidence=1.0, **AUTHORS_WEIGHTS)
    known = as_models(tensors(sigma=world.w, psi=psi), method.networks())
    found, grad = gradient(
        lambda leaf: method.agreement({"sigma": known["sigma"], "psi": leaf}, known, None, world.unlabelled),
        psi,
    )
    np.testing.assert_allclose(found, value, rtol=1e-12)
    np.testing.assert_allclose(grad, by_hand, rtol=1e-12)


@pytest.mark.parametrize(
    ("votes", "label"), [([2], 2), ([3, 1], 1), ([0, 2, 2], 2), ([3, 2, 1], 1), ([3, 3, 0, 0, 1], 0)]
)
def test_the_majority_decides_and_a_tie_goes_to_the_lowest_class(votes, label):
    logits = [torch.tensor([[float(m == vote) for m in range(4)]] * 3) for vote in votes]
    assert majority(logits).tolist() == [label] * 3


def test_batchnorm_belongs_to_sigma(rng):
    """θ adds ψ to the kernels; gains, shifts and statistics are σ's, in training and in predictions."""
    (w, s), x = normed_vector(rng), pictures(rng)
    psi = vector(rng)
    whole = np.concatenate([psi, np.zeros(32)])
    method = FedMatch(NORMED)
    state = tensors(sigma=np.concatenate([w, s]), psi=psi)
    found = method.predict(state, torch.from_numpy(x))["model"]
    np.testing.assert_allclose(found.numpy(), normed(x, w + whole, s), rtol=1e-10)
    model = Model(NORMED, *tensors(w=w, s=s.copy()).values(), training=True)
    z = method.theta(model, torch.from_numpy(psi))(torch.from_numpy(x))
    np.testing.assert_allclose(z.numpy(), normed(x, w + whole), rtol=1e-10)
    np.testing.assert_allclose(model.statistics.numpy(), moved(s, x), rtol=1e-10)


def test_psi_learns_by_statistics_of_the_batch_and_moves_none(rng):
    (w, s), x = normed_vector(rng), pictures(rng)
    psi = vector(rng)
    method = FedMatch(NORMED, confidence=0.0, **AUTHORS_WEIGHTS)
    model = Model(NORMED, *tensors(w=w, s=s.copy()).values(), training=True)
    views = Batch(tensors(a=x, b=x).values(), None)
    loss, _ = method.agreement({"sigma": model, "psi": torch.from_numpy(psi)}, {}, None, views)
    z = normed(x, w + np.concatenate([psi, np.zeros(32)]))
    norms = 1e-4 * np.abs(psi).sum() + 10 * ((psi - w[: len(psi)]) ** 2).sum()
    np.testing.assert_allclose(loss.item(), 0.01 * ce(z, z.argmax(1)) + norms, rtol=1e-10)
    np.testing.assert_array_equal(model.statistics.numpy(), s)


def test_a_pass_over_the_labels_is_an_epoch_of_fedmatch():
    (phase,) = FedMatch(NET, batch=4, ratio=3, epochs=2).phases(Client("here", 9, 40), 1)
    assert [(stream.part, stream.batch) for stream in phase.streams] == [("labelled", 4), ("unlabelled", 12)]
    assert phase.length(Client("here", 9, 40)) == 2 * 3


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize(("kind", "phase"), [("partial", "both"), ("full", "labelled")])
def test_in_a_step_of_fedmatch_sigma_goes_first_and_psi_follows_it(kind, phase, clip):
    """Never sure, no helpers; g = ∇ℓ(σ + ψ), h = 10⁻⁴·sign ψ + 20·(ψ − σ), of norms at most `clip` (0: any).

    σ ← σ − lr·10·g, then ψ ← ψ − lr·h with the new σ. So at a full client, too: 7 samples in one step an
    epoch.
    """
    data = small.dataset(side=3)
    here = small.site(data, range(7), range(30, 51) if kind == "partial" else ())
    assert here.client.kind == kind
    method = FedMatch(NET, batch=8, epochs=2, confidence=1.0, lr=0.02, clip=clip, **AUTHORS_WEIGHTS)
    found = small.trained(method, here)

    def clipped(gradient):
        norm = np.linalg.norm(gradient)
        assert norm > 0.02
        return gradient * (clip / norm if clip else 1)

    sigma, psi = (method.initial(0)[name].double().numpy() for name in ("sigma", "psi"))
    for rows in order_of_epochs(7, 8, 2, generator(0, 1, "here", phase)):
        x, y = clean(data, rows), data.y_train[rows]
        g = pull_back(x, ce_gradient(f(x, sigma + psi), y))
        sigma = sigma - 0.02 * 10 * clipped(g)
        psi = psi - 0.02 * clipped(1e-4 * np.sign(psi) + 20 * (psi - sigma))
    np.testing.assert_allclose(found.arrays["sigma"].numpy(), sigma, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.arrays["psi"].numpy(), psi, rtol=1e-4, atol=1e-6)


def test_an_unlabelled_client_of_fedmatch_sends_psi_alone():
    here = small.site(small.dataset(side=3), (), range(9))
    assert small.trained(FedMatch(NET, batch=4, epochs=1, unlabelled=True), here).arrays.keys() == {"psi"}


def update(client, **arrays):
    """The update of a client that trains only on its labels, if it has any."""
    return Update(client, tensors(**arrays), dict.fromkeys(arrays, client.labelled or client.unlabelled), {})


@pytest.mark.parametrize(("weights", "counts"), [("labels", (90, 1, 7, 4)), ("clients", (1, 1, 1, 1))])
def test_fedmatch_takes_means_and_remembers_what_it_needs_for_helpers(weights, counts, rng):
    """σ and ψ by labels, over those that trained them; or plainly. One noise image for all.

    A client that has none weighs ⌈10/3⌉ = 4: three unlabelled samples go with each labelled one.
    """
    a, b, c, o, p, q, r, old = (vector(rng) for _ in range(8))
    method = FedMatch(NET, weights=weights, ratio=3)
    clients = (Client("a", 90, 0), Client("b", 1, 5), Client("c", 7, 3), Client("e", 0, 10))
    state = tensors(sigma=old, psi=old)
    updates = [
        update(clients[0], sigma=a, psi=o),
        update(clients[1], sigma=b, psi=p),
        update(clients[2], sigma=c, psi=q),
        update(clients[3], psi=r),
    ]
    state = {k: v.float() for k, v in state.items()}
    updates = [u._replace(arrays={k: v.float() for k, v in u.arrays.items()}) for u in updates]
    merged = method.merge(state, updates, 1, rng)
    sigma, psi = np.average([a, b, c], 0, counts[:3]), np.average([o, p, q, r], 0, counts)
    np.testing.assert_allclose(merged["sigma"].numpy(), sigma, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged["psi"].numpy(), psi, rtol=1e-5, atol=1e-6)
    noise = generator("FedMatch's noise").random((1, 1, 3, 3), dtype=np.float32).astype(float)
    known = {f"{what} of {name}" for what in ("psi", "output") for name in "abce"}
    assert merged.keys() == {"sigma", "psi"} | known
    for name, sigma, psi in (("a", a, o), ("b", b, p), ("c", c, q), ("e", old, r)):
        np.testing.assert_allclose(merged[f"psi of {name}"].numpy(), psi, rtol=1e-6)
        np.testing.assert_allclose(
            merged[f"output of {name}"].numpy(), softmax(f(noise, sigma + psi))[0], rtol=1e-4, atol=1e-6
        )
    alone = method.merge(merged, [update(Client("d", 0, 4), psi=a.astype(np.float32))], 2, rng)
    expected = softmax(f(noise, merged["sigma"].double().numpy() + a))[0]
    np.testing.assert_allclose(alone["output of d"].numpy(), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(alone["psi of b"].numpy(), p, rtol=1e-6)
    assert method.model(alone).keys() == {"sigma", "psi"}


OUTPUTS = {  # nearest to a: d, b, c by Euclidean distance, b, d, c by the sum of gaps, c, b, d by the largest
    "a": (0.30, 0.30, 0.20, 0.20),
    "b": (0.56, 0.04, 0.20, 0.20),
    "c": (0.49, 0.49, 0.01, 0.01),
    "d": (0.57, 0.165, 0.065, 0.20),
}


def fedmatch_state():
    state = {"sigma": NET.initial(0), "psi": NET.initial(1)}
    for i, (name, output) in enumerate(OUTPUTS.items()):
        state |= {f"psi of {name}": torch.full((48,), float(i)), f"output of {name}": torch.tensor(output)}
    return state


@pytest.mark.parametrize(
    ("settings", "client", "expected"),
    [
        ({}, "a", "db"),
        ({}, "d", "ba"),
        ({"helpers": 1}, "b", "d"),
        ({"helpers": 9}, "a", "dbc"),
        ({"helpers": 0}, "a", ""),
        ({}, "new", ""),
    ],
)
def test_helpers_are_the_nearest_by_their_outputs(settings, client, expected):
    """By Euclidean distance of the outputs, never the client itself; one not known yet has none."""
    method, state = FedMatch(NET, **settings), fedmatch_state()
    message = method.message(state, Client(client, 3, 9), 10)
    helpers = {f"helper {i}": state[f"psi of {name}"] for i, name in enumerate(expected)}
    assert small.same(message, {"sigma": state["sigma"], "psi": state["psi"]} | helpers)
    full = method.message(state, Client(client, 12, 0), 10)
    assert full.keys() == {"sigma", "psi"}  # it has nothing to ask them about


def test_equally_near_helpers_do_not_depend_on_the_order_of_the_state():
    """A state read from a checkpoint has sorted names; in a run they are in the order of the clients."""
    outputs = {f"output of {name}": torch.tensor([0.0, 1.0]) for name in "cba"}
    method = FedMatch(NET, helpers=1)
    assert method.nearest(outputs, "a") == method.nearest(dict(sorted(outputs.items())), "a")


def test_helpers_are_sent_only_every_tenth_round():
    method, state = FedMatch(NET), fedmatch_state()
    sent = [t for t in range(1, 31) if len(method.message(state, Client("a", 3, 9), t)) > 2]
    assert sent == [10, 20, 30]
    often = FedMatch(NET, helper_rounds=4)
    assert [t for t in range(1, 13) if len(often.message(state, Client("a", 3, 9), t)) > 2] == [4, 8, 12]
    assert size_in_bytes(method.message(state, Client("a", 3, 9), 10)) == 4 * 48 * 4
    assert size_in_bytes(method.message(state, Client("a", 3, 9), 9)) == 4 * 48 * 2


# RSCFed


def test_rscfed_follows_the_sharpened_teacher_on_another_view(world):
    """0.02 · mean over samples of Σ_m (σ(f(b; w))_m − t_m)², t ∝ σ(f(a; teacher))²; by σ: 0.04·(σ − t)/n."""
    p, t = softmax(f(world.strong, world.w)), softmax(f(world.weak, world.sent)) ** 2
    t /= t.sum(1, keepdims=True)
    method = RSCFed(NET)
    teacher = as_models(tensors(teacher=world.sent), method.networks())

    def consistency(leaf):
        return method.consistency({"w": Model(NET, leaf, leaf[:0]), **teacher}, {}, world.unlabelled)

    def both(leaf):
        local = {"w": Model(NET, leaf, leaf[:0]), **teacher}
        return method.mixed(local, {}, world.unlabelled, world.labelled)

    gap, z = p - t, f(world.x, world.w)
    G = through_softmax(p, 0.02 * 2 * gap / len(p))
    value, grad = gradient(consistency, world.w)
    np.testing.assert_allclose(value, 0.02 * (gap**2).sum(1).mean(), rtol=1e-12)
    np.testing.assert_allclose(grad, pull_back(world.strong, G), **CLOSE)
    assert consistency(torch.from_numpy(world.w)).y.tolist() == t.argmax(1).tolist()
    assert both(torch.from_numpy(world.w)).y.tolist() == t.argmax(1).tolist()
    value, grad = gradient(both, world.w)
    np.testing.assert_allclose(value, 0.02 * (gap**2).sum(1).mean() + ce(z, world.y), rtol=1e-12)
    by_hand = pull_back(world.strong, G) + pull_back(world.x, ce_gradient(z, world.y))
    np.testing.assert_allclose(grad, by_hand, **CLOSE)


@pytest.mark.parametrize("steps", [0, 1, 9, 998, 999, 1000, 20_000])
def test_the_teacher_moves_in_ever_smaller_steps(steps, rng):
    """Teacher ← k·teacher + (1 − k)·w with k = min(1 − 1/(s + 1), 0.999), statistics as well; s ← s + 1."""
    (w, s), (v, r) = normed_vector(rng), normed_vector(rng)
    student, teacher = (Model(NORMED, *tensors(a=a, b=b).values()) for a, b in ((w, s), (v, r)))
    local = {"w": student, "teacher": teacher, "steps": torch.tensor([float(steps)], dtype=torch.float64)}
    new = RSCFed(NORMED).teach(local, {})
    keep = min(1 - 1 / (steps + 1), 0.999)
    np.testing.assert_allclose(new["teacher"].weights.numpy(), keep * v + (1 - keep) * w, rtol=1e-9)
    np.testing.assert_allclose(new["teacher"].statistics.numpy(), keep * r + (1 - keep) * s, rtol=1e-9)
    assert new["steps"].tolist() == [steps + 1]


def test_a_teacher_stays_with_its_client_and_keeps_its_count():
    """One step per round: after the first the teacher is w₁ (k = 0), after the second (w₁ + w₂)/2 (k = ½)."""
    method = RSCFed(small.net(), batch=32, epochs=1, lr=0.5, unlabelled_lr=0.5, consistency_weight=5.0)
    here = small.site(unlabelled=range(20))
    message = method.initial(0)
    first, kept = train(method, here, message, None, 1, 0)
    assert torch.equal(kept["teacher"], first.arrays["w"]) and kept["steps"].tolist() == [1]
    second, kept = train(method, here, message, kept, 2, 0)
    expected = (first.arrays["w"].double() + second.arrays["w"].double()) / 2
    assert not torch.allclose(first.arrays["w"], second.arrays["w"])
    np.testing.assert_allclose(kept["teacher"].numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    assert kept["steps"].tolist() == [2]


def test_who_trains_on_unlabelled_data_has_a_teacher():
    plain, mixed = RSCFed(NET, partial="labelled_only"), RSCFed(NET)
    state = plain.initial(0)
    for method, taught in ((plain, [UNLABELLED]), (mixed, [PARTIAL, UNLABELLED])):
        for client in (FULL, PARTIAL, UNLABELLED):
            memory = method.memory(client, state)
            first = {"teacher": state["w"], "steps": torch.zeros(1)} if client in taught else {}
            assert small.same(memory, first)


def tensor_lengths(gap):
    """Σ over the six tensors of the network with BatchNorm of the length of each."""
    places = [(0, 36), (40, 44), (48, 57), (64, 73), (80, 89), (96, 105)]
    return sum(np.sqrt((gap[a:b] ** 2).sum()) for a, b in places)


def consensus_by_hand(vectors, clients, boost=6, beta=(100, 10_000), boost_mean=False, held=False):
    """Σ ω_i·w_i / Σ ω_i, ω_i = f_i·exp(−β·d_i/n_i)·(6 with labels), in numbers that cannot underflow.

    n_i is all that a client holds, f_i its labels if it has any, or n_i [times 6 with labels],
    w̄ = Σ f_i·w_i / Σ f_i, d_i the sum over tensors of ‖w_i − w̄‖; β is the first where anybody has labels.
    """
    sizes = [c.labelled + c.unlabelled for c in clients]
    boosts = [boost if c.labelled else 1 for c in clients]
    counts = sizes if held else [c.labelled or c.unlabelled for c in clients]
    first = [f * b if boost_mean else f for f, b in zip(counts, boosts, strict=True)]
    centre = sum(n * v for n, v in zip(first, vectors, strict=True)) / sum(first)
    strength = beta[0] if any(c.labelled for c in clients) else beta[1]
    weights = []
    for v, n, share, b in zip(vectors, sizes, first, boosts, strict=True):
        exponent = Decimal(-float(strength)) * Decimal(float(tensor_lengths(v - centre))) / Decimal(n)
        weights.append(Decimal(share) * exponent.exp() * Decimal(b))
    shares = [float(weight / sum(weights)) for weight in weights]
    return sum(s * v for s, v in zip(shares, vectors, strict=True)), shares


def scattered(rng, n, spread=0.05):
    """Vectors of the network with BatchNorm, about as far apart as those of clients."""
    base = np.concatenate(normed_vector(rng))
    padding = base == 0
    return [np.where(padding, 0, base + spread * rng.normal(size=base.size)) for _ in range(n)]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("boost_mean", [False, True])
@pytest.mark.parametrize(
    "clients",
    [
        [Client("a", 5, 45), Client("b", 0, 60), Client("c", 40, 0), Client("d", 0, 35)],
        [Client("a", 0, 2500), Client("b", 0, 2500), Client("c", 0, 2300)],
        [Client("a", 0, 3), Client("b", 0, 4), Client("c", 0, 5)],
        [Client("a", 0, 9)],
    ],
    ids=["with labels", "without", "far below the smallest float", "one"],
)
def test_rscfeds_consensus_is_a_mean_by_size_and_distance(clients, boost_mean, held, rng):
    vectors = scattered(rng, len(clients))
    expected, shares = consensus_by_hand(vectors, clients, boost_mean=boost_mean, held=held)
    method = RSCFed(NORMED, boost_mean=boost_mean, weights="samples" if held else "labels")
    found = method.consensus([update(c, w=v) for c, v in zip(clients, vectors, strict=True)])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-10)
    assert len(clients) == 1 or max(shares) > 1.1 * min(shares)  # the distances matter


def test_the_boost_and_the_strengths_are_settings(rng):
    clients = [Client("a", 5, 45), Client("b", 0, 60), Client("c", 40, 0), Client("d", 0, 35)]
    vectors = scattered(rng, 4)
    method = RSCFed(NORMED, boost=2.5, beta_labelled=30.0, beta_unlabelled=70.0)
    for some in (slice(0, 4), slice(1, 4, 2)):
        chosen, named = vectors[some], clients[some]
        expected, _ = consensus_by_hand(chosen, named, 2.5, (30, 70))
        found = method.consensus([update(c, w=v) for c, v in zip(named, chosen, strict=True)])
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-10)


def test_rscfed_takes_the_mean_over_random_subsets(rng):
    """Three draws of five out of eight without replacement, from the generator of the merge."""
    clients = [Client(str(k), 10 * (k % 3 == 0), 30 + k) for k in range(8)]
    vectors = scattered(rng, 8)
    updates = [update(c, w=v) for c, v in zip(clients, vectors, strict=True)]
    state = tensors(w=vectors[0])
    found = RSCFed(NORMED).merge(state, updates, 4, np.random.default_rng(5))
    draws, expected = np.random.default_rng(5), []
    for _ in range(3):
        drawn = draws.choice(8, 5, replace=False)
        expected.append(consensus_by_hand([vectors[i] for i in drawn], [clients[i] for i in drawn])[0])
    np.testing.assert_allclose(found["w"].numpy(), sum(expected) / 3, rtol=1e-7, atol=1e-10)
    few = RSCFed(NORMED).merge(state, updates[:2], 4, np.random.default_rng(5))
    np.testing.assert_allclose(
        few["w"].numpy(), consensus_by_hand(vectors[:2], clients[:2])[0], rtol=1e-7, atol=1e-10
    )
    assert small.same(RSCFed(NORMED).merge(state, [], 4, rng), state)


@pytest.mark.parametrize(("weights", "counts"), [("samples", (50, 60, 40)), ("labels", (5, 60, 40))])
def test_rscfed_without_distances_is_a_mean_by_sizes(weights, counts, rng):
    """One subset of all, β = 0, boost 1: Σ f_i·w_i / Σ f_i over all that each holds, or its labels."""
    clients = [Client("a", 5, 45), Client("b", 0, 60), Client("c", 40, 0)]
    vectors = scattered(rng, 3, spread=1.0)
    plain = {"subsets": 1, "subset_size": 3, "boost": 1.0, "beta_labelled": 0.0, "beta_unlabelled": 0.0}
    method = RSCFed(NORMED, weights=weights, **plain)
    updates = [update(c, w=v) for c, v in zip(clients, vectors, strict=True)]
    found = method.merge(tensors(w=vectors[0]), updates, 1, rng)["w"].numpy()
    np.testing.assert_allclose(found, np.average(vectors, 0, counts), rtol=1e-9)


def test_the_distance_of_networks_is_a_sum_over_tensors(rng):
    a, b = scattered(rng, 2, spread=1.0)
    found = NORMED.distance(*tensors(a=a, b=b).values()).item()
    assert found == pytest.approx(tensor_lengths(a - b), rel=1e-12)
    assert found > 1.2 * np.sqrt(((a - b) ** 2).sum())  # not the length of the whole


# References


@pytest.mark.parametrize(("steps", "expected"), [(7, 7), (None, 32)])
def test_the_central_reference_makes_the_steps_of_a_round(steps, expected):
    """Without a number of steps it takes those of its epochs: 4·⌈1000/128⌉."""
    everyone = Client("all", 1000, 0)
    (phase,) = Central(NET, epochs=4, steps=steps).phases(everyone, 1)
    assert phase.length(everyone) == expected
    assert Central(NET, steps=steps).phases(Client("nobody", 0, 5), 1) == ()


def test_the_central_reference_makes_as_many_steps_as_fedavg_on_average(tmp_path):
    words = {"rounds": 1, "split.labels": "10%", "data.name": "fmnist-mini"}
    central = start(request("paper", words | {"method": "central"}), tmp_path / "central")
    fedavg = start(request("paper", words | {"method": "fedavg"}), tmp_path / "fedavg")
    counts = zip(central.split.labelled, central.split.unlabelled, strict=True)
    clients = [Client("k", len(labelled), len(unlabelled)) for labelled, unlabelled in counts]
    steps = [phase.length(client) for client in clients for phase in fedavg.method.phases(client, 1)]
    assert central.method.steps == round(sum(steps) * 8 / 20) == 56


@pytest.mark.parametrize(
    ("labels", "drawn", "steps"),
    [
        ([8, 16, 17, 17, 0], 2, 4),  # 9 steps of five clients: 2/5 · 9 = 3.6
        ([8, 16, 17, 0, 0], 2, 2),  # 2/5 · 6 = 2.4
        ([3, 0, 0, 0, 0], 1, 1),  # 0.2, but at least one
    ],
)
def test_the_mean_number_of_steps_is_rounded_to_the_nearest(labels, drawn, steps):
    clients = [Client(f"client {k}", n, 4) for k, n in enumerate(labels)]
    assert mean_steps(FedAvg(NET, batch=8, epochs=1), clients, drawn) == steps


@pytest.mark.parametrize(
    ("name", "unlabelled"), [("central", []), ("central-fixmatch", list(range(36, 120)))]
)
def test_a_central_reference_has_its_data_in_one_place(name, unlabelled):
    split = pooled(small.SPLIT, METHODS[name].pooled)
    assert [rows.tolist() for rows in split.labelled] == [list(range(36))]
    assert [rows.tolist() for rows in split.unlabelled] == [unlabelled]
    split.check(np.zeros(120, int))


def test_fixmatch_in_one_place_trains_as_a_partial_client_of_fixmatch():
    """An epoch over 64 unlabelled samples in batches of 16 is four steps; without any it is `central`."""
    quick = {"batch": 8, "confidence": 0.3}
    both = small.site(labelled=range(10), unlabelled=range(20, 84))
    federated, central = (
        small.trained(method, both).arrays["w"]
        for method in (
            FixMatch(small.net(), epochs=1, **quick),
            CentralFixMatch(small.net(), steps=4, **quick),
        )
    )
    assert torch.equal(federated, central)
    labels = small.site(labelled=range(20))
    alone, same = (
        small.trained(method, labels).arrays["w"]
        for method in (
            Central(small.net(), batch=8, steps=4),
            CentralFixMatch(small.net(), steps=4, **quick),
        )
    )
    assert torch.equal(alone, same)


def test_fixmatch_in_one_place_makes_as_many_steps_as_fixmatch_global_on_average(tmp_path):
    words = {"rounds": 1, "split.labels": "10%", "data.name": "fmnist-mini"}
    central = start(request("paper", words | {"method": "central-fixmatch"}), tmp_path / "central")
    sizes = [(len(x), len(u)) for x, u in zip(central.split.labelled, central.split.unlabelled, strict=True)]
    steps = [10 * (-(-u // 256) if u else -(-n // 128)) for n, u in sizes]
    assert central.method.steps == round(sum(steps) * 8 / 20)


def test_no_other_method_has_data_in_one_place():
    assert {name for name in METHODS if METHODS[name].pooled} == {"central", "central-fixmatch"}


def test_a_client_by_itself_trains_as_if_it_were_the_only_one():
    """Its model after each round is FedAvg's in a federation of that client alone."""
    quick = {"batch": 8, "epochs": 1}
    rounds = small.simulate(Alone(small.net(), **quick), 3, per_round=6)
    for name in ("client 1", "client 2", "client 4"):
        single = small.simulate(FedAvg(small.net(), **quick), 3, only={name})
        for done, its in zip(rounds, single, strict=True):
            assert torch.equal(done.state[f"w of {name}"], its.state["w"])
    assert torch.equal(rounds[-1].state["w"], FedAvg(small.net()).initial(0)["w"])
    assert rounds[-1].state.keys() == {"w", *(f"w of client {k}" for k in (1, 2, 3, 4))}


def test_clients_by_themselves_report_the_mean_of_their_accuracies(rng):
    """Not the accuracy of their mean; predictions by `mean` are the logarithm of mean probabilities."""
    a, b = vector(rng), vector(rng)
    state, x = tensors(**{"w": a, "w of k": a, "w of l": b}), pictures(rng)
    method = Alone(NET)
    z = method.predict(state, torch.from_numpy(x))
    assert z.keys() == {"w of k", "w of l", "mean"}
    np.testing.assert_allclose(z["w of l"].numpy(), f(x, b), rtol=1e-10)
    np.testing.assert_allclose(
        np.exp(z["mean"].numpy()), (softmax(f(x, a)) + softmax(f(x, b))) / 2, rtol=1e-10
    )
    assert method.report({"w of k": 0.5, "w of l": 0.25, "mean": 0.9}) == {"mean": 0.375}
    start = method.predict({"w": state["w"]}, torch.from_numpy(x))
    np.testing.assert_allclose(softmax(start["mean"].numpy()), softmax(f(x, a)), rtol=1e-10)


def test_a_client_called_mean_counts_like_any_other(rng):
    a, b = vector(rng), vector(rng)
    state, x = tensors(**{"w": a, "w of k": a, "w of mean": b}), pictures(rng)
    z = Alone(NET).predict(state, torch.from_numpy(x))
    np.testing.assert_allclose(z["w of mean"].numpy(), f(x, b), rtol=1e-10)
    np.testing.assert_allclose(
        np.exp(z["mean"].numpy()), (softmax(f(x, a)) + softmax(f(x, b))) / 2, rtol=1e-10
    )
    assert Alone(NET).report(dict.fromkeys(z, 0.5) | {"w of mean": 1.0}) == {"mean": 0.75}
