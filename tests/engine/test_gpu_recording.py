"""Recordings: jobs that share one, and replayed steps that equal eager steps."""

import itertools
import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import small
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedhassle import layers
from fedhassle.architectures import LeNet, ResNet8, WideResNet28
from fedhassle.engine.client import advance, prepare, train, visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.graphs import Compiler
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.gpu.program import STRETCH, Program, Seat, stretch_functions, stretched, stretches
from fedhassle.engine.gpu.recording import RECORDINGS, FunctionsByShape
from fedhassle.engine.gpu.shapes import identity, shape_of
from fedhassle.engine.job import Job, draw
from fedhassle.errors import UserError
from fedhassle.losses import cross_entropy
from fedhassle.method import Stream
from fedhassle.methods import METHODS, FedAvg, FedProx, Hassle
from fedhassle.optimiser import SGD, AdamW

METHODS_AND_SETTINGS = pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {}),
        ("fedprox", {"mu": 0.1}),
        ("hassle", {}),
        ("hassle", {"pseudo_labels": "online", "confidence": 0.3, "residual_target": "with_residual"}),
        ("hassle", {"proximity": "norm"}),
    ],
    ids=["fedavg", "fedprox", "hassle", "hassle online", "hassle norm"],
)
BASELINES = pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixmatch", {"rounds": 3}),
        ("fixmatch", {"confidence": 0.3}),
        ("fedmatch", {"confidence": 0.3, "helper_rounds": 2, "unlabelled": True}),
        ("rscfed", {"partial": "mixed"}),
        ("fixmatch-global", {"confidence": 0.3}),
        ("sage", {"confidence": 0.3, "halving": 0.3}),
    ],
    ids=["mixmatch", "fixmatch", "fedmatch", "rscfed", "fixmatch-global", "sage"],
)
NETWORKS = pytest.mark.parametrize(
    ("build", "side", "width"),
    [(LeNet, 12, 0.5), (small.ConvNet, 12, 1.0), (ResNet8, 6, 0.125), (small.Dropping, 12, 1.0)],
    ids=["lenet", "own", "resnet8", "dropout"],
)


@cache
def somewhere(side):
    return small.site(small.dataset(3, side, flip=True, crop=2))


def site(side=small.SIDE, labelled=12, unlabelled=13, name="here"):
    """A client on a table of images that all share."""
    data = small.dataset(3, side)
    here = small.site(data, range(labelled), range(40, 40 + unlabelled), name)
    return small.beside(somewhere(side), here)[1]


def made(name, build=small.ConvNet, side=small.SIDE, width=1.0, **settings):
    short = {"residual_steps": 11} if name == "hassle" else {}
    return METHODS[name](
        net=small.net(build, 3, side, width=width), **{"batch": 8, "epochs": 2, **short, **settings}
    )


def jobs(method, here=None, t=1, state=None):
    """The jobs of a client's round, and what it keeps."""
    here = site() if here is None else here
    state = method.initial(0) if state is None else state
    planned = visit(method, here, method.message(state, here.client, t), None, t, 0)
    return [(job, planned.kept) for job in planned.jobs]


def program(job, kept):
    return Program(Seat.of(job, job.message | kept, kept, draw(job)))


def written(buffers):
    """Copies of all that steps write."""
    plain = {
        f"{kind}/{name}": value.clone()
        for kind in ("weights", "statistics", "losses")
        for name, value in getattr(buffers, kind).items()
    }
    states = {
        f"optimiser/{name}/{i}": value.clone()
        for name, state in buffers.optimiser.items()
        for i, value in enumerate(state)
    }
    return plain | states | {"labelling": buffers.labelling.clone()}


def eagerly(job, kept, schedule):
    """The buffers after the steps of a schedule, run one by one."""
    buffers = prepare(job, job.message | kept, kept)
    for i in range(schedule.steps):
        advance(job, buffers, schedule.between(i, i + 1))
    return buffers


# Identity of functions


class Holder:
    """Something with a method."""

    def double(self, x):
        return 2 * x


