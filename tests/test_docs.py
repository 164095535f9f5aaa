"""What the docs show runs."""

import doctest
import re
from pathlib import Path

import pytest
import small

import fedhassle
import fedhassle.method

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(
    r"^```python\n# (\w+)\.py\n(.*?)^```",
    (ROOT / "docs/method.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("module", "source"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_a_method_of_the_docs_trains(module, source, tmp_path, monkeypatch):
    """Each example as a user has it: a file on the Python path, named by import path."""
    (tmp_path / f"{module}.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (name,) = re.findall(r"^class (\w+)", source, re.MULTILINE)
    data = small.dataset()
    small.save_images(tmp_path / "own.npz", data)
    settings = {
        **small.SETTINGS,
        "data": str(tmp_path / "own.npz"),
        "rounds": 2,
        "method": f"{module}:{name}",
        "method.epochs": 1,
    }
    result = fedhassle.run("paper", settings, out=tmp_path / "run", quiet=True)
    assert set(result.accuracy) == {"model"}
    assert result.summary["method"] == f"{module}:{name}"
    assert result.model.predict(data.x_test).classes.shape == (40,)


def test_there_are_two_examples():
    assert [name for name, _ in EXAMPLES] == ["my_fedprox", "my_teacher"]


def test_the_example_of_the_interface_is_python():
    found = doctest.testmod(fedhassle.method)
    assert found.attempted == 2 and found.failed == 0
