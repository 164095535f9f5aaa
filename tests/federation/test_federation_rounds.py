"""Rounds over a network equal those of the simulator, and an error at a site costs that site only."""

import logging
import shutil
from dataclasses import replace

import pytest
import small
import torch
from federations import (
    ENGINE,
    FEW,
    FakeTransport,
    FlowerFederation,
    Flying,
    Sites,
    agreed_on,
    federation,
    held,
    planned,
    site,
    terms,
)

from fedhassle.engine.device import Engine
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.federation.audit_log import AuditLog
from fedhassle.federation.messages import Failure, Payload, answered, failure, to_json, update_words
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.sites import GONE
from fedhassle.federation.site.node import SiteNode
from fedhassle.method import Client, Update
from fedhassle.methods import METHODS
from fedhassle.provenance import own_code

FEDERATED = [name for name in METHODS if not METHODS[name].pooled]


@pytest.mark.parametrize("name", FEDERATED)
def test_three_rounds_are_those_of_the_simulator_bit_for_bit(name, tmp_path):
    """States, losses, samples and bytes, with four of six clients a round."""
    method, here, _ = federation(tmp_path, name)
    plan = Plan(3, 4, 0)
    there = Simulator(small.dataset(), small.SPLIT, 0, small.ENGINE)
    state = method.initial(0)
    rounds = zip(federate(method, here, plan, state), federate(method, there, plan, state), strict=True)
    trained = 0
    for one, other in rounds:
        assert small.same(one.state, other.state)
        assert [c.name for c in one.clients] == [c.name for c in other.clients]
        for mine, its in zip(one.replies, other.replies, strict=True):
            assert mine.update.client == its.update.client and mine.update.samples == its.update.samples
            assert small.same(mine.update.losses, its.update.losses)
            assert (mine.bytes_down, mine.bytes_up) == (its.bytes_down, its.bytes_up)
            trained += 1
    assert trained >= 6


def lost(answer, payload):
    """Never answers."""


def raising(answer, payload):
    return "gone (code 5)"


def changed(change):
    def act(answer, payload):
        made = answer(payload)
        return change(made)

    return act


def with_arrays(change):
    return changed(lambda made: Payload(made.words, change(dict(made.arrays))))


def nan(arrays):
    arrays["whole w"] = arrays["whole w"].copy()
    arrays["whole w"][3] = float("nan")
    return arrays


