"""Differential privacy by site: clipping, noise, sampling, the accountant, and runs that have a budget."""

import math
import statistics

import numpy as np
import pytest
import small
import torch

from fedhassle.engine.privacy.account import ORDERS, accountant, noise_for, rounds_within, spent
from fedhassle.engine.privacy.by_site import (
    SitePrivacy,
    clipped_updates,
    expected_counts,
    private_means,
    secret_normals,
)
from fedhassle.engine.rounds import Plan, Reply, federate, select
from fedhassle.method import Client, Update
from fedhassle.methods import FedAvg, Hassle
from fedhassle.randomness import generator
from fedhassle.robust import clipped_jointly, joint_norm
from fedhassle.settings.hashing import expected_hash

NET = small.net(small.Linear, side=3)


# Clipping


def test_all_vectors_of_an_update_are_clipped_together():
    """(3, 0) and (0, 4) have norm 5 together: a bound of 1 leaves a fifth of each, a bound of 5 all."""
    arrays = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    assert joint_norm(arrays) == pytest.approx(5.0)
    found = clipped_jointly(arrays, 1.0)
    np.testing.assert_allclose(found["a"], [0.6, 0.0], rtol=2e-6)
    np.testing.assert_allclose(found["b"], [0.0, 0.8], rtol=2e-6)
    assert joint_norm(found) <= 1.0
    assert clipped_jointly(arrays, 5.0) is arrays
    assert joint_norm({}) == 0.0


def update(client, **values):
    arrays = {name: torch.tensor(value) for name, value in values.items()}
    return Update(client, arrays, dict.fromkeys(arrays, client.labelled), {})


ANN, BOB, CAT = Client("ann", 30, 0), Client("bob", 1, 20), Client("cat", 0, 20)


def test_clipping_alone_keeps_the_weights_of_the_mean():
    """Ann moves by 10 of 30 samples, clipped to 2; bob by 1 of one sample: (30·2 + 1·1)/31."""
    state = {"w": torch.tensor([1.0])}
    near = clipped_updates([update(ANN, w=[11.0]), update(BOB, w=[2.0])], state, 2.0)
    merged = FedAvg(NET).merge(state, near, 1, generator(0))
    assert merged["w"].item() == pytest.approx(1 + 61 / 31, rel=1e-5)


# Means with noise


class Plain:
    """A stand-in for a method: no vector is a network."""

    def networks(self):
        return {}


def test_private_means_are_sums_over_fixed_counts_with_noise_on_every_model():
    """As in NumPy: sums of jointly clipped changes, z·C·N(0, 1), divided by what is expected.

    ann's change (3, 4) in w and u has norm 5, clipped to C = 2; bob's (1) in w stays. Nobody trains v.
    """
    state = {"w": torch.tensor([1.0]), "u": torch.tensor([1.0]), "v": torch.tensor([1.0])}
    counts = {"w": 2.5, "u": 1.0, "v": 4.0}
    updates = [update(ANN, w=[4.0], u=[5.0]), update(BOB, w=[2.0])]
    found = private_means(SitePrivacy(2.0, 0.5), Plain(), state, updates, counts, np.random.default_rng(7))
    noise = np.random.default_rng(7).standard_normal(3)  # one number for each model, in order
    sums = np.array([3 * 2 / 5 + 1, 4 * 2 / 5, 0.0]) + 0.5 * 2.0 * noise
    expected = 1 + sums / np.array([2.5, 1.0, 4.0])
    np.testing.assert_allclose([found[k].item() for k in counts], expected, rtol=1e-5)


def test_one_site_moves_the_sum_by_at_most_the_bound_whatever_it_sends():
    state, counts = {"w": torch.zeros(4), "u": torch.zeros(4)}, {"w": 1.0, "u": 1.0}
    others = [update(BOB, w=[0.1] * 4)]
    for size in (1e-3, 1.0, 1e6, 3e38):
        with_ann = [*others, update(ANN, w=[size] * 4, u=[-size] * 4)]
        a, b = (
            private_means(SitePrivacy(0.7, 1.0), Plain(), state, us, counts, np.random.default_rng(1))
            for us in (others, with_ann)
        )
        assert joint_norm({k: a[k] - b[k] for k in a}) <= 0.7 + 1e-5


def test_counts_are_expectations_over_all_clients_and_at_least_one():
    """Of three clients two have labels and two unlabelled images; a half of them is drawn."""
    method, clients = Hassle(NET), (ANN, BOB, CAT, Client("dan", 5, 0))
    assert expected_counts(method, clients, 0.5, 1) == {"w_S": 1.5, "r_US": 1.5, "w_U": 1.0, "r_SU": 1.0}
    assert expected_counts(method, (Client("eve", 0, 0),), 1.0, 1) == {}


def test_noise_of_the_system_is_normal():
    x = secret_normals(40_000)
    assert abs(x.mean()) < 5 / 200
    assert x.std() == pytest.approx(1, abs=5 / math.sqrt(2 * 40_000))
    assert np.mean(np.abs(x) > 1.959964) == pytest.approx(0.05, abs=5 * math.sqrt(0.05 * 0.95 / 40_000))
    assert not np.array_equal(x, secret_normals(40_000))


