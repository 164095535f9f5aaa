"""Metrics of one's own, and those built in beside accuracy: test loss and the accuracy of each client."""

import json
import re

import numpy as np
import pytest
import small
import torch
from small import call, metrics_of, summary_of, tensors_of

import fedhassle
from fedhassle.engine.evaluate import score
from fedhassle.engine.metrics import class_mixes, client_accuracy, spread_of_clients
from fedhassle.methods import METHODS
from fedhassle.reproduce.experiment import read_experiment
from fedhassle.runs.trackers import figures_of_round
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

METRICS = """
    import numpy as np
    import torch

    def shapes(seen):
        assert torch.is_grad_enabled() is False
        assert seen.classes.shape == seen.y.shape and seen.main in seen.logits
        return {"clients": seen.mixes.shape[0], "norm": seen.state["w"].norm(), "right": np.float32(
            (seen.classes == seen.y).float().mean()), "unknown": float("nan"), "none": None}

    def listed(seen):
        return [1, 2]

    def nothing(seen):
        return {}

    def tensors(seen):
        return {"y": seen.y}

    def words(seen):
        return {"y": "0.5"}

    def unnamed(seen):
        return {3: 0.5}

    def raises(seen):
        raise KeyError("w_S")

    def again(seen):
        return {"norm": 0.0}

    def overwrites(seen):
        for tensor in [*seen.state.values(), *seen.logits.values(), seen.y, seen.mixes]:
            tensor.zero_()
        return {"zero": seen.state["w"].norm()}

    def later(seen):
        return {"later": 1 / (2 - seen.t)}  # fails after round 2

    number = 3
"""


# Built-in metrics


def test_the_test_loss_is_the_cross_entropy_of_every_prediction(data):
    """In NumPy: the mean over images of log Σ exp z − z_y."""
    method = METHODS["hassle"](net=small.net(channels=data.shape[0]))
    images, views = torch.from_numpy(data.x_test), small.simulator(data).trainer.views
    found = score(method, method.initial(0), images, torch.from_numpy(data.y_test), views).loss
    logits = method.predict(method.initial(0), views.normalise(images))
    for name, found_logits in logits.items():
        z = found_logits.double().numpy()
        each = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), data.y_test]
        assert found[name] == pytest.approx(each.mean(), rel=1e-5)


def test_a_loss_that_is_not_finite_is_unknown(monkeypatch):
    method, data = METHODS["fedavg"](net=small.net()), small.dataset()
    monkeypatch.setattr(type(method), "predict", lambda *_: {"model": torch.full((40, 4), torch.nan)})
    images, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    found = score(method, method.initial(0), images, y, small.simulator().trainer.views)
    assert found.loss == {"model": None}


def test_the_accuracy_of_a_client_is_that_on_a_test_set_with_its_class_mix():
    """A literal test set of each client: every image of a class, as often as the client's mix says."""
    counts = np.array([[3, 1, 0], [0, 0, 8], [1, 1, 2], [0, 0, 0]])
    right = {0: [1, 1, 0, 0, 0], 1: [1, 1, 1, 1, 0], 2: [1, 0, 0, 0, 0]}  # of 5 test images per class
    expected = [
        np.mean([hit for k, n in enumerate(row) for hit in right[k] * n]) if sum(row) else None
        for row in counts.tolist()
    ]
    found = client_accuracy(class_mixes(counts), [np.mean(right[k]) for k in range(3)])
    assert found == [pytest.approx(value) if value is not None else None for value in expected]
    assert found[:3] == [pytest.approx(0.5), pytest.approx(0.2), pytest.approx(0.4)]
    assert client_accuracy(class_mixes(counts), [0.5, None, None]) == [0.5, None, 0.5, None]


def test_the_spread_over_clients_has_the_lowest_tenth():
    found = spread_of_clients([None, *np.linspace(0, 1, 21)])
    assert found["mean"] == pytest.approx(0.5) and found["lowest"] == 0
    assert found["std"] == pytest.approx(np.std(np.linspace(0, 1, 21)))
    assert found["lowest_tenth"] == pytest.approx(0.05)  # the lowest 3 of 21: 0, 0.05, 0.1
    assert spread_of_clients([None]) == {}


