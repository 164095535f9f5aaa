"""The reference of a method, from its class: what it does on each kind of client, and its settings.

The meaning of a setting is the comment on its field, its range the type of the field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import tomli_w

from fedhassle.blocks import escaped, table
from fedhassle.method import Client, Method, Phase, Stream
from fedhassle.methods import METHODS
from fedhassle.names import counted
from fedhassle.nets import NETS, Net
from fedhassle.ranges import range_in
from fedhassle.settings.build import build_method
from fedhassle.settings.schema import Settings, method_class

CLIENTS = (Client("full", 1000, 0), Client("partial", 100, 900), Client("unlabelled", 0, 1000))
EVERY = "every method"  # the name of the block of common settings
NO_DEFAULT = "–"


class Setting(NamedTuple):
    """A setting of a method."""

    name: str
    default: Any  # None: depends on the run or the network, or off
    values: str  # its range or its choices, in words
    meaning: str  # with its source
    own: bool  # whether the method has it alone, or with a default of its own


class Reference(NamedTuple):
    """A method in words."""

    name: str
    summary: str  # the first line about its class …
    source: str  # … and about its file
    note: str  # what it says about all its settings
    clients: Mapping[str, str]  # what each kind of client does
    settings: tuple[Setting, ...]


def reference(name: str) -> Reference:
    """Describes a method."""
    found = method_class(name)
    method = build_method(name, {}, Net(NETS["lenet"], (1, 28, 28), 10)).for_run(Settings().rounds)
    return Reference(
        name,
        first_line(found.__doc__),
        first_line(inspect.getdoc(inspect.getmodule(found))),
        comments(found).get("", ""),  # type: ignore[arg-type] # a class is hashable
        clients_of(method),
        tuple(settings_of(found)),
    )


def first_line(text: str | None) -> str:
    """Returns the first line of a docstring."""
    return (text or "").strip().partition("\n")[0]


# Clients


def clients_of(method: Method) -> dict[str, str]:
    """Says what each kind of client does; what all do together, if their data lie in one place."""
    if not method.pooled:
        return {client.kind: work(method, client) for client in CLIENTS}
    held = {part: sum(client.count(part) for client in CLIENTS) for part in method.pooled}
    return {"all in one place": work(method, Client("all", held["labelled"], held.get("unlabelled", 0)))}


def work(method: Method, client: Client) -> str:
    """Says what a client does, and from which round on it does something else."""
    parts: list[str] = []
    before = None
    for t in range(1, Settings().rounds + 1):
        now = "; ".join(in_words(method, phase) for phase in method.phases(client, t)) or "idle"
        if now != before:
            parts.append(now if t == 1 else f"From round {t} of {Settings().rounds} on: {now}")
        before = now
    return ". ".join(parts)


def in_words(method: Method, phase: Phase) -> str:
    """Says what a phase trains, how long and on what."""
    seen = phase.with_labelled_view(method.labelled_view)
    length = counted(phase.epochs, "epoch") if phase.epochs else counted(phase.steps, "step")
    if method.pooled:
        length = "trained"  # for as many steps as the clients of the run would make
    return f"{', '.join(phase.trained)}: {length} on {' and '.join(map(data_of, seen.streams))}"


def data_of(stream: Stream) -> str:
    """Says what a stream walks over."""
    counts = {view: stream.views.count(view) for view in stream.views}
    kinds = " and ".join(view if n == 1 else f"{n} {view}" for view, n in counts.items())
    views = f"{kinds} view{'s' * (len(stream.views) > 1)}"
    labels = "" if stream.logits is None else ", pseudo-labels" + (" at each step" if stream.online else "")
    return f"{stream.part} data ({views}, batches of {stream.batch}{labels})"


# Settings


def settings_of(method: type[Method]) -> Iterator[Setting]:
    """Yields the settings of a method: its own first, then those that it has like every method."""
    hints = typing.get_type_hints(method, include_extras=True)
    common = {field.name: field.default for field in dataclasses.fields(Method)}
    every = [field for field in dataclasses.fields(method) if field.name != "net"]
    own = [field for field in every if field.name not in common or common[field.name] != field.default]
    for field in [*own, *(field for field in every if field not in own)]:
        default = None if field.default is dataclasses.MISSING else field.default
        meaning = meaning_of(method, field.name)
        yield Setting(field.name, default, values_of(hints[field.name]), meaning, field in own)


def values_of(hint: Any) -> str:
    """Says which values a type has; "" if it has any of its kind."""
    found = range_in(hint)
    return " or ".join(choices(hint)) if found is None else str(found)


def choices(hint: Any) -> Iterator[str]:
    """Yields the values of a type that has few."""
    if hint is bool:
        yield from ("true", "false")
    elif typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    else:
        for part in typing.get_args(hint):
            yield from choices(part)


def meaning_of(method: type[Method], name: str) -> str:
    """Returns the comment on a field, of the nearest class that has one."""
    found = (comments(kind).get(name) for kind in method.__mro__)
    return next((text for text in found if text), "")


@cache
def comments(kind: type) -> dict[str, str]:
    """Returns the comments on the fields of a class: behind each, or on the lines above it.

    Under "" is the one above all fields, with an empty line below it.
    """
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # it has no file, as in a notebook, or is built in
        return {}
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    at = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}

    def text(lines: Iterable[int]) -> str:
        return " ".join(at[n].string.removeprefix("#").strip() for n in lines)

    found: dict[str, str] = {}
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, last = lines_above(at, node.lineno), node.end_lineno or node.lineno
            if not found:
                found[""] = text(lines_above(at, min([*above, node.lineno]) - 1))
            found[node.target.id] = text([last] if last in at else above)
    return found


def lines_above(at: Mapping[int, tokenize.TokenInfo], line: int) -> list[int]:
    """Returns the numbers of the lines directly above one that are comments and nothing else."""
    first = line
    while first - 1 in at and at[first - 1].line.strip().startswith("#"):
        first -= 1
    return list(range(first, line))


# Texts


def default_of(setting: Setting) -> str:
    """Returns the default as TOML; – if it is None."""
    if setting.default is None:
        return NO_DEFAULT
    return tomli_w.dumps({"x": setting.default}).removeprefix("x = ").strip().strip('"')


def as_toml(found: Reference) -> str:
    """Returns a file to start from: every setting of a method, which `fedhassle run` accepts."""
    lines = [
        f"# {found.summary}",
        "# All else is the paper's: rounds = 200, data = …; see docs/usage.md.",
        "",
    ]
    lines += ["[method]", tomli_w.dumps({"name": found.name}).strip()]
    for own, title in ((True, "settings of its own"), (False, "settings of every method")):
        some = [setting for setting in found.settings if setting.own is own]
        lines += ["", f"# {title}"] if some else []
        for setting in some:
            lines += [f"# {setting.meaning}"] if setting.meaning else []
            plain = {setting.name: setting.default}
            given = f"# {setting.name} = …" if setting.default is None else tomli_w.dumps(plain).strip()
            lines.append(given + (f"  # {setting.values}" if setting.values else ""))
    return "\n".join(lines) + "\n"


def blocks() -> dict[str, str]:
    """Returns the blocks that docs/methods.md holds: the common settings, and each method."""
    common = table_of([setting for setting in settings_of(Method) if not setting.own])
    return {EVERY: common} | {name: block(reference(name)) for name in METHODS}


def block(found: Reference) -> str:
    """Returns what a method does on each kind of client, and its own settings, as Markdown."""
    rows = [["clients", "with the default settings"], *([k, escaped(v)] for k, v in found.clients.items())]
    own = [setting for setting in found.settings if setting.own]
    settings = table_of(own) if own else "It has no settings of its own."
    return f"{table(rows)}\n\n{settings}"


def table_of(settings: list[Setting]) -> str:
    """Returns the table of settings as Markdown."""
    rows = [["setting", "default", "values", "meaning"]]
    for setting in settings:
        default = default_of(setting)
        shown = default if default == NO_DEFAULT else f"`{default}`"
        rows.append([f"`{setting.name}`", shown, escaped(setting.values), escaped(setting.meaning)])
    return table(rows)
