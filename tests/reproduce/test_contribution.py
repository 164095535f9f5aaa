"""A result from another machine: accepted as it was made, refused when any part of it does not fit."""

import copy
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import ledgers
import pytest
from small import call

from fedhassle.errors import UserError
from fedhassle.reproduce import contribution
from fedhassle.reproduce.contribution import check, keep, known_runs, stored
from fedhassle.reproduce.experiment import cells, experiments, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.runs.record import final_scores
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

ROOT = Path(__file__).parents[2]

TINY = f"""
title = "Tiny"
seeds = 1
{ledgers.FEW}
method.residual_steps = 1
method.average = 0.5

[[axis]]
name = "means"
choices = [{{ id = "plain" }}, {{ id = "means", averaged = true }}]
"""
OTHER = TINY.replace(
    'choices = [{ id = "plain" }, { id = "means", averaged = true }]', 'choices = [{ id = "x" }]'
)


@pytest.fixture(scope="module")
def made(images, tmp_path_factory):
    """Two experiments that share a run, and that run: its file in a ledger, and its folder."""
    home = tmp_path_factory.mktemp("made")
    tiny, other = ledgers.experiment(home, TINY, images), home / "other.toml"
    other.write_text(OTHER.replace("IMAGES", str(images)))
    code, out, err = call("reproduce", tiny, "--results", home / "ledger", "--runs", home / "runs")
    assert (code, err) == (0, ""), out
    (file,), (summary,) = (home / "ledger").rglob("*.json"), (home / "runs").rglob("summary.json")
    return SimpleNamespace(tiny=tiny, other=other, file=file, folder=summary.parent)


@pytest.fixture(scope="module")
def known(made):
    """The cells of both experiments."""
    return known_runs(
        [cell for path in (made.tiny, made.other) for cell in cells(read_experiment(str(path)))]
    )


def write(path, content):
    path.write_text(json.dumps(content), "utf-8")
    return path


@pytest.fixture(scope="module")
def private(images, tmp_path_factory):
    """A run with noise: its cells, and its summary."""
    home = tmp_path_factory.mktemp("private")
    text = OTHER.replace("method.average = 0.5", "privacy.epsilon = 50.0\nprivacy.clip = 1.0")
    tiny = ledgers.experiment(home, text, images)
    code, out, err = call("reproduce", tiny, "--results", home / "ledger", "--runs", home / "runs")
    assert (code, err) == (0, ""), out
    (file,) = (home / "ledger").rglob("*.json")
    return known_runs(cells(read_experiment(str(tiny)))), json.loads(file.read_text("utf-8"))


@pytest.fixture
def changed(made, tmp_path):
    """Writes the summary with one entry replaced, by its dotted key; `...` removes the entry."""

    def write_changed(key, value):
        summary = json.loads(made.file.read_text("utf-8"))
        *tables, last = [int(part) if part.lstrip("-").isdigit() else part for part in key.split("/")]
        table = summary
        for part in tables:
            table = table[part]
        if value is ...:
            del table[last]
        else:
            table[last] = value
        return write(tmp_path / "theirs.json", summary)

    return write_changed


def refusal(path, known):
    """The sentence with which a file is refused; it begins with the file."""
    with pytest.raises(UserError) as caught:
        check(path, known)
    said = str(caught.value)
    assert said.startswith(str(path)) and type(caught.value) is UserError
    return said.removeprefix(str(path))


def test_a_run_as_it_was_made_belongs_to_the_cells_of_both_experiments(made, known):
    for path in (made.file, made.folder, made.folder / "summary.json"):
        found = check(path, known)
        assert list(map(str, found.cells)) == ["tiny plain-0", "tiny means-0", "other x-0"]
        assert found.unchecked is None and found.path == path