def test_a_run_reports_the_loss_and_the_clients(finished):
    folder, _ = finished
    summary, lines = summary_of(folder), metrics_of(folder)
    split = fedhassle.Split.load(folder / "split.npz")
    y = np.load(summary["settings"]["data"]["name"])["y_train"]
    for line in lines:
        each = []
        for labelled, unlabelled in zip(split.labelled, split.unlabelled, strict=True):
            mine = y[np.concatenate([labelled, unlabelled])]
            by_class = list(line["class_accuracy"].values())
            each.append(np.mean([by_class[k] for k in mine]))  # each image at the accuracy of its class
        assert line["client_accuracy"]["mean"] == pytest.approx(np.mean(each))
        assert line["client_accuracy"]["lowest"] == pytest.approx(min(each))
        assert line["test_loss"].keys() == line["accuracy"].keys() and "metrics" not in line
        assert {"client_accuracy/mean", "test_loss/EM"} <= figures_of_round(line).keys()
    assert summary["accuracy_by_client"].keys() == set(split.names)
    means = [line["client_accuracy"]["mean"] for line in lines]
    assert summary["client_accuracy"]["mean"] == pytest.approx(np.mean(means))
    assert np.mean([*summary["accuracy_by_client"].values()]) == pytest.approx(np.mean(means))
    assert summary["test_loss"]["EM"] == pytest.approx(np.mean([line["test_loss"]["EM"] for line in lines]))
    assert "metrics" not in summary and "accuracy_by_client" not in lines[-1]


def test_clients_by_themselves_are_measured_by_their_own_models(data, tmp_path):
    """Each model on each image, counted at the share of the image's class in the client's data."""
    small.save_images(tmp_path / "own.npz", data)
    settings = {**small.SETTINGS, "data": str(tmp_path / "own.npz"), "method": "local", "evaluate_every": 1}
    result = fedhassle.run("paper", {**settings, "rounds": 2}, out=tmp_path / "run", quiet=True)
    split, model = fedhassle.Split.load(tmp_path / "run" / "split.npz"), result.model
    line, images = metrics_of(tmp_path / "run")[-1], model.views.normalise(torch.from_numpy(data.x_test))
    expected = {}
    for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True):
        expected[name] = None
        if f"w of {name}" in model.state:
            found = model.method.net.logits(model.state[f"w of {name}"], images).argmax(1).numpy()
            right = [np.mean(found[data.y_test == k] == k) for k in range(data.classes)]
            expected[name] = np.mean([right[k] for k in data.y_train[np.concatenate([labelled, unlabelled])]])
    known = [value for value in expected.values() if value is not None]
    assert 1 < len(known) < len(split.names)
    assert line["accuracy_by_client"] == {k: v and pytest.approx(v) for k, v in expected.items()}
    assert line["client_accuracy"]["mean"] == pytest.approx(np.mean(known))
    assert line["client_accuracy"]["lowest"] == pytest.approx(min(known))
    assert result.summary["accuracy_by_client"].keys() == {*split.names}
    assert "accuracy_by_client" not in result.summary["history"][-1]
    assert not any("accuracy_by_client" in name for name in figures_of_round(line))


# Metrics of one's own


@pytest.fixture
def fast(without_residuals, module):
    """Settings of a run with metrics of the module `own_metrics`."""
    module("own_metrics", METRICS)
    return lambda *names: [
        *without_residuals,
        *("method=fedavg", "metrics=" + ",".join(f"own_metrics:{name}" for name in names)),
    ]


