"""The commands of a running federation: refusals, output, and restarts of a node."""

import errno
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import small
from PIL import Image
from small import call

from fedhassle.data.site.folder import read_site
from fedhassle.errors import UserError
from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.build import run_settings
from fedhassle.federation.flower import process_tree, processes
from fedhassle.federation.flower.logs import LogReader, write_line
from fedhassle.federation.server import calls, host
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.setup import reach
from fedhassle.federation.setup.admission import AdmittedSite, admit_site, admitted
from fedhassle.federation.setup.certificate import certificate_fault
from fedhassle.federation.setup.demo import write_demo_sites
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.federation.setup.keys import make_server_certificate, make_site_key, read_public_key
from fedhassle.federation.site import supervise
from fedhassle.federation.site.supervise import keep_running, site_name
from fedhassle.files import locked, wait_until_free
from fedhassle.version import FLOWER


@pytest.fixture
def coordinator(tmp_path):
    folder, port = tmp_path / "federation", processes.free_port()
    words = ("--classes", "cat,dog", "--size", 12, "--channels", 1, "--out", folder, "rounds=2")
    assert call("federation", "init", "--address", f"127.0.0.1:{port}", *words)[0] == 0
    return folder


@pytest.fixture
def pictures(tmp_path):
    for k, name in enumerate(("cat/1.png", "dog/2.png", "unlabelled/3.png")):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        Image.fromarray(np.full((12, 12), 50 * k, np.uint8)).save(tmp_path / "images" / name)
    return tmp_path / "images"


def test_the_supported_versions_of_flower_are_those_of_the_package():
    needed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    lowest, above = FLOWER
    assert f"flwr>={lowest},<{above}" in needed["project"]["optional-dependencies"]["flower"]


# Refusals


@pytest.mark.parametrize(
    "words",
    [
        *(("init", "--address", "a:1", "--like", "fmnist"), ("join", ".", "--name", "x", "--data", ".")),
        *(("admit", "x", "x.pub"), ("expel", "x"), ("server",), ("node", "--data", "."), ("run",)),
        *(("status",), ("demo",), ("certificate",)),
    ],
    ids=lambda words: words[0],
)
def test_without_flower_each_command_says_what_to_install(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fedhassle.federation.setup.preflight", None)
    code, out, err = call("federation", *words)
    assert (code, out) == (2, "") and "pip install 'fedhassle[flower]'" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "server", "status", "certificate"])
def test_a_folder_without_a_federation_is_refused(command, tmp_path):
    code, _, err = call("federation", command, tmp_path)
    assert code == 2 and "no federation.toml" in err


def test_without_a_server_nothing_runs_and_nothing_is_left(coordinator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("federation", "run", coordinator)
    assert code == 2 and "no server answers at 127.0.0.1:" in err and "fedhassle federation server" in err
    assert not (tmp_path / "runs").exists()
    code, out, _ = call("federation", "status", coordinator)
    assert code == 0 and "the server is not running" in out and "no site is admitted yet" in out


def test_run_refuses_a_used_folder_and_a_method_that_pools(coordinator, finished, tmp_path):
    for out, message in (
        (finished[0], "contains a finished run"),
        (tmp_path, "is not an empty folder"),
    ):
        code, _, err = call("federation", "run", coordinator, "--out", out)
        assert code == 2 and message in err
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "config.toml").touch()
    code, _, err = call("federation", "run", coordinator, "--out", tmp_path / "simulated")
    assert code == 2 and "simulated run: fedhassle resume" in err
    code, _, err = call("federation", "run", coordinator, "--test", tmp_path / "none")
    assert code == 2 and "none does not exist" in err
    file = coordinator / "federation.toml"
    text = file.read_text()
    for old, new, message in (
        ('name = "hassle"', 'name = "central"', "'central' needs all data in one place"),
        ('net = "lenet"', 'net = "lenett"', "unknown network 'lenett', did you mean 'lenet'?"),
    ):
        file.write_text(text.replace(old, new))
        code, _, err = call("federation", "run", coordinator, "--out", tmp_path / "x")
        assert code == 2 and message in err and not (tmp_path / "x").exists()