def test_a_file_of_a_ledger_is_kept_as_it_is(made, known, tmp_path):
    """Also the number of runs that shared its device, by which seconds are divided."""
    theirs = json.loads(made.file.read_text("utf-8")) | {"together": 3}
    ledger = Ledger(tmp_path / "ours")
    path = keep(check(write(tmp_path / "a.json", theirs), known), ledger)
    assert path.relative_to(ledger.folder) == made.file.relative_to(made.file.parents[1])
    assert json.loads(path.read_text("utf-8")) == theirs
    alone = Ledger(tmp_path / "alone")
    assert json.loads(keep(check(made.folder, known), alone).read_text("utf-8"))["together"] == 1


def test_a_run_on_a_gpu_is_checked_on_a_machine_without_one(made, known, tmp_path):
    theirs = json.loads(made.file.read_text("utf-8"))
    theirs["settings"] |= {"device": "cuda", "precision": "bf16", "compile": True, "threads": 16}
    assert check(write(tmp_path / "gpu.json", theirs), known).cells


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format", 2, "format: Input should be less than or equal to 1"),
        ("note", "hello", "note: Extra inputs are not permitted"),
        ("versions", ..., "versions: Field required"),
        ("versions/torch", ..., "versions.torch: Field required"),
        ("versions/code", 5, "versions.code: Input should be a valid string"),
        ("hardware", ..., "hardware: Field required"),
        ("hardware/threads", 0, "hardware.threads: Input should be greater than or equal to 1"),
        ("hardware/cpu", "\x1b[2J", "hardware.cpu: String should match"),
        ("hardware/cpu", "\ud800", "hardware.cpu: "),
        ("modes/\ud800", "x", "modes."),
        ("together", 0, "together: Input should be greater than or equal to 1"),
        ("split_hash", None, "split_hash: Input should be a valid string"),
        ("class_accuracy", {"cat": 1.2}, "class_accuracy.cat: Input should be less than or equal to 1"),
        ("seconds", math.inf, "seconds: Input should be a finite number"),
        ("settings/rounds", "4", "settings.rounds: Input should be a valid integer"),
        ("settings/device", "tpu", "settings.device: Input should be 'auto', 'cpu' or 'cuda'"),
        ("settings/data", "cifar10", "settings.data: Input should be a valid dictionary"),
        ("history/0/accuracy/EM", 1.5, "history.0.accuracy.EM: Input should be less than or equal to 1"),
        ("history/0/accuracy/EM", -0.1, "history.0.accuracy.EM: Input should be greater than or equal to 0"),
        ("history/0/accuracy/EM", math.nan, "history.0.accuracy.EM: Input should be a finite number"),
        ("history/0/accuracy/EM", 10**400, "history.0.accuracy.EM: Input should be a valid number"),
        ("history/0/loss/w_S", math.inf, "history.0.loss.w_S: Input should be a finite number"),
        (
            "history/0/bytes_up/full",
            -1,
            "history.0.bytes_up.full: Input should be greater than or equal to 0",
        ),
        ("history/0/bytes_down", ..., "history.0.bytes_down: Field required"),
        ("history/0/clients/partial", ..., "history.0.clients.partial: Field required"),
        ("history/0/pseudo_label_share", 2, "history.0.pseudo_label_share: Input should be less than"),
    ],
)
def test_an_entry_that_is_missing_or_out_of_range_is_named(key, value, reason, changed, known):
    assert refusal(changed(key, value), known).startswith(f" is not the summary of a run: {reason}")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("settings_hash", "0" * 16, "has the settings hash 0000000000000000, but its settings give"),
        ("settings/method/lr", 0.2, "but its settings give"),
        ("settings/split/alpha", 0.2, "but its settings give"),
        ("settings/method/nonsense", 1, "has settings that are not valid in this version: unknown setting"),
        ("settings/method/lr", "fast", "has settings that are not valid in this version: method.lr"),
        ("settings/data/folder", "/elsewhere", "names a folder of its machine"),
        ("seed", 1, "has seed 1, but its settings give 0"),
        ("settings/seed", 1, "has seed 0, but its settings give 1"),
        ("rounds", 5, "has rounds 5, but its settings give 4"),
        ("method", "fedavg", "has method fedavg, but its settings give hassle"),
        ("data", "../up", "has data ../up, but its settings give small.npz"),
        ("headline", "SM", "has headline SM, but its settings give EM"),
        ("split_hash", "0" * 64, "has the split 000000000000…, but its settings give"),
        ("history/1", ..., "has other rounds in its history than every 1 up to 4"),
        ("history/1/round", 1, "has other rounds in its history than every 1 up to 4"),
        ("history/-1/accuracy/labels", 0.5, "has other predictions in its history than in its accuracy"),
        ("seconds", 1e6, "took 1000000.0 seconds, but those of its history add up to"),
        ("accuracy/EM/last", 0.999, "has accuracy.EM.last 0.999, but its history gives 0."),
        ("accuracy/EM/best", 0.999, "has accuracy.EM.best 0.999, but its history gives 0."),
        ("accuracy/UM/mean_of_last", 0.999, "has accuracy.UM.mean_of_last 0.999, but its history gives 0."),
    ],
)
def test_entries_that_do_not_agree_are_named(key, value, reason, changed, known):
    assert reason in refusal(changed(key, value), known)