def test_own_numbers_are_in_every_file(fast, tmp_path):
    code, out, err = call("run", *fast("shapes"), "--out", tmp_path / "run")
    assert (code, err) == (0, "") and "metrics  clients 6; norm" in out and "unknown unknown" in out
    lines = metrics_of(tmp_path / "run")
    for line in lines:
        own = line["metrics"]
        assert own["clients"] == 6 and own["unknown"] is own["none"] is None and own["norm"] > 0
        assert own["right"] == pytest.approx(line["accuracy"]["model"])
        assert figures_of_round(line)["metrics/norm"] == own["norm"]
        assert "metrics/none" not in figures_of_round(line)
    result = fedhassle.run(out=tmp_path / "run")
    assert result.metrics["norm"] == pytest.approx(np.mean([line["metrics"]["norm"] for line in lines]))
    assert result.metrics["none"] is None
    assert (tmp_path / "run" / "own_code.txt").read_text().startswith("own_metrics:shapes ")
    assert "own_metrics:shapes" in result.summary["versions"]
    code, out, err = call("compare", tmp_path / "run", "--picture", tmp_path / "curves.png")
    assert (code, err) == (0, "") and "your own metrics" in out and "norm" in out


def test_metrics_change_neither_the_model_nor_the_hash_of_other_runs(fast, without_residuals, tmp_path):
    plain = [*without_residuals, "method=fedavg"]
    assert call("run", *plain, "--out", tmp_path / "plain")[0] == 0
    assert call("run", *fast("shapes"), "--out", tmp_path / "own")[0] == 0
    one, other = (tensors_of(tmp_path / name / "model.safetensors") for name in ("plain", "own"))
    assert small.same(one, other)
    first, second = (summary_of(tmp_path / name) for name in ("plain", "own"))
    assert first["accuracy"] == second["accuracy"] and first["settings_hash"] != second["settings_hash"]


