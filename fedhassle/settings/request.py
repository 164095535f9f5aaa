"""What a user asks for: a preset or TOML file, then KEY=VALUE. Knows few settings, and starts fast."""

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
"""Settings as TOML has them: in tables, as far as they are given, and not checked."""
Changes = Sequence[str] | Mapping[str, Any]
"""Settings over others: words KEY=VALUE, or a mapping whose keys may be dotted."""

DEEPEST = 8
PATHS = (("data", "name"), ("data", "folder"), ("split", "file"))  # settings that may be paths
SHORT = ("data", "method")  # tables whose name alone may stand for them: method="fedavg"
MACHINE = ("device", "threads", "lanes", "precision", "compile", "deterministic", "track")  # how, not what
PRESETS = "settings/presets"  # their folder in the package
DEFAULT_DATA, DEFAULT_METHOD = "fmnist-mini", "hassle"  # where none is named


class Requested(NamedTuple):
    """Layers of settings, the later ones over the earlier; each holds only what differs from the paper's."""

    layers: tuple[Tables, ...]

    @property
    def data(self) -> str:
        """The data set, by its name or path."""
        return self.get("data", "name", DEFAULT_DATA)

    @property
    def method(self) -> str:
        """The method, by its name or import path."""
        return self.get("method", "name", DEFAULT_METHOD)

    def get(self, table: str, key: str, default: str) -> str:
        """A setting of a table, from the last layer that has it."""
        found = [layer[table][key] for layer in self.layers if key in layer.get(table, {})]
        return str(found[-1]) if found else default

    def top(self, key: str, default: Any) -> Any:
        """A setting outside tables, from the last layer that has it."""
        return next((layer[key] for layer in reversed(self.layers) if key in layer), default)


def request(config: str | None, *changes: Changes) -> Requested:
    """A layer of a preset or file, and above it one for each of the changes."""
    return Requested((anchored(read(config or "quick")), *(anchored(layer(one)) for one in changes)))


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
    """A TOML file: one that the package ships in a folder, by its name, or a user's own by its path."""
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
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the file {path} cannot be read: {error}") from error
    return parsed(text, str(path))


def parsed(text: str, where: str) -> Tables:
    """TOML as tables, not nested without end."""
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Python's own too, for numbers of 5,000 digits
        raise UserError(f"{where} is not valid TOML: {error}{short_beside_long(text, error)}") from error
    level = [settings]
    for _ in range(DEEPEST):
        level = [value for table in level for value in table.values() if isinstance(value, dict)]
    if level:
        raise UserError(f"{where} nests tables more than {DEEPEST} deep: no setting lies there")
    return settings


def short_beside_long(text: str, error: Exception) -> str:
    """What to write where `method = "x"` stands beside other settings of the method."""
    short = re.search(rf"^\s*({'|'.join(SHORT)})\s*=\s*[\"']", text, re.MULTILINE)
    if short is None or "overwrite" not in str(error):
        return ""
    return f": write {short[1]}.name = … where other {short[1]} settings stand beside it"


def presets() -> list[str]:
    """The names of the shipped presets."""
    return list(shipped(PRESETS))


def shipped(folder: str) -> dict[str, Traversable]:
    """The TOML files in a folder of the package, by their names."""
    files = resources.files("fedhassle").joinpath(*folder.split("/")).iterdir()
    found = {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}
    return dict(sorted(found.items()))


def key_value(change: str) -> tuple[str, Any]:
    """KEY=VALUE: the value as TOML, a bare word as a string."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise UserError(f"{change!r} is no setting: write KEY=VALUE, such as rounds=50 or split.alpha=0.5")
    if "\n" in text:
        raise UserError(f"{change!r} has a line break: write one KEY=VALUE for each setting")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()
    except (ValueError, RecursionError) as error:
        raise UserError(f"the value of {key.strip()[:50]!r} cannot be read: {error}") from error


def variations(vary: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`KEY=V1,V2` and others like it: every combination by its name, as KEY=VALUE each."""
    choices = []
    for words in vary:
        key, equals, values = words.partition("=")
        if not equals or not key or not all(value.strip() for value in between_commas(values)):
            raise UserError(f"{words!r} is no choice: write KEY=V1,V2, such as seed=0,1,2")
        choices.append((key.strip(), [value.strip() for value in between_commas(values)]))
    return [(name, [f"{key}={value}" for key, value in chosen]) for name, chosen in combinations(choices)]


def combinations(choices: Iterable[tuple[str, Sequence[T]]]) -> list[tuple[str, list[tuple[str, T]]]]:
    """Every combination of values of keys, by a name for its folder; without any choice, one of nothing."""
    pairs = [[(key, value) for value in values] for key, values in choices]
    found = [list(chosen) for chosen in itertools.product(*pairs)]
    return [("-".join(str(value) for _, value in chosen), chosen) for chosen in found]


def between_commas(text: str) -> list[str]:
    """What stands between commas, but for those in brackets or quotes: tables and lists stay whole."""
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
    if len(parts) > DEEPEST:
        raise UserError(f"unknown setting {key[:50]!r}…: no setting lies in more than {DEEPEST} tables")
    for part in reversed(parts):
        value = {part: value}
    result: Tables = value
    return result


def expanded(settings: Tables) -> Tables:
    """`method = "x"` as `method.name = "x"`, and so for the other short tables."""
    return {k: {"name": v} if k in SHORT and not isinstance(v, dict) else v for k, v in settings.items()}


def anchored(layer: Tables) -> Tables:
    """A layer whose paths stay right in another working folder."""
    for table, key in PATHS:
        value = layer.get(table, {}).get(key) if isinstance(layer.get(table), dict) else None
        if isinstance(value, str) and (key != "name" or value.lower().endswith(".npz")):
            if "\0" in value:
                raise UserError(f"{table}.{key}={value!r} is no path")
            absolute = os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 - any string goes
            layer = overlaid(layer, {table: {key: absolute}})
    return layer


def overlaid(below: Tables, above: Tables) -> Tables:
    """Two layers as one: tables are merged, anything else above replaces what is below."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        # A layout of labels is one value, however it is written.
        merged[key] = overlaid(below[key], value) if both and key != "labels" else value
    return merged


def to_json(requested: Requested) -> str:
    """The layers as JSON."""
    return json.dumps(requested.layers, default=str)


def from_json(text: str) -> Requested:
    """What `to_json` wrote."""
    layers = json.loads(text)
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("it holds no layers of settings")
    return Requested(tuple(layers))


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key != "labels":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
