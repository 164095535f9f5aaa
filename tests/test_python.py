"""Settings as Python has them: keywords, classes, functions, data sets, and what errors say of them."""

import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import small
from small import call, summary_of
from torch import nn

import fedhassle
from fedhassle import names
from fedhassle.methods.fedavg import FedAvg
from fedhassle.nets import LeNet
from fedhassle.settings.objects import in_words
from fedhassle.settings.request import combinations

FAST = {**small.SETTINGS, "rounds": 2, "method.epochs": 1}


@dataclass(frozen=True)
class Mine(FedAvg):
    strength: float = 0.5


class Outer:
    class Flat(nn.Module):
        def __init__(self, shape, classes, width=1.0):
            super().__init__()
            self.output = nn.Linear(shape[0] * shape[1] * shape[2], classes)

        def forward(self, x):
            return self.output(x.flatten(1))


def wrong(seen):
    return {"wrong": (seen.classes != seen.y).float().mean()}


def own_data(**changes):
    data = small.dataset(train=240)
    made = fedhassle.Dataset.of(data.x_train, data.y_train, data.x_test, data.y_test, name="few")
    return dataclasses.replace(made, **changes)


def test_classes_functions_and_data_are_accepted_where_names_are(tmp_path, global_randomness):
    settings = {"method": {"name": Mine, "strength": np.float64(0.25), "batch": 16}, "net": Outer.Flat}
    result = fedhassle.run(
        "paper", FAST, data=own_data(), metrics=wrong, **settings, out=tmp_path / "run", quiet=True
    )
    found = result.summary["settings"]
    assert found["method"]["name"] == f"{__name__}:Mine" and found["method"]["strength"] == 0.25
    assert found["method"]["epochs"] == 1 and found["rounds"] == 2  # of the mapping
    assert found["net"] == f"{__name__}:Outer.Flat" and found["metrics"] == [f"{__name__}:wrong"]
    assert result.metrics["wrong"] == pytest.approx(1 - result.accuracy["model"]["mean_of_last"])
    (images,) = tmp_path.glob("few-*.npz")
    assert found["data"]["name"] == str(images)
    assert result.model.predict(own_data().x_test).classes.shape == (40,)
    words = {"method.name": f"{__name__}:Mine", "method.strength": 0.25, "method.batch": 16}
    by_name = {**FAST, **words, "net": f"{__name__}:Outer.Flat", "metrics": f"{__name__}:wrong"}
    again = fedhassle.run("paper", {**by_name, "data": str(images)}, out=tmp_path / "named", quiet=True)
    assert again.summary["settings_hash"] == result.summary["settings_hash"]
    assert again.accuracy == result.accuracy


def test_a_run_given_in_python_is_resumed_by_its_folder(tmp_path):
    fedhassle.run("paper", FAST, data=own_data(), method=Mine, out=tmp_path / "run", quiet=True)
    code, _, err = call("resume", tmp_path / "run", "rounds=4")
    assert (code, err) == (0, "") and summary_of(tmp_path / "run")["rounds"] == 4


def test_built_in_classes_have_their_names(tmp_path):
    words, defaults = in_words({"method": FedAvg, "net": LeNet}, tmp_path)
    assert words == {"method": {"name": "fedavg"}, "net": "lenet"} and defaults == {}


def test_values_of_numpy_and_paths_are_plain(tmp_path):
    given = {"rounds": np.int64(3), "split.alpha": np.float32(0.5), "data": tmp_path / "a.npz"}
    words, _ = in_words(given | {"data.flip": np.bool_(True), "split.labels": (0.5, np.float64(1))}, tmp_path)
    assert words["rounds"] == 3 and type(words["rounds"]) is int
    assert words["split"] == {"alpha": 0.5, "labels": [0.5, 1.0]}
    assert words["data"] == {"name": str(tmp_path / "a.npz"), "flip": True}


def test_several_runs_may_vary_classes(tmp_path):
    settings = {**FAST, "data": own_data(), "rounds": 1}
    found = fedhassle.run_several(
        "paper", settings, vary={"method": [Mine, "fedprox"]}, evaluate_every=1, out=tmp_path, quiet=True
    )
    assert [one.folder.name for one in found] == ["Mine", "fedprox"]
    assert len([*tmp_path.glob("few-*.npz")]) == 1


def test_runs_that_vary_are_named_by_the_last_part_of_a_path_unless_that_is_the_same():
    def names_of(*values):
        return [name for name, _ in combinations([("data", values)])]

    assert names_of("a/x.npz", "b/y.npz") == ["x.npz", "y.npz"]
    assert names_of("a/x.npz", "b/x.npz") == ["a/x.npz", "b/x.npz"]
    assert names_of(Mine, 0.5) == ["Mine", "0.5"]


