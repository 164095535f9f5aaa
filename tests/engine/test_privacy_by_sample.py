"""Differential privacy by sample: clipped gradients of single samples, noise, drawing, and the account."""

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest
import small
import torch
from on_lanes import assert_lanes_train_as_eagerly, clients, pool

from fedhassle.architectures import LeNet
from fedhassle.engine.client import visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.program import Program, Seat, stretch_functions
from fedhassle.engine.gpu.recording import capture_obstacle
from fedhassle.engine.gpu.shapes import shape_of
from fedhassle.engine.job import anew_walk, draw
from fedhassle.engine.privacy.account import COARSE, divergences, spent
from fedhassle.engine.privacy.by_sample import (
    BySample,
    Chance,
    Mechanism,
    SamplePrivacy,
    Walk,
    normals,
    private_loss,
    room,
    walks_of,
)
from fedhassle.engine.privacy.separable import require_separable
from fedhassle.errors import UserError
from fedhassle.method import Batch, Client, Model
from fedhassle.methods import METHODS, FedAvg, FedProx, Hassle

NET = small.net(small.Linear, side=3)
DELTA = 1e-5


# Gradients


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def test_the_gradient_is_the_noisy_sum_of_clipped_gradients_of_single_samples():
    """A loop over samples in NumPy, for z = W·x + b: ∂ℓ/∂z = softmax(z) − onehot(y); FedProx adds μ·(w − w₀).

    Of six samples the first four are drawn; five are expected. The longest gradients are clipped to C = 3.
    """
    method = FedProx(NET, mu=0.3)
    rng = np.random.default_rng(1)
    w, start = (rng.normal(0, 0.4, NET.n_weights) for _ in range(2))
    x, y = rng.normal(0, 1, (6, 1, 3, 3)), np.array([0, 1, 2, 3, 0, 1])
    w, start = (NET.cleared(torch.tensor(v, dtype=torch.float32)) for v in (w, start))
    leaf = w.clone().requires_grad_()
    none = torch.zeros(0)
    local, received = {"w": Model(NET, leaf, none, True)}, {"w": Model(NET, start, none)}
    batch = Batch((torch.tensor(x, dtype=torch.float32),), torch.tensor(y))
    key = [7.0, 65535.0, 3.0, 40000.0]
    drawn = torch.tensor([4.0, 1 / 5, *key])
    loss = private_loss(method.loss, "w", Mechanism(3.0, 0.5), local, received, batch, drawn)
    (found,) = torch.autograd.grad(loss, leaf)

    weights, bias = (t.numpy() for t in _tensors(w))
    total, losses, norms = np.zeros(NET.n_weights), [], []
    for xi, yi in list(zip(x, y, strict=True))[:4]:
        p = softmax(weights @ xi.ravel() + bias)
        gap = p - np.eye(4)[yi]
        own = _flat(np.outer(gap, xi.ravel()), gap) + 0.3 * (w - start).numpy()
        norms.append(np.linalg.norm(own))
        total += own * min(1, 3.0 / norms[-1])
        losses.append(-math.log(p[yi]) + 0.15 * float((w - start).square().sum()))
    noise = NET.cleared(normals(torch.tensor(key), NET.n_weights)).numpy()
    np.testing.assert_allclose(found, (total + 0.5 * 3.0 * noise) / 5, rtol=1e-4, atol=1e-6)
    assert loss.item() == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert min(norms) < 3 < max(norms)


def _tensors(flat):
    first, second = torch.split(flat, NET.weight_sizes)
    return first[:36].view(4, 9), second[:4]


def _flat(weights, bias):
    found = np.zeros(NET.n_weights)
    found[:36] = weights.ravel()
    found[NET.weight_sizes[0] : NET.weight_sizes[0] + 4] = bias
    return found


def test_one_sample_moves_the_sum_by_at_most_the_bound_whatever_it_is():
    weights = NET.initial(0)
    local = {"w": Model(NET, weights.clone().requires_grad_(), torch.zeros(0), True)}
    x, y = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])

    def gradient(x, taken):
        given = torch.tensor([taken, 1.0, 1, 2, 3, 4])
        loss = private_loss(FedAvg(NET).loss, "w", Mechanism(0.7, 1.0), local, {}, Batch((x,), y), given)
        return torch.autograd.grad(loss, local["w"].weights)[0]

    without = gradient(x, 3.0)
    for size in (1e-3, 1.0, 1e4, 1e30, math.inf):
        changed = torch.cat([x[:3], size * x[3:]])
        torch.testing.assert_close(gradient(changed, 3.0), without, rtol=0, atol=0)  # it is not drawn
        assert (gradient(changed, 4.0) - without).norm() <= 0.7 + 1e-5