def test_a_mean_that_fits_other_accuracies_only_is_refused(made, known, tmp_path):
    """The mean of four evaluations, moved by a thousandth in one of them."""
    theirs = json.loads(made.file.read_text("utf-8"))
    accuracies = [line["accuracy"]["EM"] for line in theirs["history"]]
    theirs["history"][0]["accuracy"]["EM"] = accuracies[0] + (0.001 if accuracies[0] < 0.5 else -0.001)
    assert f"has accuracy.EM.mean_of_last {math.fsum(accuracies) / 4}" in refusal(
        write(tmp_path / "a.json", theirs), known
    )


def test_a_run_without_the_prediction_that_a_table_shows_is_refused(made, known, tmp_path):
    theirs = json.loads(made.file.read_text("utf-8"))
    for table in (theirs, *theirs["history"]):
        table["accuracy"] = {k: v for k, v in table["accuracy"].items() if not k.endswith(" averaged")}
    said = refusal(write(tmp_path / "a.json", theirs), known)
    assert said == " lacks the prediction 'EM averaged', which tiny means-0 shows"


def test_another_seed_than_those_of_the_experiment_is_refused(made, known, tmp_path):
    theirs = json.loads(made.file.read_text("utf-8"))
    theirs["seed"] = theirs["settings"]["seed"] = 7
    said = refusal(write(tmp_path / "a.json", theirs), known)
    assert said == " belongs to no experiment: tiny plain has no seed 7"


def test_settings_that_no_experiment_has_are_refused(made, tmp_path):
    """The same method on the same images, for more rounds."""
    longer = made.tiny.with_name("longer.toml")
    longer.write_text(made.tiny.read_text().replace("rounds = 4", "rounds = 5"))
    said = refusal(made.file, known_runs(cells(read_experiment(str(longer)))))
    assert said == " belongs to no experiment: none has a run with its settings"


