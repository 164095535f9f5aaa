"""A real federation on loopback: a SuperLink and three SuperNodes, with TLS and keys; and what can happen."""

import datetime
import ipaddress
import json
import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as written
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedhassle.build import build_method, build_net
from fedhassle.data.partition import Split
from fedhassle.federation import processes
from fedhassle.federation.node import load_site, parted
from fedhassle.federation.processes import Tls
from fedhassle.federation.terms import dataset_of, read_terms, run_settings
from fedhassle.rounds import Plan, federate
from fedhassle.simulator import Simulator

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

LIMIT = 90.0  # seconds for anything that is waited for
SITES = {"full": 40, "partial": 12, "unlabelled": 0}  # labelled images of forty
ROGUE = "partial"


# Certificates and keys


def private(key, form):
    return key.private_bytes(written.Encoding.PEM, form, written.NoEncryption())


def signed(subject, issuer, key, signer, extension, critical=False):
    now, days = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=2)
    made = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    made = made.subject_name(named(subject)).issuer_name(named(issuer)).public_key(key.public_key())
    made = made.not_valid_before(now - days).not_valid_after(now + days)
    return made.add_extension(extension, critical).sign(signer, hashes.SHA256())


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def make_tls(folder):
    folder.mkdir()
    root, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    ca = signed("ca", "ca", root, root, x509.BasicConstraints(True, None), critical=True)
    tls = Tls(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    tls.ca.write_bytes(ca.public_bytes(written.Encoding.PEM))
    leaf = signed("server", "ca", server, root, here)
    tls.certificate.write_bytes(leaf.public_bytes(written.Encoding.PEM))
    tls.key.write_bytes(private(server, written.PrivateFormat.PKCS8))
    return tls


def make_key(path):
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(private(key, written.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(written.Encoding.OpenSSH, written.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# A deployment


class Deployment:
    """A SuperLink and its nodes, each of which can be started and killed."""

    def __init__(self, folder):
        self.folder, self.home, self.port = folder, folder / "flwr", free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.tls = make_tls(folder / "tls")
        self.stack, self.nodes = ExitStack(), {}
        rng = np.random.default_rng(0)
        centres = rng.integers(60, 196, (4, 28, 28, 1))
        for name, labelled in SITES.items():
            y = np.arange(40) % 4
            x = np.clip(centres[y] + rng.normal(0, 25, (40, 28, 28, 1)), 0, 255).astype(np.uint8)
            np.savez(folder / f"{name}.npz", x=x, y=np.where(np.arange(40) < labelled, y, -1))
        self.file("plain")  # what nodes are given

    def file(self, name, rounds=3, every=3, minimum=2, timeout=60):
        path = self.folder / f"{name}.toml"
        path.write_text(f"""
            format = 1
            name = "loopback"
            address = "{self.address}"
            [data]
            class_names = ["a", "b", "c", "d"]
            height = 28
            width = 28
            channels = 1
            mean = [0.5]
            std = [0.25]
            flip = true
            validation = 0.2
            [run]
            rounds = {rounds}
            evaluate_every = {every}
            seed = 5
            net = "lenet"
            method = {{name = "hassle", epochs = 1, batch = 8, residual_steps = 2}}
            [rules]
            minimum_sites = {minimum}
            timeout = {timeout}
            wait = {LIMIT}
            """)
        return path

    def start_link(self):
        command = processes.superlink_command(self.tls, self.port, self.folder / "state.db")
        log = self.folder / "superlink.log"
        self.link = self.stack.enter_context(processes.running(command, self.home, log))
        processes.connect(self.home, self.address, self.tls.ca)
        processes.wait_until_ready(self.home, self.link, log)

    def start_node(self, name, key=None):
        about = {"site": name, "data": str(self.folder / f"{name}.npz")}
        about |= {"file": str(self.folder / "plain.toml"), "memory": str(self.folder / f"{name}.memory")}
        key = key or self.folder / f"{name}.key"
        command = processes.supernode_command(self.address, self.tls.ca, key, free_port(), about)
        if name == ROGUE:
            command[2] = "rogue"
        log = self.folder / f"{key.stem}.log"
        return self.stack.enter_context(processes.running(command, self.home, log))

    def ensure_nodes(self):
        for name in SITES:
            if name not in self.nodes or self.nodes[name].poll() is not None:
                self.nodes[name] = self.start_node(name)

    def orders(self, orders):
        (self.folder / f"{ROGUE}.rogue").write_text(json.dumps(orders))

    def submit(self, name, **rules):
        self.ensure_nodes()
        return processes.submit(self.home, self.file(name, **rules), self.folder / name)

    def events(self, name, *kinds):
        path = self.folder / name / "audit.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] in kinds or not kinds]

    def until(self, name, ready, what):
        """Waits for something in a run; that it stops before is an error, with all logs."""
        deadline = time.monotonic() + LIMIT
        while not ready():
            stopped = self.events(name, "stopped")
            if stopped or time.monotonic() > deadline or self.link.poll() is not None:
                logs = "\n".join(
                    f"{p.name}: {processes.last_lines(p, 30)}" for p in self.folder.glob("*.log")
                )
                pytest.fail(f"{what} did not happen: {stopped}\n{self.events(name)}\n{logs}")
            time.sleep(0.1)

    def finish(self, name):
        self.until(name, lambda: self.events(name, "finished"), "the end")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    with pytest.MonkeyPatch.context() as patch:
        here = [str(Path(__file__).parent), str(Path(processes.__file__).parents[2])]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*here, os.environ.get("PYTHONPATH")])))
        made = Deployment(folder)
        with made.stack:
            made.start_link()
            for name in SITES:
                processes.register(made.home, make_key(folder / f"{name}.key").with_suffix(".pub"), name)
            made.ensure_nodes()
            made.stranger = made.start_node("full", make_key(folder / "stranger.key"))
            yield made


