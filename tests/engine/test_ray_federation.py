"""One run on several workers: the same results as in one process, and clear words where that cannot be."""

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from ray_commands import RayCommand

from fedhassle.averaging import Averaged
from fedhassle.engine import ray_federation
from fedhassle.engine.cluster import Allocation, Machine, require_room
from fedhassle.engine.device import Engine
from fedhassle.engine.ray_federation import RayFederation, RoundArrays, balanced, require_same, totals
from fedhassle.engine.ray_worker import Order, Worker, WorkerAbout, packed
from fedhassle.engine.rounds import Averages, Plan, Reply, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import DivergedError, UserError
from fedhassle.method import Client, Update, average
from fedhassle.methods import METHODS, FedAvg
from fedhassle.provenance import machine
from fedhassle.runs.resume import reopen
from fedhassle.runs.run import identify
from fedhassle.settings.build import build_dataset
from fedhassle.settings.request import request

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all tests

ROUNDS = 3
FEDERATED = sorted(name for name, kind in METHODS.items() if not kind.pooled)
AVERAGED = {"fedavg", "fedprox", "mixmatch", "fixmatch", "hassle", "hassle+", "fixmatch-global", "sage"}


def rounds_of(method, federation, rounds=ROUNDS, per_round=6):
    return list(federate(method, federation, Plan(rounds, per_round, 0), method.initial(0)))


def figures(done):
    """Everything that a round reports about its clients."""
    replies = (*done.replies, *done.dropped)
    sent = [(reply.update.client, reply.bytes_down, reply.bytes_up) for reply in replies]
    updates = [reply.update for reply in replies]
    losses = [{name: loss.tolist() for name, loss in update.losses.items()} for update in updates]
    labels = [update.labelling.tolist() for update in updates]
    return sent, [dict(update.samples) for update in updates], losses, labels


def memories(federation):
    """The arrays that clients keep, by client."""
    kept = federation.kept()
    found = {name: federation.client_state.load(name, n + 1, small.CPU) for name, n in kept.items()}
    return {(name, kept[name]): arrays for name, arrays in found.items()}


def assert_same(mine, others):
    for a, b in zip(mine, others, strict=True):
        assert small.same(a.state, b.state) and figures(a) == figures(b)


def assert_close(mine, others):
    """States within rounding of each other: a few float32 units in the last place."""
    for a, b in zip(mine, others, strict=True):
        for name, vector in b.state.items():
            assert torch.allclose(a.state[name], vector, rtol=1e-5, atol=1e-6)


# Balance


def test_the_longest_item_goes_first_into_the_emptiest_bin():
    """By hand: 7→a, 6→b, 5→b (6 < 7), 4→a (7 < 11), 3→a (11 = 11, the first), 2→b, 1→b."""
    assert balanced([4, 1, 7, 3, 6, 2, 5], 2) == [0, 1, 0, 0, 1, 1, 1]
    assert balanced([2, 2, 2], 5) == [0, 1, 2] and balanced([], 2) == []
    assert totals([4, 1, 7, 3], [1, 0, 1, 3]) == [1, 11, 0, 3] and totals([], []) == []


def test_no_bin_has_more_than_the_mean_and_one_item():
    rng = np.random.default_rng(0)
    for bins in (2, 3, 8):
        costs = rng.integers(1, 100, 60).tolist()
        assert max(totals(costs, balanced(costs, bins))) <= sum(costs) / bins + max(costs)


# What a method must say


@pytest.mark.parametrize("name", FEDERATED)
def test_methods_with_a_merge_of_their_own_get_whole_updates(name):
    method = small.made(name)
    assert method.merges_means() == (name in AVERAGED)
    assert Averaged.of(method).merges_means() == method.merges_means()


@pytest.mark.parametrize("name", sorted(AVERAGED))
def test_the_next_state_needs_only_the_means(name):
    """Every method that says so: merging updates is averaging them by its weights, then `next_state`."""
    method = small.made(name)
    *_, last = rounds_of(method, small.simulator())
    updates = [reply.update for reply in last.replies]
    means = average([update._replace(samples=method.counts(update)) for update in updates])
    before = rounds_of(method, small.simulator(), ROUNDS - 1)[-1].state
    assert small.same(method.next_state(before, means, ROUNDS), last.state)


@pytest.mark.parametrize("name", FEDERATED)
def test_a_method_trains_the_same_after_it_travelled(name):
    method = small.made(name)
    site = small.site(labelled=range(10), unlabelled=range(20, 40))
    there = pickle.loads(pickle.dumps(method))
    assert small.same(small.trained(there, site).arrays, small.trained(method, site).arrays)


