"""Identities between methods, models and rounds, bit for bit where the test says so."""

import itertools

import numpy as np
import pytest
import small
import torch

from fedhassle.architectures import ResNet8
from fedhassle.engine.client import train
from fedhassle.method import Batch, Client, as_models
from fedhassle.methods import FedAvg, FedProx, Hassle
from fedhassle.methods.hassle import SUPERVISED, UNSUPERVISED
from fedhassle.nets import Net
from fedhassle.vectors import size_in_bytes

QUICK = {"batch": 8, "epochs": 1, "lr": 0.05}
ROUNDS = 4


def hassle(**settings):
    return Hassle(small.net(), **{**QUICK, "residual_steps": 2, **settings})


def fedavg(**settings):
    return FedAvg(small.net(), **{**QUICK, **settings})


def images(n=6):
    return small.simulator().trainer.views.normalise(torch.from_numpy(small.dataset().x_test[:n]))


# FedAvg, FedProx and HASSLE


@pytest.mark.parametrize("flip", [False, True])
def test_fedprox_with_mu_0_is_fedavg(flip):
    data = small.dataset(flip=flip, crop=2 if flip else 0)
    prox = FedProx(small.net(), **QUICK, mu=0.0)
    pairs = zip(
        small.simulate(fedavg(), ROUNDS, data=data), small.simulate(prox, ROUNDS, data=data), strict=True
    )
    assert all(small.same(a.state, b.state) for a, b in pairs)
    strong = small.simulate(FedProx(small.net(), **QUICK, mu=1.0), ROUNDS, data=data)[-1]
    assert not small.same(strong.state, small.simulate(fedavg(), ROUNDS, data=data)[-1].state)


def test_hassle_without_gra_and_mpa_has_fedavgs_supervised_model():
    """57.85 = 57.85 in the paper's tables: w_S is w in every round, and SM's logits are FedAvg's."""
    x = images()
    method = hassle(gra=False, mpa=False)
    for a, b in zip(small.simulate(fedavg(), ROUNDS), small.simulate(method, ROUNDS), strict=True):
        assert torch.equal(b.state["w_S"], a.state["w"])
        predicted = method.predict(b.state, x)
        assert torch.equal(predicted["SM"], fedavg().predict(a.state, x)["model"])
        assert not torch.equal(predicted["SM"], predicted["UM"])
    assert not torch.equal(a.state["w"], fedavg().initial(0)["w"])


@pytest.mark.parametrize("part", ["gra", "mpa"])
def test_each_half_of_suma_changes_something(part):
    """GRA alone leaves w_S equal to FedAvg's and changes SM; MPA alone changes w_S (with a large γ)."""
    plain = small.simulate(hassle(gra=False, mpa=False), 2)[-1].state
    state = small.simulate(hassle(gra=part == "gra", mpa=part == "mpa", gamma=0.1), 2)[-1].state
    assert torch.equal(state["w_S"], plain["w_S"]) == (part == "gra")
    assert ("r_US" in state) == (part == "gra")


def test_the_ensemble_is_the_mean_of_both_models():
    """EM's logits are (SM + UM)/2, before training, after the first round and later."""
    method, x = hassle(), images()
    for state in [method.initial(0), *(done.state for done in small.simulate(method, 3))]:
        z = {k: v.double().numpy() for k, v in method.predict(state, x).items()}
        np.testing.assert_allclose(z["EM"], (z["SM"] + z["UM"]) / 2, rtol=1e-6, atol=1e-7)
        assert np.abs(z["SM"] - z["UM"]).max() > 1e-3


# Rounds in which one side is not drawn (ruling 17)


@pytest.mark.parametrize(
    ("only", "still", "moving", "kept"),
    [
        ({"client 5", "client 6"}, "SM", "UM", {"w_S", "r_US", "w_S_before"}),
        ({"client 1"}, "UM", "SM", {"w_U", "r_SU", "w_U_before"}),
    ],
    ids=["no labelled client", "no client with unlabelled data"],
)
@pytest.mark.parametrize("gra", [True, False])
def test_a_side_that_is_not_drawn_stays_as_it_was(only, still, moving, kept, gra):
    method, x = hassle(gra=gra), images()
    state = small.simulate(method, 3)[-1].state
    after = small.simulate(method, 4, state=state, first=4, only=only)[-1].state
    before, now = method.predict(state, x), method.predict(after, x)
    assert torch.equal(before[still], now[still])
    assert not torch.equal(before[moving], now[moving])
    assert all(torch.equal(state[name], after[name]) for name in kept & state.keys())


# Starts (ruling 14)


def test_four_independent_initialisations_and_fedavgs_among_them():
    state = hassle().initial(5)
    assert torch.equal(state["w_S"], fedavg().initial(5)["w"])
    assert not torch.equal(state["w_S"], state["w_U"])
    assert not torch.equal(state["r_US"], state["r_SU"])
    assert state.keys() == {"w_S", "w_U", "r_US", "r_SU"}
    assert hassle(gra=False).initial(5).keys() == {"w_S", "w_U"}


