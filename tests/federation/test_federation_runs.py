"""A federation's run on disk: its folder, its best round, its end, and its resumption."""

import errno
import itertools
import json
import os

import numpy as np
import pytest
import small
from federations import Flying, deaf, network, terms
from small import metrics_of, same, summary_of, tensors_of

import fedhassle
from fedhassle.data.split.split import Split
from fedhassle.engine.evaluate import Scores
from fedhassle.errors import UserError
from fedhassle.federation.messages import Payload
from fedhassle.federation.server import coordinate as coordination
from fedhassle.federation.server import evaluator
from fedhassle.federation.server.audit import DISK_FULL, Audit
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.federation.server.follow import ReadPosition, followed, read_position
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import read_summary

RUN = """
        rounds = 4
        evaluate_every = 2
        method = {name = "rscfed", batch = 8, epochs = 1, partial = "mixed"}
"""
ALL = Split(small.SPLIT.labelled[:4], small.SPLIT.unlabelled[:4])


def carried_out(folder, agreed, transport, test=None):
    return list(coordinate(transport, agreed, folder, test, Flying().clock))


def events_of(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.fixture
def agreed():
    return terms(validation=0.3, run=RUN)


def test_a_run_leaves_the_folder_of_a_simulated_one_and_an_audit_log(agreed, tmp_path):
    steps = carried_out(tmp_path / "run", agreed, network(tmp_path / "sites", agreed))
    assert [step.t for step in steps] == [1, 2, 3, 4]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        *("config.toml", "metrics.jsonl", "summary.json", "model.safetensors", "best.safetensors"),
        *("curves.png", "log.txt", "audit.jsonl", "checkpoints", "model.md"),
    }
    for line in metrics_of(tmp_path / "run"):
        sites = line["sites"].values()
        total = sum(s["count"] for s in sites)
        together = sum(s["accuracy"]["model"] * s["count"] for s in sites) / total
        assert line["accuracy"]["model"] == pytest.approx(together) and len(line["sites"]) == 3
        assert "class_accuracy" not in line and line["pseudo_label_accuracy"] is None
        assert line["pseudo_label_share"] == 1  # a teacher guesses each label
    told = [event["event"] for event in events_of(tmp_path / "run")]
    assert told == [
        *("created", "joined", "joined", "joined", "begun"),
        *("round", "done", "round", "evaluated", "done"),
        *("round", "done", "round", "evaluated", "done", "finished"),
    ]
    summary = summary_of(tmp_path / "run")
    assert summary["data"] == "small" and summary["rounds"] == 4
    assert set(summary["sites"]) == {"client 1", "client 2", "client 3"}
    assert summary["settings"]["method"]["partial"] == "mixed"
    assert summary["split_hash"] is None and read_summary(tmp_path / "run") == summary
    loaded = fedhassle.load(tmp_path / "run" / "model.safetensors", allow_import=True)
    counts = loaded.about["sites"]
    assert (counts["full"], counts["partial"], counts["unlabelled"]) == (1, 2, 0)
    assert loaded.predict(small.dataset().x_test[:3]).classes.shape == (3,)


def test_a_run_in_another_process_is_followed_by_its_folder(agreed, tmp_path):
    """A follower sees the same steps as the run; one that starts later sees the new ones."""
    transport, folder = network(tmp_path / "sites", agreed), Folder(tmp_path / "run")
    first = coordinate(transport, agreed, folder.path, None, Flying().clock)
    expected = [next(first), next(first)]
    first.close()
    seen = read_position(folder)
    second = coordinate(transport, agreed, folder.path, None, Flying().clock)

    def meanwhile(seconds):
        expected.extend([step] if (step := next(second, None)) else [])

    watched = list(followed(folder, ReadPosition(), lambda: True, pause=meanwhile))
    assert watched == expected and [step.t for step in watched] == [1, 2, 3, 4]
    assert [step.t for step in followed(folder, seen, lambda: True)] == [3, 4]


