"""Rounds under masks in one process: plain results, sites that drop out, and models that are hidden."""

import json
import math
import re

import federations
import pytest
import small
import torch

from fedhassle.engine.privacy.account import spent
from fedhassle.engine.privacy.by_site import SitePrivacy
from fedhassle.engine.rounds import Averages, Plan, federate
from fedhassle.errors import UserError
from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.build import require_buildable
from fedhassle.federation.masks import contribution
from fedhassle.federation.masks.contribution import LIMIT, MaskTerms, deviation
from fedhassle.federation.masks.protocol import Member
from fedhassle.federation.masks.ring import step_of
from fedhassle.federation.report import read_report, report_page
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.robust import differences, joint_norm
from fedhassle.vectors import all_finite

METHODS = ("fedavg", "fedprox", "mixmatch", "fixmatch", "fixmatch-global", "sage", "hassle", "hassle+")
MASKS = "privacy.masks = true\n"


def rounds(folder, name, run="", clients=9, privacy=None, behaviour=None, count=1, fewest=2, **more):
    """The rounds of a federation of small sites; also its transport."""
    agreed = federations.terms(run=f"method.name = '{name}'\n" + run, minimum_sites=fewest)
    method, federation, transport = federations.federation(folder, name, agreed, **more)
    transport.behaviour = behaviour or {}
    plan = Plan(count, clients, 0, privacy)
    return list(federate(method, federation, plan, method.initial(0))), transport


@pytest.mark.parametrize("name", METHODS)
def test_masked_rounds_are_plain_rounds_to_the_bound_of_the_quantisation(name, tmp_path):
    """Each of n sites rounds its entries by at most half a step, and shares of a model add up to 1."""
    (plain,), _ = rounds(tmp_path / "plain", name)
    (masked,), transport = rounds(tmp_path / "masked", name, MASKS)
    sites = len(masked.replies)
    bound = sites / 2 * step_of(LIMIT, sites) + 1e-6  # and what float32 rounds in a plain mean
    assert plain.state.keys() == masked.state.keys()
    assert [c.name for c in plain.clients] == [c.name for c in masked.clients]
    for key, vector in plain.state.items():
        assert (vector - masked.state[key]).abs().max() <= bound, key
    moved = differences(masked.state, {k: plain.state[k] * 0 for k in plain.state})
    assert joint_norm(moved) > 0
    assert all(key.startswith("masked ") for answer in sent_up(transport) for key in answer)


def sent_up(transport):
    """The arrays that the sites sent in training, by answer."""
    return [arrays for arrays in transport.arrays_up if arrays]


def killed(step):
    """A site that is gone from a step on."""

    def act(answer, payload):
        order = ("keys", "shares", "vectors", "reveal")
        return "killed" if order.index(payload.words["step"]) >= order.index(step) else answer(payload)

    return act


@pytest.mark.parametrize("step", ["keys", "shares", "vectors", "reveal"])
def test_a_site_may_drop_out_at_each_step(step, tmp_path):
    """The mean is that of the others; in the last step its vector is there already, so it counts."""
    lost = {("client 2", "train"): killed(step)}
    (masked,), _ = rounds(tmp_path / "masked", "hassle", MASKS, behaviour=lost)
    plain_lost = {} if step == "reveal" else {("client 2", "train"): lambda answer, payload: "killed"}
    (plain,), _ = rounds(tmp_path / "plain", "hassle", behaviour=plain_lost)
    for key, vector in plain.state.items():
        assert (vector - masked.state[key]).abs().max() <= 1e-5, key
    names = [reply.update.client.name for reply in masked.replies]
    assert ("client 2" in names) == (step == "reveal") and len(names) == 5 + (step == "reveal")
    audit = [json.loads(line) for line in (tmp_path / "masked" / "audit.jsonl").read_text().splitlines()]
    assert [event["site"] for event in audit if event["event"] == "failed"] == ["client 2"]


def test_a_model_that_one_site_alone_sent_is_not_merged(tmp_path, caplog):
    """Of three sites, one full and two partial, the last drops out: the other partial one keeps its w_U."""
    lost = {("client 3", "train"): killed("vectors")}
    (done,), _ = rounds(tmp_path, "hassle", MASKS, behaviour=lost, split=federations.FEW)
    start = federations.method_named("hassle").initial(0)
    assert not torch.equal(done.state["w_S"], start["w_S"])
    assert torch.equal(done.state["w_U"], start["w_U"])
    assert "r_SU, w_U stays under masks and is not merged" in caplog.text


