"""The settings that every method has: a class prior, views of labels, means over rounds, a falling rate."""

from dataclasses import dataclass

import numpy as np
import pytest
import small
import torch
from by_hand import NET, B, M, ce, ce_gradient, f, gradient, pull_back, softmax
from federations import federation
from on_lanes import assert_lanes_train_as_eagerly, clients, pool
from small import assert_same_result, call, cut, made

import fedhassle
from fedhassle.averaging import Averaged
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.losses import calibrated, cross_entropy
from fedhassle.method import Batch, Descent, Phase, Stream, as_models
from fedhassle.methods import METHODS, FedAvg, FixMatchGlobal
from fedhassle.methods.hassle import SUPERVISED, Hassle

EVERY = pytest.mark.parametrize("name", METHODS)


def arrays_of(rng, *names):
    return {name: torch.from_numpy(rng.normal(size=48)) for name in names}


def log_prior(y):
    """Log p by class, p the share of a class among the labels, each class counted one more."""
    counts = [1 + sum(1 for label in y if label == m) for m in range(M)]
    return np.log(np.array(counts) / sum(counts))


# The prior


def test_calibrated_logits_have_the_batchs_class_mix(rng):
    """Z + log p; −1 is no label. In a batch of 0 0 3 with four classes p is (3, 1, 1, 2)/7."""
    z, y = rng.normal(size=(5, M)), np.array([0, -1, 0, 3, -1])
    found = calibrated(torch.from_numpy(z), torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(found, z + np.log(np.array([3, 1, 1, 2]) / 7), rtol=1e-12)
    value, grad = gradient(
        lambda leaf: cross_entropy(calibrated(leaf, torch.from_numpy(y)), torch.from_numpy(y)), z
    )
    np.testing.assert_allclose(value, ce(z + log_prior(y), y), rtol=1e-12)
    np.testing.assert_allclose(grad, ce_gradient(z + log_prior(y), y), rtol=1e-12, atol=1e-16)


def test_probabilities_are_counted_as_labels_are(rng):
    z, target = rng.normal(size=(6, M)), softmax(rng.normal(size=(6, M)))
    shares = (target.sum(0) + 1) / (target.sum() + M)
    found = calibrated(torch.from_numpy(z), torch.from_numpy(target)).numpy()
    np.testing.assert_allclose(found, z + np.log(shares), rtol=1e-12)


def test_an_even_batch_has_nothing_to_calibrate(rng):
    z, y = torch.from_numpy(rng.normal(size=(8, M))), torch.arange(8) % M
    assert cross_entropy(calibrated(z, y), y).item() == pytest.approx(cross_entropy(z, y).item(), rel=1e-12)


def test_fedavg_and_hassle_descend_the_calibrated_cross_entropy(rng):
    """ℓ(f(x; w) + log p, y); in HASSLE's residual loss ℓ(f(x; w) + f(x; r) + log p, y) stands for Eq. 8."""
    x, y = rng.normal(size=(B, 1, 3, 3)), np.array([0, 0, 0, 1, 1, 3])
    batch = Batch((torch.from_numpy(x),), torch.from_numpy(y))
    known = arrays_of(rng, "w", "w_S", "w_U", "r_US")
    method = FedAvg(NET, prior="batch")
    models = as_models(known, dict.fromkeys(known, NET))
    w = known["w"].numpy()
    value, grad = gradient(lambda leaf: method.loss({"w": models["w"].at(leaf)}, models, batch), w)
    z = f(x, w) + log_prior(y)
    np.testing.assert_allclose(value, ce(z, y), rtol=1e-12)
    np.testing.assert_allclose(grad, pull_back(x, ce_gradient(z, y)), rtol=1e-10, atol=1e-14)
    hassle = Hassle(NET, prior="batch", mpa=False, lam=0.0, residual_width=1.0)
    value = hassle.dual_loss(SUPERVISED, models, models, batch).item()
    assert value == pytest.approx(ce(f(x, known["w_S"].numpy()) + log_prior(y), y), rel=1e-12)
    both = f(x, known["w_S"].numpy()) + f(x, known["r_US"].numpy())
    value = hassle.residual_loss(SUPERVISED, models, models, batch).item()
    assert value == pytest.approx(ce(both + log_prior(y), y), rel=1e-12)


def test_pseudo_labels_have_a_prior_of_their_own(rng):
    """FixMatch-global's term alone: over the samples of which the teacher is sure."""
    weak, strong = rng.normal(size=(2, B, 1, 3, 3))
    known = arrays_of(rng, "w", "sent")
    local, teacher = (as_models(known, dict.fromkeys(known, NET))[name] for name in ("w", "sent"))
    sure = float(np.sort(softmax(f(weak, known["sent"].numpy())).max(1))[B // 2])
    p = softmax(f(weak, known["sent"].numpy()))
    y = np.where(p.max(1) >= sure, p.argmax(1), -1)
    method = FixMatchGlobal(NET, prior="batch", confidence=sure)
    batch = Batch((torch.from_numpy(weak), torch.from_numpy(strong)), torch.full((B,), -1))
    found = method.alone({"w": local}, {"w": teacher}, batch).loss.item()
    assert found == pytest.approx(ce(f(strong, known["w"].numpy()) + log_prior(y), y), rel=1e-12)


# Views of labelled images


@dataclass(frozen=True)
class Strong(FedAvg):
    """FedAvg that asks for strong views by itself."""

    def phases(self, client, t):
        walk = Stream("labelled", self.batch, ("strong",))
        return (Phase("labelled", (walk,), (Descent("w", self.loss, self.local_optimiser()),), self.epochs),)


def test_a_labelled_view_takes_the_place_of_the_methods_own():
    here = small.site(labelled=range(20))
    net = small.net()
    plain, set_to, asked, weak = (
        small.trained(method, here).arrays["w"]
        for method in (
            FedAvg(net, batch=8, epochs=1),
            FedAvg(net, batch=8, epochs=1, labelled_view="strong"),
            Strong(net, batch=8, epochs=1),
            Strong(net, batch=8, epochs=1, labelled_view="weak"),
        )
    )
    assert torch.equal(set_to, asked) and torch.equal(plain, weak) and not torch.equal(plain, asked)


def test_unlabelled_images_keep_their_views():
    streams = Stream("unlabelled", 8, ("weak", "strong")), Stream("labelled", 8)
    phase = Phase("both", streams, (), epochs=1)
    assert phase.with_labelled_view(None) is phase
    seen = phase.with_labelled_view("strong").streams
    assert [stream.views for stream in seen] == [("weak", "strong"), ("strong",)]


@EVERY
@pytest.mark.parametrize(
    ("setting", "values"), [("prior", (None, "batch")), ("labelled_view", ("weak", "strong"))]
)
def test_every_method_heeds_them(name, setting, values):
    here = small.site(labelled=[0, 1, 2, 3, 4, 8, 12, 16, 20], unlabelled=range(40, 60))
    one, other = (small.trained(made(name, **{setting: value}), here).arrays for value in values)
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", ["fedavg", "mixmatch", "fedmatch", "sage", "hassle"])
def test_lanes_train_as_one_client_after_the_other_does(name):
    """With all settings on, over four rounds: from the second on the means give pseudo-labels."""
    settings = {"prior": "batch", "labelled_view": "strong", "average": 0.5}
    teacher = {"teacher": "average"} if METHODS[name].teachers else {}
    method = Averaged.of(made(name, **settings, **teacher))
    assert_lanes_train_as_eagerly(pool(), method, clients()[:3], rounds=4)


# The learning rate over rounds


def test_a_cosine_falls_from_all_of_the_rate_to_none():
    method = made("fedavg", schedule="cosine").for_run(8)
    expected = [(1 + np.cos(np.pi * t / 8)) / 2 for t in range(8)]
    np.testing.assert_allclose([method.rate(t) for t in range(1, 9)], expected, rtol=1e-12)
    assert method.rate(1) == 1.0 and method.rate(9) == method.rate(20) == 0.0


def test_steps_divide_the_rate_by_ten_after_half_and_three_quarters_of_the_rounds():
    method = made("fedavg", schedule="step").for_run(8)
    found = [method.rate(t) for t in range(1, 9)]
    np.testing.assert_allclose(found, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-12)


@EVERY
def test_every_method_knows_the_rounds_of_its_run(name):
    assert made(name).rate(3) is None and made(name).for_run(8).rate(3) is None
    for method in (made(name, schedule="cosine"), Averaged.of(made(name, schedule="cosine", average=0.5))):
        assert method.for_run(8).rate(5) == 0.5
        with pytest.raises(fedhassle.UserError, match="set horizon"):
            method.rate(5)
    assert made(name, schedule="cosine", horizon=4).for_run(8).rate(3) == 0.5


@EVERY
def test_a_round_at_half_the_rate_is_one_with_half_the_learning_rate(name):
    """In the eighth of 14 rounds half of the rate is left, of FedMatch's and RSCFed's second rate too."""
    here = small.site(labelled=range(20), unlabelled=range(40, 60))
    scheduled = made(name, schedule="cosine", horizon=14)
    assert scheduled.rate(8) == pytest.approx(0.5)
    plain = made(name)
    rates = {key: getattr(plain, key) / 2 for key in ("lr", "unlabelled_lr") if hasattr(plain, key)}
    halved = made(name, **rates)
    found, expected, whole = (small.trained(one, here, t=8).arrays for one in (scheduled, halved, plain))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(found[key], whole[key], rtol=1e-3, atol=1e-5) for key in whole)


@pytest.mark.parametrize("name", ["fedavg", "fedmatch", "hassle+"])
def test_lanes_follow_the_rate_without_a_new_recording(name):
    method = made(name, schedule="cosine", horizon=4)
    recorded = pool()
    assert_lanes_train_as_eagerly(recorded, method, clients()[:3], rounds=4)
    constant = pool()
    assert_lanes_train_as_eagerly(constant, made(name), clients()[:3], rounds=4)
    assert len(recorded.seconds) == len(constant.seconds) > 0


def test_a_federation_over_a_network_and_a_run_that_was_cut_follow_the_rate(eight_rounds, tmp_path):
    method, there, _ = federation(tmp_path, "fedavg", schedule="cosine", horizon=4)
    *_, last = federate(method, there, Plan(3, 4, 0), method.initial(0))
    assert small.same(last.state, rounds_of(method, 3)[-1].state)
    words = [*eight_rounds, "method.schedule=step"]
    assert call("run", *words, "--out", tmp_path / "whole")[0] == 0
    cut(words, tmp_path / "cut", 5)
    assert call("resume", tmp_path / "cut")[0] == 0
    assert_same_result(tmp_path / "cut", tmp_path / "whole")


def test_a_horizon_needs_a_schedule_and_a_round():
    with pytest.raises(fedhassle.UserError, match="horizon needs a schedule"):
        made("fedavg", horizon=5)
    with pytest.raises(fedhassle.UserError, match="horizon must be at least 1, got 0"):
        made("fedavg", horizon=0, schedule="step")


# Means over rounds


def rounds_of(method, rounds=4):
    simulator = Simulator(small.dataset(), small.SPLIT, 0, small.ENGINE)
    return list(federate(method, simulator, Plan(rounds, 4, 0), method.initial(0)))


def test_a_mean_is_that_of_the_merged_models():
    """m_1 = w_1, m_2 = (w_1 + w_2)/2, then m_t = 0.6·m_(t−1) + 0.4·w_t: 1 − 1/3 is above 0.6."""
    plain = made("fedavg")
    merged = [done.state["w"].double().numpy() for done in rounds_of(plain)]
    mean = (merged[0] + merged[1]) / 2
    for w in merged[2:]:
        mean = 0.6 * mean + 0.4 * w
    states = [done.state for done in rounds_of(Averaged.of(made("fedavg", average=0.6)))]
    np.testing.assert_allclose(states[-1]["mean of w"].numpy(), mean, rtol=1e-5, atol=1e-7)
    assert torch.equal(states[0]["mean of w"], states[0]["w"])


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].averages])
def test_training_does_not_see_the_means(name):
    """States, messages and bytes are the method's own; each prediction has one by the means beside it."""
    plain, method = made(name), Averaged.of(made(name, average=0.5))
    x = torch.rand(2, *method.net.shape)
    for one, other in zip(rounds_of(plain, 3), rounds_of(method, 3), strict=True):
        assert small.same(one.state, {k: v for k, v in other.state.items() if not k.startswith("mean of")})
        for a, b in zip(one.replies, other.replies, strict=True):
            assert (a.bytes_down, a.bytes_up) == (b.bytes_down, b.bytes_up)
    found, shown = plain.predict(one.state, x), method.predict(other.state, x)
    assert shown.keys() == {*found, *(f"{k} averaged" for k in found)}
    assert all(torch.equal(found[k], shown[k]) for k in found)
    assert any(not torch.equal(found[k], shown[f"{k} averaged"]) for k in found)
    scores = method.report(dict.fromkeys(shown, 0.5))
    assert {plain.headline, f"{plain.headline} averaged"} <= scores.keys()
    home = method.model(other.state)
    assert all(torch.equal(z, shown[k]) for k, z in method.predict(home, x).items())


