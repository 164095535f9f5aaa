"""SuperLink, SuperNodes and Flower's commands as processes of ours: started, waited for, and ended."""

from __future__ import annotations

import json
import os
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
PARENT = "FEDHASSLE_PARENT"  # the variable with the number of the process that started one
GRACE = 10.0  # seconds that a process has to end by itself
PROC = Path("/proc")  # where Linux tells of processes


class Tls(NamedTuple):
    """The files of a SuperLink's TLS."""

    ca: Path
    certificate: Path
    key: Path


def environment(home: Path | None) -> dict[str, str]:
    """That of Flower's processes: a home of our own, nothing sent to its makers, its programs found.

    Its programs start each other by name; an environment that is not activated has them beside Python. They
    import what this command does: methods of one's own in the working folder, and the package that runs here,
    be it installed or not.
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
    """A program of the environment that this Python is of, whether that is activated or not."""
    return str(Path(sys.executable).parent / name)


@contextmanager
def running(command: Sequence[str], home: Path | None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a log of its own, ended with all its children however the block ends.

    `home`: where Flower's own files lie, if it has any.
    """
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
            start_new_session=True,  # a group of its own, so that its children can be ended with it
        )
    try:
        yield process
    finally:
        with undisturbed():
            end(process)


@contextmanager
def interruptible() -> Iterator[None]:
    """Whoever asks this process to end, by Ctrl-C, kill or a closed terminal, interrupts the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with handling(interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """While a block cleans up nobody interrupts it."""
    with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def handling(how: Any, *signals: signal.Signals) -> Iterator[None]:
    """What becomes of signals while a block runs; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, how) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def end_with_parent() -> None:
    """Ends this process, as if it were asked to, once the one that started it by `running` is gone."""
    if PARENT in os.environ:
        end_with(int(os.environ.pop(PARENT)))


def end_with(parent: int) -> None:
    """Ends this process, as if it were asked to, once its parent is another one."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def is_left_by(parent: int, seconds: float = 1.0) -> bool:
    """Whether the process that started this one has ended, or does within a moment."""
    deadline = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.05)
    return os.getppid() != parent


def end(process: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """Ends a process, then what is left of its group and of those below it that have left the group.

    First by request, then by force. The group is the one that the process leads, so never this process's
    own; where it leads none, there is none of that number.
    """
    group, below = process.pid, children(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for force in (signal.SIGTERM, signal.SIGKILL):
        if group_is_alive(group):
            with suppress(OSError):
                os.killpg(group, force)
        for pid in filter(is_alive, below):
            if group_of(pid) != group:
                with suppress(ProcessLookupError):
                    os.kill(pid, force)
        deadline = time.monotonic() + grace
        while (group_is_alive(group) or any(map(is_alive, below))) and time.monotonic() < deadline:
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes below a process, the nearest first; none where the system does not tell."""
    near = [child for task in entries(PROC / str(pid) / "task") for child in started_by(task)]
    return near + [far for child in near for far in children(child)]


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def started_by(task: Path) -> list[int]:
    """The processes that a thread has started; none of a thread that has ended meanwhile."""
    try:
        return [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        return []


def group_is_alive(group: int) -> bool:
    """Whether a process of a group is there and not merely waiting to be buried, where the system tells."""
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    found = [int(path.name) for path in entries(PROC) if path.name.isdigit()]
    return not found or any(group_of(pid) == group and is_alive(pid) for pid in found)


def group_of(pid: int) -> int | None:
    """The group of a process; None of one that is gone."""
    told = told_of(pid)
    return int(told[2]) if told else None


def is_alive(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be buried."""
    told = told_of(pid)
    return bool(told) and told[0] != "Z"


def told_of(pid: int) -> list[str]:
    """What the system tells of a process: state, parent, group and more; nothing once it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def superlink_command(tls: Tls, port: int, database: Path, host: str = "127.0.0.1") -> list[str]:
    """A SuperLink with TLS, that admits registered keys alone and installs nothing."""
    return [
        *(sys.executable, "-m", "fedhassle.federation.server.superlink"),
        *("--host", host, "--port", str(port), "--database", str(database)),
        *("--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)),
        *("--ssl-keyfile", str(tls.key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def supernode_command(address: str, ca: Path, key: Path, config: Path) -> list[str]:
    """A SuperNode for a SuperLink's address; `config`: the TOML file with what its worker needs to know.

    Its own port is for its worker alone, which runs beside it.
    """
    return [
        *(sys.executable, "-m", "fedhassle.federation.site.supernode"),
        *("--superlink", address, "--root-certificates", str(ca), "--auth-supernode-private-key", str(key)),
        *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", str(config)),
    ]


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def connect(home: Path, address: str, ca: Path) -> None:
    """Writes where the SuperLink is, for Flower's commands."""
    table = {"address": address, "root-certificates": str(ca.resolve())}
    write_text(home / "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: table}}))


def flwr(home: Path, *words: str, timeout: float = 120.0) -> dict[str, Any]:
    """One of Flower's commands; its answer, or an error with what it said."""
    command = [program_path("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"flwr {words[0]} did not work: {error}") from error
    answer = json_in(done.stdout)
    if not answer.get("success"):
        said = answer.get("error-message") or (done.stdout + done.stderr).strip()[-500:]
        raise UserError(f"flwr {' '.join(words[:2])} did not work: {said}")
    return answer


def json_in(text: str) -> dict[str, Any]:
    """The JSON object that an output ends in; none if there is none."""
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
    """Waits for something that a process is to bring about; its end, or the time's, is an error."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise UserError(f"{what} has ended (exit code {process.returncode}): {last_lines(log)}")
        if time.monotonic() > deadline:
            raise UserError(f"{what} is not ready after {seconds:.0f} s: {last_lines(log)}")
        time.sleep(0.2)


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log."""
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-count:] if line.strip())


def submit(home: Path, file: Path, folder: Path, test: Path | None = None) -> int:
    """Starts a run by the federation's file in a folder, both on the SuperLink's machine; its number."""
    config = {"file": str(file.resolve()), "folder": str(folder.resolve())}
    config["test"] = str(test.resolve()) if test else ""
    path = home / "run.toml"
    write_text(path, tomli_w.dumps(config))
    app = write_app(home / "app")
    return int(flwr(home, "run", str(app), CONNECTION, "--run-config", str(path))["run-id"])


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
MODULES = {
    "at_server": "fedhassle.federation.server.serverapp",
    "at_site": "fedhassle.federation.site.clientapp",
}


def write_app(folder: Path) -> Path:
    """The app that Flower is given: two lines that name what is installed here anyway."""
    write_text(folder / "pyproject.toml", tomli_w.dumps(APP_TOML))
    for name, module in MODULES.items():
        lines = f"from {module} import app as _app\n\napp = _app\n"
        write_text(folder / f"{name}.py", lines)
    return folder
