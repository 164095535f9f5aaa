"""Imports go one way, configuration stays at the top, and nothing draws from global randomness."""

import ast
import re
from pathlib import Path

import pytest

import fedhassle

PACKAGE = Path(fedhassle.__file__).parent
STOREYS = [  # from the ground up; a module imports what lies below it, or beside it on its storey
    {"blocks", "capture", "errors", "files", "names", "terminal", "version"}
    | {"provenance", "randomness", "ranges"},
    {"data"},
    {"vectors", "robust", "architectures", "layers", "dropout", "nets", "losses", "optimiser", "method"}
    | {"averaging", "wrapped"},
    {"methods", "engine"},
    {"settings"},
    {"runs"},
    {"predict", "notebook"},
    {"reproduce", "api"},
    {"federation"},
    {"cli", "__main__"},
]
HEIGHT = {name: height for height, names in enumerate(STOREYS) for name in names}
ENGINE = sorted((PACKAGE / "engine").rglob("*.py"))
CONFIGURED = {  # what reads settings outside settings/
    "runs/about.py",
    "runs/checkpoints.py",  # checks their metadata by a pydantic model, as settings are checked
    "runs/record.py",  # checks summaries in the same way
    "runs/resume.py",
    "runs/run.py",
    "runs/trackers.py",
    "predict/metadata.py",  # checks the metadata of models in the same way
    "predict/model.py",
    "cli/completion.py",  # completes the names of settings
    "cli/split.py",
    "federation/build.py",  # builds a run from an agreement
    "federation/agreement.py",  # checks federation.toml
    "federation/setup/admission.py",  # checks sites.toml
    "reproduce/paper.py",  # checks paper.toml
    "reproduce/experiment.py",  # checks experiments
    "reproduce/contribution.py",  # checks summaries from other machines
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
EACH = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])


def imports(path):
    """Every module that a file imports, wherever in it: `from a import b` counts as a.b and as a."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path):
    """The parts of our own package that a file imports: `nets`, `data.views`, `methods.hassle`."""
    found = {name.removeprefix("fedhassle.") for name in imports(path) if name.startswith("fedhassle.")}
    return {name for name in found if is_module(name)}


def is_module(name):
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def top(name):
    return name.partition(".")[0]


def layer(path):
    return top(str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."))


def test_every_module_has_its_storey():
    assert {layer(path) for path in FILES} == HEIGHT.keys()


def test_the_package_has_at_most_nine_rooms():
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert len(rooms) <= 9


def described(name):
    """A row of the map: where a module or room lies, and the first line of its docstring."""
    path = PACKAGE / f"{name}.py"
    path, link = (path, path.name) if path.exists() else (PACKAGE / name / "__init__.py", name)
    first = ast.get_docstring(ast.parse(path.read_text("utf-8"))).partition("\n")[0]
    return f"| {HEIGHT[name] + 1} | [`{name}`](../fedhassle/{link}) | {first} |"


def test_the_map_of_the_code_shows_every_storey():
    """Its rows are those of `STOREYS`, each with the first line of its docstring."""
    text = (PACKAGE.parent / "docs" / "code.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert rows == [described(name) for names in reversed(STOREYS) for name in sorted(names)]


@EACH
def test_imports_go_down(path):
    """Those that share a height may import each other, as `names` does `errors`."""
    here = layer(path)
    for name in ours(path):
        assert HEIGHT[top(name)] <= HEIGHT[here], f"{path.name} imports {name}, which lies above it"


def test_no_import_runs_in_a_circle():
    """Between all files, those of one layer as well: take away what imports nothing that is left."""
    graph = {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix(".__init__"): ours(path)
        for path in FILES
    }
    while graph:
        free = {name for name, needs in graph.items() if not (needs & graph.keys()) - {name}}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_the_engine_knows_no_method(path):
    assert not {module for module in ours(path) if top(module) == "methods"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "data").rglob("*.py")), ids=lambda path: path.name)
def test_data_knows_errors_files_names_and_itself_alone(path):
    assert {top(name) for name in ours(path)} <= {"data", "errors", "files", "names"}
    if path.name not in {"views.py", "strong.py"}:
        assert "torch" not in {top(name) for name in imports(path)}


@EACH
def test_configuration_stays_in_few_files(path):
    here = str(path.relative_to(PACKAGE))
    if top(here.replace("/", ".")) != "settings" and here not in CONFIGURED:
        assert "pydantic" not in {top(name) for name in imports(path)}
        assert "settings.schema" not in ours(path)


@EACH
def test_nothing_prints(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    assert not [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


# Global randomness

NUMPY_KEYED = {"Generator", "RandomState", "default_rng", "SeedSequence", "BitGenerator", "PCG64"}
TORCH_GLOBAL = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
TORCH_GLOBAL |= {"rand_like", "randn_like", "randint_like", "manual_seed", "seed", "set_rng_state"}
TENSOR_GLOBAL = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_"}


def dotted(node):
    """`a.b.c` as text, or nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_fork(node):
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(dotted(call.func).endswith("random.fork_rng") for call in calls)


def is_module_class(node):
    """A network: built by `Net` alone, which forks the random state around it."""
    return isinstance(node, ast.ClassDef) and any(dotted(base) == "nn.Module" for base in node.bases)


def global_draws(node):
    """Line numbers of draws from, or writes to, a global random state outside a fork of it."""
    if (isinstance(node, ast.With) and is_fork(node)) or is_module_class(node):
        return
    name = dotted(node) if isinstance(node, ast.Attribute) else ""
    head, _, last = name.rpartition(".")
    if head in {"np.random", "numpy.random"} and last not in NUMPY_KEYED:
        yield node.lineno
    if isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names):
        yield node.lineno
    if isinstance(node, ast.ImportFrom) and (node.module or "") in {"random", "numpy.random", "torch.random"}:
        yield node.lineno
    if isinstance(node, ast.Call) and not any(keyword.arg == "generator" for keyword in node.keywords):
        owner, _, function = dotted(node.func).rpartition(".")
        if owner in {"torch", "torch.random", "torch.cuda"} and function in TORCH_GLOBAL:
            yield node.lineno
        if isinstance(node.func, ast.Attribute) and node.func.attr in TENSOR_GLOBAL:
            yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from global_draws(child)


@EACH
def test_nothing_draws_from_global_randomness(path):
    assert list(global_draws(ast.parse(path.read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "np.random.rand(3)",
        "np.random.seed(0)",
        "torch.rand(3)",
        "torch.manual_seed(0)",
        "torch.randperm(5, device=d)",
        "x.normal_()",
        "nn.init.normal_(w)",
        "import random",
        "from numpy.random import rand",
    ],
)
def test_the_search_finds_each_kind(line):
    assert list(global_draws(ast.parse(line))) == [1]
    assert list(global_draws(ast.parse(f"def f():\n    {line}"))) == [2]


@pytest.mark.parametrize(
    "text",
    [
        "np.random.default_rng(0).random(3)",
        "torch.rand(3, generator=g)",
        "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(0)",
        "x.normal_(generator=g)",
    ],
)
def test_the_search_lets_keyed_draws_pass(text):
    assert list(global_draws(ast.parse(text))) == []
