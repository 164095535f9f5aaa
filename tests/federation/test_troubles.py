"""Trouble at the server: a database that refuses to work, messages that get lost, programs that end."""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.federation import NoOpFederationManager
from small import LIMIT
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from fedhassle.errors import UserError
from fedhassle.federation.flower import database, deliveries, logs, patches
from fedhassle.federation.server import calls, host, keep
from fedhassle.federation.server.audit import DISK_FULL, SERVER_ENDED, Audit
from fedhassle.federation.setup.folder import FederationFolder

LOCKED = OperationalError("", None, sqlite3.OperationalError("database is locked"))
FULL = OperationalError("", None, sqlite3.OperationalError("database or disk is full"))


# The database


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A SuperLink's state in a file, which waits for a lock only for a moment."""
    path = str(tmp_path / "state.db")
    store = SqlObjectStore(path)
    made = SqlLinkState(path, NoOpFederationManager(), store)
    for one in (store, made):
        one.initialize()
        with one.session() as session:
            session.execute(text("PRAGMA busy_timeout = 50"))
    return made


def keys(state):
    with state.session() as session:
        return sorted(row[0] for row in session.execute(text("SELECT public_key FROM node")))


def test_a_request_happens_wholly_or_not_at_all(state):
    """After an error of the database nothing of it is left, even if Flower swallows the error."""

    def handler(request, state, fails):
        state.create_node("me", "me", request, 30)
        try:
            with state.session() as session:
                if fails:
                    session.execute(text("SELECT * FROM nowhere"))
        except OperationalError:
            return "swallowed"
        return "done"

    event_listeners = database.event
    event_listeners.listen(database.Engine, "handle_error", database.note_refusal)
    try:
        call = database.whole(handler)
        assert call(b"a", state, fails=False) == "done"
        with pytest.raises(OperationalError):
            call(b"b", state, fails=True)
        assert keys(state) == [b"a"]
    finally:
        event_listeners.remove(database.Engine, "handle_error", database.note_refusal)


def test_what_flower_refuses_stays_done(state):
    def handler(request, state):
        state.create_node("me", "me", request, 30)
        raise FlowerError(ApiErrorCode.RUN_ID_NOT_FOUND, "no")

    with pytest.raises(FlowerError):
        database.whole(handler)(b"a", state)
    assert keys(state) == [b"a"]


def test_a_locked_database_is_noticed_before_anything_is_done(state, tmp_path):
    called = []
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    call = database.whole(lambda request, state: called.append(request))
    with pytest.raises(OperationalError, match="locked"):
        call("first", state)
    other.execute("ROLLBACK")
    call("second", state)
    assert called == ["second"]


def test_nodes_that_were_alive_when_the_trouble_began_stay_alive(state):
    for key in (b"alive", b"dead"):
        state.activate_node(state.create_node("me", "me", key, 30), 30)
    alive, dead = (state.get_node_id_by_public_key(key) for key in (b"alive", b"dead"))
    with state.session() as session:
        now = database.now().timestamp()
        for key, until in ((b"alive", now - 5), (b"dead", now - 50)):  # the trouble began 20 s ago
            session.execute(
                text("UPDATE node SET online_until = :until WHERE public_key = :key"),
                {"until": until, "key": key},
            )
    trouble = database.Trouble()
    trouble.note(LOCKED)
    trouble.began -= 20
    trouble.end(state)
    assert trouble.began is None
    found = {node.node_id: node.status for node in state.get_node_info(node_ids=[alive, dead])}
    assert found == {alive: "online", dead: "offline"}


def test_a_request_that_the_database_refuses_is_answered_with_503(state, caplog):
    """And says so in the log, once, and again when it works."""
    trouble, answers = database.Trouble(), iter([LOCKED, LOCKED, "fine"])
    app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state)))

    async def call_next(request):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def translate(request, call):
        return await call(request)

    dispatch = database.trying_again(translate, trouble)

    async def main():
        return [await dispatch(SimpleNamespace(app=app), call_next) for _ in range(3)]

    with caplog.at_level("INFO", "fedhassle"):
        first, second, third = asyncio.run(main())
    assert (first.status_code, second.status_code, third) == (503, 503, "fine")
    lines = [record.getMessage() for record in caplog.records]
    assert sum("locked by another program" in line for line in lines) == 2  # it worked in between
    assert sum("works again" in line for line in lines) == 2