def test_too_few_survivors_stop_the_run_with_a_reason(tmp_path):
    lost = {(f"client {k}", "train"): killed("vectors") for k in (2, 3)}
    with pytest.raises(UserError, match=r"1 sites are left in this round, and 2 are needed"):
        rounds(tmp_path, "fedavg", MASKS, behaviour=lost, split=federations.FEW, fewest=1)


def test_a_sum_of_fewer_sites_than_the_rules_demand_stays_under_masks(tmp_path):
    """With the third one's later, it would show what that sent."""
    agreed = federations.terms(run="method.name = 'fedavg'\n" + MASKS, minimum_sites=3)
    method, federation, transport = federations.federation(tmp_path, "fedavg", agreed, federations.FEW)
    transport.behaviour = {("client 3", "train"): killed("vectors")}
    with pytest.raises(UserError, match=r"2 of at least 3 sites answered correctly \(client 3: killed\)"):
        next(federate(method, federation, Plan(1, 3), method.initial(0)))
    assert {request.payload.words.get("step") for request in transport.requests} == {
        *(None, "keys", "shares", "vectors")
    }
    assert Audit(tmp_path / "audit.jsonl").rounds_trained() == 0


def test_two_sites_are_too_few_for_masks(tmp_path):
    with pytest.raises(UserError, match="at least 3 sites in a round, and there are 2"):
        rounds(tmp_path, "fedavg", MASKS, clients=2)


# Bounds


def test_updates_are_clipped_at_the_site_and_the_sum_is_checked(tmp_path):
    """With a bound of 0.01 the mean moves by at most that, and equals the mean of clipped plain updates."""
    run = "privacy.clip = 0.01\n"
    (plain,), _ = rounds(tmp_path / "plain", "fedavg", run, privacy=SitePrivacy(0.01))
    (masked,), _ = rounds(tmp_path / "masked", "fedavg", run + MASKS)
    assert (plain.state["w"] - masked.state["w"]).abs().max() < 1e-7
    start = federations.method_named("fedavg").initial(0)
    assert 0 < joint_norm(differences(masked.state, start)) <= 0.01


def test_updates_that_were_not_clipped_are_noticed_in_the_sum(tmp_path, monkeypatch):
    """Sites that send five times the bound, all in the same direction."""

    def too_long(arrays, bound):
        return {name: torch.full_like(v, 5 * bound / math.sqrt(len(v))) for name, v in arrays.items()}

    monkeypatch.setattr(contribution, "clipped_jointly", too_long)
    with pytest.raises(UserError, match="a site has not clipped its update, and masks hide which one"):
        rounds(tmp_path, "fedavg", "privacy.clip = 0.001\n" + MASKS)


# Models and counts that are hidden


@pytest.mark.parametrize("name", ["fedavg", "hassle"])
def test_hidden_sites_look_alike_and_count_alike(name, tmp_path):
    """Every site sends all models in one form; the mean is over those that trained one, each alike."""
    (done,), transport = rounds(tmp_path, name, MASKS + "privacy.hide = true\n")
    shapes = {tuple((key, v.shape) for key, v in sorted(a.items())) for a in sent_up(transport)}
    assert len(shapes) == 1 and len(sent_up(transport)) == 6
    told = [r.payload.words["counts"] for r in transport.requests if "counts" in r.payload.words]
    assert all(counts == {"labelled": 1, "unlabelled": 1, "validation": 0} for counts in told)
    start = federations.method_named(name).initial(0)
    expected = equal_mean(tmp_path, name, start)
    for key, vector in expected.items():
        assert (vector - done.state[key]).abs().max() <= 1e-5, key


def equal_mean(folder, name, start):
    """The mean of each model over the sites that train it, each alike, from plain updates."""
    method, plain, _ = federations.federation(folder / "plain", name)
    messages = [(c, method.message(start, c, 1)) for c in plain.present() if method.phases(c, 1)]
    updates = [reply.update for reply in plain.train(method, messages, 1)]
    names = {key for update in updates for key in update.arrays}
    return {k: torch.stack([u.arrays[k] for u in updates if k in u.arrays]).mean(0) for k in names}


# Noise


def test_the_sites_noise_adds_up_to_what_the_account_assumes(tmp_path):
    """Of 6 sites at least 4 survive, so each adds z·C/6/√4 to its sixth; with all 6, the sum has √6 of that.

    fedavg: 4 sites have labels, so the mean is the sum of sixths times 6/4. The updates themselves are of
    norm 1e-6, and the network has some 100 weights a layer, whose noise is measured.
    """
    run = "privacy.noise = 3.0\nprivacy.clip = 1e-6\n" + MASKS
    (done,), _ = rounds(tmp_path, "fedavg", run, privacy=SitePrivacy(1e-6, 3.0))
    net = small.net()
    start = federations.method_named("fedavg").initial(0)["w"]
    noise = (done.state["w"] - start).double()[: net.n_weights]
    noise = noise[noise != 0].numpy()  # without padding
    expected = 3e-6 / 6 / 2 * math.sqrt(6) * 6 / 4
    assert noise.std() == pytest.approx(expected, rel=6 / math.sqrt(2 * len(noise)))


