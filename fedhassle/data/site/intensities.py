"""Intensities: how the values of a grey image with more than 8 bits become 0 … 255.

A rule is agreed once and holds for training, evaluation and prediction:

- `12 bits` (8 to 16): of so many bits the upper 8 are kept, values beyond are white; floats are 0 … 1;
- `window -160 240`: these values become 0 and 255, what lies beyond is black or white;
- `percentiles 1 99`: as a window between these percentiles of the image's own values;
- `own window`: the window that a DICOM file names.

Values are those in the file, of DICOM in its rescaled units. Without a rule it is `16 bits`. Images of 8 bits
are on this scale already and stay as they are. An image that would keep few levels is refused.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhassle.data.npz import Images
from fedhassle.errors import UserError

Values = NDArray[Any]

WAYS = "'N bits' (8 to 16), 'window LOW HIGH', 'percentiles LOW HIGH' or 'own window'"
FEW = 64  # neighbouring levels of 256: images that keep no more are refused
MIDDLE = (2, 98)  # percentiles: the edges of burnt-in letters and dead pixels lie beyond
BEYOND = 0.02  # the largest share of pixels that may exceed the agreed bits
AGREE = "agree on how intensities become 0 … 255 (--intensities, or intensities under [data], such as"
ADVICE, WINDOW_ADVICE = f"{AGREE} '12 bits')", f"{AGREE} 'window -160 240')"


class UnusableError(Exception):
    """A file whose picture cannot be used; the message gives the reason."""


class Window(NamedTuple):
    """The values that become 0 and 255; a DICOM file may name a curve instead of a straight line."""

    low: float
    high: float
    shape: Literal["line", "sigmoid"] = "line"


class IntensityRule(NamedTuple):
    """A rule by which values become 0 … 255: bits, a window, percentiles, or the file's own window."""

    text: str  # as the agreement has it
    bits: int = 0
    window: Window | None = None
    percentiles: tuple[float, float] | None = None
    own: bool = False


def parsed_intensities(text: str) -> IntensityRule:
    """Parses `12 bits`, `window -160 240`, `percentiles 1 99` or `own window`."""
    words = text.split()
    if text == "own window":
        return IntensityRule(text, own=True)
    if len(words) == 2 and words[1] == "bits" and words[0].isdecimal() and 8 <= int(words[0]) <= 16:
        return IntensityRule(text, bits=int(words[0]))
    if len(words) == 3 and words[0] in ("window", "percentiles"):
        try:
            low, high = float(words[1]), float(words[2])
        except ValueError:
            low = high = math.nan
        inside = words[0] == "window" or (low >= 0 and high <= 100)
        if math.isfinite(low) and math.isfinite(high) and low < high and inside:
            if words[0] == "window":
                return IntensityRule(text, window=Window(low, high))
            return IntensityRule(text, percentiles=(low, high))
    raise UserError(f"expected {WAYS}, with LOW < HIGH, got {text!r}")


UNSTATED = IntensityRule("16 bits", bits=16)


def intensity_rule(text: str | None) -> IntensityRule:
    """Returns the rule that is agreed, or the one without an agreement."""
    return UNSTATED if text is None else parsed_intensities(text)


def levels_of(values: Values, rule: IntensityRule, own: Window | None = None) -> Images:
    """Returns values (H, W) as 0 … 255; raises if few levels would be left. `own`: the file's own window."""
    if rule.own and own is None:
        raise UnusableError(f"names no window of its own: agree on another rule than {rule.text!r}")
    window = own if rule.own else rule.window
    if rule.percentiles is not None:
        low, high = np.percentile(_finite(values), rule.percentiles, method="inverted_cdf")
        window = Window(float(low), float(high))
    levels = _by_bits(values, rule) if window is None else in_window(_finite(values), window)
    _refuse_few_levels(values, levels, rule)
    return levels


def conversion(values: Values, rule: IntensityRule) -> str:
    """Describes what `levels_of` does."""
    if not rule.bits:
        return f"by {rule.text} to 0 … 255"
    return "floats in [0, 1] to 0 … 255" if values.dtype.kind == "f" else f"{rule.bits} bits: upper 8 kept"


def in_window(values: Values, window: Window) -> Images:
    """Returns values as 0 … 255: a straight line between the ends of the window, or a sigmoid."""
    low, high, shape = window
    if low == high:  # of percentiles
        share = (values > low).astype(np.float64)
    elif shape == "line":
        share = (np.clip(values, low, high).astype(np.float64) - low) / (high - low)
    else:  # DICOM PS3.3 C.11.2.1.3.1
        share = 1 / (1 + np.exp(-4 * (values - (low + high) / 2) / (high - low)))
    levels: Images = np.rint(255 * share).astype(np.uint8)
    return levels


def _by_bits(values: Values, rule: IntensityRule) -> Images:
    """Returns the upper 8 of the agreed bits; floats in [0, 1] become round(255·x)."""
    low, high = values.min().item(), values.max().item()
    if values.dtype.kind == "f":
        if not (low >= 0 and high <= 1):  # written so that NaN is rejected too
            raise UnusableError(
                f"holds floats from {low:g} to {high:g}: scale them to [0, 1], or {WINDOW_ADVICE}"
            )
        floats: Images = np.rint(values * 255).astype(np.uint8)
        return floats
    if low < 0 or high >= 2**16:
        raise UnusableError(
            f"holds numbers from {low} to {high}: scale them to 8 or 16 bits, or {WINDOW_ADVICE}"
        )
    top = 2**rule.bits - 1
    if np.count_nonzero(values > top) > BEYOND * values.size:
        raise UnusableError(
            f"holds numbers from {low} to {high}, many above the agreed {rule.text} (0 … {top})"
        )
    levels: Images = (np.minimum(values, top) >> (rule.bits - 8)).astype(np.uint8)
    return levels


def _finite(values: Values) -> Values:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UnusableError("holds values that are not finite")
    return values


def _refuse_few_levels(values: Values, levels: Images, rule: IntensityRule) -> None:
    """Raises if most pixels fall on a few neighbouring levels, and several values become one.

    Pixels of the largest value do not count: a white box may be burnt in, however large.
    """
    rest = values < values.max()
    if not rest.any():
        return
    low, high = np.percentile(levels[rest], MIDDLE, method="inverted_cdf")
    if high - low >= FEW:
        return
    middle = rest & (levels >= low) & (levels <= high)
    if len(np.unique(values[middle])) > len(np.unique(levels[middle])):
        bottom, top = np.percentile(values[rest], MIDDLE, method="inverted_cdf")
        raise UnusableError(
            f"would keep few of its levels: by {rule.text!r} most of its values, {bottom:g} … {top:g}, "
            f"become {low} … {high} of 255; {ADVICE}"
        )
