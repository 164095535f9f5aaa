"""Completion by the shell, by way of the functions and of the protocol that Typer's scripts speak."""

import shlex

import pytest
from small import call

from fedhassle.cli.completion import completions
from fedhassle.methods import METHODS
from fedhassle.nets import NETS
from fedhassle.reproduce.experiment import experiments
from fedhassle.settings.request import presets


def completed(monkeypatch, shell, *words):
    """The completions of the last word, as a shell asks for them."""
    line = shlex.join(["fedhassle", *words])
    monkeypatch.setenv("_FEDHASSLE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setattr("sys.argv", ["fedhassle"])
    return call(prog="fedhassle")[1].split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("re",), ["resume", "reproduce", "report", "results"]),
        (("federation", "ad"), ["admit"]),
        (("run", "q"), ["quick"]),
        (("run", "--vary", "se"), ["seed="]),
        (("run", "quick", "--vary", "split.k"), ["split.kind="]),
        (("run", "method", "=", "fedp"), ["fedprox"]),  # Bash breaks words at =
        (("run", "method", "=", "fedprox", "method.mo"), ["method.momentum="]),
        (("run", "seed", "=", "1", "data.fl"), ["data.flip="]),
        (("run", "split.kind", "="), ["authors", "balanced", "dirichlet", "iid"]),
        (("methods", "fixm"), ["fixmatch", "fixmatch-global"]),
        (("reproduce", "table1"), ["table1"]),
        (("reproduce", "table1", "method.ta"), ["method.tau="]),
    ],
)
def test_bash_completes_the_last_word(words, found, monkeypatch):
    assert completed(monkeypatch, "bash", *words) == found


def test_zsh_completes_whole_words(monkeypatch):
    assert 'method=fedprox"' in "".join(completed(monkeypatch, "zsh", "run", "method=fedp"))


def test_the_first_word_is_a_preset():
    assert completions([], "", presets()) == presets()
    assert completions(["quick"], "q", presets()) == []


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("method=", [f"method={name}" for name in METHODS]),
        ("net=", [f"net={name}" for name in NETS]),
        ("data=cifar", ["data=cifar10", "data=cifar100"]),
        ("method.gra=", ["method.gra=true", "method.gra=false"]),
        ("compile=t", ["compile=true"]),
        ("track=m", ["track=mlflow"]),
        ("rounds=", []),
        ("nothing=", []),
        ("nothing.at=", []),
        ("split.kind.at=", []),
        ("unlikely", []),
    ],
)
def test_a_value_is_completed_if_there_are_few(start, found):
    assert completions(["paper"], start) == found


def test_the_settings_are_those_of_the_method_that_the_words_name(tmp_path):
    assert completions(["method=sage"], "method.h") == ["method.horizon=", "method.halving="]
    assert "method.halving=" not in completions(["method=fedavg"], "method.")
    assert "method.gamma=" in completions(["method=no such method"], "method.")
    file = tmp_path / "mine.toml"
    file.write_text('method = "sage"')
    assert "method.halving=" in completions([str(file), "seed=1"], "method.")


def test_every_experiment_is_completed(monkeypatch):
    assert completed(monkeypatch, "bash", "reproduce", "") == experiments()


def test_the_script_for_a_shell_is_shown(monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # whatever runs the tests
    code, out, _ = call("--show-completion", "bash", prog="fedhassle")
    assert code == 0 and "_FEDHASSLE_COMPLETE=complete_bash" in out
