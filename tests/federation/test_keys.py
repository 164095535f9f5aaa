"""Keys and certificates: Flower, OpenSSH and TLS accept them, and nobody else can read a private key."""

import os
import shutil
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from fedhassle.errors import UserError

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedhassle.federation.setup import keys


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A certificate authority, a server certificate and a site's key, under a careless umask."""
    folder = tmp_path_factory.mktemp("keys")
    before = os.umask(0)
    try:
        keys.make_ca(folder / "private" / "ca.key", folder / "ca.crt", "Three hospitals")
        keys.make_server_certificate(
            *(folder / "private" / "server.key", folder / "server.crt"),
            *(folder / "private" / "ca.key", folder / "ca.crt"),
            ["fl.example.org", "10.0.0.7", "::1", "localhost", "fl.example.org"],
        )
        keys.make_site_key(folder / "private" / "north.key", folder / "north.pub", "north")
    finally:
        os.umask(before)
    return folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_private_keys(made):
    assert mode(made / "private") == 0o700
    found = {(path.name, mode(path)) for path in (made / "private").iterdir()}
    assert found == {("ca.key", 0o600), ("server.key", 0o600), ("north.key", 0o600)}
    assert not keys.others_may_read(made / "private" / "north.key")
    assert keys.others_may_read(made / "north.pub")