def test_a_shared_start():
    state = hassle(shared_start=True).initial(5)
    assert torch.equal(state["w_S"], state["w_U"]) and torch.equal(state["r_US"], state["r_SU"])
    assert torch.equal(state["w_S"], hassle().initial(5)["w_S"])


def test_while_the_warm_up_lasts_the_unsupervised_model_is_a_copy():
    """Rounds 1 and 2: w_U = w_S, no residual trains; round 3 trains all four."""
    method = hassle(warmup=2)
    start = method.initial(0)
    for done in small.simulate(method, 3, per_round=6):
        trained = {name for reply in done.replies for name in reply.update.arrays}
        warming = done.t <= 2
        assert trained == ({"w_S"} if warming else {"w_S", "w_U", "r_US", "r_SU"})
        assert torch.equal(done.state["w_S"], done.state["w_U"]) == warming
        assert torch.equal(done.state["r_US"], start["r_US"]) == warming
        assert ("w_S_before" in done.state) != warming
    assert method.phases(Client("u", 0, 9), 2) == ()
    assert len(method.phases(Client("u", 0, 9), 3)) == 2


def test_without_proximity_a_warm_up_is_fedavg():
    rounds = small.simulate(hassle(warmup=3, mpa=False), 3), small.simulate(fedavg(), 3)
    assert all(torch.equal(a.state["w_U"], b.state["w"]) for a, b in zip(*rounds, strict=True))


def test_residual_rounds_train_the_residuals_alone():
    method = hassle(residual_rounds=1)
    start = method.initial(0)
    first, second = small.simulate(method, 2, per_round=6)
    assert all(torch.equal(first.state[name], start[name]) for name in ("w_S", "w_U"))
    assert all(not torch.equal(first.state[name], start[name]) for name in ("r_US", "r_SU"))
    assert all(not torch.equal(second.state[name], first.state[name]) for name in start)
    assert [p.name for p in method.phases(Client("p", 3, 9), 1)] == [
        "labelled residual",
        "unlabelled residual",
    ]


# Inference (ruling 11)


def test_inference_uses_the_dual_that_its_residual_was_trained_against():
    """SM of round t is f(x; w_S^(t−1)) + f(x; r_US^(t)); before any residual is trained, f(x; w_S)."""
    method, x = hassle(), images()
    start = method.initial(0)
    states = [start, *(done.state for done in small.simulate(method, 3, per_round=6))]
    assert torch.equal(method.predict(start, x)["SM"], method.net.logits(start["w_S"], x))
    for before, now in itertools.pairwise(states):
        z = method.predict(now, x)
        for name, dual, residual in (("SM", "w_S", "r_US"), ("UM", "w_U", "r_SU")):
            older = method.net.logits(before[dual], x)
            own = method.residual_net.logits(now[residual], x)
            torch.testing.assert_close(z[name], older + own)
            assert not torch.allclose(z[name], method.net.logits(now[dual], x) + own, atol=1e-4)


def test_the_older_dual_waits_until_its_residual_is_trained_again():
    """A round that trains only the other side keeps w_S^(t−1) and r_US together."""
    method = hassle()
    first = small.simulate(method, 1, per_round=6)[-1].state
    second = small.simulate(method, 2, state=first, first=2, only={"client 6"})[-1].state
    third = small.simulate(method, 3, state=second, first=3, only={"client 1"})[-1].state
    assert torch.equal(second["w_S_before"], method.initial(0)["w_S"])
    assert torch.equal(second["w_U_before"], first["w_U"])
    assert torch.equal(third["w_S_before"], first["w_S"])
    assert torch.equal(third["w_U_before"], first["w_U"])


def test_a_client_labels_with_the_logits_of_the_global_supervised_model():
    """Eq. 11's logits are SM's: the message is enough to compute them."""
    method, x = hassle(), images()
    state = small.simulate(method, 2)[-1].state
    for client in (Client("p", 3, 9), Client("u", 0, 9)):
        received = as_models(method.message(state, client, 3), method.networks())
        expected = method.predict(state, x)["SM"].argmax(1)
        assert torch.equal(method.pseudo_label(method.teacher_logits(received, x)), expected)


# What travels (ruling 21)

FULL, PARTIAL, UNLABELLED = Client("f", 4, 0), Client("p", 4, 4), Client("u", 0, 4)
LATER = {"w_S_before", "w_U_before"}
SCRIPTS = {"residual_target": "with_residual"}


