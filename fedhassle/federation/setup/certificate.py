"""The server's certificate, at the coordinator: its names, its faults, and a new one in place of the old."""

from __future__ import annotations

import shlex
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from fedhassle.errors import require
from fedhassle.federation.agreement import parsed_address
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.federation.setup.keys import (
    copy_private_key,
    make_server_certificate,
    names_in,
    read_certificate,
    validity,
)
from fedhassle.federation.setup.reach import CLOCK_FIRST, RENEW, WRONG_DATES, untrusted
from fedhassle.files import UNFINISHED, write_errors, write_text

HERE = ("localhost", "127.0.0.1", "::1")  # for the coordinator's own commands


def server_names(address: str, more: Sequence[str] = ()) -> list[str]:
    """The names of a server's certificate: that of the address, others, and those of its own machine."""
    return [parsed_address(address).host, *more, *HERE]


def certificate_fault(folder: FederationFolder, address: str) -> str:
    """Says why sites would not trust the server's certificate, and what to do; empty if they would."""
    host = parsed_address(address).host
    renew = f"make a new one with: {RENEW} {shlex.quote(str(folder.path))}"
    try:
        _greet(folder, host)
    except ssl.SSLCertVerificationError as error:
        said = untrusted(error, read_certificate(folder.certificate), host, folder.ca)
        return f"{said}: {CLOCK_FIRST if error.verify_code in WRONG_DATES else ''}{renew}"
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None) or error.strerror or error
        return f"{folder.certificate} cannot be used with {folder.server_key} ({reason}): {renew}"
    return ""


def _greet(folder: FederationFolder, host: str) -> None:
    """Lets a site and the server begin a TLS connection in memory; raises what the site would raise."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder.certificate, folder.server_key)
    site = ssl.create_default_context(cafile=folder.ca)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = site.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    for end in (*ends, *ends):
        with suppress(ssl.SSLWantReadError):  # the other end speaks next
            end.do_handshake()


def renew_certificate(folder: FederationFolder, address: str, also: Sequence[str] = ()) -> list[Path]:
    """Replaces the server's key and certificate, and keeps the old files; returns where they are now.

    The new certificate is for the address, the names of the old one, and those in `also`.
    """
    require(
        folder.ca_key.is_file(),
        f"{folder.ca_key}, the key of the federation's authority, is missing, and without it nobody can make "
        "a certificate that the sites trust: put it back from a backup, or set up a new federation",
    )
    authority = read_certificate(folder.ca)
    require(
        datetime.now(UTC) < authority.not_valid_after_utc,
        f"{folder.ca}, the certificate of the federation's authority, has expired ({validity(authority)}): "
        "set up a new federation",
    )
    before = names_in(read_certificate(folder.certificate)) if folder.certificate.exists() else []
    names = server_names(address, [*also, *before])
    with (
        write_errors(folder.path),
        tempfile.TemporaryDirectory(dir=folder.path, prefix=UNFINISHED) as temporary,
    ):
        made = FederationFolder(Path(temporary))
        make_server_certificate(made.server_key, made.certificate, folder.ca_key, folder.ca, names)
        kept = _keep(folder)
        made.server_key.replace(folder.server_key)
        made.certificate.replace(folder.certificate)
    return kept


def _keep(folder: FederationFolder) -> list[Path]:
    """Copies the server's certificate and key to new files beside them; returns those."""
    copies = {folder.certificate: _copy_certificate, folder.server_key: copy_private_key}
    now = [path for path in copies if path.exists()]
    tries = ([path.with_name(f"{path.name}.old{number}") for path in now] for number in count(1))
    kept = next(old for old in tries if not any(path.exists() for path in old))
    for path, old in zip(now, kept, strict=True):
        copies[path](path, old)
    return kept


def _copy_certificate(path: Path, copy: Path) -> None:
    write_text(copy, path.read_text("utf-8"))