# Means in place of updates


class Means:
    """A federation that averages: ann and bob in one group, cat in another; dan's update is not finite."""

    clients = tuple(Client(name, n, 0) for name, n in (("ann", 3), ("bob", 1), ("cat", 4), ("dan", 9)))
    finite = (True, True, True, False)

    def present(self):
        return self.clients

    def rewind(self, t):
        pass

    def train(self, method, messages, t):
        replies = [Reply(Update(client, {}, {"w": client.labelled}, {}), 3, 7) for client, _ in messages]
        groups = [("group 0", 2.0, 4), ("group 1", 6.0, 4)][: sum(self.finite)]
        means = [Update(Client(g, 0, 0), {"w": torch.tensor([v])}, {"w": n}, {}) for g, v, n in groups]
        return Averages(tuple(replies), self.finite, tuple(means))


def test_the_server_averages_means_and_counts_every_client():
    """Means 2 and 6 of weight 4 each: 4."""
    method = FedAvg(small.net(small.Linear))
    done = next(federate(method, Means(), Plan(1, 9), {"w": torch.zeros(1)}))
    assert done.state["w"].tolist() == [4.0]
    assert [r.update.client.name for r in done.replies] == ["ann", "bob", "cat"]
    assert [r.update.client.name for r in done.dropped] == ["dan"]


def test_a_round_without_any_finite_update_is_an_error(monkeypatch):
    monkeypatch.setattr(Means, "finite", (False,) * 4)
    with pytest.raises(DivergedError, match=r"round 1.*ann, bob, cat, dan"):
        next(federate(FedAvg(small.net(small.Linear)), Means(), Plan(1, 9), {"w": torch.zeros(1)}))


# A worker, without Ray


def orders(method, state, group):
    """An order for each client of the small split that has labels."""
    parts = zip(small.SPLIT.names, small.SPLIT.labelled, small.SPLIT.unlabelled, strict=True)
    return [
        Order(client, a, b, packed(method.message(state, client, 1)), {}, None, group)
        for client, a, b in ((Client(name, len(a), len(b)), a, b) for name, a, b in parts)
        if client.labelled
    ]


@pytest.fixture
def worker():
    made = Worker(small.dataset(), 0, small.ENGINE, 1)
    yield made
    logging.getLogger("fedhassle").removeHandler(made.notes)


def test_a_worker_averages_a_group_by_the_methods_weights(worker):
    """The mean in float64 of the whole updates, by labels; in two calls, of which the first began anew."""
    method = FedAvg(small.net(), batch=8, epochs=1)
    state = method.initial(0)
    worker.adopt(method)
    whole = worker.train(1, orders(method, state, None)).outcomes
    assert worker.finish() == {}
    asked = orders(method, state, 5)
    worker.train(1, asked)
    worker.begin()
    outcomes = worker.train(1, asked[:1]).outcomes | worker.train(1, asked[1:]).outcomes
    found = worker.finish()
    assert list(found) == [5] and found[5].weights == {"w": 20 + 6 + 9 + 1}
    weights = [order.client.labelled for order in asked]
    vectors = np.stack([whole[order.client.name].arrays["w"] for order in asked]).astype(np.float64)
    expected = np.average(vectors, axis=0, weights=weights)
    np.testing.assert_allclose(found[5].arrays["w"], expected, rtol=1e-5, atol=1e-7)
    assert all(not one.arrays for one in outcomes.values())
    assert [one.size for one in outcomes.values()] == [whole[name].size for name in outcomes]


def test_a_worker_leaves_out_updates_that_are_not_finite(worker, monkeypatch):
    method = FedAvg(small.net(), batch=8, epochs=1)
    worker.adopt(method)
    asked, plain = orders(method, method.initial(0), 0), worker.trainer.train

    def training(*given):
        (first, _), *others = plain(*given)
        broken = {name: vector * float("nan") for name, vector in first.arrays.items()}
        return [(first._replace(arrays=broken), {"kept": torch.ones(1)}), *others]

    monkeypatch.setattr(worker.trainer, "train", training)
    outcomes = worker.train(1, asked).outcomes
    assert [one.finite for one in outcomes.values()] == [False, True, True, True]
    assert not outcomes["client 1"].kept  # a client that failed keeps what it had
    assert worker.finish()[0].weights == {"w": 6 + 9 + 1}


