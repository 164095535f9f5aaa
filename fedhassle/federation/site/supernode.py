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
API = "supernode-runtime-http-api"  # Flower's name of the thread that serves the worker
WATCH = 1.0  # seconds between two looks at that thread
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


def watch_api() -> None:
    """Ends this process once the thread that serves the worker has ended; a supervisor restarts it."""

    def watch() -> None:
        seen = False
        while True:
            there = any(thread.name == API for thread in threading.enumerate())
            if seen and not there:
                log.error("the part of the node that serves its worker has ended")
                leave(1)
            seen = seen or there
            time.sleep(WATCH)

    threading.Thread(target=watch, daemon=True).start()


def leave(code: int) -> None:
    """Ends this process at once: other threads of Flower would keep it alive, without a connection."""
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """Runs a SuperNode with the options of `flower-supernode`."""
    words = sys.argv[1:]
    log_to_output(also=("flwr", "uvicorn"))
    end_with_parent()
    cannot_work = keep_worker(words)

    def on_refused() -> None:
        log.error("%s", not_admitted(Path(option(words, "--auth-supernode-private-key"))))
        cannot_work.set()

    patch_supernode(on_refused)
    watch_api()
    sys.argv = ["flower-supernode", "--isolation", "process", *words]
    code = 1
    try:
        flower_supernode()
        log.error("the connection to the server has ended")  # it never does otherwise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception:
        log.exception("the node has failed")
    finally:
        leave(CANNOT_WORK if cannot_work.is_set() else code)


if __name__ == "__main__":
    main()
