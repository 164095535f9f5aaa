"""The command line in its own process: on a terminal, and with ASCII output."""

import os
import pty
import select
import subprocess
import sys
import time

from small import LIMIT, environment, metrics_of, process


def on_a_terminal(command, **changes):
    """Runs a command on a pseudo-terminal; returns its exit code and output."""
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm", COLUMNS="150", LINES="40", **changes)
    running = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output, deadline = b"", time.monotonic() + LIMIT
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
                if not chunk:
                    break
                output += chunk
        return running.wait(timeout=LIMIT), output.decode()
    finally:
        running.kill()
        os.close(ours)


def test_a_terminal_shows_the_progress_of_a_run(words, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedhassle", "run", *words, "rounds=12", "--out", str(folder)]
    code, output = on_a_terminal(command)
    assert code == 0 and "\x1b[" in output
    shown = output.replace("\x1b", "\n\x1b")
    assert "12/12" in shown and "left" in shown
    last = metrics_of(folder)[-1]["accuracy"]["EM"]
    assert f"EM {100 * last:.1f}%" in shown
    assert all(kind in shown for kind in ("full", "partial", "unlabelled"))
    assert "round 2/12" not in shown  # the plain lines are for pipes
    assert "SM  supervised" in shown and str(folder / "model.safetensors") in shown


def test_lists_can_be_printed_as_ascii():
    done = process("methods", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == b"" and b"hassle" in done.stdout