def test_noise_leaves_a_network_that_can_predict():
    """Variances stay positive, and padding zero, under noise of a thousand times their size."""
    net = small.net(small.ConvNet)
    method = FedAvg(net)
    state = method.initial(0)
    found = private_means(SitePrivacy(1.0, 1000.0), method, state, [], {"w": 1.0}, np.random.default_rng(0))
    assert torch.isfinite(net.logits(found["w"], torch.zeros(2, *net.shape))).all()
    torch.testing.assert_close(net.projected(state["w"]), state["w"], rtol=0, atol=0)


# Drawing


def test_clients_are_drawn_by_chance_if_their_secrecy_counts():
    """A Poisson sample of 20 clients at rate 0.4: 8 on average, of variance 20·0.4·0.6."""
    clients = tuple(Client(f"client {k}", 1, 0) for k in range(20))
    plan = Plan(500, 8, 0, SitePrivacy(1.0, 1.0, rate=0.4))
    sizes = [len(select(clients, plan, t)) for t in range(500)]
    assert statistics.fmean(sizes) == pytest.approx(8, abs=5 * math.sqrt(4.8 / 500))
    assert statistics.variance(sizes) == pytest.approx(4.8, rel=0.4)
    assert all(len(select(clients, plan._replace(privacy=p), 1)) == 8 for p in (None, SitePrivacy(1.0, 1.0)))


class Nobody:
    """A federation none of whose clients answers."""

    def present(self):
        return (ANN, BOB)

    def rewind(self, t):
        pass

    def train(self, method, messages, t):
        return list[Reply]()


def test_a_round_in_which_nobody_is_drawn_still_gets_noise():
    state = FedAvg(NET).initial(0)
    plan = Plan(1, 1, 0, SitePrivacy(1.0, 1.0, rate=1e-9))
    done = next(federate(FedAvg(NET), Nobody(), plan, state))
    assert done.clients == () and not torch.equal(done.state["w"], state["w"])


# The accountant


@pytest.mark.parametrize(
    ("noise", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
)
def test_the_divergences_are_those_behind_published_values(noise, epochs, published):
    """TensorFlow Privacy's tutorial on MNIST: 60,000 images, batches of 256, δ = 1e-5.

    Its table was made with ε = min_α RDP(α) − log δ/(α − 1) (Mironov 2017, Proposition 3). Ours turns the
    same divergences into a smaller ε.
    """
    steps, rate = epochs * 60_000 // 256, 256 / 60_000
    rdp = accountant().compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=ORDERS)
    classic = min(r - math.log(1e-5) / (a - 1) for r, a in zip(rdp, ORDERS, strict=True))
    assert classic == pytest.approx(published, abs=0.02)
    assert spent(noise, rate, steps, 1e-5) < published


@pytest.mark.parametrize(("noise", "rate", "alpha"), [(1.1, 0.1, 2.5), (2.0, 0.4, 8.0), (0.8, 0.02, 4.7)])
def test_the_divergence_of_a_sampled_round_is_the_integral_that_defines_it(noise, rate, alpha):
    """Mironov et al. (2019): log ∫ ν·((1 − q) + q·e^((2x − 1)/2z²))^α dx / (α − 1), where ν is N(0, z²).

    One world has the site with probability q, which moves the mean from 0 to 1; the other never has it.
    """
    x = np.linspace(-30 * noise, 60 * noise, 400_001)
    without = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    ratio = (1 - rate) + rate * np.exp((2 * x - 1) / (2 * noise**2))
    found = accountant().compute_rdp(q=rate, noise_multiplier=noise, steps=3, orders=alpha)
    one, other = (np.trapezoid(without * ratio**power, x) for power in (alpha, 1 - alpha))
    assert found == pytest.approx(3 * math.log(one) / (alpha - 1), rel=1e-5)
    assert other <= one  # the same divergence with the worlds exchanged is no larger


def exact(noise, rounds, delta):
    """ε of Gaussian mechanisms without sampling (Balle and Wang): Φ(µ/2 − ε/µ) − e^ε·Φ(−µ/2 − ε/µ) = δ."""
    mu, phi = math.sqrt(rounds) / noise, statistics.NormalDist().cdf
    low, high = 0.0, 100.0
    for _ in range(100):
        e = (low + high) / 2
        over = phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu) > delta
        low, high = (e, high) if over else (low, e)
    return high


@pytest.mark.parametrize(("noise", "rounds"), [(10, 100), (5, 3), (1, 1), (40, 30)])
def test_without_sampling_the_bound_is_just_above_the_exact_value(noise, rounds):
    found, least = spent(noise, 1.0, rounds, 1e-5), exact(noise, rounds, 1e-5)
    assert least <= found <= 1.15 * least


