"""A real federation on loopback, with TLS and keys: a SuperLink, three SuperNodes, and their failures."""

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import ssl
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import rogue
import small
import tomli_w
import torch
from PIL import Image
from small import call
from tunnel import Tunnel

import fedhassle
from fedhassle.data.site.folder import read_site
from fedhassle.data.site.validation import partition
from fedhassle.data.split.split import Split
from fedhassle.engine.rounds import Plan, federate, select
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.federation.agreement import (
    Address,
    Agreement,
    DataTerms,
    Rules,
    read_agreement,
    write_agreement,
)
from fedhassle.federation.audit_log import AuditLog
from fedhassle.federation.build import dataset_of, run_settings
from fedhassle.federation.flower import logs, patches, process_tree, processes
from fedhassle.federation.server import calls, host, keep
from fedhassle.federation.server.calls import register, registered, runs, stop
from fedhassle.federation.server.monitor import monitoring
from fedhassle.federation.setup.admission import admit_site, admitted, expel_site
from fedhassle.federation.setup.init import create_federation
from fedhassle.federation.setup.keys import make_site_key, read_public_key
from fedhassle.federation.setup.proxy import spare_loopback
from fedhassle.federation.site.configured import patient_secret
from fedhassle.federation.site.supervise import CANNOT_WORK
from fedhassle.files import wait_until_free
from fedhassle.method import Client
from fedhassle.settings.build import build_method, build_net

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

LIMIT = 600.0  # seconds to wait for anything
SITES = {"full": 208, "partial": 12, "unlabelled": 0}  # labelled images of at least forty
ROGUE, PROXIED = "partial", "unlabelled"
LATE = "unlabelled"  # a folder of images with 12 bits, whose labels come later


# A deployment


DATA = DataTerms(
    *(("a", "b", "c", "d"), 28, 28, 1, (0.5,), (0.25,)),
    **{
        "flip": True,
        "crop": 0,
        "validation": 0.2,
        "patients": "column",
        "intensities": "12 bits",
        "class_figures": 10,
    },
)


def agreement(address, rounds=3, every=3, minimum=2, timeout=LIMIT, required=(), bounds=None, **more):
    method = {"name": "hassle", "epochs": 1, "batch": 8, "residual_steps": 2}
    run = {"rounds": rounds, "evaluate_every": every, "seed": 5, "net": "lenet", "method": method} | more
    return Agreement(
        "loopback",
        address,
        DATA,
        run,
        Rules(minimum, timeout, LIMIT, required, **{"largest_share": 1.0} | (bounds or {})),
    )


