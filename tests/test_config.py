"""Settings: the paper's defaults, what is refused and why, and what is built from them."""

import dataclasses
import json
import math
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import small
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedhassle
from fedhassle.config import (
    build_dataset,
    build_method,
    build_net,
    build_split,
    default_threads,
    resolve,
    settings_hash,
)
from fedhassle.data.datasets import CATALOGUE
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.requested import Requested, from_json, presets, request, to_json

SMALL = {
    "split.clients": 6,
    "split.labels": {"full": 1, "partial": 2, "unlabelled": 3, "share": 0.3},
    "clients_per_round": 4,
    "method.batch": 16,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A file of 240 small images of four classes."""
    made, path = small.dataset(train=240), tmp_path_factory.mktemp("images") / "small.npz"
    np.savez(path, x_train=made.x_train, y_train=made.y_train, x_test=made.x_test, y_test=made.y_test)
    return path


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an importable module of the user's own, and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def resolved(*words, config="paper"):
    """The settings of words over a preset."""
    return resolve(request(config, words))


def built(settings):
    """All that a run builds before it trains."""
    dataset = build_dataset(settings, progress=False)
    split = build_split(settings, dataset)
    split.check(len(dataset.y_train))
    method = build_method(settings.method.name, settings.method.settings, build_net(settings, dataset))
    return dataset, split, method


# The paper's settings


def test_the_defaults_are_the_papers():
    settings = resolved()
    assert (settings.rounds, settings.clients_per_round, settings.evaluate_every) == (200, 8, 2)
    split = settings.split
    assert (split.clients, split.alpha, split.labels) == (20, 0.1, "10%")
    assert (split.kind, split.annotation) == ("balanced", "independent")
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
    settings = resolve(request(name, {**SMALL, "data": str(images), "method.name": method}))
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


def test_quick_drops_the_settings_that_only_hassle_has():
    settings = resolved("method=fedavg", config="quick")
    assert settings.method.name == "fedavg" and settings.rounds == resolved(config="quick").rounds
    assert settings.method.settings["epochs"] == tomllib.loads(preset_text("quick"))["method"]["epochs"]
    assert "residual_steps" not in settings.method.settings


def preset_text(name):
    return (Path(fedhassle.__file__).parent / "presets" / f"{name}.toml").read_text("utf-8")


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


# What is refused


@pytest.mark.parametrize(
    ("word", "key", "nearest"),
    [
        ("round=5", "round", "rounds"),
        ("sede=5", "sede", "seed"),
        ("splits.alpha=1", "splits", "split"),
        ("split.alhpa=1", "split.alhpa", "split.alpha"),
        ("split.client=3", "split.client", "split.clients"),
        ("data.Folder=x", "data.Folder", "data.folder"),
        ("method.epoch=1", "method.epoch", "method.epochs"),
        ("method.residual_step=1", "method.residual_step", "method.residual_steps"),
        ("method.TAU=1", "method.TAU", "method.tau"),
        ("client_per_round=1", "client_per_round", "clients_per_round"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(word, key, nearest):
    with pytest.raises(UserError) as caught:
        resolved(word)
    assert str(caught.value) == f"unknown setting {key!r}, did you mean {nearest!r}?"


def test_an_unknown_key_that_is_near_to_none_lists_all():
    with pytest.raises(UserError, match=r"unknown setting 'zzz' \(known are data, net, seed, rounds,"):
        resolved("zzz=1")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UserError) as caught:
        resolved("rounds=0", "sede=1", "split.alpha=x")
    assert [line.partition(":")[0] for line in sorted(str(caught.value).splitlines())] == [
        "rounds",
        "split.alpha",
        "unknown setting 'sede', did you mean 'seed'?",
    ]


@pytest.mark.parametrize(
    "word",
    [
        *("rounds=0", "rounds=-3", "rounds=1.5", "rounds=many", "rounds=true", "rounds=[1]", "rounds=nan"),
        *("seed=-1", "seed=4294967296", "seed=x", "clients_per_round=0", "evaluate_every=0"),
        *("threads=-1", "threads=2000", "device=tpu", "device=CPU", "net=3", "data=3", "data.flip=1"),
        *("data.holdout=1", "data.holdout=-0.1", "data.holdout=nan", "data.crop=-1", "data.mean=0.5"),
        *("split=x", "split.kind=even", "split.annotation=other", "split.clients=2.5", "split.seed=-1"),
        *("method=[]", "method.epochs=1.5", "method.gra=1", "method.proximity=cubed", "method.lr=fast"),
        *("method.clip=true", "method.pseudo_labels=never", "method.net=lenet"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_key(word):
    key = word.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key}|{key}\.name"):
        resolved(word)


@pytest.mark.parametrize(
    "word",
    [
        *(
            "method.batch=0",
            "method.batch=100000000000000",
            "method.epochs=0",
            "method.lr=0",
            "method.lr=nan",
        ),
        *("method.lr=inf", "method.momentum=1", "method.momentum=-1", "method.clip=-1", "method.clip=nan"),
        *("method.gamma=-1", "method.lam=nan", "method.tau=0", "method.residual_width=0"),
        *("method.residual_width=1.1", "method.residual_steps=0", "method.threshold=2", "method.warmup=-1"),
        *("split.alpha=0", "split.alpha=nan", "split.clients=0", "split.size=0", "split.ratio=-1"),
        *("split.labels=11%", "split.labels=[]", "split.labels={}", "split.labels=true", "split.labels=10%"),
        *("data.std=[0]", "data.mean=[nan]", "data.mean=[0.5,0.5]", "data.crop=12", "split.file=nothere"),
        *("net=lenett", "net=nothing_of_that_name:Net", "data=nothere.npz", "data=fmnst", "data="),
    ],
)
def test_a_value_that_cannot_work_is_an_error_that_names_its_key(word, images):
    changes = dict([word.split("=", 1)])
    value = request("paper", [word]).layers[-1]
    key = next(iter(changes))
    with pytest.raises(UserError) as caught:
        built(resolve(Requested((request("paper", {**SMALL, "data": str(images)}).layers[1], value))))
    assert key.rpartition(".")[2] in str(caught.value) or changes[key] in str(caught.value)


def test_an_infinite_clip_is_refused(images):
    """It is no number that a summary could hold; 0 switches clipping off."""
    with pytest.raises(UserError, match="clip"):
        built(resolve(request("paper", {**SMALL, "data": str(images), "method.clip": math.inf})))


def test_cuda_where_there_is_none_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cpu"):
        resolved("device=cuda")
    assert resolved("device=auto").device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved("device=auto").device == "cuda" and resolved("device=cpu").device == "cpu"


def test_threads_are_half_the_cores_and_at_least_one(monkeypatch):
    for cores, threads in ((1, 1), (2, 1), (3, 1), (8, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert default_threads() == threads
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


def test_the_users_home_may_be_a_tilde(images, monkeypatch):
    """No shell expands the tilde in `data=~/small.npz`."""
    monkeypatch.setenv("HOME", str(images.parent))
    settings = resolved("data=~/small.npz", "data.folder=~/there")
    assert Path(settings.data.name) == images
    assert Path(settings.data.folder).expanduser() == images.parent / "there"


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
        ('data="é α 😀.npz"', "method.gamma=1e-12", "method.lr=0.30000000000000004"),
    ],
)
def test_resolved_settings_come_back_from_their_file(words):
    settings = resolved(*words)
    text = tomli_w.dumps(settings.as_toml())
    assert resolve(Requested((tomllib.loads(text),))) == settings
    assert resolve(from_json(to_json(request("paper", words)))) == settings


def test_the_settings_of_one_method_come_back_over_another_preset(tmp_path):
    file = tmp_path / "config.toml"
    settings = resolved("method=fedavg", config="quick")
    file.write_text(tomli_w.dumps(settings.as_toml()))
    assert resolved(config=str(file)) == settings


# The hash


def hash_of(dataset, *words):
    return settings_hash(resolved(*words), dataset)


def test_the_hash_is_of_settings_and_not_of_machines_or_seeds(tmp_path):
    dataset = small.dataset()
    base = hash_of(dataset)
    same = ("seed=5", "threads=3", "data.folder=elsewhere", f"data.folder={tmp_path}", "device=cpu")
    assert {hash_of(dataset, word) for word in same} == {base}
    assert base == hash_of(dataset, "rounds=200", "method=hassle", "method.tau=2", "split.alpha=0.1")


def test_the_hash_changes_with_every_other_setting():
    dataset = small.dataset()
    words = [
        *("rounds=3", "clients_per_round=3", "evaluate_every=3", "net=resnet8", "data.holdout=0.5"),
        *("data.mean=[0.1]", "data.std=[0.1]", "data.flip=true", "data.crop=1", "split.kind=iid"),
        *("split.annotation=own", "split.alpha=3", "split.clients=3", "split.labels=PL", "split.size=3"),
        *("split.ratio=3", "split.seed=3", "split.file=x", "method=fedavg", "method=fedprox"),
        *("method.batch=3", "method.epochs=3", "method.lr=3", "method.momentum=0.3", "method.clip=3"),
        *("method.gra=false", "method.mpa=false", "method.gamma=3", "method.proximity=norm"),
        *("method.residual_target=with_residual", "method.tau=3", "method.lam=3", "method.residual_steps=3"),
        *("method.residual_decay=3", "method.residual_width=0.3", "method.pseudo_labels=online"),
        *("method.threshold=0.3", "method.shared_start=true", "method.residual_rounds=3", "method.warmup=3"),
    ]
    fields = {f"method.{f.name}" for f in dataclasses.fields(METHODS["hassle"])} - {"method.net"}
    assert fields <= {word.partition("=")[0] for word in words}  # a new setting belongs into this list
    hashes = [hash_of(dataset), *(hash_of(dataset, word) for word in words)]
    assert len(set(hashes)) == len(hashes)


def test_the_hash_knows_ones_own_images_by_their_content(images, tmp_path):
    copy, other = tmp_path / "copy.npz", tmp_path / "small.npz"
    copy.write_bytes(images.read_bytes())
    made = small.dataset(train=240, seed=1)
    np.savez(other, x_train=made.x_train, y_train=made.y_train, x_test=made.x_test, y_test=made.y_test)
    hashes = []
    for path in (images, copy, other):
        settings = resolved(f"data={path}")
        hashes.append(settings_hash(settings, build_dataset(settings)))
    assert hashes[0] == hashes[1] != hashes[2]


# A method and a network of one's own

METHOD = """
    from dataclasses import dataclass
    from fedhassle import Descent, Method, Phase, Stream
    from fedhassle.losses import cross_entropy

    @dataclass(frozen=True)
    class Ridge(Method):
        "Pulls towards zero."
        strength: float = 0.01
        {field}

        def __post_init__(self):
            super().__post_init__()
            if self.strength < 0:
                raise ValueError(f"strength must not be negative, got {{self.strength}}")

        def networks(self):
            return {{"w": self.net}}

        def initial(self, seed):
            return {{"w": self.net.initial(seed)}}

        def phases(self, client, t):
            walk, descent = Stream("labelled", self.batch), Descent("w", self.loss, self.sgd())
            return (Phase("labelled", (walk,), (descent,), self.epochs),) if client.labelled else ()

        def loss(self, local, received, batch):
            z = local["w"](batch.views[0])
            return cross_entropy(z, batch.y) + self.strength * local["w"].weights.square().sum()

        def predict(self, state, x):
            return {{"model": self.net.logits(state["w"], x)}}

    class Loose(Method):
        pass

    def function():
        pass
"""

NET = """
    import torch
    from torch import nn

    class Flat(nn.Module):
        def __init__(self, shape, classes, width=1.0):
            super().__init__()
            self.output = nn.Linear(shape[0] * shape[1] * shape[2], classes{extra})

        def forward(self, x):
            return self.output(x.flatten(1))

    class Fails(nn.Module):
        def __init__(self, shape, classes, width=1.0):
            super().__init__()
            raise OSError("no weights here")

    def nothing(shape, classes, width=1.0):
        return None
"""


def test_a_method_of_ones_own_has_its_fields_as_settings(module, images):
    module("own_ridge", METHOD.format(field=""))
    words = {**SMALL, "data": str(images), "method": "own_ridge:Ridge", "method.strength": 0.5}
    settings = resolve(request("quick", words))
    assert settings.method.settings == {
        "batch": 16,
        "epochs": resolved(config="quick").method.settings["epochs"],
        "lr": 0.1,
        "momentum": 0.9,
        "clip": None,
        "strength": 0.5,
    }
    _, _, method = built(settings)
    assert type(method).__name__ == "Ridge" and method.strength == 0.5
    with pytest.raises(UserError, match=r"method\.strenght.*did you mean 'method\.strength'"):
        resolved("method=own_ridge:Ridge", "method.strenght=1")
    with pytest.raises(UserError, match=r"method\.strength: .*number"):
        resolved("method=own_ridge:Ridge", "method.strength=much")


def test_a_method_of_ones_own_trains_to_the_end(module, images, tmp_path):
    module("own_trained", METHOD.format(field=""))
    words = {**SMALL, "data": str(images), "method": "own_trained:Ridge", "rounds": 1, "threads": 1}
    result = fedhassle.run("quick", words, out=tmp_path / "run", quiet=True)
    assert result.summary["method"] == "own_trained:Ridge" and set(result.accuracy) == {"model"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_wrong:Absent", "cannot be imported: AttributeError"),
        ("own_absent:Ridge", "cannot be imported: ModuleNotFoundError"),
        ("own_wrong:function", "must be a dataclass that inherits fedhassle.Method"),
        ("own_wrong:dataclass", "must be a dataclass that inherits fedhassle.Method"),
        ("own_syntax:X", "cannot be imported: SyntaxError"),
        ("own_raises:X", "cannot be imported: ZeroDivisionError"),
        ("own_wrong.Ridge", "import path such as"),
        ("own_wrong:", "cannot be imported"),
        (":Ridge", "cannot be imported"),
        ("own_wrong:Ridge:Ridge", "cannot be imported"),
    ],
)
def test_a_wrong_import_path_says_what_is_wrong(name, message, module):
    module("own_wrong", METHOD.format(field=""))
    module("own_syntax", "def x(:")
    module("own_raises", "1 / 0")
    with pytest.raises(UserError, match=message):
        resolved(f"method={name}")


def test_a_module_that_exits_is_a_user_error(module):
    module("own_exits", "raise SystemExit(0)")
    with pytest.raises(UserError, match="own_exits"):
        resolved("method=own_exits:X")


def test_a_subclass_that_forgot_the_dataclass_is_told_so_or_has_no_new_fields(module):
    """It inherits its parent's fields; a field of its own is then no setting, and that is said."""
    module("own_loose", METHOD.format(field=""))
    with pytest.raises(UserError, match=r"unknown setting 'method\.strength'|must be a dataclass"):
        resolved("method=own_loose:Loose", "method.strength=1")


def test_what_ones_own_method_refuses_is_a_user_error(module, images):
    module("own_refuses", METHOD.format(field=""))
    words = {**SMALL, "data": str(images), "method": "own_refuses:Ridge", "method.strength": -1}
    with pytest.raises(UserError, match="strength must not be negative, got -1"):
        built(resolve(request("paper", words)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("sizes: tuple[int, ...] = (1, 2)", (1, 2)),
        pytest.param("sizes: tuple[float, float] = (1.0, 2.0)", (1.0, 2.0)),
        ("sizes: str | None = None", None),
        pytest.param(
            "sizes: dict[str, int] = __import__('dataclasses').field(default_factory=dict)",
            {},
        ),
    ],
    ids=["tuple", "pair", "optional", "factory"],
)
def test_every_plain_kind_of_field_resolves_and_comes_back_from_its_file(field, value, module, request):
    name = module("own_" + request.node.callspec.id.replace("-", "_"), METHOD.format(field=field))
    settings = resolved(f"method={name}:Ridge")
    assert settings.method.settings["sizes"] == value
    assert resolve(Requested((tomllib.loads(tomli_w.dumps(settings.as_toml())),))) == settings


@pytest.mark.parametrize(
    "field",
    [
        "sizes: 'Nothing' = 1",
        "sizes: object() = 1",
        "sizes: __import__('threading').Lock = None",
        "name: str = 'x'",
    ],
    ids=["unknown type", "no type", "opaque type", "name"],
)
def test_a_field_that_cannot_be_a_setting_is_a_user_error(field, module, request):
    name = module("own_" + request.node.callspec.id.replace(" ", "_"), METHOD.format(field=field))
    with pytest.raises(UserError, match="own_"):
        resolved(f"method={name}:Ridge")


def test_a_network_of_ones_own_is_built(module, images):
    module("own_net", NET.format(extra=""))
    words = {**SMALL, "data": str(images), "net": "own_net:Flat"}
    dataset, _, method = built(resolve(request("paper", words)))
    assert method.net.weights == 12 * 12 * 4 + 4 and dataset.net == "lenet"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_bad_net:Flat", r"logits of shape \(B, 4\), got \(2, 5\)"),
        ("own_bad_net:Absent", "cannot be imported"),
        ("own_bad_net:torch", "cannot be built"),
        ("torch.nn:ReLU", "cannot be built"),
        pytest.param("own_bad_net:nothing", "own_bad_net:nothing"),
        pytest.param("own_bad_net:Fails", "no weights here"),
        pytest.param("builtins:print", "builtins:print"),
    ],
)
def test_a_wrong_network_says_what_is_wrong(name, message, module, images):
    module("own_bad_net", NET.format(extra=" + 1"))
    with pytest.raises(UserError, match=message):
        built(resolve(request("paper", {**SMALL, "data": str(images), "net": name})))


