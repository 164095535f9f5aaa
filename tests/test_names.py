"""Hints at the name that was meant."""

import pytest

from fedhassle.names import nearest


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
