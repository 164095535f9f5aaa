"""Settings: the paper's defaults, presets, paths, and config.toml."""

import tomllib
from pathlib import Path

import pytest
import small
import tomli_w
import torch
from small import built, resolved

import fedhassle
from fedhassle.data.catalogue import CATALOGUE
from fedhassle.engine.cores import available_cores
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.settings import schema
from fedhassle.settings.request import Request, from_json, presets, request, to_json
from fedhassle.settings.schema import resolve

# The paper's settings


def test_the_defaults_are_the_papers():
    settings = resolved()
    assert (settings.rounds, settings.clients_per_round, settings.evaluate_every) == (200, 8, 2)
    split = settings.split
    assert (split.clients, split.alpha, split.labels) == (20, 0.1, "10%")
    assert (split.kind, split.annotation) == ("authors", "independent")
    assert (split.size, split.ratio, split.seed, split.file) == (None, None, None, None)
    assert settings.method.name == "hassle" and settings.seed == 0 and settings.data.name == "fmnist-mini"
    expected = {
        "batch": 128,
        "epochs": 10,
        "lr": 0.1,
        "momentum": 0.9,
        "gamma": 0.001,
        "tau": 2.0,
        "lam": 1.0,
        "residual_width": 0.25,
        "residual_steps": 100,
        "gra": True,
        "mpa": True,
    }
    assert {key: settings.method.settings[key] for key in expected} == expected


def test_quick_differs_from_paper_in_rounds_epochs_and_residual_steps_alone():
    quick, paper = (resolved(config=name).model_dump() for name in ("quick", "paper"))
    for chosen in (quick, paper):
        chosen.pop("rounds")
        for key in ("epochs", "residual_steps"):
            chosen["method"].pop(key)
    assert quick == paper


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_preset_builds_with_every_method(name, method, images):
    settings = resolve(request(name, {**small.SETTINGS, "data": str(images), "method.name": method}))
    _, split, made = built(settings)
    assert len(split.names) == 6 and type(made) is METHODS[method] and made.batch == 16


def test_the_papers_layout_builds_on_the_shipped_images():
    dataset, split, method = built(resolved())
    assert len(dataset.y_train) == 12_000 and len(split.names) == 20 and method.batch == 128
    assert sum(map(len, split.labelled)) == 1200


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_known_data_set_resolves(name):
    assert resolved(f"data={name}").data.name == name


