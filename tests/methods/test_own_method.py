"""A custom method, named by its import path."""

import contextlib
import hashlib
import io
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass

import pytest
import small
import tomli_w
from small import LIMIT, built, environment, resolved

import fedhassle
from fedhassle.errors import UserError
from fedhassle.settings.request import Request, key_value, request
from fedhassle.settings.schema import resolve

METHOD = """
    from dataclasses import dataclass
    from fedhassle import Descent, Method, Phase, Stream
    from fedhassle.losses import cross_entropy

    @dataclass(frozen=True)
    class Ridge(Method):
        "Pulls towards zero."
        strength: float = 0.01
        {field}

        def __post_init__(self):
            super().__post_init__()
            if self.strength < 0:
                raise ValueError(f"strength must not be negative, got {{self.strength}}")

        def networks(self):
            return {{"w": self.net}}

        def initial(self, seed):
            return {{"w": self.net.initial(seed)}}

        def phases(self, client, t):
            walk, descent = Stream("labelled", self.batch), Descent("w", self.loss, self.local_optimiser())
            return (Phase("labelled", (walk,), (descent,), self.epochs),) if client.labelled else ()

        def loss(self, local, received, batch):
            z = local["w"](batch.views[0])
            return cross_entropy(z, batch.y) + self.strength * local["w"].weights.square().sum()

        def predict(self, state, x):
            return {{"model": self.net.logits(state["w"], x)}}

    class Loose(Ridge):
        own: float = 1.0

    def function():
        pass
"""


def test_a_custom_method_has_its_fields_as_settings(module, images):
    module("own_ridge", METHOD.format(field=""))
    words = {**small.SETTINGS, "data": str(images), "method": "own_ridge:Ridge", "method.strength": 0.5}
    settings = resolve(request("quick", words))
    assert settings.method.settings == {
        "batch": 16,
        "epochs": resolved(config="quick").method.settings["epochs"],
        "lr": 0.1,
        "momentum": 0.9,
        **dict.fromkeys(("optimiser", "weight_decay", "nesterov", "schedule", "horizon", "lr_warmup")),
        **dict.fromkeys(("clip", "average", "teacher", "prior", "labelled_view")),
        **dict.fromkeys(("merging", "trim")),
        "strength": 0.5,
    }
    _, _, method = built(settings)
    assert type(method).__name__ == "Ridge" and method.strength == 0.5
    with pytest.raises(UserError, match=r"method\.strenght.*did you mean 'method\.strength'"):
        resolved("method=own_ridge:Ridge", "method.strenght=1")
    with pytest.raises(UserError, match=r"method\.strength: .*number"):
        resolved("method=own_ridge:Ridge", "method.strength=much")


def test_a_custom_method_trains_to_the_end(module, images, tmp_path):
    module("own_trained", METHOD.format(field=""))
    words = {**small.SETTINGS, "data": str(images), "method": "own_trained:Ridge", "rounds": 1, "threads": 1}
    result = fedhassle.run("quick", words, out=tmp_path / "run", quiet=True)
    assert result.summary["method"] == "own_trained:Ridge" and set(result.accuracy) == {"model"}


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (" if client.labelled else ()", "", r"'labelled' walks over labelled data, of which .* has none"),
        ('Descent("w"', 'Descent("v"', "trains 'v', but .* was sent w"),
        ('Stream("labelled"', 'Stream("labeled"', "part must be labelled or unlabelled, got 'labeled'"),
        (
            '"labelled", self.batch)',
            '"labelled", self.batch, ("wek",))',
            "no view 'wek': a stream takes clean, w",
        ),
        (
            "(walk,), (descent,), self.epochs",
            "(walk,), (descent,)",
            "'labelled' needs either epochs or steps",
        ),
        ("(walk,), (descent,)", "(), (descent,)", "'labelled' needs a stream to walk over"),
        (
            "self.epochs),) if client.labelled else ()",
            "self.epochs))",
            r"Ridge\.phases returns a Phase; expected a tuple: \(Phase",
        ),
        (
            ".square().sum()",
            ".square()",
            r"'labelled' returned Tensor of shape \(\d+,\); expected a tensor of one n",
        ),
        (
            "return cross_entropy(z, batch.y) +",
            "return 0.5 #",
            "'labelled' returned float; expected a tensor of one n",
        ),
        ("return cross_entropy(z, batch.y) +", "return z.detach().mean() #", "one number with a gradient"),
        (
            'return {"model": ',
            'return {"mine": ',
            "Ridge reports mine, but not its headline 'model': set headline",
        ),
    ],
)
def test_errors_of_phases(right, wrong, message, module, images, tmp_path):
    text = METHOD.format(field="")
    assert right in text
    name = f"own_phase_{len(right)}_{len(wrong)}"
    module(name, text.replace(right, wrong))
    words = {**small.SETTINGS, "data": str(images), "method": f"{name}:Ridge", "rounds": 1, "threads": 1}
    with pytest.raises(UserError, match=message):
        fedhassle.run("quick", words, out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            '{"w": state["w"][:5]}',
            r"Ridge: 'w' has the shape \(5,\) in the state after round 1; expected \(\d",
        ),
        ('{"v": state["w"]}', r"Ridge: 'w' is missing in the state after round 1; expected \(\d"),
        ("None", "Ridge: the state after round 1 is NoneType: return the whole state"),
    ],
)
def test_a_state_of_another_shape_is_refused_after_its_round(returned, message, module, images, tmp_path):
    name = "own_state_" + hashlib.sha256(returned.encode()).hexdigest()[:8]
    added = f"def next_state(self, state, means, t):\n            return {returned}"
    module(name, METHOD.format(field=added))
    words = {**small.SETTINGS, "data": str(images), "method": f"{name}:Ridge", "rounds": 2, "threads": 1}
    with pytest.raises(UserError, match=message):
        fedhassle.run("quick", words, out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_wrong:Absent", "'own_wrong' has no class 'Absent'"),
        ("own_absent:Ridge", "cannot be imported: ModuleNotFoundError"),
        ("own_wrong:function", "must be a dataclass that inherits fedhassle.Method"),
        ("own_wrong:dataclass", "must be a dataclass that inherits fedhassle.Method"),
        ("own_syntax:X", "cannot be imported: SyntaxError"),
        ("own_raises:X", "cannot be imported: ZeroDivisionError"),
        ("own_wrong.Ridge", r"your own is my_file\.py:MyClass"),
        ("own_wrong:", "cannot be imported"),
        (":Ridge", "cannot be imported"),
        ("own_wrong:Ridge:Ridge", "cannot be imported"),
        ("own_absent.py:Ridge", "cannot be imported: FileNotFoundError: .*own_absent.py"),
        ("own_syntax.py", r"name the class in it too, as in 'own_syntax\.py:MyClass'"),
    ],
)
def test_errors_of_import_paths(name, message, module):
    module("own_wrong", METHOD.format(field=""))
    module("own_syntax", "def x(:")
    module("own_raises", "1 / 0")
    with pytest.raises(UserError, match=message):
        resolved(f"method={name}")


