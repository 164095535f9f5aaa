"""hassle+: its formulas in NumPy, its two models and their means from round to round."""

from itertools import pairwise

import numpy as np
import pytest
import small
import torch
from by_hand import NET, M, ce, f, softmax
from federations import federation
from small import assert_same_result, call, cut, made

from fedhassle.architectures import LeNet, ResNet8
from fedhassle.averaging import Averaged
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.losses import class_mix
from fedhassle.method import Batch, Client, as_models
from fedhassle.methods import HasslePlus
from fedhassle.nets import Net
from fedhassle.settings.build import build_method

ALL = {"w_S", "w_U", "m_S", "m_U"}
FULL, PARTIAL, BARE = Client("f", 9, 0), Client("p", 4, 9), Client("u", 0, 9)


def rounds_of(method, rounds=5):
    simulator = Simulator(small.dataset(), small.SPLIT, 0, small.ENGINE)
    return [done.state for done in federate(method, simulator, Plan(rounds, 4, 0), method.initial(0))]


def mix_by_hand(z, steps=10):
    """Saerens et al.: from the mean of the probabilities on, each step takes the mean of the posteriors."""
    p = softmax(z)
    mix = p.mean(0)
    for _ in range(steps):
        posterior = p * mix / (p * mix).sum(1, keepdims=True)
        mix = posterior.mean(0)
    return mix


# Pseudo-labels


def test_the_class_mix_is_that_of_the_steps_by_hand(rng):
    z = 3 * rng.normal(size=(40, M))
    np.testing.assert_allclose(class_mix(torch.from_numpy(z)).numpy(), mix_by_hand(z), rtol=1e-10)


def test_the_class_mix_is_found_by_a_teacher_that_is_right_more_often_than_not(rng):
    """Of 400 samples of two classes, logits point to the true class with a noise that hides a fifth."""
    y = np.repeat([1, 3], [300, 100])
    z = 2 * np.eye(M)[y] + rng.normal(size=(400, M))
    mix, mean = class_mix(torch.from_numpy(2 * z)).numpy(), softmax(2 * z).mean(0)
    true = np.array([0, 0.75, 0, 0.25])
    assert np.abs(mix - true).sum() < 0.5 * np.abs(mean - true).sum()


def test_a_class_that_no_sample_can_be_has_no_share():
    z = torch.tensor([[80.0, 0.0, -80.0, -80.0]] * 3 + [[0.0, 80.0, -80.0, -80.0]])
    mix = class_mix(z, steps=50)
    assert torch.isfinite(mix).all() and mix.tolist() == pytest.approx([0.75, 0.25, 0, 0], abs=1e-6)
    assert HasslePlus(NET).sure(z).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("own_mix", [True, False])
def test_labels_are_sure_given_the_mix_of_the_client(own_mix, rng):
    z = 2 * rng.normal(size=(40, M)) + np.array([2.0, 0, 0, 0])
    weighted = softmax(z) * (mix_by_hand(z) if own_mix else 1)
    p = weighted / weighted.sum(1, keepdims=True)
    expected = np.where(p.max(1) >= 0.8, p.argmax(1), -1)
    assert 5 < (expected >= 0).sum() < 40
    method = HasslePlus(NET, confidence=0.8, own_mix=own_mix)
    assert method.sure(torch.from_numpy(z)).tolist() == expected.tolist()


def test_both_means_teach(rng):
    x = rng.normal(size=(6, 1, 3, 3))
    known = {name: torch.from_numpy(rng.normal(size=48)) for name in ("m_S", "m_U")}
    found = HasslePlus(NET).taught(as_models(known, dict.fromkeys(known, NET)), torch.from_numpy(x))
    expected = (f(x, known["m_S"].numpy()) + f(x, known["m_U"].numpy())) / 2
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


# The loss


