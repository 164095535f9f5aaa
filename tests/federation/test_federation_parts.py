"""The parts of a federation: messages, audit log, validation shares, access, processes."""

import asyncio
import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import federations
import httpx
import numpy as np
import psutil
import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from flwr.proto.message_pb2 import ObjectTree
from flwr.serverapp import ServerApp
from flwr.supercore.heartbeat import HeartbeatSender
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small import LIMIT

from fedhassle.errors import UserError
from fedhassle.federation.agreement import write_agreement
from fedhassle.federation.flower import database, patches, process_tree, processes
from fedhassle.federation.flower.transport import FlowerTransport, SiteRequest, from_records, to_records
from fedhassle.federation.messages import (
    Payload,
    RefusedError,
    coarse,
    from_json,
    packed,
    read_hits,
    unpacked,
)
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.calls import pem
from fedhassle.federation.server.serverapp import Admissions
from fedhassle.federation.server.superlink import LocalControl
from fedhassle.federation.setup.admission import admit_site
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.federation.setup.keys import fingerprint, make_site_key, read_public_key
from fedhassle.federation.site import supernode
from fedhassle.federation.site.configured import site_node
from fedhassle.federation.site.supervise import CANNOT_WORK

NAN, INFINITE = float("nan"), float("inf")
FLOATS = st.floats(width=32)


# Messages


@given(st.dictionaries(st.text(max_size=5), st.lists(FLOATS, max_size=8), max_size=3))
def test_vectors_arrive_bit_for_bit(values):
    vectors = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
    there = from_records(to_records(Payload({"n": 1}, packed(vectors, {}))))
    arrived = unpacked(there.arrays, {})
    assert there.words == {"n": 1} and list(arrived) == list(vectors)  # in their order, too
    for name, vector in vectors.items():
        assert torch.equal(arrived[name].view(torch.int32), vector.view(torch.int32))


@given(st.lists(st.tuples(FLOATS, st.none() | FLOATS), max_size=20))
def test_sparse_changes_arrive_as_the_changed_vector(pairs):
    """An entry is (before, after), after = None if it stays; NaN is sent again, since it equals nothing."""
    before = torch.tensor([b for b, _ in pairs], dtype=torch.float32)
    after = torch.tensor([b if a is None else a for b, a in pairs], dtype=torch.float32)
    made = packed({"w": after}, {"w": before})
    arrived = unpacked(made, {"w": before})["w"]
    assert torch.equal(arrived.nan_to_num(7), after.nan_to_num(7))
    differ = int((before != after).sum())
    assert ("index w" in made) == (2 * differ < len(pairs))
    assert sum(len(part) for part in made.values()) <= len(pairs)


def test_a_vector_of_another_length_is_sent_whole():
    assert list(packed({"w": torch.ones(3)}, {"w": torch.ones(4)})) == ["whole w"]


def test_writing_to_a_received_vector_does_not_change_the_sent_one():
    vector = torch.ones(3)
    arrived = unpacked(packed({"w": vector}, {}), {})["w"]
    arrived.add_(1)
    assert vector.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"words": ConfigRecord({"words": "{}"})}),
        RecordDict({"words": ConfigRecord({"words": "{}"}), "arrays": ArrayRecord([np.ones(3)])}),
        RecordDict({"words": ConfigRecord({"words": 3}), "arrays": ConfigRecord({"arrays": b""})}),
        RecordDict(
            {"words": ConfigRecord({"words": "{}"}), "arrays": ConfigRecord({"arrays": b"\x80\x04K."})}
        ),
        RecordDict({"words": ConfigRecord({"words": "[]"}), "arrays": ConfigRecord({"arrays": b""})}),
    ],
)
def test_unexpected_records_are_refused(records):
    with pytest.raises(RefusedError):
        from_records(records)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": NaN}', '{"a": -Infinity}', "[" * 100_000])
def test_anything_but_a_json_object_is_refused(text):
    with pytest.raises(RefusedError):
        from_json(text)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"right": {}, "count": 3},
        {"right": {"model": 4}, "count": 3},
        {"right": {"model": -1}, "count": 3},
        {"right": {"model": 0}, "count": 0},
        {"right": {"model": 3}, "count": 4},
        {"right": {"model": 3}, "count": 10**12},
        {"right": {"model": 0.5}, "count": 3},
        {"right": [1], "count": 3},
        {"right": {"other": 3}, "count": 3},
        {"right": {"model": 3, "other": 3}, "count": 3},
    ],
)
def test_impossible_hits_are_refused(words):
    assert read_hits({"right": {"model": 3}, "count": 3}, 3, ["model"]).right == {"model": 3}
    with pytest.raises(RefusedError):
        read_hits(words, 3, ["model"])