def test_functions_created_from_the_same_parts_are_equal():
    holder, method = Holder(), Hassle(small.net())
    assert identity(holder.double) == identity(holder.double)
    assert identity(partial(holder.double, 3)) == identity(partial(holder.double, 3))
    assert identity(partial(max, key=holder.double)) == identity(partial(max, key=holder.double))
    assert identity(partial(partial(max, 1), 2)) == identity(partial(max, 1, 2))
    (first, *_), (second, *_) = (method.phases(site().client, t) for t in (1, 2))
    assert first.descents[0].loss is not second.descents[0].loss
    assert identity(first.descents[0].loss) == identity(second.descents[0].loss)
    assert identity(None) == identity(None)


def test_other_functions_owners_and_arguments_differ():
    one, other = Holder(), Holder()
    functions = [
        *(one.double, other.double, max, min, None),
        *(partial(one.double, 1), partial(one.double, 2), partial(other.double, 1), partial(max, 1)),
        *(partial(max, key=1), partial(max, default=1), partial(max, key=1, default=1)),
    ]
    assert len({identity(function) for function in functions}) == len(functions)
    assert identity(partial(max, key=1, default=2)) == identity(partial(max, default=2, key=1))


def scaled(by, plus=0):
    """Functions with the same code and other numbers in their closure."""
    return lambda x: by * x + plus


def drawing(size, scale=1.0):
    """Draws of a step: so many numbers."""
    return lambda rng: scale * rng.random(size)


def defaulting(by):
    """Functions with the same code and other default values."""
    return lambda x, by=by: by * x


@pytest.mark.parametrize("make", [scaled, defaulting, lambda value: partial(max, value)])
def test_functions_with_other_numbers_differ(make):
    values = [1, 2, 1.0, True, False, 0, 0.5, "1", None, (1, 2), (1, 2.0), (2, 1), ((1,), 2)]
    found = [identity(make(value)) for value in values]
    assert len(set(found)) == len(values)
    assert [identity(make(value)) for value in values] == found


def keyword_only(by):
    """Functions with other defaults of a keyword-only argument."""
    return lambda x, *, by=by: by * x


def test_functions_with_other_keyword_defaults_differ():
    assert identity(keyword_only(1)) == identity(keyword_only(1))
    assert identity(keyword_only(1)) != identity(keyword_only(2))


def test_lambdas_of_other_code_differ():
    assert identity(scaled(1)) != identity(defaulting(1))
    assert identity(lambda x: x) != identity(lambda x: x + 1)
    assert identity(scaled(1, 2)) == identity(scaled(1, 2)) != identity(scaled(2, 1))


def test_tensors_and_other_objects_are_compared_by_identity():
    """Equal contents may differ later."""
    a, b = torch.ones(2), torch.ones(2)
    assert identity(scaled(a)) == identity(scaled(a)) != identity(scaled(b))
    numbers, others = [1.0], [1.0]
    assert identity(scaled(numbers)) == identity(scaled(numbers)) != identity(scaled(others))
    inner = scaled(3)
    assert identity(scaled(inner)) == identity(scaled(scaled(3))) != identity(scaled(scaled(4)))


# Shapes


def shapes(method, here=None, t=1, state=None):
    return {job.phase.name: shape_of(job, kept) for job, kept in jobs(method, here, t, state)}


@METHODS_AND_SETTINGS
def test_rounds_and_clients_of_one_method_have_one_shape(name, settings):
    """If they receive the same names; their numbers of samples and steps do not matter."""
    method = made(name, **settings)
    state = method.initial(0)
    if name == "hassle":
        state |= {"w_S_before": state["w_S"], "w_U_before": state["w_U"]}
    first = shapes(method, state=state)
    assert len(set(first.values())) == len(first) == (4 if name == "hassle" else 1)
    assert shapes(method, t=2, state=state) == first
    assert shapes(method, site(labelled=40, unlabelled=70, name="other"), 9, state) == first