def test_defaults_of_a_data_set_are_settings_that_anything_overrides(tmp_path):
    words, defaults = in_words({"data": own_data()}, tmp_path)
    assert defaults == {}
    changed = own_data(flip=False, mean=(0.25,), net="resnet8")
    words, defaults = in_words({"data": {"name": changed, "crop": 2}}, tmp_path)
    assert defaults == {"data": {"mean": [0.25], "flip": False}, "net": "resnet8"}
    assert words["data"]["crop"] == 2 and "flip" not in words["data"]
    settings = {**FAST, "data": changed, "net": "lenet"}
    result = fedhassle.run("paper", settings, method=Mine, out=tmp_path / "run", quiet=True)
    found = result.summary["settings"]
    assert found["net"] == "lenet" and found["data"]["mean"] == [0.25] and found["data"]["flip"] is False


def test_a_split_is_accepted_where_its_file_is(tmp_path):
    parts = [np.arange(k, 240, 4) for k in range(4)]
    split = fedhassle.Split.of(parts[:2], parts[2:], ("north", "south"))
    settings = {k: v for k, v in FAST.items() if not k.startswith("split")} | {"clients_per_round": 2}
    result = fedhassle.run(
        "paper", settings, data=own_data(), split=split, method=Mine, out=tmp_path / "run", quiet=True
    )
    assert result.summary["split_hash"] == split.hash
    assert set(result.summary["accuracy_by_client"]) == {"north", "south"}


def test_a_data_set_is_checked_and_saved(tmp_path):
    data = own_data()
    data.save(tmp_path / "few.npz")
    again = fedhassle.dataset(str(tmp_path / "few.npz"))
    assert again.content == data.content and again.class_names == data.class_names
    with pytest.raises(fedhassle.UserError, match="Dataset own: y_train has the labels 0"):
        fedhassle.Dataset.of(data.x_train, 0 * data.y_train)
    with pytest.raises(fedhassle.UserError, match="both x_test and y_test"):
        fedhassle.Dataset.of(data.x_train, data.y_train, data.x_test)
    bare = fedhassle.Dataset.of(data.x_train[..., 0], data.y_train)
    assert bare.x_train.shape == data.x_train.shape and len(bare.y_test) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": np.zeros(3)}, r"^rounds: ndarray of shape \(3,\) is no value of a setting$"),
        ({"data": np.zeros((9, 2))}, r"^data: ndarray of shape \(9, 2\) is .*fedhassle.Dataset.of\("),
        ({"method": {"mu": np.ones(2)}}, r"^method.mu: ndarray of shape \(2,\)"),
        ({"method": Mine(net=None)}, "got an instance of Mine"),
        ({"net": Outer.Flat((1, 2, 2), 3)}, "got an instance of Flat"),
        ({"net": lambda *words: None}, "<lambda> has no name of its own"),
        ({"metrics": [print, wrong]}, "metric: expected a name, or a class or function itself"),
        ({"roundz": 3}, "did you mean 'rounds'"),
        ({"mu": 3}, "unknown setting 'mu'"),
        ({"rounds": object()}, "rounds: object is no value"),
    ],
)
def test_a_value_that_is_no_setting_is_one_line_without_its_contents(
    settings, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedhassle.UserError, match=message) as raised:
        fedhassle.run("quick", **settings)
    assert "\n" not in str(raised.value) and "0." not in str(raised.value)
    assert [*tmp_path.iterdir()] == []


def test_a_class_inside_a_function_is_refused():
    class Local(FedAvg):
        pass

    with pytest.raises(fedhassle.UserError, match="not inside a function"):
        fedhassle.run("quick", method=Local)


def test_a_class_that_was_replaced_is_refused(monkeypatch):
    before = Mine
    monkeypatch.setitem(globals(), "Mine", type("Mine", (FedAvg,), {}))
    with pytest.raises(fedhassle.UserError, match="is another method than the one given: import it again"):
        names.name_of(before, {}, "method")


# Pictures and comparisons


def test_the_data_of_each_client_is_a_picture(images, tmp_path):
    found = fedhassle.split("paper", FAST, data=str(images), split={"alpha": 10.0})
    assert len(found.clients) == 6 and "α = 10" in found.title and found.split.hash[:12] in repr(found)
    assert found._repr_png_().startswith(b"\x89PNG")
    equal = fedhassle.split("paper", FAST, data=str(images), split={"kind": "iid"})
    assert "α" not in equal.title and "equal class mixes" in equal.title
    found.picture.save(tmp_path / "split.svg")
    assert (tmp_path / "split.svg").stat().st_size > 1000


