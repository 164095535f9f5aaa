"""The status of a server: as values, as metrics, and as a page in a browser."""

import http.client
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browser, executable
from federations import Flying, network, terms
from small import LIMIT

from fedhassle.errors import UserError
from fedhassle.federation.agreement import Address, parsed_address, write_agreement
from fedhassle.federation.server import calls, host, monitor
from fedhassle.federation.server import status as status_module
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.federation.server.monitor import exposition, metrics_of, monitoring, status_page
from fedhassle.federation.server.status import read_status
from fedhassle.federation.setup.admission import AdmittedSite
from fedhassle.federation.setup.folder import FederationFolder

EVIL = '<script>alert(1)</script> "\\'
RUN = """
        rounds = 3
        evaluate_every = 1
        method = {name = "hassle", batch = 8, epochs = 1, residual_steps = 1}
"""
PAGE = (Path(__file__).parents[2] / "docs" / "for-it.md").read_text("utf-8")
LABEL = r'[a-z]+="(?:[^"\\\n]|\\[\\"n])*"'
LINE = re.compile(rf"(fedhassle_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.e+]+)")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A coordinator with four sites, one of them offline, and a run with two of three rounds done."""
    agreed = replace(terms(validation=0.3, run=RUN), name=EVIL)
    write_agreement(agreed, tmp_path / "federation.toml")
    steps = coordinate(network(tmp_path / "sites", agreed), agreed, tmp_path / "run", None, Flying().clock)
    assert [next(steps).t, next(steps).t] == [1, 2]
    Audit(tmp_path / "run" / "audit.jsonl").write("refused", site="client 4", why=EVIL)
    names = [f"client {k}" for k in range(1, 5)]
    sites = {name: AdmittedSite("a key", "2026-01-02T03:04:05") for name in names}
    run = calls.StartedRun(7, "running", "2026-01-02", str(tmp_path / "run"))
    monkeypatch.setattr(status_module, "admitted", lambda path: sites)
    monkeypatch.setattr(host, "online_sites", lambda link, sites: set(names[:3]))
    monkeypatch.setattr(calls, "runs", lambda link: [run])
    yield FederationFolder(tmp_path)
    steps.close()


def test_the_status_has_the_sites_and_the_progress_of_the_run(folder):
    found = read_status(folder)
    assert found.up and found.name == EVIL and [site.online for site in found.sites] == [True] * 3 + [False]
    run = found.run
    assert (run.round, run.rounds, run.alive, run.metrics["round"]) == (2, 3, True, 2) and run.done_at > 1e9
    first, *_, last = found.sites
    assert first.rounds == 2 and first.failures == 0 and sum(first.counts.values()) > 0
    assert set(first.accuracy) >= {"SM", "UM", "EM"} and last.accuracy == {}
    assert last.refused == EVIL and last.rounds == 0 and last.counts == {}
    assert run.bytes["up"] > 0 and run.bytes["down"] > 0


def test_a_server_that_does_not_answer_has_a_status_too(folder, monkeypatch):
    def silent(*words):
        raise UserError("no server answers")

    monkeypatch.setattr(host, "online_sites", silent)
    found = read_status(folder)
    assert not found.up and found.run is None and len(found.sites) == 4
    assert "fedhassle_up 0.0\n" in exposition(metrics_of(found))
    assert "does not answer" in status_page(found, "EM")


def test_the_metrics_have_the_format_of_prometheus(folder):
    text = exposition(metrics_of(read_status(folder)))
    values, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("gauge", "counter") and name not in kinds  # each metric in one group
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = LINE.fullmatch(line).groups()
            assert name == list(kinds)[-1] and (name, labels) not in values
            values[name, labels] = float(value)
    assert kinds.keys() == set(re.findall(r"`(fedhassle_[a-z_]+)(?:{[a-z,]+})?`", PAGE))  # as documented
    assert values["fedhassle_up", None] == 1 and values["fedhassle_run_round", None] == 2
    assert values["fedhassle_site_online", 'site="client 4"'] == 0
    assert values["fedhassle_site_rounds", 'site="client 1"'] == 2
    assert 0 <= values["fedhassle_run_accuracy", 'prediction="EM"'] <= 1
    assert monitor.escaped('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


def answer(place, path="/", method="GET", **headers):
    request = urllib.request.Request(place + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request) as found:
            return found.status, found.headers, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture
def place(folder):
    with monitoring(folder, Address("127.0.0.1", 0), "EM") as made:
        made.status = read_status(folder)
        yield f"http://127.0.0.1:{made.server_address[1]}"


def test_the_page_is_read_only_and_for_this_machine(place):
    code, headers, text = answer(place)
    assert code == 200 and "text/html" in headers["Content-Type"] and "<script" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert answer(place, "/metrics")[2].startswith("# HELP fedhassle_up")
    assert answer(place, "/healthz")[0] == 200 and answer(place, "/../private")[0] == 404
    assert answer(place, method="HEAD")[2] == ""
    for method in ("POST", "PUT", "DELETE"):
        assert answer(place, method=method)[0] == 501
    assert answer(place, Host="evil.example:80")[0] == 403  # a name that leads to this machine
    assert answer(place, Host=f"localhost:{place.rpartition(':')[2]}")[0] == 200


def test_a_caller_that_hangs_up_leaves_no_traceback(place, monkeypatch, capsys):
    """On the coordinator's screen, whenever a program looks which ports are open."""
    seen, handle = threading.Event(), monitor.Monitor.handle_error
    monkeypatch.setattr(monitor.Monitor, "handle_error", lambda *words: (handle(*words), seen.set()))
    with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))) as caller:
        caller.sendall(b"GET")
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes by a reset
    assert seen.wait(LIMIT) and capsys.readouterr().err == ""
    assert answer(place)[0] == 200


