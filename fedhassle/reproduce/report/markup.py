"""Elements of SVG and HTML, well-formed as XML, with all text escaped."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup, escape

# Characters that XML cannot hold: control characters and lone surrogates.
UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
EMPTY = frozenset({"line", "path", "rect", "circle"})  # a browser reads <span/> as <span>
ATTRIBUTES = {"view_box": "viewBox"}  # names that are not in lower case


def writable(value: Any) -> Any:
    """A text without the characters that XML cannot hold; markup as it is."""
    return value if isinstance(value, Markup) else UNWRITABLE.sub("\ufffd", str(value))


def joined(*parts: str) -> Markup:
    """Texts, which are escaped, and elements in a row."""
    return Markup("").join(escape(writable(part)) for part in parts)


def tag(element: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element; `class_` is class, `aria_label` aria-label, and an attribute that is None is omitted."""
    words = [Markup(element)]
    for key, value in attributes.items():
        if value is not None:
            name = ATTRIBUTES.get(key) or key.rstrip("_").replace("_", "-")
            words.append(Markup('{}="{}"').format(Markup(name), writable(number(value))))
    opening = Markup(" ").join(words)
    if not children and element in EMPTY:
        return Markup("<{}/>").format(opening)
    return Markup("<{}>{}</{}>").format(opening, joined(*children), Markup(element))


def number(value: str | float) -> str:
    """A coordinate with at most two decimals; a text as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
