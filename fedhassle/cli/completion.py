"""Completion of words by the shell: presets, experiments, methods, settings and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer

from fedhassle.errors import UserError
from fedhassle.settings.request import DEFAULT_METHOD, is_setting, presets, request

# PyTorch takes seconds to load: only what needs the settings of a method imports it.


def complete_words(context: typer.Context, incomplete: str) -> list[str]:
    """Completes [CONFIG] [KEY=VALUE]..."""
    return completions(context.params.get("words") or [], incomplete, presets())


def complete_choice(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the KEY=V1,V2 of an option: the key, and its first value."""
    return completions(context.params.get("words") or [], incomplete)


def complete_method(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a method."""
    from fedhassle.methods import METHODS

    return beginning(incomplete, METHODS)


def complete_experiment(context: typer.Context, incomplete: str) -> list[str]:
    """Completes [NAME]... [KEY=VALUE]..."""
    from fedhassle.reproduce.experiment import experiments

    return beginning(incomplete, experiments()) or completions(context.params.get("names") or [], incomplete)


def completions(words: Sequence[str], start: str, first: Sequence[str] = ()) -> list[str]:
    """Returns the words that a start may become, after other words; `first`: those that only begin a line."""
    typed = joined(words)
    if typed and typed[-1].endswith("="):
        return values_of(typed[-1].removesuffix("="), typed[:-1], start)
    if typed and not start and typed[-1] in keys_after(typed[:-1]):  # in Bash, at the = of KEY=
        return values_of(typed[-1], typed[:-1], "")
    if "=" in start:
        key, _, begun = start.partition("=")
        return [f"{key}={value}" for value in values_of(key, typed, begun)]
    found = [] if typed else beginning(start, first)
    return found or beginning(start, [f"{key}=" for key in keys_after(typed)])


def joined(words: Sequence[str]) -> list[str]:
    """Returns words as they are typed: Bash breaks them at =, so that method=fedavg comes as three."""
    made: list[str] = []
    for word in words:
        if made and (word == "=" or made[-1].endswith("=")):
            made[-1] += word
        else:
            made.append(word)
    return made


def beginning(start: str, words: Iterable[str]) -> list[str]:
    """Returns the words that begin like that."""
    return [word for word in words if word.startswith(start)]


def keys_after(words: Sequence[str]) -> list[str]:
    """Returns the settings that can follow the words of a command: those of the method that they name."""
    return [name.removesuffix(".name") for name in types_after(words)]  # method=x is short for method.name=x


def values_of(key: str, words: Sequence[str], start: str) -> list[str]:
    """Returns the values of a setting that begin like that; none if it has a number or a text."""
    from fedhassle.data.catalogue import CATALOGUE
    from fedhassle.methods import METHODS
    from fedhassle.nets import NETS
    from fedhassle.settings.reference import choices

    named: dict[str, Iterable[str]] = {"data": CATALOGUE, "method": METHODS, "net": NETS}
    return beginning(start, named[key] if key in named else choices(types_after(words).get(key)))


def types_after(words: Sequence[str]) -> dict[str, Any]:
    """Returns the types of the settings of the method that words name, or of the default one."""
    from fedhassle.settings.mistakes import setting_types
    from fedhassle.settings.schema import method_class, settings_model

    def types(name: str) -> dict[str, Any]:
        return setting_types(settings_model(method_class(name), name))  # type: ignore[arg-type] # a class is hashable

    try:
        config = [word for word in words[:1] if not is_setting(word)]
        return types(
            request(config[0] if config else None, [word for word in words if is_setting(word)]).method
        )
    except UserError:  # the words are not complete, or wrong
        return types(DEFAULT_METHOD)
