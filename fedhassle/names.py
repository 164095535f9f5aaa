"""Names: of classes, built-in ones and a user's own, hints for misspelt ones, and lists in a sentence."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import operator
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from fedhassle.errors import UserError, require

T = TypeVar("T")

CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # categories: control characters, lone surrogates, ends of lines
OVERRIDES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # bidirectional classes
SESSION = "__main__"  # the module of a program, a notebook or a session
ADVICE = (
    "define it there again and resume with fedhassle.run(out=FOLDER); a run whose code is in a file (in a "
    "notebook: %%writefile my_file.py) can be resumed and used anywhere"
)
LIKE = 0.6  # how much of two names agrees before one is suggested for the other: 1 = all of it
_importing: list[str] = []  # modules of a user that are being imported


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
    """Returns the repr of a value, without its middle if it is long; of an array, what it is."""
    text = described(value) if getattr(value, "shape", None) else repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 4) :]}"


def truncated(text: str, most: int) -> str:
    """Returns a text cut to at most so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def described(value: object) -> str:
    """Says what a value is, without its contents: Tensor of shape (3, 4)."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")


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
        return operator.attrgetter(attribute)(imported(module))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises is theirs to fix
        said = f"{what} {brief(name)} cannot be imported: {type(error).__name__}: {error}"
        loaded = sys.modules.get(
            str(Path(module).expanduser().resolve()) if module.endswith(".py") else module
        )
        if attribute and isinstance(error, AttributeError) and loaded is not None and error.obj is loaded:
            hint = nearest(error.name or "", [word for word in vars(loaded) if not word.startswith("_")])
            said = f"{what} {brief(name)}: {brief(module)} has no {kind} {brief(error.name)}{hint}"
        if module == SESSION:
            said = f"{what} {attribute} was defined in a notebook or session, not in a file: {ADVICE}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            said += f"; run the command in the folder of {error.name}, or add that folder to PYTHONPATH"
        if isinstance(error, FileNotFoundError) and module.endswith(".py"):
            said += "; a path starts from the working folder, as when the run began"
        raise UserError(said) from error


def name_of(thing: Any, known: Mapping[str, Any], what: str) -> str:
    """Returns the name by which `find` leads to a class or function: a known one, or a user's own."""
    if (one := next((word for word, other in known.items() if other is thing), None)) is not None:
        return one
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    require(
        isinstance(thing, type | FunctionType) and module is not None and name is not None,
        f"{what}: expected a name, or a class or function itself, got an instance of {described(thing)}",
    )
    require(
        "<" not in str(name),
        f"{what} {name} has no name of its own, by which a run could be resumed: define it with class or "
        "def, and not inside a function",
    )
    file = script() if module == SESSION else None
    whole = f"{from_here(file) if file is not None else module}:{name}"
    require(find(whole, {}, what) is thing, f"{whole} is another {what} than the one given: import it again")
    return whole


def from_here(file: str) -> str:
    """Returns a path from the working folder, if it is below that."""
    path, here = Path(file), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def script() -> str | None:
    """Returns the path of the program, if it is a Python file; None in a notebook or session."""
    file = getattr(sys.modules[SESSION], "__file__", None)
    return str(Path(file).resolve()) if file is not None and str(file).endswith(".py") else None


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Notes that a user's module is being imported, so that a run it starts there is refused."""
    _importing.append(module)
    try:
        yield
    finally:
        _importing.pop()


def require_no_import() -> None:
    """Refuses to train while a user's module is imported, as when a script that trains is resumed."""
    require(
        not _importing,
        f"{some_of(_importing[-1:])} starts to train when it is imported: put that part of it below "
        'if __name__ == "__main__":',
    )


def imported(module: str) -> ModuleType:
    """Returns a module by its import path, or from the path of a .py file, which runs once in a process."""
    if not module.endswith(".py"):
        with importing(module):
            return importlib.import_module(module)
    file = Path(module).expanduser().resolve()
    name = str(file)  # no other module has it, not even one of the same file name
    if name == script():
        return sys.modules[SESSION]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # every .py file has a loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # before it runs: its dataclasses look up their types there
    try:
        with importing(module):
            spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made