def test_sites_are_counted_by_what_they_contribute(agreed, tmp_path):
    """Client 2 fails in every round, client 4 in one: neither counts where it sent nothing."""
    transport, folder = network(tmp_path / "sites", agreed, ALL), Folder(tmp_path / "run")
    transport.behaviour["client 2", "train"] = lambda answer, payload: "the disk is full"
    transport.behaviour["client 4", "train"] = lambda answer, payload: (
        "the disk is full" if payload.words["round"] == 3 else answer(payload)
    )
    steps = carried_out(folder.path, agreed, transport)
    three, two = ["client 1", "client 3", "client 4"], ["client 1", "client 3"]
    assert [[client.name for client in step.clients] for step in steps] == [three, three, two, three]
    assert list(followed(folder, ReadPosition(), lambda: True)) == steps
    lines = [line["clients"] for line in metrics_of(folder.path)]
    assert lines == [{"full": 2, "partial": n, "unlabelled": 0} for n in (4, 3)]
    summary = summary_of(folder.path)
    assert {name: site["rounds"] for name, site in summary["sites"].items()} == {
        **{"client 1": 4, "client 2": 0, "client 3": 4, "client 4": 3}
    }
    card = folder.card.read_text("utf-8")
    assert "| rounds | 4, 2 to 3 sites in each (mean 2.8) |" in card
    assert "| sites | 3 (1 full, 2 partial, 0 unlabelled);" in card and "contribution: client 2 |" in card
    for file in (folder.model, folder.best):
        counts = fedhassle.load(file, allow_import=True).about["sites"]
        assert (counts["full"], counts["partial"], counts["unlabelled"]) == (1, 2, 0)


def test_a_half_written_line_of_metrics_does_not_disturb_a_follower(agreed, tmp_path):
    folder = Folder(tmp_path / "run")
    steps = carried_out(folder.path, agreed, network(tmp_path / "sites", agreed))
    with folder.metrics.open("a") as file:
        file.write('{"round": 6, "accu')
    assert list(followed(folder, ReadPosition(), lambda: True)) == steps


def test_a_run_that_stops_or_vanishes_is_no_longer_followed(agreed, tmp_path):
    transport, folder = network(tmp_path / "sites", agreed), Folder(tmp_path / "run")
    steps = coordinate(transport, agreed, folder.path, None, Flying().clock)
    next(steps)
    steps.close()
    with pytest.raises(UserError, match="ended unexpectedly"):
        list(followed(folder, ReadPosition(), lambda: False, pause=lambda seconds: None))
    transport.gone = set(transport.sites)
    seen = read_position(folder)
    with pytest.raises(UserError):
        carried_out(folder.path, agreed, transport)
    with pytest.raises(UserError, match="the run has stopped: too few sites"):
        list(followed(folder, seen, lambda: True))


def test_the_model_of_the_best_round_is_kept(agreed, tmp_path):
    transport = network(tmp_path / "sites", agreed)
    for name in transport.sites:  # of 4 evaluations the second finds the most
        scores = iter([1, 3, 2, 3])
        transport.behaviour[name, "query"], transport.behaviour[name, "train"] = with_ten_images, deaf
        transport.behaviour[name, "evaluate"] = lambda answer, payload, scores=scores: hits(next(scores))
    every = terms(validation=0.3, run=RUN.replace("evaluate_every = 2", "evaluate_every = 1"))
    states = {}
    for step in coordinate(transport, every, tmp_path / "run", None, Flying().clock):
        states[step.t] = tensors_of(small.checkpoints(tmp_path / "run")[-1])
    best = fedhassle.load(tmp_path / "run" / "best.safetensors", allow_import=True)
    assert best.about["round"] == 2 and best.about["validation"] == {"model": 0.3}
    assert same(tensors_of(tmp_path / "run" / "best.safetensors"), states[2])
    assert same(tensors_of(tmp_path / "run" / "model.safetensors"), states[4])
    best_goes_home(tmp_path / "run")