class Deployment:
    """A server and its nodes, which can be started and killed."""

    labelled = SITES

    def __init__(self, folder):
        self.folder, self.port = folder, processes.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.files = create_federation(agreement(self.address), folder / "federation")
        self.stack, self.server, self.nodes = ExitStack(), ExitStack(), {}
        self.stack.enter_context(self.server)
        self.tunnel = self.stack.enter_context(Tunnel())
        rng = np.random.default_rng(0)
        centres = rng.integers(60, 196, (4, 28, 28, 1))
        for name, labelled in self.labelled.items():
            k = np.arange(max(40, labelled))
            y = k % 4
            x = np.clip(centres[y] + rng.normal(0, 25, (len(k), 28, 28, 1)), 0, 255).astype(np.uint8)
            np.savez(folder / f"{name}.npz", x=x, y=np.where(k < labelled, y, -1), patient=k // 4)
        (folder / LATE).mkdir()
        for k, image in enumerate(x[..., 0]):  # of the last one
            Image.fromarray(image.astype(np.uint16) << 4).save(folder / LATE / f"{k:02}.tif")
        patient_secret(folder)  # these nodes share a folder

    def data(self, name):
        return self.folder / (name if name == LATE else f"{name}.npz")

    def key(self, name):
        """Makes a site's key pair; returns its public key as a line."""
        make_site_key(self.files.site_key(name), self.files.site_public(name), name)
        return read_public_key(self.files.site_public(name))

    def start_link(self):
        self.server.close()
        self.link = self.server.enter_context(host.running_server(self.files))
        self.apply_admissions()

    def apply_admissions(self):
        return list(host.apply_admissions(calls.link_of(self.files), admitted(self.files.path)))

    def start_node(self, name, known_as=None):
        """Starts a node as `fedhassle federation node` does; that of ROGUE misbehaves when told.

        That of PROXIED has a proxy on its way to the server.
        """
        config, known_as = self.folder / f"{known_as or name}.toml", known_as or name
        about = {"site": name, "data": str(self.data(name)), "file": str(self.files.agreement)}
        key = self.files.site_key(known_as)
        about |= {"memory": str(self.folder / f"{name}.memory"), "key": str(key)}
        config.write_text(tomli_w.dumps(about))
        command = processes.supernode_command(self.address, self.files.ca, key, config)
        if name == ROGUE:
            command[2] = "rogue"
        log = self.folder / f"{known_as}.log"
        with pytest.MonkeyPatch.context() as patch:
            if name == PROXIED:
                command = [word.replace(self.address, f"localhost:{self.port}") for word in command]
                for variable in ("HTTPS_PROXY", "HTTP_PROXY"):
                    patch.setenv(variable, self.tunnel.url)
                for variable in ("NO_PROXY", "no_proxy"):
                    patch.setenv(variable, "")
                spare_loopback()
            return self.stack.enter_context(processes.running(command, self.folder / "flwr", log))

    def ensure_nodes(self):
        for name in SITES:
            if name not in admitted(self.files.path):
                continue
            if name not in self.nodes or self.nodes[name].poll() is not None:
                self.nodes[name] = self.start_node(name)

    def orders(self, orders):
        (self.folder / f"{ROGUE}.rogue").write_text(json.dumps(orders))

    def submit(self, name, agreed=None, **rules):
        """Starts a run; `agreed`: the images that sites were admitted with, by name."""
        self.ensure_nodes()
        self.before = len(self.events(name))
        write_agreement(agreement(self.address, **rules), self.folder / f"{name}.run" / "federation.toml")
        file = self.folder / f"{name}.run" / "federation.toml"
        for site, images in (agreed or {}).items():
            admit_site(file.parent, site, admitted(self.files.path)[site].key, images)
        return processes.submit(host.flower_home(self.files), file, self.folder / name)

    def events(self, name, *kinds):
        path = self.folder / name / "audit.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] in kinds or not kinds]

    def until(self, name, ready, what):
        """Waits for something in a run; fails with all logs if the run stops before."""
        deadline = time.monotonic() + LIMIT
        while not ready():
            stopped = [e for e in self.events(name)[self.before :] if e["event"] == "stopped"]
            if stopped or time.monotonic() > deadline or self.link.poll() is not None:
                logs = "\n".join(
                    f"{p.name}: {processes.last_lines(p, 30)}" for p in self.folder.rglob("*.log")
                )
                pytest.fail(f"{what} did not happen: {stopped}\n{self.events(name)}\n{logs}")
            time.sleep(0.1)

    def finish(self, name):
        self.until(name, lambda: self.events(name, "finished"), "the end")


def with_rogue(patch):
    """Lets processes import the node that misbehaves."""
    here = [str(Path(rogue.__file__).parent), str(Path(fedhassle.__file__).parents[1])]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*here, os.environ.get("PYTHONPATH")])))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    with pytest.MonkeyPatch.context() as patch:
        with_rogue(patch)
        made = Deployment(folder)
        with made.stack:
            for name in SITES:
                admit_site(made.files.path, name, made.key(name))
            made.start_link()
            made.ensure_nodes()
            made.key("stranger")
            made.stranger = made.start_node("full", "stranger")
            yield made


def simulated(deployment, rounds):
    """The model of the same federation in this process, after these rounds."""
    agreed = read_agreement(deployment.files.agreement)
    images, labels, parts, start = [], [], [], 0
    for name in sorted(SITES):
        site = read_site(deployment.data(name), agreed.data.form, secret=patient_secret(deployment.folder))
        uses = partition(site.x, site.y, agreed.data.validation, site.patients)
        if site.patients is not None:
            trained = {*site.patients[uses.labelled], *site.patients[uses.unlabelled]}
            assert len(uses.validation) > 0 and not trained & {*site.patients[uses.validation]}
        parts.append([rows + start for rows in uses[:2]])
        images.append(site.x)
        labels.append(site.y)
        start += len(site.y)
    data, settings = dataset_of(agreed, np.concatenate(images), np.concatenate(labels)), run_settings(agreed)
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