def test_a_worker_returns_its_log(worker):
    logging.getLogger("fedhassle").warning("out of %s", "memory")
    method = FedAvg(small.net(), batch=8, epochs=1)
    worker.adopt(method)
    called = worker.train(1, orders(method, method.initial(0), None))
    assert called.notes == [(logging.WARNING, "out of memory")]
    assert worker.train(1, []).notes == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_worker_on_a_gpu_trains_as_a_simulator_there_does():
    """Deterministic, on lanes: the same bits for whole updates, and their mean within rounding."""
    engine = Engine(torch.device("cuda"), "fp32", lanes=2, deterministic=True)
    worker = Worker(small.dataset(), 0, engine, 1)
    logging.getLogger("fedhassle").removeHandler(worker.notes)
    method = small.hassle()
    worker.adopt(pickle.loads(pickle.dumps(method)))
    state = {name: vector.to("cuda") for name, vector in method.initial(0).items()}
    alone = Simulator(small.dataset(), small.SPLIT, 0, engine)
    asked = orders(method, state, None)
    replies = alone.train(method, [(one.client, method.message(state, one.client, 1)) for one in asked], 1)
    outcomes = worker.train(1, asked).outcomes
    for reply in replies:
        found = outcomes[reply.update.client.name].arrays
        assert small.same({k: torch.tensor(v) for k, v in found.items()}, on_cpu(reply.update.arrays))
    worker.train(1, orders(method, state, 0))
    expected = average([reply.update for reply in replies])
    for name, vector in worker.finish()[0].arrays.items():
        assert torch.allclose(torch.tensor(vector), expected[name].cpu(), rtol=1e-5, atol=1e-6)


def on_cpu(arrays):
    return {name: vector.cpu() for name, vector in arrays.items()}


# Settings


SMALL, LARGE = Machine("a", "small", 0, 2), Machine("b", "large", 4, 16)


@pytest.mark.parametrize(
    ("workers", "allocation", "machines", "message"),
    [
        (5, Allocation(1, 0), [SMALL, LARGE], "workers=5 need a GPU each, but 2 machines can hold only 4 of"),
        (3, Allocation(1, 1), [SMALL], "workers=3 need 1 core each, but 1 machine can hold only 2 of them"),
        (2, Allocation(1, 2), [SMALL], r"2 cores each.* only 1 of them; set fewer workers, or threads=1$"),
    ],
)
def test_more_workers_than_devices_are_an_error(workers, allocation, machines, message):
    with pytest.raises(UserError, match=message):
        require_room(workers, allocation, machines)
    require_room(workers - 1, allocation, machines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workers=0"], "workers: input should be greater than or equal to 1, got 0"),
        (["workers=65"], "workers: input should be less than or equal to 64, got 65"),
        (["workers=64", "threads=1000"], "need 1,000 cores each"),
        (["workers=2", "ray=nowhere"], "write local, auto, or HOST:PORT"),
    ],
)
def test_bad_values_are_refused_before_a_folder_is_made(words, message, without_residuals, tmp_path):
    code, out, err = small.call("run", *without_residuals, "method=fedavg", *words, "--out", tmp_path / "run")
    assert (code, out) == (2, "") and message in err and not (tmp_path / "run").exists()


def test_workers_do_not_change_the_identity_of_a_run(without_residuals):
    """Also where they do not fit: results from larger machines are checked on smaller ones."""
    few, many = (request(None, [*without_residuals, *more]) for more in ([], ["workers=64", "threads=1000"]))
    assert identify(many).key == identify(few).key and identify(many).machine.startswith("64 × ")