def test_the_noise_is_normal_and_independent_of_place_and_step():
    rng = np.random.default_rng(0)
    rows = torch.stack([normals(torch.tensor(rng.integers(0, 2**16, 4)).float(), 20_000) for _ in range(20)])
    x, n = rows.double().numpy(), 400_000
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert x.std() == pytest.approx(1, abs=5 / math.sqrt(2 * n))
    for limit in (0.5, 1.0, 2.0, 3.0, 4.0):
        share = 2 * (1 - statistics.NormalDist().cdf(limit))
        assert np.mean(np.abs(x) > limit) == pytest.approx(share, abs=5 * math.sqrt(share / n))
    between = np.corrcoef(x)[np.triu_indices(20, 1)]
    assert np.abs(between).max() < 5 / math.sqrt(20_000)
    assert abs(np.corrcoef(x[:, 1:].ravel(), x[:, :-1].ravel())[0, 1]) < 5 / math.sqrt(n)


# Drawing


def test_every_sample_is_drawn_in_every_step_with_the_same_probability():
    """Of 50 samples 20 are expected: the size is binomial, each sample comes with rate 0.4, by itself."""
    chance, rng, steps = Chance(50, 20), np.random.default_rng(3), 4000
    orders = anew_walk(50, room(20), steps, rng)
    sizes = np.array([chance(rng)[0] for _ in range(steps)])
    hits = np.zeros((steps, 50), bool)
    for t, (order, size) in enumerate(zip(orders, sizes, strict=True)):
        hits[t, order[: int(size)]] = True
    assert (hits.sum(1) == sizes).all()  # none twice
    assert sizes.mean() == pytest.approx(20, abs=5 * math.sqrt(12 / steps))
    assert sizes.var() == pytest.approx(12, rel=0.15)
    assert np.abs(hits.mean(0) - 0.4).max() < 5 * math.sqrt(0.24 / steps)
    together = np.corrcoef(hits.T)[np.triu_indices(50, 1)]
    assert np.abs(together).max() < 5.5 / math.sqrt(steps)


@pytest.mark.parametrize("batch", [1, 8, 128, 2000])
def test_a_batch_has_room_for_all_that_are_drawn(batch):
    """P(X ≥ room) of a Poisson variable, summed term by term."""
    size = room(batch)
    terms = [math.exp(k * math.log(batch) - batch - math.lgamma(k + 1)) for k in range(size, size + 300)]
    assert sum(terms) < 1e-18
    assert size < batch + 12 * math.sqrt(batch) + 25


def test_a_client_with_fewer_samples_than_a_batch_takes_all_in_each_step():
    rng = np.random.default_rng(0)
    taken, share, *_ = Chance(5, 8)(rng)
    assert (taken, share) == (5, 1 / 5)
    assert sorted(anew_walk(5, room(8), 1, rng)[0][:5]) == [0, 1, 2, 3, 4]


# The account


def test_every_model_that_trains_on_a_sample_counts():
    """HASSLE, batches of 10: w_S makes 3 steps on 25 labels, w_U 4 on 40 others, each residual 7.

    The partial client takes part in rounds 1 and 3, the full one, whose batch is all it has, in round 2.
    """
    method = Hassle(NET, batch=10, epochs=1, residual_steps=7)
    partial, full = Client("ann", 25, 40), Client("bob", 8, 0)
    walks = walks_of(method.phases, [(partial,), (full,), (partial,)])
    assert set(walks) == {
        (Walk(1, 0.4, 3), Walk(1, 0.4, 7), Walk(3, 0.4, 3), Walk(3, 0.4, 7)),
        (Walk(1, 0.25, 4), Walk(1, 0.25, 7), Walk(3, 0.25, 4), Walk(3, 0.25, 7)),
        (Walk(2, 1.0, 1), Walk(2, 1.0, 7)),
    }
    privacy = SamplePrivacy(1.0, 5.0, DELTA, walks)
    each = [(0.4, 20), (0.25, 22), (1.0, 8)]
    assert privacy.epsilon(0) == 0
    assert privacy.epsilon(1) == pytest.approx(spent(5.0, 0.4, 10, DELTA), rel=0.02)
    expected = max(spent(5.0, rate, steps, DELTA) for rate, steps in each)
    assert privacy.epsilon(3) == pytest.approx(expected, rel=0.02)
    assert replace(privacy, noise=0.0).epsilon(3) is None


def test_the_sample_that_lost_most_is_found_among_all():
    """As a maximum over every client, none left out."""
    rng = np.random.default_rng(0)
    pairs = [(float(rng.choice([0.02, 0.05, 0.1])), int(rng.integers(1, 60))) for _ in range(30)]
    privacy = SamplePrivacy(1.0, 0.9, DELTA, tuple((Walk(1, *pair),) for pair in pairs))
    assert privacy.epsilon(1) == pytest.approx(max(spent(0.9, *pair, DELTA) for pair in pairs), rel=0.02)