GARBAGE = {
    "NaN": (with_arrays(nan), "NaN"),
    "another length": (with_arrays(lambda a: {"whole w": a["whole w"][:-1]}), "entries"),
    "another name": (with_arrays(lambda a: {"whole v": a["whole w"]}), "'v' instead of 'w'"),
    "one more": (with_arrays(lambda a: {**a, "whole v": a["whole w"]}), "'w', 'v' instead of 'w'"),
    "nothing": (with_arrays(lambda a: {}), "nothing instead of 'w'"),
    "another type": (
        with_arrays(lambda a: {"whole w": a["whole w"].astype("float64")}),
        "of float64",
    ),
    "another shape": (with_arrays(lambda a: {"whole w": a["whole w"][None]}), "shape (1, "),
    "an odd key": (with_arrays(lambda a: {"w": a["whole w"]}), "an array 'w'"),
    "half a change": (with_arrays(lambda a: {**a, "index w": a["whole w"].astype("int32")}), "missing"),
    "a wild change": (
        with_arrays(lambda a: {"index w": -a["whole w"].astype("int32") - 9, "value w": a["whole w"]}),
        "outside the range",
    ),
    "no losses": (changed(lambda made: Payload({}, made.arrays)), "its losses are None"),
    "odd losses": (changed(lambda made: Payload({"losses": {"w": "much"}}, made.arrays)), "'much'"),
    "odd counts": (
        changed(lambda made: Payload({**made.words, "pseudo_labels": [3, 2]}, made.arrays)),
        "pseudo-labels are [3, 2]",
    ),
    "an error": (raising, "gone (code 5)"),
    "its own error": (changed(lambda made: Payload({"error": "no space left"})), "no space left"),
    "silence": (lost, "did not answer within 60 s"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_site_that_misbehaves_costs_the_round_that_site_only(what, tmp_path, caplog):
    method, here, transport = federation(tmp_path, "fedavg", split=FEW)
    act, why = GARBAGE[what]
    transport.behaviour["client 2", "train"] = act
    rounds = federate(method, here, Plan(3, 3, 0), method.initial(0))
    with caplog.at_level(logging.WARNING, "fedhassle"):
        first = next(rounds)
    assert [reply.update.client.name for reply in first.replies] == ["client 1", "client 3"]
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("round 1 continues without client 2: ") and why in said
    events = here.audit.read()
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert (failed["site"], failed["round"]) == ("client 2", 1) and why in failed["why"]
    (merged,) = [event for event in events if event["event"] == "round"]
    assert merged["contributed"] == ["client 1", "client 3"] and merged["failed"] == ["client 2"]
    if what == "silence":
        return
    del transport.behaviour["client 2", "train"]  # it takes part again
    assert [reply.update.client.name for reply in next(rounds).replies] == [
        "client 1",
        "client 2",
        "client 3",
    ]


def test_the_round_is_merged_as_if_the_site_had_not_been_asked(tmp_path):
    method, here, transport = federation(tmp_path, "hassle", split=FEW)
    transport.behaviour["client 2", "train"] = raising
    (done,) = federate(method, here, Plan(1, 3, 0), method.initial(0))
    there = Simulator(small.dataset(), FEW, 0, small.ENGINE)
    there.clients = [client for client in there.clients if client.name != "client 2"]
    (other,) = federate(method, there, Plan(1, 3, 0), method.initial(0))
    assert small.same(done.state, other.state)


def test_too_few_answers_stop_the_run_with_what_each_said(tmp_path):
    method, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.behaviour["client 1", "train"] = raising
    transport.behaviour["client 3", "train"] = lost
    with pytest.raises(UserError) as error:
        next(federate(method, here, Plan(3, 3, 0), method.initial(0)))
    for part in ("round 1: 1 of at least 2", "client 1: gone", "client 3: it did not answer"):
        assert part in str(error.value)


def test_a_round_asks_again_for_a_site_that_it_needs(tmp_path, caplog):
    """Its node was restarted in mid-round: the result is that of a round without trouble."""
    agreed = terms(required_sites=("client 2",), minimum_sites=2)
    method, here, transport = federation(tmp_path / "a", "fedavg", agreed=agreed, split=FEW)
    once = []

    def restarted(answer, payload):
        if not once:
            once.append(1)
            return "its node was restarted (code 5)"
        return answer(payload)

    transport.behaviour["client 2", "train"] = restarted
    with caplog.at_level(logging.WARNING, "fedhassle"):
        (done,) = federate(method, here, Plan(1, 3, 0), method.initial(0))
    assert "round 1 needs client 2: asking again" in caplog.text
    _, untroubled, _ = federation(tmp_path / "b", "fedavg", agreed=agreed, split=FEW)
    (other,) = federate(method, untroubled, Plan(1, 3, 0), method.initial(0))
    assert small.same(done.state, other.state) and len(done.replies) == 3
    (merged,) = [event for event in here.audit.read() if event["event"] == "round"]
    assert merged["failed"] == []


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"required_sites": ("client 2",)}, "required and missing: client 2"),
        ({"required_kinds": ("partial",)}, "required and missing: a site of the kind 'partial'"),
    ],
)
def test_a_round_without_a_required_site_is_not_made(rules, why, tmp_path):
    """It is waited for before the round; if its answer is of no use, the run stops."""
    partial = {"client 2", "client 3"}
    method, here, transport = federation(
        tmp_path, "fedavg", agreed=terms(minimum_sites=1, **rules), split=FEW
    )
    transport.gone = partial
    with pytest.raises(UserError, match=f"too few sites after 120 s: .*{why}"):
        next(federate(method, here, Plan(3, 3, 0), method.initial(0)))
    transport.gone = set()
    for name in partial:
        transport.behaviour[name, "train"] = changed(lambda made: Payload({"error": "no space left"}))
    with pytest.raises(UserError, match=f"round 1: {why} .*no space left"):
        next(federate(method, here, Plan(3, 3, 0), method.initial(0)))