def test_counts_in_powers_of_two():
    assert [coarse(n) for n in (0, 1, 2, 3, 5, 6, 100, 1000)] == [0, 1, 2, 4, 4, 8, 128, 1024]


# The audit log


def test_the_audit_log_knows_the_last_round_of_each_site(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl")
    for t, names in ((1, ["a", "b"]), (2, ["b"]), (3, ["a"])):
        audit.write("round", round=t, contributed=names, failed=[])
    assert audit.contributions(3) == {"a": 3, "b": 2}
    assert audit.contributions(2) == {"a": 1, "b": 2}
    audit.write("resumed", round=1)
    assert audit.contributions(9) == {"a": 1, "b": 1}
    audit.write("round", round=2, contributed=["a"], failed=["b"])
    assert audit.contributions(9) == {"a": 2, "b": 1}


def test_a_cut_off_line_of_the_audit_log_harms_no_other(tmp_path):
    path = tmp_path / "audit.jsonl"
    Audit(path).write("round", round=1, contributed=["a"], failed=[])
    path.write_text(path.read_text() + '{"event": "rou')
    before = path.read_bytes()
    assert (
        len(Audit(path).read()) == 1 and path.read_bytes() == before
    )  # its writer may still be working on it
    Audit(path).write("round", round=2, contributed=["b"], failed=[])
    assert [event["round"] for event in Audit(path).read()] == [1, 2]


def test_a_line_of_the_audit_log_is_on_disk_before_the_run_continues(tmp_path, monkeypatch):
    path, synced = tmp_path / "audit.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.read_bytes())))
    Audit(path).write("finished")
    assert synced == [(path.stat().st_ino, path.read_bytes())] and path.read_bytes().endswith(b"\n")


# Patches of Flower


def test_the_patched_parts_of_flower_exist():
    """If a version of Flower has changed them, the patches need another look."""
    for name in (patches.SUPERNODE, patches.SERVER_GRID):
        backoff = inspect.signature(import_module(name).pull_objects).parameters
        assert {"initial_backoff", "backoff_cap"} <= backoff.keys()
    assert import_module(patches.SUPERNODE).time is time
    source = inspect.getsource(import_module(patches.SUPERNODE))
    assert source.count("time.sleep(3)") == 1 and source.count("time.sleep(0.5)") == 2
    retries = import_module(patches.RETRIES)
    assert isinstance(retries._RETRYABLE_STATUS_CODES, frozenset) and retries.MAX_RETRY_DELAY > 0
    cli = inspect.getsource(import_module("flwr.supernode.cli.flower_supernode"))
    assert f'name="{supernode.API}"' in cli
    assert callable(import_module(patches.FLEET).activate_node) and callable(HeartbeatSender._heartbeat)
    for module, names in database.WRITING.items():
        for name in names:
            assert list(inspect.signature(getattr(module, name)).parameters)[:2] == ["request", "state"]


class Outbox:
    """A SuperNode's store of messages; the worker answers one message per look."""

    def __init__(self):
        self.msg_store, self.lock_msg_store, self.to_do = {}, threading.Lock(), []

    def store(self, name, run, answers=""):
        metadata = SimpleNamespace(
            run_id=run, message_id=name, reply_to_message_id=answers, group_id="", message_type="query"
        )
        self.msg_store[name] = SimpleNamespace(message=SimpleNamespace(metadata=metadata))
        if not answers:
            self.to_do.append((name, run))

    def get_messages_legacy(self, is_reply):
        entries = [e.message for e in self.msg_store.values() if e.message.metadata.reply_to_message_id]
        if self.to_do:  # the next answer arrives a moment later
            name, run = self.to_do.pop(0)
            self.store(f"answer to {name}", run, answers=name)
        return entries

    def get_message_processing_duration(self, message_id):
        return 0.0

    def delete_messages(self, message_ids):
        for name in message_ids:
            self.msg_store.pop(name, None)


@pytest.mark.parametrize("patched", [False, True])
def test_an_answer_left_over_from_a_stopped_run_delays_no_other(patched):
    """Unpatched, Flower sends each answer only after the next message has arrived."""
    own = import_module(patches.SUPERNODE)._push_messages
    push, state, sent = patches.push_until_sent(own) if patched else own, Outbox(), []

    def send(message, tree, seconds):
        sent.append(message.metadata.message_id)
        return set(), "session"

    store = SimpleNamespace(get_object_tree=lambda name: ObjectTree(), delete=lambda name: None)
    state.store("late", run=1)
    state.get_messages_legacy(is_reply=True)  # answered, but its run is stopped: nothing is sent
    for name in ("hello", "train"):
        state.store(name, run=2)
        push(state=state, object_store=store, send=send, push_object=None)
    answered = ["answer to late", "answer to hello"]
    assert sent == [*answered, "answer to train"] if patched else sent == answered


def refusing(code, extra=None):
    content = {"code": code, "detail": "no"} | ({} if extra is None else {"extra": extra})
    response = httpx.Response(400, text=json.dumps(content))
    return httpx.HTTPStatusError("no", request=httpx.Request("POST", "https://x"), response=response)


def test_a_restarted_node_retries_until_the_superlink_notices_that_it_was_gone(monkeypatch):
    """A key that counts as online is tried without end, one that is not admitted for a while."""
    now, tries = [0.0], []
    monkeypatch.setattr(patches.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patches.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def activate(client, request):
        tries.append(request)
        if now[0] < 600:
            raise refusing(patches.NOT_ACTIVATED, patches.ONLINE_ALREADY)
        return "in"

    told = []
    on_refused = partial(told.append, "refused")
    assert patches.retry_activation(activate, on_refused)("client", "request") == "in" and len(tries) == 201
    with pytest.raises(httpx.HTTPStatusError):  # no retry for other reasons
        patches.retry_activation(lambda: (_ for _ in ()).throw(refusing(2001)), on_refused)()
    assert now[0] == pytest.approx(600, abs=2 * patches.RETRY_EVERY) and told == []
    with pytest.raises(httpx.HTTPStatusError):  # and not for ever
        patches.retry_activation(lambda: (_ for _ in ()).throw(refusing(patches.NOT_ACTIVATED)), on_refused)()
    assert now[0] == pytest.approx(600 + patches.RETRY_FOR, abs=2 * patches.RETRY_EVERY) and told == [
        "refused"
    ]


def test_a_node_whose_key_is_not_admitted_says_what_to_do_and_is_not_restarted(tmp_path, monkeypatch):
    key, lines = tmp_path / "north.key", []
    make_site_key(key, tmp_path / "north.pub", "north")
    words = ["--auth-supernode-private-key", str(key)]
    monkeypatch.setattr(sys, "argv", ["supernode", *words])
    monkeypatch.setattr(supernode, "keep_worker", lambda words: threading.Event())
    for name in ("log_to_output", "watch_api"):
        monkeypatch.setattr(supernode, name, lambda **words: None)
    monkeypatch.setattr(supernode, "leave", sys.exit)
    monkeypatch.setattr(supernode.log, "error", lambda *words: lines.append(words[0] % words[1:]))
    patched = []
    monkeypatch.setattr(supernode, "patch_supernode", patched.append)

    def flower():
        patched[0]()  # as its activation is refused for good
        raise SystemExit(1)

    monkeypatch.setattr(supernode, "flower_supernode", flower)
    with pytest.raises(SystemExit) as ended:
        supernode.main()
    shown = fingerprint(read_public_key(tmp_path / "north.pub"))
    assert ended.value.code == CANNOT_WORK and lines == [
        f"the server does not admit this key ({shown}): send north.pub to the coordinator, who runs: "
        "fedhassle federation admit north north.pub"
    ]


def test_polling_intervals_grow_with_the_time_waited(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(patches.time, "monotonic", lambda: now[0])
    backoff = patches.Backoff(fastest=0.1, slowest=3.0)
    seen = []
    for now[0] in (0.0, 10.0, 1000.0):
        seen.append(backoff.interval())
    assert seen == [0.1, 0.5, 3.0]
    backoff.reset()
    assert backoff.interval() == 0.1


# Access to the SuperLink


def status_of(path, client, server="10.0.0.1"):
    """The status of a request."""
    passed, sent = [], []

    async def inside(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "client": client and (client, 1), "server": (server, 2)}
    asyncio.run(LocalControl(inside)(scope, None, send))
    return 200 if passed else sent[0]["status"]


@pytest.mark.parametrize(
    "path", ["/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/v1/fleet"]
)
def test_the_coordinators_part_answers_this_machine_only(path):
    assert status_of(path, "127.0.0.1") == status_of(path, "::1") == 200
    assert status_of(path, "10.0.0.1") == 200  # the machine by its own address
    for stranger in ("10.0.0.2", "fe80::1", "unix", None):
        assert status_of(path, stranger) == 403


def test_the_sites_part_answers_everyone():
    assert status_of("/v1/fleet/pull-messages", "10.0.0.2") == 200


# Processes


def test_the_answer_of_a_command_is_found_after_other_output():
    assert processes.json_in('Loading… {not json}\n{"success": true, "runs": [{"a": 1}]}\n') == {
        "success": True,
        "runs": [{"a": 1}],
    }
    assert processes.json_in("nothing here") == {}


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path):
    with pytest.raises(UserError, match="flwr supernode list failed"):
        processes.flwr(tmp_path, "supernode", "list", "nowhere")


SLEEP = "import time; time.sleep(999)"


def parent(then, **how):
    """A program that starts a child, prints its id, and continues."""
    child = f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], **{how!r})"
    return [sys.executable, "-c", f"import subprocess, sys; {child}; print(child.pid, flush=True); {then}"]


