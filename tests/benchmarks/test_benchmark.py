"""The benchmark: the plain loop computes the same as ours; counts and figures equal those by hand."""

import ast
import dataclasses
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from rich.console import Console
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fedhassle
from benchmarks.benchmark import (
    CPU,
    GPU,
    Options,
    Size,
    chosen,
    overlapping,
    run,
    summed_up,
    synthetic,
    warnings_to,
)
from benchmarks.counterparts import COUNTERPARTS, counterpart
from benchmarks.measure import (
    PlainLoop,
    average_steps,
    flops_of_step,
    matrix_peak,
    phases,
    recordings,
    time_rounds,
)
from benchmarks.plain import images_on, walk
from benchmarks.report import (
    Costs,
    Timed,
    median_range,
    method_figures,
    methods_table,
    number,
    scaling_figures,
    scaling_table,
    steady,
)
from benchmarks.workers import balance
from fedhassle.architectures import LeNet, ResNet8
from fedhassle.engine.client import advance, batches_of, prepare, visit
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.job import draw
from fedhassle.engine.rounds import Plan
from fedhassle.engine.simulator import Simulator
from fedhassle.errors import UserError
from fedhassle.method import Client, as_models
from fedhassle.methods import METHODS, FedAvg, Hassle

ROOT = Path(fedhassle.__file__).parents[1]

TINY = Size(
    images=200,
    batch=8,
    epochs=1,
    residual_steps=2,
    rounds=2,
    plain_steps=1,
    repeats=3,
    side=32,
    scaling_samples=16,
    scaling_per_round=(1, 2),
    scaling_clients=(20, 100),
    scaling_drawn=3,
)


# The plain loop computes the same

SETTINGS = {"batch": 8, "epochs": 3, "lr": 0.05, "momentum": 0.9, "clip": 0.5}  # which gradients exceed
OWN = {  # makes each term of a loss visible
    "fedprox": {"mu": 0.3},
    "mixmatch": {"rounds": 20, "weight": 10.0},
    "fixmatch": {"weight": 0.7},
    "fedmatch": {
        "unlabelled": True,
        "consistency_weight": 2.0,
        "sparsity_weight": 0.01,
        "proximity_weight": 0.1,
    },
    "rscfed": {"partial": "mixed", "unlabelled_lr": 0.2, "unlabelled_clip": 0.1, "consistency_weight": 2.0},
    "hassle": {"gamma": 0.1, "lam": 0.7, "residual_decay": 0.1, "residual_steps": 3},
    "hassle+": {"gamma": 0.1},
    "fixmatch-global": {"weight": 0.7},
    "sage": {"weight": 0.7, "halving": 0.2},
}
STARTS = {  # the networks, in the order in which the counterpart builds them
    ("fedavg", "labelled"): ("w",),
    ("fedprox", "labelled"): ("w", "w received"),
    ("mixmatch", "labelled"): ("w",),
    ("mixmatch", "both"): ("w",),
    ("fixmatch", "labelled"): ("w",),
    ("fixmatch", "both"): ("w",),
    ("fedmatch", "labelled"): ("sigma", "psi"),
    ("fedmatch", "both"): ("sigma", "psi", "helper 0", "helper 1"),
    ("fedmatch", "unlabelled"): ("psi", "sigma", "helper 0", "helper 1"),
    ("rscfed", "labelled"): ("w",),
    ("rscfed", "both"): ("w", "teacher"),
    ("rscfed", "unlabelled"): ("w", "teacher"),
    ("hassle", "labelled"): ("w_S", "w_U"),
    ("hassle", "unlabelled"): ("w_U", "w_S"),
    ("hassle", "labelled residual"): ("r_US", "w_S", "w_U"),
    ("hassle", "unlabelled residual"): ("r_SU", "w_U", "w_S"),
    ("hassle+", "labelled"): ("w_S", "w_U"),
    **{("hassle+", kind): ("w_U", "w_S") for kind in ("full", "partial", "unlabelled")},
    ("fixmatch-global", "labelled"): ("w",),
    ("fixmatch-global", "both"): ("w", "w received"),
    ("fixmatch-global", "unlabelled"): ("w", "w received"),
    ("sage", "labelled"): ("w",),
    ("sage", "both"): ("w", "w received"),
    ("sage", "unlabelled"): ("w", "w received"),
    ("central", "labelled"): ("w",),
    ("central-fixmatch", "labelled"): ("w",),
    ("central-fixmatch", "both"): ("w",),
    ("local", "labelled"): ("w",),
}
LABELLED, UNLABELLED = {"labelled": range(8)}, {"unlabelled": range(20, 36)}
CONFIDENCE = {LeNet: 0.8, small.ConvNet: 0.3}  # each is confident on some images
T = 10  # a round in which FedMatch has helpers