def test_other_messages_have_another_shape():
    """Round 1 has no earlier models; a full client does not receive arrays for unlabelled data."""
    method = made("hassle")
    state = method.initial(0)
    later = state | {"w_S_before": state["w_S"], "w_U_before": state["w_U"]}
    first, second = shapes(method, state=state), shapes(method, state=later)
    full = shapes(method, site(unlabelled=0), state=later)
    assert not set(first.values()) & set(second.values()) and not set(second.values()) & set(full.values())
    (job, kept), *_ = jobs(method)
    longer = job._replace(message={k: torch.cat([v, v]) for k, v in job.message.items()})
    renamed = job._replace(message={f"{k}'": v for k, v in job.message.items()})
    found = {shape_of(job, kept), shape_of(longer, kept), shape_of(renamed, kept)}
    assert len(found | {shape_of(job, {"m": torch.ones(1)}), shape_of(job, {"m": torch.ones(2)})}) == 5


def test_other_steps_have_another_shape():
    (job, kept), *_ = jobs(made("hassle"))
    phase, (descent,), (stream,) = job.phase, job.phase.descents, job.phase.streams
    phases = [
        phase,
        *(
            replace(phase, descents=(replace(descent, optimiser=sgd),))
            for sgd in (SGD(0.3), SGD(decay=0.1), SGD(clip=1.0), SGD(nesterov=True), AdamW())
        ),
        replace(phase, descents=(replace(descent, train="w_U"),)),
        replace(phase, descents=(replace(descent, loss=scaled(1)),)),
        replace(phase, descents=(descent, descent)),
        *(replace(phase, streams=(replace(stream, batch=n),)) for n in (4, 16)),
        replace(phase, streams=(replace(stream, views=("clean",)),)),
        replace(phase, streams=(replace(stream, part="unlabelled"),)),
        *(
            replace(phase, streams=(replace(stream, logits=scaled(n), labels=scaled(m), online=online),))
            for n, m, online in ((1, 1, False), (1, 1, True), (2, 1, True), (1, 2, True))
        ),
        replace(phase, streams=(stream, Stream("unlabelled", 8))),
        *(replace(phase, then=scaled(n)) for n in (1, 2)),
        *(replace(phase, draw=drawing(n)) for n in (1, 2)),
        replace(phase, name="other"),
    ]
    assert len({shape_of(job._replace(phase=phase), kept) for phase in phases}) == len(phases)
    alike = [replace(phase, draw=drawing(2, scale)) for scale in (1.0, 3.0)]  # draws are data
    assert len({shape_of(job._replace(phase=phase), kept) for phase in alike}) == 1
    longer = replace(phase, epochs=phase.epochs + 1)
    assert shape_of(job._replace(phase=longer), kept) == shape_of(job, kept)


def test_methods_with_other_settings_have_another_shape():
    """Their losses differ only by a number."""
    first, second = (FedProx(small.net(channels=3), batch=8, epochs=1, mu=mu) for mu in (0.1, 0.2))
    assert shapes(first) != shapes(second)


def test_other_images_and_views_have_another_shape():
    method, here = made("fedavg"), site()
    other = small.site(small.dataset(3), range(12))
    assert shapes(method, here) == shapes(method, site(name="there")) != shapes(method, other)
    assert shapes(method, here._replace(views=other.views)) != shapes(method, here)


# Values that change from round to round


@dataclass(frozen=True)
class Ramp(FedAvg):
    """FedAvg whose loss grows with the rounds, by a Python number in a closure."""

    def phases(self, client, t):
        (phase,) = super().phases(client, t)
        return (replace(phase, descents=(replace(phase.descents[0], loss=self.of_round(t)),)),)

    def of_round(self, t):
        return lambda *args: t * self.loss(*args)