def test_each_batch_has_a_cross_entropy_and_a_prior_of_its_own(rng):
    """ℓ(f(x_U) + log p_U, ŷ) + ℓ(f(x_L) + log p_L, y); p counts each class once more."""
    x = rng.normal(size=(2, 6, 1, 3, 3))
    labels = np.array([[0, -1, 0, 2, -1, 0], [1, 1, 1, 3, 3, 2]])
    w = rng.normal(size=48)
    batches = [Batch((torch.from_numpy(a),), torch.from_numpy(y)) for a, y in zip(x, labels, strict=True)]
    local = as_models({"w_U": torch.from_numpy(w)}, {"w_U": NET})

    def term(a, y):
        counts = 1 + np.array([(y == m).sum() for m in range(M)])
        return ce(f(a, w) + np.log(counts / counts.sum()), y)

    found = HasslePlus(NET).loss("w_U", local, {}, *batches).item()
    assert found == pytest.approx(term(x[0], labels[0]) + term(x[1], labels[1]), rel=1e-12)
    alone = HasslePlus(NET).loss("w_U", local, {}, batches[1]).item()
    assert alone == pytest.approx(term(x[1], labels[1]), rel=1e-12)


@pytest.mark.parametrize(("model", "other"), [("w_S", "w_U"), ("w_U", "w_S")])
def test_each_model_stays_near_the_other(model, other, rng):
    """+ γ·‖w − w_other‖² with the other model as received (Eq. 12), once there is one."""
    batch = Batch((torch.from_numpy(rng.normal(size=(6, 1, 3, 3))),), torch.tensor([0, 1, 2, 3, 0, 0]))
    w, received = rng.normal(size=(2, 48))
    local = as_models({model: torch.from_numpy(w)}, {model: NET})
    sent = as_models({other: torch.from_numpy(received)}, {other: NET})

    def loss(gamma, sent):
        return HasslePlus(NET, gamma=gamma).loss(model, local, sent, batch).item()

    proximity = loss(0.7, sent) - loss(0.7, {})
    assert proximity == pytest.approx(0.7 * ((w - received) ** 2).sum(), rel=1e-10)
    assert loss(0.0, sent) == loss(0.7, {})


# Views


def views_of(method, client=PARTIAL):
    """The views of each part of a client's data, in the phase of w_U."""
    phase = method.phases(client, 1)[-1].with_labelled_view(method.labelled_view)
    return {stream.part: stream.views for stream in phase.streams}


def test_images_are_seen_as_suits_the_network():
    lenet, resnet = Net(LeNet, (1, 28, 28), 10), Net(ResNet8, (3, 32, 32), 10)
    for net, view in ((lenet, "weak"), (resnet, "strong"), (NET, "strong")):
        assert views_of(HasslePlus(net, start=0)) == dict.fromkeys(("labelled", "unlabelled"), (view,))


def test_a_view_of_ones_own_takes_its_place():
    weak = HasslePlus(NET, start=0, view="weak")
    assert views_of(weak) == {"labelled": ("weak",), "unlabelled": ("weak",)}
    mixed = HasslePlus(NET, start=0, labelled_view="weak")
    assert views_of(mixed) == {"labelled": ("weak",), "unlabelled": ("strong",)}


# From round to round


def test_before_its_start_it_is_fedavg_with_the_three_settings():
    settings = {"prior": "batch", "labelled_view": "strong", "average": 0.6}
    known = rounds_of(Averaged.of(made("fedavg", **settings)))
    for mine, its in zip(rounds_of(made("hassle+", average=0.6, start=9)), known, strict=True):
        assert mine.keys() == {"w_S", "m_S"}
        assert torch.equal(mine["w_S"], its["w"]) and torch.equal(mine["m_S"], its["mean of w"])


