"""Blocks of a Markdown file, between <!-- NAME --> and <!-- /NAME -->, that a command keeps up to date."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def replaced(text: str, blocks: Mapping[str, str]) -> str | None:
    """Returns a text with its blocks replaced and its line ends kept; None if it has none of the blocks."""
    found = False
    for name, content in blocks.items():
        lines = ["", *content.split("\n"), "", ""]
        text, count = block_pattern(name).subn(lambda m, new=lines: m[1] + m[2].join(new) + m[3], text)  # type: ignore[misc]
        found |= count > 0
    return text if found else None


def block_pattern(name: str) -> re.Pattern[str]:
    """A pattern for the block of that name; its groups are the first mark, the line end and the last mark."""
    name = re.escape(name)
    return re.compile(rf"(<!-- {name} -->(\r?\n)).*?(<!-- /{name} -->)", re.DOTALL)


def escaped(text: str) -> str:
    """Returns a text as one line, escaped for Markdown."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of cells that are Markdown already; the first row is the heading."""
    heading, *rest = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, ["---"] * len(heading), *rest])
