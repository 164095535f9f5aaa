"""Ranges of settings: what they hold, what they are called, and that every number of a method has one."""

import dataclasses
import math
import typing

import pytest
import small

from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.ranges import Decay, FromOne, Positive, Range, range_in, ranges


@pytest.mark.parametrize(
    ("found", "inside", "outside", "words"),
    [
        (Range(0.0), (0, 0.5, 1e30), (-1e-9, math.nan), "at least 0"),
        (Range(1), (1, 5), (0, -1), "at least 1"),
        (Range(0.0, above=True), (1e-300, 3), (0, -1, math.nan), "positive"),
        (Range(1, 65_536), (1, 65_536), (0, 65_537), "from 1 to 65,536"),
        (Range(0.0, 1.0), (0, 1), (-0.1, 1.1, math.nan), "in [0, 1]"),
        (Range(0.0, 1.0, below=True), (0, 0.999), (1,), "in [0, 1)"),
        (Range(0.0, 1.0, above=True), (0.1, 1), (0,), "in (0, 1]"),
    ],
)
def test_a_range_holds_numbers_and_says_which(found, inside, outside, words):
    assert all(value in found for value in inside) and not any(value in found for value in outside)
    assert str(found) == words


@pytest.mark.parametrize(
    ("hint", "low"), [(Positive, 0), (Decay | None, 0), (FromOne | None, 1), (int, None), (str | None, None)]
)
def test_the_range_of_a_type_is_found_in_its_parts(hint, low):
    found = range_in(hint)
    assert (None if found is None else found.low) == low


@pytest.mark.parametrize("name", METHODS)
def test_every_number_of_a_method_has_a_range_that_holds_its_default(name):
    """Also where a method gives a setting another default: its type has to name the range again."""
    hints, known = typing.get_type_hints(METHODS[name]), ranges(METHODS[name])
    for field in dataclasses.fields(METHODS[name]):
        kinds = {hints[field.name], *typing.get_args(hints[field.name])}
        if kinds & {int, float}:
            assert field.default is None or field.default in known[field.name], field.name
            with pytest.raises(UserError, match=rf"{field.name} must be .*, got -1$"):
                METHODS[name](small.net(), **{field.name: -1})