def test_a_test_set_that_cannot_be_used_is_refused_before_the_run(coordinator, pictures, tmp_path):
    """The error says what is wrong; the server is not called."""
    (tmp_path / "empty").mkdir()
    (pictures / "cow").mkdir()
    (pictures / "cat" / "1.png").rename(pictures / "cow" / "1.png")
    np.savez(tmp_path / "bare.npz", x=np.zeros((2, 12, 12), np.uint8), y=[-1, -1])
    for name, message in (("empty", "holds no images"), ("images", "'cow' is not one of the classes")):
        code, _, err = call("federation", "run", coordinator, "--test", tmp_path / name)
        assert code == 2 and message in err and "no server answers" not in err
    code, _, err = call("federation", "run", coordinator, "--test", tmp_path / "bare.npz")
    assert code == 2 and "holds no labelled images" in err


def test_a_resumed_run_keeps_its_test_images(coordinator, pictures, tmp_path):
    """Without a server: the message, and the command to continue with."""
    run = tmp_path / "run"
    Audit(run / "audit.jsonl").write("created", run="x", test=str(pictures))
    code, out, err = call("federation", "run", coordinator, "--out", run)
    assert code == 2 and "no server answers" in err and f"test images: {pictures}, as before" in one_line(out)
    assert f"to continue: fedhassle federation run {coordinator} --out {run} --test {pictures}" in one_line(
        err
    )
    moved = pictures.rename(tmp_path / "moved")
    code, out, err = call("federation", "run", coordinator, "--out", run)
    assert code == 2 and f"{pictures} does not exist" in err and "choose another with --test" in one_line(err)
    code, out, err = call("federation", "run", coordinator, "--out", run, "--test", moved)
    assert "no server answers" in err and f"--test {moved}" in one_line(err) and "as before" not in out


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("pending", "another run is using these sites, in /runs/first"),
        ("running", "another run is using these sites, in /runs/first"),
        ("finished:stopped", "submitted"),
    ],
)
def test_a_second_run_is_refused_while_another_is_running(
    status, message, coordinator, tmp_path, monkeypatch
):
    """Both would ask the same sites; a run that has ended is not in the way."""

    def submit(*words):
        raise UserError("submitted")

    monkeypatch.setattr(processes, "submit", submit)
    first = calls.StartedRun(1, status, "2026-01-02", "/runs/first")
    monkeypatch.setattr(calls, "runs", lambda link: [first])
    code, _, err = call("federation", "run", coordinator, "--out", tmp_path / "second")
    assert code == 2 and message in one_line(err) and not (tmp_path / "second").exists()
    assert f"to continue: fedhassle federation run {coordinator} --out {tmp_path}" in one_line(err)


def one_line(text):
    """A text without line breaks, which may be anywhere."""
    return " ".join(text.split())


def test_a_federations_run_is_not_resumed_as_a_simulated_one(tmp_path):
    for name in ("config.toml", "audit.jsonl"):
        (tmp_path / name).touch()
    code, _, err = call("resume", tmp_path)
    assert code == 2 and "fedhassle federation run FOLDER --out" in err


def test_a_server_runs_only_where_its_keys_are(coordinator):
    (coordinator / "private" / "server.key").unlink()
    code, _, err = call("federation", "server", coordinator)
    assert code == 2 and "server.key is missing" in err and "federation init" in err


