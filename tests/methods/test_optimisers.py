"""The optimiser and the warm-up of the learning rate, as settings of every method."""

from dataclasses import replace

import numpy as np
import pytest
import small
import torch
from federations import federation, terms
from on_lanes import assert_lanes_train_as_eagerly, clients, pool
from small import assert_same_result, call, cut, made

import fedhassle
from fedhassle.averaging import Averaged
from fedhassle.engine.client import visit
from fedhassle.engine.rounds import Plan, federate
from fedhassle.method import Client
from fedhassle.methods import METHODS
from fedhassle.optimiser import SGD, AdamW

EVERY = pytest.mark.parametrize("name", METHODS)
ADAMW = {"optimiser": "adamw", "weight_decay": 0.01}


def adamw(name, **settings):
    """A method with AdamW, whose learning rates must all be given."""
    return made(name, **{**dict.fromkeys(METHODS[name].learning_rates, 0.002), **ADAMW, **settings})


def optimisers(method, t=1):
    """The optimiser of each model on a client of each kind."""
    kinds = (Client("full", 9, 0), Client("partial", 9, 20), Client("unlabelled", 0, 20))
    phases = [phase for client in kinds for phase in method.phases(client, t)]
    return [(descent.train, descent.optimiser) for phase in phases for descent in phase.descents]


@EVERY
def test_every_descent_of_every_method_has_the_optimiser_of_the_settings(name):
    """Only HASSLE's residuals have a weight decay of their own; RSCFed's rates differ, FedMatch's clips."""
    nesterov = made(name, momentum=0.7, nesterov=True, weight_decay=0.01)
    for method, kind in ((nesterov, SGD), (adamw(name), AdamW)):
        found = optimisers(method, t=20)
        assert found
        for model, optimiser in found:
            assert isinstance(optimiser, kind)
            assert optimiser.decay == (0.0001 if model.startswith("r_") else 0.01)
    assert {(o.momentum, o.nesterov) for _, o in optimisers(nesterov, t=20)} == {(0.7, True)}
    assert {o[3:] for _, o in optimisers(adamw(name), t=20)} == {(0.9, 0.999, 1e-8)}
    assert all(o.decay in (0, 0.0001) and not o.nesterov for _, o in optimisers(made(name)))


@EVERY
def test_every_method_trains_with_adamw_on_lanes_as_one_client_after_the_other(name):
    """The state of AdamW, with its count of steps, starts anew for every client and round."""
    method = adamw(name, schedule="step", horizon=4, lr_warmup=1)
    recorded = pool()
    assert_lanes_train_as_eagerly(recorded, method, clients()[:3])
    constant = pool()
    assert_lanes_train_as_eagerly(constant, made(name), clients()[:3])
    assert len(recorded.seconds) == len(constant.seconds) > 0  # no recording for each rate


# The warm-up


@pytest.mark.parametrize("schedule", [None, "constant", "cosine", "step"])
def test_the_rate_rises_over_the_warmup_and_then_follows_the_schedule_over_the_other_rounds(schedule):
    """Two of ten rounds: 1/3, 2/3, then the schedule of eight rounds."""
    method = made("fedavg", schedule=schedule, lr_warmup=2).for_run(10)
    falling = {
        "cosine": [(1 + np.cos(np.pi * k / 8)) / 2 for k in range(8)],
        "step": [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01],
    }
    expected = [1 / 3, 2 / 3, *falling.get(schedule, [1] * 8)]
    np.testing.assert_allclose([method.rate(t) for t in range(1, 11)], expected, rtol=1e-12)


@EVERY
def test_a_round_of_the_warmup_is_one_with_a_share_of_the_learning_rate(name):
    """Round 1 of a warm-up of one round has half the rate; a plain method has no rate to record."""
    here = small.site(labelled=range(20), unlabelled=range(40, 60))
    rising, plain = made(name, lr_warmup=1), made(name)
    halved = made(name, **{key: getattr(plain, key) / 2 for key in METHODS[name].learning_rates})
    found, expected = (small.trained(one, here).arrays for one in (rising, halved))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-6)
    assert made(name, lr_warmup=0).rate(1) is made(name, schedule="constant").rate(1) is None


# Everywhere


def test_over_a_network_and_after_an_interruption_it_is_the_same(eight_rounds, tmp_path):
    settings = {**ADAMW, "lr": 0.002, "schedule": "cosine", "lr_warmup": 1}
    agreed = replace(terms(), run={**terms().run, "rounds": 4})
    method, there, _ = federation(tmp_path, "hassle", agreed, **settings)
    *_, last = federate(method, there, Plan(3, 4, 0), method.initial(0))
    assert small.same(last.state, small.simulate(method, 3)[-1].state)
    words = [*eight_rounds, *(f"method.{key}={value}" for key, value in ADAMW.items())]
    words += ["method.lr=0.002", "method.schedule=cosine", "method.lr_warmup=3"]
    assert call("run", *words, "--out", tmp_path / "whole")[0] == 0
    cut(words, tmp_path / "cut", 5)
    assert call("resume", tmp_path / "cut")[0] == 0
    assert_same_result(tmp_path / "cut", tmp_path / "whole")


# Refusals


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedavg", {"nesterov": True, "momentum": 0.0}, "nesterov=true needs momentum"),
        ("fedmatch", {"nesterov": True}, "nesterov=true needs momentum"),
        ("fedavg", {"optimiser": "adamw", "lr": 0.01, "nesterov": True}, "nesterov=true is for SGD"),
        ("fedavg", {"optimiser": "adamw", "lr": 0.01, "momentum": 0.5}, "momentum=0.5 is for SGD"),
        ("fedavg", {"optimiser": "adamw"}, "lr=0.1 is made for SGD.*such as lr=0.001"),
        ("rscfed", {"optimiser": "adamw", "lr": 0.01}, "unlabelled_lr=0.021 is made for SGD"),
        ("fedavg", {"schedule": "constant", "horizon": 5}, "horizon needs a schedule"),
        (
            "fedavg",
            {"schedule": "step", "horizon": 5, "lr_warmup": 5},
            "lr_warmup=5 must be less than horizon=5",
        ),
        ("fedavg", {"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name, settings, message):
    with pytest.raises(fedhassle.UserError, match=message):
        made(name, **settings)


def test_a_warmup_is_shorter_than_the_run():
    for method in (made("hassle+", lr_warmup=8), Averaged.of(made("fedavg", lr_warmup=8, average=0.5))):
        with pytest.raises(fedhassle.UserError, match="lr_warmup=8 must be less than rounds=8"):
            method.for_run(8)
        assert method.for_run(9).rate(9) == 1.0


def test_a_refusal_names_the_setting_of_a_run(eight_rounds, tmp_path):
    words = {"method.lr_warmup=8": "lr_warmup=8 must", "method.optimiser=adamw": "method.lr=0.1 is made"}
    for word, message in words.items():
        code, _, err = call("run", *eight_rounds, word, "--out", tmp_path / word)
        assert code != 0 and message in " ".join(err.split())


def test_a_step_of_a_phase_that_was_recorded_starts_from_a_fresh_state():
    """Two clients on one lane: the second does not see the moments of the first."""
    method, sites = adamw("fedavg"), clients()[:1] * 2
    message = method.initial(0)
    found = pool(lanes=1).train([visit(method, site, message, None, 1, 0) for site in sites])
    assert small.same(found[0][0].arrays, found[1][0].arrays)
