"""Flower's SuperNode, with a worker beside it that lasts, and without its naps of three seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from flwr.supernode.cli import flower_supernode

from fedhassle.federation.pace import hurry_node
from fedhassle.federation.worker import IMPOSSIBLE

WORKER = "fedhassle.federation.worker"
AGAIN = 5.0  # seconds until a worker that has ended is started anew


def option(words: list[str], name: str) -> str:
    """The value of an option among words."""
    return words[words.index(name) + 1]


def keep_worker(words: list[str]) -> None:
    """Starts the worker, and again whenever it ends; if it cannot work at all, this process ends too."""
    command = [sys.executable, "-m", WORKER]
    command += ["--address", f"127.0.0.1:{option(words, '--port')}"]
    command += ["--node-config", option(words, "--node-config"), "--parent-pid", str(os.getpid())]

    def keep() -> None:
        while subprocess.call(command) != IMPOSSIBLE:
            time.sleep(AGAIN)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=keep, daemon=True).start()


def main() -> None:
    """Runs a SuperNode with the options of `flower-supernode`."""
    words = sys.argv[1:]
    hurry_node()
    keep_worker(words)
    sys.argv = ["flower-supernode", "--isolation", "process", *words]
    flower_supernode()


if __name__ == "__main__":
    main()