# Runs


def test_three_rounds_equal_three_rounds_of_the_simulator(deployment):
    deployment.submit("equal", {"full": 208, "partial": 40}, minimum=3)
    deployment.finish("equal")
    assert_close(deployment.folder / "equal" / "model.safetensors", simulated(deployment, 3))
    rounds = deployment.events("equal", "round")
    assert [event["contributed"] for event in rounds] == [sorted(SITES)] * 3
    assert set(deployment.tunnel.targets) == {f"localhost:{deployment.port}"}
    (line,) = small.metrics_of(deployment.folder / "equal")
    assert set(line["sites"]) == {"full", "partial"}  # a site without labels cannot evaluate
    assert all(1 <= site["effective"] <= site["count"] for site in line["sites"].values())
    figures = line["sites"]["full"]  # ten images of each class; the other site has too few
    assert figures["recall"].keys() == figures["class_auroc"].keys() == {*"abcd"}
    assert 0.5 < figures["auroc"] <= 1 and "recall" not in line["sites"]["partial"]
    joined = {event["site"]: event for event in deployment.events("equal", "joined")}
    assert [joined[name].get("patients") for name in ("full", "partial", LATE)] == [52, 10, None]
    model = fedhassle.load(deployment.folder / "equal")
    assert model.intensities.text == "12 bits" and model.about["sites"]["patients"] == 62
    card = (deployment.folder / "equal" / "model.md").read_text()
    assert "of 62 patients, of at most 248 images agreed at admission at 2 sites; without" in card
    assert "of 1 site, whose number nobody has verified" in card and "| full | 40 |" in card


def test_a_required_site_takes_part_in_every_round(deployment):
    """By chance alone, some of these rounds would not ask it. A site with too many images takes no part."""
    there = sorted({*SITES} - {LATE})
    drawn = [select([Client(name, 1, 1) for name in there], Plan(4, 1, 5), t) for t in range(1, 5)]
    missed = next(name for name in there if any(name != client.name for (client,) in drawn))
    rules = {"minimum": 1, "required": (missed,), "clients_per_round": 1}
    deployment.orders({})
    deployment.submit("required", {LATE: 39}, rounds=4, every=4, **rules)
    deployment.finish("required")
    assert all(missed in event["contributed"] for event in deployment.events("required", "round"))
    (refused,) = deployment.events("required", "refused")
    assert refused["site"] == LATE and "counts 40 images, but was admitted with 39" in refused["why"]


GARBAGE = {  # what the rogue does in each round, and what the server says about it
    "nan": "NaN",
    "names": "instead of",
    "raise": "MemoryError: no memory left",
    "shapes": "entries",
    "huge": "more than 100 times the usual",
    "thousandfold": "more than 100 times the usual",
    "path": "FileNotFoundError: [Errno 2] No such file or directory: '…'",
    "plan": "the server asks for method.batch=65536, method.lr=1.0, method.momentum=0.0, but",
}


def test_a_node_that_sends_garbage_costs_the_rounds_that_node_only(deployment):
    """Finite poison too; in the last round it is clipped, and an evaluation on 10¹² images does not count."""
    last = len(GARBAGE) + 1
    orders = {str(t): what for t, what in enumerate(GARBAGE, 1)}
    deployment.orders({**orders, str(last): "fifteenfold", "evaluate": "billions"})
    deployment.submit("garbage", rounds=last, every=last, minimum=2)
    deployment.finish("garbage")
    rounds = deployment.events("garbage", "round")
    assert [event["failed"] for event in rounds] == [[ROGUE]] * len(GARBAGE) + [[]]
    *why, evaluated = [event["why"] for event in deployment.events("garbage", "failed")]
    for said, part in zip(why, GARBAGE.values(), strict=True):
        assert part in said and "Miller" not in said and str(deployment.folder) not in said
    (clipped,) = deployment.events("garbage", "clipped")
    assert (clipped["site"], clipped["round"]) == (ROGUE, last) and "w_S from norm" in clipped["what"]
    assert "1,000,000,000,000 images, but joined with" in evaluated
    (line,) = small.metrics_of(deployment.folder / "garbage")
    assert set(line["sites"]) == {"full"}
    assert "nobody has verified" in (deployment.folder / "garbage" / "model.md").read_text("utf-8")
    see_site_log(deployment)


