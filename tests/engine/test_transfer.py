"""Sparse transfer: the arrays that arrive, and their bytes."""

import logging

import numpy as np
import pytest
import small
import torch

from fedhassle.engine.client import train
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.trainer import Task
from fedhassle.engine.transfer import HELD, sent
from fedhassle.methods import FedAvg, FedMatch

LEAST = 0.5  # exact in binary, as are the changes below
NAN = float("nan")


def arrays(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


# One message


def test_small_changes_are_not_sent():
    """Changes of 0.5 (the threshold), 0.75, −0.75, −0.25 and 0: two of eight are sent, 16 bytes."""
    known = arrays(w=[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    new = arrays(w=[1.5, 1.75, 0.25, 0.75, 1.0, 0.0, 0.0, 0.0])
    arrived = sent(new, known, LEAST)
    assert arrived.arrays["w"].tolist() == [1.0, 1.75, 0.25, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert arrived.size == 2 * (4 + 4)
    assert new["w"].tolist()[0] == 1.5 and known["w"].tolist()[1] == 1.0  # neither is written to


@pytest.mark.parametrize(
    ("changed", "size", "exact"),
    [(0, 0, False), (1, 8, False), (3, 24, False), (4, 32, True), (5, 32, True), (8, 32, True)],
)
def test_an_array_is_sent_whole_if_that_is_not_longer(changed, size, exact):
    """Eight numbers take 32 bytes, index and value 8: with four or more changes the array is sent whole."""
    known, new = torch.zeros(8), torch.full((8,), 0.25)
    new[:changed] = 2.0
    arrived = sent({"w": new}, {"w": known}, LEAST)
    assert arrived.size == size
    assert arrived.arrays["w"].tolist() == [2.0] * changed + [0.25 if exact else 0.0] * (8 - changed)


def test_arrays_are_independent_and_new_ones_are_sent_whole():
    """a: one of four changed, 8 bytes; b: new, 12; c: of another length, 8."""
    known = arrays(a=[0.0, 0.0, 0.0, 0.0], c=[0.0], d=[9.0])
    new = arrays(a=[0.0, 3.0, 0.1, 0.0], b=[0.1, 0.2, 0.3], c=[0.1, 0.2])
    arrived = sent(new, known, LEAST)
    assert list(arrived.arrays) == ["a", "b", "c"] and arrived.size == 8 + 12 + 8
    assert arrived.arrays["a"].tolist() == [0.0, 3.0, 0.0, 0.0]
    assert all(torch.equal(arrived.arrays[name], new[name]) for name in "bc")


def test_without_a_least_change_all_is_sent():
    new = arrays(w=[1.0, 2.0])
    arrived = sent(new, arrays(w=[1.0, 2.0]), 0.0)
    assert arrived.arrays is new and arrived.size == 8


def test_float64_takes_more_bytes():
    """Float64: 8 + 4 bytes for an entry, 80 for the whole."""
    new = torch.zeros(10, dtype=torch.float64)
    new[3] = 1.0
    assert sent({"w": new}, {"w": torch.zeros(10, dtype=torch.float64)}, LEAST).size == 12


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), NAN])
def test_nan_and_infinity_arrive(value):
    """NaN counts as a change; otherwise a client that failed would look unchanged."""
    new = torch.zeros(8)
    new[2] = value
    arrived = sent({"w": new}, {"w": torch.zeros(8)}, LEAST).arrays["w"]
    assert not torch.isfinite(arrived[2]) and arrived.count_nonzero() == 1


# A federation


def sparse(new, known, least):
    """One vector at a receiver that knows another, entry by entry, and its bytes."""
    new, known = new.numpy(), known.numpy()
    entries = [i for i in range(len(new)) if abs(new[i] - known[i]) > np.float32(least)]
    if 8 * len(entries) >= 4 * len(new):
        return torch.from_numpy(new.copy()), 4 * len(new)
    arrived = known.copy()
    arrived[entries] = new[entries]
    return torch.from_numpy(arrived), 8 * len(entries)


def fedmatch(**settings):
    return FedMatch(
        small.net(), **{"batch": 8, "epochs": 1, "helper_rounds": 2, "least_change": 0.01, **settings}
    )


def test_both_ends_of_fedmatch_have_what_was_sent():
    """Four rounds of all clients, each vector compared entry by entry with the known one.

    Down: against what the client held after its last round; new names whole. Up: against the message as it
    arrived. Held from then on: the message with the update over it. Helpers come in rounds 2 and 4, which
    are new each time, since the message of the round between has none.
    """
    method, here = fedmatch(), small.simulator()
    state, held, spared = method.initial(0), {}, 0
    for done in federate(method, here, Plan(4, 6, 0), state):
        t, updates = done.t, []
        for reply in done.replies:
            client = reply.update.client
            message, known = method.message(state, client, t), held.get(client.name, {})
            assert any(name.startswith("helper") for name in message) == (
                t in (2, 4) and client.unlabelled > 0
            )
            arrived, down = {}, 0
            for name, vector in message.items():
                arrived[name], size = (
                    sparse(vector, known[name], 0.01) if name in known else (vector, 4 * len(vector))
                )
                down += size
            site = here.trainer.site(Task(client, *here.rows[client.name], arrived, None))
            update, _ = train(method, site, arrived, None, t, 0)
            back = {name: sparse(vector, arrived[name], 0.01) for name, vector in update.arrays.items()}
            assert small.same(reply.update.arrays, {name: vector for name, (vector, _) in back.items()})
            assert (reply.bytes_down, reply.bytes_up) == (down, sum(size for _, size in back.values()))
            spared += down < 4 * sum(map(len, message.values()))
            held[client.name] = arrived | reply.update.arrays
            updates.append(reply.update)
        state = method.merge(state, updates, t, None)
        assert small.same(done.state, state)
    assert spared > 3  # else nothing was tested
    loaded = {name: here.client_state.load(HELD + name, 9, small.CPU) for name in held}
    assert all(small.same(loaded[name], held[name]) for name in held)


def test_with_everything_sent_nothing_is_remembered_and_all_bytes_count():
    """Four bytes for each entry of σ and ψ, in every round."""
    here, method = small.simulator(), fedmatch(least_change=0.0, helper_rounds=100)
    whole = 4 * sum(map(len, method.initial(0).values()))
    for done in federate(method, here, Plan(3, 6, 0), method.initial(0)):
        assert {reply.bytes_down for reply in done.replies} == {whole}
    assert not here.client_state.folder.exists()


def test_other_methods_send_everything():
    method = FedAvg(small.net(), batch=8, epochs=1)
    assert method.unsent() == 0 and FedMatch(small.net()).unsent() == 5e-5


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_client_that_failed_drops_out_and_is_not_remembered(bad, monkeypatch, caplog):
    """In round 2 of 3 the update of client 2 is not finite: it drops out, and its known arrays stay."""
    method, here, failing = fedmatch(), small.simulator(), "client 2"
    plain = here.trainer.train

    def training(method, tasks, t):
        return [(broken(update) if t == 2 else update, kept) for update, kept in plain(method, tasks, t)]

    def broken(update):
        fails = update.client.name == failing
        return update._replace(arrays={k: v * bad for k, v in update.arrays.items()}) if fails else update

    monkeypatch.setattr(here.trainer, "train", training)
    held = {}
    with caplog.at_level(logging.WARNING, "fedhassle"):
        for done in federate(method, here, Plan(3, 6, 0), method.initial(0)):
            names = {reply.update.client.name for reply in done.replies}
            assert (failing in names) == (done.t != 2)
            held[done.t] = here.client_state.load(HELD + failing, done.t + 1, small.CPU)
            assert all(torch.isfinite(v).all() for v in done.state.values())
    assert small.same(held[1], held[2]) and not small.same(held[2], held[3])
    assert [f"dropped {failing}" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_a_run_with_sparse_messages_resumes_exactly(rounds, without_residuals, tmp_path):
    """Interrupted after any round; the arrays that clients hold are saved too."""
    words = [*without_residuals, "method=fedmatch", "rounds=6", "clients_per_round=6"]
    words += ["method.helper_rounds=2", "method.least_change=0.01", "method.lr=0.02"]
    assert small.call("run", *words, "--out", tmp_path / "whole")[0] == 0
    small.cut(words, tmp_path / "run", rounds)
    assert small.call("resume", tmp_path / "run")[0] == 0
    small.assert_same_result(tmp_path / "run", tmp_path / "whole")
    assert {client for client, _ in small.kept_by(tmp_path / "run")} == {
        f"{HELD}client {k}" for k in (1, 2, 3)
    }
    assert small.tensors_of(tmp_path / "run" / "model.safetensors").keys() == {"sigma", "psi"}
