"""What the docs show runs."""

import doctest
import re
import shlex
from pathlib import Path

import pytest
import small
from typer.main import get_command

import fedhassle
import fedhassle.method
from fedhassle.cli.main import app
from fedhassle.reproduce.experiment import cells, read_experiment

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    (page, *example)
    for page in ("method", "network")
    for example in re.findall(
        r"^```python\n# (\w+)\.py\n(.*?)^```",
        (ROOT / f"docs/{page}.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.parametrize(("page", "module", "source"), EXAMPLES, ids=[name for _, name, _ in EXAMPLES])
def test_a_method_or_network_of_the_docs_trains(page, module, source, tmp_path, monkeypatch):
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


def test_the_way_of_a_model_from_the_run_to_other_programs(tmp_path, monkeypatch, capsys):
    """Every command and every line of Python of docs/models.md, in their order, after a shorter run.

    Each piece of Python as if it were pasted into a new session.
    """
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/models.md").read_text("utf-8")
    shorter = ["rounds=1", "clients_per_round=2", "method.epochs=1", "method.residual_steps=1", "threads=1"]
    called = []
    for language, source in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
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


def test_the_experiment_of_the_docs_can_be_made(tmp_path):
    """The example, pasted into a file: GRA × MPA and three seeds, as valid runs."""
    text = (ROOT / "docs/reproduce.md").read_text("utf-8")
    (source,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(source, "utf-8")
    made = cells(read_experiment(str(tmp_path / "mine.toml")))
    assert len({cell.identity.key for cell in made}) == len(made) == 12
    assert "no-gra-mpa-0" in text and "no-gra-mpa-0" in [cell.key for cell in made]


def test_the_commands_of_the_guide_to_a_federation_parse():
    text = (ROOT / "docs/federation.md").read_text("utf-8")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    shown = set()
    for line in filter(None, lines):
        program, *words = shlex.split(line, comments=True)
        command = get_command(app)
        assert program == "fedhassle"
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        with command.make_context(command.name, words):
            shown.add(command.name)
    assert shown == {"init", "join", "admit", "server", "node", "status", "run", "predict"}
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {link[1:] for link in re.findall(r"\]\((#[^)]+)\)", text)} <= anchors


QUOTES = re.findall(
    r"^```python\n# (fedhassle/\S+\.py)\n(.*?)^```",
    (ROOT / "docs/method.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("path", "code"), QUOTES, ids=[path for path, _ in QUOTES])
def test_what_the_walk_through_a_method_quotes_is_the_products_own(path, code):
    assert code in (ROOT / path).read_text("utf-8")


def test_there_are_three_examples():
    assert [name for _, name, _ in EXAMPLES] == ["my_fedprox", "my_teacher", "my_net"] and len(QUOTES) == 4


def test_the_example_of_the_interface_is_python():
    found = doctest.testmod(fedhassle.method)
    assert found.attempted == 2 and found.failed == 0
