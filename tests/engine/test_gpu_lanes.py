"""Lanes: each client ends with the bits of training it alone, step by step."""

import gc
import itertools
import logging
import threading
import weakref
from dataclasses import dataclass

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_lanes import assert_lanes_train_as_eagerly, clients, pool

from fedhassle.architectures import LeNet, ResNet8
from fedhassle.engine.client import Visit, visit
from fedhassle.engine.gpu import lanes, recording, shapes
from fedhassle.engine.gpu.chains import chains, connected, joined
from fedhassle.engine.gpu.recording import Lane
from fedhassle.engine.gpu.streams import EACH, FIRST, USUAL, Streams
from fedhassle.engine.job import Job
from fedhassle.engine.rounds import Plan, federate
from fedhassle.errors import UserError
from fedhassle.losses import cross_entropy, hard_labels
from fedhassle.method import Client, Descent, Method, Phase, Stream, Update
from fedhassle.methods import METHODS, FedAvg
from fedhassle.optimiser import SGD

METHODS_AND_SETTINGS = pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("fedavg", {"clip": 0.0}),
        ("fedprox", {"mu": 0.1}),
        ("hassle", {}),
        ("hassle", {"pseudo_labels": "online", "confidence": 0.3, "residual_target": "with_residual"}),
        ("hassle", {"proximity": "norm", "confidence": 0.3, "momentum": 0.0}),
    ],
    ids=["fedavg", "fedprox", "hassle", "hassle online", "hassle norm"],
)
COUNTS = (1, 2, 3, 8)
LINEAR = small.net(small.Linear)
START = {"w": LINEAR.initial(0)}


def short(name):
    """Settings of a quick round; 13 steps are stretches of ten, two and one."""
    return {"batch": 8, "epochs": 2, **({"residual_steps": 13} if name == "hassle" else {})}


# Each client as if alone


@pytest.mark.parametrize(
    ("build", "side", "width"),
    [(LeNet, 12, 0.5), (small.ConvNet, 12, 1.0), (ResNet8, 6, 0.125)],
    ids=["lenet", "own", "resnet8"],
)
@METHODS_AND_SETTINGS
def test_a_client_on_a_lane_ends_in_the_same_bits(name, chosen, build, side, width):
    net = small.net(build, 3, side, width=width)
    method = METHODS[name](net=net, **short(name), **chosen)
    assert_lanes_train_as_eagerly(pool(), method, clients(3, side)[:3])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "independent"), [("fedavg", 4), ("fedprox", 4), ("hassle", 2 + 4 + 4 + 2 + 4)]
)
def test_any_number_of_lanes_gives_the_same_bits(name, independent, count, global_randomness):
    """As many lanes as requested, or as there are chains; other methods are in `test_every_method`."""
    method, made = METHODS[name](net=small.net(), **short(name)), pool(count)
    state = assert_lanes_train_as_eagerly(made, method, clients())
    assert len(made.lanes) == min(count, independent)
    assert not small.same(state, method.initial(0))


def test_the_same_lanes_serve_rounds_of_other_clients_and_other_methods():
    """One client, then all, then two: lanes carry nothing over."""
    made, sites = pool(2), clients()
    methods = [METHODS[name](net=small.net(), **short(name)) for name in ("hassle", "fedavg")]
    for method, some in itertools.product(methods, (sites[1:2], sites, sites[:2])):
        assert_lanes_train_as_eagerly(made, method, some)
    assert made.train([]) == []


def test_clients_with_images_and_views_of_their_own():
    """No recording mixes up other tables of images, or other augmentations."""
    tables = [small.dataset(seed=1), small.dataset(seed=2), small.dataset(flip=True), small.dataset(crop=3)]
    sites = [small.site(data, range(30), range(40, 80), f"{i}") for i, data in enumerate(tables)]
    assert_lanes_train_as_eagerly(pool(2), small.hassle(), sites)


