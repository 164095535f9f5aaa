"""Hints at the name that was meant, names in a sentence, and the names that there are."""

import pytest

import fedhassle
from fedhassle.names import nearest, some_of


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ankel BOOT", ", did you mean 'Ankle boot'?"),
        ("mri", ", did you mean 'MRI'?"),
        ("zzz", ""),
    ],
)
def test_the_nearest_name_is_found_whatever_its_capitals(name, hint):
    assert nearest(name, ["Ankle boot", "MRI"]) == hint


def test_a_hint_names_the_place_too():
    assert nearest("alfa", ["alpha"], "split.") == ", did you mean 'split.alpha'?"


@pytest.mark.parametrize(("most", "text"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_of_many_names_the_first_stand_in_a_sentence(most, text):
    assert some_of(iter("abc"), most) == text


def test_whoever_looks_what_there_is_sees_what_is_imported_on_first_use():
    """As a notebook does on Tab; and each of it can be had."""
    assert set(dir(fedhassle)) >= {*fedhassle.__all__, "__doc__", "__path__"}
    assert {name for name in dir(fedhassle) if not name.startswith("_")} == set(fedhassle.__all__)
    assert all(getattr(fedhassle, name) is not None for name in fedhassle.__all__)
