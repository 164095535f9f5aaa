"""A run that goes on to more rounds is the run that had so many from the start, or is refused."""

import shutil

import pytest
from small import assert_same_result, call, cut, metrics_of, summary_of

from fedhassle.runs.resume import reopen
from fedhassle.runs.train import train_run


def trained(words, folder):
    code, _, err = call("run", *words, "--out", folder)
    assert (code, err) == (0, "")
    return folder


@pytest.mark.parametrize("rounds", [1, 4, 5])  # before: with and without an evaluation of its last round only
def test_a_finished_run_goes_on_to_the_same_bits(rounds, eight_rounds, whole, tmp_path):
    folder = trained([*eight_rounds, f"rounds={rounds}"], tmp_path / "run")
    assert metrics_of(folder)[-1]["round"] == summary_of(folder)["rounds"] == rounds
    code, out, err = call("resume", folder, "rounds=8")
    assert (code, err) == (0, "") and f"had {rounds} rounds and continues to 8" in " ".join(out.split())
    assert_same_result(folder, whole)


@pytest.mark.parametrize(
    "more",
    [
        ("method=rscfed",),  # clients keep something
        ("method=fedavg", "method.average=0.9", "method.schedule=cosine", "method.horizon=6"),
        ("method=hassle+", "method.start=2", "method.unlabelled_epochs=1"),
        ("method=mixmatch", "method.rounds=3"),
        ("method=central",),
    ],
    ids=lambda more: more[0],
)
def test_other_methods_go_on_to_the_same_bits(more, without_residuals, tmp_path):
    words = [*without_residuals, *more]
    folder = trained([*words, "rounds=3"], tmp_path / "run")
    assert call("resume", folder, "rounds=5")[0] == 0
    assert_same_result(folder, trained([*words, "rounds=5"], tmp_path / "whole"))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ("method=hassle+", "method.unlabelled_epochs=1"),
            "method.start is 1 in a run of 4 rounds and 2 in one of 8",
        ),
        (
            ("method=fedavg", "method.schedule=cosine"),
            "method.horizon is 4 in a run of 4 rounds and 8 in one of 8",
        ),
        (("method=fedavg", "method.schedule=step", "method.average=0.5"), "method.horizon is 4"),
        (("method=mixmatch",), "method.rounds is 4 in a run of 4 rounds"),
    ],
    ids=["start", "cosine", "step", "ramp"],
)
def test_a_run_whose_first_rounds_depend_on_their_number_is_left_as_it_is(
    more, why, without_residuals, tmp_path
):
    folder = trained([*without_residuals, *more], tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = call("resume", folder, "rounds=8")
    assert (code, out) == (2, "") and "cannot go on from 4 to 8 rounds" in err and why in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_that_was_cut_goes_on_further(eight_rounds, whole, tmp_path):
    cut([*eight_rounds, "rounds=6"], tmp_path / "run", 5)
    assert call("resume", tmp_path / "run", "rounds=8")[0] == 0
    assert_same_result(tmp_path / "run", whole)


@pytest.mark.parametrize("rounds", range(4))
def test_a_longer_run_that_was_cut_resumes(rounds, eight_rounds, whole, tmp_path):
    """From then on it is a run of eight rounds; after round 5 it has to go back to round 4."""
    folder = trained([*eight_rounds, "rounds=5"], tmp_path / "run")
    steps = train_run(reopen(folder, rounds=8))
    for _ in range(rounds):
        next(steps)
    steps.close()
    assert call("resume", folder, "rounds=8")[0] == 0
    assert_same_result(folder, whole)


@pytest.mark.parametrize("config", [5, 8])
def test_a_kill_between_two_files_loses_nothing(config, eight_rounds, whole, tmp_path):
    """The summary is removed first, then config.toml changes, then rounds are trained."""
    folder = trained([*eight_rounds, "rounds=5"], tmp_path / "run")
    (folder / "summary.json").unlink()
    text = (folder / "config.toml").read_text("utf-8")
    (folder / "config.toml").write_text(text.replace("\nrounds = 5\n", f"\nrounds = {config}\n"), "utf-8")
    assert call("resume", folder)[0] == 0
    assert summary_of(folder)["rounds"] == config
    assert call("resume", folder, "rounds=8")[0] == 0
    assert_same_result(folder, whole)


def test_a_config_with_more_rounds_is_refused_where_the_method_depends_on_them(without_residuals, tmp_path):
    cut([*without_residuals, "method=hassle+"], tmp_path / "run", 3)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text("utf-8").replace("\nrounds = 4\n", "\nrounds = 8\n"), "utf-8")
    code, _, err = call("resume", tmp_path / "run")
    assert code == 2 and "cannot go on from 4 to 8 rounds" in err


def test_a_run_with_as_many_rounds_is_finished(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    code, out, _ = call("resume", tmp_path / "run", "rounds=8")
    assert code == 0 and "is finished" in out
    assert_same_result(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rounds=7", "is a run of 8 rounds: it cannot be cut to 7"),
        ("rounds=x", "rounds: expected a whole number, got 'x'"),
        ("rounds=0", "rounds"),
        ("seed=1", "seed cannot change when a run is resumed, only rounds can"),
        ("method.lr=1", "method.lr cannot change when a run is resumed"),
        ("data=other.npz", "data cannot change when a run is resumed"),
    ],
)
def test_nothing_else_can_change(word, said, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    code, out, err = call("resume", whole, word)
    assert (code, out) == (2, "") and said in err
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_folder_may_have_an_equals_sign_in_its_name(eight_rounds, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cut(eight_rounds, tmp_path / "lr=0.1", 3)
    assert call("resume", "lr=0.1")[0] == 0
    assert_same_result(tmp_path / "lr=0.1", whole)


def test_rounds_alone_name_no_run():
    code, _, err = call("resume", "rounds=8")
    assert code == 2 and "name the folder of a run" in err