def test_a_late_site_is_not_asked_again_before_it_has_answered(tmp_path):
    method, here, transport = federation(tmp_path, "fedavg", split=FEW)
    late = []
    transport.behaviour["client 2", "train"] = lambda answer, payload: late.append(answer(payload))
    rounds = federate(method, here, Plan(4, 3, 0), method.initial(0))
    next(rounds)
    assert [c.name for c in next(rounds).clients] == ["client 1", "client 3"]
    del transport.behaviour["client 2", "train"]
    number = next(
        f"request {i}" for i, x in enumerate(transport.requests) if (x.node, x.kind) == (999, "train")
    )
    transport.answers[number] = late[0]
    third = next(rounds)
    assert [reply.update.client.name for reply in third.replies] == ["client 1", "client 2", "client 3"]
    assert "back" in [event["event"] for event in here.audit.read()]


@pytest.mark.parametrize("back", [True, False])
def test_a_site_that_leaves_in_mid_round_is_not_waited_for_to_the_end(back, tmp_path):
    """A site whose connection breaks for ten seconds is waited for."""
    agreed = terms(timeout=3000)
    method, here, transport = federation(tmp_path, "fedavg", agreed=agreed, split=FEW)
    clock, late = here.sites.clock, {}

    def leave(answer, payload):
        transport.gone = {"client 2"}
        late[f"request {len(transport.requests) - 1}"] = answer(payload)

    def pause(seconds):
        clock.pause(seconds)
        if back and clock.now() > 10:
            transport.gone = set()
        if clock.now() > 30:
            transport.answers |= late

    transport.behaviour["client 2", "train"] = leave
    here.sites.clock = clock._replace(pause=pause)
    done = next(federate(method, here, Plan(1, 3, 0), method.initial(0)))
    names = [reply.update.client.name for reply in done.replies]
    assert names == ["client 1", *(["client 2"] if back else []), "client 3"]
    assert clock.now() < 60
    said = [event["why"] for event in here.audit.read() if event["event"] == "failed"]
    assert said == ([] if back else [GONE])


def test_a_site_that_comes_back_introduces_itself_again(tmp_path):
    method, here, transport = federation(tmp_path, "fedavg", split=FEW)
    rounds = federate(method, here, Plan(4, 3, 0), method.initial(0))
    next(rounds)
    transport.gone = {"client 1"}
    assert [c.name for c in next(rounds).clients] == ["client 2", "client 3"]
    transport.gone, transport.since["client 1"] = set(), "tomorrow"
    # Its query goes out when the round is drawn, and its answer may come later.
    clients = [[c.name for c in next(rounds).clients] for _ in range(2)]
    assert clients[-1] == ["client 1", "client 2", "client 3"]
    told = [(e["event"], e["site"]) for e in here.audit.read() if e.get("site") == "client 1"]
    assert told == [("joined", "client 1"), ("left", "client 1"), ("joined", "client 1")]


def test_waiting_for_sites_ends(tmp_path):
    method, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.gone = {"client 1", "client 3"}
    with pytest.raises(UserError, match=r"120 s: 1 of at least 2 are online \(client 2\)"):
        next(federate(method, here, Plan(1, 3, 0), method.initial(0)))