@pytest.mark.parametrize("key", ["method/name", "net"])
def test_code_that_a_file_names_is_not_imported(key, changed, known, module, tmp_path):
    name = module("intruder", f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert f"={name}:Method" in refusal(changed(f"settings/{key}", f"{name}:Method"), known)
    assert not (tmp_path / "ran").exists()


def test_a_run_without_the_metrics_of_an_experiment_is_refused_for_them(made, module):
    name = module("own_measure", "def errors(seen): return {'errors': 0}")
    measured = made.tiny.with_name("measured.toml")
    measured.write_text(made.tiny.read_text().replace("rounds = 4", f'rounds = 4\nmetrics = "{name}:errors"'))
    here = known_runs(cells(read_experiment(str(measured))))
    assert refusal(made.file, here).endswith(" and method=hassle and no metrics")


def test_files_that_a_file_names_are_not_opened(made, changed, known, images, tmp_path, monkeypatch):
    """Copies of the images and of the split, under names that no experiment has."""
    copied, split = tmp_path / "copy.npz", made.folder / "split.npz"
    shutil.copy(images, copied)
    monkeypatch.setattr("numpy.load", None)
    assert f"none has data={copied}" in refusal(changed("settings/data/name", str(copied)), known)
    assert f"split.file={split}" in refusal(changed("settings/split", {"file": str(split)}), known)


def test_a_file_that_nests_deeply_is_refused(changed, known):
    nested = "x"
    for _ in range(900):
        nested = [nested]
    assert refusal(changed("settings/split/labels", nested), known)


def test_a_file_that_is_too_large_is_not_read(made, known, monkeypatch):
    size = made.file.stat().st_size
    monkeypatch.setattr(contribution, "LARGEST", size)
    assert check(made.file, known)
    monkeypatch.setattr(contribution, "LARGEST", size - 1)
    assert f"is larger than {size - 1:,} bytes" in refusal(made.file, known)


def test_a_pipe_is_not_waited_for(known, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert refusal(tmp_path / "pipe.json", known) == " is not a regular file"


def test_a_missing_file_is_named(known, tmp_path):
    assert refusal(tmp_path / "none.json", known) == " does not exist"


def split_check(data, folder):
    """Checks a split that nobody has, of a run on a named data set."""
    settings = resolve(request("paper", {"data": data}))
    return contribution.require_split(folder, {"split_hash": "f" * 64}, settings)


def test_a_split_is_checked_only_where_the_labels_are_here(tmp_path, monkeypatch):
    """CIFAR-10 is not downloaded for it; a fifth of Fashion-MNIST is shipped."""
    monkeypatch.setenv("FEDHASSLE_DATA", str(tmp_path))
    assert split_check("cifar10", tmp_path) == "cifar10" and not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="has the split ffffffffffff…"):
        split_check("fmnist-mini", tmp_path)


def another_result(summary):
    """The same run with another accuracy after its last round, and the scores that follow from it."""
    theirs = copy.deepcopy(summary)
    final = theirs["history"][-1]["accuracy"]["SM"]
    theirs["history"][-1]["accuracy"]["SM"] = final + 0.01 if final < 0.5 else final - 0.01
    theirs["accuracy"]["SM"] = final_scores(theirs["history"])["SM"]
    return theirs


def test_a_result_that_the_ledger_has_is_found_and_another_one_is_refused(made, known, tmp_path):
    ledger, found = Ledger(tmp_path / "ours"), check(made.file, known)
    assert stored(found, ledger) is None
    path = keep(found, ledger)
    assert stored(check(made.folder, known), ledger) == path
    theirs = another_result(found.summary)
    other = write(tmp_path / "other.json", theirs)
    with pytest.raises(UserError) as caught:
        stored(check(other, known), ledger)
    ours, moved = (one["accuracy"]["SM"]["last"] for one in (found.summary, theirs))
    assert (
        str(caught.value) == f"{other} has accuracy.SM.last {moved}, but {path} has {ours} for the same run"
    )


# The commands


@pytest.fixture
def options(made, tmp_path):
    """Both experiments, and a ledger."""
    return "--experiment", made.tiny, "--experiment", made.other, "--results", tmp_path / "ours"


CELLS = "tiny plain-0, tiny means-0, other x-0"


def test_results_are_added_once_and_their_cells_are_named(made, options, tmp_path):
    path = tmp_path / "ours" / "small.npz" / made.file.name
    code, out, err = call("results", "add", made.folder, made.file, *options)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{made.folder} added as {path}: {CELLS}",
        f"{made.file} already there as {path}: {CELLS}",
    ]
    assert json.loads(path.read_text("utf-8")) == json.loads(made.file.read_text("utf-8"))
    code, out, _ = call("reproduce", made.other, "--results", tmp_path / "ours", "--runs", tmp_path / "runs")
    assert code == 0 and "to make" not in out and not (tmp_path / "runs").exists()