def test_a_full_disk_says_so():
    assert "the server's disk is full: free some space" in database.explained(FULL)
    assert "locked by another program" in database.explained(LOCKED)


def test_a_line_after_one_that_a_full_disk_has_cut_off_is_read(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "2026-11-18 21:19:09,411 flwr WARNING Conn 2026-11-18 21:20:32,751 fedhassle WARNING works again\n"
    )
    assert logs.last_warnings(log, 5) == ["2026-11-18 21:20:32  works again"]
    assert logs.LogReader(log).new_lines() == ["21:20:32 works again"]


def test_an_upload_that_was_stored_already_is_answered_alike():
    store = {"there": b"content", "empty": b""}
    state = SimpleNamespace(object_store=store)
    push = database.stored_once(lambda request, state: PushObjectResponse(stored=False))
    found = [push(SimpleNamespace(object_id=key), state).stored for key in ("there", "empty", "unknown")]
    assert found == [True, False, False]


# Deliveries


def delivery(message="m", answers="r"):
    made = PullMessagesResponse()
    one = made.messages_list.add()
    one.metadata.message_id, one.metadata.reply_to_message_id = message, answers
    made.message_object_trees.add(object_id=message)
    return made


def test_a_message_is_delivered_to_a_node_until_it_is_confirmed():
    unconfirmed, pulled = deliveries.Unconfirmed(), []
    request = SimpleNamespace(node=SimpleNamespace(node_id=7))

    def pull(request, state):
        pulled.append(request)
        return delivery(f"m{len(pulled)}")

    call = deliveries.to_node(pull, unconfirmed)
    assert call(request, None) == call(request, None) == delivery("m1") and len(pulled) == 1
    deliveries.confirming(lambda request: None, unconfirmed)(SimpleNamespace(message_object_id="m1"))
    assert call(request, None) == delivery("m2")
    activated = deliveries.forgetting(lambda request: SimpleNamespace(node_id=7), unconfirmed)
    activated(None)  # a restarted node
    assert call(request, None) == delivery("m3")
    for _ in range(deliveries.MOST):
        assert call(request, None) == delivery("m3")
    assert call(request, None) == delivery("m4")  # not for ever


def test_answers_are_delivered_to_the_servers_program_until_they_are_confirmed():
    asked, unconfirmed = [], deliveries.Unconfirmed()

    def pull(request, state):
        asked.append(list(request.message_ids))
        made = PullAppMessagesResponse()
        for key in request.message_ids:
            one = delivery(f"answer to {key}", key)
            made.messages_list.extend(one.messages_list)
            made.message_object_trees.extend(one.message_object_trees)
        return made

    call = deliveries.to_program(pull, unconfirmed)
    first = call(PullAppMessagesRequest(message_ids=["a"]), None)
    again = call(PullAppMessagesRequest(message_ids=["a", "b"]), None)
    assert [one.metadata.reply_to_message_id for one in first.messages_list] == ["a"]
    assert [one.metadata.reply_to_message_id for one in again.messages_list] == ["b", "a"]
    assert [one.object_id for one in again.message_object_trees] == ["answer to b", "answer to a"]
    assert asked == [["a"], ["b"]]


# Nodes and programs


def test_a_heartbeat_goes_on_after_any_error(monkeypatch):
    monkeypatch.setattr(HeartbeatSender, "_heartbeat", HeartbeatSender._heartbeat)
    patches.keep_heartbeats()

    def beat():
        raise httpx.HTTPStatusError("500", request=None, response=None)

    with pytest.raises(HeartbeatFailure):
        HeartbeatSender(beat)._heartbeat()