def test_a_round_is_not_the_best_because_a_difficult_site_is_missing(tmp_path):
    """Two sites always find 9 of 10 right; client 3 finds 1, nothing, 0 and 2, so round 4 beats round 1.

    Over the sites that answer, round 2 has 18/20 after 19/30. The run is resumed after it.
    """
    agreed = terms(validation=0.3, run=RUN.replace("evaluate_every = 2", "evaluate_every = 1"))
    transport, kept = network(tmp_path / "sites", agreed), []
    answers = dict.fromkeys(transport.sites, [hits(9)] * 4)
    answers["client 3"] = [hits(1), "busy", hits(0), hits(2)]
    for name in transport.sites:
        transport.behaviour[name, "query"], transport.behaviour[name, "train"] = with_ten_images, deaf
        transport.behaviour[name, "evaluate"] = lambda answer, payload, name=name: answers[name][
            payload.words["round"] - 1
        ]
    for rounds in (2, 2):
        steps = coordinate(transport, agreed, tmp_path / "run", None, Flying().clock)
        for step in itertools.islice(steps, rounds):
            best = fedhassle.load(tmp_path / "run" / "best.safetensors", allow_import=True)
            kept.append((step.t, best.about["round"]))
        steps.close()
    assert kept == [(1, 1), (2, 1), (3, 1), (4, 4)]


def best_goes_home(folder):
    """The folder of a run stands for its best model, unless the last one is chosen; everything says so."""
    assert summary_of(folder)["best"] == {"round": 2, "accuracy": {"model": 0.3}}
    card = (folder / "model.md").read_text("utf-8")
    assert "**Use `best.safetensors`**, the model of round 2," in card and "model 30.00 %" in card
    assert "fedhassle predict best.safetensors IMAGES" in card
    x, said = small.dataset().x_test[:6], {}
    np.save(folder / "x.npy", x)
    files = {"best": "best.safetensors", "last": "model.safetensors"}
    for which, name in files.items():
        expected = fedhassle.load(folder / name, allow_import=True).predict(x).probabilities
        chosen = fedhassle.load(folder, allow_import=True, which=which).predict(x).probabilities
        assert (chosen == expected).all()
        options = ["--which", which, "--allow-import", "--probabilities"]
        _, out, said[which] = small.call("predict", folder, folder / "x.npy", *options)
        rows = [[float(p) for p in line.split(",")[3:]] for line in out.splitlines()[1:]]
        np.testing.assert_allclose(rows, expected, atol=1e-6)
    by_default = small.call("predict", folder, folder / "x.npy", "--allow-import")[2]
    assert by_default == said["best"] != said["last"]
    assert "best.safetensors: round 2, the best on the sites' validation images (model 30.0 %" in " ".join(
        said["best"].split()
    )
    assert "model.safetensors: the last round" in " ".join(said["last"].split())
    for wrong, path, why in (
        ("first", folder, "best or last round, got 'first'"),
        ("last", folder / "best.safetensors", "is a model already"),
    ):
        with pytest.raises(UserError, match=why):
            fedhassle.load(path, allow_import=True, which=wrong)


def test_the_coordinators_test_images_never_choose_the_best_round(tmp_path, monkeypatch):
    """Validation finds 0.6, nothing, 0.7 and 0.8; the test images, at 0.95, stand in for the missing one."""
    agreed = terms(validation=0.3, run=RUN.replace("evaluate_every = 2", "evaluate_every = 1"))
    transport, data = network(tmp_path / "sites", agreed), small.dataset()
    monkeypatch.setattr(
        evaluator, "score", lambda *words: Scores({"model": 0.95}, {"model": 0.2}, [0.95] * 4)
    )
    for name in transport.sites:
        answers = iter([hits(6), "busy", hits(7), hits(8)])
        transport.behaviour[name, "query"], transport.behaviour[name, "train"] = with_ten_images, deaf
        transport.behaviour[name, "evaluate"] = lambda answer, payload, answers=answers: next(answers)
    kept, test = [], (data.x_test, np.asarray(data.y_test, np.int64))
    for _ in coordinate(transport, agreed, tmp_path / "run", test, Flying().clock):
        best = fedhassle.load(tmp_path / "run" / "best.safetensors", allow_import=True)
        kept.append((best.about["round"], best.about["validation"]["model"]))
    assert kept == [(1, 0.6), (1, 0.6), (3, 0.7), (4, 0.8)]
    assert [line["accuracy"]["model"] for line in metrics_of(tmp_path / "run")] == [0.6, 0.95, 0.7, 0.8]