def test_the_second_model_starts_from_the_mean_of_the_first():
    states = rounds_of(made("hassle+", start=2, average=0.6))
    assert "w_U" not in states[0]
    assert torch.equal(states[1]["w_U"], states[1]["m_S"]) and torch.equal(states[1]["m_U"], states[1]["m_S"])
    assert not torch.equal(states[2]["w_U"], states[1]["w_U"])
    for before, after in pairwise(states[1:]):  # 1 − 1/t is above 0.6 from round 3 on
        for model, mean in (("w_S", "m_S"), ("w_U", "m_U")):
            expected = 0.6 * before[mean] + 0.4 * after[model]
            torch.testing.assert_close(after[mean], expected, rtol=1e-5, atol=1e-7)


def test_without_a_decay_the_means_are_the_models():
    last = rounds_of(made("hassle+", start=1, average=0.0))[-1]
    assert torch.equal(last["m_S"], last["w_S"]) and torch.equal(last["m_U"], last["w_U"])


@pytest.mark.parametrize(
    ("t", "gamma", "sent"),
    [
        (2, 0.1, {FULL: {"w_S"}, PARTIAL: {"w_S"}, BARE: set()}),
        (3, 0.1, {FULL: {"w_S", "w_U"}, PARTIAL: ALL, BARE: ALL}),
        (3, 0.0, {FULL: {"w_S", "w_U"}, PARTIAL: ALL, BARE: ALL - {"w_S"}}),
    ],
)
def test_clients_are_sent_what_they_train_what_is_near_it_and_what_labels_their_data(t, gamma, sent):
    method = HasslePlus(NET, start=2, gamma=gamma)
    state = dict.fromkeys(("w_S", "w_U", "m_S", "m_U"), NET.initial(0))
    assert {client: set(method.message(state, client, t)) for client in sent} == sent


def test_its_predictions_are_by_the_means(rng):
    x = rng.normal(size=(6, 1, 3, 3))
    state = {name: torch.from_numpy(rng.normal(size=48)) for name in ("w_S", "w_U", "m_S", "m_U")}
    z = {name: f(x, vector.numpy()) for name, vector in state.items()}
    expected = {
        "SM": z["m_S"],
        "UM": z["m_U"],
        "EM": (z["m_S"] + z["m_U"]) / 2,
        "w_S": z["w_S"],
        "w_U": z["w_U"],
    }
    found = HasslePlus(NET).predict(state, torch.from_numpy(x))
    assert found.keys() == expected.keys()
    for name, logits in expected.items():
        np.testing.assert_allclose(found[name].numpy(), logits, rtol=1e-12)
    early = HasslePlus(NET).predict({"w_S": state["w_S"], "m_S": state["m_S"]}, torch.from_numpy(x))
    assert torch.equal(early["UM"], early["SM"]) and torch.equal(early["EM"], early["SM"])


def test_no_means_are_kept_beside_its_own():
    assert isinstance(build_method("hassle+", {"average": 0.5}, small.net()), HasslePlus)


def test_a_federation_over_a_network_trains_the_same_models(tmp_path):
    settings = {"start": 2, "confidence": 0.3, "unlabelled_epochs": 1}
    method, there, _ = federation(tmp_path, "hassle+", **settings)
    *_, last = federate(method, there, Plan(4, 4, 0), method.initial(0))
    assert {"w_U", "m_U"} <= last.state.keys() and small.same(last.state, rounds_of(method, 4)[-1])


def test_a_run_is_cut_before_its_start_and_after_it_and_goes_on(without_residuals, tmp_path):
    words = [*without_residuals, "method=hassle+", "rounds=8", "method.confidence=0.3", "method.start=4"]
    assert call("run", *words, "--out", tmp_path / "whole")[0] == 0
    for end in (3, 6):
        cut(words, tmp_path / f"cut {end}", end)
        assert call("resume", tmp_path / f"cut {end}")[0] == 0
        assert_same_result(tmp_path / f"cut {end}", tmp_path / "whole")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("unlabelled_epochs", 0), ("ratio", 17), ("confidence", 95.0), ("start", -1), ("gamma", -0.1)],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(UserError, match=rf"{setting} must be .* got {value}"):
        made("hassle+", **{setting: value})