def test_a_node_ends_with_any_of_its_parts(tmp_path):
    """Its main part has ended, but a thread of Flower's lives on: the process must not."""
    code = (
        "import sys, threading, time\n"
        "from fedhassle.federation.site import supernode\n"
        "supernode.keep_worker = lambda words: threading.Event()\n"
        "supernode.patch_supernode = lambda refused: None\n"
        "supernode.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "supernode.main()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1 and "the connection to the server has ended" in done.stderr


# The keeper


def started(folder, status, number=1, since="2026-01-02T00:00:00.000000+00:00"):
    return calls.StartedRun(number, status, since, str(folder))


def resubmitted(folder, status):
    """A run that was submitted again after its last event, and the one before."""
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    return [started(folder, status, 2, later), started(folder, "finished:stopped")]


@pytest.fixture
def federation(tmp_path, monkeypatch):
    """The folder of a federation, a run in it, and the runs that were resumed."""
    folder, run, submitted = FederationFolder(tmp_path), tmp_path / "run", []
    folder.server.mkdir()
    monkeypatch.setattr(keep, "link_of", lambda folder: calls.Link("", tmp_path))
    monkeypatch.setattr(keep, "submit", lambda home, file, path, test: submitted.append((path, test)))
    Audit(run / "audit.jsonl").write("created", run="x", test="images")
    return SimpleNamespace(folder=folder, run=run, submitted=submitted)


def look(keeper, monkeypatch, runs):
    monkeypatch.setattr(calls, "runs", lambda link: runs)
    return keeper.look()


@pytest.mark.parametrize(
    ("status", "last", "resumed"),
    [
        ("finished:failed", None, True),  # its program was killed
        ("finished:failed", {"event": "stopped", "why": SERVER_ENDED}, True),
        ("finished:failed", {"event": "stopped", "why": DISK_FULL}, True),
        ("finished:failed", {"event": "stopped", "why": "too few sites"}, False),
        ("finished:stopped", {"event": "stopped", "why": "it was asked to stop"}, False),
        ("finished:completed", {"event": "finished"}, False),
    ],
)
def test_a_run_whose_program_has_ended_by_accident_is_resumed(status, last, resumed, federation, monkeypatch):
    keeper = keep.RunKeeper(federation.folder)
    assert look(keeper, monkeypatch, [started(federation.run, status)]) == []  # it never was alive here
    assert look(keeper, monkeypatch, [started(federation.run, "running")]) == []
    if last is not None:
        Audit(federation.run / "audit.jsonl").write(**last)
    said = look(keeper, monkeypatch, [started(federation.run, status)])
    assert federation.submitted == ([(federation.run, keep.Path("images"))] if resumed else [])
    assert said == (
        [f"the run in {federation.run} has ended unexpectedly; resuming it from its last checkpoint"]
        if resumed
        else []
    )
    shown = logs.last_warnings(host.server_log(federation.folder), 5)
    assert [line.split("  ", 1)[1] for line in shown] == said


def test_a_run_that_has_left_is_not_waited_for(federation, monkeypatch):
    """Flower counts its program as alive for another minute."""
    keeper, stopped = keep.RunKeeper(federation.folder), []
    monkeypatch.setattr(calls, "stop", lambda link, number: stopped.append(number))
    running = [started(federation.run, "running")]
    assert look(keeper, monkeypatch, running) == []
    Audit(federation.run / "audit.jsonl").write("stopped", why=SERVER_ENDED)
    assert len(look(keeper, monkeypatch, running)) == 1 and stopped == [1]
    again = resubmitted(federation.run, "running")  # it has not said a word yet
    assert look(keeper, monkeypatch, again) == [] and stopped == [1]
    assert len(federation.submitted) == 1


def test_a_run_that_ended_with_the_server_before_is_resumed(federation, monkeypatch):
    """Flower still counts it as alive when the new server looks first."""
    keeper, stopped = keep.RunKeeper(federation.folder), []
    monkeypatch.setattr(calls, "stop", lambda link, number: stopped.append(number))
    Audit(federation.run / "audit.jsonl").write("stopped", why=SERVER_ENDED)
    (said,) = look(keeper, monkeypatch, [started(federation.run, "running")])
    assert "resuming it" in said and stopped == [1]
    assert look(keeper, monkeypatch, resubmitted(federation.run, "running")) == []
    assert federation.submitted == [(federation.run, keep.Path("images"))]


def test_a_run_that_its_user_resumes_is_not_judged_by_what_it_said_before(federation, monkeypatch):
    """A new server has not seen it: it lets the new program start, and lets its user stop it."""
    keeper, stopped = keep.RunKeeper(federation.folder), []
    monkeypatch.setattr(calls, "stop", lambda link, number: stopped.append(number))
    Audit(federation.run / "audit.jsonl").write("stopped", why=SERVER_ENDED)
    for status in ("running", "finished:stopped"):
        assert look(keeper, monkeypatch, resubmitted(federation.run, status)) == []
    assert stopped == [] and federation.submitted == []


def test_a_run_that_never_makes_a_round_is_not_resumed_for_ever(federation, monkeypatch):
    keeper, said = keep.RunKeeper(federation.folder), []
    for _ in range(keep.MOST_RESTARTS + 2):
        look(keeper, monkeypatch, [started(federation.run, "running")])
        said += look(keeper, monkeypatch, [started(federation.run, "finished:failed")])
    assert len(federation.submitted) == keep.MOST_RESTARTS and "not resumed any more" in said[-1]


def test_a_run_is_resumed_once_there_is_space(federation, monkeypatch):
    """Its disk is full; the line is said once."""
    keeper, free = keep.RunKeeper(federation.folder), [1000]
    monkeypatch.setattr(keep.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    look(keeper, monkeypatch, [started(federation.run, "running")])
    ended = [started(federation.run, "finished:failed")]
    (said,) = look(keeper, monkeypatch, ended)
    assert "is full (0 MB left): free some space" in said and federation.submitted == []
    for _ in range(2 * keep.MOST_RESTARTS):
        assert look(keeper, monkeypatch, ended) == []
    free[0] = 10**9
    (said,) = look(keeper, monkeypatch, ended)
    assert "resuming it" in said and len(federation.submitted) == 1


def test_a_run_whose_folder_is_removed_leaves_the_server_running(federation, monkeypatch):
    """As by someone who frees the full disk that the run waits for."""
    keeper = keep.RunKeeper(federation.folder)
    monkeypatch.setattr(keep, "LEAST_FREE", float("inf"))
    look(keeper, monkeypatch, [started(federation.run, "running")])
    ended = [started(federation.run, "finished:failed")]
    (said,) = look(keeper, monkeypatch, ended)
    assert "is full" in said
    shutil.rmtree(federation.run)
    (said,) = look(keeper, monkeypatch, ended)
    assert "its folder is gone; it is not resumed" in said and federation.submitted == []
    assert look(keeper, monkeypatch, ended) == []


def test_a_server_that_ends_is_restarted(federation, monkeypatch):
    """Unless it does not start at all, or ends again and again."""
    starts, ready = [], []

    @contextmanager
    def running(folder):
        starts.append(folder)
        if len(starts) > 3:
            raise UserError("the disk is full")
        yield SimpleNamespace(returncode=-9)

    def watch(folder, process, pause, more):
        yield "north is online"
        raise UserError("the server has ended (exit code -9)")

    monkeypatch.setattr(host, "running_server", running)
    monkeypatch.setattr(host, "watch_sites", watch)
    lines = []
    with pytest.raises(UserError, match="6 times in a row: the disk is full"):
        for line in keep.keep_server(federation.folder, lambda: ready.append(1), pause=lambda seconds: None):
            lines.append(line)  # noqa: PERF402 - keeps them although it ends in an error
    assert lines.count("north is online") == 3 and len(starts) == 6 and ready == [1]
    assert "the server has ended (exit code -9); restarting it in 5 s" in lines
    starts.extend("...")
    with pytest.raises(UserError, match="the disk is full"):
        list(keep.keep_server(federation.folder, lambda: ready.append(1)))
