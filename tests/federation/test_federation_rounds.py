"""Rounds over a network: those of the simulator; and what goes wrong at a site costs that site alone."""

import logging

import pytest
import small
import torch
from federations import FEW, NET, federation, terms
from small import TELLING, made

from fedhassle.engine.device import Engine
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.federation.messages import Content, Failure, answered, failure
from fedhassle.federation.server.audit import Audit
from fedhassle.methods import METHODS
from fedhassle.provenance import own_code

FEDERATED = [name for name in METHODS if not METHODS[name].pooled]
SHORT = {"batch": 8, "epochs": 1}


def settings_of(name):
    return {**SHORT, **TELLING.get(name, {})}


@pytest.mark.parametrize("name", FEDERATED)
def test_three_rounds_are_those_of_the_simulator_bit_for_bit(name, tmp_path):
    """States, losses, samples and bytes, with four of six clients a round."""
    method, plan = made(name), Plan(3, 4, 0)
    here, _ = federation(tmp_path, method, name, settings=settings_of(name))
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


def lost(answer, content):
    """Never answers."""


def raising(answer, content):
    return "its node is gone (code 5)"


def changed(change):
    def act(answer, content):
        made = answer(content)
        return change(made)

    return act


def with_arrays(change):
    return changed(lambda made: Content(made.words, change(dict(made.arrays))))


def nan(arrays):
    arrays["whole w"] = arrays["whole w"].copy()
    arrays["whole w"][3] = float("nan")
    return arrays


