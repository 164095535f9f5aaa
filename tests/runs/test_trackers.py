"""TensorBoard and MLflow logs agree with the run's own files, whatever happens to run or log."""

import os
import shutil
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import small
from federations import FEW, FakeTransport, Flying, held, site, terms
from small import assert_same_result, call, cut, metrics_of, resolved, summary_of

from fedhassle.errors import UserError
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.runs import tracked, trackers, train
from fedhassle.runs.folder import Folder
from fedhassle.runs.resume import reopen
from fedhassle.runs.train import train_run
from fedhassle.settings.hashing import settings_hash

pytestmark = [  # without importing it: the environment before the import is tested too
    pytest.mark.skipif(find_spec(name) is None, reason=f"the extra {name} is not installed")
    for name in ("tensorboard", "mlflow")
]

TOOLS = ("tensorboard", "mlflow")
DEFAULTS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", *trackers.MLFLOW_DEFAULTS)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An environment without settings of MLflow; restored after the test."""
    monkeypatch.chdir(tmp_path)  # MLflow puts artefacts here if a database has no place for them
    for name in DEFAULTS:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An MLflow database for several runs: it takes seconds to create."""
    return f"sqlite:///{tmp_path_factory.mktemp('server') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def four(words):
    """Settings of a run with four evaluations."""
    return [*words, "evaluate_every=1"]


@pytest.fixture(scope="module")
def untracked(four, tmp_path_factory):
    """The folder of such a run, never cut, with no tracker."""
    folder = tmp_path_factory.mktemp("untracked") / "run"
    assert call("run", *four, "--out", folder)[0] == 0
    return folder


# Reading the logs, as their own programs do


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def in_tensorboard(folder):
    """Values by name, each with its step."""
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def client_of(folder):
    from mlflow.tracking import MlflowClient

    return MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"))


def run_of(folder):
    return client_of(folder).get_run((folder / "mlflow" / "run-id").read_text())


def in_mlflow(folder):
    """The same for MLflow."""
    client, run = client_of(folder), run_of(folder)
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


READ = {"tensorboard": in_tensorboard, "mlflow": in_mlflow}


def expected(folder):
    """The expected values of a log, from the run's own files."""
    lines, values = metrics_of(folder), {}
    for line in lines:
        found = {f"accuracy/{name}": value for name, value in line["accuracy"].items()}
        found |= {f"loss/{name}": value for name, value in line["loss"].items()}
        for table in ("class_accuracy", "client_accuracy", "test_loss"):
            found |= {f"{table}/{name}": value for name, value in line.get(table, {}).items()}
        for key in ("bytes_down", "bytes_up", "clients"):
            found |= {f"{key}/{kind}": line[key][kind] for kind in ("full", "partial", "unlabelled")}
        found |= {key: line[key] for key in ("pseudo_label_accuracy", "pseudo_label_share", "seconds")}
        for name, value in found.items():
            if value is not None:
                values.setdefault(name, []).append((line["round"], value))
    for name, scores in summary_of(folder)["accuracy"].items():
        for figure in ("last", "best", "mean_of_last"):
            values[f"final/{name}/{figure}"] = [(lines[-1]["round"], scores[figure])]
    return values


def assert_logged(found, values):
    """The same names and steps, none twice, and values equal to 32-bit precision."""
    assert found.keys() == values.keys()
    for name, pairs in values.items():
        assert [step for step, _ in found[name]] == [step for step, _ in pairs], name
        np.testing.assert_allclose([v for _, v in found[name]], [v for _, v in pairs], 1e-6, err_msg=name)


# A run that is never cut


def test_both_logs_have_every_figure_the_settings_and_the_final_scores(words, tmp_path):
    folder = tmp_path / "10% #1"
    code, _, err = call(
        "run", *words, "rounds=2", "evaluate_every=1", "track=tensorboard,mlflow", "--out", folder
    )
    assert (code, err) == (0, "")
    values = expected(folder)
    assert {"accuracy/EM", "loss/w_S", "bytes_up/partial", "seconds", "final/EM/best"} <= values.keys()
    assert_logged(in_tensorboard(folder), values)
    assert_logged(in_mlflow(folder), values)
    assert in_mlflow(folder)["accuracy/EM"] == values["accuracy/EM"]  # in all their bits

    summary, run = summary_of(folder), run_of(folder)
    for parameters in (run.data.params, hyperparameters(folder)):
        assert parameters["method.name"] == "hassle" and float(parameters["method.lr"]) == 0.1
        assert float(parameters["rounds"]) == 2 and "data.folder" not in parameters
        assert parameters["settings_hash"] == summary["settings_hash"]
        assert parameters["split.labels"] == str(summary["settings"]["split"]["labels"])
    assert run.info.status == "FINISHED" and run.info.run_name == "10% #1"
    listed = client_of(folder).list_artifacts(run.info.run_id)
    assert {one.path for one in listed} == {"curves.png", "model.md"}
    copies = sorted((folder / "mlflow" / "artifacts").rglob("*.*"))
    assert [path.read_bytes() for path in copies] == [
        (folder / name).read_bytes() for name in ("curves.png", "model.md")
    ]