def test_who_is_refused_is_named_while_others_are_awaited(tmp_path):
    """Until it is gone, or has connected anew and is asked again."""
    _, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.behaviour["client 2", "query"] = changed(lambda made: Payload({**made.words, "agreed": "0"}))
    online = r"2 of at least 3 are online \(client 1, client 3\)"
    with pytest.raises(UserError, match=rf"{online}; online but refused: client 2; start the missing"):
        here.sites.gather(3)
    transport.gone = {"client 2"}
    with pytest.raises(UserError, match=rf"{online}; start the missing"):
        here.sites.gather(3)
    transport.gone, transport.behaviour = set(), {}
    transport.since["client 2"] = "tomorrow"
    assert list(here.sites.gather(3)) == ["client 1", "client 2", "client 3"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"site": "client 1"}, "its key was admitted as 'client 2'"),
        ({"agreed": "0"}, "federation.toml differs"),
        ({"labelled": -1}, "labelled samples is -1"),
        ({"labelled": True}, "labelled samples is True"),
        ({"unlabelled": 1.5}, "unlabelled samples is 1.5"),
        ({"site": "a\nb"}, "its name is"),
        ({"versions": None}, "versions"),
        ({"site": "x" * 1000}, "its name is"),
    ],
)
def test_a_site_with_a_wrong_introduction_is_refused_and_told_why(words, why, tmp_path, caplog):
    _, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.behaviour["client 2", "query"] = changed(lambda made: Payload({**made.words, **words}))
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    (refused,) = [event for event in here.audit.read() if event["event"] == "refused"]
    assert refused["site"] == "client 2" and why in refused["why"] and len(refused["why"]) < 300
    assert f"the server refuses this site: {refused['why']}" in [one.getMessage() for one in caplog.records]


def test_a_site_with_other_code_of_the_users_method_is_refused(tmp_path, module):
    """Each site has its own copy of the file; here they share one, which changes before client 2 starts."""
    agreed = terms(run='method = "own_code:Mine"')
    path = tmp_path / f"{module('own_code', 'from fedhassle.methods import FedAvg as Mine')}.py"
    nodes = {}
    for name, (x, y) in held(small.dataset(), FEW).items():
        before = path.read_text()
        path.write_text(f"# of {name}\n{before}" if name == "client 2" else before)
        nodes[name] = site(tmp_path, name, x, y, agreed).answer
        path.write_text(before)
    sites = Sites(FakeTransport(nodes), agreed, Audit(tmp_path / "audit.jsonl"), Flying().clock)
    assert list(sites.gather(2)) == ["client 1", "client 3"]
    joined, refused = (
        [event for event in sites.audit.read() if event["event"] == kind] for kind in ("joined", "refused")
    )
    assert {event["versions"]["own_code:Mine"] for event in joined} == {own_code("own_code:Mine")}
    assert [event["site"] for event in refused] == ["client 2"]
    assert "own_code:Mine" in refused[0]["why"]


def test_a_node_that_fails_to_introduce_itself_is_asked_again(tmp_path):
    _, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.behaviour["client 2", "query"] = raising
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    del transport.behaviour["client 2", "query"]
    assert [client.name for client in here.present()] == ["client 1", "client 3"]  # not immediately
    here.sites.clock.pause(10)
    assert [client.name for client in here.present()] == ["client 1", "client 2", "client 3"]
    assert [e["site"] for e in here.audit.read() if e["event"] == "failed"] == ["client 2"]


def test_of_two_sites_with_one_name_the_second_is_refused(tmp_path):
    _, here, transport = federation(tmp_path, "fedavg", split=FEW)
    transport.named = False
    transport.behaviour["client 2", "query"] = changed(
        lambda made: Payload({**made.words, "site": "client 1"})
    )
    assert len(here.present()) == 2
    assert "already" in next(e["why"] for e in here.audit.read() if e["event"] == "refused")


# Memory of sites


@pytest.mark.parametrize("name", ["rscfed", "fedmatch"])
def test_a_round_that_was_lost_on_its_way_back_leaves_no_trace_at_the_site(name, tmp_path):
    """The site trains round 2 and keeps something, but its answer is lost: round 3 does not see it."""
    method, here, transport = federation(tmp_path / "a", name)

    def trains_in_vain(answer, payload):
        answer(payload)
        return "lost on the way"

    rounds = federate(method, here, Plan(3, 6, 0), method.initial(0))
    next(rounds)
    transport.behaviour["client 5", "train"] = trains_in_vain
    next(rounds)
    del transport.behaviour["client 5", "train"]
    last = next(rounds)
    _, other, net = federation(tmp_path / "b", name)
    expected = federate(method, other, Plan(3, 6, 0), method.initial(0))
    next(expected)
    net.behaviour["client 5", "train"] = raising
    next(expected)
    del net.behaviour["client 5", "train"]
    assert small.same(last.state, next(expected).state)


