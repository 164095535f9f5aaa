"""Flower's SuperNode with our long-lived worker, and without its waits of three seconds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from flwr.supernode.cli import flower_supernode

from fedhassle.federation.flower.logs import log_to_output
from fedhassle.federation.flower.patches import patch_supernode
from fedhassle.federation.flower.processes import end_with_parent, terminate_self
from fedhassle.federation.setup.keys import fingerprint, public_line
from fedhassle.federation.site.supervise import CANNOT_WORK

log = logging.getLogger("fedhassle")

WORKER = "fedhassle.federation.site.worker"
RESTART_AFTER = 5.0  # seconds until a worker that has ended is restarted


def option(words: list[str], name: str) -> str:
    """The value of a command-line option."""
    return words[words.index(name) + 1]


def not_admitted(key: Path) -> str:
    """The error for a site whose key the server does not admit."""
    name = key.stem
    return (
        f"the server does not admit this key ({fingerprint(public_line(key, name))}): send {name}.pub to the "
        f"coordinator, who runs: fedhassle federation admit {name} {name}.pub"
    )


def keep_worker(words: list[str]) -> threading.Event:
    """Starts the worker, and restarts it whenever it ends.

    If the worker cannot work at all, sets the returned event and ends this process.
    """
    cannot_work = threading.Event()
    command = [sys.executable, "-m", WORKER]
    command += ["--address", f"127.0.0.1:{option(words, '--port')}"]
    command += ["--node-config", option(words, "--node-config"), "--parent-pid", str(os.getpid())]

    def keep() -> None:
        while subprocess.call(command) != CANNOT_WORK:
            log.warning("the worker has ended; restarting it in %.0f s", RESTART_AFTER)
            time.sleep(RESTART_AFTER)
        cannot_work.set()
        terminate_self()

    threading.Thread(target=keep, daemon=True).start()
    return cannot_work


def main() -> None:
    """Runs a SuperNode with the options of `flower-supernode`."""
    words = sys.argv[1:]
    log_to_output()
    end_with_parent()
    cannot_work = keep_worker(words)

    def on_refused() -> None:
        log.error("%s", not_admitted(Path(option(words, "--auth-supernode-private-key"))))
        cannot_work.set()

    patch_supernode(on_refused)
    sys.argv = ["flower-supernode", "--isolation", "process", *words]
    try:
        flower_supernode()
    finally:
        if cannot_work.is_set():
            sys.exit(CANNOT_WORK)


if __name__ == "__main__":
    main()
