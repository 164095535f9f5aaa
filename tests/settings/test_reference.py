"""The reference of a method, made from its class."""

import textwrap
import tomllib

import pytest
from small import call, resolved

from fedhassle.methods import METHODS
from fedhassle.settings.reference import Setting, as_toml, reference


def settings(name):
    return {setting.name: setting for setting in reference(name).settings}


def test_what_each_kind_of_client_does_follows_from_its_phases():
    """Of hassle+ with LeNet: w_S on labels; w_U starts after 0.3 of 200 rounds."""
    found = reference("hassle+").clients
    alone = "w_S: 20 epochs on labelled data (weak view, batches of 64)"
    later = "w_U: 5 epochs on unlabelled data (weak view, batches of 128, pseudo-labels)"
    assert found["unlabelled"] == f"idle. From round 61 of 200 on: {later}"
    assert found["partial"] == (
        f"{alone}. From round 61 of 200 on: {alone}; {later} and labelled data (weak view, batches of 64)"
    )
    assert reference("fedavg").clients == {
        "full": "w: 10 epochs on labelled data (weak view, batches of 128)",
        "partial": "w: 10 epochs on labelled data (weak view, batches of 128)",
        "unlabelled": "idle",
    }
    assert "(2 weak views, batches of 128)" in reference("rscfed").clients["unlabelled"]
    assert "r_US: 100 steps on labelled data" in reference("hassle").clients["full"]


def test_data_in_one_place_are_no_clients():
    assert reference("central").clients == {
        "all in one place": "w: trained on labelled data (weak view, batches of 128)"
    }
    assert "unlabelled data" in reference("central-fixmatch").clients["all in one place"]


def test_a_setting_has_its_default_range_meaning_and_source():
    found = settings("fedprox")
    meaning = "μ, weight of the proximal term; ours: the paper gives none"
    assert found["mu"] == Setting("mu", 0.001, "at least 0", meaning, True)
    assert found["schedule"].values == "constant or cosine or step" and found["schedule"].default is None
    assert settings("hassle")["gra"].values == "true or false"
    assert next(setting.name for setting in reference("fedprox").settings) == "mu"  # its own first
    assert reference("fedprox").source.startswith("FedProx (Li et al., 2020)")
    assert reference("hassle+").note.startswith("Chosen on held-out images")


def test_another_default_is_a_setting_of_its_own_with_the_comment_of_its_parent():
    found = settings("hassle+")["prior"]
    assert found.own and found.default == "batch"
    assert found.meaning == settings("fedavg")["prior"].meaning != ""


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_has_a_meaning_and_values(name):
    assert all(setting.meaning and setting.values for setting in reference(name).settings)


@pytest.mark.parametrize("name", METHODS)
def test_the_file_of_a_method_is_the_method(name, tmp_path):
    """Every setting is in it, those that are off as a comment."""
    text = as_toml(reference(name))
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    assert resolved(config=str(tmp_path / "mine.toml")) == resolved(f"method={name}")
    given = tomllib.loads(text)["method"]
    off = [setting.name for setting in reference(name).settings if setting.default is None]
    assert {*given, *off} == {"name", *settings(name)} and all(f"# {key} = …" in text for key in off)


OWN = """
    from dataclasses import dataclass
    from typing import Any
    from fedhassle.methods.fedavg import FedAvg
    from fedhassle.ranges import Share

    @dataclass(frozen=True)
    class Mine(FedAvg):
        "Mine."
        # Above it,
        # on two lines.
        a: Share = 0.5
        b: Any = 1

        c: int = 2  # behind it
        d: int = 3  # not above this: # e
        e: tuple[int, ...] = (
            1,
        )
"""


def test_the_comments_of_a_users_method_are_read(tmp_path, monkeypatch):
    (tmp_path / "own_commented.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    found = settings("own_commented.py:Mine")
    assert [found[key].meaning for key in "abcde"] == [
        *("Above it, on two lines.", "", "behind it", "not above this: # e", "")
    ]
    assert found["a"].values == "in [0, 1]"
    assert call("methods", "own_commented.py:Mine")[0] == 0


# The command


def test_a_method_is_described():
    code, out, err = call("methods", "sage")
    assert (code, err) == (0, "")
    for words in ("SAGE (Liu et al., CVPR 2025)", "unlabelled", "method.halving", "positive", "method.lr"):
        assert words in out


def test_a_file_to_start_from_is_printed_or_written(tmp_path):
    code, out, err = call("methods", "sage", "--toml")
    assert (code, err) == (0, "") and tomllib.loads(out)["method"]["halving"] == 0.05
    assert "λ; its paper's\nhalving = 0.05  # positive\n" in out
    assert "# nesterov = …  # true or false\n" in out
    path = tmp_path / "sage.toml"
    assert call("methods", "sage", "--toml", "-o", path)[0] == 0 and path.read_text("utf-8") == out
    code, _, err = call("methods", "sage", "--toml", "-o", path)
    assert code == 2 and "exists" in err and path.read_text("utf-8") == out


def test_the_blocks_of_a_markdown_file_are_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- fedprox -->\nold\n<!-- /fedprox -->\nafter\n", "utf-8")
    assert call("methods", "-o", page)[0] == 0
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- fedprox -->\n\n| clients |") and text.endswith("-->\nafter\n")
    assert "| `mu` | `0.001` | at least 0 | μ, weight" in text and "old" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hasle",), "did you mean 'hassle'?"),
        (("--toml",), "--toml needs the name of a method"),
        (("hassle", "-o", "x.md"), "--out is for --toml"),
        (("hassle", "--toml", "-o", "x.txt"), "ends in .toml"),
        (("-o", "x.txt"), "a .md file"),
        (("-o", "empty.md"), "no block to replace"),
        (("-o", "latin.md"), "latin.md cannot be read: 'utf-8' codec"),
        (("-o", "nothere.md"), "nothere.md"),
    ],
)
def test_errors_of_the_command(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.md").touch()
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    code, out, err = call("methods", *words)
    assert (code, out) == (2, "") and said in err