def test_a_site_that_has_lost_its_memory_starts_afresh(tmp_path, caplog):
    method, here, _ = federation(tmp_path, "fedmatch")
    rounds = federate(method, here, Plan(4, 6, 0), method.initial(0))
    next(rounds)
    shutil.rmtree(tmp_path / "client 2")
    done = next(rounds)
    assert "client 2" not in [reply.update.client.name for reply in done.replies]
    assert "memory of round 1 is lost" in caplog.text
    third = next(rounds)
    assert "client 2" in [reply.update.client.name for reply in third.replies]


def test_only_the_field_lost_says_that_a_memory_is_lost(tmp_path):
    """Whatever the text of its error is, the site continues from the last merged round."""
    method, here, transport = federation(tmp_path, "fedmatch", split=FEW)
    rounds = federate(method, here, Plan(3, 3, 0), method.initial(0))
    next(rounds)
    transport.behaviour["client 2", "train"] = changed(
        lambda _: Payload({"error": "lost: the cupboard's key"})
    )
    next(rounds)
    del transport.behaviour["client 2", "train"]
    next(rounds)
    sent = [request for request in transport.requests if request.node == transport.ids["client 2"]]
    assert [request.payload.words["since"] for request in sent if request.kind == "train"] == [0, 1, 1]


ERRORS = {
    "a long reason": (
        "the method is not in this site's file; " * 5,
        "the method is not in this site's file; " * 5,
    ),
    "one without end": ("ä" * 10**6, "ä" * 499 + "…"),
    "just short enough": ("x" * 500, "x" * 500),
    "paths and quotes": (r"C:\data: it's \"gone\"", r"C:\data: it's \"gone\""),
    "several lines": ("one\ntwo\x1b[2J\tthree", "one two [2J three"),
    "no text at all": ({"code": 5}, "{'code': 5}"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_a_sites_error_is_reported_in_its_own_words(what):
    said, told = ERRORS[what]
    assert answered(Payload({"error": said}), "") == Failure(told)
    assert answered(failure("gone", lost=True), "") == Failure("gone", lost=True)
    assert answered(Payload({"error": "gone", "lost": "yes"}), "") == Failure("gone")


@pytest.mark.parametrize("name", ["fedavg", "rscfed", "fedmatch"])
def test_a_run_resumed_after_a_round_ends_in_the_same_bits(name, tmp_path):
    """Rounds 3 and 4 are trained twice: by a server that then ends, and by one that resumes after round 2."""
    method, first, transport = federation(tmp_path, name)
    plan = Plan(4, 4, 0)
    first.memory.folder = tmp_path / "server"
    states = {0: method.initial(0)}
    for done in federate(method, first, plan, states[0]):
        states[done.t] = done.state
        if done.t == 2:
            first.prune([2])
    sites = Sites(transport, agreed_on(name), first.audit, Flying().clock)
    second = FlowerFederation(sites, first.plan, first.memory)
    again = {done.t: done.state for done in federate(method, second, plan, states[2], first=3)}
    assert sorted(again) == [3, 4] and all(small.same(again[t], states[t]) for t in again)


def test_coarse_counts_are_powers_of_two_and_still_train(tmp_path):
    method, here, _ = federation(tmp_path, "fedavg", agreed=terms(coarse=True), split=FEW)
    clients = here.present()
    assert [(c.labelled, c.unlabelled) for c in clients] == [(16, 0), (8, 16), (8, 8)]  # of 20+0, 6+14, 9+11
    (done,) = federate(method, here, Plan(1, 3, 0), method.initial(0))
    assert [reply.update.samples for reply in done.replies] == [{"w": 16}, {"w": 8}, {"w": 8}]


def test_a_site_receives_only_the_models_that_it_needs(tmp_path):
    method, here, transport = federation(tmp_path, "hassle")
    next(federate(method, here, Plan(1, 6, 0), method.initial(0)))
    by_node = {request.node: request.payload for request in transport.requests if request.kind == "train"}
    for client in here.present():
        expected = {f"whole {name}" for name in method.message(method.initial(0), client, 1)}
        assert by_node[transport.ids[client.name]].arrays.keys() == expected


# Refusals of a site


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"method": {"name": "os:system"}},
            "asks for method.name='os:system', but this site's",
        ),
        ({"net": "subprocess:Popen"}, "asks for net='subprocess:Popen', but this site's federation.toml"),
        ({"method": "fedavg"}, "asks for method.name=None, but"),
        (
            {"method": {"name": "hassle"}},
            "but this site's federation.toml says method.name='fedavg': c",
        ),
        ({"method": {"name": "local"}}, "method.name='local', but"),
        ({"method": {"name": "fedavg"}}, "method.batch=None, method.epochs=None, method.lr=None, but"),
        ({"net": "lenet"}, "asks for net='lenet', but this site's federation.toml says net='small:ConvNet'"),
        ({"run": "..-..-x"}, "cannot name a run"),
        ({"round": -1}, "count of round samples"),
        ({"rounds": 0}, "has no rounds"),
        ({"rounds": "many"}, "count of round samples"),
    ],
)
def test_a_site_refuses_what_it_has_not_agreed_to(change, why, tmp_path):
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y, agreed_on("fedavg"))
    method, plan = planned(agreed_on("fedavg"))
    sent = {"whole w": method.initial(0)["w"].numpy()}
    answer = node.answer("train", Payload({**plan, "round": 1, "since": 0, **change}, sent))
    assert why in answer.words["error"] and not answer.arrays
    assert "gossip" in node.answer("gossip", Payload({})).words["error"]