def test_the_functions_of_a_job_are_compared_once_a_round(monkeypatch):
    """Many short jobs would wait for the host otherwise."""
    plain, seen = lanes.functions_of, []

    def functions_of(job, kept):
        seen.append((job.site.client.name, job.phase.name))
        return plain(job, kept)

    monkeypatch.setattr(lanes, "functions_of", functions_of)
    monkeypatch.setattr(shapes, "functions_of", functions_of)
    method, made, sites = small.hassle(), pool(2), clients()
    for _ in range(2):
        seen.clear()
        visits = [visit(method, site, method.initial(0), None, 1, 0) for site in sites]
        made.train(visits)
        assert seen == [(one.update.client.name, job.phase.name) for one in visits for job in one.jobs]


def test_results_are_not_overwritten_later():
    """A lane reuses its buffers, so an update must not share memory with them."""
    method, made, sites = small.hassle(), pool(1), clients()
    planned = [visit(method, site, method.initial(0), None, 1, 0) for site in sites]
    found = made.train(planned)
    copies = [
        {k: v.clone() for k, v in (*u.arrays.items(), *u.losses.items(), *kept.items())} for u, kept in found
    ]
    made.train([visit(method, site, method.initial(1), None, 2, 0) for site in sites])
    for (update, kept), copy in zip(found, copies, strict=True):
        assert small.same(dict((*update.arrays.items(), *update.losses.items(), *kept.items())), copy)


# Memory, draws, `then`, several streams, several descents


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("build", [small.ConvNet, small.Linear])
def test_a_method_with_memory_draws_and_two_streams(build, count):
    """Three rounds: the state of a client continues on any lane."""
    data = small.dataset(flip=True, crop=2)
    sizes = [(10, 7), (35, 20), (3, 3), (60, 1)]  # 4, 12, 2 and 20 steps
    sites = small.beside(*(small.site(data, range(n), range(n, n + m), f"client {n}") for n, m in sizes))
    method = small.Tutored(small.net(build), epochs=2, lr=0.01)
    assert_lanes_train_as_eagerly(pool(count), method, sites, rounds=3)


@dataclass(frozen=True)
class Chained(Method):
    """Trains a and b together, then b again on its own labels, and c independently."""

    def networks(self):
        return {"a": self.net, "b": self.net, "c": self.net}

    def initial(self, seed):
        return {name: self.net.initial(seed, slot) for slot, name in enumerate("cab")}

    def phases(self, client, t):
        labelled = Stream("labelled", 8)
        own = Stream(
            "unlabelled", 6, views=("clean", "weak"), logits=self.sum, labels=self.label, online=True
        )
        both = (
            Descent("a", self.first, self.local_optimiser()),
            Descent("b", self.second, self.local_optimiser(decay=0.01)),
        )
        again = Descent("b", self.fit, self.local_optimiser())
        return (
            Phase("both", (labelled,), both, self.epochs),
            Phase("apart", (own, labelled), (Descent("c", self.third, SGD(0.05)),), steps=13, draw=self.mix),
            Phase("again", (own,), (again,), self.epochs, then=self.pull),
        )

    def sum(self, received, x):
        return received["a"](x) + received["b"](x)

    def label(self, z):
        return hard_labels(z, 0.3)

    def mix(self, rng):
        return rng.uniform(size=(6, 1))

    def first(self, local, received, batch):
        return cross_entropy(local["a"](batch.views[0]), batch.y)

    def second(self, local, received, batch):
        x = batch.views[0]
        gap = local["b"](x) - local["a"](x) + 0.1 * received["c"](x)
        return cross_entropy(local["b"](x), batch.y) + gap.square().mean()

    def third(self, local, received, own, labelled, share):
        target = share * received["a"](own.views[1]) + (1 - share) * received["b"](own.views[0])
        fit = (local["c"](own.views[1]) - target).square().mean()
        return fit + cross_entropy(local["c"](labelled.views[0]), labelled.y)

    def fit(self, local, received, batch):
        return cross_entropy(local["b"](batch.views[1]), batch.y)

    def pull(self, local, received):
        return {"b": local["b"].lerp(received["a"], torch.tensor(0.01))}


