"""Hints for misspelt names, names in a sentence, and the public names of the package."""

import pytest

import fedhassle
from fedhassle.names import nearest, some_of


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ankel BOOT", ", did you mean 'Ankle boot'?"),
        ("mri", ", did you mean 'MRI'?"),
        ("boat", ""),
        ("zzz", ""),
    ],
)
def test_the_nearest_name_is_found_regardless_of_case(name, hint):
    assert nearest(name, ["Ankle boot", "MRI"]) == hint


@pytest.mark.parametrize(("most", "text"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_a_sentence_lists_the_first_names_and_counts_the_rest(most, text):
    assert some_of(iter("abc"), most) == text


def test_dir_lists_the_names_that_are_imported_on_first_use():
    """As for Tab completion in a notebook; and every name can be imported."""
    assert set(dir(fedhassle)) >= {*fedhassle.__all__, "__doc__", "__path__"}
    assert {name for name in dir(fedhassle) if not name.startswith("_")} == set(fedhassle.__all__)
    assert all(getattr(fedhassle, name) is not None for name in fedhassle.__all__)