@pytest.mark.parametrize(("key", "value"), [("epochs", 1000), ("batch", 1), ("lr", 1.0), ("momentum", 0.0)])
def test_a_site_refuses_other_settings_of_the_agreed_method(key, value, tmp_path):
    """One full-batch step at rate 1 would send an exact gradient."""
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y, agreed_on("fedavg"))
    method, plan = planned(agreed_on("fedavg"))
    words = {**plan, "method": {**plan["method"], key: value}, "round": 1, "since": 0}
    answer = node.answer("train", Payload(words, {"whole w": method.initial(0)["w"].numpy()}))
    agreed = plan["method"][key]
    expected = f"asks for method.{key}={value}, but this site's federation.toml says method.{key}={agreed}"
    assert expected in answer.words["error"] and not answer.arrays


def test_a_site_refuses_a_model_of_another_length(tmp_path):
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y, agreed_on("fedavg", terms(validation=0.4)))
    method, plan = planned(agreed_on("fedavg", terms(validation=0.4)))
    short = {"whole w": method.initial(0)["w"].numpy()[:-1]}
    for kind in ("train", "evaluate"):
        answer = node.answer(kind, Payload({**plan, "round": 1, "since": 0}, short))
        assert "the agreed network has" in answer.words["error"]


def test_the_number_of_rounds_is_the_servers_and_settings_that_follow_from_it_are_agreed(tmp_path):
    """hassle+ starts its second model after three tenths of the rounds."""
    x, y = held(small.dataset())["client 2"]
    node = site(tmp_path, "client 2", x, y, agreed_on("hassle+"))
    for rounds, start in ((10, 3), (100, 30)):
        method, plan = planned(
            replace(agreed_on("hassle+"), run={**agreed_on("hassle+").run, "rounds": rounds})
        )
        assert plan["method"]["start"] == start
        arrays = {f"whole {k}": v.numpy() for k, v in method.initial(0).items()}
        answer = node.answer("train", Payload({**plan, "run": f"r{rounds}", "round": 1, "since": 0}, arrays))
        assert list(answer.arrays) == ["whole w_S"]
        plan["method"]["start"] = 0
        assert "method.start=0" in node.answer("train", Payload({**plan, "round": 1}, arrays)).words["error"]