def child_of(process, log):
    processes.wait_for(lambda: log.read_text().endswith("\n"), process, log, LIMIT, "it")
    return psutil.Process(int(log.read_text()))


@pytest.mark.parametrize("how", [{}, {"start_new_session": True}], ids=["in its group", "in another"])
def test_a_child_is_ended_in_any_process_group(how, tmp_path):
    log = tmp_path / "log.txt"
    with processes.running(parent(SLEEP, **how), tmp_path, log) as process:
        child = child_of(process, log)
        assert process_tree.descendants(process.pid) == [child] and process_tree.is_alive(child)
    assert process.poll() is not None and not process_tree.is_alive(child)


def test_a_child_is_ended_after_its_parent_has_ended(tmp_path):
    log = tmp_path / "log.txt"
    with processes.running(parent("pass"), tmp_path, log) as process:
        assert process.wait(LIMIT) == 0
        child = psutil.Process(int(log.read_text()))
        assert process_tree.is_alive(child)
    assert not process_tree.is_alive(child)


def test_a_process_that_leads_no_group_is_ended_alone():
    """It is in this process's group, which must survive."""
    process, beside = (subprocess.Popen([sys.executable, "-c", SLEEP]) for _ in range(2))
    try:
        process_tree.end(process)
        assert process.poll() is not None and beside.poll() is None
    finally:
        beside.kill()
        beside.wait()


