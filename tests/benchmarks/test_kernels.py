"""Kernels beside their floors: work by hand, operations from a trace, and the convolutions of ResNet-8."""

import subprocess
import sys
from pathlib import Path

import pytest
import small
import torch

import fedhassle
from benchmarks import kernels
from benchmarks.floors import (
    COPIES,
    FORWARD,
    INPUT,
    MAPS,
    PRODUCTS,
    REST,
    SUMS,
    VECTORS,
    WEIGHTS,
    Launch,
    Operation,
    Part,
    Rates,
    Work,
    convolution,
    direction,
    launches,
    matched,
    parts,
    replayed,
    work_of,
)
from fedhassle.engine.device import Engine
from fedhassle.methods import Hassle
from fedhassle.nets import NETS, Net

ROOT = Path(fedhassle.__file__).parents[1]
BF16 = "c10::BFloat16"
MAP = (128, 64, 32, 32)


def event(name, begin, end, number, category="cpu_op", **args):
    """An event as a trace has it."""
    args = {"External id": number, **args}
    return {"cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": 1, "args": args}


def backward(mask="[True, True, False]"):
    sizes = ((128, 128, 16, 16), MAP, (128, 64, 3, 3)) + ((),) * 8
    values = ("", "", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask)
    return Operation(7, "aten::convolution_backward", sizes, (BF16,) * 3, values)


# Work


def test_the_work_of_a_convolution_by_hand():
    """64 channels: 2·128·32²·64·64·9 FLOPs; two maps of 128·64·32² entries and 64·64·9 weights in bf16."""
    z, work = convolution(MAP, (64, 64, 3, 3), (1, 1), (1, 1))
    assert z == MAP and work.flops == 9_663_676_416 and work.bytes == 2 * (2 * 8_388_608 + 36_864)
    assert work.floor(Rates(4.3e12, 750e12)) == pytest.approx(12.885, abs=0.001)  # by its FLOPs
    assert work.floor(Rates(1e12, 750e12)) == pytest.approx(33.628, abs=0.001)  # by its bytes


def test_a_stride_halves_the_result():
    z, work = convolution((2, 8, 9, 8), (4, 8, 3, 3), (2, 2), (1, 1))
    assert z == (2, 4, 5, 4) and work.flops == 2 * (2 * 4 * 5 * 4) * (8 * 9)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        (backward(), INPUT, Work(2 * (8_388_608 + 73_728 + 4_194_304), 4_831_838_208)),
        (Operation(1, "aten::mm", ((4, 5), (5, 6)), ("float",) * 2), PRODUCTS, Work(4 * (20 + 30 + 24), 240)),
        (
            Operation(1, "aten::addmm", ((6,), (4, 5), (5, 6), (), ()), ("float",) * 3),
            PRODUCTS,
            Work(4 * (20 + 30 + 24), 240),
        ),
        (Operation(1, "fedhassle::moments", (MAP, (64,), (64,)), (BF16, "float", "float")), SUMS, 16_777_216),
        (
            Operation(1, "triton_poi", (MAP, MAP, (10**6,), ()), (BF16, "float", "float", "")),
            MAPS,
            50_331_648,
        ),
        (Operation(1, "triton_poi", ((100,), (100,)), ("float", BF16)), VECTORS, 600),
        (Operation(1, "aten::fill_", ((),), ("Scalar",)), REST, None),
    ],
)
def test_the_work_of_operations(operation, kind, expected):
    assert work_of(operation, kind) == (Work(expected) if isinstance(expected, int) else expected)


def test_an_addition_that_a_convolution_fuses_is_one_more_tensor_to_read():
    values = ("", "", "", "", "[1, 1]", "[1, 1]")
    plain = Operation(
        1, "fedhassle::convolve_relu", (MAP, (64, 64, 3, 3), (64,), (), (), ()), (BF16,) * 3, values
    )
    added = plain._replace(sizes=(MAP, (64, 64, 3, 3), (64,), MAP, (), ()))
    assert work_of(added, FORWARD).bytes - work_of(plain, FORWARD).bytes == 2 * 128 * 64 * 32 * 32


