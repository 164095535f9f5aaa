"""Any request ends in settings that build, or in a UserError."""

import dataclasses
import json
import tomllib

import pytest
import small
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import built

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.settings.request import Request, from_json, request, to_json
from fedhassle.settings.schema import resolve

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
    *("rounds", "seed", "clients_per_round", "evaluate_every", "threads", "track", "net", "method", "split"),
    "data",
    *(f"data.{k}" for k in ("holdout", "mean", "std", "flip", "crop", "folder", "name", "name.x")),
    *(
        f"split.{k}"
        for k in ("kind", "annotation", "alpha", "clients", "labels", "size", "ratio", "seed", "file")
    ),
    *(f"method.{f.name}" for f in dataclasses.fields(METHODS["hassle"])),
    *("method.name", "method.mu", "x", "x.y", "", "..", "split.labels.full", "split.labels.x.y"),
]


def assert_builds_or_refuses(pairs):
    """Builds everything a run needs; the only exception allowed is a UserError."""
    try:
        settings = resolve(from_json(to_json(request("quick", pairs))))
        if settings.data.name in CATALOGUE:
            return  # neither downloads nor the large default
        built(settings)
    except UserError as error:
        assert str(error)
        return
    json.dumps(settings.model_dump(), allow_nan=False)  # as a summary holds them
    assert resolve(Request((tomllib.loads(tomli_w.dumps(settings.as_toml())),))) == settings


@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3), st.none() | LABELS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_random_settings_build_or_end_in_a_user_error(images, changes, labels):
    layout = {} if labels is None else {"split.labels": labels}
    assert_builds_or_refuses({**small.SETTINGS, "data.name": str(images), **changes, **layout})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.name", "\0.npz"),
        ("data.name", "a" * 5000 + ".npz"),
        ("data.folder", "\0"),
        ("split.file", "\0"),
        ("split.file", "a" * 5000),
        ("method.name", "a" * 5000),
        ("method.name", "\0:\0"),
        ("net", "\0:\0"),
        ("split.seed", 10**400),
        ("split.clients", 10**400),
        ("split.alpha", 10**400),
        ("split.alpha", 1e308),
        ("split.alpha", 5e-324),
        ("split.ratio", 1e308),
        ("split.ratio", 10**400),
        ("split.labels", {"full": 6, "share": 1e308}),
        ("split.labels", [10**400] * 6),
        ("split.labels", {"full": 6, "share": 10**400}),
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
    assert_builds_or_refuses({**small.SETTINGS, "data.name": str(images), key: value})


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