@pytest.mark.parametrize("count", COUNTS)
def test_phases_that_build_on_each_other_stay_in_order(count):
    data = small.dataset(flip=True, crop=2)
    sites = small.beside(*(small.site(data, range(n), range(n, 120 - n), f"client {n}") for n in (10, 44, 5)))
    method, made = Chained(small.net(), epochs=1), pool(count)
    assert_lanes_train_as_eagerly(made, method, sites)
    assert len(made.lanes) == min(count, 6)  # two chains a client


@dataclass(frozen=True)
class Smooth(FedAvg):
    """FedAvg with a penalty on the gradient itself."""

    def loss(self, local, received, batch):
        loss = super().loss(local, received, batch)
        (gradient,) = torch.autograd.grad(loss, local["w"].weights, create_graph=True)
        return loss + 0.1 * gradient.square().sum()


def test_a_loss_may_hold_a_gradient():
    assert_lanes_train_as_eagerly(pool(), Smooth(small.net(), batch=8, epochs=1), clients()[:2])


def test_a_federation_on_lanes_is_that_on_cores():
    """Three rounds of a whole simulation, memory included."""
    for method in (small.hassle(), small.Tutored(small.net(), epochs=1, lr=0.01)):
        only = {"client 2", "client 3", "client 4"} if method.headline == "model" else None
        states = []
        for on_lanes in (False, True):
            simulator = small.simulator(small.dataset(flip=True), only=only)
            simulator.trainer.lanes = pool(2) if on_lanes else None
            rounds = federate(method, simulator, Plan(3, 3, 0), method.initial(0))
            states.append([done.state for done in rounds])
        assert all(small.same(a, b) for a, b in zip(*states, strict=True))


def test_a_network_that_draws_by_itself_trains_alone(caplog, global_randomness):
    """Its noise comes from a state that all lanes share; a warning is logged once."""
    method = FedAvg(small.net(small.Jittery), **short("fedavg"))
    with caplog.at_level(logging.WARNING, "fedhassle"):
        assert_lanes_train_as_eagerly(pool(), method, clients(), rounds=3)
    (warning,) = caplog.records
    assert "global random state" in warning.getMessage()


@pytest.mark.parametrize("name", METHODS)
def test_dropout_on_lanes_has_the_masks_of_training_alone(name, caplog, global_randomness):
    """Of every method; lanes record their steps like those of other networks, and no warning is logged."""
    method = METHODS[name](small.net(small.Dropping), **short(name))
    lanes = pool()
    with caplog.at_level(logging.WARNING, "fedhassle"):
        assert_lanes_train_as_eagerly(lanes, method, clients())
    assert caplog.records == [] and lanes.seconds


def test_nothing_is_logged_if_all_goes_well(caplog):
    with caplog.at_level(logging.DEBUG, "fedhassle"):
        assert_lanes_train_as_eagerly(pool(), small.hassle(), clients())
    assert caplog.records == []


# Chains


def job(name, *trained):
    """A job that trains some names; its other fields are not used."""
    descents = tuple(Descent(k, None, SGD()) for k in trained)
    return Job(Phase(name, (Stream("labelled"),), descents, 1), None, {}, {}, {}, (name,))


def planned(*jobs, kept=None):
    return Visit(jobs, kept or {}, Update(Client("k", 1, 1), {}, {}, {}))


def names(parts):
    return sorted([job.phase.name for job in part.jobs] for part in parts)


def test_independent_phases_are_apart_and_shared_names_together():
    apart = planned(job("1", "a"), job("2", "b"), job("3", "c"))
    assert names(connected(apart)) == [["1"], ["2"], ["3"]]
    shared = planned(job("1", "a"), job("2", "b"), job("3", "a", "c"), job("4", "d"), job("5", "c"))
    assert names(connected(shared)) == [["1", "3", "5"], ["2"], ["4"]]


def test_a_phase_that_trains_two_names_joins_those_before_it_in_their_order():
    bridged = planned(job("1", "a"), job("2", "b"), job("3", "c"), job("4", "c", "a"), job("5", "b"))
    assert names(connected(bridged)) == [["1", "3", "4"], ["2", "5"]]
    whole = planned(job("1", "a"), job("2", "b"), job("3", "b"), job("4", "a", "b"))
    assert names(connected(whole)) == [["1", "2", "3", "4"]]