def test_a_zombie_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    zombie, deadline = psutil.Process(process.pid), time.monotonic() + LIMIT
    while process_tree.is_alive(zombie) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert zombie.status() == psutil.STATUS_ZOMBIE and not process_tree.is_alive(zombie)
    assert process.wait() == 0 and not process_tree.is_alive(zombie)


def test_a_process_that_ends_too_soon_is_an_error_with_its_last_lines(tmp_path):
    log = tmp_path / "log.txt"
    with (
        processes.running([sys.executable, "-c", "raise SystemExit('no key')"], tmp_path, log) as process,
        pytest.raises(UserError, match=r"it has ended \(exit code 1\): no key"),
    ):
        processes.wait_for(lambda: False, process, log, LIMIT, "it")


def test_the_app_is_two_modules_that_flower_can_build(tmp_path, monkeypatch):
    app = processes.write_app(tmp_path / "app")
    monkeypatch.syspath_prepend(app)
    assert isinstance(import_module("at_server").app, ServerApp)
    assert isinstance(import_module("at_site").app, ClientApp)
    built = subprocess.run(
        [processes.program_path("flwr"), "build", "--app", str(app)],
        cwd=tmp_path,
        env=processes.environment(tmp_path / "home"),
        capture_output=True,
        check=False,
        timeout=LIMIT,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert [path.suffix for path in tmp_path.rglob("*.fab")] == [".fab"]


def test_flowers_processes_send_no_telemetry(tmp_path):
    made = processes.environment(tmp_path)
    assert (made["FLWR_TELEMETRY_ENABLED"], made["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert made["FLWR_HOME"] == str(tmp_path) and json.dumps(made)


# A site's images


@pytest.mark.parametrize(("rounds", "compiled"), [(99, False), (100, True)])
def test_a_site_with_a_gpu_compiles_if_the_agreed_rounds_are_worth_it(
    rounds, compiled, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (12, 12)).save(tmp_path / "images" / name / "1.png")
    write_agreement(federations.terms(run=f"rounds = {rounds}"), tmp_path / "federation.toml")
    words = {"site": "north", "data": "images", "file": "federation.toml", "memory": "memory"}
    config = {key: word if key == "site" else str(tmp_path / word) for key, word in words.items()}
    assert site_node(config).engine.compile is compiled


def test_a_node_reads_a_folder_and_logs_its_problems(tmp_path, caplog):
    """Images with and without a class, one broken and one in colour, with quotes in their path."""
    folder = tmp_path / 'images "of" ours'
    rng = np.random.default_rng(0)
    for name in ("a/1.png", "a/2.png", "b/3.png", "unlabelled/4.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 12), np.uint8)).save(folder / name)
    Image.new("RGB", (12, 12)).save(folder / "b" / "colour.png")
    (folder / "b" / "broken.png").write_bytes(b"\x89PNG")
    terms = federations.terms()
    write_agreement(terms, tmp_path / "federation.toml")
    config = {"site": "north", "data": str(folder), "file": str(tmp_path / "federation.toml")}
    with caplog.at_level("INFO", "fedhassle"):
        node = site_node({**config, "memory": str(tmp_path / "memory"), "device": "cpu"})
    assert (node.images.now.client.labelled, node.images.now.client.unlabelled) == (4, 1)
    assert [node.images.now.dataset.class_names[k] for k in node.images.now.dataset.y_train if k >= 0] == [
        "a",
        "a",
        "b",
        "b",
    ]
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("skipped b/broken.png: ") for line in said)
    assert any(line.startswith("converted: ") and "b/colour.png" in line for line in said)
    with pytest.raises(UserError, match="lacks data, memory"):
        site_node({"site": "north", "file": "x"})
    (folder / "a").rename(folder / "cow")
    with pytest.raises(UserError, match="'cow' is not one of the classes"):
        site_node({**config, "memory": str(tmp_path / "memory")})


def test_a_nodes_configuration_may_contain_any_path(tmp_path):
    """Flower also takes it as KEY=VALUE words, which quotes and spaces would break."""
    words = {"site": "north", "data": """/a b/it's "x"=y.toml""", "threads": 2}
    (tmp_path / "node.toml").write_text(tomli_w.dumps(words))
    assert parse_config_args([str(tmp_path / "node.toml")]) == words


# Names of sites


def test_a_node_has_the_name_that_its_key_is_admitted_under_now(tmp_path):
    """Flower keeps the name of the first registration. A record that cannot be read changes nothing."""
    make_site_key(tmp_path / "north.key", tmp_path / "north.pub", "north")
    key = read_public_key(tmp_path / "north.pub")
    about = {"node_id": 7, "last_activated_at": "today"}
    flower = SimpleNamespace(
        get_nodes=lambda: [
            SimpleNamespace(**about, name="nroth", public_key=pem(key)),
            SimpleNamespace(**about, name="south", public_key=b""),
        ]
    )
    transport = FlowerTransport(flower, Admissions(tmp_path))
    assert [node.name for node in transport.nodes()] == ["nroth", "south"]  # there is no record
    admit_site(tmp_path, "north", key, images=400)
    assert [(node.name, node.images) for node in transport.nodes()] == [("north", 400), ("south", None)]
    FederationFolder(tmp_path).sites.write_text("x = = 1")
    assert [(node.name, node.images) for node in transport.nodes()] == [("north", 400), ("south", None)]


# A run that is stopped while it sends


class Stopped:
    """Flower's grid of a stopped run: the next question ends the program."""

    def __init__(self, push):
        self.push_messages = push

    def get_nodes(self):
        raise SystemExit("stopped")


def unstored(messages):
    return [""] * len(messages)


def expired(messages):
    raise RuntimeError("the push session may have expired")


@pytest.mark.parametrize("push", [unstored, expired])
def test_a_run_that_is_stopped_while_it_sends_ends(push, monkeypatch):
    monkeypatch.setattr(
        "fedhassle.federation.flower.transport.Message", lambda *words, **named: words
    )  # needs a task
    requests = [SiteRequest(node, "train", Payload({}, {}), "1", 60.0) for node in (1, 2)]
    with pytest.raises(SystemExit, match="stopped"):
        FlowerTransport(Stopped(push)).push(requests)


def test_a_free_port_is_one_that_nobody_uses(monkeypatch):
    """Of two ports the one that is taken is never returned."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", processes.free_port()))
        port = taken.getsockname()[1]
        assert port in processes.PORTS
        monkeypatch.setattr(processes, "PORTS", range(port, port + 2))
        with contextlib.suppress(OSError), socket.socket() as other:  # the second may be in use as well
            other.bind(("127.0.0.1", port + 1))
            other.close()
            assert {processes.free_port() for _ in range(8)} == {port + 1}
