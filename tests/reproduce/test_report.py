"""Comparisons of finished runs: the table, the picture, and what is refused."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from small import PNG, call, summary_of

from fedhassle.runs import curves
from fedhassle.runs.seeds import SeedGroup


@pytest.fixture(scope="module")
def runs(without_residuals, tmp_path_factory):
    """Folders of finished runs: HASSLE with three seeds, FedAvg with two settings."""
    place = tmp_path_factory.mktemp("runs")
    words = [*without_residuals, "rounds=3", "evaluate_every=1"]
    wanted = {f"hassle-{seed}": ("method.residual_steps=2", f"seed={seed}") for seed in range(3)}
    wanted |= {"fedavg": ("method=fedavg",), "fedavg-slow": ("method=fedavg", "method.lr=0.01")}
    for name, more in wanted.items():
        assert call("run", *words, *more, "--out", place / name)[0] == 0
    return place


def percent(values):
    """Mean ± sample standard deviation in percent, as tables have it."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"


def rows_of(out):
    """The cells of a table's rows; what is said beneath it is left out."""
    table = out.partition("\nover ")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if line.strip()]


def figures_of(out, prediction):
    """The numbers behind a prediction in its row."""
    (row,) = [row for row in rows_of(out) if prediction in row]
    return row[row.index(prediction) + 1 :]


@pytest.fixture
def wide(monkeypatch):
    """A terminal with room for every column."""
    monkeypatch.setattr("fedhassle.cli.train.console", Console(width=220))


def test_runs_of_different_methods_stand_side_by_side(runs, wide, tmp_path):
    code, out, err = call("compare", runs / "hassle-0", runs / "fedavg", "--picture", tmp_path / "both.png")
    assert (code, err) == (0, "")
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)
    for name in ("hassle-0", "fedavg"):
        summary = summary_of(runs / name)
        (first,) = [row for row in rows_of(out) if row[0].startswith(summary["method"])]
        assert first[1:3] == ["1", next(iter(summary["accuracy"]))]
        for prediction, score in summary["accuracy"].items():
            expected = [percent([score[figure]]) for figure in ("mean_of_last", "best")]
            assert figures_of(out, prediction)[:2] == expected
    assert str(tmp_path / "both.png") in out
    assert out.startswith("accuracy in %, mean ± std over seeds, on small.npz")


def test_seeds_of_one_setting_become_mean_and_standard_deviation(runs, wide, tmp_path):
    folders = [runs / f"hassle-{seed}" for seed in range(3)]
    code, out, _ = call("compare", *folders, runs / "fedavg", "--picture", tmp_path / "x.png")
    assert code == 0
    scores = [summary_of(folder)["accuracy"] for folder in folders]
    for prediction in ("SM", "UM", "EM", "w_S", "w_U"):
        expected = percent([score[prediction]["mean_of_last"] for score in scores])
        assert figures_of(out, prediction)[0] == expected and " ± " in expected
    assert "different seeds" in out  # of FedAvg there is one
    assert (
        "different seeds"
        not in call("compare", folders[0], runs / "fedavg", "--picture", tmp_path / "x.png")[1]
    )


def test_differences_are_taken_seed_by_seed(runs, wide, tmp_path):
    """Three seeds against one: on the one that both have, however the rest came out."""
    folders = [*(runs / f"hassle-{seed}" for seed in range(3)), runs / "fedavg"]
    words = ("compare", *folders, "--picture", tmp_path / "x.png", "--against")
    first, other = (summary_of(runs / name) for name in ("hassle-0", "fedavg"))
    gap = 100 * (first["accuracy"]["EM"]["mean_of_last"] - other["accuracy"]["model"]["mean_of_last"])
    code, out, _ = call(*words, "fedavg")
    assert code == 0 and "\nover fedavg model, seed by seed:\n  hassle EM: " in out
    assert f"{'−' if gap < 0 else '+'}{abs(gap):.2f}, {int(gap > 0)} of 1 above" in out
    code, _, err = call(*words, "fedprox")
    assert code == 2 and "--against 'fedprox'" in err