def test_a_number_that_changes_every_round_is_used_and_logged_once(caplog):
    """The first rounds are recorded each; then a warning says that it should be a tensor."""
    method, lanes = Ramp(small.net(channels=3), batch=8, epochs=1, clip=0, lr=0.01), small_lanes()
    here, message = site(labelled=90), {"w": method.net.initial(0)}
    with caplog.at_level(logging.WARNING, "fedhassle"):
        for t in range(1, RECORDINGS + 4):
            ((update, _),) = lanes.train([visit(method, here, message, None, t, 0)])
            plain = FedAvg(method.net, batch=8, epochs=1, clip=0, lr=0.01 * t)  # t·ℓ at η is ℓ at t·η
            expected = train(plain, here, message, None, t, 0)[0]
            torch.testing.assert_close(update.arrays["w"], expected.arrays["w"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(update.losses["w"], t * expected.losses["w"], rtol=1e-4, atol=1e-5)
            assert len(caplog.records) == (t > RECORDINGS)
    message = caplog.records[0].getMessage()
    assert "phase 'labelled' runs eagerly" in message and "should be a tensor in the message" in message


def test_shapes_that_are_not_recorded_take_no_memory():
    """A number that changes every round must not fill the memory of a GPU."""
    method, lanes = Ramp(small.net(channels=3), batch=8, epochs=1), small_lanes()
    for t in range(1, 4 * RECORDINGS):
        lanes.train([visit(method, site(), method.initial(0), None, t, 0)])
    assert len(lanes.lanes[0].programs) <= RECORDINGS + 1


def small_lanes(lanes=2, **settings):
    return Lanes(Engine(small.CPU, lanes=lanes, **settings))


# Stretches


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, [1]),
        (4, [2, 2]),
        (5, [5]),
        (9, [5, 2, 2]),
        (10, [10]),
        (50, [10] * 5),
        (78, [10] * 7 + [5, 2, 1]),
        (100, [10] * 10),
    ],
)
def test_a_number_of_steps_is_split_into_few_stretches_of_few_sizes(steps, expected):
    assert stretches(steps) == expected


@pytest.mark.parametrize(("steps", "sizes"), [(5, {5}), (7, {5, 2}), (10, {10}), (13, {10, 2, 1})])
def test_a_lane_records_only_the_sizes_that_occur(steps, sizes):
    method, lanes = made("fedavg", epochs=1), small_lanes()
    here = site(labelled=8 * steps)
    lanes.train([visit(method, here, method.initial(0), None, 1, 0)])
    (program,) = lanes.lanes[0].programs.values()
    assert set(program.runs) == sizes


@METHODS_AND_SETTINGS
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 13])
def test_every_size_of_stretch_gives_the_eager_bits(name, settings, steps):
    """Also of frozen models, which are computed ahead for one, two, five or ten steps."""
    short = {"residual_steps": steps} if name == "hassle" else {}
    method = made(name, epochs=1, **short, **settings)
    here = site(labelled=8 * steps, unlabelled=min(8 * steps, 80))
    message = method.initial(0)
    ((found, _),) = small_lanes().train([visit(method, here, message, None, 1, 0)])
    expected, _ = train(method, here, message, None, 1, 0)
    assert small.same(found.arrays, expected.arrays) and small.same(found.losses, expected.losses)
    assert torch.equal(found.labelling, expected.labelling)


@pytest.mark.parametrize("steps", [1, 3, STRETCH, STRETCH + 4])
def test_a_stretch_for_recording_repeats_the_first_steps(steps):
    (job, _), *_ = jobs(small.Tutored(small.net(channels=3), epochs=1), site(labelled=6 * steps))
    schedule = draw(job)
    assert schedule.steps == steps
    found = pytree.tree_leaves(stretched(schedule))
    for tensor, original in zip(found, pytree.tree_leaves(schedule), strict=True):
        expected = [original[i % steps] for i in range(STRETCH)]
        assert torch.equal(tensor, torch.stack(expected))


# Programs


@pytest.mark.parametrize("build", [small.ConvNet, small.Linear])
def test_buffers_keep_their_addresses(build):
    """A graph reads and writes fixed addresses, those of the buffers and of the schedule."""
    method, lanes = small.Tutored(small.net(build, 3), epochs=2, lr=0.01), small_lanes()
    state, memory, places = method.initial(0), {}, []
    for t in (1, 2, 3):
        sites = [site(labelled=6 * n, unlabelled=5, name=str(n)) for n in (7, 3, 8 + t)]
        found = lanes.train([visit(method, s, state, memory.get(s.client.name), t, 0) for s in sites])
        memory |= {update.client.name: kept for update, kept in found}
        state = method.merge(state, [update for update, _ in found], t, None)
        programs = [program for lane in lanes.lanes for program in lane.programs.values()]
        leaves = [pytree.tree_leaves((program.buffers, program.schedule)) for program in programs]
        places.append([leaf.data_ptr() for leaf in itertools.chain(*leaves)])
    assert places[0] == places[1] == places[2] and len(places[0]) > 20