@dataclass(frozen=True)
class Outside:
    """A dataclass that is no method."""

    batch: int = 1


def test_a_dataclass_that_is_no_method_is_refused():
    with pytest.raises(UserError, match=r"inherits fedhassle\.Method"):
        resolved(f"method={__name__}:Outside")


# Anything else ends in settings or in the user's error

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([-(2**63), 2**31, 2**63, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["hassle", "fedavg", "fedprox", "lenet", "10%", "PL", "iid", "own", "cpu", "os:path", ":"]
    ),
    st.dates(),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
LABELS = st.one_of(
    st.dictionaries(st.sampled_from(["full", "partial", "unlabelled", "share", "x"]), SCALARS, max_size=4),
    st.lists(SCALARS, min_size=5, max_size=7),
)
KEYS = [
    *("rounds", "seed", "clients_per_round", "evaluate_every", "threads", "net", "method", "split", "data"),
    *(f"data.{k}" for k in ("holdout", "mean", "std", "flip", "crop", "folder", "name", "name.x")),
    *(
        f"split.{k}"
        for k in ("kind", "annotation", "alpha", "clients", "labels", "size", "ratio", "seed", "file")
    ),
    *(f"method.{f.name}" for f in dataclasses.fields(METHODS["hassle"])),
    *("method.name", "method.mu", "x", "x.y", "", "..", "split.labels.full", "split.labels.x.y"),
]


def build_or_refuse(pairs):
    """Builds all but the training, and allows for no other exception than the user's error."""
    try:
        settings = resolve(from_json(to_json(request("quick", pairs))))
        if settings.data.name in CATALOGUE:
            return  # neither downloads nor the large default
        built(settings)
    except UserError as error:
        assert str(error)
        return
    json.dumps(settings.model_dump(), allow_nan=False)  # as a summary holds them
    assert resolve(Requested((tomllib.loads(tomli_w.dumps(settings.as_toml())),))) == settings


# Not strict: chance decides whether it meets the bugs that are marked below. Goes with their marks.
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3), st.none() | LABELS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_random_settings_build_or_end_in_a_user_error(images, changes, labels):
    layout = {} if labels is None else {"split.labels": labels}
    build_or_refuse({**SMALL, "data.name": str(images), **changes, **layout})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("data.name", "\0.npz"),
        ("data.name", "a" * 5000 + ".npz"),
        pytest.param("data.folder", "\0"),
        ("split.file", "\0"),
        pytest.param("split.file", "a" * 5000),
        ("method.name", "a" * 5000),
        ("method.name", "\0:\0"),
        ("net", "\0:\0"),
        ("split.seed", 10**400),
        ("split.clients", 10**400),
        ("split.alpha", 10**400),
        ("split.alpha", 1e308),
        ("split.alpha", 5e-324),
        pytest.param("split.ratio", 1e308),
        ("split.ratio", 10**400),
        ("split.labels", {"full": 6, "share": 1e308}),
        pytest.param("split.labels", [10**400] * 6),
        pytest.param("split.labels", {"full": 6, "share": 10**400}),
        ("split.labels", {"full": 10**400, "share": 0.5}),
        ("split.labels", {"partial": 6, "share": 5e-324}),
        ("method.clip", 1e308),
        ("method.lr", 10**400),
        ("method.residual_width", 5e-324),
        ("data.std", [5e-324]),
        ("data.mean", [1e308]),
        ("data.mean", [10**400]),
    ],
    ids=lambda value: str(value)[:12].replace("\0", "NUL"),
)
def test_a_monstrous_setting_builds_or_ends_in_a_user_error(key, value, images):
    build_or_refuse({**SMALL, "data.name": str(images), key: value})


@given(st.text(st.sampled_from("rounds=split.method[]{}\"'\n 0123,-naif"), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_toml_text_resolves_or_ends_in_a_user_error(tmp_path, text):
    file = tmp_path / "random.toml"
    file.write_text(text)
    try:
        resolve(request(str(file), []))
    except UserError as error:
        assert str(error)


@given(
    st.lists(
        st.sampled_from(KEYS).flatmap(lambda k: st.text(max_size=10).map(lambda v: f"{k}={v}")), max_size=3
    )
)
def test_random_command_words_resolve_or_end_in_a_user_error(words):
    try:
        resolve(request("quick", words))
    except UserError as error:
        assert str(error)
