"""Names of classes, hints for misspelt names, names in a sentence, and the public names of the package."""

import pytest

import fedhassle
from fedhassle.names import class_name, escaped, nearest, some_of


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


CONTROLS = {
    "\n": r"\n",
    "\r": r"\r",
    "\0": r"\x00",
    "\x1b": r"\x1b",
    "\x9b": r"\x9b",  # ESC [ in one character
    "\u2028": r"\u2028",  # ends a line
    "\u202e": r"\u202e",  # from right to left
    "\u2066": r"\u2066",
    "\ud800": r"\ud800",
}


@pytest.mark.parametrize("control", CONTROLS, ids=CONTROLS.values())
def test_a_class_has_no_control_characters_in_its_name(control):
    with pytest.raises(fedhassle.UserError, match=r"^here: .* cannot name a class: ") as refused:
        class_name(f"cat{control}[31m", "here: ")
    assert str(refused.value).isprintable()
    assert escaped(f"cat{control}s") == f"cat{CONTROLS[control]}s"


@pytest.mark.parametrize(
    "name", ["cat", "Größe 3.0", "猫", "חתול", "می\u200cخواهم", "👩\u200d🚀", "a\u00a0b", ""]
)
def test_other_names_of_classes_stay_as_they_are(name):
    """Joiners belong to the spelling of words and emojis."""
    assert class_name(name) == escaped(name) == name


def test_dir_lists_the_names_that_are_imported_on_first_use():
    """As for Tab completion in a notebook; and every name can be imported."""
    assert set(dir(fedhassle)) >= {*fedhassle.__all__, "__doc__", "__path__"}
    assert {name for name in dir(fedhassle) if not name.startswith("_")} == set(fedhassle.__all__)
    assert all(getattr(fedhassle, name) is not None for name in fedhassle.__all__)
