"""Names: of classes, built-in ones and a user's own, hints for misspelt ones, and lists in a sentence."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedhassle.errors import UserError

T = TypeVar("T")

CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # categories: control characters, lone surrogates, ends of lines
OVERRIDES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # bidirectional classes
LIKE = 0.6  # how much of two names agrees before one is suggested for the other: 1 = all of it


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as “, did you mean 'x'?”, ignoring case, or ""."""
    found = likeliest(name, known)
    return "" if found is None else f", did you mean {found!r}?"


def likeliest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelt one is most like, ignoring case; None if it is like none."""
    lowered = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=LIKE)
    return lowered[near[0]] if near else None


def counted(number: int, noun: str) -> str:
    """Formats a count with its noun: 1 round, 2 rounds."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def some_of(names: Iterable[str], most: int = 10) -> str:
    """Joins names for a sentence, and counts those beyond `most`: a, b and 3 more."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")


def some_lines(items: Sequence[T], line: Callable[[T], str], most: int = 10) -> str:
    """Returns a line for each of the first items, and one that counts those beyond `most`."""
    more = [f"… and {len(items) - most:,} more"] if len(items) > most else []
    return "\n".join([*map(line, items[:most]), *more])


def brief(value: object, most: int = 100) -> str:
    """Returns the repr of a value, without its middle if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 4) :]}"


def is_control(character: str) -> bool:
    """True for a character that a terminal obeys: ESC, the end of a line, a change of direction."""
    return unicodedata.category(character) in CONTROLS or unicodedata.bidirectional(character) in OVERRIDES


def escaped(text: str) -> str:
    """Returns a text of a file with its control characters escaped, for a message."""
    return "".join(ascii(one)[1:-1] if is_control(one) else one for one in text)


def class_name(name: str, where: str = "") -> str:
    """Returns the name of a class; refuses control characters, by which a file could write to a terminal."""
    if has_controls(name):
        raise UserError(f"{where}{brief(name)} cannot name a class: it has control characters")
    return name


@functools.lru_cache
def has_controls(text: str) -> bool:
    """True for a text with control characters; cached, since label files repeat few names."""
    return any(map(is_control, text))


def find(name: str, known: Mapping[str, Any], what: str, kind: str = "class") -> Any:
    """Returns the value of a known name, or of a user's own: `file.py:Name` or `package.module:Name`."""
    if name in known:
        return known[name]
    if ":" not in name:
        example = "MyClass" if kind == "class" else f"my_{kind}"
        if name.endswith(".py"):
            whole = brief(f"{name}:{example}")
            raise UserError(f"{what} {brief(name)} is a file: name the {kind} in it too, as in {whole}")
        own = f"your own is my_file.py:{example}, or the import path my_package.my_module:{example}"
        options = f"there are {', '.join(known)}; {own}" if known else own
        raise UserError(f"unknown {what} {brief(name)}{nearest(name, known)} ({options})")
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(imported(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the user's module raises is theirs to fix
        said = f"{what} {brief(name)} cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            said += f"; run the command in the folder of {error.name}, or add that folder to PYTHONPATH"
        raise UserError(said) from error


def imported(module: str) -> ModuleType:
    """Returns a module by its import path, or from the path of a .py file, which runs once in a process."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    file = Path(module).expanduser().resolve()
    name = str(file)  # no other module has it, not even one of the same file name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # every .py file has a loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # before it runs: its dataclasses look up their types there
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made
