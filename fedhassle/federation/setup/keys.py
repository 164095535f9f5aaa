"""Keys and certificates: the server proves its identity by TLS, each site by its own key pair.

Private keys are made on the machine that uses them and never leave it. Only their owner can read them, from
the moment they are created, and they are never overwritten.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhassle.errors import UserError, require
from fedhassle.files import write_text

CURVE = ec.SECP384R1
CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)  # supported by both Flower and OpenSSH
YEARS = 10  # the authority serves one federation only
USES = (  # of a key, in X.509
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
EARLIER = timedelta(days=1)  # for sites whose clocks are slow


def make_ca(key: Path, certificate: Path, name: str, start: datetime | None = None) -> None:
    """Makes the federation's certificate authority: its key, and the certificate for the sites."""
    made = ec.generate_private_key(CURVE())
    subject = _name(f"{name} CA")
    usage = _usage("key_cert_sign", "crl_sign")
    builder = (
        _builder(subject, subject, made.public_key(), start)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    require(not certificate.exists(), f"{certificate} exists already: it is never overwritten")
    _write_private(key, _pem(made))
    write_text(certificate, _certificate_text(builder.sign(made, hashes.SHA384())))


def make_server_certificate(
    key: Path,
    certificate: Path,
    ca_key: Path,
    ca_certificate: Path,
    names: Sequence[str],
    start: datetime | None = None,
) -> None:
    """Makes the server's key, and a certificate for its host names and IP addresses.

    It expires with the authority at the latest, after which no site would accept it.
    """
    require(bool(names), "a server certificate needs the host name or IP address that sites connect to")
    alternatives = list(dict.fromkeys(_alternative(name) for name in names))
    authority = read_certificate(ca_certificate)
    signer = _read_pem_key(ca_key)
    require(authority.public_key() == signer.public_key(), f"{ca_key} is not the key of {ca_certificate}")
    require(not certificate.exists(), f"{certificate} exists already: it is never overwritten")
    made = ec.generate_private_key(CURVE())
    builder = (
        _builder(_name(names[0]), authority.subject, made.public_key(), start, authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    _write_private(key, _pem(made))
    write_text(certificate, _certificate_text(builder.sign(signer, hashes.SHA384())))


def make_site_key(key: Path, public: Path, comment: str) -> None:
    """Makes a site's key pair in OpenSSH's format, for a SuperNode; only `public` is for others."""
    require(
        re.fullmatch(r"\S+", comment) is not None,
        f"{comment!r} cannot name a key: it is empty or contains spaces",
    )
    made = ec.generate_private_key(CURVE())
    content = made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    _write_private(key, content)
    write_text(public, public_line(key, comment) + "\n")


def public_line(key: Path, comment: str) -> str:
    """The public half of a site's private key, as a line of OpenSSH."""
    line = (
        read_site_key(key)
        .public_key()
        .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return f"{line.decode()} {comment}"


def read_site_key(key: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a site's private key."""
    try:
        made = serialization.load_ssh_private_key(_bytes(key), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key} is not an OpenSSH private key without passphrase: {error}") from error
    if not isinstance(made, ec.EllipticCurvePrivateKey) or not isinstance(made.curve, CURVES):
        raise UserError(
            f"{key} is a key of another kind: expected one that `fedhassle federation join` made (ECDSA)"
        )
    return made


def checked_public_key(text: str, where: str) -> str:
    """Checks a site's public key and returns it as one line of two words."""
    require(
        "PRIVATE KEY" not in text,
        f"{where} is a private key, which must never leave its machine: delete it there and here, run "
        "fedhassle federation join again for a new one, and send the file that ends in .pub",
    )
    lines = [line for line in text.splitlines() if line.strip()]
    require(
        len(lines) == 1, f"{where} has {len(lines)} lines: expected one public key, a file that ends in .pub"
    )
    kind, _, rest = lines[0].strip().partition(" ")
    line = f"{kind} {rest.split(' ')[0]}"
    try:
        found = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm, binascii.Error) as error:
        raise UserError(f"{where} is not an OpenSSH public key: {error}") from error
    fits = isinstance(found, ec.EllipticCurvePublicKey) and isinstance(found.curve, CURVES)
    require(fits, f"{where} is a key of another kind ({kind}): expected ecdsa-sha2-nistp384")
    return line


def read_public_key(path: Path) -> str:
    """Reads the public key in a file, as one line."""
    try:
        return checked_public_key(_bytes(path).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not an OpenSSH public key: it is not text") from error


def key_comment(path: Path) -> str:
    """The comment in a public key's file, which is the site's name; empty if there is none."""
    words = _bytes(path).decode("utf-8", "replace").split(None, 2)
    return words[2].strip() if len(words) == 3 else ""


def fingerprint(public: str) -> str:
    """The fingerprint of a key, to compare over the telephone: as `ssh-keygen -l` shows it."""
    content = base64.b64decode(public.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def certificate_fingerprint(path: Path) -> str:
    """The fingerprint of a certificate: as `openssl x509 -fingerprint -sha256` shows it."""
    return read_certificate(path).fingerprint(hashes.SHA256()).hex(":").upper()


def read_certificate(path: Path) -> x509.Certificate:
    """Reads a certificate from a PEM file."""
    try:
        return x509.load_pem_x509_certificate(_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is not a certificate: {error}") from error


def names_in(certificate: x509.Certificate) -> list[str]:
    """The host names and IP addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def validity(certificate: x509.Certificate) -> str:
    """The first and the last day of a certificate, in words."""
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}"


def copy_private_key(key: Path, copy: Path) -> None:
    """Copies a private key to a new file, which only its owner can read."""
    _write_private(copy, _bytes(key))


def others_may_read(path: Path) -> bool:
    """True if other users of this machine can read or change a private file."""
    return os.name == "posix" and bool(path.stat().st_mode & 0o077)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, in a folder that only its owner can enter."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # Created with 0600: there is no moment in which others could read it.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        require(not path.exists(), f"{path} exists already: a private key is never overwritten")
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read_pem_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(_bytes(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not a private key without passphrase: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is a key of another kind: expected ECDSA")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate_text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    start: datetime | None,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    """The parts that every certificate has; `latest`: the end of its validity at the latest."""
    now = start or datetime.now(UTC) - EARLIER
    end = now + timedelta(days=365 * YEARS)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(min(end, latest or end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])  # the longest that is allowed


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in allowed for use in USES})


def _alternative(name: str) -> x509.GeneralName:
    """Converts a host name or IP address for a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        ascii_name = name.encode("idna").decode()
    except UnicodeError as error:
        raise UserError(f"{name!r} is not a host name: {error}") from error
    label = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
    sound = re.fullmatch(rf"({label}\.)*{label}", ascii_name) is not None
    require(sound, f"{name!r} is neither a host name nor an IP address")
    return x509.DNSName(ascii_name)