def test_without_ray_the_message_names_the_extra(without_residuals, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = small.call("run", *without_residuals, "workers=2", "--out", tmp_path / "run")
    assert (code, out) == (2, "") and not (tmp_path / "run").exists()
    assert "workers=2 needs Ray" in err and "pip install 'fedhassle[ray]'" in err


def test_cores_are_divided_among_workers(monkeypatch):
    monkeypatch.setattr("fedhassle.settings.schema.available_cores", lambda: 9)
    threads = [small.resolved("device=cpu", f"workers={n}").threads for n in (1, 2, 4, 16)]
    assert threads == [9, 4, 2, 1] and small.resolved("workers=4", "threads=3").threads == 3


def test_workers_count_for_the_time_of_a_run():
    about = {"gpu": None, "cpu": "a", "threads": 2}
    assert machine(about) == machine({**about, "workers": 1}) == "a, 2 threads"
    assert machine({**about, "workers": 4}) == "4 × a, 2 threads"


def test_a_worker_with_other_software_is_refused():
    mine = {"code": "abc", "own:Mine": None}
    require_same(2, WorkerAbout("host", dict(mine)), mine)
    with pytest.raises(UserError, match=r"worker 2 on host has other software .* code def instead of abc"):
        require_same(2, WorkerAbout("host", {"code": "def", "own:Mine": None}), mine)


# With Ray


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def actors(cluster, images):
    """A data set, and two workers that have it."""
    data = build_dataset(small.resolved(f"data={images}"))
    started = ray_federation.start(2, Allocation(1, 1), data, 0, small.ENGINE, 1)
    yield data, started
    for actor in started.values():
        cluster.kill(actor)


@pytest.fixture
def shared(actors, monkeypatch):
    """Lets federations on this data set share the two workers, which take seconds to start."""
    monkeypatch.setattr(ray_federation, "start", lambda *given: dict(actors[1]))
    monkeypatch.setattr(RayFederation, "close", lambda self: None)
    return actors[0]


@pytest.fixture
def two(shared):
    """The six clients of the small split on two workers."""
    return RayFederation(shared, small.SPLIT, 0, small.ENGINE, 1, 2)


@pytest.mark.parametrize("name", FEDERATED)
def test_few_clients_give_the_same_bits_on_two_workers(name, two, shared, monkeypatch):
    """Also in several calls a round, and whatever clients keep."""
    monkeypatch.setattr(ray_federation, "WAVE", 2)
    method, alone = small.made(name), small.simulator(shared)
    assert_same(rounds_of(method, two), rounds_of(method, alone))
    mine, others = memories(two), memories(alone)
    assert mine.keys() == others.keys() and all(small.same(mine[k], others[k]) for k in mine)
    assert bool(mine) == (name in {"rscfed", "fedmatch"})


def test_dropout_and_optimisers_are_the_same_on_two_workers(two, shared):
    settings = {"optimiser": "adamw", "lr": 0.002, "weight_decay": 0.01, "lr_warmup": 2}
    method = FedAvg(small.net(small.Dropping), **small.QUICK, **settings)
    assert_same(rounds_of(method, two), rounds_of(method, small.simulator(shared)))


@pytest.mark.parametrize("method", [small.hassle(), small.made("rscfed")], ids=["hassle", "rscfed"])
def test_many_clients_give_the_same_bits_on_any_number_of_workers(method, two, shared, monkeypatch):
    """Three groups of six clients, in calls of one client each.

    A method that merges means gets those of the groups, within rounding of one process; another one gets
    whole updates, with the same bits.
    """
    monkeypatch.setattr(ray_federation, "GROUPS", 3)
    monkeypatch.setattr(ray_federation, "WAVE", 1)
    both = rounds_of(method, two)
    one = dict(list(two.workers.items())[:1])
    monkeypatch.setattr(two, "workers", one)
    assert_same(rounds_of(method, two), both)
    alone = rounds_of(method, small.simulator(shared))
    assert_close(both, alone)
    assert [done.clients for done in both] == [done.clients for done in alone]
    if method.merges_means():
        assert figures(both[0]) == figures(alone[0])  # the first round starts from the same bits
        assert not both[0].replies[0].update.arrays
    else:
        assert_same(both, alone)


def test_what_several_clients_receive_is_stored_once(cluster):
    large, little, own = torch.ones(5_000), torch.ones(3), torch.zeros(5_000)
    arrays = RoundArrays([{"a": large, "b": little}, {"x": large, "b": little, "c": own}])
    first, places = arrays.parts({"a": large, "b": little})
    assert list(first) == ["b"] and places == {"a": 0}
    second, places = arrays.parts({"x": large, "b": little, "c": own})
    assert list(second) == ["b", "c"] and places == {"x": 0}
    (stored,) = arrays.taken()
    assert cluster.get(stored).tolist() == large.tolist() and arrays.taken() == []
    assert arrays.parts({"a": large})[1] == {"a": 0} and arrays.taken() == [stored]


@dataclass(frozen=True)
class Fatal(FedAvg):
    """FedAvg whose second round ends the process of a worker, unless a file exists."""

    death: str = ""
    driver: int = 0  # number of the process that must live

    def phases(self, client, t):
        if t == 2 and os.getpid() != self.driver:
            with contextlib.suppress(FileExistsError):
                Path(self.death).touch(exist_ok=False)  # one worker at most succeeds
                os._exit(1)
        return super().phases(client, t)


def fatal(path):
    return Fatal(small.net(), batch=8, epochs=1, death=str(path), driver=os.getpid())


@dataclass(frozen=True)
class Wrong(FedAvg):
    """FedAvg with an error that only training finds."""

    def loss(self, local, received, batch):
        raise UserError("this loss cannot work")


def test_an_error_at_a_worker_is_raised_as_it_is(two):
    with pytest.raises(UserError) as raised:
        rounds_of(Wrong(small.net(), batch=8, epochs=1), two)
    assert str(raised.value) == "this loss cannot work"
    assert "in loss\n" in raised.value.__notes__[0]  # where


def test_a_round_is_repeated_without_a_worker_that_died_until_none_is_left(cluster, tmp_path, caplog):
    expected = rounds_of(FedAvg(small.net(), batch=8, epochs=1), small.simulator())
    made = RayFederation(small.dataset(), small.SPLIT, 0, small.ENGINE, 1, 2)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        assert_same(rounds_of(fatal(tmp_path / "first"), made), expected)
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert (
        "round 2: worker" in record.getMessage() and "repeating the round on 1 worker" in record.getMessage()
    )
    with pytest.raises(UserError, match=r"round 2: worker .* died .* no other is left; .* resume the run"):
        rounds_of(fatal(tmp_path / "second"), made)
    made.close()


def differs(folder, whole):
    """The parts of two results that differ."""
    same_metrics = small.but_seconds(small.metrics_of(folder)) == small.but_seconds(small.metrics_of(whole))
    mine, others = (small.tensors_of(path / "model.safetensors") for path in (folder, whole))
    kept, expected = small.kept_by(folder), small.kept_by(whole)
    same_kept = kept.keys() == expected.keys() and all(small.same(kept[k], expected[k]) for k in kept)
    a, b = small.summary_of(folder), small.summary_of(whole)
    same_summary = all(a[key] == b[key] for key in ("accuracy", "settings_hash", "split_hash"))
    found = (same_metrics, small.same(mine, others), same_kept, same_summary)
    return [what for what, ok in zip(("metrics", "model", "memory", "summary"), found, strict=True) if not ok]


def test_a_run_resumes_with_another_number_of_workers(shared, without_residuals, tmp_path, monkeypatch):
    """RSCFed, whose clients keep a teacher: two rounds with two workers, two in one process; and reversed."""
    monkeypatch.setattr("fedhassle.engine.cluster.available_cores", lambda: 2)
    words = [*without_residuals, "method=rscfed", "method.subset_size=3"]
    whole = tmp_path / "whole"
    assert small.call("run", *words, "--out", whole)[0] == 0
    small.cut([*words, "workers=2"], tmp_path / "fewer", 2)
    assert small.kept_by(tmp_path / "fewer")
    code, out, err = small.call("resume", tmp_path / "fewer", "--workers", 1)
    assert (code, err) == (0, "") and "4 rounds, on cpu\n" in out
    small.cut(words, tmp_path / "more", 2)
    code, out, err = small.call("resume", tmp_path / "more", "--workers", 2)
    assert (code, err) == (0, "") and "4 rounds, on cpu with 2 workers\n" in out
    assert "round 4/4" in out
    for name, workers in (("fewer", 1), ("more", 2)):
        assert differs(tmp_path / name, whole) == []
        assert reopen(tmp_path / name).settings.workers == workers
        assert small.summary_of(tmp_path / name)["hardware"]["workers"] == workers


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("kill", "number", "expected"), [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)]
)
def test_a_signal_ends_every_process_and_the_run_resumes(kill, number, expected, without_residuals, tmp_path):
    """A terminal sends Ctrl-C to all processes."""
    folder = tmp_path / "run"
    words = ["run", *without_residuals, "method=fedavg", "rounds=900000", "workers=2", "--out", folder]
    with RayCommand(tmp_path / "output.txt", *words) as command:
        metrics = folder / "metrics.jsonl"
        command.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
        assert len(command.living("ray::Worker")) == 2
        kill(command.process.pid, number)
        code, out = command.ended()
    assert code == expected and f"to continue: fedhassle resume {folder}" in out and "Traceback" not in out
    before = [json.loads(line)["round"] for line in metrics.read_text().splitlines()]
    steps = small.train_run(reopen(folder, workers=1))
    assert next(steps).t > before[-3]
    steps.close()