def test_a_private_key_is_private_from_the_moment_it_exists(tmp_path, monkeypatch):
    """Checked while it is being written."""
    seen, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(os.fstat(handle).st_mode), sync(handle)))
    keys.make_site_key(tmp_path / "private" / "x.key", tmp_path / "x.pub", "x")
    assert stat.S_IMODE(seen[0]) == 0o600
    monkeypatch.setattr(os, "fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        keys.make_site_key(tmp_path / "private" / "y.key", tmp_path / "y.pub", "y")
    assert not (tmp_path / "private" / "y.key").exists()  # half a key would block the name for ever


def test_public_files_hold_no_private_key(made):
    public = [path for path in made.iterdir() if path.is_file()]
    assert {path.name for path in public} == {"ca.crt", "server.crt", "north.pub"}
    assert not any("PRIVATE" in path.read_text() for path in public)


def test_nothing_is_overwritten(made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    ca = made / "private" / "ca.key", made / "ca.crt"
    server = made / "private" / "server.key", made / "server.crt"
    with pytest.raises(UserError, match="exists already"):
        keys.make_ca(*ca, "other")
    with pytest.raises(UserError, match="exists already"):
        keys.make_ca(ca[0], made / "other.crt", "other")
    with pytest.raises(UserError, match="exists already"):
        keys.make_server_certificate(*server, *ca, ["x"])
    with pytest.raises(UserError, match="exists already"):
        keys.make_server_certificate(server[0], made / "other.crt", *ca, ["x"])
    with pytest.raises(UserError, match=r"north\.key exists already"):
        keys.make_site_key(made / "private" / "north.key", made / "north.pub", "north")
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        keys.make_site_key(tmp_path / "file" / "x.key", tmp_path / "x.pub", "x")


def test_flower_accepts_the_key_pair(made):
    """By its own functions, as `flower-supernode` and `flwr supernode register` call them."""
    register = pytest.importorskip("flwr.cli.supernode.register")
    key = serialization.load_ssh_private_key((made / "private" / "north.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
    expected = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert register.try_load_public_key(made / "north.pub") == expected


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
def test_openssh_reads_the_key_pair_and_sees_the_same_fingerprint(made):
    def ssh_keygen(*words):
        done = subprocess.run(["ssh-keygen", *map(str, words)], capture_output=True, text=True, check=True)
        return done.stdout.split()

    public = (made / "north.pub").read_text().split()
    assert public[0] == "ecdsa-sha2-nistp384" and public[2] == "north"
    assert ssh_keygen("-y", "-f", made / "private" / "north.key")[:2] == public[:2]
    size, shown, *_ = ssh_keygen("-l", "-f", made / "north.pub")
    assert (size, shown) == ("384", keys.fingerprint(keys.read_public_key(made / "north.pub")))


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_openssl_verifies_the_server_certificate(made):
    def openssl(*words):
        return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)

    server = made / "server.crt"
    done = openssl("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", made / "ca.crt", server)
    assert done.returncode == 0, done.stderr
    shown = openssl("x509", "-in", server, "-noout", "-ext", "subjectAltName").stdout
    for name in ("DNS:fl.example.org", "IP Address:10.0.0.7", "IP Address:0:0:0:0:0:0:0:1", "DNS:localhost"):
        assert shown.count(name) == 1
    shown = openssl("x509", "-in", made / "ca.crt", "-noout", "-fingerprint", "-sha256").stdout
    assert shown.strip().endswith("=" + keys.certificate_fingerprint(made / "ca.crt"))
    assert openssl("verify", "-CAfile", server, server).returncode != 0


def test_certificates_begin_a_day_early_and_last_ten_years(made):
    now = datetime.now(UTC)
    for name in ("ca.crt", "server.crt"):
        found = keys.read_certificate(made / name)
        assert timedelta(hours=23) < now - found.not_valid_before_utc < timedelta(hours=25)
        assert found.not_valid_after_utc - now > timedelta(days=9.9 * 365)
    ssl.create_default_context(cafile=made / "ca.crt")


def test_a_server_certificate_expires_with_its_authority_at_the_latest(made, tmp_path):
    old = tmp_path / "private" / "ca.key", tmp_path / "ca.crt"
    keys.make_ca(*old, "old", datetime.now(UTC) - timedelta(days=3650 - 30))
    keys.make_server_certificate(tmp_path / "private" / "server.key", tmp_path / "server.crt", *old, ["x"])
    left = keys.read_certificate(tmp_path / "server.crt").not_valid_after_utc
    assert left == keys.read_certificate(old[1]).not_valid_after_utc
    assert timedelta(days=29) < left - datetime.now(UTC) < timedelta(days=31)


def test_the_server_needs_the_key_of_the_authority(made, tmp_path):
    keys.make_ca(tmp_path / "private" / "ca.key", tmp_path / "ca.crt", "other")
    server = tmp_path / "private" / "server.key", tmp_path / "server.crt"
    with pytest.raises(UserError, match="is not the key of"):
        keys.make_server_certificate(*server, tmp_path / "private" / "ca.key", made / "ca.crt", ["x"])
    assert not server[0].exists()


@pytest.mark.parametrize(
    "names", [[], [""], ["a b"], ["-x"], ["x/y"], ["*.example.org"], ["a" * 70], ["1.2.3.4:5"]]
)
def test_a_server_without_a_valid_name_is_a_user_error(made, tmp_path, names):
    server = tmp_path / "private" / "server.key", tmp_path / "server.crt"
    with pytest.raises(UserError):
        keys.make_server_certificate(*server, made / "private" / "ca.key", made / "ca.crt", names)
    assert not server[0].exists() and not server[1].exists()


def test_a_name_with_umlauts_becomes_punycode(made, tmp_path):
    server = tmp_path / "private" / "server.key", tmp_path / "server.crt"
    keys.make_server_certificate(*server, made / "private" / "ca.key", made / "ca.crt", ["zürich.example"])
    assert b"xn--zrich-kva.example" in serialized(server[1])


def serialized(path):
    return keys.read_certificate(path).public_bytes(serialization.Encoding.DER)


def openssh(public):
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def test_a_public_key_is_read_whatever_is_around_it(made, tmp_path):
    line = " ".join((made / "north.pub").read_text().split()[:2])
    for text in (line, f"\n{line} north at Oslo\r\n\n", f"  {line}\n"):
        (tmp_path / "x.pub").write_text(text)
        assert keys.read_public_key(tmp_path / "x.pub") == line
    assert keys.public_line(made / "private" / "north.key", "south") == f"{line} south"


BAD = {
    "nothing": ("", "0 lines"),
    "two keys": ("ecdsa-sha2-nistp384 AAAA\necdsa-sha2-nistp384 BBBB\n", "2 lines"),
    "words": ("no key at all", "not an OpenSSH public key"),
    "one word": ("x", "not an OpenSSH public key"),
    "bad base64": ("ecdsa-sha2-nistp384 !!!!", "not an OpenSSH public key"),
    "cut short": ("ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQ=", "not an OpenSSH public key"),
    "another kind": (openssh(ed25519.Ed25519PrivateKey.generate().public_key()), "ssh-ed25519"),
    "a private key": ("-----BEGIN OPENSSH PRIVATE KEY-----\nx\n", "private key"),
    "binary": (b"\xff\xfe", "not text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_public_key_is_a_user_error(tmp_path, case):
    content, message = BAD[case]
    (tmp_path / "x.pub").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"x\.pub .*{message}"):
        keys.read_public_key(tmp_path / "x.pub")


def test_a_wrong_private_key_is_a_user_error(made, tmp_path):
    with pytest.raises(UserError, match="No such file"):
        keys.read_site_key(tmp_path / "none")
    (tmp_path / "x").write_text("x")
    with pytest.raises(UserError, match="not an OpenSSH private key"):
        keys.read_site_key(tmp_path / "x")
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (tmp_path / "x").write_bytes(other)
    with pytest.raises(UserError, match="another kind"):
        keys.read_site_key(tmp_path / "x")
    with pytest.raises(UserError, match="not a certificate"):
        keys.read_certificate(tmp_path / "x")
