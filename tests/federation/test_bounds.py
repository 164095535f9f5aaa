"""What one site can do to a round: lies about counts, changes that are too large, and the audit of both."""

import logging

import numpy as np
import pytest
import torch
from federations import FEW, deaf, federation, method_named, terms

from fedhassle.engine.rounds import Plan, federate
from fedhassle.federation.agreement import Rules
from fedhassle.federation.messages import Payload
from fedhassle.federation.server.bounds import bounded, with_capped_weights
from fedhassle.method import Client, Update
from fedhassle.nets import NETS, Net


def update(name, vector, labelled=10):
    return Update(Client(name, labelled, 0), {"w": vector}, {"w": labelled}, {})


def of_norm(norm, net):
    """Weights of a norm; statistics of zero."""
    weights = torch.full((net.n_weights,), norm / net.n_weights**0.5)
    return torch.cat([weights, torch.zeros(net.n_statistics)])


@pytest.fixture
def method():
    return method_named("fedavg")


def judged(method, norms, history=None, own=2.0, **rules):
    """Judges sites whose changes of w have these norms; w itself has norm `own`."""
    before = of_norm(own, method.net)
    updates = {name: update(name, before + of_norm(norm, method.net)) for name, norm in norms.items()}
    return (
        before,
        updates,
        bounded(method, updates, {name: {"w": before} for name in norms}, history or {}, Rules(**rules)),
    )


def test_a_change_above_ten_times_the_usual_is_clipped_and_above_a_hundred_times_refused(method):
    """Of 1, 1.5, 2 (the model's own), 30 and 400 the median is 2: 20 is the most, 200 is refused."""
    before, updates, found = judged(method, {"a": 1.0, "b": 1.5, "c": 30.0, "d": 400.0})
    assert list(found.updates) == ["a", "b", "c"] and list(found.refused) == ["d"]
    assert "norm 400, more than 100 times the usual 2" in found.refused["d"]
    assert found.updates["a"].arrays["w"] is updates["a"].arrays["w"]  # the same bits
    assert found.clipped == {"c": "w from norm 30 to 20"}
    gap = (found.updates["c"].arrays["w"] - before).double()
    assert float(gap.norm()) == pytest.approx(20, rel=1e-4)
    assert found.changes["c"]["w"] == pytest.approx(20, rel=1e-5)


def test_a_site_alone_is_measured_by_the_model_itself(method):
    _, _, found = judged(method, {"a": 3e38})
    assert list(found.refused) == ["a"]
    assert not judged(method, {"a": 5.0})[2].refused


def test_of_two_sites_neither_says_alone_what_is_usual(method):
    """Not the one that hardly changes anything, and not the one that changes everything."""
    assert not judged(method, {"a": 1e-9, "b": 3.0})[2].clipped
    assert list(judged(method, {"a": 3.0, "b": 1e6})[2].refused) == ["b"]


def test_a_site_that_changes_suddenly_is_clipped_by_its_own_history(method):
    """Ten times the largest of its last ten rounds; earlier ones do not count."""
    old, recent = [{"w": 5.0}], [{"w": 0.1}] * 9 + [{"w": 0.12}]
    norms = {"a": 2.0, "b": 2.0, "c": 2.0}
    _, _, found = judged(method, norms, {"a": old + recent})
    assert found.clipped == {"a": "w from norm 2 to 1.2"}
    assert not judged(method, norms, {"a": old + recent[1:]})[2].clipped


def test_rules_of_zero_turn_the_bounds_off(method):
    _, _, found = judged(method, {"a": 1.0, "b": 1e9}, clip_above=0, refuse_above=0)
    assert not found.clipped and not found.refused


def test_statistics_of_batchnorm_have_their_own_bound():
    """They may be a hundred times larger than weights: a clipped half leaves the other as it is."""
    method = method_named("fedavg")
    net = Net(NETS["resnet8"], (3, 8, 8), 4)
    method = type(method)(net)
    assert net.n_statistics
    before = net.initial(0)
    honest, bad = before.clone(), before.clone()
    honest[: net.n_weights] += 0.01
    honest[net.n_weights :] += 100
    bad[: net.n_weights] += 0.01
    bad[net.n_weights :] += 3000
    updates = {"a": update("a", honest), "b": update("b", honest), "c": update("c", bad)}
    sent = {name: {"w": before} for name in updates}
    found = bounded(method, updates, sent, {}, Rules())
    assert list(found.clipped) == ["c"] and found.clipped["c"].startswith("w statistics from")
    weights, statistics = net.parts(found.updates["c"].arrays["w"])
    assert torch.equal(weights, bad[: net.n_weights]) and 900 < float(statistics.max()) < 1100


def test_a_site_that_says_it_has_more_than_all_others_has_half_of_the_weight(method):
    """1,000, 30 and 20 labels: the first counts for 50, in every weight that a method takes from counts."""
    updates = [update(n, of_norm(1.0, method.net), k) for n, k in (("a", 1000), ("b", 30), ("c", 20))]
    found = with_capped_weights(method, updates, 0.5, 1)
    assert [one.samples for one in found] == [{"w": 50}, {"w": 30}, {"w": 20}]
    assert [one.client.labelled for one in found] == [50, 30, 20]


# In a federation