def with_ten_images(answer, payload):
    """Introduces a site with ten validation images."""
    return Payload(answer(payload).words | {"validation": 10})


def hits(right):
    return Payload({"right": {"model": right}, "count": 10})


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_interrupted_run_is_resumed_and_ends_in_the_same_bits(rounds, agreed, tmp_path):
    carried_out(tmp_path / "whole", agreed, network(tmp_path / "a", agreed, ALL))
    transport = network(tmp_path / "b", agreed, ALL)
    steps = coordinate(transport, agreed, tmp_path / "run", None, Flying().clock)
    for _ in range(rounds):
        next(steps)
    steps.close()
    # The sites are restarted: their memory is on their disks.
    carried_out(tmp_path / "run", agreed, network(tmp_path / "b", agreed, ALL))
    for name in ("model.safetensors", "best.safetensors"):
        assert same(tensors_of(tmp_path / "run" / name), tensors_of(tmp_path / "whole" / name))
    mine, other = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "whole")
    assert small.but_seconds(mine) == small.but_seconds(other)
    runs = {event["run"] for event in events_of(tmp_path / "run") if event["event"] == "created"}
    assert len(runs) == 1
    if rounds >= 2:
        assert [e["round"] for e in events_of(tmp_path / "run") if e["event"] == "resumed"] == [2]


def test_a_run_that_stops_says_why_in_its_audit_log_and_can_be_resumed(agreed, tmp_path):
    transport = network(tmp_path / "sites", agreed)
    for name in ("client 2", "client 3"):
        transport.behaviour[name, "train"] = lambda answer, payload: "the disk is full"
    with pytest.raises(UserError, match="client 2: the disk is full; client 3: the disk is full"):
        carried_out(tmp_path / "run", agreed, transport)
    last = events_of(tmp_path / "run")[-1]
    assert last["event"] == "stopped" and "the disk is full" in last["why"]
    transport.behaviour.clear()
    assert len(carried_out(tmp_path / "run", agreed, transport)) == 4
    with pytest.raises(UserError, match="holds a finished run"):
        carried_out(tmp_path / "run", agreed, transport)


def test_a_killed_server_and_a_stopped_run_have_different_reasons(agreed, tmp_path, monkeypatch):
    """Flower ends the program in the same way in both cases."""
    transport = network(tmp_path / "sites", agreed)
    parents = {"asked": [7, 7], "killed": [7, 1]}  # before and after: an orphan gets another parent
    for name, (before, after) in parents.items():
        now = [before]
        monkeypatch.setattr(os, "getppid", lambda now=now: now[0])

        def stopped(answer, payload, now=now, after=after):
            now[0] = after
            raise SystemExit

        transport.behaviour["client 2", "train"] = stopped
        with pytest.raises(SystemExit):
            carried_out(tmp_path / name, agreed, transport)
    why = [events_of(tmp_path / name)[-1]["why"] for name in parents]
    assert why == ["it was asked to stop", "the server's process has ended"]


def test_a_round_that_no_site_can_evaluate_has_no_metrics_but_is_saved(agreed, tmp_path, caplog):
    transport = network(tmp_path / "sites", agreed)
    calls = []

    def first_in_vain(answer, payload):
        calls.append(payload.words["round"])
        return "busy" if payload.words["round"] == 2 else answer(payload)

    for name in transport.sites:
        transport.behaviour[name, "evaluate"] = first_in_vain
    steps = carried_out(tmp_path / "run", agreed, transport)
    assert [step.t for step in steps if step.metrics is not None] == [4]
    assert [line["round"] for line in metrics_of(tmp_path / "run")] == [4]
    assert {path.name for path in small.checkpoints(tmp_path / "run")} == {
        "round-000002.safetensors",
        "round-000004.safetensors",
    }


