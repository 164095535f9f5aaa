"""The checks of a site before it joins, against right and wrong servers on this machine."""

import base64
import contextlib
import os
import socket
import ssl
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from PIL import Image
from tunnel import Tunnel

pytest.importorskip("cryptography")

from fedhassle.federation.agreement import Address, Agreement, DataTerms, agreement_hash
from fedhassle.federation.setup import keys, proxy, reach
from fedhassle.federation.setup import preflight as checks
from fedhassle.federation.setup.reach import Check
from fedhassle.provenance import own_code

TERMS = DataTerms(("cat", "dog"), 16, 16, 1, (0.0,), (1.0,), flip=True, crop=1)
AGREEMENT = Agreement("Zoo", "localhost:8443", TERMS)
TIMEOUT = 600  # seconds; no test waits for it to pass


class Papers:
    """A certificate authority and a server certificate in a folder."""

    def __init__(self, folder, names=("127.0.0.1",), start=None):
        self.ca, self.certificate = folder / "ca.crt", folder / "server.crt"
        self.key = folder / "private" / "server.key"
        ca_key = folder / "private" / "ca.key"
        keys.make_ca(ca_key, self.ca, folder.name)
        keys.make_server_certificate(self.key, self.certificate, ca_key, self.ca, names, start)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return Papers(tmp_path_factory.mktemp("papers"))


@contextlib.contextmanager
def serving(answer=b"", papers=None):
    """A server that gives every request this answer, with TLS if it has papers; ends with the block."""
    context = None
    if papers is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(papers.certificate, papers.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return  # closed
            plain.settimeout(TIMEOUT)
            with contextlib.suppress(OSError), plain:
                talk = context.wrap_socket(plain, server_side=True) if context else plain
                with talk:
                    if talk.recv(4096):
                        talk.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def http(date=None):
    line = f"Date: {format_datetime(date, usegmt=True)}\r\n" if date else ""
    return f"HTTP/1.1 404 Not Found\r\n{line}Payload-Length: 0\r\n\r\n".encode()


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()


def server_checks(address, ca):
    found = reach.check_server(address, ca, TIMEOUT)
    assert [check.name for check in found] == ["address", "certificate", "clock"]
    assert all(check.ok or check.advice or check.said.startswith("not tried") for check in found)
    return found


def test_a_sound_server_passes(papers):
    with serving(http(datetime.now(UTC)), papers) as address:
        reached, certificate, clock = server_checks(address, papers.ca)
    assert reached.ok and certificate.ok and clock.ok
    assert f"{address.host}:{address.port} answers" == reached.said
    assert (
        certificate.said.startswith("TLSv1.")
        and f"certified by {papers.ca.parent.name} CA" in certificate.said
    )
    assert clock.said.startswith("within ")
    with serving(http(datetime.now(UTC)), papers) as address:
        assert reach.server_fault(address, papers.ca) == ""


def test_a_server_that_sends_no_time_passes(papers):
    for answer in (http(), b"", b"HTTP/1.1 200 OK\r\nDate: yesterday\r\n\r\n"):
        with serving(answer, papers) as address:
            clock = server_checks(address, papers.ca)[2]
        assert clock.ok and "not checked" in clock.said


# By way of a proxy


@pytest.fixture
def through(monkeypatch):
    """Sets the proxy of this process."""

    def use(url, spared=""):
        for name, value in (("HTTPS_PROXY", url), ("NO_PROXY", spared)):
            monkeypatch.setenv(name, value)
            monkeypatch.setenv(name.lower(), value)

    return use


def test_a_server_behind_a_proxy_passes(papers, through):
    with serving(http(datetime.now(UTC)), papers) as address, Tunnel() as tunnel:
        through(tunnel.url)
        reached, certificate, clock = server_checks(address, papers.ca)
        assert reached.ok and certificate.ok and clock.ok and "by way of the proxy" in reached.said
        assert set(tunnel.targets) == {f"{address.host}:{address.port}"}
        through(tunnel.url, spared=address.host)
        before = len(tunnel.targets)
        assert all(check.ok for check in server_checks(address, papers.ca)) and len(tunnel.targets) == before


def test_a_proxy_that_demands_a_password(papers, through):
    words = base64.b64encode(b"me:a:b").decode()
    with serving(http(), papers) as address, Tunnel(demand=f"Basic {words}") as tunnel:
        through(tunnel.url)
        reached = server_checks(address, papers.ca)[0]
        assert not reached.ok and "407" in reached.said and "NO_PROXY" in reached.advice
        through(tunnel.url.replace("http://", "http://me:a%3Ab@"))
        reached = server_checks(address, papers.ca)[0]
        assert reached.ok and "a:b" not in reached.said and "a%3Ab" not in reached.said


def test_a_proxy_that_does_not_help_is_named(papers, through):
    with Tunnel(refuse=True) as tunnel:
        through(tunnel.url)
        reached = server_checks(Address("fl.example.org", 8443), papers.ca)[0]
    assert not reached.ok and "does not connect to fl.example.org:8443" in reached.said
    assert "allow CONNECT to fl.example.org:8443" in reached.advice
    host, port = closed_port()
    through(f"http://{host}:{port}")
    reached = server_checks(Address("fl.example.org", 8443), papers.ca)[0]
    assert not reached.ok and f"the proxy {host}:{port} (HTTPS_PROXY) cannot be reached" in reached.said
    through("socks5://127.0.0.1:1")
    reached = server_checks(Address("fl.example.org", 8443), papers.ca)[0]
    assert not reached.ok and "expected http://HOST:PORT" in reached.said


def test_a_certificate_behind_a_proxy_is_explained(papers, through, tmp_path):
    """The certificate of another authority, seen through the tunnel."""
    keys.make_ca(tmp_path / "ca.key", tmp_path / "ca.crt", "other")
    with serving(http(), papers) as address, Tunnel() as tunnel:
        through(tunnel.url)
        certificate = server_checks(address, tmp_path / "ca.crt")[1]
    assert not certificate.ok and "is not signed by" in certificate.said


def test_programs_of_one_machine_avoid_the_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "a.org")
    monkeypatch.delenv("no_proxy", raising=False)
    for _ in range(2):
        proxy.spare_loopback()
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "a.org,127.0.0.1,::1"