GARBAGE = {
    "NaN": (with_arrays(nan), "NaN or infinite"),
    "another length": (with_arrays(lambda a: {"whole w": a["whole w"][:-1]}), "entries in place of"),
    "another name": (with_arrays(lambda a: {"whole v": a["whole w"]}), "'v' in place of 'w'"),
    "one more": (with_arrays(lambda a: {**a, "whole v": a["whole w"]}), "'w', 'v' in place of 'w'"),
    "nothing": (with_arrays(lambda a: {}), "nothing in place of 'w'"),
    "another type": (
        with_arrays(lambda a: {"whole w": a["whole w"].astype("float64")}),
        "of float64",
    ),
    "another shape": (with_arrays(lambda a: {"whole w": a["whole w"][None]}), "shape (1, "),
    "an odd key": (with_arrays(lambda a: {"w": a["whole w"]}), "an array 'w'"),
    "half a change": (with_arrays(lambda a: {**a, "index w": a["whole w"].astype("int32")}), "missing"),
    "a wild change": (
        with_arrays(lambda a: {"index w": -a["whole w"].astype("int32") - 9, "value w": a["whole w"]}),
        "outside it",
    ),
    "no losses": (changed(lambda made: Content({}, made.arrays)), "its losses are None"),
    "odd losses": (changed(lambda made: Content({"losses": {"w": "much"}}, made.arrays)), "'much'"),
    "odd counts": (
        changed(lambda made: Content({**made.words, "labelling": [3, 2]}, made.arrays)),
        "pseudo-labels are [3, 2]",
    ),
    "an error": (raising, "its node is gone (code 5)"),
    "its own error": (changed(lambda made: Content({"error": "no space left"})), "no space left"),
    "silence": (lost, "did not answer within 60 s"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_site_that_misbehaves_costs_the_round_itself_alone(what, tmp_path, caplog):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    act, why = GARBAGE[what]
    grid.behaviour["client 2", "train"] = act
    rounds = federate(method, here, Plan(3, 3, 0), method.initial(0))
    with caplog.at_level(logging.WARNING, "fedhassle"):
        first = next(rounds)
    assert [reply.update.client.name for reply in first.replies] == ["client 1", "client 3"]
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("round 1 goes on without client 2: ") and why in said
    events = here.audit.read()
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert (failed["site"], failed["round"]) == ("client 2", 1) and why in failed["why"]
    (merged,) = [event for event in events if event["event"] == "round"]
    assert merged["contributed"] == ["client 1", "client 3"] and merged["failed"] == ["client 2"]
    if what == "silence":
        return
    del grid.behaviour["client 2", "train"]  # it may come back
    assert [reply.update.client.name for reply in next(rounds).replies] == [
        "client 1",
        "client 2",
        "client 3",
    ]


def test_the_round_is_merged_as_if_the_site_had_not_been_asked(tmp_path):
    method = made("hassle")
    here, grid = federation(tmp_path, method, "hassle", split=FEW, settings=settings_of("hassle"))
    grid.behaviour["client 2", "train"] = raising
    (done,) = federate(method, here, Plan(1, 3, 0), method.initial(0))
    there = Simulator(small.dataset(), FEW, 0, small.ENGINE)
    there.clients = [client for client in there.clients if client.name != "client 2"]
    (other,) = federate(method, there, Plan(1, 3, 0), method.initial(0))
    assert small.same(done.state, other.state)


def test_too_few_answers_stop_the_run_with_what_each_said(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    grid.behaviour["client 1", "train"] = raising
    grid.behaviour["client 3", "train"] = lost
    with pytest.raises(UserError) as error:
        next(federate(method, here, Plan(3, 3, 0), method.initial(0)))
    for part in ("round 1: 1 of at least 2", "client 1: its node is gone", "client 3: it did not answer"):
        assert part in str(error.value)


def test_a_late_site_is_not_asked_again_before_it_has_answered(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    late = []
    grid.behaviour["client 2", "train"] = lambda answer, content: late.append(answer(content))
    rounds = federate(method, here, Plan(4, 3, 0), method.initial(0))
    next(rounds)
    assert [c.name for c in next(rounds).clients] == ["client 1", "client 3"]
    del grid.behaviour["client 2", "train"]
    number = next(f"letter {i}" for i, x in enumerate(grid.letters) if (x.node, x.kind) == (999, "train"))
    grid.answers[number] = late[0]
    third = next(rounds)
    assert [reply.update.client.name for reply in third.replies] == ["client 1", "client 2", "client 3"]
    assert "back" in [event["event"] for event in here.audit.read()]


@pytest.mark.parametrize("back", [True, False])
def test_a_site_that_leaves_in_mid_round_is_not_waited_for_to_the_end(back, tmp_path):
    """One whose line is broken for ten seconds is."""
    agreed = terms(timeout=3000)
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", agreed=agreed, split=FEW, settings=SHORT)
    clock, late = here.sites.clock, {}

    def leave(answer, content):
        grid.gone = {"client 2"}
        late[f"letter {len(grid.letters) - 1}"] = answer(content)

    def pause(seconds):
        clock.pause(seconds)
        if back and clock.now() > 10:
            grid.gone = set()
        if clock.now() > 30:
            grid.answers |= late

    grid.behaviour["client 2", "train"] = leave
    here.sites.clock = clock._replace(pause=pause)
    done = next(federate(method, here, Plan(1, 3, 0), method.initial(0)))
    names = [reply.update.client.name for reply in done.replies]
    assert names == ["client 1", *(["client 2"] if back else []), "client 3"]
    assert clock.now() < 60
    said = [event["why"] for event in here.audit.read() if event["event"] == "failed"]
    assert said == ([] if back else ["its node is gone, or has started anew"])


def test_who_leaves_and_comes_back_is_asked_anew_who_it_is(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    rounds = federate(method, here, Plan(4, 3, 0), method.initial(0))
    next(rounds)
    grid.gone = {"client 1"}
    assert [c.name for c in next(rounds).clients] == ["client 2", "client 3"]
    grid.gone, grid.since["client 1"] = set(), "tomorrow"
    # Its query goes out when the round is drawn, and its answer may come after that.
    clients = [[c.name for c in next(rounds).clients] for _ in range(2)]
    assert clients[-1] == ["client 1", "client 2", "client 3"]
    told = [(e["event"], e["site"]) for e in here.audit.read() if e.get("site") == "client 1"]
    assert told == [("joined", "client 1"), ("left", "client 1"), ("joined", "client 1")]


def test_a_wait_for_sites_has_an_end(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    grid.gone = {"client 1", "client 3"}
    with pytest.raises(UserError, match=r"after 120 s too few sites: 1 of at least 2 are there \(client 2\)"):
        next(federate(method, here, Plan(1, 3, 0), method.initial(0)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"site": "client 1"}, "its key was admitted as 'client 2'"),
        ({"agreed": "0"}, "its federation's file is another one"),
        ({"labelled": -1}, "labelled samples is -1"),
        ({"labelled": True}, "labelled samples is True"),
        ({"unlabelled": 1.5}, "unlabelled samples is 1.5"),
        ({"site": "a\nb"}, "its name is"),
        ({"versions": None}, "with which versions"),
        ({"site": "x" * 1000}, "its name is"),
    ],
)
def test_a_site_that_introduces_itself_oddly_is_not_admitted_and_told_why(words, why, tmp_path, caplog):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    grid.behaviour["client 2", "query"] = changed(lambda made: Content({**made.words, **words}))
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    (refused,) = [event for event in here.audit.read() if event["event"] == "refused"]
    assert refused["site"] == "client 2" and why in refused["why"] and len(refused["why"]) < 300
    assert f"the server refuses this site: {refused['why']}" in [one.getMessage() for one in caplog.records]


def test_a_site_with_other_code_of_a_method_of_ones_own_is_not_admitted(tmp_path, module):
    """Each site holds a file of its own; here they share the one, which changes before one of them starts."""
    from federations import FakeGrid, Flying, Sites, held, site

    agreed = terms(run='method = "own_code:Mine"')
    path = tmp_path / f"{module('own_code', 'from fedhassle.methods import FedAvg as Mine')}.py"
    nodes = {}
    for name, (x, y) in held(small.dataset(), FEW).items():
        before = path.read_text()
        path.write_text(f"# of {name}\n{before}" if name == "client 2" else before)
        nodes[name] = site(tmp_path, name, x, y, agreed).answer
        path.write_text(before)
    sites = Sites(FakeGrid(nodes), agreed, Audit(tmp_path / "audit.jsonl"), Flying().clock)
    assert list(sites.gather(2)) == ["client 1", "client 3"]
    joined, refused = (
        [event for event in sites.audit.read() if event["event"] == kind] for kind in ("joined", "refused")
    )
    assert {event["versions"]["own_code:Mine"] for event in joined} == {own_code("own_code:Mine")}
    assert [event["site"] for event in refused] == ["client 2"]
    assert "its code of 'own_code:Mine' is another one" in refused[0]["why"]


def test_a_node_that_could_not_say_who_it_is_is_asked_again(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    grid.behaviour["client 2", "query"] = raising
    assert [client.name for client in here.present()] == ["client 1", "client 3"]
    del grid.behaviour["client 2", "query"]
    assert [client.name for client in here.present()] == ["client 1", "client 3"]  # not at once
    here.sites.clock.pause(10)
    assert [client.name for client in here.present()] == ["client 1", "client 2", "client 3"]
    assert [e["site"] for e in here.audit.read() if e["event"] == "failed"] == ["client 2"]


def test_of_two_sites_with_one_name_the_second_is_not_admitted(tmp_path):
    method = made("fedavg")
    here, grid = federation(tmp_path, method, "fedavg", split=FEW, settings=SHORT)
    grid.named = False
    grid.behaviour["client 2", "query"] = changed(lambda made: Content({**made.words, "site": "client 1"}))
    assert len(here.present()) == 2
    assert "already" in next(e["why"] for e in here.audit.read() if e["event"] == "refused")


# What sites keep


@pytest.mark.parametrize("name", ["rscfed", "fedmatch"])
def test_a_round_that_was_lost_on_its_way_back_leaves_no_trace_at_the_site(name, tmp_path):
    """The site has trained round 2, and kept something; the server never heard of it: nor does round 3."""
    method, settings = made(name), settings_of(name)
    here, grid = federation(tmp_path / "a", method, name, split=small.SPLIT, settings=settings)

    def trains_in_vain(answer, content):
        answer(content)
        return "lost on the way"

    rounds = federate(method, here, Plan(3, 6, 0), method.initial(0))
    next(rounds)
    grid.behaviour["client 5", "train"] = trains_in_vain
    next(rounds)
    del grid.behaviour["client 5", "train"]
    last = next(rounds)
    other, net = federation(tmp_path / "b", method, name, split=small.SPLIT, settings=settings)
    expected = federate(method, other, Plan(3, 6, 0), method.initial(0))
    next(expected)
    net.behaviour["client 5", "train"] = raising
    next(expected)
    del net.behaviour["client 5", "train"]
    assert small.same(last.state, next(expected).state)


def test_a_site_that_has_lost_what_it_held_begins_anew(tmp_path, caplog):
    import shutil

    method = made("fedmatch")
    here, _ = federation(tmp_path, method, "fedmatch", settings=settings_of("fedmatch"))
    rounds = federate(method, here, Plan(4, 6, 0), method.initial(0))
    next(rounds)
    shutil.rmtree(tmp_path / "client 2")
    done = next(rounds)
    assert "client 2" not in [reply.update.client.name for reply in done.replies]
    assert "what it held after round 1 is gone" in caplog.text
    third = next(rounds)
    assert "client 2" in [reply.update.client.name for reply in third.replies]


def test_only_a_site_that_says_so_has_lost_what_it_held(tmp_path):
    """Whatever it says else in words of its own, it goes on from the last round that counted."""
    method = made("fedmatch")
    here, grid = federation(tmp_path, method, "fedmatch", split=FEW, settings=settings_of("fedmatch"))
    rounds = federate(method, here, Plan(3, 3, 0), method.initial(0))
    next(rounds)
    grid.behaviour["client 2", "train"] = changed(lambda _: Content({"error": "lost: the cupboard's key"}))
    next(rounds)
    del grid.behaviour["client 2", "train"]
    next(rounds)
    sent = [letter for letter in grid.letters if letter.node == grid.ids["client 2"]]
    assert [letter.content.words["since"] for letter in sent if letter.kind == "train"] == [0, 1, 1]


SAID = {
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


@pytest.mark.parametrize("what", SAID)
def test_what_a_site_says_went_wrong_is_told_as_it_says_it(what):
    said, told = SAID[what]
    assert answered(Content({"error": said}), "") == Failure(told)
    assert answered(failure("gone", lost=True), "") == Failure("gone", lost=True)
    assert answered(Content({"error": "gone", "lost": "yes"}), "") == Failure("gone")


@pytest.mark.parametrize("name", ["fedavg", "rscfed", "fedmatch"])
def test_a_run_taken_up_from_a_round_ends_in_the_same_bits(name, tmp_path):
    """Rounds 3 and 4 are done twice: by a server that then ends, and by one that takes up after round 2."""
    from federations import FlowerFederation, Flying, Sites

    method, settings, plan = made(name), settings_of(name), Plan(4, 4, 0)
    first, grid = federation(tmp_path, method, name, settings=settings)
    first.memory.folder = tmp_path / "server"
    states = {0: method.initial(0)}
    for done in federate(method, first, plan, states[0]):
        states[done.t] = done.state
        if done.t == 2:
            first.prune([2])
    agreed = terms()
    sites = Sites(grid, agreed, first.audit, Flying().clock)
    second = FlowerFederation(sites, first.plan, first.memory)
    again = {done.t: done.state for done in federate(method, second, plan, states[2], first=3)}
    assert sorted(again) == [3, 4] and all(small.same(again[t], states[t]) for t in again)


def test_coarse_counts_are_powers_of_two_and_still_train(tmp_path):
    method, agreed = made("fedavg"), terms(coarse=True)
    here, _ = federation(tmp_path, method, "fedavg", agreed=agreed, split=FEW, settings=SHORT)
    clients = here.present()
    assert [(c.labelled, c.unlabelled) for c in clients] == [(16, 0), (8, 16), (8, 8)]  # of 20+0, 6+14, 9+11
    (done,) = federate(method, here, Plan(1, 3, 0), method.initial(0))
    assert [reply.update.samples for reply in done.replies] == [{"w": 16}, {"w": 8}, {"w": 8}]


def test_only_what_a_site_needs_goes_to_it(tmp_path):
    method = made("hassle")
    here, grid = federation(tmp_path, method, "hassle", settings=settings_of("hassle"))
    next(federate(method, here, Plan(1, 6, 0), method.initial(0)))
    by_node = {letter.node: letter.content for letter in grid.letters if letter.kind == "train"}
    for client in here.present():
        expected = {f"whole {name}" for name in method.message(method.initial(0), client, 1)}
        assert by_node[grid.ids[client.name]].arrays.keys() == expected


# What a site refuses


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method": {"name": "os:system"}}, "not in this site's federation file"),
        ({"net": "subprocess:Popen"}, "not in this site's federation file"),
        ({"run": "../../x"}, "odd name"),
        ({"method": {"name": "fedavg", "lr": "fast"}}, "method.lr"),
        ({"round": -1}, "count of round samples"),
    ],
)
def test_a_site_refuses_what_it_has_not_agreed_to(change, why, tmp_path):
    from federations import held, site

    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y)
    words = {"run": "abc", "method": {"name": "fedavg"}, "net": NET, "seed": 0, "round": 1, "since": 0}
    answer = node.answer("train", Content({**words, **change}))
    assert why in answer.words["error"]
    assert "known" in node.answer("gossip", Content({})).words["error"]


def test_what_a_site_reports_is_what_its_images_say(tmp_path):
    """Validation by hand: the hits of the model on the rows that were kept from training."""
    from federations import held, site

    agreed = terms(validation=0.4)
    x, y = held(small.dataset())["client 1"]
    node = site(tmp_path, "client 1", x, y, agreed)
    rows = node.parts.validation
    assert 0 < len(rows) < len(y) and not set(rows) & set(node.parts.labelled)
    method = made("fedavg")
    vector = method.initial(0)["w"]
    plan = {"run": "abc", "method": {"name": "fedavg"}, "net": NET, "seed": 0}
    answer = node.answer("evaluate", Content({**plan, "round": 1}, {"whole w": vector.numpy()}))
    pixels = torch.from_numpy((x[rows] / 255 - 0.5) / 0.25).float().permute(0, 3, 1, 2)
    right = (method.net.logits(vector, pixels).argmax(1).numpy() == y[rows]).sum()
    assert answer.words == {"right": {"model": right}, "count": len(rows)}


def test_a_site_measures_in_float32_whatever_it_trains_in(tmp_path, monkeypatch):
    """As the simulator and the coordinator do, whose figures stand beside its own."""
    from federations import held, site

    x, y = held(small.dataset())["client 1"]
    node, method, seen = site(tmp_path, "client 1", x, y, terms(validation=0.4)), METHODS["fedavg"], []
    node.engine, predict = Engine(small.CPU, "bf16"), method.predict
    monkeypatch.setattr(method, "predict", lambda *words: seen.append(predict(*words)) or seen[-1])
    words = {"run": "abc", "method": {"name": "fedavg"}, "net": NET, "seed": 0, "round": 1}
    vector, net = made("fedavg").initial(0)["w"], made("fedavg").net
    assert "right" in node.answer("evaluate", Content(words, {"whole w": vector.numpy()})).words
    images = torch.from_numpy(x[node.parts.validation])
    assert torch.equal(seen[0]["model"], net.logits(vector, small.simulator().views.normalise(images)))


def test_a_site_keeps_no_more_than_what_a_round_may_go_back_to(tmp_path):
    """One file for each of the server's two checkpoints, and one for the last round."""
    method = made("rscfed")
    here, _ = federation(tmp_path, method, "rscfed", settings=settings_of("rscfed"))
    for done in federate(method, here, Plan(8, 6, 0), method.initial(0)):
        if done.t % 2 == 0:
            here.prune([n for n in (done.t - 2, done.t) if n])
    kept = sorted(path.name for path in (tmp_path / "client 5").rglob("round-*"))
    assert kept == [f"round-{t:06d}.safetensors" for t in (4, 6, 7, 8)]  # of round 8's message: 4, 6 and 7


def test_nobody_claims_to_know_how_many_pseudo_labels_are_right(tmp_path):
    method = made("hassle")
    here, _ = federation(tmp_path, method, "hassle", settings=settings_of("hassle"))
    (done,) = federate(method, here, Plan(1, 6, 0), method.initial(0))
    counts = [reply.update.labelling for reply in done.replies]
    assert counts[1:] == [None] * 5 and counts[0].tolist() == [0, 0]  # the first has none to label