@pytest.mark.parametrize("named", [{}, {"model": 10}])
def test_no_site_decides_which_predictions_count(named, tmp_path):
    """The first site by name sends hits of another prediction, alone or besides: the other sites count."""
    agreed = terms(validation=0.3, run=RUN)
    transport = network(tmp_path, agreed)
    first, second, *_ = sorted(transport.sites)
    for name in (first, second):
        transport.behaviour |= {(name, "query"): with_ten_images, (name, "train"): deaf}
    lie = Payload({"right": {**named, "mine": 10}, "count": 10})
    transport.behaviour[first, "evaluate"] = lambda answer, payload: lie
    transport.behaviour[second, "evaluate"] = lambda answer, payload: hits(4)
    carried_out(tmp_path / "run", agreed, transport)
    for line in metrics_of(tmp_path / "run"):
        assert first not in line["sites"] and line["sites"][second]["accuracy"] == {"model": 0.4}
    failed = [event for event in events_of(tmp_path / "run") if event["event"] == "failed"]
    assert failed and all("not those of 'model'" in event["why"] for event in failed)


@pytest.mark.parametrize(
    ("kind", "key", "odd"),
    [("query", "versions", "\ud800"), ("train", "losses", 2**63), ("train", "losses", 1e299)],
)
def test_no_odd_word_of_a_site_ends_the_run(kind, key, odd, agreed, tmp_path):
    """Half a character that UTF-8 cannot write, and numbers that tensors cannot hold."""
    transport = network(tmp_path, agreed)
    first = min(transport.sites)

    def answer(answer, payload):
        said = answer(payload)
        return said._replace(words={**said.words, key: {**said.words[key], "w": odd}})

    transport.behaviour[first, kind] = answer
    steps = carried_out(tmp_path / "run", agreed, transport)
    assert all(first in {client.name for client in step.clients} for step in steps)


def test_images_at_the_server_are_a_test_set_besides_validation(agreed, tmp_path):
    data = small.dataset()
    carried_out(
        tmp_path / "run",
        agreed,
        network(tmp_path / "sites", agreed),
        (data.x_test, np.asarray(data.y_test, np.int64)),
    )
    line, model = metrics_of(tmp_path / "run")[-1], tmp_path / "run" / "model.safetensors"
    said = fedhassle.load(model, allow_import=True).predict(data.x_test).classes
    assert line["test"]["model"] == pytest.approx((said == data.y_test).mean())
    by_class = [(said[data.y_test == k] == k).mean() for k in range(4)]
    assert list(line["class_accuracy"].items()) == list(
        zip("abcd", map(pytest.approx, by_class), strict=True)
    )
    mean = np.mean([line["test"]["model"] for line in metrics_of(tmp_path / "run")])
    row = [f"{100 * mean:.2f}", f"{100 * line['test']['model']:.2f}"]
    assert f"| **model** | {row[0]} | {row[1]} |" in (tmp_path / "run" / "model.md").read_text("utf-8")
    _, out, _ = small.call("resume", tmp_path / "run")
    _, tested = out.split("on the coordinator's test images")
    assert f"{row[0]} %" in tested and f"{row[1]} %" in tested


def test_images_at_the_server_stand_in_if_no_site_keeps_any(tmp_path):
    """The card does not mention images of sites."""
    data, agreed = small.dataset(), terms(validation=0.0, run=RUN)
    small.save_images(tmp_path / "test.npz", data)
    carried_out(tmp_path / "run", agreed, network(tmp_path / "sites", agreed), tmp_path / "test.npz")
    for line in metrics_of(tmp_path / "run"):
        assert line["accuracy"] == line["test"] and line["test_stands_in"] is True
    card = (tmp_path / "run" / "model.md").read_text("utf-8")
    assert "test images of the coordinator" in card and "images of the sites" not in card
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_the_audit_log_knows_the_test_images_of_a_run(agreed, tmp_path):
    """The last path that was given; a resumed run without one keeps it."""
    transport, audit = network(tmp_path / "sites", agreed), Audit(tmp_path / "run" / "audit.jsonl")
    assert audit.tested_on() == ""
    for name in ("a.npz", "b.npz"):
        small.save_images(tmp_path / name, small.dataset())
    for given, known in ((None, ""), ("a.npz", "a.npz"), (None, "a.npz"), ("b.npz", "b.npz")):
        test = tmp_path / given if given else None
        steps = coordinate(transport, agreed, tmp_path / "run", test, Flying().clock)
        next(steps)
        steps.close()
        assert audit.tested_on() == (str(tmp_path / known) if known else "")
    assert [event["test"] for event in events_of(tmp_path / "run") if event["event"] == "testing"] == [
        str(tmp_path / "a.npz"),
        str(tmp_path / "b.npz"),
    ]
    carried_out(tmp_path / "other", agreed, transport, tmp_path / "a.npz")
    assert events_of(tmp_path / "other")[0]["test"] == str(tmp_path / "a.npz")