def test_loading_a_schedule_overwrites_its_steps_and_no_others():
    """Of every kind of tensor: rows, labels, uniforms of two streams, draws and seeds."""
    (job, kept), *_ = jobs(small.Tutored(small.net(small.Dropping, 3), epochs=1), site(labelled=60))
    there, schedule = program(job, kept), draw(job)
    leaves = pytree.tree_leaves(there.schedule)
    assert {leaf.dtype for leaf in leaves} == {torch.int64, torch.float32, torch.int32}
    for leaf in leaves:
        leaf.fill_(77)
    there.load_schedules([schedule.between(3, 5).tensors])
    for leaf, drawn in zip(leaves, pytree.tree_leaves(schedule), strict=True):
        assert torch.equal(leaf[:2], drawn[3:5]) and (leaf[2:] == 77).all()


def test_loading_a_job_overwrites_all_buffers():
    """Buffers are filled with NaN before a job is loaded; none is left."""
    (job, kept), *_ = jobs(small.Tutored(small.net(channels=3), epochs=1))
    there = program(job, kept)
    for tensor in pytree.tree_leaves(there.buffers._replace(images=None)):
        if tensor is not None:
            tensor.fill_(float("nan"))
    there.seats[0].load(job, job.message | kept)
    expected = prepare(job, job.message | kept, kept)
    assert small.same(written(there.buffers), written(expected))
    assert small.same(there.buffers.received, job.message)
    assert all(there.buffers.received[k].data_ptr() != v.data_ptr() for k, v in job.message.items())


# Traced, and replayed


