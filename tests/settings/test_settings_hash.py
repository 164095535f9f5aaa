"""The hash of settings: equal for runs that differ only in seed and machine."""

import dataclasses
import shutil
import typing

import pytest
import small
import torch
from small import resolved

from fedhassle.data import npz
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.settings.build import build_dataset
from fedhassle.settings.hashing import expected_hash, settings_hash
from fedhassle.settings.request import MACHINE


def hash_of(dataset, *words):
    return settings_hash(resolved(*words), dataset, small.SPLIT)


def test_the_hash_is_of_settings_and_not_of_machines_or_seeds(tmp_path):
    dataset = small.dataset()
    base = hash_of(dataset)
    same = ("seed=5", "threads=3", "data.folder=elsewhere", f"data.folder={tmp_path}", "device=cpu")
    assert {hash_of(dataset, word) for word in same} == {base}
    assert base == hash_of(dataset, "rounds=200", "method=hassle", "method.tau=2", "split.alpha=0.1")


def test_the_hash_is_the_same_on_every_machine(monkeypatch):
    """Lanes, precision and compilation do not change what is trained."""
    dataset = small.dataset()
    base = hash_of(dataset, "device=cpu")
    on_cpu = [
        ("lanes=3",),
        ("stack=8",),
        ("precision=fp32",),
        ("compile=false",),
        ("deterministic=true",),
        ("track=mlflow",),
        ("workers=2",),
        ("ray=auto", "workers=3"),
    ]
    assert {hash_of(dataset, "device=cpu", *words) for words in on_cpu} == {base}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    on_gpu = [("precision=bf16",), ("precision=tf32", "lanes=1"), ("compile=true",), ("deterministic=true",)]
    assert {hash_of(dataset, "device=cuda", *words) for words in on_gpu} == {base}
    named = {word.partition("=")[0] for words in on_cpu + on_gpu for word in words}
    assert named | {"device", "threads"} == set(MACHINE)  # a new setting belongs in these lists


def test_the_hash_changes_with_every_other_setting():
    dataset = small.dataset()
    words = [
        *("rounds=3", "clients_per_round=3", "evaluate_every=3", "net=resnet8", "data.holdout=0.5"),
        *("data.mean=[0.1]", "data.std=[0.1]", "data.flip=true", "data.crop=1", "split.kind=iid"),
        *("split.annotation=own", "split.alpha=3", "split.clients=3", "split.labels=PL", "split.size=3"),
        *("split.ratio=3", "split.seed=3", "split.file=x", "method=fedavg", "method=fedprox"),
        *(
            "method.average=0.5",
            "method.teacher=average",
            "method.schedule=cosine",
            "method.horizon=3",
            "method.lr_warmup=3",
            "method.optimiser=adamw",
            "method.weight_decay=0.3",
            "method.nesterov=true",
            "method.prior=batch",
            "method.labelled_view=strong",
            "method.merging=median",
            "method.trim=0.3",
        ),
        *("method.batch=3", "method.epochs=3", "method.lr=3", "method.momentum=0.3", "method.clip=3"),
        *("method.gra=false", "method.mpa=false", "method.gamma=3", "method.proximity=norm"),
        *("method.residual_target=with_residual", "method.tau=3", "method.lam=3", "method.residual_steps=3"),
        *("method.residual_decay=3", "method.residual_width=0.3", "method.pseudo_labels=online"),
        *("method.confidence=0.3", "method.shared_start=true", "method.residual_rounds=3", "method.warmup=3"),
    ]
    fields = {f"method.{f.name}" for f in dataclasses.fields(METHODS["hassle"])} - {"method.net"}
    assert fields <= {word.partition("=")[0] for word in words}  # a new setting belongs in this list
    hashes = [hash_of(dataset), *(hash_of(dataset, word) for word in words)]
    assert len(set(hashes)) == len(hashes)


def test_an_option_that_is_none_does_not_change_the_hash(module):
    """So that finished runs stay valid when a method gets a new option."""
    text = """
from dataclasses import dataclass
from fedhassle.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    option: float | None = None
"""
    dataset, name = small.dataset(), module("optional", text)
    settings = resolved(f"method={name}:Mine")
    lacking = settings.method.model_copy()
    lacking.model_extra.pop("option")
    assert "option" in settings.method.settings and "option" not in lacking.settings
    without = settings.model_copy(update={"method": lacking})
    base = settings_hash(settings, dataset, small.SPLIT)
    assert base == settings_hash(without, dataset, small.SPLIT)
    assert base != hash_of(dataset, f"method={name}:Mine", "method.option=0.0")


def changed(hint, default):
    """Another value for a field."""
    kinds = typing.get_args(hint)
    words = [word for kind in kinds for word in typing.get_args(kind)]  # of a Literal that may be None
    if words:
        return next(word for word in words if word != default)
    if bool in (hint, *kinds):
        return str(not default).lower()
    if typing.get_origin(hint) is typing.Literal:
        return next(kind for kind in kinds if kind != default)
    return "7" if int in (hint, *kinds) else "0.3125"