def test_a_refused_file_stops_no_other_and_the_exit_code_is_1(made, options, tmp_path):
    bad, folder = write(tmp_path / "bad.json", {}), tmp_path / "empty"
    folder.mkdir()
    code, out, err = call("results", "add", bad, folder, "x" * 5000, made.file, *options)
    lines = out.splitlines()
    assert (code, err) == (1, "") and len(lines) == 5
    assert lines[0].startswith(f"refused: {bad} is not the summary of a run: method: ")
    assert lines[1] == f"refused: {folder / 'summary.json'} does not exist"
    assert "File name too long" in lines[2] and len(lines[2]) < 600
    assert lines[3].startswith(f"{made.file} added as ") and lines[4] == "3 of 4 files refused"


def test_another_result_of_a_run_never_replaces_the_first(made, options, tmp_path):
    assert call("results", "add", made.file, *options)[0] == 0
    (path,) = (tmp_path / "ours").rglob("*.json")
    before = path.read_bytes()
    other = write(tmp_path / "other.json", another_result(json.loads(before)))
    code, out, _ = call("results", "add", other, *options)
    assert code == 1 and f"refused: {other} has accuracy.SM.last " in out and f"but {path} has " in out
    assert [*(tmp_path / "ours").rglob("*.json")] == [path] and path.read_bytes() == before


def test_checking_writes_nothing(made, options, tmp_path):
    code, out, err = call("results", "check", made.file, *options)
    assert (code, out, err) == (0, f"{made.file} valid: {CELLS}\n", "")
    assert not (tmp_path / "ours").exists()


def test_a_run_of_no_built_in_experiment_is_refused(made, images, tmp_path):
    code, out, _ = call("results", "add", made.file, "--results", tmp_path / "ours")
    assert code == 1 and not list((tmp_path / "ours").rglob("*.json"))
    assert out.splitlines()[0] == (
        f"refused: {made.file} belongs to no experiment: none has data={images} and method=hassle"
    )


def test_a_line_about_a_file_shows_no_control_characters(options, tmp_path):
    name = "\x1b[2J" + "x" * 1000
    _, out, _ = call("results", "check", write(tmp_path / "a.json", {"accuracy": {name: 1}}), *options)
    assert all(len(line) < 600 and line.isprintable() for line in out.splitlines())


def test_the_results_of_this_repository_that_the_tables_show_are_valid():
    """As many as there are; those of the README are of an experiment in docs/."""
    own, ledger = ROOT / "docs" / "ten-seeds.toml", Ledger(ROOT / "results")
    every = [cell for name in (*experiments(), str(own)) for cell in cells(read_experiment(name))]
    runs = known_runs(every)
    for cell in every:
        path = ledger.path(cell.identity)
        assert path is None or cell in check(path, runs).cells


def test_a_run_with_noise_is_accepted(private, tmp_path):
    known, summary = private
    assert check(write(tmp_path / "theirs.json", summary), known).summary["privacy"]["epsilon"] <= 50


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (None, "has no noise, but its settings say otherwise"),
        ({"epsilon": 1.0}, "has privacy.epsilon 1.0, but its history ends with"),
        ({"unit": "nobody"}, "privacy.unit: Input should be 'site' or 'sample'"),
    ],
)
def test_a_guarantee_that_does_not_fit_is_refused(entry, reason, private, tmp_path):
    known, summary = private
    theirs = {key: value for key, value in summary.items() if key != "privacy"}
    if entry is not None:
        theirs["privacy"] = summary["privacy"] | entry
    assert reason in refusal(write(tmp_path / "theirs.json", theirs), known)


def test_more_than_the_budget_is_refused(private, tmp_path):
    known, summary = private
    theirs = copy.deepcopy(summary)
    theirs["privacy"]["epsilon"] = theirs["history"][-1]["epsilon"] = 60.0
    assert "spends ε = 60.0, more than the 50.0" in refusal(write(tmp_path / "theirs.json", theirs), known)


def test_noise_that_the_settings_do_not_name_is_refused(private, made, known, tmp_path):
    theirs = json.loads(made.file.read_text("utf-8")) | {"privacy": private[1]["privacy"]}
    assert "has noise, but its settings say otherwise" in refusal(write(tmp_path / "a.json", theirs), known)
