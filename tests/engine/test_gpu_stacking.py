"""Jobs that share kernels: each client ends as if it had trained alone, up to rounding."""

import logging

import pytest
import small
import torch
from on_lanes import assert_lanes_train_as_eagerly, clients, pool
from torch.utils import _pytree as pytree

from fedhassle import layers, nets
from fedhassle.architectures import LeNet, ResNet8
from fedhassle.engine.client import visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.chains import Chain, grouped
from fedhassle.engine.gpu.program import STRETCH, Program, Seat, common_stretches, stretch_functions
from fedhassle.engine.gpu.stacking import UnstackableError, for_all_seats
from fedhassle.engine.job import draw
from fedhassle.methods import METHODS, FedAvg


@pytest.fixture(autouse=True)
def layers_of_a_gpu(monkeypatch):
    """Layers have another path on a CPU, which has no batched form."""
    monkeypatch.setattr(layers, "trained_on_cpu", lambda layer, x: False)


LINEAR = small.net(small.Linear)
DATA = small.dataset(1, 12)


def several(count, labelled=12, unlabelled=0):
    """Clients with as many samples each, of their own."""
    rows = [range(i * (labelled + unlabelled), (i + 1) * (labelled + unlabelled)) for i in range(count)]
    return small.beside(*(small.site(DATA, r[:labelled], r[labelled:], str(r.start)) for r in rows))


def visits(method, sites, t=1):
    """The rounds of clients."""
    state = method.initial(0)
    return [visit(method, site, method.message(state, site.client, t), None, t, 0) for site in sites]


def assert_close(found, expected):
    """Asserts equal updates and states up to rounding, with names in the same order."""
    (update, kept), (other, memory) = found, expected
    assert (update.client, update.samples) == (other.client, other.samples)
    assert list(update.arrays) == list(other.arrays) and list(kept) == list(memory)
    for mine, its in ((update.arrays, other.arrays), (update.losses, other.losses), (kept, memory)):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(update.labelling, other.labelling)


def assert_trained_as_alone(made, method, sites, rounds=2):
    assert_lanes_train_as_eagerly(made, method, sites, rounds, assert_close)


def seats_used(made):
    """The numbers of seats of all programs on the lanes."""
    return {form.seats for lane in made.lanes for form in lane.programs}


def warnings_in(caplog):
    """Messages of our own warnings."""
    return [r.getMessage() for r in caplog.records if r.name == "fedhassle" and r.levelno >= logging.WARNING]


# Whole rounds


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"central", "central-fixmatch"}))
def test_clients_that_share_kernels_end_as_if_alone(name):
    net = small.net(LeNet, 1, 12, width=0.5)
    short = {"residual_steps": 13} if name == "hassle" else {}
    method = METHODS[name](net=net, batch=4, epochs=1, lr=0.01, **short).for_run(2, (), 5)
    sites = several(5, 9, 11)
    made = pool(2, stack=3)
    assert_trained_as_alone(made, method, sites)
    assert 3 in seats_used(made)


@pytest.mark.parametrize("name", ["fedavg", "hassle"])
def test_compiled_steps_for_several_seats_are_the_eager_ones(name, quick_compiler, caplog):
    """23 steps: two stretches of ten, one of two and one of one."""
    short = {"epochs": 1, "residual_steps": 23} if name == "hassle" else {"epochs": 23}
    method = METHODS[name](net=small.net(LeNet, 1, 12, width=0.5), batch=4, lr=0.01, **short)
    made = pool(1, stack=2, compile=True)
    assert_trained_as_alone(made, method, several(2, 4, 4), rounds=1)
    assert seats_used(made) == {2} and warnings_in(caplog) == []


class Dropped(LeNet):
    """A network with dropout, whose masks come from the seed of each step, and maybe stochastic depth."""

    depth = 1.0

    def forward(self, x):
        z = torch.nn.functional.dropout(super().forward(x), 0.3, self.training)
        kept = torch.empty(len(z), 1, device=z.device)
        return z * kept.bernoulli_(self.depth) if self.training and self.depth < 1 else z


class Deep(Dropped):
    depth = 0.9


def test_clients_of_many_sizes_and_a_network_with_dropout():
    made = pool(2, stack=4)
    assert_trained_as_alone(made, FedAvg(small.net(Dropped, 1, 12), batch=8, epochs=2), clients(1, 12))
    assert 4 in seats_used(made)


def test_a_network_that_has_no_batched_form_trains_clients_one_by_one(caplog):
    caplog.set_level(logging.INFO, "fedhassle")
    made = pool(2, stack=2)
    assert_trained_as_alone(made, FedAvg(small.net(Deep, 1, 12), batch=8, epochs=1), several(4))
    assert seats_used(made) == {1}
    assert warnings_in(caplog) == []
    told = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert [text.partition(": ")[0] for text in told] == ["phase 'labelled' trains clients one by one"]


def test_clients_of_a_network_with_batchnorm_train_one_by_one(caplog):
    data = small.dataset(3, 6)
    sites = small.beside(*(small.site(data, range(9 * i, 9 * i + 9), name=str(i)) for i in range(2)))
    made = pool(2, stack=2)
    method = FedAvg(small.net(ResNet8, 3, 6, width=0.125), batch=8, epochs=1)
    assert_trained_as_alone(made, method, sites, rounds=1)
    assert seats_used(made) == {1} and warnings_in(caplog) == []