def see_site_log(deployment):
    """The site's own audit log: who asked, what was sent, and how many bytes, in every round."""
    log = AuditLog(deployment.folder / f"{ROGUE}.memory" / "audit.jsonl").read()
    (run,) = {event["run"] for event in deployment.events("garbage", "created")}
    of_run = [event for event in log if event.get("run") == run]
    mine = [event for event in of_run if event["kind"] != "query"]
    assert of_run[0]["kind"] == "query" and "round" not in of_run[0]  # it introduced itself first
    asked = [(event["kind"], event["round"]) for event in mine]
    last = len(GARBAGE) + 1
    assert asked == [*(("train", t) for t in range(1, last + 1)), ("evaluate", last)]
    assert {event["asked_by"] for event in mine} == {f"loopback at {deployment.address}"}
    failed = [event["round"] for event in mine if event["event"] == "failed"]
    assert failed == [t for t, what in enumerate(GARBAGE, 1) if what in ("raise", "path", "plan")]
    assert all(bool(e["arrays"]) == (e["event"] == "answered") for e in mine if e["kind"] == "train")
    size = sum(4 * n for n in mine[0]["arrays"].values())
    assert size < mine[0]["sent_bytes"] < size + 1000


def test_rounds_that_spoil_the_model_are_undone(deployment):
    """Poison that no bound stops, in round 4 of 6: the model of round 2 stays, and rounds 5 and 6 improve it.

    The rogue's own evaluation does not count, so one site with forty images decides.
    """
    deployment.orders({"4": "opposite", "evaluate": "alone"})
    bounds = {"clip_above": 0.0, "refuse_above": 0.0, "worst_drop": 0.1}
    deployment.submit("undone", rounds=6, every=2, minimum=3, bounds=bounds)
    deployment.finish("undone")
    (event,) = deployment.events("undone", "undone")
    before, spoilt, after = small.metrics_of(deployment.folder / "undone")
    assert (event["round"], event["to"]) == (4, 2) and event["accuracy"] == spoilt["undone"]
    assert spoilt["accuracy"] == before["accuracy"] and spoilt["sites"] == before["sites"]
    assert before["accuracy"]["EM"] - spoilt["undone"]["EM"] > 0.1
    assert after["accuracy"]["EM"] >= before["accuracy"]["EM"] and "undone" not in after
    assert "round 4 is undone: EM is" in (deployment.folder / "undone" / "log.txt").read_text("utf-8")
    assert fedhassle.load(deployment.folder / "undone").about["round"] in (2, 6)


