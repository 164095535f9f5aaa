"""Checkpoints with crafted metadata and valid checksums: a run goes on, or one line says what is wrong."""

import json

import pytest
import small
from crafted import DROPPED, ODD, changed, written
from small import call, checkpoints, cut

from fedhassle.engine.tensor_files import read_arrays
from fedhassle.runs import train
from fedhassle.runs.checkpoints import load_checkpoint

LINE = ("history", 3)
FIELDS = [("round",), ("history",), ("settings",), ("kept",)]
ENTRIES = [
    *(*FIELDS, LINE, ("settings", "rounds"), ("settings", "\x1b[2J\n"), ("kept", "\ud800")),
    *((*LINE, key) for key in ("round", "accuracy", "loss", "bytes_up", "clients", "seconds", "test")),
    *((*LINE, key) for key in ("pseudo_label_accuracy", "class_accuracy", "unheard_of")),
    *((*LINE, key, "EM") for key in ("accuracy", "class_accuracy")),
]


@pytest.fixture(scope="module")
def trained(eight_rounds, tmp_path_factory):
    """A run after its last round, without a result, and its last checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    cut(eight_rounds, folder, 8)
    return folder, {path: path.read_bytes() for path in checkpoints(folder)}


def craft(trained, at, value):
    """Writes the last checkpoint with another value of one entry, and removes the result."""
    folder, files = trained
    (folder / "summary.json").unlink(missing_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
    arrays, about = read_arrays(path)
    return written(path, arrays, json.dumps(changed(about, at, value)))


@pytest.fixture
def resume(trained, monkeypatch):
    """A function that resumes the run, and asserts that it ends well or in one line."""
    folder, _ = trained
    monkeypatch.setattr(train, "draw_curves", lambda *_: None)  # it takes a second, and may fail

    def resumed():
        code, out, err = call("resume", folder)
        assert (code, err) == (0, "") or (code == 2 and len(err.splitlines()) == 1 and len(err) < 1500), err
        assert "\x1b" not in out + err
        return out

    return resumed


@pytest.mark.parametrize("at", FIELDS, ids=".".join)
def test_a_run_goes_on_without_an_entry(trained, resume, at):
    path = craft(trained, at, DROPPED)
    out = " ".join(resume().split())
    missing = f"is not a checkpoint: {at[0]}: Field required; falling back to the checkpoint before it"
    assert (missing in out) is (at[0] in ("round", "history"))
    assert load_checkpoint(path.parent, small.CPU).t == 8


@pytest.mark.parametrize("at", ENTRIES, ids=lambda at: ascii(".".join(map(str, at))))
def test_an_odd_entry_ends_in_one_line(trained, resume, at):
    """A run is resumed only from what the check lets pass; other checkpoints are known to be left."""
    for value in ODD:
        path = craft(trained, at, value)
        if load_checkpoint(path.parent, small.CPU).t == 8:
            resume()


def test_a_checkpoint_under_the_name_of_another_round_is_not_used(trained, resume):
    path = craft(trained, ("round",), 6)
    assert "is not a checkpoint of that round, but of round 6" in " ".join(resume().split())
    assert load_checkpoint(path.parent, small.CPU).t == 8


def test_metrics_of_another_method_are_refused(trained):
    craft(trained, (*LINE, "accuracy"), {"other": 0.5})
    code, _, err = call("resume", trained[0])
    assert code == 2 and "lacks accuracies of 'EM': remove " in err