def hyperparameters(folder):
    """The settings as TensorBoard's page of hyperparameters has them."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}


def test_tracking_changes_nothing_of_the_run(four, untracked, tmp_path):
    call("run", *four, "track=tensorboard", "--out", tmp_path / "run")
    assert summary_of(tmp_path / "run")["settings"] == summary_of(untracked)["settings"]
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    assert_same_result(tmp_path / "run", untracked)


def test_several_runs_have_telling_names_and_tags(words, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    short = [word for word in words if "residual" not in word]
    choices = ("--vary", "method=fedavg,fedprox", "--vary", "seed=0,1")
    assert call("run", *short, "rounds=1", "track=mlflow", *choices, "--out", tmp_path / "sweep")[::2] == (
        0,
        "",
    )
    run = run_of(tmp_path / "sweep" / "fedprox-1")
    assert run.info.run_name == "method=fedprox seed=1"
    assert {"method": "fedprox", "seed": "1", "group": "sweep"}.items() <= run.data.tags.items()


def test_a_round_is_logged_before_the_next_one_begins(four, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    cut([*four, "track=tensorboard,mlflow"], tmp_path / "run", 0)
    steps = train_run(reopen(tmp_path / "run"))
    for t in (1, 2):
        next(steps)
        for tool in TOOLS:
            assert [step for step, _ in READ[tool](tmp_path / "run")["seconds"]] == list(range(1, t + 1))
    assert run_of(tmp_path / "run").info.status == "RUNNING"
    steps.close()
    assert run_of(tmp_path / "run").info.status == "KILLED"


def test_a_run_whose_picture_could_not_be_drawn_is_finished(four, server, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("no fonts here")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setattr(train, "draw_curves", fails)
    code, out, _ = call("run", *four, "rounds=2", "track=mlflow", "--out", tmp_path / "run")
    assert code == 0 and "track=mlflow" not in out
    run = run_of(tmp_path / "run")
    assert run.info.status == "FINISHED" and any(name.startswith("final/") for name in run.data.metrics)


def test_rounds_without_an_evaluation_are_left_out(words, tmp_path):
    call("run", *words, "track=tensorboard", "evaluate_every=3", "--out", tmp_path / "run")
    assert [step for step, _ in in_tensorboard(tmp_path / "run")["seconds"]] == [3, 4]


def test_an_interrupted_run_leaves_no_thread(four, tmp_path):
    before = set(threading.enumerate())
    cut([*four, "track=tensorboard"], tmp_path / "run", 1)
    assert not set(threading.enumerate()) - before
    steps = train_run(reopen(tmp_path / "run"))
    next(steps)
    assert [t for t in set(threading.enumerate()) - before if "AsyncWriter" in type(t).__name__]
    steps.close()
    assert not set(threading.enumerate()) - before


# A run that is cut


def say(folder, line):
    """Writes a setting into the file of a run that was cut."""
    config = folder / "config.toml"
    kept = [
        old for old in config.read_text().splitlines() if old.partition(" =")[0] != line.partition(" =")[0]
    ]
    config.write_text("\n".join([line, *kept]))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("what", ["at a round", "ahead of its checkpoint", "behind its checkpoint", "twice"])
def test_a_run_that_was_cut_resumes_in_the_same_log(
    tool, what, four, untracked, server, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    folder = tmp_path / "run"
    if what == "behind its checkpoint":  # as when a server comes back
        cut(four, folder, 3)
        say(folder, f'track = ["{tool}"]')
    else:
        cut([*four, f"track={tool}"], folder, 3)
    if what == "ahead of its checkpoint":  # a round is trained again
        small.checkpoints(folder)[-1].unlink()
    if what == "twice":
        steps = train_run(reopen(folder))
        next(steps)
        steps.close()
    run = (folder / "mlflow" / "run-id").read_text() if (folder / "mlflow").exists() else None
    code, _, err = call("resume", folder)
    assert (code, err) == (0, "")
    values = expected(folder)
    assert [step for step, _ in values["seconds"]] == [1, 2, 3, 4]
    found = READ[tool](folder)
    if what == "ahead of its checkpoint" and tool == "mlflow":  # MLflow keeps the first value of such a round
        found["seconds"] = found["seconds"][:2] + values["seconds"][2:3] + found["seconds"][3:]
    assert_logged(found, values)
    assert len(list((folder / "tensorboard").glob("*"))) == (tool == "tensorboard")
    if tool == "mlflow":
        assert run_of(folder).info.status == "FINISHED"
        assert run in (None, (folder / "mlflow" / "run-id").read_text())
    shutil.rmtree(folder / tool)
    assert_same_result(folder, untracked)


def test_a_run_cut_before_its_summary_was_written_gets_its_final_scores(four, tmp_path):
    folder = tmp_path / "run"
    cut([*four, "track=tensorboard"], folder, 4)
    assert "final/EM/last" not in in_tensorboard(folder)
    call("resume", folder)
    assert_logged(in_tensorboard(folder), expected(folder))


def test_a_server_that_does_not_know_the_run_gets_all_of_it(four, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    folder = tmp_path / "run"
    cut([*four, "track=mlflow"], folder, 3)
    (folder / "mlflow" / "run-id").write_text("0" * 32)
    assert call("resume", folder)[0] == 0
    assert_logged(in_mlflow(folder), expected(folder))
    assert client_of(folder).get_experiment(run_of(folder).info.experiment_id).name == "mine"


def test_a_run_that_resumes_with_other_machine_settings_keeps_its_log(four, server, tmp_path, monkeypatch):
    """MLflow accepts each parameter once."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    folder = tmp_path / "run"
    cut([*four, "track=mlflow"], folder, 3)
    say(folder, "threads = 2")
    assert call("resume", folder)[0] == 0
    assert warnings_of(folder) == [] and run_of(folder).data.params["threads"] == "1"
    assert_logged(in_mlflow(folder), expected(folder))