@pytest.mark.parametrize("name", METHODS)
def test_the_hash_changes_with_every_setting_of_every_method(name):
    dataset, hints = small.dataset(), typing.get_type_hints(METHODS[name])
    fields = [field for field in dataclasses.fields(METHODS[name]) if field.name != "net"]
    words = [f"method.{field.name}={changed(hints[field.name], field.default)}" for field in fields]
    hashes = [hash_of(dataset, f"method={name}", *word) for word in ((), *((word,) for word in words))]
    assert len(set(hashes)) == len(fields) + 1


def test_every_method_has_its_own_hash():
    dataset = small.dataset()
    assert len({hash_of(dataset, f"method={name}") for name in METHODS}) == len(METHODS)


def test_a_users_images_count_by_their_content(images, tmp_path):
    copy, other = tmp_path / "copy.npz", tmp_path / "small.npz"
    copy.write_bytes(images.read_bytes())
    small.save_images(other, small.dataset(train=240, seed=1))
    hashes = []
    for path in (images, copy, other):
        settings = resolved(f"data={path}")
        hashes.append(settings_hash(settings, build_dataset(settings), small.SPLIT))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_users_images_are_read_once_until_the_file_changes(images, tmp_path, monkeypatch):
    """Settings that do not fit the images are an error for each run."""
    read, paths = npz.read, []
    monkeypatch.setattr(npz, "read", lambda path: paths.append(path) or read(path))
    own = tmp_path / "own.npz"
    shutil.copy(images, own)
    words = [(), ("seed=1",), ("method=fedavg", "rounds=3"), ("seed=2",)]
    first, again, other, _ = [expected_hash(resolved(f"data={own}", *more)) for more in words]
    assert paths == [own] and first == again != other
    for _ in range(2):
        with pytest.raises(UserError, match=r"data\.mean"):
            expected_hash(resolved(f"data={own}", "data.mean=[0.1, 0.2]"))
    small.save_images(own, small.dataset(train=60))
    assert expected_hash(resolved(f"data={own}")) != first


def test_the_held_out_images_do_not_change_the_hash(images):
    words = [f"data={images}", "data.holdout=0.2"]
    both = [resolved(*words, f"seed={seed}") for seed in (0, 1)]
    one, other = (build_dataset(settings) for settings in both)
    assert one.x_test.tobytes() != other.x_test.tobytes()
    hashes = [expected_hash(settings) for settings in both]
    hashes += [settings_hash(both[0], one, small.SPLIT), settings_hash(both[1], other, small.SPLIT)]
    assert len(set(hashes)) == 1


def test_a_split_in_a_file_counts_by_its_content():
    dataset, here, there = small.dataset(), resolved("split.file=here"), resolved("split.file=there")
    other = dataclasses.replace(small.SPLIT, labelled=small.SPLIT.labelled[::-1])
    assert settings_hash(here, dataset, small.SPLIT) == settings_hash(there, dataset, small.SPLIT)
    assert settings_hash(here, dataset, small.SPLIT) != settings_hash(here, dataset, other)


def test_the_hash_is_known_before_a_run_is_built(images, tmp_path, monkeypatch):
    """A user's images and a split in a file count by content, known data sets by name."""
    small.SPLIT.save(tmp_path / "split.npz")
    own = [f"data={images}", f"data={tmp_path / 'copy.npz'}"]
    (tmp_path / "copy.npz").write_bytes(images.read_bytes())
    for words in ([own[0]], [own[1]], [own[0], "data.holdout=0.2", "seed=3"], [f"data={images}", "rounds=3"]):
        settings = resolved(*words)
        assert expected_hash(settings) == settings_hash(settings, build_dataset(settings), small.SPLIT)
    settings = resolved(own[0], f"split.file={tmp_path / 'split.npz'}")
    assert expected_hash(settings) == settings_hash(settings, build_dataset(settings), small.SPLIT)
    monkeypatch.setattr("fedhassle.settings.hashing.build_dataset", None)  # nothing is loaded for a named set
    named = dataclasses.replace(small.dataset(), name="cifar10")
    settings = resolved("data=cifar10", "data.folder=nowhere")
    assert expected_hash(settings) == settings_hash(settings, named, small.SPLIT)


@pytest.mark.parametrize("key", ["method", "net"])
def test_a_users_code_counts_by_its_source(key, module):
    """A result of an earlier version of the code is not a result of the current one."""
    text = "from fedhassle.methods.fedavg import FedAvg as Mine" if key == "method" else "class Mine: pass"
    words = ("data=fmnist-mini", f"{key}={module(f'hashed_{key}', text)}:Mine")
    first = expected_hash(resolved(*words))
    assert first == expected_hash(resolved(*words, "seed=3"))
    module(f"hashed_{key}", text + "\n# changed")
    assert expected_hash(resolved(*words)) != first
    with pytest.raises(UserError, match="cannot be imported"):
        expected_hash(resolved("data=fmnist-mini", f"{key}=nowhere_at_all:Mine"))