@pytest.mark.parametrize("build", [LeNet, small.ConvNet])
@pytest.mark.parametrize(("name", "phase"), STARTS)
def test_three_steps_of_the_plain_loop_are_three_of_ours(name, phase, build):
    """From the same weights, on the same views and draws: the same losses, weights and statistics."""
    method = METHODS[name](net=small.net(build), **SETTINGS, **OWN.get(name, {}))
    if hasattr(method, "confidence"):
        method = dataclasses.replace(method, confidence=CONFIDENCE[build])
    job, kept = job_of(method, phase)
    nets, starts = networks_of(method, job, kept)
    modules = {model: loaded(nets[model], starts[model]) for model in STARTS[name, phase]}
    queue = iter(modules.values())
    for net in set(nets.values()):
        net.build = lambda shape, classes, width: next(queue)
    trainer = counterpart(name, method, job.phase, T, small.CPU)
    assert next(queue, None) is None

    buffers, schedule = prepare(job, starts, kept), draw(job)
    assert job.steps >= 3
    batches = batches_of(job, buffers, as_models(job.message, job.networks), schedule)
    losses = dict.fromkeys(job.phase.trained, 0.0)
    for i in range(3):
        given = [*(batch.at(i) for batch in batches), *(drawn[i] for drawn in schedule.draws)]
        found = trainer.step(*given)
        losses = {model: losses[model] + loss for model, loss in zip(losses, found, strict=True)}
    advance(job, buffers, schedule.between(0, 3))

    for model, loss in losses.items():
        torch.testing.assert_close(loss[None], buffers.losses[model], rtol=1e-5, atol=1e-6)
        assert (buffers.weights[model] - starts[model][: len(buffers.weights[model])]).abs().max() > 1e-3
    ours = {k: torch.cat([w, buffers.statistics[k]]) for k, w in buffers.weights.items()}
    for model, module in modules.items():  # those that do not train stay
        expected = ours.get(model, starts[model])
        torch.testing.assert_close(nets[model].flatten(module)[: len(expected)], expected, rtol=0, atol=1e-5)


def job_of(method, phase):
    """Our job of a phase on a client that has it, and the arrays that the client keeps."""
    for rows in (LABELLED | UNLABELLED, LABELLED, UNLABELLED):
        site = small.site(**rows)
        planned = visit(method, site, method.message(state_of(method), site.client, T), None, T, 1)
        for job in planned.jobs:
            if job.phase.name == phase:
                return job, planned.kept
    raise AssertionError(f"there is no phase {phase!r}")


def state_of(method):
    """The initial state; for FedMatch with two helpers."""
    state = method.initial(0)
    if "psi" not in state:
        return state
    outputs = {"here": [1.0, 0.0], "far": [0.0, 1.0], "near": [0.9, 0.1]}
    state |= {f"output of {client}": torch.tensor(output) for client, output in outputs.items()}
    net = method.net
    others = {client: net.initial(i)[: net.n_kernels] for i, client in enumerate(("far", "near"))}
    return state | {f"psi of {client}": 0.5 * vector for client, vector in others.items()}


def networks_of(method, job, kept):
    """The networks of `STARTS` that a job knows, and their start vectors.

    The trained model differs from the received one, as in the middle of a round.
    """
    starts = job.message | kept
    if "w" in starts:
        starts |= {"w received": starts["w"], "w": method.net.initial(1)}
    for helper in [name for name in starts if name.startswith("helper")]:
        theta = starts["sigma"].clone()
        theta[: len(starts[helper])] += starts[helper]
        starts[helper] = theta
    return {name: job.networks.get(name, method.net) for name in starts}, starts


