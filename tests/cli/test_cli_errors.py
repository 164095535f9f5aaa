"""A user error ends with exit code 2 and a message, and leaves no files behind."""

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from small import call, process

from fedhassle.cli.main import guarded
from fedhassle.cli.options import parse_request
from fedhassle.cli.reproduce import names_and_changes
from fedhassle.runs import folder as run_folder
from fedhassle.runs import run as run_module
from fedhassle.settings.request import request


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("round=5", "did you mean 'rounds'?"),
        ("rounds=0", "rounds"),
        ("rounds=x", "got 'x'"),
        ("method.residual_stepz=1", "did you mean 'method.residual_steps'?"),
        ("method=hasle", "did you mean 'hassle'?"),
        ("method=no_such_module:X", "cannot be imported"),
        ("net=lenett", "did you mean 'lenet'?"),
        ("net=builtins:abs", "builtins:abs"),
        ("data=nothere.npz", "nothere.npz"),
        ("data=cifar", "did you mean 'cifar10'?"),
        ("data.std=[-1]", "data.std must be positive"),
        ("split.labels=10%", "20 clients"),
        ("split.labels={partial=6,share=2}", "share"),
        ("split.clients=1000", "1000 clients"),
        ("split.file=nothere", "split.clients, split.labels"),
        ("clients_per_round=7", "clients_per_round=7"),
        ("device=tpu", "'auto', 'cpu' or 'cuda'"),
        ("--device=tpu", "'auto', 'cpu' or 'cuda'"),
        ("method.tau=0", "tau must be positive"),
        ("word", "KEY=VALUE"),
        ("--nonsense", "No such option: --nonsense"),
        ("--seed=1", "there is no option --seed: settings are KEY=VALUE, so write seed=1"),
        ("--lr=1", "so write method.lr=1"),
        ("--clients-per-round=1", "so write clients_per_round=1"),
    ],
)
def test_a_bad_setting_ends_with_code_2_and_a_message(wrong, message, words, tmp_path):
    code, out, err = call("run", *words, wrong, "--out", tmp_path / "run")
    assert code == 2 and message in err and out == "" and "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (("run", "--rounds", "5"), "rounds=5"),
        (("run", "--alpha"), "split.alpha=VALUE"),
        (("split", "paper", "--alpha", "0.5"), "split.alpha=0.5"),
        (("run", "--mu", "1", "method=fedprox"), "method.mu=1"),
        (("reproduce", "table1", "--seed", "1"), "seed=1"),
        (("federation", "init", "--rounds", "5"), "rounds=5"),
    ],
)
def test_a_setting_as_an_option_is_told_how_to_write_it(words, setting):
    code, out, err = call(*words)
    assert (code, out) == (2, "") and f"settings are KEY=VALUE, so write {setting}\n" in err


def test_an_option_of_a_command_without_settings_is_not_a_setting():
    code, _, err = call("compare", "--rounds", "5")
    assert code == 2 and "No such option: --rounds" in err and "KEY=VALUE" not in err


