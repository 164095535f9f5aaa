"""The checks of a site that need its server: its address, its certificate and its clock."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedhassle.errors import UserError
from fedhassle.federation.agreement import Address
from fedhassle.federation.setup.keys import names_in, read_certificate, validity
from fedhassle.federation.setup.proxy import Proxy, connection_to, opened, proxy_for
from fedhassle.names import some_of

TIMEOUT = 10.0  # seconds to wait for an answer
AGAIN = 5.0  # seconds between two tries to reach a server that does not run yet
UNTRIED = "not tried: the server does not answer"
# Flower refuses a signature more than 5 s ahead of the server's clock, or more than 305 s behind it.
AHEAD, BEHIND = timedelta(seconds=5), timedelta(seconds=300)
WRONG_DATES = {10: "has expired", 9: "is not valid yet"}  # errors of OpenSSL
WRONG_NAMES = (62, 64)  # of a host name, of an IP address
SET_CLOCK = "set this machine's clock with: timedatectl set-ntp true"
CLOCK_FIRST = f"if the clock is wrong, {SET_CLOCK}; if not, "
RENEW = "fedhassle federation certificate"


class Check(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool
    said: str  # what was found
    advice: str = ""  # what to do if it is not ok


def check_server(address: Address, ca: Path, timeout: float = TIMEOUT) -> list[Check]:
    """Checks that the server answers, has the right certificate, and has the same time.

    A check that is impossible after an earlier failure says "not tried".
    """
    reached = check_address(address, timeout)
    if not reached.ok:
        return [reached, Check("certificate", False, UNTRIED), Check("clock", False, UNTRIED)]
    return [reached, *check_certificate(address, ca, timeout)]


def only_waits(checks: Sequence[Check]) -> bool:
    """True if nothing is wrong but that the server does not answer: it may be started later."""
    failed = [check for check in checks if not check.ok]
    return bool(failed) and failed[0].name == "address" and all(UNTRIED in one.said for one in failed[1:])


def awaited_server(
    checks: Sequence[Check], address: Address, ca: Path, pause: Callable[[float], None] = time.sleep
) -> list[Check]:
    """Waits until the server answers; returns the checks with those of the server made anew."""
    while True:
        pause(AGAIN)
        server = check_server(address, ca)
        if server[0].ok:
            anew = {check.name: check for check in server}
            return [anew.get(check.name, check) for check in checks]


def server_fault(address: Address, ca: Path) -> str:
    """Says what is wrong with the server or the way to it, and what to do; empty if nothing is."""
    failed = next((check for check in check_server(address, ca) if not check.ok), None)
    return "" if failed is None else f"{failed.said}; {failed.advice}"


def check_address(address: Address, timeout: float = TIMEOUT) -> Check:
    """Checks that the server's name can be resolved and that its port is open."""
    shown = f"{address.host}:{address.port}"
    try:
        proxy = proxy_for(address.host)
    except UserError as error:
        return Check("address", False, str(error), "set HTTPS_PROXY again, or unset it")
    if proxy is not None:
        return check_proxy(address, proxy, timeout)
    try:
        with opened(address, timeout):
            return Check("address", True, f"{shown} answers")
    except (socket.gaierror, UnicodeError):
        said = f"the host name {address.host} cannot be resolved"
        advice = "check `address` in federation.toml, and this machine's DNS"
    except ConnectionRefusedError:
        said = f"{shown} refuses connections: the machine is up, but no server runs at this port"
        advice = "ask the coordinator to start it with: fedhassle federation server"
    except TimeoutError:
        said = f"{shown} does not answer within {timeout:g} s"
        advice = f"ask your network administrator to allow outgoing TCP connections to port {address.port}"
    except OSError as error:
        said = f"{shown} cannot be reached: {error.strerror or error}"
        advice = "check this machine's network, and `address` in federation.toml"
    return Check("address", False, said, advice)


def check_proxy(address: Address, proxy: Proxy, timeout: float = TIMEOUT) -> Check:
    """Checks that the server's port can be reached through a proxy."""
    shown, way = f"{address.host}:{address.port}", f"the proxy {proxy.shown} (HTTPS_PROXY)"
    try:
        with opened(address, timeout):
            return Check("address", True, f"{shown} answers, by way of {way}")
    except OSError as error:
        refused = str(error).startswith("Tunnel")  # as http.client says it
        said = (
            f"{way} does not connect to {shown}: {error}" if refused else f"{way} cannot be reached: {error}"
        )
        advice = f"ask your network administrator to allow CONNECT to {shown}; if no proxy is needed, add "
        return Check("address", False, said, f"{advice}{address.host} to NO_PROXY")