def test_a_node_killed_in_mid_round_costs_the_round_that_node_only(deployment):
    deployment.orders({"2": "sleep"})
    asleep = deployment.folder / f"{ROGUE}.asleep"
    deployment.submit("killed", rounds=3, minimum=2)
    deployment.until("killed", asleep.exists, "round 2 at the site")
    below = process_tree.descendants(deployment.nodes[ROGUE].pid)
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
    while any(map(process_tree.is_alive, below)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not any(map(process_tree.is_alive, below))  # its worker ends with it


def test_a_killed_server_resumes_from_its_last_round_and_ends_in_the_same_state(deployment):
    """With every site, including the one that was killed before."""
    deployment.orders({})
    deployment.submit("resumed", rounds=6, every=2, minimum=3)
    deployment.until("resumed", lambda: len(deployment.events("resumed", "round")) >= 3, "three rounds")
    for one in (psutil.Process(deployment.link.pid), *process_tree.descendants(deployment.link.pid)):
        one.kill()
    deployment.link.wait()
    deployment.start_link()
    deployment.submit("resumed", rounds=6, every=2, minimum=3)
    deployment.finish("resumed")
    assert deployment.events("resumed", "resumed")[0]["round"] in (2, 4)
    assert_close(deployment.folder / "resumed" / "model.safetensors", simulated(deployment, 6))


def test_a_locked_database_and_dead_programs_cost_no_site_a_round(deployment):
    """A backup locks the database for longer than Flower waits for it; then the run's programs are killed."""
    keeper, log = keep.RunKeeper(deployment.files), host.server_log(deployment.files)
    deployment.orders({})
    deployment.submit("troubled", rounds=8, every=2, minimum=3)
    deployment.until("troubled", lambda: deployment.events("troubled", "done"), "a round")
    assert keeper.look() == []
    database = sqlite3.connect(deployment.files.server / "state.db", LIMIT, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    locked = "locked by another program"
    deployment.until("troubled", lambda: locked in log.read_text(errors="replace"), "a lock that was noticed")
    _, out, _ = call("federation", "status", deployment.files.path)
    assert f"cannot answer now: the server's database is {locked}" in " ".join(out.split())
    time.sleep(5)  # until every part has met it
    database.execute("ROLLBACK")
    database.close()
    before = len(deployment.events("troubled", "round"))
    more = lambda: len(deployment.events("troubled", "round")) > before + 1  # noqa: E731
    deployment.until("troubled", more, "rounds after the lock")
    below = filter(process_tree.is_alive, process_tree.descendants(deployment.link.pid))
    (starter,) = [one for one in below if patches.SUPEREXEC in one.cmdline()]
    starter.kill()
    deadline, said = time.monotonic() + LIMIT, []
    while not said and time.monotonic() < deadline:
        said = keeper.look()
        time.sleep(0.5)
    assert "has ended unexpectedly; resuming it" in said[0]
    deployment.before = len(deployment.events("troubled"))
    deployment.finish("troubled")
    assert_close(deployment.folder / "troubled" / "model.safetensors", simulated(deployment, 8))
    rounds = deployment.events("troubled", "round")
    assert [event["contributed"] for event in rounds] == [sorted(SITES)] * len(rounds)
    assert all(node.poll() is None for node in deployment.nodes.values())
    told = " ".join(logs.last_warnings(log, 10))
    for part in (locked, "works again", "the program that starts runs has ended", "resuming it"):
        assert part in told


def test_a_run_does_not_outlive_its_server(deployment):
    """If the server is killed, its run frees its folder and logs the reason."""
    deployment.orders({})
    deployment.submit("left", rounds=50, minimum=3)
    deployment.until("left", lambda: deployment.events("left", "done"), "a round")
    below = [one for one in process_tree.descendants(deployment.link.pid) if process_tree.is_alive(one)]
    coordinator = [one for one in below if "flwr-serverapp" in " ".join(one.cmdline())]
    for one in {psutil.Process(deployment.link.pid), *below} - set(coordinator):
        one.kill()
    deployment.link.wait()
    wait_until_free(deployment.folder / "left", LIMIT)
    (said,) = deployment.events("left", "stopped")
    assert coordinator and said["why"] == "the server's process has ended"
    deployment.start_link()


def test_a_key_that_is_not_admitted_is_refused(deployment):
    """Its node retries for a while, is told what to do, and must not be restarted."""
    deployment.stranger.wait(LIMIT)
    assert deployment.stranger.returncode == CANNOT_WORK
    said = (deployment.folder / "stranger.log").read_text(errors="replace")
    assert "Exit Code: 305" in said and "the server does not admit this key (SHA256:" in said
    assert "query message" not in said


def test_plain_http_to_the_tls_port_is_refused(deployment):
    with socket.create_connection(("127.0.0.1", deployment.port), timeout=LIMIT) as line:
        line.sendall(b"POST /v1/fleet/register-node HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        answer = b""
        try:
            while part := line.recv(1000):
                answer += part
        except ConnectionResetError:
            pass
    assert b"HTTP/" not in answer


UPLOAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n"
STRANGE = {  # what a stranger begins to send to the server, in two pieces, and the status of its answer
    "body": (UPLOAD, b"Content-Length: 400000000\r\n\r\n", 413),
    "header": (UPLOAD + b"X-A: " + b"a" * 60_000, b"a" * 16_000, 400),
    "path": (b"POST /" + b"a" * 60_000, b"a" * 16_000, 400),
}


@pytest.mark.parametrize("part", STRANGE)
def test_a_strangers_large_request_is_refused_before_it_is_read(deployment, part):
    """The server answers without reading it: its memory does not grow."""
    *pieces, status = STRANGE[part]
    context = ssl.create_default_context(cafile=deployment.files.ca)
    server = psutil.Process(deployment.link.pid)
    before = most = server.memory_info().rss
    with (
        socket.create_connection(("127.0.0.1", deployment.port), timeout=LIMIT) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        for piece in pieces:
            line.sendall(piece)
        answer = line.recv(100)
        with contextlib.suppress(OSError):  # it may close the connection
            for _ in range(400):
                line.sendall(bytes(1_000_000))
                most = max(most, server.memory_info().rss)
    assert b" %d " % status in answer and most - before < 100_000_000


def test_a_stopped_run_frees_its_folder_and_can_be_resumed(deployment):
    """With all three sites: otherwise it would continue without one that is slow to return."""
    link = calls.link_of(deployment.files)
    number = deployment.submit("stopped", rounds=4, minimum=3)
    deployment.until("stopped", lambda: deployment.events("stopped", "done"), "a round")
    (known,) = [run for run in runs(link) if run.id == number]
    assert known.alive and known.folder == str(deployment.folder / "stopped")
    stop(link, number)
    wait_until_free(deployment.folder / "stopped", LIMIT)
    (known,) = [run for run in runs(link) if run.id == number]
    assert known.status == "finished:stopped"
    (said,) = deployment.events("stopped", "stopped")
    assert said["why"] == "it was asked to stop"
    deployment.submit("stopped", rounds=4, minimum=3)
    deployment.finish("stopped")
    assert_close(deployment.folder / "stopped" / "model.safetensors", simulated(deployment, 4))


def test_labels_that_come_later_are_counted_and_used_and_the_run_goes_on(deployment):
    """A wrong label changes nothing; the node says so, and takes the file when it is right.

    A node that is restarted then still validates on nothing: the run has trained on all of its images. The
    names of patients, which come with the labels, are in no other file, be it a log or a database.
    """
    deployment.orders({})
    number = deployment.submit("late", rounds=1000, every=1, minimum=3)
    deployment.until("late", lambda: deployment.events("late", "done"), "a round")
    log = deployment.folder / f"{LATE}.log"
    label_late(deployment, "z")
    deployment.until("late", lambda: "'z' is not one of the classes" in log.read_text(), "the complaint")
    label_late(deployment, "a")
    deployment.until("late", lambda: deployment.events("late", "relabelled"), "the new count")
    see_status(deployment)
    (event,) = deployment.events("late", "relabelled")
    assert [event[key] for key in ("site", "labelled", "unlabelled", "validation")] == [LATE, 20, 20, 0]
    last = deployment.events("late", "done")[-1]["round"]
    deployment.until("late", lambda: deployment.events("late", "done")[-1]["round"] >= last + 2, "two rounds")
    stop(calls.link_of(deployment.files), number)
    wait_until_free(deployment.folder / "late", LIMIT)
    assert all(e["contributed"] == sorted(SITES) for e in deployment.events("late", "round"))
    assert "trained w_S" in log.read_text()
    deployment.nodes[LATE].terminate()
    deployment.nodes[LATE].wait()
    number = deployment.submit("late", rounds=1000, every=1, minimum=3)
    deployment.until("late", lambda: joined_late(deployment)[1:], "the restarted node")
    stop(calls.link_of(deployment.files), number)
    wait_until_free(deployment.folder / "late", LIMIT)
    *_, event = joined_late(deployment)
    assert [event[key] for key in ("labelled", "unlabelled", "validation")] == [20, 20, 0]
    assert event["patients"] == 5 and event["validation_patients"] == 0
    assert files_with(b"Erika", deployment.folder) == [deployment.folder / LATE / "labels.csv"]


def see_status(deployment):
    """The metrics of a server that trains: all sites are online, rounds pass, and the new labels count."""
    with monitoring(deployment.files, Address("127.0.0.1", 0), "EM") as monitor:
        place = f"http://127.0.0.1:{monitor.server_address[1]}"

        def shown(line):
            try:
                return line in urllib.request.urlopen(f"{place}/metrics").read().decode()
            except urllib.error.HTTPError:  # not ready yet
                return False

        for line in (
            *(f'fedhassle_site_online{{site="{name}"}} 1.0\n' for name in SITES),
            *("fedhassle_up 1.0\n", "fedhassle_run_active 1.0\n", "fedhassle_run_rounds 1000.0\n"),
            f'fedhassle_site_images{{site="{LATE}",use="labelled"}} 20.0\n',
        ):
            deployment.until("late", lambda line=line: shown(line), line)
        page = urllib.request.urlopen(place).read().decode()
        assert "The server answers" in page and page.count("online</span>") == len(SITES)


def files_with(word, folder):
    """The files that contain a word; others may vanish meanwhile."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and word in path.read_bytes():
                found.append(path)
    return found


def joined_late(deployment):
    return [event for event in deployment.events("late", "joined") if event["site"] == LATE]


def label_late(deployment, label):
    """Labels half of a site's images, ten seconds ago: its node waits until a file no longer changes."""
    rows = (f"{k:02}.tif,{label if k == 0 else 'abcd'[k % 4]},Erika {k // 4}" for k in range(20))
    lines = ["file,label,patient", *rows]
    file, then = deployment.folder / LATE / "labels.csv", time.time() - 10
    file.with_suffix(".new").write_text("\n".join(lines))
    os.utime(file.with_suffix(".new"), (then, then))
    file.with_suffix(".new").replace(file)


def test_a_site_expelled_in_mid_round_is_out(deployment):
    """The round does not wait for it; its key is refused from now on, under any name."""
    link, gone = calls.link_of(deployment.files), deployment.files.path
    (deployment.folder / f"{ROGUE}.asleep").unlink(missing_ok=True)
    deployment.orders({"2": "sleep"})
    deployment.submit("expelled", rounds=3, minimum=2)
    deployment.until("expelled", (deployment.folder / f"{ROGUE}.asleep").exists, "round 2 at the site")
    key = expel_site(gone, ROGUE).key
    assert (
        deployment.apply_admissions() == [f"{ROGUE} is no longer admitted"]
        and deployment.apply_admissions() == []
    )
    deployment.finish("expelled")
    there = [ROGUE in event["contributed"] for event in deployment.events("expelled", "round")]
    assert there == [True, False, False]
    assert {node.name for node in registered(link)} == set(SITES) - {ROGUE}
    with pytest.raises(UserError, match="already in use"):
        register(link, "another", key)


def test_a_node_that_starts_before_its_server_waits_and_needs_no_labels(deployment):
    """Its images lie in nested folders that stand for no class; the commands are those of a new site."""
    deployment.server.close()
    deployment.link.wait()
    images = deployment.folder / "wards"
    with np.load(deployment.folder / f"{LATE}.npz") as file:
        for k, image in enumerate(file["x"][..., 0]):
            (images / "2024" / f"ward-{k % 3}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(images / "2024" / f"ward-{k % 3}" / f"{k:02}.png")
    place = deployment.folder / "wards.site"
    place.mkdir()
    for file in (deployment.files.agreement, deployment.files.ca):
        shutil.copy(file, place)
    words = ("--data", images, "--labels", "none")
    code, out, err = call("federation", "join", place, "--name", "wards", *words)
    assert (code, err) == (0, "") and "tell the coordinator over the telephone: 40 images" in out
    said = deployment.folder / "wards.out"
    command = [sys.executable, "-m", "fedhassle", "federation", "node", "--federation", place, *words]
    node = deployment.stack.enter_context(processes.running([str(word) for word in command], None, said))
    processes.wait_for(lambda: "waiting for the server" in said.read_text(), node, said, LIMIT, "the node")
    where = ("--federation", deployment.files.path)
    assert call("federation", "admit", "wards", place / "wards.pub", "--images", 40, *where)[0] == 0
    deployment.start_link()
    deployment.submit("wards", rounds=2, every=2, minimum=3, required=("wards",))
    deployment.finish("wards")
    (joined,) = (event for event in deployment.events("wards", "joined") if event["site"] == "wards")
    assert [joined[key] for key in ("labelled", "unlabelled", "validation")] == [0, 40, 0]
    assert all("wards" in event["contributed"] for event in deployment.events("wards", "round"))
    assert "wards joins loopback at" in said.read_text()