def test_a_file_holds_only_what_differs_from_paper(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[split]\nalpha = 0.7\n")
    changed, paper = resolved(config=str(file)), resolved()
    assert changed.split.alpha == 0.7
    assert changed.model_copy(update={"split": paper.split}) == paper


# A change of method


def test_the_fields_of_a_method_become_a_model_once():
    """A report checks the settings of a thousand runs."""
    before = schema.settings_model.cache_info().misses
    for seed in range(3):
        assert resolved(f"seed={seed}", "method.lr=0.5").method.settings["lr"] == 0.5
    assert schema.settings_model.cache_info().misses <= before + 1


def test_quick_drops_the_settings_that_only_hassle_has():
    settings = resolved("method=fedavg", config="quick")
    assert settings.method.name == "fedavg" and settings.rounds == resolved(config="quick").rounds
    assert settings.method.settings["epochs"] == tomllib.loads(preset_text("quick"))["method"]["epochs"]
    assert "residual_steps" not in settings.method.settings


def preset_text(name):
    return (Path(fedhassle.__file__).parent / "settings" / "presets" / f"{name}.toml").read_text("utf-8")


@pytest.mark.parametrize(
    "words",
    [("method.residual_steps=5", "method=fedavg"), ("method=fedavg", "method.residual_steps=5")],
)
@pytest.mark.parametrize("config", ["quick", "paper"])
def test_a_setting_asked_for_together_with_a_method_that_lacks_it_is_an_error(words, config):
    with pytest.raises(UserError, match=r"unknown setting 'method\.residual_steps'"):
        resolved(*words, config=config)


def test_a_setting_without_its_method_is_an_error_also_in_one_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\nname = "fedavg"\ntau = 1.0\n')
    with pytest.raises(UserError, match=r"method\.tau"):
        resolved(config=str(file))


def test_cuda_on_a_machine_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cpu"):
        resolved("device=cuda")
    assert resolved("device=auto").device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert resolved("device=auto").device == "cuda" and resolved("device=cpu").device == "cpu"


def test_threads_default_to_the_cores_available_to_the_process(monkeypatch):
    for cores in (1, 2, 7):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert available_cores() == cores
    assert resolved("threads=3").threads == 3


# Paths


def test_paths_stay_right_in_another_folder(images, monkeypatch, tmp_path):
    monkeypatch.chdir(images.parent)
    settings = resolved(f"data={images.name}", "data.folder=here")
    monkeypatch.chdir(tmp_path)
    assert Path(settings.data.name) == images
    assert Path(settings.data.folder) == images.parent / "here"


def test_a_path_in_capitals_stays_right_in_another_folder(images, monkeypatch, tmp_path):
    (tmp_path / "SMALL.NPZ").write_bytes(images.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert Path(resolved("data=SMALL.NPZ").data.name) == tmp_path / "SMALL.NPZ"


def test_a_split_file_stays_right_in_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(resolved("split.file=s.npz").split.file) == tmp_path / "s.npz"


def test_a_tilde_stands_for_the_home_folder(images, monkeypatch):
    """No shell expands the tilde in `data=~/small.npz`."""
    monkeypatch.setenv("HOME", str(images.parent))
    settings = resolved("data=~/small.npz", "data.folder=~/there")
    assert Path(settings.data.name) == images
    assert Path(settings.data.folder) == images.parent / "there"


# config.toml


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("method=fedprox", "method.mu=0.5", "method.clip=2"),
        ("split.labels=[0.5, 1, 0]", "split.clients=3", "split.seed=4", "split.size=3", "split.ratio=0.5"),
        (
            "split.labels={full=1,partial=2,share=0.3}",
            "split.clients=3",
            "data.mean=[0.1]",
            "data.flip=false",
        ),
        ("net=my.own:Net", "data=images.npz", "data.folder=somewhere", "data.crop=0", "method.clip=0"),
        ("split.file=s.npz", "seed=3"),
        ('data="é α 😀.npz"', "method.gamma=1e-12", "method.lr=0.30000000000000004"),
    ],
)
def test_resolved_settings_come_back_from_their_file(words):
    settings = resolved(*words)
    text = tomli_w.dumps(settings.as_toml())
    assert resolve(Request((tomllib.loads(text),))) == settings
    assert resolve(from_json(to_json(request("paper", words)))) == settings


def test_a_number_of_clients_that_is_none_is_left_out():
    """From Python; TOML has no None."""
    settings = resolve(request("paper", {"split.labels": {"full": 6, "share": None}, "split.clients": 6}))
    assert tomllib.loads(tomli_w.dumps(settings.as_toml()))["split"]["labels"] == {"full": 6}


def test_a_split_in_a_file_is_the_only_setting_of_splits():
    """It replaces the split of a preset or file below it, which config.toml then does not mention."""
    below, file = {"split": {"alpha": 0.5, "clients": 7}}, {"split": {"file": "/s.npz"}}
    settings = resolve(Request((below, file)))
    assert settings.as_toml()["split"] == {"file": "/s.npz"}
    assert settings == resolve(Request((file,)))


def test_a_split_file_in_a_config_of_an_earlier_version_is_read():
    """Earlier versions wrote all settings of splits beside the file, though they had no effect."""
    table = {"kind": "iid", "annotation": "own", "alpha": 0.5, "clients": 7, "labels": "10%"}
    settings = resolve(Request(({"split": {**table, "file": "/s.npz"}},)))
    assert settings.as_toml()["split"] == {"file": "/s.npz"}


def test_the_settings_of_one_method_come_back_over_another_preset(tmp_path):
    file = tmp_path / "config.toml"
    settings = resolved("method=fedavg", config="quick")
    file.write_text(tomli_w.dumps(settings.as_toml()))
    assert resolved(config=str(file)) == settings
