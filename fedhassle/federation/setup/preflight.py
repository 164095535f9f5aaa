"""The checks of a site before it joins: each reports what it found and, if that is wrong, what to do."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedhassle.data.site.folder import Progress, SiteData, read_site
from fedhassle.data.site.survey import skipped
from fedhassle.errors import UserError
from fedhassle.federation.agreement import Address, Agreement, agreement_hash, parsed_address
from fedhassle.federation.setup.keys import fingerprint, others_may_read, public_line, read_certificate
from fedhassle.names import counted, some_of
from fedhassle.version import FLOWER, package_version

TIMEOUT = 10.0  # seconds to wait for an answer
# Flower refuses a signature more than 5 s ahead of the server's clock, or more than 305 s behind it.
AHEAD, BEHIND = timedelta(seconds=5), timedelta(seconds=300)
EXPIRED, NOT_YET_VALID, WRONG_NAMES = 10, 9, (62, 64)  # errors of OpenSSL; 62: host name, 64: IP address
SET_CLOCK = "set this machine's clock with: timedatectl set-ntp true"


class Check(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool
    said: str  # what was found
    advice: str = ""  # what to do if it is not ok


def preflight(
    agreement: Agreement,
    ca: Path,
    key: Path,
    data: Path,
    labels: Path | None = None,
    expected_hash: str | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> list[Check]:
    """Runs all checks of a site, the cheapest first."""
    checks = [check_versions(), check_agreement(agreement, expected_hash), check_method(agreement)]
    checks += [check_key(key)]
    checks += check_server(parsed_address(agreement.address), ca, timeout)
    return [*checks, check_data(data, agreement, labels, progress)[0]]


# This machine


def check_versions() -> Check:
    """Checks that Flower and PyTorch are installed, in supported versions."""
    found = {name: _installed(name) for name in ("flwr", "torch")}
    said = ", ".join(f"{name} {known or 'missing'}" for name, known in found.items())
    said = f"fedhassle {package_version()}, {said}"
    flower = found["flwr"]
    lowest, above = FLOWER
    fits = flower is not None and _parts(lowest) <= _parts(flower) < _parts(above)
    advice = f"run: pip install 'fedhassle[flower]' (PyTorch, and flwr from {lowest} to below {above})"
    ok = fits and found["torch"] is not None
    return Check("versions", ok, said, "" if ok else advice)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parts(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_agreement(agreement: Agreement, expected_hash: str | None) -> Check:
    """Checks that this federation.toml is the coordinator's."""
    found = agreement_hash(agreement)
    if expected_hash is None or expected_hash.strip().lower() == found:
        said = f"{agreement.name}: {len(agreement.data.class_names)} classes, hash {found}"
        return Check("agreement", True, said)
    said = f"this federation.toml has the hash {found}, the coordinator's has {expected_hash}"
    return Check("agreement", False, said, "ask the coordinator for the current federation.toml")


def check_method(agreement: Agreement) -> Check:
    """Checks that the agreed method and network can be built here; the user's own code is never sent."""
    # PyTorch takes seconds to load, and every command of a federation imports this module.
    from fedhassle.federation.build import own_code_in, require_buildable, run_settings

    try:
        require_buildable(agreement)
        settings, own = run_settings(agreement), own_code_in(agreement)
    except UserError as error:
        advice = (
            "ask the coordinator for the Python file of the method or network, and put it into this folder"
        )
        return Check("method", False, str(error), advice)
    code = "".join(f", code of {name} {known}" for name, known in own.items())
    return Check("method", True, settings.method.name + code)


def check_key(key: Path) -> Check:
    """Checks that the site's private key exists, is valid, and only its owner can read it."""
    join = f"fedhassle federation join {key.parent.parent} --name {key.stem} --data IMAGES"
    if not key.exists():
        return Check("key", False, f"{key} does not exist", f"make a key with: {join}")
    if others_may_read(key):
        said = f"other users of this machine can read {key} (mode {key.stat().st_mode & 0o777:04o})"
        advice = f"run: chmod 600 {key} (if someone else has read it, delete it and run: {join})"
        return Check("key", False, said, advice)
    try:
        public = public_line(key, "")
    except UserError as error:
        return Check("key", False, str(error), f"delete it and make a new key with: {join}")
    return Check("key", True, fingerprint(public))