# A server that is started later


def test_a_node_waits_for_its_server_only_if_nothing_else_is_wrong(papers):
    sound, away = Check("key", True, "fine"), reach.check_server(Address(*closed_port()), papers.ca, TIMEOUT)
    assert reach.only_waits([sound, *away])
    assert not reach.only_waits([sound]) and not reach.only_waits([sound._replace(ok=False), *away])
    with serving(http(), papers) as address:
        other = reach.check_server(address, papers.ca.parent / "none", TIMEOUT)
        assert not reach.only_waits([sound, *other])  # it answers, but not as it should
        looks = []
        found = reach.awaited_server([sound, *away], address, papers.ca, looks.append)
    assert looks == [reach.AGAIN] and found[0] == sound and all(check.ok for check in found)
    assert [check.name for check in found] == ["key", "address", "certificate", "clock"]


def test_no_server_at_the_port(papers):
    reached, *others = server_checks(Address(*closed_port()), papers.ca)
    assert not reached.ok and "refuses" in reached.said and "federation server" in reached.advice
    assert [check.said for check in others] == ["not tried: the server does not answer"] * 2
    assert not any(check.ok for check in others)


def test_an_unknown_name(papers, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    reached = server_checks(Address("fl.invalid", 8443), papers.ca)[0]
    assert not reached.ok and "fl.invalid" in reached.said and "DNS" in reached.advice


@pytest.mark.parametrize(
    ("error", "said", "advice"),
    [
        (TimeoutError("timed out"), "does not answer within", "port 8443"),
        (OSError(101, "Network is unreachable"), "Network is unreachable", "network"),
    ],
)
def test_a_server_that_cannot_be_reached(papers, monkeypatch, error, said, advice):
    def fail(*_):
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    reached = server_checks(Address("10.0.0.7", 8443), papers.ca)[0]
    assert not reached.ok and said in reached.said and advice in reached.advice


def test_an_impossible_host_name(papers):
    assert not server_checks(Address("a" * 70 + "ü", 8443), papers.ca)[0].ok


def test_an_expired_certificate(tmp_path):
    old = Papers(tmp_path, start=datetime.now(UTC) - timedelta(days=11 * 365))
    with serving(http(), old) as address:
        reached, certificate, clock = server_checks(address, old.ca)
    assert reached.ok and not certificate.ok and not clock.ok
    assert "has expired (valid from 20" in certificate.said
    assert f"clock says {datetime.now(UTC):%Y-%m}" in certificate.said and "timedatectl" in certificate.advice
    assert certificate.advice.endswith("with: fedhassle federation certificate")
    with serving(http(), old) as address:
        assert reach.server_fault(address, old.ca) == f"{certificate.said}; {certificate.advice}"


def test_a_certificate_of_the_future(tmp_path):
    new = Papers(tmp_path, start=datetime.now(UTC) + timedelta(days=3))
    with serving(http(), new) as address:
        certificate = server_checks(address, new.ca)[1]
    assert not certificate.ok and "is not valid yet" in certificate.said and "clock" in certificate.advice


@pytest.mark.parametrize("names", [("fl.example.org", "10.0.0.7"), ("127.0.0.2",)])
def test_a_certificate_for_other_names(tmp_path, names):
    other = Papers(tmp_path, names)
    with serving(http(), other) as address:
        certificate = server_checks(address, other.ca)[1]
    assert not certificate.ok
    assert "127.0.0.1" in certificate.said and certificate.said.endswith(", ".join(names))
    assert certificate.advice.endswith("with: fedhassle federation certificate --also 127.0.0.1")


def test_a_host_name_that_the_certificate_lacks(papers):
    with serving(http(), papers) as address:
        certificate = server_checks(Address("localhost", address.port), papers.ca)[1]
    assert not certificate.ok and "localhost" in certificate.said and "127.0.0.1" in certificate.said


def test_the_certificate_of_another_authority(papers, tmp_path):
    stranger = Papers(tmp_path)
    with serving(http(), stranger) as address:
        certificate = server_checks(address, papers.ca)[1]
    assert not certificate.ok and f"not signed by {papers.ca}" in certificate.said
    assert "do not join" in certificate.advice


def test_plain_http(papers):
    with serving(http()) as address:
        certificate = server_checks(address, papers.ca)[1]
    assert not certificate.ok and "plain HTTP" in certificate.said and "do not join" in certificate.advice


@pytest.mark.parametrize("answer", [b"", b"220 mail.example.org ESMTP\r\n"])
def test_something_that_is_neither_tls_nor_http(papers, answer):
    with serving(answer) as address:
        certificate = server_checks(address, papers.ca)[1]
    assert not certificate.ok and "no TLS connection" in certificate.said


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_missing_or_wrong_ca_file(papers, tmp_path, content):
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    with serving(http(), papers) as address:
        certificate = server_checks(address, tmp_path / "ca.crt")[1]
    assert not certificate.ok and "ca.crt" in certificate.said and "ca.crt" in certificate.advice


def test_a_clock_that_differs_from_the_servers(papers):
    with serving(http(datetime.now(UTC) - timedelta(hours=1)), papers) as address:
        clock = server_checks(address, papers.ca)[2]
    assert not clock.ok and "ahead of the server's" in clock.said and "timedatectl" in clock.advice


@pytest.mark.parametrize(
    ("seconds", "ok"), [(0, True), (4, True), (7, False), (-290, True), (-302, False), (-86400, False)]
)
def test_the_clock_may_differ_as_much_as_flower_allows(seconds, ok):
    """A site ahead of the server by more than 5 seconds, or behind by more than 305, is refused by Flower."""
    now = datetime(2030, 1, 1, 12, 0, 0, 500_000, UTC)
    clock = reach.judged_clock(format_datetime(now - timedelta(seconds=seconds), usegmt=True), now)
    assert clock.ok is ok
    if not ok:
        side = "ahead of" if seconds > 0 else "behind"
        assert f"{abs(seconds):,} s {side} the server's" in clock.said


# This machine


def test_the_limits_of_the_clock_are_flowers_own():
    constant = pytest.importorskip("flwr.common.constant")
    assert reach.AHEAD.seconds <= constant.SYSTEM_TIME_TOLERANCE
    assert reach.BEHIND.seconds <= constant.TIMESTAMP_TOLERANCE + constant.SYSTEM_TIME_TOLERANCE


@pytest.mark.parametrize(
    ("flower", "torch", "ok"),
    [
        *(("1.41.0", "2.13.0+cpu", True), ("1.41", "2.13", True), ("1.41.3rc1", "2.13", True)),
        *(("1.40.9", "2.13", False), ("1.42.0", "2.13", False), ("2.0", "2.13", False)),
        *((None, "2.13", False), ("1.41.0", None, False)),
    ],
)
def test_versions(monkeypatch, flower, torch, ok):
    monkeypatch.setattr(checks, "_installed", {"flwr": flower, "torch": torch}.get)
    check = checks.check_versions()
    assert check.ok is ok and f"flwr {flower or 'missing'}" in check.said and "fedhassle " in check.said
    assert ("fedhassle[flower]" in check.advice) is not ok


def test_the_agreement():
    known = agreement_hash(AGREEMENT)
    for expected in (None, known, f" {known.upper()}\n"):
        check = checks.check_agreement(AGREEMENT, expected)
        assert check.ok and known in check.said and "2 classes" in check.said
    check = checks.check_agreement(AGREEMENT, "0123")
    assert not check.ok and known in check.said and "0123" in check.said and "federation.toml" in check.advice


def test_the_method(module):
    check = checks.check_method(AGREEMENT)
    assert check.ok and check.said == "hassle"
    for run in ({"method": "own_check:Mine"}, {"net": "own_check:Mine"}):
        check = checks.check_method(replace(AGREEMENT, run=run))
        assert not check.ok and "'own_check:Mine' cannot be imported: ModuleNotFoundError" in check.said
        assert "ask the coordinator" in check.advice
    module("own_check", "from fedhassle.methods import FedAvg as Mine")
    check = checks.check_method(replace(AGREEMENT, run={"method": "own_check:Mine"}))
    assert check.ok and check.said == f"own_check:Mine, code of own_check:Mine {own_code('own_check:Mine')}"
    check = checks.check_method(replace(AGREEMENT, run={"method": {"name": "own_check:Mine", "batch": 0}}))
    assert not check.ok and "method.batch" in check.said


def test_the_key(tmp_path):
    key, public = tmp_path / "private" / "north.key", tmp_path / "north.pub"
    missing = checks.check_key(key)
    assert not missing.ok and "does not exist" in missing.said and "federation join" in missing.advice
    keys.make_site_key(key, public, "north")
    check = checks.check_key(key)
    assert check.ok and check.said == keys.fingerprint(keys.read_public_key(public))
    key.chmod(0o640)
    check = checks.check_key(key)
    assert not check.ok and "mode 0640" in check.said and f"chmod 600 {key}" in check.advice
    key.chmod(0o600)
    key.write_text("x")
    check = checks.check_key(key)
    assert not check.ok and "not an OpenSSH private key" in check.said


def test_the_data(tmp_path):
    place = tmp_path / "images"
    (place / "cat").mkdir(parents=True)
    check = checks.check_data(place, AGREEMENT)
    assert not check.ok and f"fedhassle data check {place}" in check.advice
    Image.new("L", (16, 16)).save(place / "cat" / "1.png")
    (place / "2.png").write_bytes(b"x")
    check = checks.check_data(place, AGREEMENT)
    assert check.ok and check.said == "1 image, 1 labelled; 1 skipped: 2.png"
    (place / "cat").rename(place / "cow")
    check = checks.check_data(place, AGREEMENT)
    assert not check.ok and "'cow' is not one of the classes" in check.said


def test_all_checks(papers, tmp_path):
    place, key = tmp_path / "images", tmp_path / "private" / "north.key"
    place.mkdir()
    Image.new("L", (16, 16)).save(place / "1.png")
    keys.make_site_key(key, tmp_path / "north.pub", "north")
    with serving(http(datetime.now(UTC)), papers) as address:
        agreement = Agreement("Zoo", f"{address.host}:{address.port}", TERMS)
        found = checks.preflight(agreement, papers.ca, key, place, expected_hash="0123", timeout=TIMEOUT)
    names = ["versions", "agreement", "method", "key", "address", "certificate", "clock", "data"]
    assert [check.name for check in found] == names
    assert [check.name for check in found if not check.ok and check.name != "versions"] == ["agreement"]