@pytest.mark.parametrize(("sites", "entries", "noise"), [(5, 100, 1.5), (1000, 10**7, 1.0), (10, 10**7, 100)])
def test_each_sites_share_of_the_noise_is_enough_with_the_fewest_survivors(sites, entries, noise):
    """Noise of z times the longest part that a site can send: C/n, and half a step of rounding in each entry.

    A step is the largest sum, C·(1 + 17·z/n), over 2³¹.
    """
    members = {str(k): Member(b"", b"", {}) for k in range(sites)}
    one = deviation(members, entries, MaskTerms(2.0, noise))
    longest = 2.0 / sites + 2.0 * (1 + 17 * noise / sites) / 2**31 / 2 * math.sqrt(entries)
    least = sites // 2 + 1  # that survive
    assert math.sqrt(least) * one == pytest.approx(noise * longest, rel=1e-6)
    assert math.sqrt(least) * one >= noise * longest


# What is refused


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("method.name = 'rscfed'\n", "by a weighted mean, and rscfed does not"),
        ("method.name = 'fedmatch'\n", "by a weighted mean, and fedmatch does not"),
        ("method.name = 'local'\n", "by a weighted mean, and local does not"),
        ("method = {name = 'fedavg', merging = 'median'}\n", "leave one of both out"),
        ("method.name = 'fedavg'\nprivacy.epsilon = 8\n", r"add privacy\.noise=\S+ to federation\.toml"),
    ],
)
def test_what_masks_cannot_do_is_refused(run, says):
    with pytest.raises(UserError, match=says):
        require_buildable(federations.terms(run=run + MASKS))


def test_hiding_needs_masks_and_no_validation_images():
    with pytest.raises(UserError, match=r"privacy\.hide needs privacy\.masks=true"):
        require_buildable(federations.terms(run="privacy.hide = true\n"))
    with pytest.raises(UserError, match="needs validation = 0"):
        require_buildable(federations.terms(0.1, run="privacy.hide = true\n" + MASKS))


def test_a_site_that_agreed_on_masks_sends_nothing_without_them(tmp_path):
    agreed = federations.terms(run="method.name = 'fedavg'\n" + MASKS)
    method, federation, _ = federations.federation(tmp_path, "fedavg", agreed)
    federation.terms = None  # the server tries
    with pytest.raises(UserError, match="it sends no update without masks"):
        next(federate(method, federation, Plan(1, 9), method.initial(0)))
    method, federation, _ = federations.federation(tmp_path / "other", "fedavg")
    federation.terms = MaskTerms()
    with pytest.raises(UserError, match=r"asks for masks, which this site's federation\.toml does not name"):
        next(federate(method, federation, Plan(1, 9), method.initial(0)))


def test_a_restarted_site_joins_the_next_round(tmp_path):
    """Its secrets were in memory: from the third step on it is as if it had dropped out."""
    agreed = federations.agreed_on("fedavg", federations.terms(run=MASKS))
    method, federation, transport = federations.federation(tmp_path, "fedavg", agreed)
    held = federations.held(small.dataset())["client 2"]

    def restarted(answer, payload):
        if payload.words["step"] == "vectors" and payload.words["round"] == 1:
            transport.sites["client 2"] = federations.site(
                tmp_path / "again", "client 2", *held, agreed
            ).answer
        return transport.sites["client 2"]("train", payload)

    transport.behaviour = {("client 2", "train"): restarted}
    first, second = federate(method, federation, Plan(2, 9), method.initial(0))
    assert "client 2" not in [reply.update.client.name for reply in first.replies]
    assert "client 2" in [reply.update.client.name for reply in second.replies]


def test_the_result_is_an_average_without_any_single_update(tmp_path):
    agreed = federations.terms(run="method.name = 'fedavg'\n" + MASKS)
    method, federation, _ = federations.federation(tmp_path, "fedavg", agreed)
    state = method.initial(0)
    messages = [(c, method.message(state, c, 1)) for c in federation.present() if method.phases(c, 1)]
    found = federation.train(method, messages, 1)
    assert isinstance(found, Averages) and len(found.means) == 1
    assert all(not reply.update.arrays and not reply.update.losses for reply in found.replies)
    assert all_finite([list(found.means[0].arrays.values())]) == [True]


