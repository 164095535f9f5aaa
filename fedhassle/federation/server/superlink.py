"""Flower's SuperLink, with the coordinator's part closed to other machines, and with limits.

The SuperLink serves sites, the coordinator's commands (admit a key, start a program) and the programs
themselves at one port, and requires a key from sites only. Here everything but the sites' part answers
requests from this machine only.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
import threading
import time
from pathlib import Path

import uvicorn
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedhassle.federation.flower.database import patch_database
from fedhassle.federation.flower.deliveries import patch_deliveries
from fedhassle.federation.flower.logs import log_to_output
from fedhassle.federation.flower.patches import patch_superlink
from fedhassle.federation.flower.processes import LARGEST, end_with_parent
from fedhassle.federation.server.limits import HTTP, SITES, BodyLimit, Largest, patch_limits

log = logging.getLogger("fedhassle")

WATCH = 1.0  # seconds between two looks at the program that starts runs


class LocalControl:
    """Refuses requests from other machines, except those of sites."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "http" and not (scope["path"].startswith(SITES) or is_local(scope)):
            await PlainTextResponse("not from here", status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def is_local(scope: Scope) -> bool:
    """True for a request from this machine: over loopback, or from the address that it was sent to."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback or client[0] == server[0]
    except ValueError:
        return False


class WatchedLifespan(SuperLinkLifespan):
    """Restarts the program that starts runs (Flower's SuperExec) whenever it ends."""

    def startup(self) -> None:
        """Starts the parts of the SuperLink."""
        super().startup()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while (process := self.superexec_process) is not None:  # None: the SuperLink shuts down
            time.sleep(WATCH)
            if process.poll() is not None and self._started:
                log.warning(
                    "the program that starts runs has ended (exit code %s); restarting it", process.returncode
                )
                self._start_superexec_if_needed()


def main() -> None:
    """Runs a SuperLink with the options of `flower-superlink`."""
    end_with_parent()
    log_to_output(also=("flwr", "uvicorn"))
    sys.argv[0] = "flower-superlink"
    config = _parse_superlink_lifespan_config()
    patch_superlink()
    patch_database()
    patch_deliveries()
    largest = Largest(Path(config.database).parent / LARGEST)
    patch_limits(largest)
    app = create_app(config, WatchedLifespan)
    state = app.state.linkstate_factory.state()
    app.add_middleware(
        BodyLimit, largest=largest, knows=lambda key: state.get_node_id_by_public_key(key) is not None
    )
    app.add_middleware(LocalControl)  # the outermost comes last
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        access_log=False,
        log_config=None,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        proxy_headers=False,  # a caller must not choose its own address
        **HTTP,
    )


if __name__ == "__main__":
    main()