class Kernels(TorchDispatchMode):
    """Records operations with the shapes of their inputs."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        self.made.add((str(operation), *(tuple(v.shape) for v in tensors)))
        return operation(*args, **(kwargs or {}))


@METHODS_AND_SETTINGS
def test_the_trial_before_a_capture_runs_all_its_kernels(name, settings):
    """A library that chooses a kernel during a capture invalidates it."""
    engine = Engine(torch.device("cpu"))
    for job, kept in jobs(made(name, **settings)):
        ours = stretch_functions(job, program(job, kept).example.questions(job, engine), engine)
        found = {}
        for run in (Program.run, Program.try_out):
            with Kernels() as kernels:
                run(program(job, kept), ours, STRETCH)
            found[run] = kernels.made
        assert found[Program.try_out] == found[Program.run]


@pytest.fixture
def traced_as_products(monkeypatch):
    """Traces steps as for the compiler, which is replaced by the identity."""
    graphs = []

    def leave(graph, **_):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", leave)
    return graphs


@pytest.fixture
def traced(traced_as_products, monkeypatch):
    """The same, with all convolutions as they are: products round otherwise."""
    monkeypatch.setattr(Job, "has_short_kernels", False)
    return traced_as_products


@pytest.mark.parametrize(("build", "products"), [(LeNet, True), (ResNet8, False)], ids=["lenet", "resnet8"])
def test_convolutions_of_small_networks_are_products_for_a_single_job_too(
    build, products, traced_as_products, monkeypatch
):
    monkeypatch.setattr(layers, "trained_on_cpu", lambda layer, x: False)
    method, lanes, one = made("hassle", build, 12, 0.25), small_lanes(compile=True), site(12)
    message = method.initial(0)
    ((update, _),) = lanes.train([visit(method, one, message, None, 1, 0)])
    expected, _ = train(method, one, message, None, 1, 0)
    torch.testing.assert_close(update.arrays, expected.arrays, rtol=1e-3, atol=1e-4)
    assert products != any("convolution" in graph.code for graph in traced_as_products)


@NETWORKS
@METHODS_AND_SETTINGS
def test_a_step_traced_once_and_replayed_gives_the_eager_bits(name, settings, build, side, width, traced):
    """Twelve steps (residuals: eleven), replayed from those of one step and of one stretch of views.

    A traced graph contains no Python, like a CUDA graph.
    """
    assert_traced_is_eager(made(name, build, side, width, **settings), [site(side, 45, 41)], 1)
    assert traced


def test_traced_steps_serve_clients_and_rounds(traced):
    method = made("hassle", pseudo_labels="online", confidence=0.3)
    assert_traced_is_eager(method, [site(labelled=12, name="one"), site(labelled=45, name="two")], 2)
    assert traced


@BASELINES
def test_traced_steps_of_baselines_serve_all_kinds_of_clients(name, settings, traced):
    """Two rounds with client state; FedMatch's second has helpers, MixMatch's a larger weight."""
    method, lanes = made(name, **settings), small_lanes(compile=True)
    sites = [site(unlabelled=0, name="full"), site(name="partial"), site(labelled=0, name="unlabelled")]
    sites.append(site(labelled=5, unlabelled=9, name="another"))
    state, memory, names = method.initial(0), {}, []
    for t in (1, 2):
        asked = [here for here in sites if method.phases(here.client, t)]
        sent = [(here, method.message(state, here.client, t), memory.get(here.client.name)) for here in asked]
        found = lanes.train([visit(method, here, message, kept, t, 0) for here, message, kept in sent])
        expected = [train(method, here, message, kept, t, 0) for here, message, kept in sent]
        for (update, kept), (its, before) in zip(found, expected, strict=True):
            assert small.same(update.arrays, its.arrays) and small.same(update.losses, its.losses)
            assert small.same(kept, before)
        memory = {update.client.name: kept for update, kept in expected if kept}
        state = method.merge(state, [update for update, _ in expected], t, np.random.default_rng(t))
        names.append({name for _, message, _ in sent for name in message})
    assert traced and (names[0] != names[1]) == (name == "fedmatch")


def assert_traced_is_eager(method, sites, rounds):
    """Asserts that lanes with traced steps give the bits of eager training."""
    lanes, state = small_lanes(compile=True), method.initial(0)
    for t in range(1, rounds + 1):
        sent = [(here, method.message(state, here.client, t)) for here in sites]
        found = lanes.train([visit(method, here, message, None, t, 0) for here, message in sent])
        updates = [train(method, here, message, None, t, 0)[0] for here, message in sent]
        for (update, _), expected in zip(found, updates, strict=True):
            assert small.same(update.arrays, expected.arrays) and small.same(update.losses, expected.losses)
            assert torch.equal(update.labelling, expected.labelling)
            assert not any(torch.equal(v, state[k]) for k, v in update.arrays.items())
        state = method.merge(state, updates, t, None)


def test_a_traced_step_with_memory_draws_and_two_streams_gives_the_eager_bits(traced):
    method, here, lanes = (
        small.Tutored(small.net(channels=3), epochs=2, lr=0.01),
        site(),
        small_lanes(compile=True),
    )
    message, memory = method.initial(0), None
    for t in (1, 2):
        ((update, kept),) = lanes.train([visit(method, here, message, memory, t, 0)])
        expected, memory = train(method, here, message, memory, t, 0)
        assert small.same(update.arrays, expected.arrays) and small.same(kept, memory)
    assert traced


def test_a_traced_step_with_dropout_gives_the_eager_bits(traced):
    """Each step has a seed of its own, which is an input of the graph and no constant in it."""
    for name in ("fedavg", "hassle", "fedmatch"):
        assert_traced_is_eager(made(name, small.Dropping), [site()], rounds=2)
    assert traced


def test_steps_with_the_same_operations_are_compiled_once(traced):
    """Both duals of HASSLE train alike, and so do both residuals: two of four phases are compiled."""
    lanes, method = small_lanes(compile=True), made("hassle")
    lanes.train([visit(method, site(), method.initial(0), None, 1, 0)])
    steps = [graph for graph in traced if "convolution_backward" in graph.code]
    assert len(lanes.lanes[0].programs) == 4 and len(steps) == 2
    for graph in traced:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        assert inputs and all(node.users for node in inputs)  # unused inputs are removed


def test_other_constants_are_compiled_separately(traced):
    """Losses that differ by a number or a tensor do not share kernels."""

    def compile_(make, values):
        compiler, x = Compiler(), torch.arange(3.0)
        functions = [compiler(make(value), x) for value in values]
        return [function(x) for function in functions]

    assert [z.tolist() for z in compile_(scaled, (2.0, 3.0))] == [[0, 2, 4], [0, 3, 6]]
    tensors = torch.tensor(2.0), torch.tensor(3.0)
    assert [z.tolist() for z in compile_(scaled, tensors)] == [[0, 2, 4], [0, 3, 6]]
    assert len(traced) == 4
    compile_(scaled, (2.0, 2.0))
    assert len(traced) == 5


def test_other_tensor_formats_are_compiled_separately(traced):
    """Kernels depend on sizes, layouts and types."""
    compiler, x = Compiler(), torch.ones(4, 4)
    for given in (x, x, x[:3], x[:, :3], x[:, :3].contiguous(), x.double(), 2 * x):
        assert torch.equal(compiler(scaled(2.0), given)(given), 2.0 * given)
    assert len(traced) == 5


def test_a_compiled_function_takes_and_returns_trees(traced):
    """In-place writes, unused inputs, and inputs that differ in their order of use."""

    class Tree(NamedTuple):
        a: torch.Tensor
        rest: dict[str, torch.Tensor]

    def function(tree, unused, b):
        tree.rest["sum"].add_(b)
        return Tree(tree.rest["sum"] * tree.a, {"b": b, "a": tree.a + 1})

    def trees():
        return Tree(torch.tensor(3.0), {"sum": torch.tensor(1.0)}), torch.zeros(5), torch.tensor(10.0)

    compiled = Compiler()(function, *trees())
    given = trees()
    found = compiled(*given)
    assert (found.a.item(), found.rest["b"].item(), found.rest["a"].item()) == (33, 10, 4)
    assert given[0].rest["sum"].item() == 11
    assert compiled(*given).a.item() == 63
    (graph,) = traced
    assert sum(node.op == "placeholder" for node in graph.graph.nodes) == 3


# Compiled


@METHODS_AND_SETTINGS
def test_every_step_compiles_and_is_the_eager_one(name, settings, quick_compiler):
    assert_compiled_is_eager(made(name, **settings), site())


@BASELINES
def test_every_step_of_baselines_compiles_and_is_the_eager_one(name, settings, quick_compiler):
    assert_compiled_is_eager(made(name, **settings), site())


@NETWORKS
def test_a_step_of_every_network_compiles(build, side, width, quick_compiler):
    method = made("hassle", build, side, width, residual_target="with_residual")
    assert_compiled_is_eager(method, site(side, unlabelled=0))


def test_a_step_of_a_deep_network_compiles(quick_compiler):
    """WRN-28-2: on a CPU its logits depend on the size of the batch by a rounding, so its bits may differ."""
    assert_compiled_is_eager(made("hassle", WideResNet28, 6, 0.125), site(6, unlabelled=0))


@pytest.mark.parametrize("settings", [{"optimiser": "adamw", "weight_decay": 0.1}, {"nesterov": True}])
def test_a_step_of_every_optimiser_compiles(settings, quick_compiler):
    method = made("hassle", small.ConvNet, lr=0.01, lr_warmup=3, **settings)
    assert_compiled_is_eager(method, site(unlabelled=0))


def assert_compiled_is_eager(method, here):
    """Compares one step of each phase: weights, statistics, optimiser and losses."""
    for job, kept in jobs(method, here):
        there = program(job, kept)
        functions = FunctionsByShape(Engine(small.CPU, compile=True))
        found = functions.find("key", job, there)
        there.seats[0].load(job, job.message | kept)
        there.load_schedules([stretched(draw(job)).tensors])
        there.run(found, 1)
        expected = written(eagerly(job, kept, draw(job).between(0, 1)))
        for key, value in written(there.buffers).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        begun = prepare(job, job.message | kept, kept)
        changed = {key for key, value in written(begun).items() if not torch.equal(value, expected[key])}
        trained = job.phase.trained[0]
        assert {f"weights/{trained}", f"losses/{trained}"} <= changed
        assert {f"optimiser/{trained}/{i}" for i in range(len(begun.optimiser[trained]))} <= changed
        assert (f"statistics/{trained}" in changed) == (job.networks[trained].n_statistics > 0)


def test_a_compiled_stretch_is_the_eager_one(quick_compiler):
    (job, kept), *_ = jobs(small.Tutored(small.net(channels=3), epochs=1, lr=0.01), site(labelled=60))
    there = program(job, kept)
    found = FunctionsByShape(Engine(small.CPU, compile=True)).find("key", job, there)
    there.seats[0].load(job, job.message | kept)
    there.run(found, STRETCH)
    expected = written(eagerly(job, kept, draw(job)))
    for key, value in written(there.buffers).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert there.buffers.weights["s"].item() == STRETCH == job.steps


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError])
def test_a_failing_compiler_is_logged_once_and_not_used(error, monkeypatch, caplog):
    def fail(graph, **_):
        def run(*_):
            raise error("no kernel\nfor this")

        return run

    monkeypatch.setattr(torch, "compile", fail)
    method, lanes = made("hassle"), small_lanes(compile=True)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        for t in (1, 2):
            message = method.initial(t)
            ((update, _),) = lanes.train([visit(method, site(), message, None, t, 0)])
            assert small.same(update.arrays, train(method, site(), message, None, t, 0)[0].arrays)
    (record,) = caplog.records
    assert record.getMessage() == f"steps are captured but not compiled ({error.__name__}: no kernel)"


def test_a_compiler_that_fails_only_on_the_step_is_not_used(monkeypatch, caplog):
    """The inputs compile; the step fails at its first call."""

    def only_views(graph, **_):
        def run(*_):
            raise ValueError("no kernel")

        return run if "backward" in graph.code else graph

    monkeypatch.setattr(torch, "compile", only_views)
    method, lanes = made("fedavg"), small_lanes(compile=True)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        ((update, _),) = lanes.train([visit(method, site(), method.initial(0), None, 1, 0)])
    assert small.same(update.arrays, train(method, site(), method.initial(0), None, 1, 0)[0].arrays)
    assert [record.getMessage() for record in caplog.records] == [
        "steps are captured but not compiled (ValueError: no kernel)"
    ]


def test_a_compiled_step_that_is_out_of_memory_is_repeated_with_less_of_it(monkeypatch, caplog):
    """It is neither run uncompiled nor eagerly, which would take no less."""

    def fail(graph, **_):
        def run(*_):
            raise RuntimeError("Attempt to trace generator") from torch.OutOfMemoryError("CUDA out of memory")

        return run

    monkeypatch.setattr(torch, "compile", fail)
    method, lanes = made("fedavg"), small_lanes(compile=True)
    with caplog.at_level(logging.WARNING, "fedhassle"), pytest.raises(UserError, match="not enough GPU mem"):
        lanes.train([visit(method, site(), method.initial(0), None, 1, 0)])
    assert caplog.records == []


def test_a_loss_that_cannot_be_traced_still_trains(traced, caplog):
    """It reads a value, which a trace does not have."""

    @dataclass(frozen=True)
    class Looking(FedAvg):
        def loss(self, local, received, batch):
            loss = cross_entropy(local["w"](batch.views[0]), batch.y)
            return loss if loss > 1 else 2 * loss

    method, lanes = Looking(small.net(channels=3), batch=8, epochs=1), small_lanes(compile=True)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        ((update, _),) = lanes.train([visit(method, site(), method.initial(0), None, 1, 0)])
    expected = train(method, site(), method.initial(0), None, 1, 0)[0]
    assert small.same(update.arrays, expected.arrays)
    assert len(caplog.records) == 1 and "not compiled" in caplog.records[0].getMessage()


def test_a_step_that_cannot_be_captured_runs_eagerly_from_then_on(caplog):
    (job, kept), *_ = jobs(made("fedavg"))
    functions = FunctionsByShape(Engine(small.CPU))
    found = functions.find("key", job, program(job, kept))
    functions._known["key"] = job, found._replace(capture=True)
    with caplog.at_level(logging.WARNING, "fedhassle"):
        for _ in range(2):
            assert not functions.stop_capturing(
                "key", job, RuntimeError("not while capturing\nat all")
            ).capture
    assert not functions.find("key", job, program(job, kept)).capture
    (record,) = caplog.records
    assert record.getMessage() == (
        "phase 'labelled' runs eagerly: its step cannot be captured (not while capturing)"
    )


def test_only_a_gpu_captures():
    (job, _), *_ = jobs(made("fedavg"))
    assert not stretch_functions(job, (), Engine(small.CPU)).capture
    assert stretch_functions(job, (), Engine(torch.device("cuda"))).capture