def test_results_and_folders_are_compared(images, tmp_path):
    settings = {**FAST, "data": str(images)}
    vary = {"method": ["fedavg", "fedprox"], "seed": [0, 1]}
    runs = tmp_path / "runs"
    found = fedhassle.run_several("paper", settings, vary=vary, metrics=wrong, out=runs, quiet=True)
    compared = fedhassle.compare(*found)
    scores = [one.accuracy["model"]["mean_of_last"] for one in found]
    rows = compared.rows
    assert [(row["run"], row["prediction"], row["seeds"]) for row in rows] == [
        ("fedavg", "model", 2),
        ("fedprox", "model", 2),
    ]
    assert [row["accuracy"] for row in rows] == pytest.approx([np.mean(scores[:2]), np.mean(scores[2:])])
    assert rows[0]["std"] == pytest.approx(np.std(scores[:2], ddof=1))
    assert rows[0]["wrong"] == pytest.approx(np.mean([one.metrics["wrong"] for one in found[:2]]))
    assert fedhassle.compare(runs).rows == rows
    mixed = fedhassle.compare(found[0].folder, found[2])
    assert [row["run"] for row in mixed.rows] == ["fedavg", "fedprox"]  # as given: others are over the first
    shown = f"{100 * np.mean(scores[:2]):.2f} ± "
    assert shown in repr(compared) and "wrong" in repr(compared)
    assert f"<td>{shown}" in compared._repr_html_() and "seed by seed" in compared._repr_html_()
    own = f"<th>wrong</th></tr></thead><tbody><tr><td>fedavg</td><td>{rows[0]['wrong']:.4g}"
    assert own in compared._repr_html_()
    assert compared.curves._repr_png_().startswith(b"\x89PNG")
    assert found[0].curves._repr_png_().startswith(b"\x89PNG") and "Picture" in repr(found[0].curves)
    with pytest.raises(fedhassle.UserError, match="nothing to compare"):
        fedhassle.compare()


# Scripts and notebooks

DEFINITION = """
from dataclasses import dataclass
import fedhassle
from fedhassle.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Ours(FedAvg):
    strength: float = 0.5

    def local_optimiser(self, decay=None):
        return super().local_optimiser(decay)
"""


def python(folder, *words, text=None):
    """Runs Python in a folder; returns its code and what it wrote."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=text, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def training(images):
    """A line that trains the class of the definition."""
    return (
        f"fedhassle.run('paper', { ({**FAST, 'data': str(images)}) }, method=Ours, out='run', quiet=True)\n"
    )


def test_a_class_of_a_script_is_named_by_its_file(images, tmp_path, monkeypatch):
    """It can be resumed if it does not train when it is imported; or else there is one line."""
    monkeypatch.chdir(tmp_path)
    for name, guard in (("fine", 'if __name__ == "__main__":'), ("bare", "if True:")):
        trains = training(images).replace("'run'", repr(name))
        text = f"{DEFINITION}\n{guard}\n    {trains}"
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
        assert python(tmp_path, f"{name}.py") == (0, "")
        assert summary_of(tmp_path / name)["method"] == f"{name}.py:Ours"
    assert call("resume", "fine", "rounds=3")[::2] == (0, "")
    code, _, err = call("resume", "bare", "rounds=3")
    assert code == 2 and "bare.py starts to train when it is imported" in err
    assert err.count("\n") == 1 and summary_of(tmp_path / "bare")["rounds"] == 2


NOTEBOOK = """
import linecache, sys
del sys.modules["__main__"].__file__
for k, source in enumerate(CELLS):  # as IPython does
    name = f"<cell {k}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), vars(sys.modules["__main__"]))
"""


def notebook(folder, *cells):
    """Runs cells as a notebook does: in a main module without a file, whose lines are known."""
    (folder / "cells.py").write_text(NOTEBOOK.replace("CELLS", repr(cells)), "utf-8")
    return python(folder, "cells.py")


def test_a_class_of_a_notebook_trains_and_resumes_there_only(images, tmp_path, monkeypatch):
    use = "print(found.model.about['method']['name'], fedhassle.run(out='run'))"
    code, out = notebook(tmp_path, DEFINITION, f"found = {training(images)}", use)
    assert code == 0 and out.startswith("__main__:Ours Result('run'"), out
    assert (tmp_path / "run" / "own_code.txt").read_text("utf-8").startswith("__main__:Ours ")
    monkeypatch.chdir(tmp_path)
    code, _, err = call("resume", "run", "rounds=3")
    assert code == 2 and err.count("\n") == 1
    assert "method Ours was defined in a notebook or session, not in a file: define it there again" in err
    (tmp_path / "run" / "summary.json").unlink()
    code, out = notebook(tmp_path, DEFINITION, "print(fedhassle.run(out='run', quiet=True))")
    assert code == 0 and out.startswith("Result('run'"), out
    (tmp_path / "run" / "summary.json").unlink()
    for changed in (
        DEFINITION.replace("0.5", "0.25"),
        DEFINITION.replace("optimiser(decay)", "optimiser(1.0)"),
    ):
        code, out = notebook(tmp_path, changed, "fedhassle.run(out='run')")
        assert code == 1 and "__main__ has changed since run began" in out


def test_code_whose_source_is_unknown_is_refused(images, tmp_path):
    code, out = python(tmp_path, "-", text=DEFINITION + training(images))
    assert code == 1 and "the source of Ours cannot be read here" in out


def test_workers_need_code_in_a_file(images, tmp_path):
    pytest.importorskip("ray")
    code, out = notebook(tmp_path, DEFINITION, training(images).replace("quiet=True", "workers=2, threads=1"))
    assert code == 1 and "workers cannot import Ours" in out
