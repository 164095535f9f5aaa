"""Requests: presets, files and KEY=VALUE words, before any setting is checked."""

import datetime
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fedhassle
from fedhassle.data.catalogue import CATALOGUE
from fedhassle.errors import UserError
from fedhassle.settings.request import (
    absolute_paths,
    from_json,
    overlaid,
    presets,
    read,
    request,
    to_json,
    variations,
)


def merged(requested):
    """All layers as one, the last on top."""
    result = {}
    for layer in requested.layers:
        result = overlaid(result, layer)
    return result


def asked(*words):
    """The settings in the words alone."""
    return request("paper", words).layers[-1]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rounds=3", {"rounds": 3}),
        ("rounds=1_000", {"rounds": 1000}),
        ("x=0.5", {"x": 0.5}),
        ("x=1e3", {"x": 1000.0}),
        ("x=true", {"x": True}),
        ("x=True", {"x": "True"}),  # TOML's booleans are in lower case: a bare word
        ("x=word", {"x": "word"}),
        ("x=10%", {"x": "10%"}),
        ("x=two words", {"x": "two words"}),
        ('x="quoted"', {"x": "quoted"}),
        ("x='quoted'", {"x": "quoted"}),
        ("x=[1, 2.5]", {"x": [1, 2.5]}),
        ("x={a=1,b=0.3}", {"x": {"a": 1, "b": 0.3}}),
        ("x=./some/file.npz", {"x": "./some/file.npz"}),
        ("x=pack.mod:Name", {"x": "pack.mod:Name"}),
        ("x=a=b", {"x": "a=b"}),
        ("x=", {"x": ""}),
        (" x = 3 ", {"x": 3}),
        ("x=2020-01-31", {"x": datetime.date(2020, 1, 31)}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
    ],
)
def test_a_value_is_toml_and_a_bare_word_a_string(word, expected):
    found = asked(word)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_true_is_not_one():
    assert asked("x=true")["x"] is True and type(asked("x=1")["x"]) is int


@pytest.mark.parametrize("word", ["rounds", "=5", "", "paper"])
def test_a_word_without_key_or_equals_sign_is_an_error_with_an_example(word):
    with pytest.raises(UserError, match="KEY=VALUE, such as rounds=50"):
        asked(word)


@pytest.mark.parametrize(
    "vary", [["seed=0,1", "method=fedavg"], ["seed=0", "method=fedavg", "seed=1"], ["seed=0", " seed = 1"]]
)
def test_a_key_that_varies_twice_has_the_values_of_both(vary):
    found = [words for _, words in variations(vary)]
    method = ["method=fedavg"] if "method=fedavg" in vary else []
    assert found == [["seed=0", *method], ["seed=1", *method]]


def test_the_short_form_stands_for_the_name():
    assert asked("method=fedavg", "data=mine.npz") == {
        "method": {"name": "fedavg"},
        "data": {"name": str(Path.cwd() / "mine.npz")},
    }


@pytest.mark.parametrize("words", [("method=fedavg", "method.lr=1.5"), ("method.lr=1.5", "method=fedavg")])
def test_the_short_form_keeps_the_other_settings_of_its_table(words):
    assert asked(*words) == {"method": {"name": "fedavg", "lr": 1.5}}


def test_only_data_and_method_have_a_short_form():
    assert asked("split=10%", "net=lenet") == {"split": "10%", "net": "lenet"}


def test_the_last_word_wins():
    assert asked("rounds=1", "rounds=2", "split.alpha=1", "split.alpha=2") == {
        "rounds": 2,
        "split": {"alpha": 2},
    }


