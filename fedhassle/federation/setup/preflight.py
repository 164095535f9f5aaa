"""What a site checks before it joins: each check says what it found and, where that is wrong, what to do."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedhassle.data.site.folder import Progress, SiteData, read_site
from fedhassle.data.site.survey import skipped
from fedhassle.errors import UserError
from fedhassle.federation.agreement import Address, Agreement, agreement_hash, parsed_address
from fedhassle.federation.setup.keys import fingerprint, others_may_read, public_line, read_certificate
from fedhassle.names import some_of
from fedhassle.version import FLOWER, package_version

PATIENCE = 10.0  # seconds to wait for an answer
# Flower refuses what a site signed more than 5 seconds in the server's future or 305 in its past.
AHEAD, BEHIND = timedelta(seconds=5), timedelta(seconds=300)
EXPIRED, NOT_YET_VALID, WRONG_NAMES = 10, 9, (62, 64)  # errors of OpenSSL; the names: host, IP address
SET_CLOCK = "set this machine's clock (timedatectl set-ntp true)"


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    said: str  # what was found
    advice: str = ""  # what to do, where it is not ok


def preflight(
    agreement: Agreement,
    ca: Path,
    key: Path,
    data: Path,
    labels: Path | None = None,
    expected_hash: str | None = None,
    progress: Progress | None = None,
    patience: float = PATIENCE,
) -> list[Check]:
    """All checks of a site, those that cost least first."""
    checks = [check_versions(), check_agreement(agreement, expected_hash), check_method(agreement)]
    checks += [check_key(key)]
    checks += check_server(parsed_address(agreement.address), ca, patience)
    return [*checks, check_data(data, agreement, labels, progress)[0]]


# What is here


def check_versions() -> Check:
    """Whether what a site runs on is installed, in a version that goes with this one."""
    found = {name: _installed(name) for name in ("flwr", "torch")}
    said = ", ".join(f"{name} {known or 'missing'}" for name, known in found.items())
    said = f"fedhassle {package_version()}, {said}"
    flower = found["flwr"]
    lowest, above = FLOWER
    fits = flower is not None and _parts(lowest) <= _parts(flower) < _parts(above)
    advice = f"install fedhassle[flower], which brings flwr from {lowest} to below {above}, and PyTorch"
    ok = fits and found["torch"] is not None
    return Check("versions", ok, said, "" if ok else advice)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parts(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_agreement(agreement: Agreement, expected_hash: str | None) -> Check:
    """Whether the federation's file here is the one that the others have."""
    found = agreement_hash(agreement)
    if expected_hash is None or expected_hash.strip().lower() == found:
        said = f"{agreement.name}: {len(agreement.data.class_names)} classes, hash {found}"
        return Check("agreement", True, said)
    said = f"this federation.toml has the hash {found}, the coordinator's {expected_hash}"
    return Check("agreement", False, said, "ask the coordinator for the present federation.toml")


def check_method(agreement: Agreement) -> Check:
    """Whether what is agreed on can be built here: methods and networks of one's own are not sent around."""
    # PyTorch takes seconds to load, and every command of a federation imports this module.
    from fedhassle.federation.terms import own_code_in, require_buildable, run_settings

    try:
        require_buildable(agreement)
        settings, own = run_settings(agreement), own_code_in(agreement)
    except UserError as error:
        advice = "ask the coordinator for the file of the method or network, and put it where this is started"
        return Check("method", False, str(error), advice)
    code = "".join(f", code of {name} {known}" for name, known in own.items())
    return Check("method", True, settings.method.name + code)


def check_key(key: Path) -> Check:
    """Whether the site's private key is there, sound, and its owner's alone."""
    if not key.exists():
        return Check("key", False, f"{key} does not exist", "make it with: fedhassle federation join")
    if others_may_read(key):
        said = f"other users of this machine may read {key} (mode {key.stat().st_mode & 0o777:04o})"
        return Check("key", False, said, f"chmod 600 {key}; if others had access, join again with a new key")
    try:
        public = public_line(key, "")
    except UserError as error:
        return Check("key", False, str(error), "make a new one with: fedhassle federation join")
    return Check("key", True, fingerprint(public))


