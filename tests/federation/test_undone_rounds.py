"""Rounds that spoil the model are undone: what counts as spoilt, and how a run goes on."""

import logging

import numpy as np
import pytest
import small
from federations import Flying, deaf, network, terms
from small import metrics_of, same, tensors_of

from fedhassle.data.split.split import Split
from fedhassle.errors import UserError
from fedhassle.federation.messages import Payload
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.bounds import drop
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.runs.folder import Folder

ALL = Split(small.SPLIT.labelled[:4], small.SPLIT.unlabelled[:4])
RUN = """
        rounds = 6
        evaluate_every = 2
        method = {name = "METHOD", batch = 8, epochs = 1}
"""


def line(**shares):
    """The sites of a line of metrics: their accuracy on a thousand images, or on as many as given."""
    pairs = {name: share if isinstance(share, tuple) else (share, 1000) for name, share in shares.items()}
    return {name: {"accuracy": {"model": share}, "count": n} for name, (share, n) in pairs.items()}


DROPS = {
    "none": (line(a=0.8), [line(a=0.8)], -0.03),
    "nobody was there before": (line(a=0.1), [line(b=0.9)], -1.0),
    "the first evaluation": (line(a=0.1), [], -1.0),
    "one site": (line(a=0.1), [line(a=0.8)], 0.68),
    "few images cannot tell": (line(a=(0.25, 4)), [line(a=(1.0, 4))], 0.30),
    "the median of five evaluations": (
        line(a=0.5),
        [line(a=s) for s in (0.99, 0.99, 0.7, 0.9, 0.8, 0.65, 0.85)],
        0.8 - 0.53,
    ),
    "half of the sites": (line(a=0.1, b=0.8), [line(a=0.8, b=0.8)], -0.03),
    "most of the sites": (line(a=0.1, b=0.8, c=0.1), [line(a=0.8, b=0.8, c=0.8)], 0.68),
}


@pytest.mark.parametrize("what", DROPS)
def test_a_drop_is_the_median_over_sites_of_what_each_is_below_its_usual_accuracy(what):
    now, before, expected = DROPS[what]
    assert drop(now, before, "model") == pytest.approx(expected, abs=0.01)


def evaluating(curve):
    """A site whose accuracy on forty images follows a curve, by round."""

    def evaluate(answer, payload):
        return Payload({"right": {"model": round(40 * curve[payload.words["round"]])}, "count": 40})

    return evaluate


def introduced(answer, payload):
    return Payload(answer(payload).words | {"validation": 40})


def sites_with(folder, agreed, curve):
    transport = network(folder, agreed, ALL)
    for name in transport.sites:
        transport.behaviour[name, "query"], transport.behaviour[name, "train"] = introduced, deaf
        transport.behaviour[name, "evaluate"] = evaluating(curve)
    return transport


def carried_out(folder, agreed, transport):
    return list(coordinate(transport, agreed, folder, None, Flying().clock))


@pytest.mark.parametrize("method", ["fedavg", "rscfed", "fedmatch"])
def test_undone_rounds_leave_no_trace_but_in_the_logs(method, tmp_path, caplog):
    """Rounds 3 and 4 are undone: round 5 goes on from round 2, at the server and at the sites."""
    agreed = terms(validation=0.3, run=RUN.replace("METHOD", method))
    transport = sites_with(tmp_path / "a", agreed, {2: 0.8, 4: 0.1, 6: 0.7})
    states, folder = {}, Folder(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "fedhassle"):
        for step in coordinate(transport, agreed, folder.path, None, Flying().clock):
            states[step.t] = tensors_of(small.checkpoints(folder.path)[-1])
    assert same(states[2], states[4]) and not same(states[4], states[6])
    assert "round 4 is undone: model is 10.0 %" in caplog.text and "the model of round 2 stays" in caplog.text
    lines = metrics_of(folder.path)
    assert [line["accuracy"]["model"] for line in lines] == [0.8, 0.8, 0.7]
    assert [line.get("undone") for line in lines] == [None, {"model": 0.1}, None]
    assert lines[1]["sites"] == lines[0]["sites"]
    audit = Audit(folder.audit)
    (event,) = [event for event in audit.read() if event["event"] == "undone"]
    assert (event["round"], event["to"], event["accuracy"]) == (4, 2, {"model": 0.1})
    assert sorted(audit.contributors()) == [1, 2, 5, 6] and audit.taken_in(4) == audit.taken_in(3) == 2
    since = [r.payload.words["since"] for r in transport.requests if r.kind == "train"]
    assert since[-8:-4] == [2] * 4 and since[-4:] == [5] * 4  # rounds 5 and 6 at four sites


@pytest.mark.parametrize("rounds", [3, 4, 5])
@pytest.mark.parametrize("method", ["rscfed", "fedmatch"])
def test_a_run_that_is_cut_near_undone_rounds_ends_in_the_same_bits(method, rounds, tmp_path):
    agreed, curve = terms(validation=0.3, run=RUN.replace("METHOD", method)), {2: 0.8, 4: 0.1, 6: 0.7}
    carried_out(tmp_path / "whole", agreed, sites_with(tmp_path / "a", agreed, curve))
    steps = coordinate(
        sites_with(tmp_path / "b", agreed, curve), agreed, tmp_path / "run", None, Flying().clock
    )
    for _ in range(rounds):
        next(steps)
    steps.close()
    carried_out(tmp_path / "run", agreed, sites_with(tmp_path / "b", agreed, curve))
    for name in ("model.safetensors", "best.safetensors"):
        assert same(tensors_of(tmp_path / "run" / name), tensors_of(tmp_path / "whole" / name))
    mine, other = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "whole")
    assert small.but_seconds(mine) == small.but_seconds(other)


def test_a_run_that_is_spoilt_again_and_again_stops(tmp_path):
    every = RUN.replace("METHOD", "fedavg").replace("evaluate_every = 2", "evaluate_every = 1")
    agreed, curve = terms(validation=0.3, run=every), {1: 0.8, 2: 0.1, 3: 0.7, 4: 0.1, 5: 0.1, 6: 0.1}
    with pytest.raises(UserError, match=r"round 6: the model was spoilt 3 times in a row .*worst_drop=0\.3"):
        carried_out(tmp_path / "run", agreed, sites_with(tmp_path / "sites", agreed, curve))
    undone = [e["round"] for e in Audit(tmp_path / "run" / "audit.jsonl").read() if e["event"] == "undone"]
    assert undone == [2, 4, 5, 6]


def test_a_noisy_but_honest_curve_is_not_undone(tmp_path):
    """Swings of 15 points from one evaluation to the next, and a slow fall."""
    every = RUN.replace("METHOD", "fedavg").replace("evaluate_every = 2", "evaluate_every = 1")
    agreed, rng = (
        terms(validation=0.3, run=every.replace("rounds = 6", "rounds = 12")),
        np.random.default_rng(0),
    )
    curve = {t: 0.75 + (0.15 if t % 2 else -0.15) * rng.random() - 0.02 * t for t in range(1, 13)}
    carried_out(tmp_path / "run", agreed, sites_with(tmp_path / "sites", agreed, curve))
    assert not any("undone" in line for line in metrics_of(tmp_path / "run"))