# What leaves a site


def test_a_site_logs_who_asked_and_what_it_sent(tmp_path):
    agreed = agreed_on("fedavg", terms(validation=0.4))
    x, y = held(small.dataset())["client 1"]
    node = SiteNode("client 1", agreed, x, y, tmp_path / "memory", ENGINE, audit=tmp_path / "audit.jsonl")
    method, plan = planned(agreed)
    model = {"whole w": method.initial(0)["w"].numpy()}
    node.answer("query", Payload({"kind": "query"}))
    trained = node.answer("train", Payload({**plan, "round": 1, "since": 0}, model))
    node.answer("evaluate", Payload({**plan, "round": 1}, model))
    node.answer("train", Payload({**plan, "method": {"name": "local"}, "round": 2, "since": 1}, model))
    events = AuditLog(tmp_path / "audit.jsonl").read()
    assert [(e["event"], e["kind"], e.get("round")) for e in events] == [
        *(("answered", "query", None), ("answered", "train", 1)),
        *(("answered", "evaluate", 1), ("failed", "train", 2)),
    ]
    assert {e["asked_by"] for e in events} == {"small at 127.0.0.1:9"} and events[1]["run"] == "abc"
    length = method.net.n_weights + method.net.n_statistics
    assert events[1]["arrays"] == {"whole w": length} and events[1]["words"] == trained.words
    assert events[1]["sent_bytes"] == 4 * length + len(to_json(trained.words))
    assert events[1]["received_bytes"] > 4 * length
    assert set(events[2]["words"]) == {"right", "count"} and not events[2]["arrays"]
    assert "method.name='local'" in events[3]["words"]["error"] and not events[3]["arrays"]


def test_what_cannot_be_logged_does_not_leave(tmp_path):
    agreed = agreed_on("fedavg")
    x, y = held(small.dataset())["client 1"]
    (tmp_path / "audit.jsonl").mkdir()
    node = SiteNode("client 1", agreed, x, y, tmp_path / "memory", ENGINE, audit=tmp_path / "audit.jsonl")
    method, plan = planned(agreed)
    words = {**plan, "round": 1, "since": 0}
    answer = node.answer("train", Payload(words, {"whole w": method.initial(0)["w"].numpy()}))
    assert answer == failure("its audit log cannot be written: Is a directory")


LEAVING = {
    "a full disk": (
        OSError(28, "No space left on device", "/home/miller/scans/a.png"),
        "OSError: [Errno 28] No space left on device: '…'",
    ),
    "a path with spaces": (UserError("/data/my scans/Miller John.png is damaged"), "… … … is damaged"),
    "a quoted path": (UserError("'C:\\Users\\John Miller\\x.npz' cannot be read"), "'…' cannot be read"),
    "a name of a file": (UserError("skipped miller.PNG: no image"), "skipped …: no image"),
    "a relative path": (UserError("see node/north/node.log"), "see …"),
    "a key": (KeyError("Miller, John"), "KeyError: '…'"),
    "no path": (MemoryError("no memory left"), "MemoryError: no memory left"),
    "settings": (UserError("method.lr=1 in federation.toml"), "method.lr=1 in federation.toml"),
    "a label": (UserError("labels.csv has changed"), "labels.csv has changed"),
}


@pytest.mark.parametrize("what", LEAVING)
def test_errors_leave_a_site_without_paths(what, tmp_path, monkeypatch, caplog):
    error, told = LEAVING[what]
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y)

    def fail(payload):
        raise error

    monkeypatch.setattr(node, "train", fail)
    assert node.answer("train", Payload({})) == failure(told)
    assert str(error) in caplog.text  # the site's own log has all of it