def check_data(
    data: Path, agreement: Agreement, labels: Path | None = None, progress: Progress | None = None
) -> tuple[Check, SiteData | None]:
    """Checks that the site's images can be read and have agreed labels; returns the data too, if so."""
    try:
        site = read_site(data, agreement.data.form, labels, progress)
    except UserError as error:
        return Check("data", False, str(error), f"see what is wrong with: fedhassle data check {data}"), None
    labelled = int((site.y >= 0).sum())
    said = f"{counted(len(site.y), 'image')}, {labelled:,} labelled"
    lost = [problem.path for problem in skipped(site.problems)]
    if lost:
        said += f"; {len(lost):,} skipped: {some_of(lost, 3)}"
    return Check("data", True, said), site


# The server


def check_server(address: Address, ca: Path, timeout: float = TIMEOUT) -> list[Check]:
    """Checks that the server answers, has the right certificate, and has the same time.

    A check that is impossible after an earlier failure says "not tried".
    """
    reached = check_address(address, timeout)
    if not reached.ok:
        untried = "not tried: the server does not answer"
        return [reached, Check("certificate", False, untried), Check("clock", False, untried)]
    return [reached, *check_certificate(address, ca, timeout)]


def check_address(address: Address, timeout: float = TIMEOUT) -> Check:
    """Checks that the server's name can be resolved and that its port is open."""
    shown = f"{address.host}:{address.port}"
    try:
        with socket.create_connection(address, timeout):
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


def check_certificate(address: Address, ca: Path, timeout: float = TIMEOUT) -> list[Check]:
    """Checks the server's certificate and, over that connection, the clock."""
    untried = Check("clock", False, "not tried: there is no secure connection")
    try:
        authority = read_certificate(ca)
        context = ssl.create_default_context(cafile=str(ca))
    except (UserError, ssl.SSLError, OSError) as error:
        advice = "ask the coordinator for ca.crt, and put it next to federation.toml"
        return [Check("certificate", False, str(error), advice), untried]
    with closing(HTTPSConnection(*address, timeout=timeout, context=context)) as server:
        try:
            server.connect()
        except ssl.SSLCertVerificationError as error:
            return [_explained(error, address, ca, timeout), untried]
        except OSError as error:  # ssl.SSLError is one
            return [_no_tls(error, address, timeout), untried]
        known = f"{server.sock.version()}, certified by {_common_name(authority.subject)}"
        return [Check("certificate", True, known), judged_clock(_date_of(server), datetime.now(UTC))]


def _explained(error: ssl.SSLCertVerificationError, address: Address, ca: Path, timeout: float) -> Check:
    """Explains why a certificate is not trusted."""
    code = error.verify_code
    if code in (EXPIRED, NOT_YET_VALID):
        found, now = _server_certificate(address, timeout), datetime.now(UTC)
        said = f"the server's certificate {'has expired' if code == EXPIRED else 'is not valid yet'}"
        if found:
            said += (
                f" (valid from {found.not_valid_before_utc:%Y-%m-%d} to {found.not_valid_after_utc:%Y-%m-%d})"
            )
        said += f"; this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
        advice = f"if the clock is wrong, {SET_CLOCK}; if not, ask the coordinator for a new certificate"
    elif code in WRONG_NAMES:
        names = _names_of_server(address, timeout)
        said = f"the certificate is not for {address.host}" + (f" but for {some_of(names)}" if names else "")
        advice = "use one of these names for `address` in federation.toml, or ask the coordinator for a "
        advice += f"certificate that includes {address.host}"
    else:
        said = f"the server's certificate is not signed by {ca} ({error.verify_message})"
        advice = "check that ca.crt is the one of this federation; if it is, someone else answers instead of "
        advice += "the server: do not join, and tell the coordinator"
    return Check("certificate", False, said, advice)


def _no_tls(error: OSError, address: Address, timeout: float) -> Check:
    """Explains a server that does not answer by TLS."""
    with closing(HTTPConnection(*address, timeout=timeout)) as server:
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
    try:
        return x509.load_pem_x509_certificate(ssl.get_server_certificate(address, timeout=timeout).encode())
    except (OSError, ValueError):
        return None


def _names_of_server(address: Address, timeout: float) -> list[str]:
    """The host names and IP addresses in the server's certificate."""
    found = _server_certificate(address, timeout)
    if found is None:
        return []
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _common_name(name: x509.Name) -> str:
    return name.rfc4514_string().removeprefix("CN=")
