"""A status page and metrics for Prometheus, read-only, over plain HTTP on an address of the coordinator."""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from fedhassle.federation.agreement import Address
from fedhassle.federation.pages import page
from fedhassle.federation.server.status import Status, read_status
from fedhassle.federation.setup.folder import FederationFolder

log = logging.getLogger("fedhassle")

REFRESH = 5.0  # seconds between two looks at the server
STALE = 150.0  # seconds after which a status is old: a server that is busy has a minute for each of two calls
SLOWEST = 10.0  # seconds that a caller has to send its request
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Sample(NamedTuple):
    """A value of a metric."""

    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """A metric with its values."""

    name: str
    kind: str  # gauge or counter
    help: str
    samples: list[Sample]


def metrics_of(status: Status) -> list[Metric]:
    """The metrics of a server."""
    run, sites = status.run, status.sites
    accuracy = {} if run is None else run.metrics.get("accuracy", {})

    def of_run(name: str, kind: str, text: str, value: float | None) -> Metric:
        return Metric(f"fedhassle_run_{name}", kind, text, [] if value is None else [Sample({}, value)])

    def of_sites(name: str, kind: str, text: str, values: list[tuple[dict[str, str], float]]) -> Metric:
        return Metric(f"fedhassle_site_{name}", kind, text, [Sample(*one) for one in values])

    return [
        Metric("fedhassle_up", "gauge", "1 if the server answers.", [Sample({}, status.up)]),
        Metric("fedhassle_status_time_seconds", "gauge", "Time of these values.", [Sample({}, status.time)]),
        of_sites(
            *("online", "gauge", "1 if the node of an admitted site is online."),
            [({"site": one.name}, one.online) for one in sites],
        ),
        of_sites(
            *("images", "gauge", "Images by use, as the site told the latest run."),
            [({"site": one.name, "use": use}, n) for one in sites for use, n in one.counts.items()],
        ),
        of_sites(
            *("rounds", "gauge", "Rounds of the latest run to which the site contributed."),
            [({"site": one.name}, one.rounds) for one in sites],
        ),
        of_sites(
            *("failures", "gauge", "Failed answers of the site in the latest run."),
            [({"site": one.name}, one.failures) for one in sites],
        ),
        of_run("active", "gauge", "1 while the latest run trains.", run and run.alive),
        of_run("round", "gauge", "Last finished round of the latest run.", run and run.round),
        of_run("rounds", "gauge", "Rounds of the latest run in all.", run and run.rounds),
        of_run("round_time_seconds", "gauge", "Time of the last finished round.", run and run.done_at),
        Metric(
            *("fedhassle_run_accuracy", "gauge", "Accuracy at the last evaluation of the latest run."),
            [Sample({"prediction": name}, share) for name, share in accuracy.items()],
        ),
        Metric(
            *("fedhassle_run_bytes", "gauge", "Bytes to (down) and from (up) all sites in the latest run."),
            [] if run is None else [Sample({"direction": way}, n) for way, n in run.bytes.items()],
        ),
        Metric(
            *("fedhassle_warnings", "gauge", "Warnings that the status page shows of the server's log."),
            [Sample({}, len(status.warnings))],
        ),
    ]


def exposition(metrics: list[Metric]) -> str:
    """Metrics in Prometheus's text format 0.0.4; those without a value are left out."""
    lines = []
    for one in metrics:
        if one.samples:
            lines += [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {one.kind}"]
        for labels, value in one.samples:
            inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
            lines.append(f"{one.name}{{{inside}}} {float(value)}" if inside else f"{one.name} {float(value)}")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """The value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def status_page(status: Status, headline: str) -> str:
    """The status as a page, which reloads itself."""
    now = f"{datetime.fromtimestamp(status.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return page("status", status=status, now=now, headline=headline)


class Monitor(ThreadingHTTPServer):
    """Serves the last status that it has read."""

    daemon_threads = True

    def __init__(self, address: Address, folder: FederationFolder, headline: str) -> None:
        self.folder, self.headline = folder, headline
        self.open = not is_loopback(address.host)
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.status: Status | None = None
        self._ended = threading.Event()
        super().__init__(address, Handler)

    def watch(self) -> None:
        """Reads the status again and again until the end."""
        while not self._ended.is_set():
            try:
                self.status = read_status(self.folder)
            except Exception as error:  # such as a damaged file: a page that stands still would look alive
                log.warning("the status cannot be read: %s: %s", type(error).__name__, error)
            self._ended.wait(REFRESH)

    def current(self) -> Status | None:
        """The last status; if it is old, the server does not answer."""
        last = self.status
        return last._replace(up=False) if last and time.time() - last.time > STALE else last

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs an error in a line, and no caller that hangs up; the base class prints tracebacks."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            log.warning("the status page cannot be sent: %s: %s", type(error).__name__, error)

    def end(self) -> None:
        """Ends the threads."""
        self._ended.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; every other method is refused."""

    server: Monitor
    timeout = SLOWEST
    server_version, sys_version = "fedhassle", ""

    def do_GET(self) -> None:
        """Answers a request."""
        status = self.server.current()
        if not self._is_expected_host():
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "unknown host\n")
        if status is None:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", "not ready yet\n")
        if self.path == "/":
            return self._send(HTTPStatus.OK, "text/html", status_page(status, self.server.headline))
        if self.path == "/metrics":
            return self._send(HTTPStatus.OK, "text/plain; version=0.0.4", exposition(metrics_of(status)))
        if self.path == "/healthz":
            code = HTTPStatus.OK if status.up else HTTPStatus.SERVICE_UNAVAILABLE
            return self._send(code, "text/plain", "ok\n" if status.up else "the server does not answer\n")
        return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are /, /metrics and /healthz\n")

    do_HEAD = do_GET  # noqa: N815 - as above

    def _is_expected_host(self) -> bool:
        """False if a web page in a browser here reaches a loopback address under a name of its own."""
        host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        return self.server.open or host == "localhost" or is_loopback(host)

    def _send(self, code: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in SECURITY.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:  # noqa: A002 - the name in the base class
        """Logs nothing: a monitor asks every few seconds."""


def is_loopback(host: str) -> bool:
    """True for an address of this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def monitoring(folder: FederationFolder, address: Address, headline: str) -> Iterator[Monitor]:
    """Serves status page and metrics inside the block."""
    monitor = Monitor(address, folder, headline)
    threads = [threading.Thread(target=work, daemon=True) for work in (monitor.serve_forever, monitor.watch)]
    for thread in threads:
        thread.start()
    try:
        yield monitor
    finally:
        monitor.end()