# Traces


def test_kernels_belong_to_the_outermost_known_operation():
    sizes, values = [list(MAP), [64, 64, 3, 3], []], ["", "", "", "[1, 1]", "[1, 1]"]
    whole = {"Input Dims": sizes, "Input type": [BF16, BF16, ""], "Concrete Inputs": values}
    events = [
        event("forward", 0, 100, 1),
        event("aten::convolution", 10, 50, 2, **whole),
        event("aten::cudnn_convolution", 20, 40, 3),
        event("triton_poi", 60, 70, 4, **{"Input Dims": [[5], [[1], [2]]], "Input type": ["float", ""]}),
        event("add", 90, 95, 4, "kernel"),
        event("fprop", 80, 85, 3, "kernel"),
        event("Memset (Device)", 97, 98, 99, "gpu_memset"),
        {"ph": "M", "name": "process_name"},
    ]
    first, second, third = launches(events)
    assert (first.kernel, first.microseconds) == ("fprop", 5)
    assert first.operation.name == "aten::convolution" and first.operation.sizes[2] == ()
    assert second.operation == Operation(4, "triton_poi", ((5,), ()), ("float", ""))
    assert third == Launch("Memset (Device)", 1, None)


def test_the_median_of_each_kernel_of_several_replays():
    kernels = [Launch(name, t) for name, t in (("a", 1), ("b", 9), ("a", 3), ("b", 7), ("a", 8), ("b", 8))]
    assert replayed(kernels, 3) == [Launch("a", 3), Launch("b", 8)]
    with pytest.raises(ValueError, match="6 kernels are not 4 equal replays"):
        replayed(kernels, 4)


def test_kernels_of_a_graph_are_matched_by_name_and_order():
    one, two = Operation(1, "one"), Operation(2, "two")
    launched = [Launch("a", 0, one), Launch("copy", 0, one), Launch("a", 0, two), Launch("b", 0, two)]
    found = matched(
        [Launch("a", 5), Launch("fill", 6), Launch("a", 7), Launch("b", 8), Launch("b", 9)], launched
    )
    assert [kernel.operation for kernel in found] == [one, None, two, None, None]  # b is there twice
    assert [kernel.microseconds for kernel in found] == [5, 6, 7, 8, 9]


# Parts


def test_the_two_directions_of_a_backward_convolution():
    names = ["reorder", "x_dgrad_y", "x_wgrad_y", "splitK"]
    assert [direction(backward(), names, i) for i in range(4)] == [INPUT, INPUT, WEIGHTS, WEIGHTS]
    only = backward("[False, True, False]")
    assert [direction(only, ["gemm", "splitK"], i) for i in range(2)] == [WEIGHTS, WEIGHTS]
    assert [direction(backward(), ["gemm", "gemm"], i) for i in range(2)] == [INPUT, WEIGHTS]


def test_the_parts_of_a_step():
    norm = Operation(2, "fedhassle::moments", (MAP, (64,)), (BF16, "float"))
    maps = Operation(3, "triton_poi_fused_add", (MAP, (1000,)), (BF16, "float"))
    sgd = Operation(4, "triton_poi_fused_mul", ((1000,), (1000,)), ("float", "float"))
    loss = Operation(5, "triton_per_fused_sum", ((128,),), ("float",))
    kernels = [
        Launch("dgrad", 1, backward()),
        Launch("wgrad", 2, backward()),
        Launch("splitK", 3, backward()),
        Launch("_sums", 4, norm),
        Launch("add", 5, maps),
        Launch("mul", 6, sgd),
        Launch("sum", 7, loss),
        Launch("Memset", 8),
        Launch("mystery", 9),
    ]
    found = parts(kernels, 1000)
    kinds = [INPUT, WEIGHTS, SUMS, MAPS, VECTORS, REST, COPIES, REST]
    assert [part.kind for part in found] == kinds
    assert [part.microseconds for part in found] == [1, 5, 4, 5, 6, 7, 8, 9]
    assert found[1].kernels == ("wgrad", "splitK") and found[1].work == found[0].work
    assert found[0].label == "128×64×32×32 → 128, 3×3/2" and found[2].label == "moments 128×64×32×32"
    assert found[-1] == Part(REST, "mystery", ("mystery",), 9, None)


