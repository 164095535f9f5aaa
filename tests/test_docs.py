"""The examples in docs/ run, and what the docs name exists."""

import dataclasses
import doctest
import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import small
import typer
from PIL import Image
from typer.main import get_command

import fedhassle
import fedhassle.method
from benchmarks.__main__ import main as benchmark
from fedhassle.blocks import block_pattern, replaced
from fedhassle.cli.main import app
from fedhassle.method import Method
from fedhassle.methods import METHODS, Hassle
from fedhassle.reproduce.experiment import cells, read_experiment
from fedhassle.settings.reference import EVERY, blocks
from fedhassle.settings.request import key_value

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
EACH_PAGE = pytest.mark.parametrize("page", PAGES)
EXAMPLES = [
    (page, *example)
    for page in ("method", "network")
    for example in re.findall(
        r"^```python\n# (\w+)\.py\n(.*?)^```", PAGES[f"{page}.md"], re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize(("page", "module", "source"), EXAMPLES, ids=[name for _, name, _ in EXAMPLES])
def test_an_example_method_or_network_trains(page, module, source, tmp_path, monkeypatch):
    """Each example as a user has it: a file on the Python path, named by import path."""
    (tmp_path / f"{module}.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (name,) = re.findall(r"^class (\w+)", source, re.MULTILINE)
    data = small.dataset()
    small.save_images(tmp_path / "own.npz", data)
    named = {"method": f"{module}:{name}"} if page == "method" else {"net": f"{module}:{name}"}
    settings = {**small.SETTINGS, "data": str(tmp_path / "own.npz"), "rounds": 2, "method.epochs": 1, **named}
    if page == "network":
        settings["method.residual_steps"] = 1
    result = fedhassle.run("paper", settings, out=tmp_path / "run", quiet=True)
    assert set(result.accuracy) >= ({"model"} if page == "method" else {"SM", "UM", "EM"})
    assert result.summary["settings"].get("net") == named.get("net")
    assert result.summary["method"] == named.get("method", "hassle")
    assert result.model.predict(data.x_test).classes.shape == (40,)


def test_the_example_metrics_measure_what_they_say(tmp_path, monkeypatch):
    """The metrics of docs/metrics.md beside those that the library has."""
    page = PAGES["metrics.md"]
    (source,) = re.findall(r"^```python\n# my_metrics\.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_metrics.py").write_text(source, "utf-8")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    shorter = ["rounds=2", "method.epochs=1", "clients_per_round=2", "method.residual_steps=1", "threads=1"]
    assert small.call(*words, *shorter, "--out", "run")[::2] == (0, "")
    (line,), (score,) = small.metrics_of(tmp_path / "run"), evaluated("run").values()
    assert line["metrics"]["calibration_error"] == pytest.approx(score["ece"], abs=1e-4)
    assert line["metrics"]["worst client, EM"] == pytest.approx(line["client_accuracy"]["lowest"], abs=1e-4)
    (toml,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(
        f'title = "x"\n{toml}[[axis]]\nname = "a"\nchoices = [{{ id = "b" }}]', "utf-8"
    )
    assert len(cells(read_experiment("mine.toml"))[0].identity.settings_hash) == 16


def evaluated(folder):
    """Returns the scores of EM on the test images, by `fedhassle evaluate`."""
    assert small.call("evaluate", folder, "fmnist-mini", "--json", "scores.json")[0] == 0
    return {"EM": small.strict(Path("scores.json").read_text("utf-8"))["predictions"]["EM"]}


def test_the_examples_of_the_python_page_run(tmp_path, monkeypatch, module, capsys):
    """All of docs/python.md in order, with fewer clients; each piece is a module, where a class is found."""
    monkeypatch.chdir(tmp_path)
    run, shorter = fedhassle.run, {"clients_per_round": 2, "threads": 1, "quiet": True}
    monkeypatch.setattr(fedhassle, "run", lambda *words, **keywords: run(*words, **keywords, **shorter))
    pieces = re.findall(r"^```python\n(.*?)^```", PAGES["python.md"], re.MULTILINE | re.DOTALL)
    for k, source in enumerate(pieces):
        importlib.import_module(module(f"page_{k}", source.replace('if __name__ == "__main__":', "if True:")))
    found = [small.summary_of(folder) for folder in (tmp_path / "runs").iterdir() if folder.is_dir()]
    assert sorted(one["method"] for one in found) == ["fedprox", "hassle", "hassle", "page_1:Gentle"]
    assert "'errors'" in capsys.readouterr().out and len([*tmp_path.glob("runs/few-*.npz")]) == 1


def test_the_commands_and_the_python_of_the_models_page_run(tmp_path, monkeypatch, capsys):
    """All of docs/models.md in order, after a shorter run; each piece of Python in a namespace of its own."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    shorter = ["rounds=1", "clients_per_round=2", "method.epochs=1", "method.residual_steps=1", "threads=1"]
    called = []
    for language, source in re.findall(
        r"^```(bash|python)\n(.*?)^```", PAGES["models.md"], re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            exec(compile(source, "docs/models.md", "exec"), {})
            continue
        for line in source.splitlines():
            program, *words = shlex.split(line, comments=True)
            if program == "fedhassle":
                code, _, err = small.call(*words, *(shorter if words[0] == "run" else []))
                assert (code, err) == (0, ""), line
                called.append(words[0])
    assert set(called) == {"run", "predict", "evaluate", "export"} and len(called) == 8
    assert "agree" in capsys.readouterr().out
    for file in ("first.csv", "first.json", "first.png", "sm.onnx", "runs/first/model.onnx"):
        assert (tmp_path / file).stat().st_size > 1000
    assert len((tmp_path / "first.csv").read_text("utf-8").splitlines()) == 201


def test_the_examples_of_the_data_page_run(tmp_path, monkeypatch, capsys):
    """All of docs/data.md in order, with shorter runs, and a folder of sites as it shows one."""
    monkeypatch.chdir(tmp_path)
    write_sites(tmp_path / "sites")
    shorter = ["rounds=1", "method=fedavg", "method.epochs=1", "clients_per_round=2", "threads=1"]
    called = []
    for language, source in re.findall(
        r"^```(bash|python|csv)\n(.*?)^```", PAGES["data.md"], re.MULTILINE | re.DOTALL
    ):
        if language == "csv":
            (tmp_path / "shown.csv").write_text(source, "utf-8")
            assert fedhassle.Split.load("shown.csv").names == ("north", "south")
        elif language == "python":
            exec(compile(source, "docs/data.md", "exec"), {})
        else:
            for line in source.splitlines():
                program, *words = shlex.split(line, comments=True)
                more = [*shorter, "--out", f"run-{len(called)}"] if words[0] == "run" else []
                code, _, err = small.call(*words, *more)
                assert (program, code, err) == ("fedhassle", 0, ""), line
                called.append(words[0])
    assert called == ["run", "run", "split", "run", "run", "split", "run"]
    assert "True" in capsys.readouterr().out
    names = fedhassle.Split.load("run-3/split.npz").names
    assert names[:3] == ("writer 0", "writer 1", "writer 2") and len(names) == 30
    assert fedhassle.Split.load("run-3/split.npz").hash == fedhassle.Split.load("run-4/split.npz").hash


def write_sites(folder):
    """Writes three sites with twelve images each, of which one site labels all, one some, and one none."""
    pixels = np.random.default_rng(0).integers(0, 256, (36, 28, 28), np.uint8)
    for k, image in enumerate(pixels[:24]):
        kind = ("benign", "malignant")[k % 2]
        path = folder / (f"north/{kind}/{k:04}.png" if k < 12 else f"south/{k:04}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (folder / "south" / "labels.csv").write_text("file,label\n0012.png,benign\n0013.png,malignant\n")
    np.savez(folder / "east.npz", x=pixels[24:], y=np.full(12, -1))


def test_an_experiment_of_ones_own_runs_and_gives_its_report(tmp_path, monkeypatch):
    """The first experiment of docs/reproduce.md with the method of docs/method.md, in shorter runs."""
    monkeypatch.chdir(tmp_path)
    method = next(source for _, module, source in EXAMPLES if module == "my_fedprox")
    (tmp_path / "my_fedprox.py").write_text(method, "utf-8")
    page = PAGES["reproduce.md"].partition("## Your own experiment")[2]
    source, shown = (
        re.findall(rf"^```{k}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0] for k in ("toml", "bash")
    )
    source = source.replace(
        "rounds = 20, method.epochs = 5", "rounds = 1, method.epochs = 1, clients_per_round = 2"
    )
    (tmp_path / "mine.toml").write_text(source, "utf-8")
    for line in shown.splitlines():
        program, *words = shlex.split(line, comments=True)
        code, out, err = small.call(*words)
        assert (program, code, err) == ("fedhassle", 0, ""), line
        if words[0] == "reproduce":
            assert "8 runs to make" in out and "my FedProx" in out and "paper" not in out
    text = (tmp_path / "mine.html").read_text("utf-8")
    assert "Does a proximal term help?" in text and "Accuracy by class" in text and "labels right" not in text
    table = (tmp_path / "mine.tex").read_text("utf-8")
    assert "my FedProx" in table and "{Does a proximal term help? Numbers are" in table


def test_the_example_experiment_is_valid(tmp_path):
    """GRA × MPA with three seeds: twelve different runs."""
    text = PAGES["reproduce.md"]
    _, source = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(source, "utf-8")
    made = cells(read_experiment(str(tmp_path / "mine.toml")))
    assert len({cell.identity.key for cell in made}) == len(made) == 12
    assert "no-gra-mpa-0" in text and "no-gra-mpa-0" in [cell.key for cell in made]


def test_the_commands_of_the_federation_page_parse():
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGES["federation.md"], re.MULTILINE | re.DOTALL))
    shown = set()
    for line in filter(None, lines.splitlines()):
        program, *words = shlex.split(line, comments=True)
        command = get_command(app)
        assert program == "fedhassle"
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        with command.make_context(command.name, words):
            shown.add(command.name)
    assert shown == {"init", "join", "admit", "server", "node", "status", "run", "predict", "next-labels"}


def test_the_benchmark_commands_of_the_speed_page_parse():
    program = typer.Typer()
    program.command()(benchmark)
    source, workers = re.findall(r"^```bash\n(.*?)^```", PAGES["speed.md"], re.MULTILINE | re.DOTALL)
    _, *commands = [shlex.split(line, comments=True) for line in workers.splitlines()]
    for name, *words in (words[1:] for words in commands):
        with get_command(app).commands[name].make_context(name, words):
            assert name in ("run", "resume")
    for line in source.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:3] == ["python", "-m", "benchmarks"]
        with get_command(program).make_context("benchmarks", words[3:]) as context:
            assert {*(context.params["methods"] or [])} <= METHODS.keys()


QUOTES = re.findall(
    r"^```python\n# (fedhassle/\S+\.py)\n(.*?)^```", PAGES["method.md"], re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(("path", "code"), QUOTES, ids=[path for path, _ in QUOTES])
def test_quoted_code_is_in_the_package(path, code):
    assert code in (ROOT / path).read_text("utf-8")


def test_there_are_four_examples_and_five_quotes():
    names = ["my_fedprox", "my_thresholds", "my_teacher", "my_net"]
    assert [name for _, name, _ in EXAMPLES] == names and len(QUOTES) == 5


def test_the_example_in_the_docstring_of_method_runs():
    found = doctest.testmod(fedhassle.method)
    assert found.attempted == 2 and found.failed == 0


# Links, paths and names


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", path.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [plain[:i].count(anchor) for i, anchor in enumerate(plain)]  # a second `a` is `a-1`
    return {f"{anchor}-{n}" if n else anchor for anchor, n in zip(plain, before, strict=True)}


@EACH_PAGE
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in (link for link in links if not link.startswith("http")):
        target, _, anchor = link.partition("#")
        path = ROOT / "docs" / (target or page)
        assert path.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{link}: there is no such heading"


@EACH_PAGE
def test_source_files_exist(page):
    """Each `x/y.py`, from the repository's root, the package, or the tests; a bare `y.py` anywhere there."""
    named = re.findall(r"`([\w/]+\.py)`", prose(page))
    own = {f"{name}.py" for name in ("my_module", "my_net", "my_fedprox", "my_teacher")}
    for name in (name for name in named if name not in own):
        places = [ROOT / name, ROOT / "fedhassle" / name, ROOT / "tests" / name]
        anywhere = [
            path for room in ("fedhassle", "tests", "benchmarks") for path in ROOT.glob(f"{room}/**/{name}")
        ]
        assert any(path.exists() for path in places) or ("/" not in name and anywhere), f"there is no {name}"


def equations():
    """The names in the code column of the table of equations: `vectors.mean`, `Hassle.logits`."""
    rows = re.findall(r"^\| (?:[\d, ]+|Algorithm 1) \| [^|]* \| ([^|]*) \|", PAGES["paper.md"], re.MULTILINE)
    return list(dict.fromkeys(name for row in rows for name in re.findall(r"`([\w.]+)`", row)))


@pytest.mark.parametrize("name", equations())
def test_functions_of_the_equations_exist(name):
    owner, _, function = name.rpartition(".")
    assert callable(
        getattr(Hassle if owner == "Hassle" else importlib.import_module(f"fedhassle.{owner}"), function)
    )


def test_the_table_of_equations_is_found():
    assert {"method.average", "engine.rounds.federate", "Hassle.dual_loss"} <= {*equations()}


# Settings in the reference of methods


def documented(heading):
    """The settings table below a heading of docs/methods.md: defaults by name, None for –."""
    section = PAGES["methods.md"].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"docs/methods.md has no section {heading}"
    rows = re.findall(r"^\| `(\w+)` \| (–|`[^`]+`) \|", section, re.MULTILINE)
    return {
        name: None if default == "–" else key_value(f"x={default.strip('`')}")[1] for name, default in rows
    }


def settings_of(method):
    return {field.name: field.default for field in dataclasses.fields(method) if field.name != "net"}


def test_the_common_settings_are_those_of_method():
    assert documented("Common settings") == settings_of(Method)


@pytest.mark.parametrize("name", METHODS)
def test_the_settings_of_a_method_are_exact(name):
    """A section lists what its class adds to the common settings or sets to another default."""
    common, found = settings_of(Method), settings_of(METHODS[name])
    own = {key: default for key, default in found.items() if key not in common or default != common[key]}
    assert documented(name) == own
    assert {key: type(value) for key, value in documented(name).items()} == {
        key: type(value) for key, value in own.items()
    }


def test_the_tables_of_methods_are_those_of_the_code():
    """`fedhassle methods -o docs/methods.md` makes them anew."""
    made = blocks()
    assert [*made] == [EVERY, *METHODS]
    assert all(len(block_pattern(name).findall(PAGES["methods.md"])) == 1 for name in made)
    assert replaced(PAGES["methods.md"], made) == PAGES["methods.md"]


def test_every_method_is_in_the_overview():
    overview = PAGES["methods.md"].partition("## Overview")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \[`([\w+-]+)`\]", overview, re.MULTILINE) == [*METHODS]


# The notebook


def test_the_notebook_runs_as_it_is_stored(tmp_path, monkeypatch, module):
    """Its cells in order, in a module, with a single round and seed; the stored outputs have no error."""
    stored = json.loads((ROOT / "docs" / "tour.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in stored["cells"] if cell["cell_type"] == "code"]
    outputs = [out for cell in stored["cells"] for out in cell.get("outputs", ())]
    assert len(cells) > 8 and not any(out["output_type"] == "error" for out in outputs)
    source = "\n".join(cells)
    shorter = source.replace("rounds, seeds = 6, [0, 1]", "rounds, seeds = 1, [0]")
    assert shorter != source
    monkeypatch.chdir(tmp_path)
    made = importlib.import_module(module("tour", shorter))
    assert len(made.comparison.rows) == 1 + 1 + 5 and len(made.results) == 3
    assert "overconfidence" in made.results[0].metrics
    for text in re.findall(r"\]\(([\w.]+\.md)\)", json.dumps(stored)):
        assert (ROOT / "docs" / text).exists()