@pytest.mark.parametrize("name", ["fixmatch-global", "sage", "hassle"])
def test_means_teach_where_they_are_asked_to(name):
    """They go to clients with unlabelled data, whose training they change; full clients are sent none."""
    plain, method = (Averaged.of(made(name, average=0.5, **more)) for more in ({}, {"teacher": "average"}))
    done = rounds_of(plain, 2)[-1].state
    other = {f"mean of {k}": plain.networks()[k].initial(9, slot) for slot, k in enumerate(plain.teachers)}
    state = done | other
    bare, full = small.site(unlabelled=range(20)), small.site(labelled=range(20))
    sent = method.message(state, bare.client, 3)
    assert other.keys() <= sent.keys() and all(torch.equal(sent[k], other[k]) for k in other)
    assert small.same(method.message(state, full.client, 3), plain.message(state, full.client, 3))
    trained = [small.trained(each, bare, state, t=3).arrays for each in (plain, method)]
    assert any(not torch.equal(trained[0][k], trained[1][k]) for k in trained[0])


def test_a_teacher_that_is_a_mean_labels_by_the_mean(rng):
    """FixMatch-global: hard labels of f(weak; m) and not of f(weak; w)."""
    weak, strong = rng.normal(size=(2, B, 1, 3, 3))
    known = arrays_of(rng, "w", "mean of w")
    models = as_models(known, dict.fromkeys(known, NET))
    method = FixMatchGlobal(NET, confidence=0.0)
    batch = Batch((torch.from_numpy(weak), torch.from_numpy(strong)), torch.full((B,), -1))
    y = f(weak, known["mean of w"].numpy()).argmax(1)
    assert (y != f(weak, known["w"].numpy()).argmax(1)).any()
    found = method.alone({"w": models["w"]}, models, batch).loss.item()
    assert found == pytest.approx(ce(f(strong, known["w"].numpy()), y), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"), [("fedavg", {"average": 0.9}), ("rscfed", {"average": 0.9}), ("sage", {})]
)
def test_a_teacher_needs_a_mean_and_a_method_that_is_taught(name, settings):
    with pytest.raises(fedhassle.UserError, match="teacher=average needs"):
        made(name, teacher="average", **settings)