def check_data(
    data: Path, agreement: Agreement, labels: Path | None = None, progress: Progress | None = None
) -> tuple[Check, SiteData | None]:
    """Whether the site's images can be read and its labels are agreed ones; with the data, if so."""
    try:
        site = read_site(data, agreement.data.form, labels, progress)
    except UserError as error:
        return Check("data", False, str(error), f"look at it with: fedhassle data check {data}"), None
    labelled = int((site.y >= 0).sum())
    said = f"{len(site.y):,} image{'s' * (len(site.y) != 1)}, {labelled:,} labelled"
    lost = [problem.path for problem in skipped(site.problems)]
    if lost:
        said += f"; {len(lost):,} skipped: {some_of(lost, 3)}"
    return Check("data", True, said), site


# The server


def check_server(address: Address, ca: Path, patience: float = PATIENCE) -> list[Check]:
    """Whether the server is there, is the one that it should be, and has the same time.

    A check that another one's failure leaves no room for says so.
    """
    reached = check_address(address, patience)
    if not reached.ok:
        untried = "not tried: the server does not answer"
        return [reached, Check("certificate", False, untried), Check("clock", False, untried)]
    return [reached, *check_certificate(address, ca, patience)]


def check_address(address: Address, patience: float = PATIENCE) -> Check:
    """Whether the server's name is known and something answers at its port."""
    shown = f"{address.host}:{address.port}"
    try:
        with socket.create_connection(address, patience):
            return Check("address", True, f"{shown} answers")
    except (socket.gaierror, UnicodeError):
        said = f"no address is known for {address.host}"
        return Check("address", False, said, "check the name in federation.toml, and this machine's DNS")
    except ConnectionRefusedError:
        said = f"{shown} refuses: the machine is there, but no server at this port"
        return Check("address", False, said, "ask the coordinator whether `fedhassle federation server` runs")
    except TimeoutError:
        said = f"{shown} does not answer within {patience:g} s"
        return Check("address", False, said, f"ask for port {address.port} to be opened in the firewalls")
    except OSError as error:
        said = f"{shown} cannot be reached: {error.strerror or error}"
        return Check("address", False, said, "check this machine's network, and the address")


def check_certificate(address: Address, ca: Path, patience: float = PATIENCE) -> list[Check]:
    """Whether the server proves by TLS that it is the federation's, and the clock."""
    untried = Check("clock", False, "not tried: there is no safe connection")
    try:
        authority = read_certificate(ca)
        context = ssl.create_default_context(cafile=str(ca))
    except (UserError, ssl.SSLError, OSError) as error:
        advice = "ask the coordinator for ca.crt, and put it beside federation.toml"
        return [Check("certificate", False, str(error), advice), untried]
    try:
        with (
            socket.create_connection(address, patience) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as safe,
        ):
            known = f"{safe.version()}, certified by {_common_name(authority.subject)}"
            return [Check("certificate", True, known), _clock(safe, address)]
    except ssl.SSLCertVerificationError as error:
        return [_explained(error, address, ca, patience), untried]
    except OSError as error:  # ssl.SSLError is one
        return [_no_tls(error, address, patience), untried]


def _explained(error: ssl.SSLCertVerificationError, address: Address, ca: Path, patience: float) -> Check:
    """Why a certificate is not believed, in words."""
    code = error.verify_code
    if code in (EXPIRED, NOT_YET_VALID):
        return _wrong_time(address, patience, late=code == EXPIRED)
    if code in WRONG_NAMES:
        names = _names_of_server(address, patience)
        said = f"the certificate is not for {address.host}" + (f" but for {some_of(names)}" if names else "")
        return Check(
            "certificate",
            False,
            said,
            "use one of these names as the address in federation.toml, or ask the coordinator for a "
            f"certificate that has {address.host}",
        )
    said = f"the server's certificate is not signed by {ca} ({error.verify_message})"
    return Check(
        "certificate",
        False,
        said,
        "make sure that ca.crt is this federation's; if it is, someone else answers in the server's place: "
        "do not join",
    )


