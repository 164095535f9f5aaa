"""The simulator uses nothing that only Linux has. Windows and macOS were not run: their names are patched."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import fedhassle
from fedhassle.files import file_name

PACKAGE = Path(fedhassle.__file__).parent
LINUX = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}  # modules that Windows lacks
FORBIDDEN = {  # attributes that Windows or macOS lacks
    "os": {
        "fork",
        "forkpty",
        "getuid",
        "geteuid",
        "getpgid",
        "killpg",
        "setsid",
        "sched_setaffinity",
        "mkfifo",
    },
    "signal": {"SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "pthread_sigmask", "alarm"},
}

# A program in which these names do not exist: a run, a resume with more rounds, and a comparison.
PROGRAM = """
import os, signal, sys
import filelock, matplotlib.figure, numpy, PIL.Image, pydantic, rich.console, torch, typer
import tempfile, subprocess, multiprocessing, concurrent.futures
for name in LINUX:
    sys.modules[name] = None
for module, names in ((os, FORBIDDEN["os"] | {"sched_getaffinity"}), (signal, FORBIDDEN["signal"])):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
from fedhassle.cli.main import app
for words in WORDS:
    app(words, standalone_mode=False)
"""


def simulator_files():
    """The package without federations, which need Flower's own programs."""
    return [path for path in PACKAGE.rglob("*.py") if "federation" not in path.relative_to(PACKAGE).parts]


def test_no_module_of_the_simulator_names_what_only_linux_has():
    found = []
    for path in simulator_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name in LINUX]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module in LINUX else []
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [node.attr] if node.attr in FORBIDDEN.get(node.value.id, ()) else []
            found += [f"{path.name}: {name}" for name in names]
    assert found == []


def test_a_run_trains_and_resumes_without_the_names_that_only_linux_has(words, tmp_path):
    short = [word for word in words if "residual" not in word]
    calls = [
        ["run", *short, "method=fedavg", "rounds=2", "threads=0", "--out", str(tmp_path / "run")],
        ["resume", str(tmp_path / "run"), "rounds=3"],
        ["compare", str(tmp_path / "run"), "--picture", str(tmp_path / "curves.png")],
    ]
    program = PROGRAM.replace("WORDS", repr(calls)).replace("LINUX", repr(LINUX))
    program = program.replace("FORBIDDEN", repr(FORBIDDEN))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").exists() and "3 rounds" in done.stdout


def test_file_names_have_no_character_that_windows_refuses():
    assert not set(file_name('a<b>c:d"e/f\\g|h?i*j')) & set('<>:"/\\|?*')