@pytest.mark.parametrize("more", [{}, {"teacher": "average"}], ids=["beside", "teaching"])
def test_a_federation_over_a_network_has_the_same_means(more, tmp_path):
    method, there, _ = federation(tmp_path, "hassle", average=0.5, **more)
    assert isinstance(method, Averaged)
    done = list(federate(method, there, Plan(3, 4, 0), method.initial(0)))
    assert small.same(done[-1].state, rounds_of(method, 3)[-1].state)


def test_a_run_with_means_is_cut_and_goes_on_and_its_model_predicts_with_them(eight_rounds, tmp_path):
    words = [*eight_rounds, "method.average=0.8", "method.teacher=average"]
    words += ["method.prior=batch", "method.labelled_view=strong"]
    assert call("run", *words, "--out", tmp_path / "whole")[0] == 0
    cut(words, tmp_path / "cut", 5)
    assert call("resume", tmp_path / "cut")[0] == 0
    assert_same_result(tmp_path / "cut", tmp_path / "whole")
    model = fedhassle.load(tmp_path / "whole" / "model.safetensors")
    assert "EM averaged" in model.modes
    images = small.dataset().x_test
    assert model.predict(images, mode="EM averaged").classes.shape == (len(images),)


@pytest.mark.parametrize("name", ["central", "central-fixmatch"])
def test_a_reference_whose_data_lie_in_one_place_has_all_three(name, without_residuals, tmp_path):
    words = [*without_residuals, f"method={name}", "method.steps=2"]
    each = ["method.average=0.5"], ["method.prior=batch"], ["method.labelled_view=strong"]
    means, *others = (trained_by(words + more, tmp_path / more[0]) for more in each)
    plain = trained_by(words, tmp_path / "plain")
    assert means.keys() == {"w", "mean of w"} and torch.equal(means["w"], plain["w"])
    assert not torch.equal(means["mean of w"], means["w"])
    assert all(not torch.equal(other["w"], plain["w"]) for other in others)


def trained_by(words, folder):
    """The arrays of the model that a run leaves."""
    assert call("run", *words, "--out", folder)[0] == 0
    return fedhassle.load(folder / "model.safetensors").state


@pytest.mark.parametrize("average", [1.0, -0.1, 1.5])
def test_a_decay_is_at_least_0_and_below_1(average):
    with pytest.raises(fedhassle.UserError, match=f"average .* got {average}"):
        made("fedavg", average=average)