def test_what_is_spent_falls_with_noise_and_grows_with_rounds_rate_and_lost_rounds():
    assert spent(2, 0.4, 10, 1e-5) < spent(1, 0.4, 10, 1e-5) < spent(1, 0.4, 11, 1e-5)
    assert spent(1, 0.2, 10, 1e-5) < spent(1, 0.4, 10, 1e-5) < spent(1, 1.0, 10, 1e-5)
    assert SitePrivacy(1.0, 2.0, lost=3).epsilon(7) == SitePrivacy(1.0, 2.0).epsilon(10)
    assert SitePrivacy(1.0).epsilon(5) is None
    assert spent(1, 1.0, 0, 1e-5) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2, 16, 200])
def test_noise_for_a_budget_is_the_least_that_keeps_it(epsilon):
    noise = noise_for(epsilon, 0.4, 50, 1e-5)
    assert spent(noise, 0.4, 50, 1e-5) <= epsilon < spent(noise * 0.997, 0.4, 50, 1e-5)


def test_a_budget_allows_the_most_rounds_that_keep_it():
    privacy = SitePrivacy(1.0, 2.0, rate=0.4)
    t = rounds_within(4.0, privacy, 100)
    assert 0 < t < 100
    assert privacy.epsilon(t) <= 4.0 < privacy.epsilon(t + 1)
    assert rounds_within(1000.0, privacy, 100) == 100
    assert rounds_within(0.01, privacy, 100) == 0


# Runs


def test_a_run_reports_what_it_spends_and_stops_at_its_budget(without_residuals, tmp_path):
    out = tmp_path / "run"
    words = ("method=fedavg", "rounds=6", "evaluate_every=1", "privacy.noise=1.5", "privacy.clip=0.5")
    code, printed, err = small.call("run", *without_residuals, *words, "privacy.epsilon=6", "--out", out)
    assert (code, err) == (0, "")
    summary, lines = small.summary_of(out), small.metrics_of(out)
    told, rounds = summary["privacy"], summary["rounds"]
    assert 0 < rounds < 6
    assert [line["epsilon"] for line in lines] == [spent(1.5, 4 / 6, t + 1, 1e-5) for t in range(rounds)]
    assert told["epsilon"] == lines[-1]["epsilon"] <= 6 < spent(1.5, 4 / 6, rounds + 1, 1e-5)
    assert (told["delta"], told["unit"], told["noise"], told["clip"]) == (1e-5, "site", 1.5, 0.5)
    card = (out / "model.md").read_text("utf-8")
    assert f"ε = {told['epsilon']:.2f}, δ = 1e-05" in card
    assert "simulated: whoever knows the seed can remove the noise; the weights alone" in card
    assert "another would spend more than ε = 6" in " ".join(printed.split())
    assert f"ε {lines[0]['epsilon']:.2f}" in printed
    assert f"round 1/{rounds}" in printed and f"{rounds} rounds, on cpu" in " ".join(printed.split())
    assert f"ε = {told['epsilon']:.2f} at δ = 1e-05" in " ".join(printed.split())


@pytest.mark.parametrize("method", ["hassle", "hassle+"])
def test_a_private_run_that_was_cut_ends_with_the_same_bits(method, without_residuals, tmp_path):
    words = [*without_residuals, f"method={method}", "method.average=0.5", "privacy.epsilon=8"]
    assert small.call("run", *words, "--out", tmp_path / "whole")[0] == 0
    small.cut(words, tmp_path / "cut", 2)
    assert small.call("resume", tmp_path / "cut")[0] == 0
    small.assert_same_result(tmp_path / "cut", tmp_path / "whole")
    assert small.summary_of(tmp_path / "whole")["privacy"]["epsilon"] == pytest.approx(8, rel=0.01)
    code, _, err = small.call("resume", tmp_path / "whole", "rounds=9")
    assert code and "privacy.noise follows from privacy.epsilon" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("method=rscfed", "privacy.epsilon=8"), "by a weighted mean, and rscfed does not"),
        (("method=fedavg", "method.merging=median", "privacy.noise=1"), "leave one of both out"),
        (("method=central", "privacy.clip=1"), "by a weighted mean, and central does not"),
        (("method=fedavg", "privacy.epsilon=0.001", "privacy.noise=1"), "spent before the first round"),
        (("method=fedavg", "privacy.delta=0.1"), "privacy.delta needs noise"),
        (("method=fedavg", "privacy.noise=-1"), "privacy.noise: input should be greater than 0"),
    ],
)
def test_what_cannot_be_private_is_refused(words, says, without_residuals, tmp_path):
    code, _, err = small.call("run", *without_residuals, *words, "--out", tmp_path / "run")
    assert code == 2 and says in " ".join(err.split())


def test_settings_without_privacy_keep_their_hash():
    """The hash of the preset `paper`, as in the ledger before there was any privacy."""
    assert "privacy" not in small.resolved().as_toml()
    assert expected_hash(small.resolved("data=cifar10")) != expected_hash(
        small.resolved("data=cifar10", "privacy.epsilon=8")
    )