def test_a_metric_that_overwrites_what_it_sees_changes_nothing_else(fast, tmp_path):
    for out, names in (("alone", ["shapes"]), ("after", ["overwrites", "shapes"])):
        assert call("run", *fast(*names), "--out", tmp_path / out)[0] == 0
    alone, after = (metrics_of(tmp_path / name)[-1] for name in ("alone", "after"))
    assert after["accuracy"] == alone["accuracy"]
    assert after["metrics"] == {"zero": 0.0} | alone["metrics"]
    one, other = (tensors_of(tmp_path / name / "model.safetensors") for name in ("alone", "after"))
    assert small.same(one, other)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["listed"], "own_metrics:listed returns list; expected a dict of numbers"),
        (["nothing"], "own_metrics:nothing returns no number"),
        (["tensors"], r"own_metrics:tensors returns Tensor of shape \(40,\) for 'y'"),
        (["words"], "own_metrics:words returns str for 'y'"),
        (["unnamed"], "own_metrics:unnamed names a number 3: expected a text"),
        (["raises"], "own_metrics:raises fails: KeyError: 'w_S'"),
        (["shapes", "again"], "'norm' is a number of own_metrics:shapes too"),
        (["number"], "own_metrics:number is int, not a function"),
        (["absent"], "'own_metrics' has no function 'absent'"),
    ],
)
def test_a_metric_that_does_not_work_is_one_line_before_training(names, message, fast, tmp_path):
    code, _, err = call("run", *fast(*names), "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1
    assert re.search(message, err), err
    assert not (tmp_path / "run").exists()


def test_a_metric_that_fails_later_is_one_warning(fast, tmp_path):
    code, _, err = call("run", *fast("later", "shapes"), "rounds=6", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    log = (tmp_path / "run" / "log.txt").read_text("utf-8")
    assert log.count("metric own_metrics:later fails: ZeroDivisionError: division by zero") == 1
    own = [line["metrics"] for line in metrics_of(tmp_path / "run")]
    assert ["later" in numbers for numbers in own] == [False, True, True]
    assert all("norm" in numbers for numbers in own)


def test_a_run_whose_metric_has_changed_is_not_resumed(fast, tmp_path):
    folder, words = tmp_path / "run", fast("shapes")
    small.cut(words, folder, 2)
    before = metrics_of(folder)
    (tmp_path / "own_metrics.py").write_text("def shapes(seen): return {'other': 1}")
    code, _, err = call("resume", folder)
    assert code == 2 and "own_metrics has changed since" in err
    assert metrics_of(folder) == before


def test_metrics_are_words_in_settings():
    settings = resolve(request("quick", {"metrics": "a:b, c.py:d"}))
    assert settings.metrics == ["a:b", "c.py:d"]
    assert resolve(request("quick", {"metrics": ["a:b"]})).metrics == ["a:b"]


# Tables and reports

EXPERIMENT = """
title = "Calibration"
rows = ["method"]
seeds = 1
metrics = ["accuracy", "metrics.norm", "client_accuracy.lowest", "test_loss.model"]
settings = {{ {settings}, metrics = "own_metrics:shapes" }}

[[axis]]
name = "method"
choices = [
  {{ id = "fedavg", set = {{ method = "fedavg" }} }},
  {{ id = "fedprox", set = {{ method = "fedprox" }} }},
]
"""


def experiment(words):
    """Returns the file of an experiment whose runs have these settings."""
    pairs = [word.partition("=") for word in words]
    settings = ", ".join(f"{k} = '{v}'" if k in ("data", "device") else f"{k} = {v}" for k, _, v in pairs)
    return EXPERIMENT.format(settings=settings)


def test_an_experiment_shows_own_numbers_in_its_report(fast, without_residuals, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fast()
    (tmp_path / "mine.toml").write_text(experiment(without_residuals), "utf-8")
    code, out, err = call("reproduce", "mine.toml")
    assert (code, err) == (0, "") and "norm" in out and "client accuracy, lowest" in out
    for suffix in ("md", "csv", "html", "tex"):
        assert call("report", "mine.toml", "-o", f"report.{suffix}")[::2] == (0, "")
    (run,) = (tmp_path / "results").rglob("fedavg-*.json")
    norm = json.loads(run.read_text("utf-8"))["metrics"]["norm"]
    assert f"{norm:.3f}" in (tmp_path / "report.md").read_text("utf-8")
    assert "metrics.norm" in (tmp_path / "report.csv").read_text("utf-8")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert '<details open="open"><summary>Accuracy by round' in page and "its last two evaluations" in page
    for absent in ("not in the paper", "the paper's", "not run yet", "fewer seeds"):  # nothing of it occurs
        assert absent not in page.partition("How to read the tables")[2]
    code, _, err = call("results", "check", run, "--experiment", "mine.toml")
    assert (code, err) == (0, "")


def test_a_misspelt_metric_of_ones_own_is_refused(fast, without_residuals, tmp_path, monkeypatch):
    """By `reproduce` once a run of each method shows the names, before other seeds train; by `report` too."""
    monkeypatch.chdir(tmp_path)
    fast()
    text = (
        experiment(without_residuals)
        .replace("seeds = 1", "seeds = 3")
        .replace("metrics.norm", "metrics.nrom")
    )
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    for command in ("reproduce", "report"):
        code, _, err = call(command, "mine.toml")
        assert code == 2
        assert err.startswith(
            "fedhassle: mine: no run has the metric 'metrics.nrom', did you mean 'metrics.norm'? "
            "(there are metrics.clients, metrics.norm, "
        )
    assert len([*(tmp_path / "results").rglob("*.json")]) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "client_accuracy.lowst",
            r"has no 'lowst', did you mean 'lowest'\? \(there are mean, std, lowest, low",
        ),
        ("bytes_up.ful", r"has no 'ful', did you mean 'full'\? \(there are full, partial, unlabelled\)"),
    ],
)
def test_a_misspelt_built_in_metric_is_refused_when_the_file_is_read(given, said, tmp_path):
    (tmp_path / "mine.toml").write_text(
        EXPERIMENT.format(settings="rounds = 1").replace("metrics.norm", given), "utf-8"
    )
    with pytest.raises(fedhassle.UserError, match=said):
        read_experiment(str(tmp_path / "mine.toml"))


def test_an_unknown_table_of_metrics_is_refused(tmp_path):
    text = EXPERIMENT.format(settings="rounds = 1").replace("metrics.norm", "metric.norm")
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    with pytest.raises(fedhassle.UserError, match=r"not a metric: write accuracy.* metrics,"):
        read_experiment(str(tmp_path / "mine.toml"))