def test_a_phase_that_comes_twice_keeps_both_its_places():
    twice = planned(job("1", "a"), job("2", "a"), job("1", "a"))
    assert twice.jobs[0] == twice.jobs[2]
    assert names(connected(twice)) == [["1", "2", "1"]]


def test_a_client_that_keeps_something_does_all_in_order():
    before = {"m": torch.ones(1)}
    (part,) = connected(planned(job("1", "a"), job("2", "b"), job("3", "a"), kept=before))
    assert names([part]) == [["1", "2", "3"]] and part.kept is before
    assert connected(planned()) == []


def test_labels_counted_before_are_left_to_one_count():
    """Each part counts from zero; otherwise labels given before training would be counted several times."""
    visit = planned(job("1", "a"), job("2", "b"))
    counted = visit._replace(update=visit.update._replace(labelling=torch.tensor([3.0, 5.0, 6.0, 4.0])))
    assert [part.update.labelling.tolist() for part in connected(counted)] == [[0] * 4, [0] * 4]


def test_chains_know_their_client():
    visits = [planned(job("1", "a"), job("2", "b")), planned(), planned(job("3", "a"), job("4", "a"))]
    found = [(chain.client, *names([chain.visit])) for chain in chains(visits)]
    assert sorted(found) == [(0, ["1"]), (0, ["2"]), (2, ["3", "4"])]


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=3), max_size=7), st.booleans())
def test_chains_are_disjoint_complete_and_as_small_as_can_be(trained, keeps):
    """The components of the graph whose edges join phases with a common name, found by flooding it."""
    visit = planned(*(job(str(i), *names) for i, names in enumerate(trained)), kept={"m": 1} if keeps else {})
    component = list(range(len(trained)))
    for _ in trained:
        for i, j in itertools.combinations(range(len(trained)), 2):
            if keeps or trained[i] & trained[j]:
                component[i] = component[j] = min(component[i], component[j])
    expected = [[str(i) for i, c in enumerate(component) if c == k] for k in sorted(set(component))]
    assert names(connected(visit)) == sorted(expected)


# Scheduling


def beginnings(monkeypatch):
    """A list of (lane, client) for each job that starts from now on."""
    plain, begun = Lane.run_jobs, []

    def run_jobs(self, jobs, *args):
        begun.extend((self, job.site.client.name) for job in jobs)
        return (yield from plain(self, jobs, *args))

    monkeypatch.setattr(Lane, "run_jobs", run_jobs)
    return begun


def by_size(*sizes):
    """Clients of FedAvg whose sizes in batches of 4 are their names and their steps."""
    return small.beside(*(small.site(labelled=range(4 * n), name=str(n)) for n in sizes)) if sizes else []


def test_lanes_alternate_between_longest_and_shortest_first(monkeypatch):
    """30 and 10 start; a 20 follows 10 and ends with 30, so the first lane takes the other 20."""
    begun, made = beginnings(monkeypatch), pool(2)
    method = FedAvg(small.net(small.Linear), batch=4, epochs=1)
    made.train([visit(method, site, method.initial(0), None, 1, 0) for site in by_size(10, 20, 30, 20)])
    first, second = made.lanes
    assert begun == [(first, "30"), (second, "10"), (second, "20"), (first, "20")]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), unique=True, max_size=8), st.integers(1, 4))
def test_every_client_is_trained_once_longest_or_shortest_first(sizes, count):
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun, made = beginnings(monkeypatch), pool(count)
        method = FedAvg(LINEAR, batch=4, epochs=1)
        found = made.train([visit(method, site, START, None, 1, 0) for site in by_size(*sizes)])
    assert sorted(int(name) for _, name in begun) == sorted(sizes)
    for i, lane in enumerate(made.lanes):
        order = [int(name) for at, name in begun if at is lane]
        assert order == sorted(order, reverse=i % 2 == 0)
    assert [update.client.name for update, _ in found] == [str(n) for n in sizes]
    assert len({lane for lane, _ in begun}) == min(count, len(sizes))