def test_a_bad_setting_leaves_nothing_in_the_working_folder(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("run", *words, "round=5")[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("several", [(), ("--vary", "seed=0,1")])
def test_a_dangling_link_in_place_of_the_runs_folder_is_named(several, words, tmp_path, monkeypatch):
    """If a name is taken, another is tried; here that would loop for ever."""
    tries = itertools.count()

    def once(requested):
        assert next(tries) == 0
        return real(requested)

    real = run_folder.default_folder
    monkeypatch.setattr(run_folder, "default_folder", once)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("big-disk")
    code, _, err = call("run", *words, *several)
    assert code == 2 and "big-disk" in err
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_name_of_a_method_cannot_create_a_folder_elsewhere(words, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call("run", *words, "method=../../outside/x")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_very_long_name_is_a_user_error(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", *words, "method=" + "a" * 300)
    assert code == 2 and "unknown method" in err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("quik", "did you mean 'quick'?"),
        ("nothere.toml", "nothere.toml cannot be read"),
        ("bad.toml", "bad.toml is not valid TOML"),
        ("images.npz", "unknown preset"),
    ],
)
@pytest.mark.parametrize("command", ["run", "split"])
def test_a_bad_configuration_ends_with_code_2(command, config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("rounds = = 3")
    code, _, err = call(command, config)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "zip"]
)
def test_an_invalid_npz_file_ends_with_code_2(content, words, tmp_path):
    bad = tmp_path / "bad.npz"
    bad.write_bytes(content)
    code, _, err = call("run", *words, f"data={bad}", "--out", tmp_path / "run")
    assert code == 2 and str(bad) in err and not (tmp_path / "run").exists()


def test_images_too_small_for_the_network_end_with_code_2(words, tmp_path):
    tiny = tmp_path / "tiny.npz"
    x, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    np.savez(tiny, x_train=x, y_train=y, x_test=x, y_test=y)
    code, _, err = call("run", *words, f"data={tiny}", "--out", tmp_path / "run")
    assert code == 2 and "12×12" in err and "net=resnet8" in err


def test_a_folder_that_holds_a_run_is_not_touched(words, finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, err = call("run", *words, "seed=9", "--out", folder)
    assert code == 2 and f"fedhassle resume {folder}" in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_holds_something_else_is_not_touched(words, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, err = call("run", *words, "--out", tmp_path)
    assert code == 2 and "choose another --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "folder",
    ["file", "file/under", "file/under/deep"],
)
def test_a_folder_that_cannot_be_made_ends_with_code_2(folder, words, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = call("run", *words, "--out", tmp_path / folder)
    assert code == 2 and str(tmp_path / folder) in err and "Traceback" not in err


@pytest.mark.parametrize("option", ["--picture", "--save"])
@pytest.mark.parametrize("name", ["file/under.png", "folder.png"])
def test_a_picture_or_split_that_cannot_be_written_ends_with_code_2(
    option, name, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder.png").mkdir()
    code, _, err = call("split", *words, option, name)
    assert code == 2 and f"{name} cannot be written: " in err


@pytest.mark.parametrize(("file", "said"), [(None, ""), ("a b.png", "a b.png: ")])
def test_an_operating_system_error_names_its_file_if_it_has_one(file, said, capsys):
    def fails():
        raise OSError(errno.ENOSPC, "No space left on device", *([] if file is None else [file]))

    assert guarded(fails) == 2
    assert capsys.readouterr().err == f"fedhassle: {said}No space left on device\n"


@pytest.mark.parametrize("folder", ["nothere", "empty", "file"])
def test_resuming_something_else_ends_with_code_2(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    code, _, err = call("resume", tmp_path / folder)
    assert code == 2 and "holds no run" in err


def test_a_data_folder_may_have_any_name():
    for name in ("plain", "with space", 'quo"te', "back\\slash", "émoji 😀"):
        assert parse_request(["paper"], Path(name), None).layers[-1] == {
            "data": {"folder": str(Path.cwd() / name)}
        }


def test_a_settings_file_may_have_an_equals_sign_in_its_name(tmp_path, monkeypatch):
    """For every command: a word that ends in .toml is a file, not KEY=VALUE."""
    monkeypatch.chdir(tmp_path)
    Path("alpha=1.toml").write_text("rounds = 7")
    requested = parse_request(["alpha=1.toml", "seed=3"], None, None)
    assert [*requested.layers] == [{"rounds": 7}, {"seed": 3}]
    assert names_and_changes(["alpha=1.toml", "seed=3"], None) == (["alpha=1.toml"], ["seed=3"])


def test_no_command_and_unknown_commands_end_with_code_2():
    assert call()[0] == 2
    code, _, err = call("trian")
    assert code == 2 and "trian" in err


def test_a_process_prints_no_traceback_and_ends_with_code_2(tmp_path):
    done = process("run", "data=nothere.npz", "--out", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"fedhassle: ") and b"Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_built_leaves_nothing(images, tmp_path, monkeypatch):
    """After any error; an empty folder runs that existed before stays."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    words = [
        f"data={images}",
        "method.batch=0",
        "split.clients=6",
        "split.labels={partial=3, unlabelled=3, share=0.3}",
        "clients_per_round=4",
    ]
    code, _, err = call("run", "paper", *words, "--out", "mine")
    assert code == 2 and "method.batch" in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["runs"]

    def broken(*_):
        raise RuntimeError("not the user's fault")

    monkeypatch.setattr(run_module, "method_for_run", broken)
    with pytest.raises(RuntimeError):
        run_module.start(request("paper", words[:1]), Path("mine"))
    assert not Path("mine").exists() and Path("runs").exists()