def test_an_error_of_the_page_is_a_line_in_the_log(place, monkeypatch, caplog, capsys):
    monkeypatch.setattr(monitor, "status_page", lambda *words: 1 / 0)
    with pytest.raises(http.client.RemoteDisconnected):
        answer(place)
    assert "the status page cannot be sent: ZeroDivisionError" in caplog.text
    assert "Traceback" not in capsys.readouterr().err


def test_an_old_status_is_not_up_and_no_error_ends_the_watch(folder, monkeypatch, caplog):
    """Otherwise a monitor whose thread or server hangs would answer that all is well."""
    fresh, tries = read_status(folder), []

    def odd(folder):
        tries.append(folder)
        if len(tries) == 1:
            raise TypeError("odd")
        made._ended.set()
        return fresh

    monkeypatch.setattr(monitor, "read_status", odd)
    monkeypatch.setattr(monitor, "REFRESH", 0)
    with monitor.Monitor(Address("127.0.0.1", 0), folder, "EM") as made:
        made.watch()
        assert "TypeError: odd" in caplog.text and made.current() == fresh and fresh.up
        made.status = fresh._replace(time=fresh.time - 2 * monitor.STALE)
        assert made.current() == made.status._replace(up=False)


def test_the_port_is_freed_in_the_end_and_a_used_one_is_an_error(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError), monitoring(folder, address, "EM"):
            pass
    with monitoring(folder, address, "EM"):
        pass
    socket.create_server(address).close()


def test_the_status_page_may_listen_everywhere_but_the_federation_needs_an_address():
    assert parsed_address("0.0.0.0:8444", listening=True) == ("0.0.0.0", 8444)
    with pytest.raises(UserError, match="every network"):
        parsed_address("0.0.0.0:8444")


@pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(place):
    with browser() as page:
        for width, dark in ((1200, False), (400, True)):
            page.show(place, width=width, dark=dark)
            text = page.run("document.body.innerText")
            assert "The server answers" in text and "round 2 of 3" in text and EVIL in text
            rows = page.run("[...document.querySelectorAll('tbody tr')].map(r => r.children[1].innerText)")
            assert rows == ["online"] * 3 + ["offline"]
            assert page.run("document.querySelector('progress').value") == 2
            assert page.run("document.documentElement.scrollWidth") <= width
            told, asked = page.complaints()
            assert [one for one in told if "favicon" not in str(one)] == []
            assert all(address.endswith("/favicon.ico") for address in asked)