@pytest.mark.parametrize("part", ["networks", "initial", "phases", "predict"])
def test_a_method_that_lacks_a_part_is_refused_before_anything_trains(part, module):
    text = METHOD.format(field="")
    assert f"def {part}(" in text
    module(f"own_lacks_{part}", text.replace(f"def {part}(", f"def {part}_renamed("))
    with pytest.raises(UserError, match=rf"does not define {part}: .*docs/method\.md"):
        resolved(f"method=own_lacks_{part}:Ridge")


def test_a_module_that_exits_is_a_user_error(module):
    module("own_exits", "raise SystemExit(0)")
    with pytest.raises(UserError, match="own_exits"):
        resolved("method=own_exits:X")


FORGOTTEN = """
    from typing import ClassVar

    class Heir(Loose):
        pass

    @dataclass(frozen=True)
    class Decorated(Loose):
        other: float = 1.0

    @dataclass(frozen=True)
    class Untyped(Ridge):
        strength = 0.5

    class Bare(Ridge):
        lr = 0.5

    class Fine(Ridge):
        headline = "model"
        pooled: ClassVar[tuple[str, ...]] = ()
        modes: "ClassVar[dict[str, str]]" = {"model": "the only one"}

    class Names(Ridge):
        modes = ("model",)

    @dataclass(frozen=True, slots=True)
    class Slots(Ridge):
        strength: float = 0.5
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Loose", r"Loose has fields of its own: decorate it with @dataclass\(frozen=True\)"),
        ("Heir", "Loose has fields of its own"),
        ("Decorated", "Loose has fields of its own"),
        ("Untyped", "strength = 0.5 without a type is no setting.* write strength: TYPE = 0.5"),
        ("Bare", "lr = 0.5 without a type is no setting"),
        ("Names", r"modes must be a dict .*, got \('model',\)"),
    ],
)
def test_attributes_that_look_like_fields_are_refused(name, message, module):
    """A subclass that forgot the decorator, or a type, inherits its parent's fields as they are.

    And modes without what they are would be missed when the run is summed up.
    """
    module("own_loose", METHOD.format(field="") + FORGOTTEN)
    with pytest.raises(UserError, match=message):
        resolved(f"method=own_loose:{name}")


def test_a_subclass_without_new_fields_needs_no_decorator(module):
    module("own_fine", METHOD.format(field="") + FORGOTTEN)
    assert resolved("method=own_fine:Fine").method.settings["strength"] == 0.01
    assert resolved("method=own_fine:Slots").method.settings["strength"] == 0.5


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            '{"model": self.net.logits(state["w"], x)}',
            'self.net.logits(state["w"], x)',
            "returns Tensor; exp",
        ),
        (
            'state["w"], x)}',
            'state["w"], x)[:, :3]}',
            r"returns \(2, 3\) for 'model'; .*\(2, 4\) for 2 images",
        ),
        ('state["w"], x)}', 'state["w"], x).argmax(1)}', r"returns \(2,\) for 'model'"),
        ('self.net.logits(state["w"], x)}', "None}", "returns NoneType for 'model'"),
        ('{"model": ', '{"mine": ', "reports mine, but not its headline 'model'"),
    ],
)
def test_predictions_that_cannot_be_evaluated_are_refused_before_anything_trains(
    right, wrong, message, module, images, tmp_path
):
    text = METHOD.format(field="")
    assert right in text
    untrained = text.replace("z = local", "raise RuntimeError('it trains')\n            z = local")
    name = module(f"own_predicts_{len(right)}_{len(wrong)}", untrained.replace(right, wrong))
    words = {**small.SETTINGS, "data": str(images), "method": f"{name}:Ridge", "rounds": 1, "threads": 1}
    with pytest.raises(UserError, match=message):
        fedhassle.run("quick", words, out=tmp_path / "run", quiet=True)


def test_a_value_error_of_a_custom_method_is_a_user_error(module, images):
    module("own_refuses", METHOD.format(field=""))
    words = {**small.SETTINGS, "data": str(images), "method": "own_refuses:Ridge", "method.strength": -1}
    with pytest.raises(UserError, match="strength must not be negative, got -1"):
        built(resolve(request("paper", words)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sizes: tuple[int, ...] = (1, 2)", (1, 2)),
        ("sizes: tuple[float, float] = (1.0, 2.0)", (1.0, 2.0)),
        ("sizes: str | None = None", None),
        (
            "sizes: dict[str, int] = __import__('dataclasses').field(default_factory=dict)",
            {},
        ),
    ],
    ids=["tuple", "pair", "optional", "factory"],
)
def test_every_plain_kind_of_field_resolves_and_comes_back_from_its_file(field, value, module, request):
    name = module("own_" + request.node.callspec.id.replace("-", "_"), METHOD.format(field=field))
    settings = resolved(f"method={name}:Ridge")
    assert settings.method.settings["sizes"] == value
    assert resolve(Request((tomllib.loads(tomli_w.dumps(settings.as_toml())),))) == settings


@pytest.mark.parametrize(
    "field",
    [
        "sizes: 'Nothing' = 1",
        "sizes: object() = 1",
        "sizes: __import__('threading').Lock = None",
        "name: str = 'x'",
    ],
    ids=["unknown type", "no type", "opaque type", "name"],
)
def test_a_field_that_cannot_be_a_setting_is_a_user_error(field, module, request):
    name = module("own_" + request.node.callspec.id.replace(" ", "_"), METHOD.format(field=field))
    with pytest.raises(UserError, match="own_"):
        resolved(f"method={name}:Ridge")


def test_a_method_in_a_file_is_found_by_its_path(without_residuals, tmp_path, monkeypatch):
    """Also if another module has the name of the file, and with types that are text; its code is recorded."""
    text = "from __future__ import annotations\n" + textwrap.dedent(METHOD.format(field=""))
    (tmp_path / "small.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = [*without_residuals, "rounds=1", "method=./small.py:Ridge", "method.strength=0.5"]
    result = fedhassle.run("quick", dict(map(key_value, words)), out=tmp_path / "run", quiet=True)
    code = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert result.summary["method"] == "./small.py:Ridge"
    assert result.summary["versions"]["./small.py:Ridge"] == code
    assert (tmp_path / "run" / "own_code.txt").read_text() == f"./small.py:Ridge {code}\n"
    assert fedhassle.load(tmp_path / "run", allow_import=True).method.strength == 0.5
    (tmp_path / "small.py").write_text(text + "# changed\n")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"small\.py has changed since"):
        fedhassle.run(out=tmp_path / "run", quiet=True)


def test_a_file_runs_once_and_again_after_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_counted.py"
    path.write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        resolved("method=own_counted.py:Mine")
    path.write_text("from fedhassle.methods.fedavg import FedAvg as Mine\nprint('runs')")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert {resolved(f"method={name}:Mine").rounds for name in ("own_counted.py", path)} == {200}
    assert out.getvalue() == "runs\n"


@dataclass(frozen=True)
class Outside:
    """A dataclass that is no method."""

    batch: int = 1


def test_a_dataclass_that_is_no_method_is_refused():
    with pytest.raises(UserError, match=r"inherits fedhassle\.Method"):
        resolved(f"method={__name__}:Outside")


def test_a_method_in_the_working_folder_is_found(without_residuals, tmp_path):
    """The console script does not put the working folder on the path; `main` does."""
    (tmp_path / "own_here.py").write_text(textwrap.dedent(METHOD.format(field="")))
    code = "import sys; sys.path.remove(''); from fedhassle.cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", *without_residuals, "method=own_here:Ridge", "--out", "run"]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "run" / "summary.json").exists()