def simulated(deployment, rounds):
    """The same federation in this process: its state after so many rounds."""
    terms = read_terms((deployment.folder / "plain.toml").read_text())
    images, labels, parts, start = [], [], [], 0
    for name in sorted(SITES):
        x, y = load_site(deployment.folder / f"{name}.npz")
        parts.append([rows + start for rows in parted(x, y, terms.agreed.validation)[:2]])
        images.append(x)
        labels.append(y)
        start += len(y)
    data, settings = dataset_of(terms, np.concatenate(images), np.concatenate(labels)), run_settings(terms)
    split = Split(tuple(one for one, _ in parts), tuple(other for _, other in parts))
    method = build_method("hassle", settings.method.settings, build_net(settings, data))
    simulator = Simulator(data, split, 5, small.ENGINE, names=sorted(SITES))
    *_, last = federate(method, simulator, Plan(rounds, 8, 5), method.initial(5))
    return method.model(last.state)


def assert_close(path, expected):
    found = small.tensors_of(path)
    assert found.keys() == expected.keys()
    for name, vector in expected.items():
        assert torch.allclose(found[name], vector, rtol=0, atol=1e-6), name
        assert vector.abs().max() > 1e-3


# What happens


def test_three_rounds_equal_three_rounds_of_the_simulator(deployment):
    deployment.submit("equal", minimum=3)
    deployment.finish("equal")
    assert_close(deployment.folder / "equal" / "model.safetensors", simulated(deployment, 3))
    rounds = deployment.events("equal", "round")
    assert [event["contributed"] for event in rounds] == [sorted(SITES)] * 3
    (line,) = small.metrics_of(deployment.folder / "equal")
    assert set(line["sites"]) == {"full", "partial"}  # who holds no label judges nothing


def test_a_node_that_sends_garbage_costs_its_rounds_itself_alone(deployment):
    deployment.orders({"1": "nan", "2": "names", "3": "raise", "4": "shapes"})
    deployment.submit("garbage", rounds=5, every=5, minimum=2)
    deployment.finish("garbage")
    rounds = deployment.events("garbage", "round")
    assert [event["failed"] for event in rounds] == [[ROGUE]] * 4 + [[]]
    why = [event["why"] for event in deployment.events("garbage", "failed")]
    for said, part in zip(why, ("NaN", "in place of", "MemoryError: no memory left", "entries"), strict=True):
        assert part in said


def test_a_node_killed_in_mid_round_costs_that_round_itself_alone(deployment):
    deployment.orders({"2": "sleep"})
    asleep = deployment.folder / f"{ROGUE}.asleep"
    deployment.submit("killed", rounds=3, minimum=2, timeout=15)
    deployment.until("killed", asleep.exists, "round 2 at the site")
    below = processes.children(deployment.nodes[ROGUE].pid)
    deployment.nodes[ROGUE].kill()
    deployment.finish("killed")
    rounds = deployment.events("killed", "round")
    assert [(event["round"], ROGUE in event["contributed"]) for event in rounds][:2] == [
        (1, True),
        (2, False),
    ]
    assert all("full" in e["contributed"] and "unlabelled" in e["contributed"] for e in rounds)
    (failed, *_) = deployment.events("killed", "failed")
    assert failed["site"] == ROGUE and failed["round"] == 2
    gone = time.monotonic() + LIMIT
    while any(map(processes.is_alive, below)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not any(map(processes.is_alive, below))  # its worker does not outlive it


def test_a_killed_server_resumes_from_its_last_round_and_ends_in_the_same_state(deployment):
    """With every site: whoever was killed before is back."""
    deployment.orders({})
    deployment.submit("resumed", rounds=6, every=2, minimum=3)
    deployment.until("resumed", lambda: len(deployment.events("resumed", "round")) >= 3, "three rounds")
    below = processes.children(deployment.link.pid)
    for pid in (deployment.link.pid, *below):
        os.kill(pid, signal.SIGKILL)
    deployment.link.wait()
    deployment.start_link()
    deployment.submit("resumed", rounds=6, every=2, minimum=3)
    deployment.finish("resumed")
    assert deployment.events("resumed", "resumed")[0]["round"] in (2, 4)
    assert_close(deployment.folder / "resumed" / "model.safetensors", simulated(deployment, 6))


def test_a_strangers_key_gets_in_nowhere(deployment):
    """It knocks for a while, and is told why."""
    deployment.stranger.wait(LIMIT)
    assert deployment.stranger.returncode != 0
    said = (deployment.folder / "stranger.log").read_text(errors="replace")
    assert "Exit Code: 305" in said and "its key is not admitted" in said
    assert "query message" not in said


def test_plain_http_to_the_tls_port_gets_in_nowhere(deployment):
    with socket.create_connection(("127.0.0.1", deployment.port), timeout=LIMIT) as line:
        line.sendall(b"POST /v1/fleet/register-node HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        answer = b""
        try:
            while part := line.recv(1000):
                answer += part
        except ConnectionResetError:
            pass
    assert b"HTTP/" not in answer