def test_two_settings_of_one_method_are_told_apart_by_what_differs(runs, wide, tmp_path):
    code, out, _ = call("compare", runs / "fedavg", runs / "fedavg-slow", "--picture", tmp_path / "x.png")
    assert code == 0
    assert re.search(r"lr=0\.1\b", out) and re.search(r"lr=0\.01\b", out)
    assert "batch=" not in out  # what they share is not said


def test_folders_and_summaries_are_the_same(runs, tmp_path):
    files = [runs / name / "summary.json" for name in ("hassle-0", "fedavg")]
    by_file = call("compare", *files, "--picture", tmp_path / "x.png")
    by_folder = call("compare", *(file.parent for file in files), "--picture", tmp_path / "x.png")
    assert by_file == by_folder and by_file[0] == 0


def test_a_summary_is_enough(runs, tmp_path):
    """A table of results is made of summaries alone, wherever they lie and whatever they are called."""
    for name in ("hassle-0", "fedavg"):
        shutil.copy(runs / name / "summary.json", tmp_path / f"{name}.json")
    picture = tmp_path / "x.png"
    alone = call("compare", tmp_path / "hassle-0.json", tmp_path / "fedavg.json", "--picture", picture)
    assert alone == call("compare", runs / "hassle-0", runs / "fedavg", "--picture", picture)


def test_no_figure_of_a_comparison_is_cut(runs, tmp_path):
    """On the 80 columns that a pipe or a small terminal has."""
    folders = [runs / name for name in ("hassle-0", "hassle-1", "fedavg", "fedavg-slow")]
    _, out, _ = call("compare", *folders, "--picture", tmp_path / "x.png")
    assert "…" not in out


def test_no_name_is_broken_within_a_word(runs, tmp_path):
    """On 80 columns; those of two data sets say which, in place of the title."""
    for name in ("hassle-0", "fedavg", "fedavg-slow"):
        summary = summary_of(runs / name)
        summary["settings"]["data"]["name"] = summary["data"] = (
            "fmnist-mini" if name == "fedavg" else "cifar100"
        )
        summary["method"] = "fixmatch-global" if name != "hassle-0" else "hassle"
        (tmp_path / f"{name}.json").write_text(json.dumps(summary))
    _, out, _ = call("compare", *sorted(tmp_path.glob("*.json")), "--picture", tmp_path / "x.png")
    words = out.partition("\nover ")[0].split()
    assert words.count("fixmatch-global") == 2 and words.count("data=cifar100") == 2
    assert {"data=fmnist-mini", "lr=0.1", "lr=0.01"} <= set(words)
    assert out.startswith("accuracy in %, mean ± std over seeds\n") and "…" not in out


def test_a_run_given_twice_is_one_seed(runs, wide, tmp_path):
    once = call("compare", runs / "fedavg", "--picture", tmp_path / "x.png")[1].splitlines()
    twice = call("compare", runs / "fedavg", runs / "fedavg", "--picture", tmp_path / "x.png")[1].splitlines()
    assert twice[:-2] == once[:-1] and twice[-1] == once[-1]
    assert twice[-2] == "left out, with the same settings and seed as another run: 1 run"


@pytest.mark.parametrize(
    ("seeds", "said"), [((1,), ""), ((1, 1), ""), ((3, 3), ", 3 seeds"), ((3, 1), ", 1 to 3 seeds")]
)
def test_the_picture_says_how_many_seeds_there_are(seeds, said):
    assert curves.seeds_in_title([SeedGroup("x", ({},) * n) for n in seeds]) == said


@pytest.mark.filterwarnings("error")  # matplotlib warns where labels leave the curves no room
def test_many_long_names_are_told_apart_and_leave_room_for_the_curves(runs, tmp_path, monkeypatch):
    """Twelve groups, more than there are colours."""
    run = summary_of(runs / "fedavg")
    groups = [
        SeedGroup(f"fixmatch-global lr=0.{n} momentum=0.9 split.alpha=0.1 epochs=10", (run,))
        for n in range(12)
    ]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure) or path.touch())
    curves.draw_curves(groups, tmp_path / "x.png")
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 12
    assert axes.get_position().width > 0.5
    assert all(
        len(line) <= curves.LABEL for text in axes.get_legend().texts for line in text.get_text().splitlines()
    )