def test_lines_add_up_per_step():
    rates = Rates(1e6, 1e6)  # a byte or a FLOP takes a microsecond
    some = [
        Part(SUMS, "b", ("k",), 30, Work(10)),
        Part(FORWARD, "a", ("k", "l"), 50, Work(10, 20)),
        Part(SUMS, "c", ("k",), 10, None),
    ]
    first, second = kernels.lines(some, rates, lambda part: part.kind, 10)
    assert first == kernels.Line(FORWARD, 1, 2, 5, 2) and second == kernels.Line(SUMS, 2, 2, 4, 1)
    measured = kernels.Measured(10, some, 100)
    assert kernels.kinds_table("step", measured, rates).row_count == 4
    assert [line["floor"] for line in measured.json(rates)["parts"]] == [10, 20, None]


def test_the_convolutions_of_resnet8():
    """All but the first, and the shortcuts after they have selected pixels."""
    net = Net(NETS["resnet8"], (3, 32, 32), 10)
    found = kernels.layers_of(net.module(seed=0), net.shape, 128)
    sizes = [(layer.x[1], layer.x[2], layer.kernel[0], layer.kernel[2], layer.stride[0]) for layer in found]
    assert sorted(sizes) == [
        (64, 16, 128, 1, 1),
        (64, 32, 64, 3, 1),
        (64, 32, 64, 3, 1),
        (64, 32, 128, 3, 2),
        (128, 8, 256, 1, 1),
        (128, 16, 128, 3, 1),
        (128, 16, 256, 3, 2),
        (256, 8, 256, 3, 1),
    ]
    assert {layer.x[0] for layer in found} == {128}


def test_the_share_of_the_peak():
    alone = kernels.Alone("dual", FORWARD, "a layer", 2, 20.0, Work(1e6, 3e9))
    found = alone.json(Rates(1e12, 750e12))
    assert found["share_of_peak"] == pytest.approx(0.2) and found["floor"] == pytest.approx(4.0)
    assert kernels.alone_table([found]).row_count == 1


def test_the_pieces_of_a_step_run(monkeypatch):
    """On a CPU nothing is captured, but the same work runs: inputs of ten steps, and one step."""
    monkeypatch.setattr(kernels, "IMAGES", 40)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine, method = Engine(torch.device("cpu")), Hassle(net=Net(small.ConvNet, (3, 32, 32), 10), batch=4)
    jobs = [(job, kept) for job, kept in kernels.jobs(method, engine) if job.phase.name in kernels.PHASES]
    assert [job.phase.name for job, _ in jobs] == list(kernels.PHASES)
    for job, kept in jobs:
        found = list(kernels.recorded(job, kept, kernels.FunctionsByShape(engine)))
        assert [name for name, _ in found] == ["inputs", "step"]


def test_without_a_gpu_the_command_says_so():
    command = [sys.executable, "-m", "benchmarks.kernels"]
    environment = small.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "PyTorch finds no CUDA device here" in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_are_timed_on_a_gpu():
    x = torch.ones(1 << 20, device="cuda")
    with kernels.on_a_stream():
        replay = kernels.captured(lambda: x.mul_(1.0), torch.cuda.graph_pool_handle())
        times = [kernels.median_of_replays(replay, 5) for _ in range(2)]
        found = replayed(kernels.profiled(replay, 3), 3)
    assert min(times) > 0 and len(found) == 1