def poisoned(change):
    def act(answer, payload):
        made = deaf(answer, payload)
        return Payload(made.words, {k: change(v) for k, v in made.arrays.items()})

    return act


def introduced(**words):
    return lambda answer, payload: Payload({**answer(payload).words, **words})


def test_poison_is_refused_or_clipped_and_logged_and_a_lie_about_counts_is_capped(tmp_path, caplog):
    """Client 2 says that it has 100,000 labels, sends 1,000 times its weights, then twice."""
    agreed = terms(largest_share=0.5, minimum_sites=2)
    method, here, transport = federation(tmp_path, "fedavg", agreed=agreed)
    transport.behaviour["client 2", "query"] = introduced(labelled=100_000)
    transport.behaviour["client 2", "train"] = poisoned(lambda v: v * np.float32(1000))
    rounds = federate(method, here, Plan(3, 6, 0), method.initial(0))
    with caplog.at_level(logging.WARNING, "fedhassle"):
        first = next(rounds)
    assert "client 2" not in [reply.update.client.name for reply in first.replies]
    (failed,) = [event for event in here.audit.read() if event["event"] == "failed"]
    assert failed["site"] == "client 2" and "rules.refuse_above" in failed["why"]
    transport.behaviour["client 2", "train"] = poisoned(lambda v: v * np.float32(2))
    second = next(rounds)
    (clipped,) = [event for event in here.audit.read() if event["event"] == "clipped"]
    assert (clipped["site"], clipped["round"]) == ("client 2", 2) and "w from norm" in clipped["what"]
    assert "the update of client 2 is clipped" in caplog.text
    counts = {reply.update.client.name: reply.update.samples["w"] for reply in second.replies}
    assert counts["client 2"] == sum(n for name, n in counts.items() if name != "client 2")
    assert second.state["w"].isfinite().all() and float(second.state["w"].norm()) < 100


@pytest.mark.parametrize("key", ["labelled", "unlabelled", "validation"])
def test_a_site_with_more_images_than_the_rules_allow_is_refused(key, tmp_path):
    _, here, transport = federation(tmp_path, "fedavg", split=FEW, agreed=terms(most_images=50_000))
    transport.behaviour["client 2", "query"] = introduced(**{key: 50_001})
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    (refused,) = [event for event in here.audit.read() if event["event"] == "refused"]
    assert "50,0" in refused["why"] and "most_images" in refused["why"]


@pytest.mark.parametrize("coarse", [False, True])
def test_a_site_with_more_images_than_it_was_admitted_with_is_refused(coarse, tmp_path):
    """Until it is admitted with more. Coarse counts may be too high, by a factor of √2."""
    _, here, transport = federation(tmp_path, "fedavg", split=FEW, agreed=terms(coarse=coarse))
    transport.behaviour["client 2", "query"] = introduced(labelled=32, unlabelled=256, validation=0)
    transport.images = {"client 2": 203 if coarse else 287, "client 1": 10_000}
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    (refused,) = [event for event in here.audit.read() if event["event"] == "refused"]
    assert refused["site"] == "client 2" and "counts 288 images, but was admitted with 2" in refused["why"]
    assert "fedhassle federation admit again, with --images 288" in refused["why"]
    transport.images["client 2"] += 1
    assert [client.name for client in here.present()] == ["client 1", "client 2", "client 3"]
    agreed = {e["site"]: e.get("agreed_images") for e in here.audit.read() if e["event"] == "joined"}
    assert agreed == {"client 1": 10_000, "client 2": transport.images["client 2"], "client 3": None}


def test_pseudo_labels_are_no_more_than_training_can_ask_for(tmp_path):
    method, here, transport = federation(tmp_path, "hassle", split=FEW)

    def lie(answer, payload):
        made = answer(payload)
        return Payload({**made.words, "pseudo_labels": [10**12, 10**12]}, made.arrays)

    transport.behaviour["client 2", "train"] = lie
    next(federate(method, here, Plan(1, 3, 0), method.initial(0)))
    (failed,) = [event for event in here.audit.read() if event["event"] == "failed"]
    assert failed["site"] == "client 2" and "pseudo-labels" in failed["why"]


def test_an_evaluation_on_other_images_than_introduced_is_refused(tmp_path):
    agreed = terms(validation=0.4)
    method, here, transport = federation(tmp_path, "fedavg", agreed=agreed, split=FEW)
    transport.behaviour["client 2", "evaluate"] = lambda answer, payload: Payload(
        {"right": {"model": 10**12}, "count": 10**12}
    )
    here.present()
    found = here.evaluate(method, method.initial(0), 1)
    assert set(found.more["sites"]) == {"client 1", "client 3"}
    (failed,) = [event for event in here.audit.read() if event["event"] == "failed"]
    assert "1,000,000,000,000 images, but joined with" in failed["why"]


def test_a_resumed_run_knows_the_changes_of_each_site(tmp_path):
    method, here, _ = federation(tmp_path, "fedavg", split=FEW)
    list(federate(method, here, Plan(3, 3, 0), method.initial(0)))
    known = {name: list(changes) for name, changes in here._changes.items()}
    assert [len(changes) for changes in known.values()] == [3, 3, 3]
    here.rewind(2)
    assert here._changes == {name: changes[:2] for name, changes in known.items()}
