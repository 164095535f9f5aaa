"""The values that a setting may have, as its type: stated once, for the check and for the reference."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from fedhassle.errors import require


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, in a type: Annotated[float, Range(0.0, 1.0)]."""

    low: float
    high: float = math.inf
    above: bool = False  # low itself is excluded
    below: bool = False  # high itself is excluded

    def __contains__(self, value: float) -> bool:
        from_low = value > self.low if self.above else value >= self.low
        return from_low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return "positive" if self.above else f"at least {self.low:g}"
        if isinstance(self.low, int):
            return f"from {self.low:,} to {self.high:,}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"


Positive = Annotated[float, Range(0.0, above=True)]
NotNegative = Annotated[float, Range(0.0)]
Share = Annotated[float, Range(0.0, 1.0)]
Decay = Annotated[float, Range(0.0, 1.0, below=True)]
Trim = Annotated[float, Range(0.0, 0.5, above=True, below=True)]  # at each end
FromZero = Annotated[int, Range(0)]
FromOne = Annotated[int, Range(1)]
BatchSize = Annotated[int, Range(1, 65_536)]  # these bounds are those of memory, since …
Epochs = Annotated[int, Range(1, 1000)]  # … the walk of a whole phase is drawn before its first step
Ratio = Annotated[int, Range(1, 16)]  # unlabelled samples for each labelled one


@cache
def ranges(kind: type) -> dict[str, Range]:
    """Returns the ranges of the fields of a class, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: found for name, hint in hints.items() if (found := range_in(hint)) is not None}


def range_in(hint: Any) -> Range | None:
    """Returns the range in a type, or in a part of it: Positive | None."""
    parts = (*getattr(hint, "__metadata__", ()), *map(range_in, typing.get_args(hint)))
    return next((part for part in parts if isinstance(part, Range)), None)


def require_in_ranges(kind: type, values: object, prefix: str = "") -> None:
    """Raises `UserError` unless each value is None or in the range of the field of that name."""
    for name, allowed in ranges(kind).items():
        value = getattr(values, name, None)
        require(value is None or value in allowed, f"{prefix}{name} must be {allowed}, got {value}")
