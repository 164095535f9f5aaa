"""The lists and the help of the command line."""

import subprocess
import sys
import typing

import pytest
from click import Context
from small import LIMIT, call, environment
from typer.main import get_command
from typer.models import ArgumentInfo

from fedhassle.cli.main import app


def test_methods_are_listed_one_a_line():
    code, out, err = call("methods")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [
        *("fedavg", "fedprox", "mixmatch", "fixmatch", "fedmatch", "rscfed", "hassle", "hassle+"),
        *("fixmatch-global", "sage", "central", "central-fixmatch", "local"),
    ]
    assert all(len(line.split()) > 4 for line in out.splitlines())


def test_data_sets_are_listed_one_a_line_with_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "cifar10.npz").touch()
    code, out, _ = call("data", "list", "--data-dir", tmp_path)
    first = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and {"fmnist-mini", "fmnist", "cifar10", "cifar100"} <= set(first)
    assert "included" in first["fmnist-mini"] and "12,000 + 2,000" in first["fmnist-mini"]
    assert " here " in first["cifar10"] and "to download" in first["cifar100"]
    monkeypatch.setenv("FEDHASSLE_DATA", str(tmp_path))
    assert call("data", "list")[1] == out


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        ((), ("run", "resume", "split", "compare", "methods", "data")),
        (("run",), ("CONFIG", "KEY=VALUE", "--out", "--data-dir", "--device")),
        (("resume",), ("FOLDER",)),
        (("split",), ("--json", "--picture", "--save", "--data-dir")),
        (("compare",), ("FOLDERS", "--picture")),
        (("reproduce",), ("NAME", "KEY=VALUE", "--only", "--budget", "--together", "--results")),
        (("predict",), ("MODEL", "IMAGES...", "--mode", "--out", "--probabilities", "--device")),
        (("evaluate",), ("MODEL", "DATA", "--mode", "--json", "--picture", "--data-dir")),
        (("export",), ("MODEL", "[OUT.onnx]", "--onnx", "--mode", "fedhassle[export]")),
        (("methods",), ("one line each",)),
        (("data",), ("list", "check")),
        (("results",), ("add", "check")),
        (("results", "add"), ("FILE...", "--experiment", "--results", "--data-dir", "exit code")),
        (("results", "check"), ("FILE...", "--experiment", "--results", "--data-dir")),
        (
            ("federation",),
            (
                *("init", "certificate", "join", "admit", "expel", "server", "node", "run", "report"),
                *("status", "demo"),
            ),
        ),
        (("federation", "certificate"), ("[FOLDER]", "--also")),
        (("federation", "next-labels"), ("MODEL", "--data", "--count", "--out", "--page", "--patients")),
        (("federation", "server"), ("[FOLDER]",)),
        (("federation", "node"), ("--data", "--federation", "--name", "--labels", "--hash", "--device")),
        (("federation", "run"), ("[FOLDER]", "--out", "--test", "central")),
        (("federation", "admit"), ("NAME", "KEY", "--images", "--federation")),
        (("federation", "report"), ("RUN", "--out")),
        (("federation", "status"), ("[FOLDER]",)),
        (("federation", "demo"), ("--out", "--rounds")),
        (("data", "list"), ("--data-dir",)),
    ],
)
def test_help(command, mentioned):
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "") and all(word in out for word in mentioned)
    assert call(*command, "-h") == (code, out, err)
    assert "\\" not in out


def arguments(typer, *above):
    """Yields every positional argument: the words of its command, and its help."""
    for command in typer.registered_commands:
        words = (*above, command.name or command.callback.__name__)
        for hint in typing.get_type_hints(command.callback, include_extras=True).values():
            found = [about for about in typing.get_args(hint) if isinstance(about, ArgumentInfo)]
            yield from ((words, about.help) for about in found)
    for group in typer.registered_groups:
        yield from arguments(group.typer_instance, *above, group.name)


@pytest.mark.parametrize(("words", "help_"), list(arguments(app)), ids=str)
def test_the_help_of_a_positional_argument_is_shown(words, help_):
    """Compared without whitespace, since lines may break anywhere."""
    shown = "".join(call(*words, "--help")[1].split())
    assert help_ and "".join(help_.split()) in shown


def options(command, *words):
    """Yields every option that takes a value and may be left out: the words of its command, and its help."""
    for name, part in getattr(command, "commands", {}).items():
        yield from options(part, *words, name)
    for option in command.params:
        if option.param_type_name == "option" and not option.is_flag and not option.required:
            yield " ".join([*words, option.opts[0]]), option.get_help_record(Context(command))[1]


IMAGES = ("--classes", "--like", "--from-folder")  # one of these is required


@pytest.mark.parametrize(("words", "help_"), list(options(get_command(app))), ids=str)
def test_an_option_says_its_default(words, help_):
    assert "default: " in help_ or words.endswith(IMAGES)


def test_a_misspelt_command_has_one_suggestion():
    code, _, err = call("runn")
    assert code == 2 and err.count("Did you mean") == 1


def test_help_does_not_import_pytorch():
    code = "import sys, fedhassle.cli.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=LIMIT, check=False)
    assert done.returncode == 0