def loaded(net, vector):
    """A module with the weights and statistics of a vector."""
    module = net.module(seed=5)
    # FedMatch's ψ has kernels alone.
    vector = F.pad(vector, (0, net.n_weights + net.n_statistics - len(vector)))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    flats = torch.split(vector, [*net.weight_sizes, *net.statistic_sizes])
    with torch.no_grad():
        for piece, flat in zip([*net._weight_pieces, *net._statistic_pieces], flats, strict=True):
            tensors[piece.name].copy_(piece.view(flat))
    return module


@pytest.mark.parametrize("name", METHODS)
def test_steps_of_the_plain_loop_take_as_many_flops_as_ours(name):
    """Exactly equal; only convolutions and matrix products are counted.

    On the measured batches, so their sizes and numbers are those of the method's streams.
    """
    method = METHODS[name](net=small.net(LeNet), batch=4, epochs=1, **OWN.get(name, {}))
    ours = flops_of_step(method, small.simulator())
    found = {}
    for phase in phases(method):
        trainer = counterpart(name, method, phase, 3, small.CPU)
        given = plain_loop().given(phase)
        for _ in range(2):  # in every step
            with FlopCounterMode(display=False) as counter:
                trainer.step(*next(given))
            found.setdefault(phase.name, set()).add(counter.get_total_flops())
    assert found == {phase: {flops} for phase, flops in ours.items()}
    assert {(name, phase) for phase in found} == {key for key in STARTS if key[0] == name}