def test_words_lie_over_the_file_and_tables_are_merged(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('rounds = 7\nseed = 1\nmethod = "fedprox"\n[split]\nalpha = 0.5\nclients = 4\n')
    assert merged(request(str(file), ["seed=2", "split.alpha=9", "method.mu=0.1"])) == {
        "rounds": 7,
        "seed": 2,
        "split": {"alpha": 9, "clients": 4},
        "method": {"name": "fedprox", "mu": 0.1},
    }


def test_a_layout_of_labels_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[split]\nlabels = {full = 1, partial = 5, share = 0.2}\n")
    result = merged(request(str(file), ["split.labels={partial=6,share=0.1}"]))
    assert result["split"]["labels"] == {"partial": 6, "share": 0.1}


def test_a_mapping_asks_for_the_same_as_words():
    words = ["method=fedavg", "split.labels=[0.5, 1.0]", "rounds=3", "data.flip=false"]
    nested = {"method": "fedavg", "split.labels": [0.5, 1.0], "rounds": 3, "data": {"flip": False}}
    assert request("paper", words) == request("paper", nested)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mine.npz", "here/mine.npz"),
        ("./deep/mine.npz", "here/deep/mine.npz"),
        ("../mine.npz", "mine.npz"),
        ("MINE.NPZ", "here/MINE.NPZ"),
        ("~/mine.npz", "home/mine.npz"),
    ],
)
@pytest.mark.parametrize(("table", "key"), [("data", "name"), ("data", "folder"), ("split", "file")])
def test_a_path_is_made_absolute(table, key, path, expected, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    layer = {table: {key: path, "other": path}, "net": path}
    found = absolute_paths(layer)
    assert found == {table: {key: str(tmp_path / expected), "other": path}, "net": path}
    assert layer == {table: {key: path, "other": path}, "net": path}  # the layer itself is left alone
    monkeypatch.chdir(tmp_path)
    assert absolute_paths(found) == found


@pytest.mark.parametrize("name", [*CATALOGUE, "nothing", "npz", "mine.npz.old", ""])
def test_a_name_of_the_catalogue_is_no_path(name, tmp_path, monkeypatch):
    """Even if a folder of that name is here."""
    monkeypatch.chdir(tmp_path)
    Path("fmnist").mkdir()
    assert absolute_paths({"data": {"name": name}}) == {"data": {"name": name}}
    assert asked(f"data={name}") == {"data": {"name": name}}


@pytest.mark.parametrize("layer", [{}, {"data": 3}, {"split": "10%"}, {"data": {"name": 3, "folder": None}}])
def test_a_value_that_is_not_a_string_is_not_a_path(layer):
    assert absolute_paths(layer) == layer


def test_the_default_is_quick():
    assert request(None, []) == request("quick", [])
    assert request(None, []) != request("paper", [])


def test_the_presets_are_the_files_in_the_package():
    folder = Path(fedhassle.__file__).parent / "settings" / "presets"
    assert presets() == sorted(file.stem for file in folder.glob("*.toml"))
    assert {"quick", "paper"} <= set(presets())
    for name in presets():
        assert set(read(name)) == set(tomllib.loads((folder / f"{name}.toml").read_text("utf-8")))


def test_paper_is_empty_and_quick_has_fewer_rounds_epochs_and_steps():
    assert read("paper") == {}
    quick = read("quick")
    assert set(quick) == {"rounds", "method"} and set(quick["method"]) == {"epochs", "residual_steps"}
    assert (
        quick["rounds"] < 200 and quick["method"]["epochs"] < 10 and quick["method"]["residual_steps"] < 100
    )


def test_a_file_with_a_byte_order_mark_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("windows.toml").write_bytes(b"\xef\xbb\xbfseed = 98\r\n")
    assert read("windows.toml") == {"seed": 98}


def test_a_preset_and_a_file_of_its_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quick").write_text("seed = 99\n")
    Path("quick.toml").write_text("seed = 98\n")
    assert "seed" not in read("quick")
    assert read("quick.toml") == {"seed": 98}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("quik", r"unknown preset 'quik', did you mean 'quick'\?"),
        ("Paper", r"did you mean 'paper'\?"),
        ("zzzzzz", "there are paper, quick"),
        ("nothere.toml", "nothere.toml cannot be read"),
        ("folder.toml", "folder.toml cannot be read"),
        ("latin.toml", "latin.toml cannot be read"),
        ("broken.toml", r"broken.toml is not valid TOML: .*line 2"),
        ("twice.toml", "twice.toml is not valid TOML: [^:]*$"),
        ("beside.toml", r"Cannot .*: write method\.name = … when"),
        ("after.toml", r"write method\.name = … when"),
        ("table.toml", r"write method\.name = … when"),
        ("data.toml", r"write data\.name = … when"),
    ],
)
def test_a_bad_configuration_is_an_error_that_names_it(config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    Path("latin.toml").write_bytes('net = "é"'.encode("latin-1"))
    Path("broken.toml").write_text("rounds = 3\nseed ==\n")
    Path("twice.toml").write_text("rounds = 3\nrounds = 4\n")
    Path("beside.toml").write_text('method = "fedprox"\nmethod.mu = 1.0\n')
    Path("after.toml").write_text("method.mu = 1.0\nmethod = 'fedprox'\n")
    Path("table.toml").write_text('method = "fedprox"\n[method]\nmu = 1.0\n')
    Path("data.toml").write_text('rounds = 3\ndata = "fmnist"\ndata.flip = true\n')
    with pytest.raises(UserError, match=message):
        request(config, [])


def test_json_gives_the_same_request_back():
    requested = request("quick", ["seed=3", "split.labels={partial=6,share=0.1}", 'net="é α 😀"', "x=nan"])
    found = from_json(to_json(requested))
    assert found.layers[0] == requested.layers[0]
    assert found.layers[1]["x"] != found.layers[1]["x"]  # NaN
    assert {k: v for k, v in found.layers[1].items() if k != "x"} == {
        "seed": 3,
        "split": {"labels": {"partial": 6, "share": 0.1}},
        "net": "é α 😀",
    }


MONSTERS = pytest.mark.parametrize(
    "word",
    [
        "x=" + "[" * 5000,
        "x=" + "[" * 5000 + "]" * 5000,
        "x=" + "{a=" * 5000,
        "x=" + "9" * 5000,  # at most 4300 digits
        "a." * 5000 + "b=1",
        "a." * 5000 + "b",
    ],
    ids=["brackets", "nested lists", "nested tables", "digits", "dotted key", "no value"],
)


@MONSTERS
def test_a_monstrous_word_is_at_most_a_user_error(word):
    assert_requested_or_refused("paper", [word, word])


@MONSTERS
def test_a_monstrous_file_is_at_most_a_user_error(word, tmp_path):
    file = tmp_path / "monster.toml"
    file.write_text(word)
    assert_requested_or_refused(str(file), [])


def test_a_line_break_in_a_value_does_not_hide_a_second_setting():
    """No word of the user is dropped silently."""
    with pytest.raises(UserError, match=r"seed = 2.* has a line break"):
        asked("rounds=1\nseed = 2")


def assert_requested_or_refused(config, changes):
    """Makes a request; the only exception allowed is a UserError."""
    try:
        requested = request(config, changes)
        from_json(to_json(requested))
    except UserError as error:
        assert str(error)


@given(st.lists(st.text(), max_size=4))
@example(["method=1", "method.x=2"])
@example(["split.labels={}", "split.labels.a=1"])
def test_random_words_are_settings_or_a_user_error(words):
    assert_requested_or_refused("paper", words)


KEYS = st.lists(
    st.sampled_from(["method", "data", "split", "labels", "name", "x", ""]), min_size=1, max_size=4
)
VALUES = st.one_of(
    st.text(st.sampled_from("[]{}=,.'\"#\n\\ 0e-:truefalsninT"), max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_random_keys_and_values_are_settings_or_a_user_error(pairs):
    assert_requested_or_refused("quick", [f"{'.'.join(key)}={value}" for key, value in pairs])


@given(st.one_of(st.binary(max_size=60), st.text(st.sampled_from("[]{}=,.'\"#\n abmethod19-:"), max_size=60)))
@example(b"method = {}\ndata = []\n")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_random_file_is_settings_or_a_user_error(tmp_path, content):
    file = tmp_path / "random.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_requested_or_refused(str(file), [])