def test_test_images_that_cannot_be_read_stop_the_run_with_the_reason(agreed, tmp_path):
    """The reason is in the audit log, for the process that follows the run."""
    transport, folder = network(tmp_path / "sites", agreed), Folder(tmp_path / "run")
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        carried_out(folder.path, agreed, transport, tmp_path / "test")
    with pytest.raises(UserError, match=r"the run has stopped: .*test holds no images"):
        list(followed(folder, ReadPosition(), lambda: False, pause=lambda seconds: None))
    small.save_images(tmp_path / "test.npz", small.dataset())
    carried_out(folder.path, agreed, transport, tmp_path / "test.npz")
    assert "test" in metrics_of(folder.path)[-1]


def test_a_run_without_images_to_evaluate_on_is_an_error(tmp_path):
    agreed = terms(run=RUN)
    with pytest.raises(UserError, match="cannot be evaluated"):
        carried_out(tmp_path / "run", agreed, network(tmp_path / "sites", agreed))


def test_a_method_that_pools_data_is_refused(tmp_path):
    agreed = terms(validation=0.3, run='method = "central"')
    with pytest.raises(UserError, match="method 'central' needs all data in one place"):
        carried_out(tmp_path / "run", agreed, network(tmp_path / "sites", agreed))


@pytest.mark.parametrize(
    "other",
    [terms(validation=0.2, run=RUN), terms(validation=0.3, run=RUN.replace("batch = 8", "batch = 4"))],
)
def test_a_run_is_not_resumed_with_another_agreement(other, agreed, tmp_path):
    steps = coordinate(network(tmp_path / "a", agreed), agreed, tmp_path / "run", None, Flying().clock)
    next(steps)
    steps.close()
    with pytest.raises(UserError, match="has changed since this run began"):
        carried_out(tmp_path / "run", other, network(tmp_path / "b", other))


@pytest.mark.parametrize("more", ["average = 0.5", 'merging = "median"'])
def test_a_federation_trains_with_settings_that_every_method_has(more, tmp_path):
    """The plan says them, and each site finds them in its own file."""
    agreed = terms(
        validation=0.3, run=f'rounds = 2\nmethod = {{name = "hassle", residual_steps = 1, {more}}}'
    )
    carried_out(tmp_path / "run", agreed, network(tmp_path / "sites", agreed))
    (line,) = metrics_of(tmp_path / "run")
    assert ("EM averaged" in line["accuracy"]) == more.startswith("average")
    assert all(len(e["contributed"]) == 3 for e in events_of(tmp_path / "run") if e["event"] == "round")


def test_a_full_disk_at_the_server_says_so(agreed, tmp_path, monkeypatch):
    """The run's files cannot be written: its audit log has the reason, as far as it can be written."""
    transport, folder = network(tmp_path / "sites", agreed), Folder(tmp_path / "run")

    def full(run):
        raise OSError(errno.ENOSPC, "No space left on device", str(run.folder.config))

    monkeypatch.setattr(coordination, "write_agreed", full)
    with pytest.raises(OSError, match="No space left"):
        carried_out(folder.path, agreed, transport)
    assert events_of(folder.path)[-1]["why"] == DISK_FULL
    told = []
    with pytest.raises(UserError, match="ended unexpectedly"):
        list(followed(folder, ReadPosition(), lambda: False, told.append, pause=lambda seconds: None))
    assert f"the run has stopped: {DISK_FULL}" in told