# Commands and whole runs


def test_init_checks_what_the_agreement_says_about_privacy(tmp_path):
    """Sites that hide who has labels keep no validation images; noise under masks must be written down."""
    command = (
        "federation",
        "init",
        "--address",
        "127.0.0.1:9",
        "--like",
        "fmnist-mini",
        "privacy.masks=true",
    )
    code, _, err = small.call(*command, "--out", tmp_path / "a", "privacy.epsilon=8", "rounds=20")
    assert code == 2 and not (tmp_path / "a").exists()
    added = re.search(r"add (privacy\.noise=\S+) to this command", " ".join(err.split()))[1]
    assert small.call(*command, "--out", tmp_path / "a", "privacy.epsilon=8", "rounds=20", added)[0] == 0
    assert small.call(*command, "--out", tmp_path / "b", "privacy.hide=true")[0] == 0
    agreed = read_agreement(tmp_path / "b")
    assert agreed.data.validation == 0.0 and agreed.run["privacy"] == {"masks": True, "hide": True}


def test_rounds_that_a_crash_undid_count_in_the_account(tmp_path):
    """The run is cut after two rounds, before its first checkpoint, and trains three: five in all."""
    run = "rounds = 3\nevaluate_every = 3\nprivacy.noise = 4.0\nprivacy.clip = 0.1\n"
    agreed = federations.agreed_on("fedavg", federations.terms(0.2, run))
    transport = federations.network(tmp_path / "sites", agreed, small.SPLIT)
    steps = coordinate(transport, agreed, tmp_path / "run", clock=federations.Flying().clock)
    assert [next(steps).t for _ in range(2)] == [1, 2]
    steps.close()
    assert [step.t for step in coordinate(transport, agreed, tmp_path / "run")] == [1, 2, 3]
    told = small.summary_of(tmp_path / "run")["privacy"]
    assert told["epsilon"] == spent(4.0, 1.0, 5, 1e-5) and told["rate"] == 1.0
    assert [line["delta"] for line in small.metrics_of(tmp_path / "run")] == [1e-5]


def test_a_run_with_a_budget_goes_on_after_a_crash_with_the_rounds_that_are_left(tmp_path):
    """Noise for four rounds; a crash undid one of three, so one is left. The sites go by the first plan."""
    run = "rounds = 4\nevaluate_every = 1\nprivacy.epsilon = 50.0\nmethod.schedule = 'cosine'\n"
    agreed = federations.agreed_on("fedavg", federations.terms(0.2, run), schedule="cosine")
    transport = federations.network(tmp_path / "sites", agreed, small.SPLIT)
    steps = coordinate(transport, agreed, tmp_path / "run", clock=federations.Flying().clock)
    assert [next(steps).t for _ in range(2)] == [1, 2]
    steps.close()
    Audit(tmp_path / "run" / "audit.jsonl").write("round", round=3, contributed=[], failed=[], changes={})
    assert [step.t for step in coordinate(transport, agreed, tmp_path / "run")] == [3]
    assert small.summary_of(tmp_path / "run")["rounds"] == 3


def test_a_round_that_stopped_after_the_masks_were_removed_counts(tmp_path):
    """Its sum is known, though no model was made of it."""
    audit = Audit(tmp_path / "audit.jsonl")
    for event in ("unmasking", "round", "unmasking", "stopped", "unmasking", "round"):
        audit.write(event, round=1)
    assert audit.rounds_trained() == 3


def test_with_noise_what_sites_find_of_a_model_decides_nothing(tmp_path):
    """Neither which rounds are undone nor which model is kept: no noise is on their figures."""
    run = "rounds = 2\nevaluate_every = 1\nprivacy.noise = 4.0\n"
    agreed = federations.agreed_on("fedavg", federations.terms(0.2, run, worst_drop=0.01))
    transport = federations.network(tmp_path / "sites", agreed, small.SPLIT)
    _, federation, _ = federations.federation(tmp_path / "other", "fedavg", agreed)
    rules = federation.rules
    assert (rules.worst_drop, rules.clip_above, rules.refuse_above) == (1.0, 0, 0)
    list(coordinate(transport, agreed, tmp_path / "run", clock=federations.Flying().clock))
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "best.safetensors").exists()
    page = report_page(read_report(tmp_path / "run"))
    assert f"ε = {spent(4.0, 1.0, 2, 1e-5):.2f} at δ = 1e-05; the figures" in page