# Streams


class Lent:
    """A stand-in for a stream."""

    def __init__(self, device, priority):
        self.device, self.priority = device, priority


def test_a_stream_has_one_holder_at_a_time():
    streams, device = Streams(Lent), torch.device("cuda", 0)
    taken = [streams.take(device) for _ in range(2 * EACH)]
    assert len(set(taken)) == 2 * EACH and streams.take(device) is None
    assert [stream.priority for stream in taken] == [USUAL] * EACH + [FIRST] * EACH
    for stream in taken[3], taken[-1]:
        streams.give_back(stream)
    assert streams.take(device, FIRST) is taken[-1]
    assert streams.take(device, FIRST) is taken[3] and streams.take(device, USUAL) is None


def test_a_stream_may_come_back_while_another_is_taken():
    """Garbage collection may free a lane at any time, here while streams are created.

    It runs once, since it takes a second with a large heap. The timeout of the join ends a deadlock.
    """
    device, due = torch.device("cuda", 0), []

    def make(device, priority):
        while due:
            due.pop()()
        return Lent(device, priority)

    streams = Streams(make)

    class Holder:
        """An object that only garbage collection frees."""

        def __init__(self):
            self.itself = self

    held = streams.take(device)
    lane = Holder()
    came_back = weakref.finalize(lane, streams.give_back, held)
    due.append(gc.collect)
    del lane
    taken = []
    thread = threading.Thread(target=lambda: taken.append(streams.take(device, FIRST)), daemon=True)
    thread.start()
    thread.join(small.LIMIT)
    assert [stream.priority for stream in taken] == [FIRST]
    assert not came_back.alive
    assert held in [streams.take(device) for _ in range(EACH)]


def test_another_gpu_has_streams_of_its_own():
    streams = Streams(Lent)
    made = [streams.take(torch.device("cuda", i), FIRST) for i in (0, 1)]
    assert [stream.device.index for stream in made] == [0, 1]


# Parts of an update


def part(arrays, losses, labelling=(0.0, 0.0, 0.0, 0.0), kept=None):
    def tensors(values):
        return {k: torch.tensor([float(v)]) for k, v in values.items()}

    update = Update(Client("k", 1, 1), tensors(arrays), {}, tensors(losses), torch.tensor(labelling))
    return update, tensors(kept or {})


def test_parts_are_joined_in_the_order_of_the_phases():
    """Names in the order of eager training: b, a, c; all label counts add up."""
    jobs = job("1", "b"), job("2", "a", "b"), job("3", "c")
    update = Update(Client("k", 3, 5), {}, {"b": 3, "a": 8, "c": 5}, {}, torch.tensor([2.0, 3.0, 9.0, 2.0]))
    parts = [
        part({"c": 3}, {"c": 0.3}, [1.0, 4.0, 5.0, 3.0]),
        part({"a": 1, "b": 2}, {"a": 0.1, "b": 0.2}, [0.0, 2.0, 2.0, 1.0]),
    ]
    found, kept = joined(Visit(jobs, {}, update), parts)
    assert list(found.arrays) == list(found.losses) == ["b", "a", "c"]
    assert [v.item() for v in found.arrays.values()] == [2, 1, 3]
    assert [v.item() for v in found.losses.values()] == pytest.approx([0.2, 0.1, 0.3])
    assert found.labelling.tolist() == [3, 9, 16, 6] and kept == {}
    assert found.samples == update.samples and found.client == update.client


def test_a_client_of_unknown_truth_counts_no_right_labels_and_keeps_its_state():
    visit = planned(job("1", "a"), kept={"m": torch.zeros(1)})
    visit = visit._replace(update=visit.update._replace(labelling=torch.tensor([0.0, 1.0, 2.0, 0.0])))
    found, kept = joined(visit, [part({"a": 1}, {"a": 2}, [0.0, 3.0, 4.0, 0.0], kept={"m": 7})])
    assert found.labelling.tolist() == [0, 4, 6, 0]
    assert kept["m"].tolist() == [7]