def test_clients_of_a_large_network_train_one_by_one(monkeypatch):
    monkeypatch.setattr(nets, "LARGE", small.net(LeNet, 1, 12).operations)
    made = pool(2, stack=2)
    assert_trained_as_alone(made, FedAvg(small.net(LeNet, 1, 12), batch=8, epochs=1), several(2), rounds=1)
    assert seats_used(made) == {1}


# Groups


def sized(*steps, shape="a"):
    """Chains of one job each, that takes so many steps."""
    sites = small.beside(*(small.site(labelled=range(4 * n), name=str(n)) for n in steps))
    planned = visits(FedAvg(LINEAR, batch=4, epochs=1), sites)
    return [Chain(i, one, (shape,)) for i, one in enumerate(planned)]


def sizes(groups):
    return [([chain.visit.jobs[0].steps for chain in group.chains], group.seats) for group in groups]


def test_a_group_is_at_least_half_full_and_its_longest_chain_at_most_twice_its_shortest():
    assert sizes(grouped(sized(5, 30, 8, 9, 10), 4, ())) == [([30], 1), ([10, 9, 8, 5], 4)]
    assert sizes(grouped(sized(4, 10, 9, 30), 4, ())) == [([30], 1), ([10, 9], 4), ([4], 1)]
    assert sizes(grouped(sized(10, 10, 10), 2, ())) == [([10, 10], 2), ([10], 1)]


def test_chains_of_other_shapes_and_those_left_alone_are_not_grouped():
    work = [*sized(10, 10), *sized(10, 10, shape="b")]
    assert sizes(grouped(work, 4, ())) == [([10, 10], 4)] * 2
    assert sizes(grouped(work, 4, {"a"})) == [([10], 1), ([10], 1), ([10, 10], 4)]


def test_without_stacks_each_chain_trains_alone():
    assert sizes(grouped(sized(10, 10), 1, ())) == [([10], 1), ([10], 1)]


@pytest.mark.parametrize(("batch", "seats"), [(1024, 4), (1025, 3), (2048, 2), (5000, 1)])
def test_large_steps_share_kernels_with_few_others(batch, seats):
    sites = small.beside(*(small.site(labelled=range(4), name=str(i)) for i in range(4)))
    work = [Chain(i, one) for i, one in enumerate(visits(FedAvg(LINEAR, batch=batch, epochs=1), sites))]
    assert max(group.seats for group in grouped(work, 4, ())) == seats


def test_jobs_that_end_at_different_steps_have_stretches_in_common():
    """7 = 5 + 2, then 17 to 24: 10 + 5 + 2 more, and the last 3 of 27 are 2 + 1."""
    assert common_stretches([7]) == [5, 2]
    assert common_stretches([24, 7, 27, 7]) == [5, 2, 10, 5, 2, 2, 1]


# Programs


def programs(method, seats):
    """A job, a program with seats for its shape, and the functions for one of them."""
    job = visits(method, several(1, 40))[0].jobs[0]
    program = Program(Seat.of(job, job.message, {}, draw(job)), seats)
    engine = Engine(small.CPU)
    return job, program, stretch_functions(job, program.example.questions(job, engine), engine)


def test_a_seat_that_has_ended_keeps_its_result_while_others_go_on():
    _, program, made = programs(FedAvg(LINEAR, batch=4, epochs=1), 2)
    functions = for_all_seats(made, program)
    result = program.seats[0].result()
    before = {name: w.clone() for name, w in result.weights.items()}
    program.run(functions, 2)
    assert small.same(result.weights, before)
    assert not torch.equal(program.seats[0].buffers.weights["w"], before["w"])


def test_each_seat_has_a_schedule_of_its_own_and_one_without_repeats_another():
    job, program, _ = programs(FedAvg(LINEAR, batch=4, epochs=1), 3)
    schedule = draw(job)
    program.load_schedules([schedule.between(0, 2).tensors, None, schedule.between(2, 4).tensors][:2])
    for whole, drawn in zip(program.schedule.tensors, schedule.tensors, strict=True):
        assert all(torch.equal(whole[:2, i], drawn[:2]) for i in range(3))
    program.load_schedules([None, schedule.between(2, 4).tensors, schedule.between(4, 6).tensors])
    for whole, drawn in zip(program.schedule.tensors, schedule.tensors, strict=True):
        for seat, first in enumerate((2, 2, 4)):
            assert torch.equal(whole[:2, seat], drawn[first : first + 2])


def test_seats_share_the_images_and_nothing_else():
    _, program, _ = programs(FedAvg(LINEAR, batch=4, epochs=1), 2)
    one, other = (seat.buffers for seat in program.seats)
    assert one.images is other.images
    own = [pytree.tree_leaves(buffers._replace(images=None)) for buffers in (one, other)]
    for mine, its in zip(*own, strict=True):
        if mine is not None and mine.numel():
            mine.fill_(7)
            its.fill_(8)
            assert (mine == 7).all()


def test_what_fails_in_a_batch_is_named():
    _, program, made = programs(FedAvg(LINEAR, batch=4, epochs=1), 2)

    def step(buffers, inputs):
        buffers.weights["w"].add_(torch.nonzero(inputs.batches[0].y).sum())

    with pytest.raises(UnstackableError):
        for_all_seats(made._replace(step=step), program)


assert STRETCH == 10  # which the numbers above assume