@pytest.mark.parametrize(
    ("n", "batch", "noise", "steps", "published"),
    [
        (60_000, 256, 1.3, 15 * 60_000 // 256, 1.19),  # TensorFlow Privacy's tutorial on MNIST
        (60_000, 256, 1.1, 60 * 60_000 // 256, 3.01),
        (60_000, 256, 0.7, 45 * 60_000 // 256, 7.10),
        (60_000, 600, 4.0, 10_000, 1.26),  # Abadi et al. (2016), Section 3.2: q = 0.01, σ = 4, E = 100
    ],
)
def test_the_account_of_one_client_gives_published_values(n, batch, noise, steps, published):
    """δ = 10⁻⁵. They turned divergences into ε by RDP(α) − log δ/(α − 1); we do so more tightly."""
    rate = batch / n
    total = steps * divergences(noise, rate)
    classic = min(r - math.log(DELTA) / (a - 1) for r, a in zip(total, COARSE, strict=True))
    assert classic == pytest.approx(published, abs=0.03)
    client = Client("all", n, 0)
    method = FedAvg(NET, batch=batch, epochs=1)
    (phase,) = method.phases(client, 1)
    (walks,) = walks_of(lambda *_: (replace(phase, epochs=0, steps=steps),), [[client]])
    epsilon = SamplePrivacy(1.0, noise, DELTA, (walks,)).epsilon(1)
    assert 0.75 * published < epsilon < published


# Training


def test_phases_keep_their_steps_and_draw_anew():
    method, client = FedAvg(NET, batch=10, epochs=3), Client("ann", 25, 0)
    (plain,), (private,) = (m.phases(client, 1) for m in (method, BySample.of(method)))
    assert private.length(client) == plain.length(client) == 9
    assert private.streams[0].batch == room(10) and private.streams[0].anew
    assert private.descents[0].optimiser == plain.descents[0].optimiser._replace(clip=0.0)


def test_without_noise_and_with_a_loose_clip_a_client_trains_as_it_does_on_full_batches():
    """Each step takes all of its 8 samples: private steps are those of plain training on one full batch."""
    here = small.site(labelled=range(8))
    method = FedAvg(small.net(small.Linear), batch=8, epochs=3, clip=0.0)
    plain = small.trained(method, here).arrays["w"]
    private = small.trained(BySample.of(method, mechanism=Mechanism(1e6, 0.0)), here).arrays["w"]
    torch.testing.assert_close(private, plain, rtol=1e-4, atol=1e-5)
    noisy = small.trained(BySample.of(method, mechanism=Mechanism(1e-3, 1.0)), here).arrays["w"]
    assert not torch.allclose(noisy, plain, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"), [("fedavg", {}), ("hassle", {}), ("hassle", {"pseudo_labels": "online"})]
)
def test_clients_on_lanes_end_in_the_same_bits(name, settings):
    net = small.net(LeNet, 3, 12, width=0.25)
    short = {"batch": 8, "epochs": 1, **({"residual_steps": 3} if name == "hassle" else {})}
    method = BySample.of(METHODS[name](net=net, **short, **settings), mechanism=Mechanism(0.5, 0.8))
    assert_lanes_train_as_eagerly(pool(), method, clients(3, 12)[:3])


def test_clients_of_any_size_share_a_recording():
    method = BySample.of(FedAvg(NET, batch=4))
    sites = small.beside(*(small.site(labelled=range(n)) for n in (3, 9, 20)))
    visits = [visit(method, one, method.initial(0), None, 1, 0) for one in sites]
    assert len({shape_of(job, {}) for each in visits for job in each.jobs}) == 1


def test_a_private_step_waits_for_nothing_on_the_device():
    """So a GPU can capture it."""
    short = {"batch": 8, "epochs": 1, "residual_steps": 3}
    method = BySample.of(Hassle(small.net(LeNet, width=0.25), **short), mechanism=Mechanism(0.5, 0.8))
    here, engine = small.site(labelled=range(20), unlabelled=range(30, 60)), Engine(small.CPU)
    for job in visit(method, here, method.message(method.initial(0), here.client, 1), None, 1, 0).jobs:
        program = Program(Seat.of(job, job.message, {}, draw(job)))
        functions = stretch_functions(job, program.example.questions(job, engine), engine)
        assert capture_obstacle(functions, program) == ""


# Runs

PRIVATE = ("privacy.unit=sample",)


@pytest.fixture
def words(without_residuals):
    return [*without_residuals, "net=lenet", *PRIVATE]


def test_a_run_reports_what_it_spends_and_stops_at_its_budget(words, tmp_path):
    out = tmp_path / "run"
    chosen = ("method=fedavg", "rounds=5", "evaluate_every=1", "privacy.noise=2", "privacy.epsilon=4")
    chosen = (*chosen, "privacy.clip=0.5")
    code, printed, err = small.call("run", *words, *chosen, "--out", out)
    assert (code, err) == (0, "")
    summary, lines = small.summary_of(out), small.metrics_of(out)
    told = summary["privacy"]
    assert 0 < summary["rounds"] < 5
    spends = [line["epsilon"] for line in lines]
    assert spends == sorted(spends) and told["epsilon"] == spends[-1] <= 4
    assert (told["unit"], told["noise"], told["clip"]) == ("sample", 2.0, 0.5)
    assert "differentially private, by sample" in (out / "model.md").read_text("utf-8")
    printed = " ".join(printed.split())
    assert "another would spend more than ε = 4" in printed
    assert "gradients of single samples clipped to 0.5" in printed


def test_a_private_run_that_was_cut_ends_with_the_same_bits(words, tmp_path):
    words = [*words, "method=hassle", "method.average=0.5", "privacy.epsilon=8"]
    assert small.call("run", *words, "--out", tmp_path / "whole")[0] == 0
    small.cut(words, tmp_path / "cut", 2)
    assert small.call("resume", tmp_path / "cut")[0] == 0
    small.assert_same_result(tmp_path / "cut", tmp_path / "whole")
    assert small.summary_of(tmp_path / "whole")["privacy"]["epsilon"] == pytest.approx(8, rel=0.01)
    code, _, err = small.call("resume", tmp_path / "whole", "rounds=9")
    assert code and "privacy.noise follows from privacy.epsilon" in err


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (("method=mixmatch", "privacy.epsilon=8"), "split.labels=LU"),
        (("method=fedavg", "net=resnet8", "privacy.epsilon=8"), "set net=lenet"),
        (("method=fedavg", "privacy.epsilon=0.001", "privacy.noise=1"), "spent before the first round"),
        (("method=fedavg", "privacy.delta=0.1"), "privacy.delta needs noise"),
        (("method=fedavg", "privacy.epsilon=8", "privacy.masks=true"), "for a real federation"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused(chosen, says, words, tmp_path):
    code, _, err = small.call("run", *words, *chosen, "--out", tmp_path / "run")
    assert code == 2 and says in " ".join(err.split())


# Refusals


@dataclass(frozen=True)
class Coupled(FedAvg):
    """A user's method whose loss is no mean: the largest of its batch."""

    def loss(self, local, received, batch):
        z = local["w"](batch.views[0])
        return torch.nn.functional.cross_entropy(z, batch.y, reduction="none").amax()


@dataclass(frozen=True)
class Branching(FedAvg):
    """A user's method whose loss looks at a value."""

    def loss(self, local, received, batch):
        loss = super().loss(local, received, batch)
        return loss if loss.item() > 0 else 2 * loss


FULL, PARTIAL, BARE = Client("a", 9, 0), Client("b", 9, 9), Client("c", 0, 9)


@pytest.mark.parametrize(
    ("method", "client", "says"),
    [
        (FedAvg(small.net(small.ConvNet)), FULL, "BatchNorm does not have: set net=lenet"),
        (FedAvg(small.net(small.NoisyNet)), FULL, "dropout"),
        (FedAvg(small.net(small.Jittery)), FULL, "random layers"),
        (FedAvg(NET, prior="batch"), FULL, "set method.prior=none"),
        (METHODS["mixmatch"](NET), PARTIAL, "combines images"),
        (METHODS["fixmatch"](NET), PARTIAL, "combines images"),
        (METHODS["fedmatch"](NET), FULL, "combines images or models"),
        (METHODS["hassle+"](NET, prior="none", start=0), BARE, "method.own_mix=false"),
        (Coupled(NET), FULL, "no mean over the images of a batch"),
        (Branching(NET), FULL, "cannot be taken of one by itself"),
    ],
)
def test_what_couples_samples_is_refused(method, client, says):
    with pytest.raises(UserError, match="each single image") as raised:
        require_separable(method, "it", (client,), 3)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("method", "clients"),
    [
        (FedAvg(NET), (FULL, PARTIAL, BARE)),
        (FedProx(NET), (FULL, PARTIAL)),
        (Hassle(NET), (FULL, PARTIAL, BARE)),
        (Hassle(NET, pseudo_labels="online", confidence=0.5), (BARE,)),
        (METHODS["fixmatch-global"](NET), (FULL, BARE)),
        (METHODS["sage"](NET), (FULL, BARE)),
        (METHODS["rscfed"](NET), (FULL, BARE)),
        (METHODS["hassle+"](NET, prior="none", own_mix=False), (FULL, BARE)),
        (METHODS["local"](NET), (FULL,)),
        (METHODS["central"](NET), (FULL,)),
    ],
)
def test_what_does_not_couple_them_is_allowed(method, clients):
    require_separable(method, "it", clients, 3)
