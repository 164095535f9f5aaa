"""The commands, examples, links and figures of the README and of docs/usage.md are right."""

import re
import shlex
import statistics
from pathlib import Path

import pytest
from typer.main import get_command

from fedhassle.cli.main import app
from fedhassle.cli.options import parse_request
from fedhassle.reproduce.experiment import cells, read_experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.reproduce.results import measurements
from fedhassle.settings.schema import resolve

ROOT = Path(__file__).parents[1]
MODES = ("SM", "UM", "EM")
TEXT, USAGE = ((ROOT / file).read_text("utf-8") for file in ("README.md", "docs/usage.md"))


def blocks(language, text=TEXT):
    """Returns the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Returns every `fedhassle …` in a bash block, split into words as by a shell."""
    lines = "\n".join(blocks("bash", text)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == "fedhassle"]


@pytest.mark.parametrize("words", commands(TEXT + USAGE), ids=" ".join)
def test_a_command_parses(words):
    """Options and presets exist and settings are valid; nothing trains."""
    command, arguments = get_command(app), words
    while hasattr(command, "commands"):
        assert arguments and arguments[0] in command.commands, f"no command {' '.join(words)}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    with command.make_context(command.name, list(arguments)) as context:
        given = context.params
    if "data_dir" in given and "words" in given:
        settings = resolve(parse_request(given["words"], given["data_dir"], given.get("device")))
        assert settings.rounds >= 1


def test_the_usage_page_shows_every_command():
    shown, known = commands(USAGE), get_command(app).commands
    assert {words[0] for words in shown} == set(known)
    assert {words[1] for words in shown if words[0] == "federation"} == set(known["federation"].commands)


def test_the_first_example_in_python_runs(tmp_path, monkeypatch, capsys):
    source = blocks("python")[0]
    assert re.findall(r"rounds\W+(\d+)", source) == ["2", "1"], "too large for a test"
    assert re.findall(r"epochs\W+(\d+)", source) == ["1", "1"], "too large for a test"
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out and list(tmp_path.rglob("summary.json"))


def test_the_configuration_of_the_usage_page_is_valid(tmp_path):
    (text,) = blocks("toml", USAGE)
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    settings = resolve(parse_request([str(tmp_path / "mine.toml"), "seed=1"], None, None))
    assert (settings.method.name, settings.method.settings["mu"], settings.split.clients) == (
        "fedprox",
        0.01,
        10,
    )


def test_pictures_and_links_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    local = [link for link in links if not link.startswith(("http:", "https:"))]
    assert local and [link for link in local if not (ROOT / link).exists()] == []


def made_by(experiment, name, metric):
    """Returns a metric for each seed of a cell, from the runs of an experiment in docs/."""
    own = read_experiment(str(ROOT / "docs" / experiment))
    (found,) = [
        measurement
        for measurement in measurements(own, cells(own), Ledger(ROOT / "results"))
        if measurement.name == name and measurement.metric in (metric, HEADLINE)
    ]
    return [100 * value for value in found.values.values()]


def rows_of(text):
    """Returns the rows of tables with a mean and a standard deviation."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines() if "±" in line
    ]


def test_the_figures_of_the_readme_match_the_results():
    """Mean ± sample standard deviation over the seeds, lowest and highest seed, from the files themselves.

    The README shows no figures unless all twenty runs are in the results.
    """
    ledger = Ledger(ROOT / "results")
    runs = [cell.identity for cell in cells(read_experiment(str(ROOT / "docs" / "ten-seeds.toml")))]
    assert len(runs) == 20
    rows = [row for row in rows_of(TEXT) if row[0].lower() in ("hassle", "fedavg")]
    made = all(run in ledger for run in runs)
    assert [row[:2] for row in rows] == (
        [["FedAvg", "model"], *(["HASSLE", m] for m in MODES)] if made else []
    )
    for method, prediction, shown, low, high, *_ in rows:
        scores = made_by("ten-seeds.toml", method.lower(), f"accuracy.{prediction}")
        assert len(scores) == 10
        assert shown == f"{statistics.fmean(scores):.2f} ± {statistics.stdev(scores):.2f}"
        assert (low, high) == (f"{min(scores):.2f}", f"{max(scores):.2f}")
