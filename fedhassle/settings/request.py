"""A user's request: a preset or TOML file, then KEY=VALUE. Knows few settings, and imports fast."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedhassle.errors import UserError
from fedhassle.names import nearest

T = TypeVar("T")

Tables = dict[str, Any]
"""Settings in tables, as in TOML: only those given, not checked."""
Changes = Sequence[str] | Mapping[str, Any]
"""Settings that override others: KEY=VALUE words, or a mapping whose keys may be dotted."""

MAX_DEPTH = 8  # tables within tables
PATHS = (("data", "name"), ("data", "folder"), ("split", "file"))  # settings that may be paths
SHORT = ("data", "method")  # tables that may be given by their name alone: method="fedavg"
MACHINE = (  # how a run is computed, not what
    *(
        "device",
        "threads",
        "workers",
        "ray",
        "lanes",
        "stack",
        "precision",
        "compile",
        "deterministic",
        "track",
    ),
)
PRESETS = "settings/presets"  # folder in the package
DEFAULT_DATA, DEFAULT_METHOD = "fmnist-mini", "hassle"  # if the request names none


class Request(NamedTuple):
    """Layers of settings; later ones override earlier ones. Each holds only what differs from the paper."""

    layers: tuple[Tables, ...]

    @property
    def data(self) -> str:
        """The data set, by name or path."""
        return self.get("data", "name", DEFAULT_DATA)

    @property
    def method(self) -> str:
        """The method, by name, or a user's own class."""
        return self.get("method", "name", DEFAULT_METHOD)

    def tables(self, name: str) -> list[Tables]:
        """One table in each layer; empty where a layer lacks it, or has something else in its place."""
        found = [layer.get(name) for layer in self.layers]
        return [table if isinstance(table, dict) else {} for table in found]

    def get(self, table: str, key: str, default: str) -> str:
        """A setting of a table, from the last layer that has it."""
        return str(next((found[key] for found in reversed(self.tables(table)) if key in found), default))

    def top(self, key: str, default: Any) -> Any:
        """A setting outside tables, from the last layer that has it."""
        return next((layer[key] for layer in reversed(self.layers) if key in layer), default)


def request(config: str | None, *changes: Changes) -> Request:
    """A request: a preset or file (default: quick), and one layer on top for each of the changes."""
    layers = (read(config or "quick"), *(layer(one) for one in changes))
    return Request(tuple(absolute_paths(each) for each in layers))


def layer(changes: Changes) -> Tables:
    """Changes as tables of settings."""
    pairs = changes.items() if isinstance(changes, Mapping) else [key_value(change) for change in changes]
    made: Tables = {}
    for key, value in pairs:
        made = overlaid(made, expanded(nested(key, value)))
    return made


def read(config: str) -> Tables:
    """A preset by name, or a TOML file."""
    return expanded(read_toml(config, PRESETS, "preset"))


def read_toml(name: str, folder: str, what: str) -> Tables:
    """A TOML file: one shipped in a folder of the package, by name, or a user's own, by path."""
    known = shipped(folder)
    if name in known:
        return parsed(known[name].read_text("utf-8"), name)
    if name.endswith(".toml"):
        return read_tables(Path(name))
    raise UserError(
        f"unknown {what} {name!r}{nearest(name, known)} (there are {', '.join(known)}; a file ends in "
        ".toml; a single setting is written KEY=VALUE)"
    )


def read_tables(path: Path) -> Tables:
    """A TOML file as tables."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the file {path} cannot be read: {error}") from error
    return parsed(text, str(path))


def parsed(text: str, where: str) -> Tables:
    """TOML as tables; refuses very deep nesting."""
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of 5,000 digits
        raise UserError(f"{where} is not valid TOML: {error}{short_form_hint(text, error)}") from error
    level = [settings]
    for _ in range(MAX_DEPTH):
        level = [value for table in level for value in table.values() if isinstance(value, dict)]
    if level:
        raise UserError(f"{where} nests tables more than {MAX_DEPTH} deep; no setting is that deep")
    return settings


def short_form_hint(text: str, error: Exception) -> str:
    """A hint for a file that has both `method = "x"` and other settings of the method."""
    short = re.search(rf"^\s*({'|'.join(SHORT)})\s*=\s*[\"']", text, re.MULTILINE)
    if short is None or "overwrite" not in str(error):
        return ""
    return f": write {short[1]}.name = … when the file has other {short[1]} settings"


def presets() -> list[str]:
    """The names of the shipped presets."""
    return list(shipped(PRESETS))


def shipped(folder: str) -> dict[str, Traversable]:
    """The TOML files in a folder of the package, by name."""
    files = resources.files("fedhassle").joinpath(*folder.split("/")).iterdir()
    found = {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}
    return dict(sorted(found.items()))


def is_setting(word: str) -> bool:
    """True for KEY=VALUE; False for a preset, an experiment or a TOML file, even with a = in its name."""
    return "=" in word and not word.endswith(".toml")


def key_value(change: str) -> tuple[str, Any]:
    """Parses KEY=VALUE; the value is TOML, a bare word is a string."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise UserError(f"{change!r} is not a setting: write KEY=VALUE, such as rounds=50 or split.alpha=0.5")
    if "\n" in text:
        raise UserError(f"{change!r} has a line break: write one KEY=VALUE per setting")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()
    except (ValueError, RecursionError) as error:
        raise UserError(f"the value of {key.strip()[:50]!r} cannot be read: {error}") from error