def plain_loop(device=small.CPU):
    data = small.dataset(flip=True, crop=1)
    images = images_on(device, data.x_train, data.y_train, data.mean, data.std, data.flip, data.crop)
    return PlainLoop(images, samples=10, steps=1, repeats=1, threads=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_no_step_of_the_plain_loop_waits_for_the_gpu(name):
    """Nor does drawing its batches, across the end of an epoch."""
    device = torch.device("cuda", torch.cuda.current_device())
    method = METHODS[name](net=small.net(LeNet), batch=4, epochs=1, **OWN.get(name, {}))
    for phase in phases(method, T):
        trainer, given = counterpart(name, method, phase, T, device), plain_loop(device).given(phase)
        trainer.step(*next(given))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                trainer.step(*next(given))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_every_phase_of_every_method_has_its_plain_loop():
    """A custom method has none, nor has an unknown phase."""
    assert COUNTERPARTS.keys() == METHODS.keys()
    assert {(name, phase) for name, each in COUNTERPARTS.items() for phase in each} == STARTS.keys()
    method = FedAvg(small.net())
    (phase,) = method.phases(Client("any", 1, 1), 1)
    assert counterpart("another", method, phase, 1, small.CPU) is None
    assert counterpart("fedavg", method, dataclasses.replace(phase, name="other"), 1, small.CPU) is None
    assert plain_loop().seconds("another", method, tf32=False) is None
    assert plain_loop().seconds("fedavg", method, tf32=False).keys() == {"labelled"}


def test_the_plain_loop_uses_only_networks_and_losses():
    tree = ast.parse((ROOT / "benchmarks" / "plain.py").read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in modules if name.startswith("fedhassle")}
    assert ours <= {"fedhassle.losses", "fedhassle.nets", "fedhassle.data.strong"}


@pytest.mark.parametrize(("crop", "flip"), [(0, False), (0, True), (2, False), (2, True)])
def test_plain_batches_are_windows_of_the_images(crop, flip):
    """Each is one of the (2·crop + 1)² windows of its reflected image, or its mirror image."""
    data = small.dataset(channels=3)
    images = images_on(small.CPU, data.x_train, data.y_train, data.mean, data.std, flip, crop)
    rows = torch.arange(30) * 3
    (x,), y = images.batch(rows, ("weak",), torch.Generator().manual_seed(0))
    assert x.is_contiguous(memory_format=torch.channels_last) and x.dtype == torch.float32
    assert y.tolist() == data.y_train[rows.numpy()].tolist()
    padded = np.pad(data.x_train, ((0, 0), (crop, crop), (crop, crop), (0, 0)), mode="reflect")
    found = set()
    for row, image in zip(rows.tolist(), x.numpy(), strict=True):
        places = [(i, j) for i in range(2 * crop + 1) for j in range(2 * crop + 1)]
        windows = {(i, j): padded[row, i : i + small.SIDE, j : j + small.SIDE] for i, j in places}
        mirrored = {(*place, "mirrored"): window[:, ::-1] for place, window in windows.items()}
        candidates = {**windows, **(mirrored if flip else {})}
        expected = {
            key: ((window / 255 - 0.5) / 0.25).transpose(2, 0, 1) for key, window in candidates.items()
        }
        matches = [key for key, window in expected.items() if np.allclose(window, image, atol=1e-5)]
        assert len(matches) == 1
        found.add(matches[0])
    assert len(found) >= (2 if crop or flip else 1)  # there were draws


def test_plain_strong_views_are_altered_and_cut(global_randomness):
    """Pixels stay whole numbers; each view has a grey square of at least 3 × 3."""
    data = small.dataset()
    images = images_on(small.CPU, data.x_train, data.y_train, data.mean, data.std, False, 0)
    draws = torch.Generator().manual_seed(0)
    (weak, one, other), _ = images.batch(torch.arange(30), ("weak", "strong", "strong"), draws)
    original = torch.from_numpy(data.x_train[:30]).permute(0, 3, 1, 2)
    pixels = [(255 * (0.25 * view + 0.5)) for view in (weak, one, other)]
    torch.testing.assert_close(pixels[0], original.float(), rtol=0, atol=1e-3)
    for strong in pixels[1:]:
        assert (strong - strong.round()).abs().max() < 1e-3
        assert ((strong - 127).abs() < 0.5).flatten(1).sum(1).min() >= 9
    assert (pixels[1] - pixels[2]).abs().flatten(1).amax(1).min() > 1  # independent of each other
    assert one.is_contiguous(memory_format=torch.channels_last)


def test_a_plain_epoch_shows_every_sample_in_full_batches(global_randomness):
    data = small.dataset()
    y = np.arange(len(data.y_train))  # a label for each image tells which it is
    images = images_on(small.CPU, data.x_train, y, data.mean, data.std, False, 0)
    batches = walk(images, torch.arange(40, 61), 8, ("weak",), torch.Generator().manual_seed(1))
    epochs = [[next(batches).y.tolist() for _ in range(3)] for _ in range(2)]
    for epoch in epochs:
        shown = [label for batch in epoch for label in batch]
        assert len(shown) == 24 and sorted(shown[:21]) == list(range(40, 61)) and shown[21:] == shown[:3]
    assert epochs[0] != epochs[1]


# FLOPs


def resnet8_by_hand(planes, side=32):
    """FLOPs of one image's forward pass, and of the stem alone."""
    stem = 2 * side**2 * planes[0] * 3 * 9
    work, inputs = stem, planes[0]
    for plane, stride in zip(planes, (1, 2, 2), strict=True):
        side //= stride
        work += 2 * side**2 * plane * 9 * (inputs + plane)
        work += 2 * side**2 * plane * inputs if stride > 1 else 0
        inputs = plane
    return work + 2 * planes[-1] * 10, stem


def test_flops_of_resnet8_are_those_by_hand():
    """Backward is twice forward, without the gradient of the images; frozen duals only run forward."""
    forward, stem = resnet8_by_hand((64, 128, 256))
    compact, compact_stem = resnet8_by_hand((16, 32, 64))
    assert forward == pytest.approx(0.39e9, rel=0.01)
    assert 3 * forward - stem == pytest.approx(1.17e9, rel=0.01)
    data = synthetic("cifar10", 40)
    method = Hassle(small.net(ResNet8, channels=3, side=32, classes=10), batch=3, epochs=1, residual_steps=1)
    simulator = Simulator(data, overlapping(2, 10, 40), 0, small.ENGINE)
    dual, residual = 3 * (3 * forward - stem), 3 * (2 * forward + 3 * compact - compact_stem)
    expected = {"labelled": dual, "unlabelled": dual}
    expected |= {"labelled residual": residual, "unlabelled residual": residual}
    assert flops_of_step(method, simulator) == pytest.approx(expected, rel=1e-9)


# Rounds and steps


def test_steps_of_a_round_and_of_an_average_one():
    """Six clients of `SPLIT`, batch 8, 2 epochs: FedAvg takes 2·⌈n_L/8⌉ steps = 6, 2, 4, 2, 0 and 0."""
    method = FedAvg(small.net(), batch=8, epochs=2)
    simulator = small.simulator()
    assert average_steps(method, simulator.clients, 3) == {"labelled": 3 / 6 * 14}
    by_client = dict(zip([c.name for c in simulator.clients], (6, 2, 4, 2, 0, 0), strict=True))
    first, rounds = time_rounds(method, simulator, Plan(3, 2), 6)
    assert [done.t for done in first] == [1, 2] and all(done.steps == {"labelled": 14} for done in first)
    worked = [done for done in rounds if done.steps]
    assert [done.t for done in rounds] == list(range(3, 3 + len(rounds))) and len(worked) == 3
    assert all(done.recordings == 0 and done.seconds > 0 for done in first + rounds)
    plan = Plan(3, 2)
    for done in rounds:
        drawn = fedhassle.engine.rounds.select(simulator.clients, plan, done.t)
        assert sum(done.steps.values()) == sum(by_client[client.name] for client in drawn)


def test_rounds_that_record_are_counted():
    """On lanes of a CPU: the first rounds record, later ones do not."""
    simulator = small.simulator()
    simulator.trainer.lanes = Lanes(small.ENGINE._replace(lanes=2))
    first, rounds = time_rounds(small.hassle(), simulator, Plan(2, 6), 6)
    assert first[0].recordings > 0 and rounds[-1].recordings == 0
    assert recordings(simulator) == sum(done.recordings for done in first + rounds)
    assert sum(done.recordings == 0 for done in rounds) <= 2


def test_clients_of_the_scaling_tables_share_the_images():
    made = overlapping(clients=7, samples=30, images=100)
    assert [part.size for part in made.labelled] == [30] * 7 and not any(p.size for p in made.unlabelled)
    assert np.array_equal(made.labelled[3], [*range(90, 100), *range(20)])


def test_the_peak_is_a_number():
    assert 0 < matrix_peak(small.CPU, 16, 2) < math.inf


# Figures, from numbers made by hand


def timed(t, seconds, labelled, residual, recorded=0):
    return Timed(t, seconds, {"labelled": labelled, "residual": residual}, recorded)


COSTS = Costs(
    samples={"labelled": 10, "residual": 20},
    flops={"labelled": 100.0, "residual": 50.0},
    steps={"labelled": 3.0, "residual": 2.0},
    plain={"fp32": {"labelled": median_range([0.9, 1.0, 1.4]), "residual": median_range([0.5, 0.5, 0.4])}},
)
ROUNDS = [timed(3, 2.0, 4, 2), timed(4, 99.0, 1, 1, recorded=5), timed(5, 1.0, 2, 2), timed(6, 4.0, 5, 6)]


def test_figures_of_a_method():
    """Three rounds count: 500, 300 and 800 FLOPs in 2, 1 and 4 s; the average round has 400.

    Plain steps take 1 and 0.5 s, so that those rounds would take 5, 3 and 8 s, and the average one 4 s.
    """
    found = method_figures([timed(1, 7.0, 1, 1)], ROUNDS, COSTS, peak=1000.0)
    assert found["rounds_counted"] == [3, 5, 6] and found["seconds_of_first_rounds"] == [7.0]
    assert found["seconds"] == {"median": 2.0, "min": 1.0, "max": 4.0, "values": [2.0, 1.0, 4.0]}
    average = found["seconds_of_average_round"]
    assert average["values"] == pytest.approx([2 * 400 / 500, 400 / 300, 4 * 400 / 800])
    assert average["median"] == pytest.approx(1.6)
    assert found["steps_per_second"]["values"] == pytest.approx([6 / 2, 4 / 1, 11 / 4])
    assert found["samples_per_second"]["values"] == pytest.approx([80 / 2, 60 / 1, 170 / 4])
    assert found["flops_of_average_round"] == pytest.approx(400)
    assert found["flops_per_second"]["values"] == pytest.approx([250, 300, 200])
    assert found["share_of_peak"]["median"] == pytest.approx(0.25)
    plain = found["plain"]["fp32"]
    assert plain["seconds_of_average_round"] == pytest.approx(4)
    assert plain["ratio"]["values"] == pytest.approx([2.5, 3.0, 2.0])
    assert plain["ratio"]["median"] == pytest.approx(2.5)
    assert plain["seconds_of_step"]["labelled"] == {
        "median": 1.0, "min": 0.9, "max": 1.4, "values": [0.9, 1.0, 1.4]
    }  # fmt: skip


def test_rounds_that_count():
    idle, recorded, clean = timed(3, 0.1, 0, 0), timed(4, 9.0, 1, 0, recorded=1), timed(5, 1.0, 1, 0)
    assert steady([idle, recorded, clean]) == [clean]
    assert steady([idle, recorded]) == [recorded]


def test_figures_of_a_scaling_table():
    found = scaling_figures(100, 20, ROUNDS, 2_500_000_000)
    assert (found["clients"], found["clients_per_round"], found["gpu_memory"]) == (100, 20, 2_500_000_000)
    assert found["steps"] == 6 and found["seconds"]["median"] == 2.0
    assert found["seconds_of_step"]["values"] == pytest.approx([2 / 6, 1 / 4, 4 / 11])
    shown = text_of(scaling_table("title", [found]))
    assert "title" in shown and "2 (1–4)" in shown and "333" in shown and "2.50 GB" in shown


def test_the_table_of_methods():
    figures = method_figures([timed(1, 7.0, 1, 1)], ROUNDS, COSTS, peak=1000.0)
    without = {**figures, "plain": {}, "gpu_memory": None}
    shown = text_of(methods_table({"one": {**figures, "gpu_memory": 10**9}, "two": without}, 1e12))
    lines = [line.strip() for line in shown.splitlines()]
    (ratio,) = [line for line in lines if line.startswith("plain fp32 / ours")]
    assert "2.5 (2–3)" in ratio and ratio.endswith("–")  # the second method has no plain loop
    (share,) = [line for line in lines if line.startswith("% of 1 TFLOP/s")]
    assert "25 (20–30)" in share
    assert "1.00 GB" in shown


def text_of(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"), [(0.012345, "0.0123"), (1.5, "1.5"), (99.94, "99.9"), (154_800.4, "154,800")]
)
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown


# The whole benchmark


def numbers(value):
    """Every number in a report."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_the_whole_benchmark_in_small(tmp_path, global_randomness):
    console = Console(file=io.StringIO(), width=100)
    path, before = tmp_path / "made" / "speed.json", torch.get_num_threads()
    options = Options(methods=("all",), device="cpu", threads=1, json=path)
    report = run(options, console, TINY)
    assert torch.get_num_threads() == before
    assert small.strict(path.read_text("utf-8")) == report
    assert all(math.isfinite(value) for value in numbers(report))
    assert report["methods"].keys() == METHODS.keys() and report["warnings"] == []
    assert report["versions"]["torch"] == torch.__version__ and report["hardware"]["threads"] == 1
    assert report["settings"]["size"]["images"] == 200 and report["settings"]["net"] == "lenet"
    assert report["peak"]["flops_per_second"] > 0
    for name, figures in report["methods"].items():
        each = figures["flops_of_step"].keys()
        assert {(name, phase) for phase in each} <= STARTS.keys()  # some have more with other settings
        unused = {"labelled"} if name == "central-fixmatch" else set()  # its only client has both parts
        assert figures["steps_of_average_round"].keys() == each - unused
        assert figures["plain"].keys() == {"fp32"}
        assert len(figures["rounds_counted"]) == 2 and len(figures["seconds_of_first_rounds"]) == 2
        assert figures["gpu_memory"] is None
        positive = ("seconds", "samples_per_second", "flops_per_second", "share_of_peak")
        assert all(figures[key]["min"] > 0 for key in positive)
        for plain in figures["plain"].values():
            assert plain["ratio"]["min"] > 0 and plain["seconds_of_step"].keys() == each
            assert all(len(step["values"]) == 3 for step in plain["seconds_of_step"].values())
    by_round, by_total = report["scaling"]["clients_per_round"], report["scaling"]["clients"]
    assert [(line["clients"], line["clients_per_round"]) for line in by_round] == [(20, 1), (20, 2)]
    assert [(line["clients"], line["clients_per_round"]) for line in by_total] == [(20, 3), (100, 3)]
    assert [line["steps"] for line in by_round + by_total] == [2, 4, 6, 6]  # 16 samples: 2 steps a client
    shown = console.file.getvalue()
    for word in ("hassle: the plain loop, fp32", "seconds per round", "by number of clients", path.name):
        assert word in shown


def test_the_options_rounds_and_scaling():
    options = Options(methods=("fedavg",), device="cpu", threads=2, rounds=1, scaling=False)
    report = run(options, Console(file=io.StringIO()), TINY)
    assert report["methods"].keys() == {"fedavg"} and report["scaling"] == {}
    assert len(report["methods"]["fedavg"]["rounds_counted"]) == report["settings"]["size"]["rounds"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("hasle",)}, "did you mean 'hassle'"),
        ({"net": "vgg"}, "net must be resnet8 or lenet"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
    ],
)
def test_errors_of_options(options, message):
    with pytest.raises(UserError, match=message):
        run(Options(**{"device": "cpu", "threads": 1, **options}), Console(file=io.StringIO()), TINY)


def test_an_unwritable_file_is_an_error_before_measuring(tmp_path):
    (tmp_path / "afile").touch()
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match=r"speed\.json cannot be written"):
        run(Options(device="cpu", threads=1, json=tmp_path / "afile" / "speed.json"), console, TINY)
    assert console.file.getvalue() == ""


def test_a_wrong_name_does_not_overwrite_an_earlier_report(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text("earlier")
    for wrong in ({"methods": ("hasle",)}, {"net": "vgg"}):
        with pytest.raises(UserError):
            run(Options(device="cpu", threads=1, json=path, **wrong), Console(file=io.StringIO()), TINY)
    assert path.read_text() == "earlier"


def test_the_line_of_a_method():
    plain = {"fp32": {"ratio": {"median": 12.25}}, "tf32": {"ratio": {"median": 9.5}}}
    assert summed_up("hassle", {"seconds": {"median": 1.98}, "plain": plain}) == (
        "hassle: 1.98 s per round, 12.25 times as fast as plain fp32, 9.50 times as fast as plain tf32"
    )


def test_methods_by_name():
    assert chosen(("hassle", "fedavg", "hassle")) == ("hassle", "fedavg")
    assert chosen(("all",)) == tuple(METHODS)


def test_the_paper_is_measured_on_a_gpu_and_less_on_a_cpu():
    assert (GPU.images, GPU.epochs, GPU.residual_steps, GPU.batch) == (50_000, 10, 100, 128)
    assert CPU.images < GPU.images and dataclasses.asdict(CPU).keys() == dataclasses.asdict(GPU).keys()


def test_warnings_of_the_engine_are_printed_and_stored():
    console = Console(file=io.StringIO(), width=200)
    with warnings_to(console) as said:
        fedhassle.engine.gpu.lanes.log.warning("phase %r runs eagerly [here]", "labelled")
    fedhassle.engine.gpu.lanes.log.debug("not this")
    assert said == ["phase 'labelled' runs eagerly [here]"]
    assert "warning: phase 'labelled' runs eagerly [here]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["--help"], 0, "--no-compile"), (["nothing"], 2, "unknown method 'nothing'")],
)
def test_the_command(words, code, said):
    command = [sys.executable, "-m", "benchmarks", *words]
    where = {"cwd": ROOT, "env": small.environment()}
    done = subprocess.run(command, **where, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("net", ["lenet", "resnet8"])
def test_the_whole_benchmark_on_a_gpu(net, tmp_path):
    options = Options(net=net, device="cuda", compile=False, json=tmp_path / "speed.json")
    report = run(options, Console(file=io.StringIO()), TINY)
    assert all(math.isfinite(value) for value in numbers(report)) and report["warnings"] == []
    for figures in report["methods"].values():
        assert figures["plain"].keys() == {"fp32", "tf32"} and figures["gpu_memory"] > 0
        assert figures["rounds"][0]["t"] == 3


# Workers


def test_the_paper_rounds_divide_as_the_speed_page_says():
    """With eight workers the longest client is alone: a partial one of 410 steps, by hand.

    10 epochs of ⌈278/128⌉ = 3 and of ⌈2223/128⌉ = 18 batches, and twice 100 batches for the residuals.
    """
    found = balance("hassle", (1, 8))
    assert found["steps"]["8"] == 10 * (3 + 18) + 2 * 100
    assert (found["steps"]["1"], found["times_fewer"]["8"]) == (2792.5, 6.81)
