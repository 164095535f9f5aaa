"""SuperLink, SuperNodes and Flower's commands as processes: starts them, waits for them, ends them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

import fedhassle
from fedhassle.errors import UserError
from fedhassle.files import write_text

CONNECTION = "fedhassle"  # the name of the SuperLink in Flower's own configuration
PORTS = range(20_000, 32_768)  # from 32,768 on Linux gives ports to outgoing connections
LARGEST = "largest-answer"  # beside the SuperLink's database: the most bytes that a site may answer with
PARENT = "FEDHASSLE_PARENT"  # environment variable: the id of the process that started this one


class Tls(NamedTuple):
    """The files of a SuperLink's TLS."""

    ca: Path
    certificate: Path
    key: Path


def environment(home: Path | None) -> dict[str, str]:
    """The environment of Flower's processes: a home of our own, and no telemetry.

    Flower's programs start each other by name, so the folder of this Python is on PATH even if its virtual
    environment is not activated. They import what this command imports: the user's own methods in the working
    folder, and this package, installed or not.
    """
    own = {} if home is None else {"FLWR_HOME": str(home.resolve())}
    package = str(Path(fedhassle.__file__).resolve().parents[1])
    return {
        **os.environ,
        **own,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), package, os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
    }


def program_path(name: str) -> str:
    """The path of a program in this Python's environment, activated or not."""
    return str(Path(sys.executable).parent / name)


@contextmanager
def running(command: Sequence[str], home: Path | None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process with its own log file; ends it and all its children when the block ends.

    `home`: the folder of Flower's own files, if it has any.
    """
    # psutil comes with the extra `flower`; the command line imports this module without it.
    from fedhassle.federation.flower.process_tree import end

    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(command),
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, so that its children can be ended with it
        )
    try:
        yield process
    finally:
        with uninterrupted():
            end(process)


# Signals


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns Ctrl-C, kill and a closed terminal into KeyboardInterrupt inside the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with signals_handled_by(interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C, kill and a closed terminal inside the block, so that it can clean up."""
    with signals_handled_by(signal.SIG_IGN):
        yield


@contextmanager
def signals_handled_by(handler: Any) -> Iterator[None]:
    """Sets a handler for the signals that end a process, inside the block; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, handler) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, previous in before.items():
            signal.signal(one, previous)


# Parents


def terminate_self() -> None:
    """Sends SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent() -> None:
    """Ends this process by SIGTERM once the process that started it by `running` has ended."""
    if PARENT in os.environ:
        end_with(int(os.environ.pop(PARENT)))


def end_with(parent: int, end: Callable[[], None] = terminate_self) -> None:
    """Watches the parent process in a thread, and calls `end` once it has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        end()

    threading.Thread(target=watch, daemon=True).start()


def outlives(parent: int, seconds: float = 1.0) -> bool:
    """True if this process's parent has ended, or does so within a moment."""
    deadline = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.05)
    return os.getppid() != parent


# Flower's programs


def superlink_command(tls: Tls, port: int, database: Path, host: str = "127.0.0.1") -> list[str]:
    """The command of a SuperLink with TLS that admits registered keys only, and installs nothing."""
    return [
        *(sys.executable, "-m", "fedhassle.federation.server.superlink"),
        *("--host", host, "--port", str(port), "--database", str(database)),
        *("--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)),
        *("--ssl-keyfile", str(tls.key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def supernode_command(address: str, ca: Path, key: Path, config: Path) -> list[str]:
    """The command of a SuperNode that connects to `address`; `config` is the TOML file for its worker.

    The SuperNode's own port is on loopback, for its worker.
    """
    return [
        *(sys.executable, "-m", "fedhassle.federation.site.supernode"),
        *("--superlink", address, "--root-certificates", str(ca), "--auth-supernode-private-key", str(key)),
        *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", str(config)),
    ]


def free_port() -> int:
    """Returns a port of this machine that nobody uses.

    It lies below those that systems give to outgoing connections, or one of these could take it before a
    server listens on it.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def connect(home: Path, address: str, ca: Path) -> None:
    """Writes the SuperLink's address and certificate for Flower's commands."""
    table = {"address": address, "root-certificates": str(ca.resolve())}
    write_text(home / "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: table}}))


def flwr(home: Path, *words: str, timeout: float = 120.0) -> dict[str, Any]:
    """Runs one of Flower's commands and returns its answer; raises with its error message."""
    command = [program_path("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"flwr {words[0]} failed: {error}") from error
    answer = json_in(done.stdout)
    if not answer.get("success"):
        said = answer.get("error-message") or (done.stdout + done.stderr).strip()[-500:]
        raise UserError(f"flwr {' '.join(words[:2])} failed: {said}")
    return answer


def json_in(text: str) -> dict[str, Any]:
    """The JSON object at the end of an output; empty if there is none."""
    for start in (i for i, character in enumerate(text) if character == "{"):
        try:
            found = json.loads(text[start:])
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def wait_for(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float, what: str
) -> None:
    """Waits until `ready`; raises with the end of the log if the process ends before, or time runs out."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise UserError(f"{what} has ended (exit code {process.returncode}): {last_lines(log)}")
        if time.monotonic() > deadline:
            raise UserError(f"{what} is not ready after {seconds:.0f} s: {last_lines(log)}")
        time.sleep(0.2)


def last_lines(log: Path, count: int = 5) -> str:
    """The last lines of a log, in one line."""
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-count:] if line.strip())


# Runs

# Flower is given an app of two modules, which import what is installed here anyway.
APP = {"at_server": "fedhassle.federation.server.serverapp", "at_site": "fedhassle.federation.site.clientapp"}
APP_TOML = {
    "project": {"name": "fedhassle-federation", "version": "1.0.0", "description": "", "license": "MIT"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedhassle",
                "components": {"serverapp": "at_server:app", "clientapp": "at_site:app"},
                "config": {"file": "", "folder": "", "test": ""},
            }
        }
    },
}


def submit(home: Path, file: Path, folder: Path, test: Path | None = None) -> int:
    """Starts a run and returns its number; all paths are on the SuperLink's machine.

    `file`: the federation's file; `folder`: the run's; `test`: labelled test images.
    """
    config = {"file": str(file.resolve()), "folder": str(folder.resolve())}
    config["test"] = str(test.resolve()) if test else ""
    path = home / "run.toml"
    write_text(path, tomli_w.dumps(config))
    app = write_app(home / "app")
    return int(flwr(home, "run", str(app), CONNECTION, "--run-config", str(path))["run-id"])


def write_app(folder: Path) -> Path:
    """Writes the app that Flower is given."""
    write_text(folder / "pyproject.toml", tomli_w.dumps(APP_TOML))
    for name, module in APP.items():
        write_text(folder / f"{name}.py", f"from {module} import app as _app\n\napp = _app\n")
    return folder
