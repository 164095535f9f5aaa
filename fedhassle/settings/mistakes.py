"""Mistakes in settings or metadata that pydantic finds, in a line each."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from fedhassle.names import brief, escaped, likeliest

ALSO_CALLED = {  # what other libraries call a setting, and the hint that it gets
    "learning_rate": ", did you mean 'method.lr'?",
    "model": ", did you mean 'net'?",
    "optimizer": ", did you mean 'method.optimiser'?",
}


def explain(model: type[BaseModel], error: Any, method: str) -> str:
    """One mistake in the settings, in a line."""
    *tables, last = parts = [str(part) for part in error["loc"]]
    key, given = ".".join(parts), error["input"]
    if error["type"] == "extra_forbidden":
        of = f" of {method}" if tables == ["method"] else ""
        return f"unknown setting {brief(key)}{of}{hint_for(model, tables, last)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}"
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {brief(given)}{hint_to_vary(key, given)}"


def hint_for(model: type[BaseModel], tables: list[str], unknown: str) -> str:
    """The setting that an unknown one in a table may stand for: of any table, by its full name."""
    everywhere = list(setting_types(model))
    same = [full for full in everywhere if full.rpartition(".")[2] == unknown]
    if same:
        return f", did you mean {' or '.join(map(repr, same))}?"
    if unknown in ALSO_CALLED:
        return ALSO_CALLED[unknown]
    for table in tables:
        model = typing.cast(type[BaseModel], model.model_fields[table].annotation)
    known = list(model.model_fields)
    full_names = {full.rpartition(".")[2]: full for full in reversed(everywhere)}
    full_names |= {name: ".".join([*tables, name]) for name in known}
    near = likeliest(unknown, full_names)
    return f" (known are {', '.join(known)})" if near is None else f", did you mean {full_names[near]!r}?"


def setting_types(model: type[BaseModel], above: str = "") -> dict[str, Any]:
    """The type of each setting, by its full name: rounds, method.lr."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= setting_types(field.annotation, f"{above}{name}.")
        else:
            found[above + name] = field.annotation
    return found


def hint_to_vary(key: str, given: Any) -> str:
    """For several values in place of one: the option that makes a run of each."""
    values = given.split(",") if isinstance(given, str) else given
    if not isinstance(values, list) or len(values) < 2 or len(str(given)) > 100:
        return ""
    return f"; for a run of each: fedhassle run --vary {key}={','.join(str(value) for value in values)}"


def first_mistake(error: ValidationError) -> str:
    """The first wrong entry of a file's metadata, in a line, whatever the file has for keys and values."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])[:50] or "metadata"
    given = "" if first["type"] == "missing" else f", got {brief(first['input'])}"
    return f"{escaped(where)}: {first['msg']}{given}"