TODAY, LONG_AGO = datetime.now(UTC), datetime.now(UTC) - timedelta(days=3651)
FAULTS = {
    "expired": (
        ["127.0.0.1"],
        LONG_AGO,
        f"has expired (valid from {LONG_AGO:%Y-%m-%d} to {LONG_AGO + timedelta(days=3650):%Y-%m-%d})",
    ),
    "of the future": (
        ["127.0.0.1"],
        TODAY + timedelta(days=3),
        f"is not valid yet (valid from {TODAY + timedelta(days=3):%Y-%m-%d} to 20",
    ),
    "for other names": (["fl.example.org", "::1"], None, "is not for 127.0.0.1 but for fl.example.org, ::1"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_server_whose_certificate_no_site_would_trust_does_not_start(case, coordinator):
    """`status` says why in the same words; with the command that both name, the server would start."""
    names, start, message = FAULTS[case]
    folder = FederationFolder(coordinator)
    for path in (folder.certificate, folder.server_key):
        path.unlink()
    made = folder.server_key, folder.certificate, folder.ca_key, folder.ca
    make_server_certificate(*made, names, start)
    code, out, err = call("federation", "server", coordinator)
    assert (code, out) == (2, "") and message in one_line(err) and not folder.server.exists()
    command = f"fedhassle federation certificate {coordinator}"
    assert one_line(err).endswith(f"make a new one with: {command}")
    assert message in (said := one_line(call("federation", "status", coordinator)[1])) and command in said
    assert call(*shlex.split(command)[1:])[0] == 0
    assert certificate_fault(folder, read_agreement(coordinator).address) == ""


def test_a_key_that_does_not_fit_its_certificate_is_named(coordinator, tmp_path):
    folder, other = FederationFolder(coordinator), FederationFolder(tmp_path / "other")
    folder.server_key.unlink()
    made = other.server_key, other.path / "x.crt", folder.ca_key, folder.ca
    make_server_certificate(*made, ["x"])
    other.server_key.rename(folder.server_key)
    code, out, err = call("federation", "server", coordinator)
    assert (code, out) == (2, "") and "server.crt cannot be used with" in one_line(err)
    assert f"fedhassle federation certificate {coordinator}" in one_line(err)


def test_a_port_in_use_is_named(coordinator):
    port = int(read_agreement(coordinator).address.rpartition(":")[2])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        code, _, err = call("federation", "server", coordinator)
    assert code == 2 and f"port {port}" in err and "federation.toml" in err


def test_a_missing_module_of_the_user_is_named_before_anything_starts(coordinator, module, tmp_path):
    module("own_avg", "from fedhassle.methods import FedAvg as Mine")
    file = coordinator / "federation.toml"
    file.write_text(file.read_text().replace('name = "hassle"', 'name = "own_avg:Mine"'))
    (coordinator / "private" / "server.key").unlink()  # the next check fails
    assert "server.key is missing" in call("federation", "server", coordinator)[2]
    del sys.modules["own_avg"]
    (tmp_path / "own_avg.py").unlink()
    for command in ("server", "run"):
        code, _, err = call("federation", command, coordinator)
        assert code == 2 and "'own_avg:Mine' cannot be imported: ModuleNotFoundError" in one_line(err)
        assert "run the command in the folder of own_avg" in one_line(err)


def test_started_processes_import_from_the_working_folder(tmp_path, monkeypatch):
    """Flower's own programs do not look there, as `python -m` does."""
    (tmp_path / "lies_here.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    with processes.running([sys.executable, "-P", "-c", "import lies_here"], None, log) as process:
        assert process.wait(small.LIMIT) == 0, log.read_text()
    assert "found" in log.read_text()


def test_a_second_server_is_refused(coordinator):
    (coordinator / "server").mkdir()
    with locked(coordinator / "server"):
        code, _, err = call("federation", "server", coordinator)
    assert code == 2 and "another process is at work" in err


def test_a_node_that_fails_its_checks_says_why_and_does_not_start(coordinator, pictures):
    code, _, err = call("federation", "node", "--data", pictures, "--federation", coordinator, "--name", "x")
    assert code == 2 and "x cannot join yet (key, address, certificate, clock)" in err
    code, out, _ = call("federation", "node", "--data", "none", "--federation", coordinator, "--name", "x")
    lines = [line.split()[:2] for line in out.splitlines()]
    assert ["versions", "ok"] in lines and ["key", "FAILED"] in lines and ["data", "FAILED"] in lines
    assert "with: fedhassle federation join" in out and not (coordinator / "node").exists()
    words = ("--federation", coordinator, "--name", "x", "--device", "gpu")
    code, _, err = call("federation", "node", "--data", pictures, *words)
    assert code == 2 and "--device must be auto, cpu or cuda" in err


def test_a_node_waits_for_its_server(coordinator, pictures, monkeypatch):
    """Nothing else is wrong; here its user does not wait so long."""
    folder, waited = FederationFolder(coordinator), []
    make_site_key(folder.site_key("x"), folder.site_public("x"), "x")

    def interrupted(checks, address, ca):
        waited.append(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(reach, "awaited_server", interrupted)
    code, out, _ = call("federation", "node", "--data", pictures, "--federation", coordinator, "--name", "x")
    assert code == 130 and "waiting for the server" in out and len(waited) == 1
    assert "refuses connections" in one_line(out)


def test_a_demo_does_not_write_into_an_existing_folder(pictures):
    code, _, err = call("federation", "demo", "--out", pictures)
    assert code == 2 and "not empty" in err


# A node and its log


def test_the_name_of_a_site_is_the_name_of_its_key(tmp_path):
    folder = FederationFolder(tmp_path)
    with pytest.raises(UserError, match="fedhassle federation join"):
        site_name(folder, None)
    make_site_key(folder.site_key("north"), folder.site_public("north"), "north")
    assert site_name(folder, None) == "north" and site_name(folder, "south") == "south"
    make_site_key(folder.site_key("south"), folder.site_public("south"), "south")
    with pytest.raises(UserError, match="--name north"):
        site_name(folder, None)
    with pytest.raises(UserError, match="cannot name a site"):
        site_name(folder, "../x")


def test_the_coordinators_own_keys_are_not_a_sites(coordinator):
    folder = FederationFolder(coordinator)
    assert folder.ca_key.is_file() and folder.server_key.is_file()
    with pytest.raises(UserError, match="fedhassle federation join"):
        site_name(folder, None)
    make_site_key(folder.site_key("north"), folder.site_public("north"), "north")
    assert site_name(folder, None) == "north"
    for name in ("ca", "server"):
        with pytest.raises(UserError, match=f"'{name}' is reserved"):
            site_name(folder, name)


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        *(("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("fl.example.org", "0.0.0.0")),
        *(("10.0.0.3", "0.0.0.0"), ("::1", "::1"), ("2001:db8::3", "::")),
    ],
)
def test_a_server_listens_where_its_sites_are(address, listens):
    assert host.listening_host(address) == listens


def test_a_log_is_read_as_it_grows(tmp_path):
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.new_lines() == []
    path.write_text("Flower says\n2026-01-02 03:04:05,678 fedhassle INFO north holds ü\n2026-01-02 03:04:0")
    assert reader.new_lines() == ["03:04:05 north holds ü"] and reader.new_lines() == []
    with path.open("a") as file:
        file.write("6,000 fedhassle WARNING more\n2026-01-02 03:04:07,000 flwr DEBUG noise\n")
        file.write("2026-01-02 03:04:08,000 INFO of a run\n")
    assert reader.new_lines() == ["03:04:06 more", "03:04:08 of a run"]


def python(code):
    return lambda: [sys.executable, "-c", code]


LINE = "print('2026-01-02 03:04:05,678 fedhassle INFO {}', flush=True)"


def test_a_node_that_ends_is_restarted_but_not_for_ever(tmp_path):
    command = python(f"{LINE.format('hello')}; raise SystemExit(7)")
    lines = []
    with pytest.raises(UserError, match="6 times in a row"):
        for line in keep_running(command, tmp_path, tmp_path / "log", pause=lambda seconds: time.sleep(0.01)):
            lines.append(line)  # noqa: PERF402 - keeps them although it ends in an error
    assert lines.count("03:04:05 hello") == 6
    assert sum("exit code 7" in line for line in lines) == 5


def test_a_node_that_ends_says_what_is_wrong_with_its_server(tmp_path):
    said = []
    lines = keep_running(
        *(python("raise SystemExit(1)"), tmp_path, tmp_path / "log"),
        pause=lambda seconds: time.sleep(0.01),
        why=lambda: "the certificate has expired; ask for a new one",
    )
    with pytest.raises(UserError, match="6 times in a row: the certificate has expired; ask for a new one"):
        for line in lines:
            said.append(line)  # noqa: PERF402 - as above
    why = "the certificate has expired; ask for a new one"
    assert said == [f"the node has ended (exit code 1): {why}; restarting it in 5 s"] * 5


@pytest.mark.parametrize("refuses", ["mkdir", "open"])
def test_a_node_needs_a_folder_that_it_can_write(refuses, coordinator, monkeypatch):
    """Refused by the system, whoever runs this test: a new folder, or a file in an existing one."""
    folder = FederationFolder(coordinator)
    if refuses == "open":
        folder.node("x").mkdir(parents=True)

    def denied(path, *words, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, refuses, denied)
    said = rf"{folder.node('x')} cannot be written \(Permission denied\): .* {coordinator} must be writable"
    with pytest.raises(UserError, match=said):
        next(supervise.run_node(folder, "x", "127.0.0.1:9", {}))


def test_a_running_node_asks_what_is_wrong_with_its_server(coordinator, monkeypatch):
    """Here nothing answers at its address."""
    folder = FederationFolder(coordinator)
    make_site_key(folder.site_key("x"), folder.site_public("x"), "x")
    monkeypatch.setattr(supervise, "supernode_command", lambda *words: python("raise SystemExit(1)")())
    lines = supervise.run_node(folder, "x", read_agreement(coordinator).address, {})
    assert "refuses connections" in (line := next(lines)) and "(exit code 1): 127.0.0.1:" in line
    lines.close()


def test_a_node_that_has_worked_for_long_is_restarted_each_time(tmp_path):
    clock = itertools.count(0, 1000)
    lines = keep_running(
        *(python("raise SystemExit(7)"), tmp_path, tmp_path / "log"),
        pause=lambda seconds: time.sleep(0.01),
        now=lambda: next(clock),
    )
    assert len(list(itertools.islice(lines, 8))) == 8
    lines.close()


def test_a_node_that_cannot_work_is_not_restarted(tmp_path):
    code = f"{LINE.format('no images')}; raise SystemExit({supervise.CANNOT_WORK})"
    with pytest.raises(UserError, match="the node cannot work: 03:04:05 no images"):
        list(keep_running(python(code), tmp_path, tmp_path / "log", pause=lambda seconds: time.sleep(0.01)))


def test_a_started_process_ends_with_the_one_that_started_it(tmp_path):
    """Even if that was killed and could not clean up."""
    child = (
        "from fedhassle.federation.flower.processes import *; import time; end_with_parent(); time.sleep(300)"
    )
    parent = (
        "import sys, time; from pathlib import Path\n"
        "from fedhassle.federation.flower.processes import running\n"
        f"with running([sys.executable, '-c', {child!r}], None, Path({str(tmp_path / 'log')!r})) as p:\n"
        "    print(p.pid, flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=small.environment()) as process:
        started = psutil.Process(int(process.stdout.readline()))
        while "time" not in " ".join(started.cmdline()) and process_tree.is_alive(started):
            time.sleep(0.05)
        process.kill()
    deadline = time.monotonic() + small.LIMIT
    while process_tree.is_alive(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = process_tree.is_alive(started)
    if left:
        started.kill()
    assert not left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_interrupts_but_not_while_cleaning_up(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), processes.interruptible():
        with processes.uninterrupted():
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        time.sleep(1)
        pytest.fail("nothing happened")
    assert signal.getsignal(number) is before


def test_waiting_for_a_folder_ends(tmp_path):
    with locked(tmp_path):
        began = time.monotonic()
        wait_until_free(tmp_path, 0.3)
        assert time.monotonic() - began >= 0.3
    wait_until_free(tmp_path, 60)
    wait_until_free(tmp_path / "none", 60)


# Admission


class FakeLink:
    """A SuperLink's record of nodes; like Flower, it never registers a key again."""

    def __init__(self, monkeypatch):
        self.nodes, self.used, self.calls = {}, set(), []
        for name in ("registered", "register", "unregister"):
            monkeypatch.setattr(calls, name, getattr(self, name))

    def registered(self, link):
        return list(self.nodes.values())

    def register(self, link, name, key):
        self.calls.append(("register", name))
        if calls.pem(key) in self.used:
            raise UserError("Public key already in use.")
        number = len(self.calls)
        self.nodes[number] = calls.RegisteredNode(number, name, calls.pem(key), False, "")

    def unregister(self, link, number):
        self.calls.append(("unregister", self.nodes[number].name))
        self.used.add(self.nodes.pop(number).key)


def site(tmp_path, name):
    make_site_key(tmp_path / "private" / name, tmp_path / f"{name}.pub", name)
    return AdmittedSite(read_public_key(tmp_path / f"{name}.pub"), "today")


def test_the_server_admits_exactly_the_sites_of_the_record(tmp_path, monkeypatch):
    link = FakeLink(monkeypatch)
    north, south, new = (site(tmp_path, name) for name in ("north", "south", "new"))
    assert list(host.apply_admissions(None, {"north": north, "south": south})) == [
        "north is admitted",
        "south is admitted",
    ]
    assert list(host.apply_admissions(None, {"north": north, "south": south})) == []
    assert list(host.apply_admissions(None, {"north": north, "south": new})) == [
        "south is no longer admitted",
        "south is admitted",
    ]
    assert {node.key for node in link.nodes.values()} == {calls.pem(north.key), calls.pem(new.key)}
    east = site(tmp_path, "east")
    lines = []
    with pytest.raises(UserError, match="south: Public key already in use"):
        for line in host.apply_admissions(None, {"south": south, "zeast": east}):
            lines.append(line)  # noqa: PERF402 - as above
    assert lines == ["north is no longer admitted", "south is no longer admitted", "zeast is admitted"]


def test_a_renamed_site_stays_admitted(tmp_path, monkeypatch):
    """Flower would not register its key again, and keeps its first name."""
    link, nroth = FakeLink(monkeypatch), site(tmp_path, "nroth")
    assert list(host.apply_admissions(None, {"nroth": nroth})) == ["nroth is admitted"]
    link.nodes = {k: node._replace(online=True) for k, node in link.nodes.items()}
    north = {"north": nroth}
    assert list(host.apply_admissions(None, north)) == [] and host.online_sites(None, north) == {"north"}


def test_status_shows_the_sites_online_and_those_that_the_last_run_refused(
    coordinator, tmp_path, monkeypatch
):
    link, audit = FakeLink(monkeypatch), Audit(tmp_path / "run" / "audit.jsonl")
    for name in ("north", "south"):
        admit_site(coordinator, name, site(tmp_path, name).key)
        audit.write("refused", site=name, why="its file is another one")
    audit.write("joined", site="south")
    list(host.apply_admissions(None, admitted(coordinator)))
    link.nodes = {k: node._replace(online=True) for k, node in link.nodes.items()}
    monkeypatch.setattr(calls, "is_ready", lambda link: True)
    last = calls.StartedRun(1, "running", "2026-01-02", str(tmp_path / "run"))
    monkeypatch.setattr(calls, "runs", lambda link: [last])
    code, out, _ = call("federation", "status", coordinator)
    lines = [line.split("  admitted")[0].split() for line in out.splitlines() if "  admitted" in line]
    assert code == 0 and lines == [["north", "here"], ["south", "here"]]
    assert one_line(out).count("refused by the last run: its file is another one") == 1


def test_status_says_why_a_server_that_runs_cannot_answer(coordinator, monkeypatch):
    """At once: it does not wait until a backup has ended, or a disk has space again."""
    asked, why = [], "the server's disk is full"

    def send(self, request, **more):
        asked.append(request)
        return httpx.Response(503, json={"detail": why}, request=request)

    monkeypatch.setattr(httpx.Client, "send", send)
    log = host.server_log(FederationFolder(coordinator))
    log.parent.mkdir()
    write_line(log, "WARNING", "something happened")
    code, out, _ = call("federation", "status", coordinator)
    assert code == 0 and f"cannot answer now: {why}" in one_line(out) and len(asked) == 1
    assert "is not running" not in out and "something happened" in out


def test_a_running_server_follows_the_record(coordinator, tmp_path, monkeypatch):
    """A site that is admitted later, a record that is damaged for a while, a node that goes offline."""
    link, folder = FakeLink(monkeypatch), FederationFolder(coordinator)
    north = site(tmp_path, "north")
    said, record = [], folder.sites

    def turn(online):
        link.nodes = {k: node._replace(online=online) for k, node in link.nodes.items()}

    acts = iter(
        [
            lambda: admit_site(coordinator, "north", north.key),
            lambda: turn(True),
            lambda: record.write_text("x = = 1"),
            lambda: None,
            lambda: turn(False),
        ]
    )

    def pause(seconds):
        act = next(acts, None)
        if act is None:
            raise StopAsyncIteration
        act()

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        with pytest.raises(StopAsyncIteration):
            for line in host.watch_sites(folder, process, pause):
                said.append(line)  # noqa: PERF402 - as above
    finally:
        process.kill()
        process.wait()
    assert said[:2] == ["north is admitted", "north is online"] and said[3:] == ["north is offline"]
    assert "sites.toml cannot be read" in said[2]
    with pytest.raises(UserError, match="the server has ended"):
        list(host.watch_sites(folder, process, pause))


# The demo


def test_the_sites_of_the_demo_have_the_three_forms(tmp_path):
    sites = write_demo_sites(tmp_path, (30, 40, 20), 10)
    assert (
        call("federation", "init", "--address", "a:1", "--like", "fmnist-mini", "--out", tmp_path / "f")[0]
        == 0
    )
    form = read_agreement(tmp_path / "f").data.form
    found = {site.name: read_site(site.images, form) for site in sites}
    labelled = {name: (len(site.y), int((site.y >= 0).sum())) for name, site in found.items()}
    assert labelled == {"north": (30, 30), "south": (40, 5), "east": (20, 0)}
    assert all(not site.problems for site in found.values())
    pixels = [image.tobytes() for site in found.values() for image in site.x]
    assert len(set(pixels)) == 90  # no site holds what another holds
    test = read_site(tmp_path / "test", form)
    assert (test.y >= 0).all() and not {image.tobytes() for image in test.x} & set(pixels)
    assert run_settings(read_agreement(tmp_path / "f")).rounds == 200


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_the_demo_trains_a_model_and_leaves_no_process(tmp_path):
    """As a user starts it, without the environment of this Python on PATH."""
    words = ["federation", "demo", "--out", str(tmp_path / "demo"), "--rounds", "2"]
    marker = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fedhassle", *words],
        env=small.environment(PATH="/usr/bin:/bin"),
        capture_output=True,
        text=True,
        timeout=2 * small.LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "demo" / "run"
    summary, audit = small.summary_of(run), [json.loads(line) for line in (run / "audit.jsonl").open()]
    assert summary["rounds"] == 2 and set(summary["sites"]) == {"north", "south", "east"}
    assert [event["contributed"] for event in audit if event["event"] == "round"] == [
        ["east", "north", "south"]
    ] * 2
    card = (run / "model.md").read_text("utf-8")
    assert "3 (1 full, 1 partial, 1 unlabelled)" in card and "validation images of the sites" in card
    rows = (tmp_path / "demo" / "predictions.csv").read_text("utf-8").splitlines()
    assert len(rows) == 501 and rows[0].startswith("file,class,probability,SM,UM,EM")
    lines = (tmp_path / "demo" / "test" / "labels.csv").read_text("utf-8").splitlines()[1:]
    truth = dict(line.split(",") for line in lines)
    right = [truth[Path(row.split(",")[0]).name] == row.split(",")[1] for row in rows[1:]]
    assert sum(right) / len(right) > 0.2  # ten classes
    for place in (tmp_path / "demo" / "coordinator", tmp_path / "demo" / "north" / "federation"):
        for path in place.rglob("*.key"):
            assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "demo" / "coordinator" / "server").stat().st_mode & 0o777 == 0o700
    said = (tmp_path / "demo" / "coordinator" / "server.out").read_text("utf-8")
    assert "status   http://127.0.0.1:" in said or "no status page at http://127.0.0.1:" in said
    commands = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands if marker in " ".join(words)]
