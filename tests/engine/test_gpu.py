"""Training on a GPU; run with `pytest -m gpu`."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import small
import torch
from on_devices import CLOSE, CUDA, DATA, SAME, made, on, relative, second_round

import fedhassle
from fedhassle.architectures import LeNet, ResNet8, ResNet18, WideResNet28
from fedhassle.data.split.split import Split
from fedhassle.engine.client import train, visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.gpu.memory import FOR_TENSORS, free_memory, share_memory
from fedhassle.engine.privacy.by_sample import BySample, Mechanism
from fedhassle.engine.rounds import Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.methods import METHODS, FedAvg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CPU = torch.device("cpu")
PAIRS = [(name, small.ConvNet) for name in METHODS]  # the smallest network with every kind of tensor
PAIRS += [(name, build) for name in ("fedavg", "hassle", "fedmatch") for build in (LeNet, ResNet8)]
EACH = pytest.mark.parametrize(("name", "build"), PAIRS)


def begun(method):
    return {k: v.to(CUDA) for k, v in method.initial(0).items()}


@EACH
def test_a_step_on_the_gpu_is_that_of_the_cpu(name, build):
    """One epoch of one batch, so that rounding errors stay small; without TF32, which rounds to 10 bits."""
    method, results = made(name, build), []
    for device in (CPU, CUDA):
        with Engine(device).active():
            updates = [train(*one)[0] for one in second_round(method, device)]
        assert all(v.device.type == device.type for update in updates for v in update.arrays.values())
        results.append([{k: v.cpu() for k, v in update.arrays.items()} for update in updates])
    for expected, found in zip(*results, strict=True):
        assert found.keys() == expected.keys()
        for trained in expected:
            torch.testing.assert_close(found[trained], expected[trained], **CLOSE)


@EACH
def test_a_captured_step_is_the_eager_one(name, build):
    """In fp32: weights, statistics and loss of one step to 1e-5."""
    check_one_step(name, build, Engine(CUDA, "fp32", lanes=2))


@pytest.mark.parametrize(("name", "build"), [("fedprox", LeNet), ("hassle", small.ConvNet)])
def test_a_compiled_step_is_the_eager_one(name, build, caplog):
    check_one_step(name, build, Engine(CUDA, "fp32", lanes=2, compile=True))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# Dropout, other optimisers, larger networks

DROPOUT = [("fedavg", small.Dropping), ("hassle", small.Dropping), ("fedmatch", small.Dropping)]


@pytest.mark.parametrize(("name", "build"), DROPOUT)
def test_a_step_with_dropout_has_the_masks_of_the_cpu(name, build):
    test_a_step_on_the_gpu_is_that_of_the_cpu(name, build)


@pytest.mark.parametrize(("name", "build"), DROPOUT)
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_a_step_with_dropout_is_captured_and_is_the_eager_one(name, build, compiled, caplog):
    """No warning: it runs neither eagerly nor one client after the other."""
    check_one_step(name, build, Engine(CUDA, "fp32", lanes=2, compile=compiled))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def assert_trained_as_alone(pool, method, sites):
    """Asserts that clients end two rounds, the second of replays, as if each had trained alone."""
    state = begun(method)
    with pool.engine.active():
        for t in (1, 2):
            asked = [(method, site, method.message(state, site.client, t), None, t, 0) for site in sites]
            trained = pool.train([visit(*one) for one in asked])
            for one, (found, _) in zip(asked, trained, strict=True):
                expected, _ = train(*one)
                for name, vector in expected.arrays.items():
                    assert relative(found.arrays[name], vector) < 1e-3


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_replayed_steps_with_dropout_have_a_mask_each(compiled, caplog):
    """23 steps: two stretches of ten, one of two and one of one, on clients that share two lanes."""
    method = made("fedavg", small.Dropping, steps=23, lr=0.001)
    engine = Engine(CUDA, "fp32", lanes=2, compile=compiled)
    sites = [on(CUDA), on(CUDA, range(30), (), "ben"), on(CUDA, range(10, 40), (), "cleo")]
    assert_trained_as_alone(Lanes(engine), method, sites)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# Shared kernels


@pytest.mark.parametrize("name", ["fedavg", "mixmatch", "hassle"])
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_clients_that_share_kernels_end_as_if_alone(name, compiled, caplog):
    """Of 13 steps: a stretch of ten, one of two and one of one; the second round replays them."""
    method = made(name, LeNet, steps=13, lr=0.001)
    sites = small.beside(*(on(CUDA, range(20 * i, 20 * i + 20), range(60, 81), str(i)) for i in range(3)))
    engine = Engine(CUDA, "fp32", lanes=2, compile=compiled, stack=4)
    pool = Lanes(engine)
    assert_trained_as_alone(pool, method, sites)
    assert {form.seats for form in pool.seconds} == {4}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_process_that_shares_the_gpu_may_take_its_share():
    _, total = torch.cuda.mem_get_info(CUDA)
    share_memory(CUDA, 10)
    try:
        assert 0 < free_memory(CUDA) <= total * FOR_TENSORS / 10
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 10, dtype=torch.uint8, device=CUDA)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


OPTIMISERS = [
    {"optimiser": "adamw", "weight_decay": 0.1, "lr": 0.01},
    {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", OPTIMISERS, ids=["adamw", "nesterov"])
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_every_optimiser_is_captured_and_its_rate_is_a_tensor(settings, compiled, caplog):
    """Three rounds of a warm-up with one recording: the rates differ, the graph does not."""
    method = replace(made("fedavg", small.Normed, steps=13), lr_warmup=3, **settings)
    engine, site = Engine(CUDA, "fp32", lanes=1, compile=compiled), on(CUDA)
    pool, message, results = Lanes(engine), begun(method), []
    with engine.active():
        for t in (1, 2, 3):
            ((found, _),) = pool.train([visit(method, site, message, None, t, 0)])
            expected, _ = train(method, site, message, None, t, 0)
            assert relative(found.arrays["w"], expected.arrays["w"]) < 1e-4
            results.append((found.arrays["w"] - message["w"]).norm().item())
    assert results == sorted(results) and len(pool.seconds) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("build", [ResNet18, WideResNet28])
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_larger_networks_train_on_lanes(build, compiled, caplog):
    """HASSLE in fp32, with residual models of a quarter of the width."""
    check_one_step("hassle", build, Engine(CUDA, "fp32", lanes=2, compile=compiled))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("net", ["resnet18", "wrn-28-2"])
def test_larger_networks_train_in_bfloat16(net, tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (600, 32, 32, 3), np.uint8), np.arange(600) % 4
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    settings = QUICK | {"data": str(tmp_path / "images.npz"), "net": net, "rounds": 2, "method.epochs": 1}
    settings |= {"split.clients": 4, "split.labels": {"full": 1, "partial": 1, "unlabelled": 2, "share": 0.3}}
    result = fedhassle.run("paper", settings | {"clients_per_round": 4}, out=tmp_path / "run", quiet=True)
    assert result.summary["settings"]["precision"] == "bf16"
    assert all(torch.isfinite(v).all() for v in arrays(result).values())


def check_one_step(name, build, engine, changed=lambda method: method):
    """Trains clients of each kind in parallel, by a method or what `changed` makes of it."""
    asked = list(second_round(changed(made(name, build)), CUDA))
    with engine.active():
        eagerly = [train(*one)[0] for one in asked]
        on_lanes = [update for update, _ in Lanes(engine).train([visit(*one) for one in asked])]
    for (_, site, message, *_), eager, captured in zip(asked, eagerly, on_lanes, strict=True):
        assert site.client == eager.client == captured.client
        for trained, expected in eager.arrays.items():
            assert relative(captured.arrays[trained], expected) < SAME
            assert relative(captured.losses[trained], eager.losses[trained]) < SAME
            assert not torch.equal(captured.arrays[trained], message[trained])  # it did train
        assert torch.equal(captured.labelling, eager.labelling)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_private_gradients_is_captured_and_is_the_eager_one(compiled, caplog):
    engine = Engine(CUDA, "fp32", lanes=2, compile=compiled)
    check_one_step("hassle", LeNet, engine, partial(BySample.of, mechanism=Mechanism(0.5, 0.8)))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("lanes", [1, 3])
def test_many_jobs_on_few_lanes_leave_nothing_behind(lanes):
    """Three rounds of clients of three kinds on the same lanes, against each client alone and eagerly."""
    method = made("hassle", small.ConvNet, steps=13, lr=0.001)
    engine = Engine(CUDA, "fp32", lanes=lanes)
    sites = [on(CUDA), on(CUDA, range(30), (), "ben"), on(CUDA, (), range(50, 90), "eve")]
    pool = Lanes(engine)
    with engine.active():
        for t in (1, 2, 3):
            messages = [method.message(begun(method), site.client, t) for site in sites]
            visits = [visit(method, s, m, None, t, 0) for s, m in zip(sites, messages, strict=True)]
            for site, message, (found, _) in zip(sites, messages, pool.train(visits), strict=True):
                expected, _ = train(method, site, message, None, t, 0)
                assert list(found.arrays) == list(expected.arrays)
                for name, array in expected.arrays.items():
                    assert relative(found.arrays[name], array) < 1e-3


@dataclass(frozen=True)
class Peeking(FedAvg):
    """FedAvg whose loss reads a value on the host, which cannot be captured."""

    def loss(self, local, received, batch):
        loss = super().loss(local, received, batch)
        return loss * (2.0 if loss.item() > 1e9 else 1.0)


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(caplog):
    engine, site = Engine(CUDA, "fp32", lanes=2), on(CUDA)
    net = small.net(small.ConvNet, channels=3)
    results = []
    with engine.active():
        for kind in (FedAvg, Peeking):
            method, pool = kind(net=net, batch=8, epochs=7, lr=0.01), Lanes(engine)
            message = method.message(begun(method), site.client, 1)
            for t in (1, 2):
                ((update, _),) = pool.train([visit(method, site, message, None, t, 0)])
            results.append(update.arrays["w"])
    assert relative(results[1], results[0]) < 1e-4
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "cannot be captured" in warnings[0]


def test_running_out_of_memory_costs_lanes_and_no_round(caplog):
    """Memory runs out once, after the first lanes are open."""
    engine, method = Engine(CUDA, "fp32", lanes=4), made("hassle", ResNet8, steps=3)
    site = on(CUDA)
    message = method.message(begun(method), site.client, 1)
    visits = [visit(method, site, message, None, 1, 0)]
    with engine.active():
        expected, _ = train(method, site, message, None, 1, 0)
        pool = Lanes(engine)
        pool.max_lanes = 4
        held, asked = [], pool._side_by_side

        def squeezed(work):
            if not held:
                held.append(torch.empty(0))
                raise torch.OutOfMemoryError("no more")
            return asked(work)

        pool._side_by_side = squeezed
        ((found, _),) = pool.train(visits)
    assert len(pool.lanes) == 2 and "out of memory" in caplog.text
    assert relative(found.arrays["w_S"], expected.arrays["w_S"]) < 1e-3


QUICK = {"rounds": 4, "device": "cuda", "method.epochs": 2, "method.residual_steps": 12}


@pytest.mark.parametrize("net", ["lenet", "resnet8"])
def test_deterministic_runs_have_the_same_bits(tmp_path, net):
    settings = QUICK | {"deterministic": True, "net": net, "method.epochs": 1}
    first, second = (fedhassle.run("paper", settings, out=tmp_path / name, quiet=True) for name in ("a", "b"))
    assert small.same(arrays(first), arrays(second))


def test_runs_side_by_side_are_those_that_run_alone(tmp_path):
    settings = QUICK | {"deterministic": True}
    vary = {"method": ["hassle", "fedavg"], "seed": [0, 1]}
    wanted = {k: v for k, v in settings.items() if k != "method.residual_steps"}
    together = fedhassle.run_several("paper", wanted, vary=vary, out=tmp_path / "together", quiet=True)
    assert len(together) == 4
    for result, method, seed in zip(together, ["hassle"] * 2 + ["fedavg"] * 2, [0, 1] * 2, strict=True):
        alone = fedhassle.run(
            "paper", wanted | {"method": method, "seed": seed}, out=tmp_path / f"{method}{seed}", quiet=True
        )
        assert small.same(arrays(result), arrays(alone))


def test_more_runs_than_there_are_streams_do_not_disturb_each_other(tmp_path, caplog):
    """Ten runs of up to eight lanes: PyTorch would hand the same stream to several of them."""
    settings = {k: v for k, v in QUICK.items() if k != "method.residual_steps"} | {"method": "fedprox"}
    done = fedhassle.run_several("paper", settings, vary={"seed": list(range(10))}, out=tmp_path, quiet=True)
    assert len(done) == 10 and "cannot be captured" not in caplog.text


def arrays(result):
    from fedhassle.engine.tensor_files import read_arrays

    return read_arrays(result.folder / "model.safetensors")[0]


def test_a_run_in_bfloat16_learns_and_ends_in_a_model(tmp_path):
    result = fedhassle.run("paper", QUICK | {"rounds": 6}, out=tmp_path / "run", quiet=True)
    assert result.summary["hardware"]["device"] == "cuda"
    assert result.summary["settings"]["precision"] == "bf16"
    assert set(result.accuracy) == {"SM", "UM", "EM", "w_S", "w_U"}
    assert result.accuracy["EM"]["best"] > 0.3


def test_the_gpus_memory_does_not_grow_with_the_number_of_clients():
    """100 of 200 and of 10,000 clients per round."""
    taken = {}
    for total in (200, 10_000):
        rows = [np.arange(i % 100, i % 100 + 8) for i in range(total)]
        split = Split(tuple(rows), (np.arange(0),) * total)
        method = FedAvg(net=small.net(small.ConvNet, channels=3), batch=8, epochs=1)
        engine = Engine(CUDA, "fp32")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with engine.active():
            for _ in federate(method, Simulator(DATA, split, 0, engine), Plan(3, 100, 0), begun(method)):
                pass
        taken[total] = torch.cuda.max_memory_allocated() - before
    assert taken[10_000] < 1.2 * taken[200]
