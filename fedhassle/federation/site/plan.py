"""The plan of a run, as a site checks it: the server can ask only for what the site's own file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhassle.data.dataset import Dataset
from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import Agreement
from fedhassle.federation.build import run_settings, with_settings_of
from fedhassle.federation.messages import WHOLE, count_of, to_json
from fedhassle.method import Method
from fedhassle.names import brief
from fedhassle.settings.build import build_method, build_net

PLAN = ("run", "method", "net", "seed", "rounds")  # the words of a message that make a plan
DIFFERS = "the server asks for {asked}, but this site's federation.toml says {agreed}: compare both files"


class UnagreedError(UserError):
    """The server asks for something that the site has not agreed to."""


def agreed_method(agreement: Agreement, dataset: Dataset, words: Mapping[str, Any]) -> Method:
    """Builds the run's method from the site's own file; raises if the server's plan differs from it.

    The number of rounds is the server's to choose, and some settings follow from it.
    """
    settings, rounds = run_settings(agreement), count_of(words.get("rounds"), "round")
    require(rounds > 0, "the server's plan has no rounds")
    net = build_net(settings, dataset)
    method = build_method(settings.method.name, settings.method.settings, net).for_run(rounds)
    agreed = with_settings_of(method, settings)
    wanted = {"net": settings.net or dataset.net, "method": agreed.method.model_dump()}
    require_same(wanted, {"net": words.get("net"), "method": words.get("method")})
    return method


def require_same(agreed: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises if a plan differs from the agreed one; says where: in the method's name, or in its settings."""
    known, given = flat(json.loads(to_json(agreed))), flat(asked)
    different = [key for key in (known | given) if known.get(key) != given.get(key)]
    if different:
        first = ["method.name"] if "method.name" in different else different[:3]
        raise UnagreedError(
            DIFFERS.format(
                asked=", ".join(f"{key}={brief(given.get(key))}" for key in first),
                agreed=", ".join(f"{key}={brief(known.get(key))}" for key in first),
            )
        )


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a plan by their dotted names, one level deep."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def require_lengths(method: Method, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises if a model in a message has another length than the agreed network."""
    for name, net in method.networks().items():
        length, vector = net.n_weights + net.n_statistics, arrays.get(WHOLE + name)
        if vector is not None and len(vector) != length:
            raise UnagreedError(
                f"the server sent a {name} of {len(vector):,} entries; the agreed network has {length:,}"
            )
