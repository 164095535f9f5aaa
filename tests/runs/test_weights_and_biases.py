"""Weights & Biases in its offline mode, by its own program: the log has what the run's own files have."""

import json
import os
import time
from importlib.util import find_spec

import pytest
from small import call, checkpoints, cut, metrics_of, summary_of

from fedhassle.runs.folder import Folder
from fedhassle.runs.tracked import figures_of_round, final_figures, label_of
from fedhassle.runs.weights_and_biases import DEFAULTS, chosen_mode

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="the extra wandb is not installed")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An environment in which nobody is logged in; restored after the test."""
    for name in (*DEFAULTS, "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "NETRC"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def log_of(folder):
    """The only log of a run: its description, and its figures by round, as W&B's own reader finds them."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = (folder / "wandb").rglob("*.wandb")
    store, lines, about, final = DataStore(), {}, None, {}
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("run"):
            about = about or record.run
        if record.HasField("history"):
            found = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            lines[int(found["_step"])] = {k: json.loads(v) for k, v in found.items() if k[0] != "_"}
        if record.HasField("summary"):
            final |= {item.key or item.nested_key[0]: item.value_json for item in record.summary.update}
    return about, lines, final


def rounds_in_log_of(folder):
    """The number of rounds in a log that is being written: 0 before it is there, and in mid-record."""
    try:
        return len(log_of(folder)[1])
    except (AssertionError, ValueError):
        return 0


def assert_logged(folder):
    """The log has every figure of every round, and the final scores."""
    about, lines, final = log_of(folder)
    assert lines == {line["round"]: figures_of_round(line) for line in metrics_of(folder)}
    for name, value in final_figures(summary_of(folder)).items():
        assert json.loads(final[name]) == value
    return about


def test_several_runs_have_telling_names_and_a_run_that_was_cut_goes_on(words, tmp_path):
    home = tmp_path / "sweep"
    short = [*words, "method=fedavg", "rounds=2", "evaluate_every=1", "track=wandb"]
    short.remove("method.residual_steps=2")
    code, _, err = call("run", *short, "--vary", "seed=0,1", "--out", home)
    assert (code, err) == (0, "")
    about = [assert_logged(home / name) for name in ("0", "1")]
    assert [(one.display_name, one.run_group, [*one.tags]) for one in about] == [
        ("seed=0", "sweep", ["seed=0"]),
        ("seed=1", "sweep", ["seed=1"]),
    ]
    assert {one.project for one in about} == {"fedhassle"} and about[0].run_id != about[1].run_id
    settings = {item.key: item.value_json for item in about[1].config.update}
    assert json.loads(settings["seed"]) == 1 and json.loads(settings["method.name"]) == "fedavg"

    folder = tmp_path / "alone"
    cut([*short, "rounds=4"], folder, 3)
    while rounds_in_log_of(folder) < 3:  # the log of a run that was cut is written in the background
        time.sleep(0.1)
    first = log_of(folder)[0].run_id
    checkpoints(folder)[-1].unlink()  # a round is trained again
    assert call("resume", folder)[::2] == (0, "")
    again = assert_logged(folder)
    assert again.run_id == first == (folder / "wandb" / "run-id").read_text()
    assert (again.display_name, again.run_group, [*again.tags]) == ("alone", "", [])


def test_nobody_is_asked_for_a_key(tmp_path, monkeypatch):
    """Without one the log is offline; with one, or if a user says so, it is not."""
    assert chosen_mode() == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert chosen_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert chosen_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert chosen_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert chosen_mode() == "disabled"
    (tmp_path / ".netrc").write_text("not a netrc")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    assert chosen_mode() == "offline" and "WANDB_API_KEY" not in os.environ


def test_the_label_of_one_of_several_runs_has_the_settings_in_which_they_differ(words, tmp_path):
    choices = ("--vary", "method=fedavg,fedprox", "--vary", "seed=3")
    short = [word for word in words if "residual" not in word]
    assert call("run", *short, "rounds=1", *choices, "--out", tmp_path / "home")[::2] == (0, "")
    labels = [label_of(Folder(tmp_path / "home" / name)) for name in ("fedavg-3", "fedprox-3")]
    assert [label.name for label in labels] == ["method=fedavg", "method=fedprox"]
    assert labels[1].tags == {"group": "home", "method": "fedprox"} and labels[1].group == "home"
