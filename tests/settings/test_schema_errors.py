"""Invalid settings, and the error messages about them."""

import math

import pytest
import small
from small import built, resolved

from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.settings.request import Request, request
from fedhassle.settings.schema import require_finite, resolve


@pytest.mark.parametrize(
    ("word", "key", "nearest"),
    [
        ("round=5", "round", "rounds"),
        ("sede=5", "sede", "seed"),
        ("splits.alpha=1", "splits", "split"),
        ("split.alhpa=1", "split.alhpa", "split.alpha"),
        ("split.client=3", "split.client", "split.clients"),
        ("data.Folder=x", "data.Folder", "data.folder"),
        ("client_per_round=1", "client_per_round", "clients_per_round"),
        ("method.epoch=1", "method.epoch", "method.epochs"),
        ("method.residual_step=1", "method.residual_step", "method.residual_steps"),
        ("method.TAU=1", "method.TAU", "method.tau"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(word, key, nearest):
    """The message about a setting of a method also names the method."""
    with pytest.raises(UserError) as caught:
        resolved(word)
    of = " of hassle" if key.startswith("method.") else ""
    assert str(caught.value) == f"unknown setting {key!r}{of}, did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("word", "full"),
    [
        ("lr=0.1", "'method.lr'"),
        ("epochs=3", "'method.epochs'"),
        ("epoch=3", "'method.epochs'"),
        ("batch_size=3", "'method.batch'"),
        ("learning_rate=0.1", "'method.lr'"),
        ("method.learning_rate=0.1", "'method.lr'"),
        ("alpha=0.1", "'split.alpha'"),
        ("clients=3", "'split.clients'"),
        ("n_clients=3", "'split.clients'"),
        ("model=lenet", "'net'"),
        ("folder=x", "'data.folder'"),
        ("split.lr=1", "'method.lr'"),
        ("method.rounds=3", "'rounds'"),
        ("method.seed=3", "'seed' or 'split.seed'"),
    ],
)
def test_a_key_of_another_table_is_named_in_full(word, full):
    with pytest.raises(UserError) as caught:
        resolved(word)
    assert str(caught.value).endswith(f", did you mean {full}?")


@pytest.mark.parametrize("key", ["optimizer", "optimiser", "method.optimizer"])
def test_an_optimiser_is_a_setting_of_the_method(key):
    with pytest.raises(UserError, match=r"did you mean 'method\.optimiser'\?$"):
        resolved(f"{key}=adamw")
    with pytest.raises(UserError, match=r"method\.optimiser: input should be 'sgd' or 'adamw', got 'adam'"):
        resolved("method.optimiser=adam")


@pytest.mark.parametrize(
    ("word", "choice"),
    [
        ("seed=0,1,2", "seed=0,1,2"),
        ("seed=[0, 1]", "seed=0,1"),
        ("method.lr=0.1,0.2", "method.lr=0.1,0.2"),
        ("split.kind=iid,authors", "split.kind=iid,authors"),
        ("method=hassle,fedavg", "method=hassle,fedavg"),
        ("data=fmnist,cifar10", "data=fmnist,cifar10"),
        ("net=lenet,resnet8", "net=lenet,resnet8"),
    ],
)
def test_several_values_are_told_how_to_vary(word, choice):
    with pytest.raises(UserError) as caught:
        resolved(word)
    assert str(caught.value).endswith(f"; for a run of each: fedhassle run --vary {choice}")


def test_one_wrong_value_is_not_told_to_vary():
    with pytest.raises(UserError, match=r"got 'x'$"):
        resolved("seed=x")


def test_an_unknown_tracker_is_told_those_there_are():
    with pytest.raises(UserError, match=r"^track: there is no tracker 'comet': there are tensorboard"):
        resolved("track=mlflow,comet")


def test_an_unknown_network_is_told_those_there_are_before_images_load():
    with pytest.raises(UserError, match=r"unknown network 'vgg' \(there are lenet, .*wrn-28-2; your own is"):
        resolved("net=vgg", "data=nothere.npz")


def test_a_key_that_another_method_has_says_which_one_lacks_it():
    with pytest.raises(UserError, match=r"^unknown setting 'method\.residual_steps' of fedavg \(known are "):
        resolved("method.residual_steps=2", "method=fedavg")


@pytest.mark.parametrize("key", ["method.foo", "split.foo", "data.foo"])
def test_the_table_of_a_key_does_not_count_for_the_nearest_key(key):
    with pytest.raises(UserError, match=rf"unknown setting '{key}'( of hassle)? \(known are "):
        resolved(f"{key}=1")


def test_an_unknown_key_unlike_any_other_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown setting 'zzz' \(known are data, net, seed, rounds,"):
        resolved("zzz=1")


def test_one_error_lists_every_mistake():
    with pytest.raises(UserError) as caught:
        resolved("rounds=0", "sede=1", "split.alpha=x", "method.lr=fast")
    assert [line.partition(":")[0] for line in sorted(str(caught.value).splitlines())] == [
        "method.lr",
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
        *("method.residual_width=1.1", "method.residual_steps=0", "method.confidence=2", "method.warmup=-1"),
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
        built(resolve(Request((request("paper", {**small.SETTINGS, "data": str(images)}).layers[1], value))))
    assert key.rpartition(".")[2] in str(caught.value) or changes[key] in str(caught.value)


@pytest.mark.parametrize(
    "layers",
    [
        ({"split": {"file": "/s.npz", "alpha": 0.5}},),
        ({"split": {"file": "/s.npz"}}, {"split": {"alpha": 0.5}}),
        ({"split": {"clients": 3}}, {"split": {"file": "/s.npz"}}, {"split": {"alpha": 0.5}}),
    ],
    ids=["beside", "above", "below and above"],
)
def test_a_split_file_excludes_other_settings_of_splits(layers):
    with pytest.raises(UserError) as caught:
        resolve(Request(layers))
    assert str(caught.value).endswith("leave out split.alpha") and "split.file=/s.npz" in str(caught.value)


def test_an_infinite_clip_is_refused(images):
    """A summary cannot hold it; 0 switches clipping off."""
    with pytest.raises(UserError, match="clip"):
        built(resolve(request("paper", {**small.SETTINGS, "data": str(images), "method.clip": math.inf})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": math.inf}, "a must be finite, got inf"),
        ({"a": {"b": -math.inf}}, "a.b must be finite, got -inf"),
        ({"a": {"b": [1.0, {"c": math.nan}]}}, "a.b.1.c must be finite, got nan"),
    ],
)
def test_inf_and_nan_are_refused_at_any_depth(settings, message):
    with pytest.raises(UserError) as caught:
        require_finite(settings)
    assert str(caught.value) == message


def test_finite_values_pass():
    settings = {"a": [1, 2.5, -1e308, 10**400, "inf", "nan", True, None], "b": {}, "c": []}
    assert require_finite(settings) is None


@pytest.mark.parametrize("table", ["", "[method]", "[split]", "[data]"])
def test_many_unknown_settings_are_counted(table, tmp_path):
    file = tmp_path / "many.toml"
    file.write_text(f"{table}\n" + "".join(f"k{i} = 1\n" for i in range(20_000)))
    with pytest.raises(UserError) as found:
        resolve(request(str(file), []))
    *first, last = str(found.value).splitlines()
    assert last == "… and 19,990 more" and len(first) == 10 and len(str(found.value)) < 5000
    assert all(f"k{i}'" in line for i, line in enumerate(first))


@pytest.mark.parametrize("key", ["net", "data", "method", "rounds", "a" * 10**6])
def test_a_long_setting_is_cut_in_the_error(key, images, tmp_path):
    with pytest.raises(UserError) as found:
        built(resolve(request("paper", {**small.SETTINGS, "data": str(images), key: "b" * 10**6})))
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", ["1.7e308", "1e39"])
def test_a_number_beyond_float32_is_refused(method, value, images):
    """PyTorch would raise in the first step: "value cannot be converted to type float without overflow"."""
    words = [f"data={images}", f"method={method}", f"method.lr={value}"]
    with pytest.raises(UserError, match=r"method\.lr must be at most 3\.4e\+38"):
        built(resolve(request("paper", {**small.SETTINGS, "data": str(images)}, words)))
