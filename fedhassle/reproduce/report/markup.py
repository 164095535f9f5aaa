"""Elements of HTML and SVG, well-formed as XML; all text in them is escaped."""

from __future__ import annotations

import html
import re

# What XML has no way to write: control characters and lone surrogates.
UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
EMPTY = frozenset({"meta", "br", "line", "path", "rect", "circle"})  # a browser takes <span/> for <span>
ATTRIBUTES = {"view_box": "viewBox"}  # those whose names are not in lower case


class Markup(str):
    """Text that is markup already, and is taken as it is."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Any text as it may stand in markup, between tags or in quotes."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(UNWRITABLE.sub("\ufffd", text), quote=True))


def joined(*parts: str) -> Markup:
    """Texts and elements in a row."""
    return Markup("".join(escaped(part) for part in parts))


def tag(element: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element; `class_` is class, `aria_label` aria-label, and what is None or False is left out."""
    words = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = number(value) if isinstance(value, int | float) and value is not True else str(value)
        written = ATTRIBUTES.get(key) or key.rstrip("_").replace("_", "-")
        words.append(f'{written}="{escaped(written if value is True else shown)}"')
    if not children and element in EMPTY:
        return Markup(f"<{' '.join(words)}/>")
    return Markup(f"<{' '.join(words)}>{joined(*children)}</{element}>")


def number(value: float) -> str:
    """A length or coordinate, no longer than a pixel needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