@pytest.mark.parametrize(
    ("settings", "client", "names"),
    [
        ({}, FULL, {"w_S", "w_U", "r_US"}),
        ({}, PARTIAL, {"w_S", "w_U", "r_US", "r_SU", "w_S_before"}),
        ({}, UNLABELLED, {"w_S", "w_U", "r_US", "r_SU", "w_S_before"}),
        (SCRIPTS, FULL, {"w_S", "w_U", "r_US", "r_SU", "w_U_before"}),
        (SCRIPTS, UNLABELLED, {"w_S", "w_U", "r_US", "r_SU", "w_S_before"}),
        (SCRIPTS | {"mpa": False}, FULL, {"w_S", "r_US", "r_SU", "w_U_before"}),
        (SCRIPTS | {"mpa": False}, UNLABELLED, {"w_U", "r_US", "r_SU", "w_S_before"}),
        ({"mpa": False}, FULL, {"w_S", "w_U", "r_US"}),
        ({"gra": False}, FULL, {"w_S", "w_U"}),
        ({"gra": False}, UNLABELLED, {"w_S", "w_U"}),
        ({"gra": False, "mpa": False}, FULL, {"w_S"}),
        ({"gra": False, "mpa": False}, UNLABELLED, {"w_S", "w_U"}),
    ],
)
def test_a_client_is_sent_what_its_phases_use(settings, client, names):
    method = hassle(**settings)
    state = small.simulate(method, 2, per_round=6)[-1].state
    assert (state.keys() >= LATER) == method.gra
    assert method.message(state, client, 3).keys() == names


@pytest.mark.parametrize("target", ["difference", "with_residual"])
def test_no_residual_is_sent_while_none_is_trained(target):
    method = hassle(residual_target=target, warmup=3)
    assert method.message(method.initial(0), FULL, 3).keys() == {"w_S", "w_U"}
    assert method.message(method.initial(0), FULL, 4).keys() == {"w_S", "w_U", "r_US"}


class Witness(dict):
    """A mapping that records the names that are read."""

    def __init__(self, known):
        super().__init__(known)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("target", ["difference", "with_residual"])
@pytest.mark.parametrize(("client", "parts"), [(FULL, "S"), (PARTIAL, "SU"), (UNLABELLED, "U")])
def test_nothing_is_sent_that_no_loss_reads(target, client, parts):
    """Every name in the message is read by a loss or by Eq. 11, or is where a trained model starts."""
    method = hassle(residual_target=target)
    state = small.simulate(method, 2, per_round=6)[-1].state
    message = method.message(state, client, 3)
    received = Witness(as_models(message, method.networks()))
    x, y = images(4), torch.tensor([0, 1, 2, 3])
    started = set()
    for phase in method.phases(client, 3):
        (descent,) = phase.descents
        started.add(descent.train)
        (stream,) = phase.streams
        given = stream.label(stream.logits(received, x)) if stream.logits else y
        local = as_models({descent.train: message[descent.train]}, method.networks())
        descent.loss(local, received, Batch((x,), given))
    assert received.read | started == message.keys()
    assert {side.dual for side in (SUPERVISED, UNSUPERVISED) if side.dual[-1] in parts} <= started


def test_the_bytes_of_resnet8_are_the_papers():
    """Upload in parameters: partial 2.61 M, full or unlabelled 1.31 M, FedAvg 1.23 M.

    Bytes count BatchNorm's statistics: a mean and a variance for each of 1,344 channels of a dual (64·3 +
    128·3 + 256·3) and 336 of a residual, in float32; six zeros keep what follows the ten biases aligned.
    """
    net = Net(ResNet8, (3, 8, 8), 10)
    dual, residual = 1_227_594, 78_042
    dual_bytes, residual_bytes = 4 * (dual + 6 + 2 * 1344), 4 * (residual + 6 + 2 * 336)
    data = small.dataset(channels=3, side=8)
    method = Hassle(net, batch=2, epochs=1, residual_steps=1)
    parts = {"full": (range(2), ()), "partial": (range(2), range(2, 4)), "unlabelled": ((), range(2, 4))}
    state = method.initial(0)
    state |= {"w_S_before": state["w_S"], "w_U_before": state["w_U"]}
    uploads = {"full": (1, 1.31), "partial": (2, 2.61), "unlabelled": (1, 1.31)}  # of each kind of model
    downloads = {"full": (2, 1), "partial": (3, 2), "unlabelled": (3, 2)}  # duals, residuals
    for kind, (labelled, unlabelled) in parts.items():
        site = small.site(data, labelled, unlabelled)
        assert site.client.kind == kind
        message = method.message(state, site.client, 2)
        update, _ = train(method, site, message, None, 2, seed=0)
        models, millions = uploads[kind]
        assert size_in_bytes(update.arrays) == models * (dual_bytes + residual_bytes)
        assert round(models * (dual + residual) / 1e6, 2) == millions
        duals, residuals = downloads[kind]
        assert size_in_bytes(message) == duals * dual_bytes + residuals * residual_bytes
    assert size_in_bytes(FedAvg(net).initial(0)) == dual_bytes
    assert round(dual / 1e6, 2) == 1.23


def test_a_reply_counts_the_bytes_of_both_ways():
    """Four bytes a number: a linear network of 144·4 + 4 numbers, and 4 zeros, has no statistics."""
    method = FedAvg(small.net(small.Linear), **QUICK)
    (done,) = small.simulate(method, 1, per_round=6)
    assert [reply.update.client.name for reply in done.replies] == [f"client {k}" for k in (1, 2, 3, 4)]
    assert {(reply.bytes_down, reply.bytes_up) for reply in done.replies} == {(4 * 584, 4 * 584)}