@pytest.fixture
def drawn_lines(runs, tmp_path, monkeypatch):
    """The lines of the picture of one method: its runs are those of a summary, on three seeds."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure) or path.touch())

    def draw(summary):
        curves.draw_curves([SeedGroup("x", (summary,) * 3)], tmp_path / "x.png")
        (axes,) = drawn[-1].axes
        assert len(axes.collections) == sum(line.get_linestyle() == "-" for line in axes.lines)  # bands
        return {line.get_label(): line.get_linestyle() for line in axes.lines}

    return draw


def renamed(summary, **names):
    """A summary whose predictions have other names; those without one are gone."""

    def each(accuracy):
        return {new: accuracy[old] for old, new in names.items()}

    history = [{**line, "accuracy": each(line["accuracy"])} for line in summary["history"]]
    return {**summary, "accuracy": each(summary["accuracy"]), "history": history}


def test_the_modes_of_a_method_are_drawn_as_its_own_and_the_rest_beside_them(runs, drawn_lines):
    summary = summary_of(runs / "hassle-0")
    looks = {"SM": "-", "UM": "-", "EM": "-", "w_S": ":", "w_U": ":"}
    assert drawn_lines(summary) == looks
    old = {key: value for key, value in summary.items() if key != "modes"}
    assert drawn_lines(old) == looks  # as results from before have it
    mine = renamed(summary, SM="first", UM="SM", EM="second") | {
        "method": "mine:Method",
        "headline": "second",
    }
    assert drawn_lines(mine | {"modes": {"first": ""}}) == {"first": "-", "SM": ":", "second": "-"}


def test_a_headline_is_never_drawn_as_an_aside(runs, drawn_lines):
    """Whatever it is called: `mean` is the only curve of `local`."""
    summary = renamed(summary_of(runs / "fedavg"), model="mean") | {"method": "local", "headline": "mean"}
    assert drawn_lines(summary | {"modes": {}}) == {"mean": "-"}
    del summary["modes"]
    assert drawn_lines(summary) == drawn_lines(summary | {"method": "mine:Method"}) == {"mean": "-"}


def test_a_run_notes_the_modes_of_its_method(runs):
    modes = summary_of(runs / "hassle-0")["modes"]
    assert list(modes) == ["SM", "UM", "EM"] and modes["EM"] == "mean of SM and UM"
    assert summary_of(runs / "fedavg")["modes"] == {}


def test_dollars_in_names_are_no_formulas(runs, tmp_path):
    """Neither in the title nor in the legend: `$_$` is one that matplotlib cannot set."""
    summary = renamed(summary_of(runs / "fedavg"), model="$_$") | {"data": "a$_$b.npz", "headline": "$_$"}
    for groups in (
        [SeedGroup("$_$", (summary,))],
        [SeedGroup("$_$ lr=1", (summary,)), SeedGroup("$^$", (summary,))],
    ):
        curves.draw_curves(groups, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_single_run_is_drawn_too(suffix, runs, tmp_path):
    picture = tmp_path / f"one.{suffix}"
    assert call("compare", runs / "hassle-0", "--picture", picture)[0] == 0
    if suffix == "svg":
        assert "<svg" in picture.read_text("utf-8")
    else:
        with Image.open(picture) as drawn:
            assert min(drawn.size) > 300 and len(drawn.convert("RGB").getcolors(1 << 20)) > 10


def test_the_picture_lies_in_the_working_folder_unless_said(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("compare", runs / "fedavg")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["compare.png"]


def test_runs_of_different_lengths_can_be_compared(runs, tmp_path):
    summary = summary_of(runs / "fedavg")
    summary["history"] = summary["history"][:1]
    (tmp_path / "short.json").write_text(json.dumps(summary | {"rounds": 1, "settings_hash": "other"}))
    code, _, err = call(
        "compare", tmp_path / "short.json", runs / "hassle-0", "--picture", tmp_path / "x.png"
    )
    assert (code, err) == (0, "")


def test_what_is_not_finished_is_named_and_left_out(runs, wide, tmp_path):
    """`compare runs/*`, where one run is under way and pictures lie about."""
    for name in ("fedavg", "cut"):
        shutil.copytree(runs / "fedavg", tmp_path / name)
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "old.png").write_bytes(PNG)
    code, out, err = call("compare", *sorted(tmp_path.iterdir()), "--picture", tmp_path / "x.png")
    assert (code, err) == (0, "") and [row[0] for row in rows_of(out)].count("fedavg") == 1
    left = f"{tmp_path / 'cut'} {tmp_path / 'old.png'}"
    assert f"left out, without a summary.json: {left}\n" in out


def test_a_folder_of_runs_stands_for_the_runs_in_it(runs, tmp_path):
    """As `run --vary` and `reproduce` leave them; of those in it, too, the unfinished are named."""
    place, picture = tmp_path / "runs", tmp_path / "x.png"
    shutil.copytree(runs, place)
    each = call("compare", *sorted(place.iterdir()), "--picture", picture)
    assert call("compare", place, "--picture", picture) == each and each[0] == 0
    (place / "fedavg" / "summary.json").unlink()
    code, out, _ = call("compare", place, runs / "fedavg", "--picture", picture)
    assert code == 0 and f"left out, without a summary.json: {place / 'fedavg'}\n" in out


# What is refused


def test_only_unfinished_runs_are_an_error(runs, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(runs / "fedavg", tmp_path / name)
        (tmp_path / name / "summary.json").unlink()
    code, _, err = call("compare", tmp_path / "one", tmp_path / "two", "--picture", tmp_path / "x.png")
    assert code == 2 and f"fedhassle resume {tmp_path / 'one'}" in err


def test_what_is_not_there_is_not_left_out_in_silence(runs, tmp_path):
    code, _, err = call("compare", runs / "fedavg", tmp_path / "fedavk", "--picture", tmp_path / "x.png")
    assert code == 2 and f"{tmp_path / 'fedavk'} does not exist" in err


def test_an_unfinished_run_says_how_to_finish_it(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "fedavg", folder)
    (folder / "summary.json").unlink()
    code, _, err = call("compare", folder, "--picture", tmp_path / "x.png")
    assert code == 2 and f"fedhassle resume {folder}" in err and not (tmp_path / "x.png").exists()


FOREIGN = {
    "empty": "",
    "text": "hello",
    "cut": '{"accuracy": {',
    "list": "[]",
    "number": "3",
    "null": "null",
    "object": "{}",
    "other types": '{"accuracy": 1, "history": 2, "method": 3, "headline": 4, "settings_hash": 5, "data": 6}',
    "keys alone": '{"accuracy": {}, "history": [], "method": "x", "headline": "EM"}',
    "no history": None,
    "no settings": None,
    "odd modes": None,
    "all keys": None,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_a_user_error_that_names_it(kind, runs, tmp_path):
    file, text = tmp_path / "summary.json", FOREIGN[kind]
    if text is None:
        summary = summary_of(runs / "fedavg")
        lacking = {key: summary[key] for key in summary if key != kind.removeprefix("no ")}
        made = {"all keys": dict.fromkeys(summary, 1), "odd modes": {**summary, "modes": {"EM": 1}}}
        text = json.dumps(made.get(kind, lacking))
    file.write_text(text)
    code, _, err = call("compare", file, runs / "hassle-0", "--picture", tmp_path / "x.png")
    assert code == 2 and str(file) in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["nothere", "nothere/summary.json", "empty", "small.npz"])
def test_what_is_not_there_is_a_user_error(name, images, tmp_path):
    (tmp_path / "empty").mkdir()
    path = images if name == images.name else tmp_path / name
    code, _, err = call("compare", path, "--picture", tmp_path / "x.png")
    assert code == 2 and str(path) in err


@pytest.mark.parametrize(
    "name",
    ["x.gif", "x.xyz", "x", "file/x.png", "folder.png"],
)
def test_a_picture_that_cannot_be_written_is_a_user_error(name, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder.png").mkdir()
    code, _, err = call("compare", runs / "fedavg", "--picture", name)
    assert code == 2 and Path(name).name in err


def test_a_picture_of_another_kind_is_refused_before_any_run_is_read(tmp_path):
    code, _, err = call("compare", tmp_path / "none", "--picture", "x.jpg")
    assert code == 2 and "the picture ends in .png, .svg or .pdf, got 'x.jpg'" in err


def test_nothing_to_compare_is_a_user_error():
    assert call("compare")[0] == 2