def variations(vary: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every combination of choices `KEY=V1,V2`: its name, and its KEY=VALUE words.

    A key that is given twice has the values of both.
    """
    choices: dict[str, list[str]] = {}
    for words in vary:
        key, equals, values = words.partition("=")
        if not equals or not key or not all(value.strip() for value in split_at_commas(values)):
            raise UserError(f"{words!r} is not a choice: write KEY=V1,V2, such as seed=0,1,2")
        choices.setdefault(key.strip(), []).extend(value.strip() for value in split_at_commas(values))
    found = combinations(choices.items())
    return [(name, [f"{key}={value}" for key, value in chosen]) for name, chosen in found]


def combinations(choices: Iterable[tuple[str, Sequence[T]]]) -> list[tuple[str, list[tuple[str, T]]]]:
    """Every combination of the values: a name for its folder, and its pairs; without choices an empty one."""
    pairs = [
        [(key, value, name) for value, name in zip(values, called(values), strict=True)]
        for key, values in choices
    ]
    found = itertools.product(*pairs)
    return [("-".join(name for *_, name in one), [(key, value) for key, value, _ in one]) for one in found]


def called(values: Sequence[Any]) -> list[str]:
    """Values in the names of runs: a class or function by its name, a path by its last part if it differs."""
    whole = [str(getattr(value, "__name__", value)) for value in values]
    last = [re.split(r"[/\\]", text)[-1] for text in whole]
    return last if len({*last}) == len({*whole}) else whole


def varied(requests: Sequence[Request]) -> list[list[str]]:
    """The settings in which requests differ, as KEY=VALUE words of each."""
    settings = [dict(flat(merged(request))) for request in requests]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    return [
        [f"{key.removesuffix('.name')}={called([written(one[key])])[0]}" for key in differing if key in one]
        for one in settings
    ]


def written(value: Any) -> Any:
    """A table as it is written after KEY=, {full=1, share=0.2}; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return "{" + ", ".join(f"{key}={written(one)}" for key, one in value.items()) + "}"


def merged(request: Request) -> Tables:
    """The layers of a request as one."""
    made: Tables = {}
    for layer in request.layers:
        made = overlaid(made, layer)
    return made


def split_at_commas(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes: tables and lists stay whole."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "\"'":
            quote = "" if character == quote else quote or character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def nested(key: str, value: Any) -> Tables:
    """`a.b = value` as tables."""
    parts = key.split(".")
    if len(parts) > MAX_DEPTH:
        raise UserError(f"unknown setting {key[:50]!r}…: no setting is more than {MAX_DEPTH} tables deep")
    for part in reversed(parts):
        value = {part: value}
    result: Tables = value
    return result


def expanded(settings: Tables) -> Tables:
    """Settings with `method = "x"` written as `method.name = "x"`, and likewise for data."""
    return {k: {"name": v} if k in SHORT and not isinstance(v, dict) else v for k, v in settings.items()}


def absolute_paths(layer: Tables) -> Tables:
    """A layer whose paths are absolute, so that they hold in any working folder."""
    for table, key in PATHS:
        value = layer[table].get(key) if isinstance(layer.get(table), dict) else None
        if isinstance(value, str) and (key != "name" or is_path(value)):
            if "\0" in value:
                raise UserError(f"{table}.{key}={value!r} is not a path")
            absolute = os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 - takes any string
            layer = overlaid(layer, {table: {key: absolute}})
    return layer


def is_path(data: str) -> bool:
    """True for data that are no set of the catalogue: an .npz file, or an existing folder."""
    if data.lower().endswith(".npz"):
        return True
    if not os.path.isdir(os.path.expanduser(data)):  # noqa: PTH111, PTH112 - takes any string
        return False
    from fedhassle.data.catalogue import CATALOGUE  # imports NumPy, for which most commands need not wait

    return data not in CATALOGUE


def overlaid(below: Tables, above: Tables) -> Tables:
    """Two layers as one: tables are merged, any other value above replaces the one below."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        # A layout of labels is one value, even when it is written as a table.
        merged[key] = overlaid(below[key], value) if both and key != "labels" else value
    return merged


def to_json(request: Request) -> str:
    """A request as JSON."""
    return json.dumps(request.layers, default=str)


def from_json(text: str) -> Request:
    """The request that `to_json` wrote."""
    layers = json.loads(text)
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("not a list of layers of settings")
    return Request(tuple(layers))


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key != "labels":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
