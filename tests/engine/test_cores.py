"""Clients in parallel, with the same bits."""

import threading

import pytest
import small
import torch

from fedhassle.architectures import LeNet
from fedhassle.engine.cores import on_cores, side_by_side
from fedhassle.engine.evaluate import score
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.methods import METHODS
from fedhassle.runs.run import start
from fedhassle.runs.train import train_run
from fedhassle.settings.request import request


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers):
    """Later items finish first: each even item waits for the next one."""
    done = [threading.Event() for _ in range(7)]

    def work(i):
        if workers > 1 and i % 2 == 0 and i + 1 < len(done):
            assert done[i + 1].wait(small.LIMIT)
        done[i].set()
        return i * i

    assert side_by_side(work, range(7), workers) == [0, 1, 4, 9, 16, 25, 36]


def test_each_call_has_one_torch_thread():
    assert side_by_side(lambda _: torch.get_num_threads(), range(4), 2) == [1] * 4


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), on_cores(before + 1):
        assert torch.get_num_threads() == before + 1
        _ = 1 / 0
    assert torch.get_num_threads() == before


def test_a_run_leaves_the_callers_threads_as_they_were(words, tmp_path):
    with on_cores(3):
        steps = train_run(start(request(None, [*words, "rounds=2"]), tmp_path / "run"))
        seen = [torch.get_num_threads() for _ in steps]
        assert torch.get_num_threads() == 3
    assert seen == [1, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_is_raised_and_the_rest_does_not_start(workers):
    begun = []

    def work(i):
        begun.append(i)
        if i == 0:
            raise ZeroDivisionError("the first")
        threading.Event().wait(0.5)  # 500 would take 80 s: time enough to cancel them on any machine

    with pytest.raises(ZeroDivisionError, match="the first"):
        side_by_side(work, range(500), workers)
    assert len(begun) < 500


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_workers_changes_no_bit(name):
    data = small.dataset(flip=True, crop=2)
    short = {"residual_steps": 2} if name == "hassle" else {}
    method = METHODS[name](net=small.net(), batch=8, epochs=2, **short)
    results = []
    for workers in (1, 2, 4):
        simulator = Simulator(data, small.SPLIT, 0, small.ENGINE, workers)
        rounds = list(federate(method, simulator, Plan(3, 5, 0), method.initial(0)))
        images, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
        results.append((rounds, score(method, rounds[-1].state, images, y, simulator.trainer.views, workers)))
    (first, scores), *others = results
    for rounds, found in others:
        assert found == scores
        for mine, theirs in zip(first, rounds, strict=True):
            assert small.same(mine.state, theirs.state)
            assert [r.update.client for r in mine.replies] == [r.update.client for r in theirs.replies]


def test_networks_that_draw_are_detected():
    none, seeded, globally = (False, False), (True, False), (False, True)
    expected = {LeNet: none, small.ConvNet: none, small.NoisyNet: seeded, small.Jittery: globally}
    for build, randomness in expected.items():
        assert small.net(build).randomness == randomness


@pytest.mark.parametrize("build", [small.NoisyNet, small.Dropping, small.Jittery])
def test_a_network_that_draws_gives_the_same_with_many_workers(build, global_randomness):
    data = small.dataset()
    method = METHODS["fedavg"](net=small.net(build), batch=8, epochs=2)
    states = []
    for workers in (1, 4):
        simulator = Simulator(data, small.SPLIT, 0, small.ENGINE, workers)
        *_, last = federate(method, simulator, Plan(2, 6, 0), method.initial(0))
        states.append(last.state)
    assert small.same(*states)


def test_one_network_serves_many_threads_at_once():
    """No thread sees the weights of another, in either mode."""
    net = small.net(small.ConvNet)
    x = torch.rand(64, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    vectors = [net.initial(seed) for seed in range(5)]

    def logits(seed):
        weights, statistics = net.parts(vectors[seed % 5])
        return net(weights, statistics.clone(), x, training=seed % 2 == 0)

    expected = [logits(seed) for seed in range(60)]
    found = side_by_side(logits, range(60), 8)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
