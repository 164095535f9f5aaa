"""Flower's SuperNode, with a worker beside it that lasts, and without its naps of three seconds."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from flwr.supernode.cli import flower_supernode

from fedhassle.federation.flower.logs import speak
from fedhassle.federation.flower.patches import hurry_node
from fedhassle.federation.flower.processes import end_with_parent
from fedhassle.federation.setup.keys import fingerprint, public_line
from fedhassle.federation.site.supervise import IMPOSSIBLE

log = logging.getLogger("fedhassle")

WORKER = "fedhassle.federation.site.worker"
AGAIN = 5.0  # seconds until a worker that has ended is started anew


def option(words: list[str], name: str) -> str:
    """The value of an option among words."""
    return words[words.index(name) + 1]


def not_admitted(key: Path) -> str:
    """What a site is told whose key the server does not admit: what to do about it."""
    name = key.stem
    return (
        f"the server does not admit this key ({fingerprint(public_line(key, name))}): send {name}.pub to the "
        f"coordinator, who runs `fedhassle federation admit {name} {name}.pub`"
    )


def keep_worker(words: list[str]) -> threading.Event:
    """Starts the worker, and again whenever it ends; if it cannot work at all, this process ends too.

    The event says that this is why.
    """
    impossible = threading.Event()
    command = [sys.executable, "-m", WORKER]
    command += ["--address", f"127.0.0.1:{option(words, '--port')}"]
    command += ["--node-config", option(words, "--node-config"), "--parent-pid", str(os.getpid())]

    def keep() -> None:
        while subprocess.call(command) != IMPOSSIBLE:
            log.warning("the worker has ended: it is started again in %.0f s", AGAIN)
            time.sleep(AGAIN)
        impossible.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=keep, daemon=True).start()
    return impossible


def main() -> None:
    """Runs a SuperNode with the options of `flower-supernode`."""
    words = sys.argv[1:]
    speak()
    end_with_parent()
    impossible = keep_worker(words)

    def kept_out() -> None:
        log.error("%s", not_admitted(Path(option(words, "--auth-supernode-private-key"))))
        impossible.set()

    hurry_node(kept_out)
    sys.argv = ["flower-supernode", "--isolation", "process", *words]
    try:
        flower_supernode()
    finally:
        if impossible.is_set():
            sys.exit(IMPOSSIBLE)


if __name__ == "__main__":
    main()