def test_a_site_reports_the_hits_on_its_validation_images(tmp_path):
    """Computed by hand on the rows that were kept from training."""
    agreed = agreed_on("fedavg", terms(validation=0.4))
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y, agreed)
    rows = node.images.now.rows.validation
    assert 0 < len(rows) < len(y) and not set(rows) & set(node.images.now.rows.labelled)
    method, plan = planned(agreed)
    vector = method.initial(0)["w"]
    answer = node.answer("evaluate", Payload({**plan, "round": 1}, {"whole w": vector.numpy()}))
    pixels = torch.from_numpy((x[rows] / 255 - 0.5) / 0.25).float().permute(0, 3, 1, 2)
    right = (method.net.logits(vector, pixels).argmax(1).numpy() == y[rows]).sum()
    assert answer.words == {"right": {"model": right}, "count": len(rows)}


def test_a_site_measures_in_float32_whatever_it_trains_in(tmp_path, monkeypatch):
    """As the simulator and the coordinator do, whose figures are shown beside its own."""
    x, y = held(small.dataset())["client 1"]
    agreed = agreed_on("fedavg", terms(validation=0.4))
    node, method, seen = site(tmp_path, "client 1", x, y, agreed), METHODS["fedavg"], []
    node.engine, predict = Engine(small.CPU, "bf16"), method.predict
    monkeypatch.setattr(method, "predict", lambda *words: seen.append(predict(*words)) or seen[-1])
    built, plan = planned(agreed)
    words, vector, net = {**plan, "round": 1}, built.initial(0)["w"], built.net
    assert "right" in node.answer("evaluate", Payload(words, {"whole w": vector.numpy()})).words
    images = torch.from_numpy(x[node.images.now.rows.validation])
    assert torch.equal(
        seen[0]["model"], net.logits(vector, small.simulator().trainer.views.normalise(images))
    )


def test_a_site_keeps_only_what_a_resumed_run_may_need(tmp_path):
    """One file for each of the server's two checkpoints, and one for the last round."""
    method, here, _ = federation(tmp_path, "rscfed")
    for done in federate(method, here, Plan(8, 6, 0), method.initial(0)):
        if done.t % 2 == 0:
            here.prune([n for n in (done.t - 2, done.t) if n])
    kept = sorted(path.name for path in (tmp_path / "client 5").rglob("round-*"))
    assert kept == [f"round-{t:06d}.safetensors" for t in (4, 6, 7, 8)]  # of round 8's message: 4, 6 and 7


@pytest.mark.parametrize("name", ["hassle", "fixmatch-global"])
def test_sites_report_how_many_pseudo_labels_they_give_but_not_how_many_are_right(name, tmp_path):
    """The counts are the simulator's."""
    method, here, _ = federation(tmp_path, name)
    there = Simulator(small.dataset(), small.SPLIT, 0, small.ENGINE)
    ours, theirs = (
        torch.stack([reply.update.labelling for reply in done.replies])
        for one in (here, there)
        for done in federate(method, one, Plan(1, 6, 0), method.initial(0))
    )
    assert not ours[:, [0, 3]].any() and torch.equal(theirs[:, 3], theirs[:, 1])
    assert torch.equal(ours[:, 1:3], theirs[:, 1:3])
    assert ours[0, 1:3].tolist() == [0, 0] and (ours[1:, 2] > 0).all()  # the first has none to label


def test_coarse_counts_of_pseudo_labels_keep_the_share(tmp_path):
    """Each unlabelled sample gets a label: powers of two near 14, 11, 19, 17 and 23 samples."""
    method, here, _ = federation(tmp_path, "hassle", agreed=terms(coarse=True))
    (done,) = federate(method, here, Plan(1, 6, 0), method.initial(0))
    counts = [reply.update.labelling[1:3].tolist() for reply in done.replies]
    assert counts == [[0, 0], [16, 16], [8, 8], [16, 16], [16, 16], [32, 32]]


def test_a_share_of_coarse_counts_is_rounded():
    """A third of 11 labels: 11 becomes 8, and 4 of 11 becomes 3 of 8."""
    update = Update(Client("k", 1, 1), {}, {}, {}, torch.tensor([0.0, 4.0, 11.0, 0.0]))
    assert update_words(update) == {"losses": {}, "pseudo_labels": [4, 11]}
    assert update_words(update, rounded=True) == {"losses": {}, "pseudo_labels": [3, 8]}