def _wrong_time(address: Address, patience: float, late: bool) -> Check:
    """A certificate outside its time, or a clock that is wrong."""
    found = _server_certificate(address, patience)
    now = datetime.now(UTC)
    span = (
        f" (it holds from {_day(found.not_valid_before_utc)} to {_day(found.not_valid_after_utc)})"
        if found
        else ""
    )
    said = f"the server's certificate {'has expired' if late else 'is not valid yet'}{span}"
    said += f"; this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
    advice = f"if the clock is wrong, {SET_CLOCK}; if not, ask the coordinator for a new certificate"
    return Check("certificate", False, said, advice)


def _no_tls(error: OSError, address: Address, patience: float) -> Check:
    """What answers is no TLS."""
    if _speaks_http(address, patience):
        said = "the server answers in plain HTTP, without encryption"
        advice = "do not join; ask the coordinator to start it with `fedhassle federation server`"
        return Check("certificate", False, said, advice)
    reason = getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
    advice = "check the port, and whether a proxy or firewall stands between"
    return Check("certificate", False, f"no TLS connection comes about: {reason}", advice)


def _speaks_http(address: Address, patience: float) -> bool:
    """Whether a server answers a plain request."""
    try:
        with socket.create_connection(address, patience) as plain:
            plain.sendall(_request(address))
            return plain.recv(5).startswith(b"HTTP/")
    except OSError:
        return False


def _request(address: Address) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host.encode("idna").decode()
    return f"HEAD / HTTP/1.1\r\nHost: {host}:{address.port}\r\nConnection: close\r\n\r\n".encode()


def _clock(safe: ssl.SSLSocket, address: Address) -> Check:
    """How far this machine's clock is from the server's, by the date in an answer of HTTP."""
    try:
        safe.sendall(_request(address))
        head = b""
        while b"\r\n\r\n" not in head and len(head) < 2**16 and (more := safe.recv(4096)):
            head += more
        now = datetime.now(UTC)
    except OSError:
        return Check("clock", True, "not known: the server tells no time")
    return judged_clock(head, now)


def judged_clock(head: bytes, now: datetime) -> Check:
    """The clock by the head of an answer, and the time at which it came."""
    lines = head.decode("latin-1").split("\r\n")
    dates = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("date:")]
    try:
        told = parsedate_to_datetime(dates[0])
    except (IndexError, ValueError):
        return Check("clock", True, "not known: the server tells no time")
    if told.tzinfo is None:
        told = told.replace(tzinfo=UTC)
    ahead = now - told - timedelta(seconds=0.5)  # a date is cut to the second
    seconds = abs(round(ahead.total_seconds()))
    if -BEHIND <= ahead <= AHEAD:
        return Check("clock", True, f"within {max(1, seconds)} s of the server's")
    side = "ahead of" if ahead > timedelta() else "behind"
    said = f"this machine's clock is {seconds:,} s {side} the server's"
    allowed = f"the server takes {AHEAD.seconds} s ahead and {BEHIND.seconds} s behind"
    return Check("clock", False, said, f"{SET_CLOCK}; {allowed}")


def _server_certificate(address: Address, patience: float) -> x509.Certificate | None:
    """What a server shows, believed or not: only to say what is wrong with it."""
    try:
        return x509.load_pem_x509_certificate(ssl.get_server_certificate(address, timeout=patience).encode())
    except (OSError, ValueError):
        return None


def _names_of_server(address: Address, patience: float) -> list[str]:
    """The names and addresses in a server's certificate."""
    found = _server_certificate(address, patience)
    if found is None:
        return []
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _common_name(name: x509.Name) -> str:
    return name.rfc4514_string().removeprefix("CN=")


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"