def check_certificate(address: Address, ca: Path, timeout: float = TIMEOUT) -> list[Check]:
    """Checks the server's certificate and, over that connection, the clock."""
    untried = Check("clock", False, "not tried: there is no secure connection")
    try:
        authority = read_certificate(ca)
        context = ssl.create_default_context(cafile=str(ca))
    except (UserError, ssl.SSLError, OSError) as error:
        advice = "ask the coordinator for ca.crt, and put it next to federation.toml"
        return [Check("certificate", False, str(error), advice), untried]
    with closing(connection_to(address, timeout, context)) as server:
        try:
            server.connect()
        except ssl.SSLCertVerificationError as error:
            return [_explained(error, address, ca, timeout), untried]
        except OSError as error:  # ssl.SSLError is one
            return [_no_tls(error, address, timeout), untried]
        line = server.sock
        assert isinstance(line, ssl.SSLSocket)
        known = f"{line.version()}, certified by {_common_name(authority.subject)}"
        return [Check("certificate", True, known), judged_clock(_date_of(server), datetime.now(UTC))]


def _explained(error: ssl.SSLCertVerificationError, address: Address, ca: Path, timeout: float) -> Check:
    """Explains why a certificate is not trusted."""
    said = untrusted(error, _server_certificate(address, timeout), address.host, ca)
    if error.verify_code in WRONG_DATES:
        advice = f"{CLOCK_FIRST}ask the coordinator to make a new certificate with: {RENEW}"
    elif error.verify_code in WRONG_NAMES:
        advice = "use one of these names for `address` in federation.toml, or ask the coordinator to make a "
        advice += f"certificate that includes {address.host} with: {RENEW} --also {address.host}"
    else:
        advice = "check that ca.crt is the one of this federation; if it is, someone else answers instead of "
        advice += "the server: do not join, and tell the coordinator"
    return Check("certificate", False, said, advice)


def untrusted(
    error: ssl.SSLCertVerificationError, found: x509.Certificate | None, host: str, ca: Path
) -> str:
    """Says why a server's certificate is not trusted; `found`: that certificate, if it is known."""
    if error.verify_code in WRONG_DATES:
        said = f"the server's certificate {WRONG_DATES[error.verify_code]}"
        said += f" ({validity(found)})" if found else ""
        return f"{said}; this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code in WRONG_NAMES:
        names = names_in(found) if found else []
        return f"the certificate is not for {host}" + (f" but for {some_of(names)}" if names else "")
    return f"the server's certificate is not signed by {ca} ({error.verify_message})"


def _no_tls(error: OSError, address: Address, timeout: float) -> Check:
    """Explains a server that does not answer by TLS."""
    with closing(connection_to(address, timeout)) as server:
        if _date_of(server) is not None:
            said = "the server answers in plain HTTP, without encryption"
            advice = "do not join; ask the coordinator to start it with: fedhassle federation server"
            return Check("certificate", False, said, advice)
    reason = getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
    advice = "check the port in federation.toml, and for a proxy or firewall in between"
    return Check("certificate", False, f"no TLS connection is possible: {reason}", advice)


def _date_of(server: HTTPConnection) -> str | None:
    """The date in a server's answer, empty if it sends none; None if it does not answer in HTTP."""
    try:
        server.request("HEAD", "/", headers={"Connection": "close"})
        return server.getresponse().headers.get("Date", "")
    except (OSError, HTTPException):
        return None


def judged_clock(date: str | None, now: datetime) -> Check:
    """Compares this machine's clock with the date in an HTTP answer that arrived at `now`."""
    try:
        told = parsedate_to_datetime(date or "")
    except ValueError:
        return Check("clock", True, "not checked: the server does not send its time")
    if told.tzinfo is None:
        told = told.replace(tzinfo=UTC)
    ahead = now - told - timedelta(seconds=0.5)  # HTTP cuts a date to the second
    seconds = abs(round(ahead.total_seconds()))
    if -BEHIND <= ahead <= AHEAD:
        return Check("clock", True, f"within {max(1, seconds)} s of the server's")
    side = "ahead of" if ahead > timedelta() else "behind"
    said = f"this machine's clock is {seconds:,} s {side} the server's"
    allowed = f"the server allows {AHEAD.seconds} s ahead and {BEHIND.seconds} s behind"
    return Check("clock", False, said, f"{SET_CLOCK} ({allowed})")


def _server_certificate(address: Address, timeout: float) -> x509.Certificate | None:
    """The server's certificate, trusted or not: only to explain what is wrong with it."""
    context = ssl._create_unverified_context()
    try:
        with (
            opened(address, timeout) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as line,
        ):
            return x509.load_der_x509_certificate(line.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def _common_name(name: x509.Name) -> str:
    return name.rfc4514_string().removeprefix("CN=")