def test_a_client_that_does_nothing_keeps_what_it_has():
    before = {"m": torch.ones(1)}
    found, kept = joined(planned(kept=before), [])
    assert found.arrays == found.losses == {} and kept is before


# Out of memory


def test_the_memory_of_a_lane_is_measured_when_it_has_something_to_record(monkeypatch):
    """A first round without clients measures nothing."""
    made, seen = pool(2), []
    monkeypatch.setattr(
        made, "_memory_in_use", lambda: seen.append([len(lane.programs) for lane in made.lanes]) or 0
    )
    assert made.train([]) == []
    (site,) = by_size(8)
    made.train([visit(FedAvg(LINEAR, batch=4, epochs=1), site, START, None, 1, 0)])
    assert seen == [[], [1]]


def failing(monkeypatch, calls):
    """Makes some of the jobs, counted from 1, run out of memory after their first stretch."""
    plain, count = Lane.run_jobs, itertools.count(1)

    def run_jobs(self, *args):
        steps, fails = plain(self, *args), next(count) in calls
        next(steps)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory: so it says")
        yield
        return (yield from steps)

    monkeypatch.setattr(Lane, "run_jobs", run_jobs)


@pytest.mark.parametrize(
    ("calls", "left"),
    [({1}, [8, 4]), ({14}, [8, 4]), ({1, 2}, [8, 4, 2]), ({3, 9, 20}, [8, 4, 2, 1])],
    ids=["at once", "half way", "twice", "down to one"],
)
def test_a_round_out_of_memory_is_repeated_with_half_the_lanes(calls, left, monkeypatch, caplog):
    """16 independent jobs on 8 lanes; later rounds keep the smaller number."""
    method, made, sites = small.hassle(), pool(8), clients()
    failing(monkeypatch, calls)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        assert_lanes_train_as_eagerly(made, method, sites)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"out of memory: repeating the round with {few} of {many} lanes"
        for many, few in itertools.pairwise(left)
    ]
    assert len(made.lanes) == left[-1]


def test_a_job_that_does_not_fit_when_recorded_is_a_user_error(monkeypatch):
    """It is recorded while there is only one lane."""

    def draw(job):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(recording, "draw", draw)
    with pytest.raises(UserError, match="not enough GPU memory"):
        assert_lanes_train_as_eagerly(pool(8), small.hassle(), clients(), rounds=1)


def test_clients_share_no_kernels_if_a_single_lane_is_out_of_memory(monkeypatch, caplog):
    method, made, sites = small.hassle(), pool(2, stack=4), clients()
    failing(monkeypatch, {1, 2})
    with caplog.at_level(logging.WARNING, "fedhassle"):
        assert_lanes_train_as_eagerly(made, method, sites)
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory: repeating the round with 1 of 2 lanes",
        "out of memory: repeating the round with kernels for one client each (stack=1)",
    ]
    assert (len(made.lanes), made.seats) == (2, 1)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_single_lane_that_does_not_fit_is_a_user_error(count, monkeypatch, caplog):
    failing(monkeypatch, range(1, 100))
    method, sites = small.hassle(), clients()
    planned = [visit(method, site, method.initial(0), None, 1, 0) for site in sites]
    with (
        caplog.at_level(logging.WARNING, "fedhassle"),
        pytest.raises(UserError, match=r"not enough GPU memory.*method\.batch.*precision=bf16.*device=cpu"),
    ):
        pool(count).train(planned)
    assert len(caplog.records) == count.bit_length() - 1  # 8, 4, 2, 1


def test_other_errors_are_passed_on(monkeypatch):
    def run_jobs(self, *args):
        yield
        raise RuntimeError("something else")

    monkeypatch.setattr(Lane, "run_jobs", run_jobs)
    with pytest.raises(RuntimeError, match="something else"):
        pool(4).train([visit(small.hassle(), clients()[1], small.hassle().initial(0), None, 1, 0)])