def test_the_times_of_a_resumed_log_have_no_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.time, "time", lambda: 5000.0)
    tracker = trackers.TensorBoard(Folder(tmp_path))
    tracker.begin({}, [{"round": t, "seconds": 10.0 * t} for t in (1, 2, 3)])
    tracker.end(None)
    assert [e.wall_time for e in events(tmp_path).Scalars("seconds")] == [4950.0, 4970.0, 5000.0]


# Errors


def warnings_of(folder):
    return [line for line in (folder / "log.txt").read_text().splitlines() if "WARNING" in line]


@pytest.mark.parametrize("moment", ["begin", "evaluated", "end"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(
    tool, moment, four, untracked, server, tmp_path, monkeypatch
):
    """It is dropped at its first error, and the other one continues."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    asked = []

    def fail(self, *given):
        asked.append(given)
        raise OSError("no space left\non the disk of http://me:secret@host/x")

    failing = {"tensorboard": trackers.TensorBoard, "mlflow": trackers.MLflow}[tool]
    monkeypatch.setattr(failing, moment, fail)
    folder, threads = tmp_path / "run", set(threading.enumerate())
    assert call("run", *four, "track=tensorboard,mlflow", "--out", folder)[0] == 0
    (warning,) = warnings_of(folder)
    assert f"track={tool}" in warning and "OSError: no space left" in warning and "secret" not in warning
    assert len(asked) == (
        2 if moment == "end" else 1
    )  # an end that fails is tried once more, to close things
    (other,) = set(TOOLS) - {tool}
    assert_logged(READ[other](folder), expected(folder))
    if tool != "tensorboard" or moment != "end":
        assert not set(threading.enumerate()) - threads
    for name in TOOLS:
        shutil.rmtree(folder / name, ignore_errors=True)
    assert_same_result(folder, untracked)


def test_a_password_in_an_address_is_not_logged(caplog):
    class Failing:
        def begin(self, parameters, history):
            raise OSError("http://me:secret@host/x is away")

        def end(self, summary):
            raise OSError("again")

    trackers.Trackers({"mlflow": Failing()}).begin({}, [])
    (record,) = caplog.records
    assert "track=mlflow" in record.getMessage()
    assert record.getMessage().endswith("OSError: http://host/x is away")


def test_an_offline_server_stops_nothing(four, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert call("run", *four, "track=mlflow", "--out", tmp_path / "run")[0] == 0
    (warning,) = warnings_of(tmp_path / "run")
    assert "track=mlflow" in warning and len(metrics_of(tmp_path / "run")) == 4


def test_a_folder_that_cannot_be_written_stops_nothing(four, tmp_path):
    cut(four, tmp_path / "run", 1)
    say(tmp_path / "run", 'track = ["tensorboard"]')
    (tmp_path / "run" / "tensorboard").write_text("in the way")
    assert call("resume", tmp_path / "run")[0] == 0
    (warning,) = warnings_of(tmp_path / "run")
    assert "track=tensorboard" in warning and (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("tool", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("mlflow", "alembic")]
)
def test_a_missing_package_is_an_error_before_the_run_begins(tool, module, four, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = call("run", *four, f"track={tool}", "--out", tmp_path / "run")
    assert code == 2 and f"track={tool} needs {module}, " in err
    assert f"pip install 'fedhassle[{tool}]'" in err.replace("\n", " ")
    assert not (tmp_path / "run").exists()
    agreed = terms(validation=0.3, run=f'track = "{tool}"')
    with pytest.raises(UserError, match=rf"pip install 'fedhassle\[{tool}\]'"):
        list(
            coordinate(network(tmp_path / "sites", agreed), agreed, tmp_path / "server", None, Flying().clock)
        )


# Federations


def network(folder, agreed):
    nodes = {k: site(folder, k, x, y, agreed) for k, (x, y) in held(small.dataset(), FEW).items()}
    return FakeTransport({k: node.answer for k, node in nodes.items()})


def test_a_federation_is_tracked_without_figures_of_single_sites(tmp_path):
    run = 'rounds = 2\nevaluate_every = 1\ntrack = "tensorboard"\nmethod = {name = "fedavg", batch = 8}'
    agreed = terms(validation=0.3, run=run)
    list(coordinate(network(tmp_path / "sites", agreed), agreed, tmp_path / "run", None, Flying().clock))
    assert all("sites" in line for line in metrics_of(tmp_path / "run"))
    assert_logged(in_tensorboard(tmp_path / "run"), expected(tmp_path / "run"))
    assert hyperparameters(tmp_path / "run")["settings_hash"] == summary_of(tmp_path / "run")["settings_hash"]


# Names and settings


def test_figures_have_names_that_every_tool_accepts():
    nested = {"accuracy": {"my/own: é": 0.5}, "none": None, "deep": {"a": {"b-c.d": 2}}}
    assert dict(tracked.figures(nested)) == {"accuracy/my_own_ é": 0.5, "deep/a/b-c.d": 2.0}


@pytest.mark.parametrize(
    ("word", "tools"),
    [
        ("track=tensorboard", ["tensorboard"]),
        ("track=tensorboard, mlflow", ["tensorboard", "mlflow"]),
        ('track=["mlflow"]', ["mlflow"]),
        ("track=", []),
        ("track=[]", []),
    ],
)
def test_track_is_a_word_several_or_a_list(word, tools):
    assert resolved(word).track == tools
    dataset = small.dataset()
    assert settings_hash(resolved(word), dataset, small.SPLIT) == settings_hash(
        resolved(), dataset, small.SPLIT
    )


@pytest.mark.parametrize("word", ["track=tensorbord", "track=3", "track=tensorboard;mlflow", "track=[1]"])
def test_other_values_of_track_are_refused(word):
    with pytest.raises(UserError, match=r"^track"):
        resolved(word)


def test_mlflow_telemetry_is_off_unless_a_user_wants_it(tmp_path, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    tracker = trackers.MLflow(Folder(tmp_path))
    tracker.begin({}, [])
    tracker.end(None)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


# Many classes, and lines of older versions


def test_mlflow_takes_any_number_of_classes(tmp_path, monkeypatch):
    """MLflow accepts at most 1,000 metrics in one request."""
    requests = []

    class Client:
        def log_batch(self, run, metrics):
            requests.append([(metric.key, metric.value, metric.step) for metric in metrics])

    tracker = trackers.MLflow(Folder(tmp_path))
    tracker._client, tracker._run = Client(), "x"
    classes = {str(k): k / 3000 for k in range(2500)}
    tracker.evaluated({"round": 7, "accuracy": {"model": 0.5}, "class_accuracy": classes})
    assert [len(request) for request in requests] == [1000, 1000, 501]
    logged = {name: value for request in requests for name, value, _ in request}
    assert logged == {"accuracy/model": 0.5, **{f"class_accuracy/{k}": v for k, v in classes.items()}}
    assert {step for request in requests for *_, step in request} == {7}


def test_lines_of_older_versions_are_tracked_without_the_new_figures():
    line = {"round": 3, "accuracy": {"model": 0.5}, "pseudo_label_accuracy": None, "seconds": 1.5}
    assert tracked.figures_of_round(line) == {"accuracy/model": 0.5, "seconds": 1.5}
