"""Training on a device: PyTorch's switches, lowered precision, and the settings of the machine."""

import itertools

import pytest
import small
import tomli_w
import torch
import torch.nn.functional as F
from small import but_seconds, call, cut, metrics_of, resolved
from torch import nn

from fedhassle.architectures import LeNet, ResNet8
from fedhassle.engine.device import LANES, STACK, Engine
from fedhassle.errors import UserError
from fedhassle.layers import Stem
from fedhassle.nets import Net
from fedhassle.runs.folder import claim
from fedhassle.runs.resume import reopen
from fedhassle.settings.build import build_engine
from fedhassle.settings.request import MACHINE, request
from fedhassle.settings.schema import COMPILED_ROUNDS, Settings, resolved_compile, resolved_precision

CPU, CUDNN, CUBLAS = small.CPU, torch.backends.cudnn, torch.backends.cuda.matmul
BF16 = Engine(CPU, "bf16")

# Switches


def switches():
    """The state of PyTorch's backend switches."""
    return {
        "benchmark": CUDNN.benchmark,
        "deterministic": CUDNN.deterministic,
        "convolutions in TF32": CUDNN.conv.fp32_precision == "tf32",
        "products in TF32": CUBLAS.fp32_precision == "tf32",
        "only deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def switch(benchmark, deterministic, convolutions, products, only_deterministic):
    CUDNN.benchmark, CUDNN.deterministic = benchmark, deterministic
    CUDNN.conv.fp32_precision = "tf32" if convolutions else "ieee"
    CUBLAS.fp32_precision = "tf32" if products else "ieee"
    torch.use_deterministic_algorithms(only_deterministic)


@pytest.fixture(autouse=True)
def as_before():
    before = switches()
    yield
    switch(*before.values())


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_switches_are_set_for_training_and_restored(precision, deterministic):
    """TF32 unless float32 is requested; kernels are autotuned unless runs must be deterministic."""
    engine = Engine(CPU, precision, deterministic=deterministic)
    for each in itertools.product([False, True], repeat=5):
        switch(*each)
        with engine.active():
            inside = switches()
        assert tuple(switches().values()) == each
        assert inside["benchmark"] is not deterministic and inside["deterministic"] is deterministic
        assert inside["convolutions in TF32"] is inside["products in TF32"] is (precision != "fp32")
        assert inside["only deterministic"] is (deterministic or each[-1])  # a user's own choice is kept


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_switches_come_back_after_an_error(error):
    for each in itertools.product([False, True], repeat=5):
        switch(*each)
        with pytest.raises(error), Engine(CPU, "tf32", deterministic=not each[1]).active():
            assert switches()["deterministic"] is not each[1]
            raise error
        assert tuple(switches().values()) == each


def test_warn_only_of_the_user_is_kept():
    torch.use_deterministic_algorithms(True, warn_only=True)
    with Engine(CPU).active():
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_switch_that_does_not_change_is_not_set(monkeypatch):
    """PyTorch imports its compiler to set it, which takes seconds at the end of a run and after Ctrl-C."""
    calls = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args, **options: calls.append(args))
    with Engine(CPU).active():
        pass
    assert calls == []


def test_switches_that_a_user_set_by_their_new_names():
    """`fp32_precision`, which PyTorch recommends since 2.9."""
    before = CUBLAS.fp32_precision
    CUBLAS.fp32_precision = "tf32"
    try:
        with Engine(CPU).active():
            assert CUBLAS.fp32_precision == "ieee"
        assert CUBLAS.fp32_precision == "tf32"
    finally:
        CUBLAS.fp32_precision = before


def test_only_bfloat16_is_a_lowered_precision():
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    for precision, expected in (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32)):
        with Engine(CPU, precision).lowered():
            assert torch.is_autocast_enabled("cpu") is (precision == "bf16")
            assert (a @ b).dtype == expected
        assert (a @ b).dtype == torch.float32
    with BF16.lowered():
        assert not torch.is_autocast_cache_enabled()  # a graph must not read a cast that lies elsewhere


# Networks in bfloat16


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


NETWORKS = pytest.mark.parametrize(
    ("build", "channels", "width"),
    [(LeNet, 1, 1.0), (LeNet, 3, 0.25), (ResNet8, 3, 0.25), (small.ConvNet, 1, 0.9), (small.Linear, 3, 1.0)],
    ids=["lenet", "narrow lenet", "resnet8", "own", "linear"],
)


@NETWORKS
@pytest.mark.parametrize("training", [False, True])
def test_logits_in_bfloat16_are_close_and_of_single_precision(build, channels, width, training):
    """Eight bits of precision: each rounding is one of 2⁻⁹ = 0.2 %, a few layers make less than 2 %."""
    net = small.net(build, channels, width=width)
    weights, statistics = net.parts(net.initial(0))
    x = drawn(16, *net.shape).contiguous(memory_format=torch.channels_last)
    exact = net(weights, moved := statistics.clone(), x, training)
    with BF16.lowered():
        found = net(weights, lowered := statistics.clone(), x, training)
    assert found.dtype == lowered.dtype == torch.float32
    assert 0 < (found - exact).norm() < 2e-2 * exact.norm()
    torch.testing.assert_close(lowered, moved, rtol=2e-2, atol=2e-2)
    assert torch.equal(lowered, statistics) == (not training or net.n_statistics == 0)


@NETWORKS
def test_gradients_in_bfloat16_reach_every_weight_and_no_padding(build, channels, width):
    """Seven classes, so that the last bias has padding; the whole gradient is close to that of float32."""
    net = Net(build, (channels, 12, 12), 7, width)
    vector = net.initial(0)
    weights, statistics = net.parts(vector)
    x, y = drawn(32, *net.shape), torch.arange(32) % 7
    gradients = []
    for engine in (BF16, Engine(CPU)):
        leaf = weights.clone().requires_grad_()
        with engine.lowered():
            loss = F.cross_entropy(net(leaf, statistics.clone(), x, training=True), y)
        gradients += torch.autograd.grad(loss, leaf)
    found, exact = gradients
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.2 * exact.norm()
    padding = net.flatten(ones_of(net))[: net.n_weights] == 0
    assert padding.any() and found[padding].eq(0).all()
    assert (found[exact != 0] != 0).float().mean() > 0.99  # what underflows is next to nothing
    begin = 0
    for room in net.weight_sizes:  # of each tensor
        assert found[begin : begin + room].abs().max() > 0
        begin += room


def ones_of(net):
    """A module of the network's shape whose every weight is one, so that zeros are padding."""
    module = net.build(net.shape, net.classes, net.width)
    for parameter in module.parameters():
        nn.init.ones_(parameter.detach())
    return module


@pytest.mark.parametrize("channels", [1, 3, 4, 8, 9])
@pytest.mark.parametrize(("size", "padding"), [(3, 1), (5, 2), (5, 0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("planes", [6, 16])  # a padded convolution, a matrix product
def test_a_stem_equals_its_parent_up_to_rounding(channels, size, padding, bias, planes):
    """Without autocast equal bits; with it equal up to the rounding of bfloat16.

    Both round image, kernel and result to 8 bits: they may differ where a sum in another order falls to the
    other side of a tie, by 2⁻⁸ of the result.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        stem = Stem(channels, planes, size, padding=padding, bias=bias)
    plain = nn.Conv2d(channels, planes, size, padding=padding, bias=bias)
    plain.load_state_dict(stem.state_dict())
    side = 9 + 2 * padding - size + 1
    x, c = drawn(4, channels, 9, 9), drawn(4, planes, side, side)
    assert torch.equal(stem(x), plain(x))
    with BF16.lowered():
        found, parent = stem(x), plain(x)
        gradients = [torch.autograd.grad((m(x) * c).sum(), [*m.parameters()]) for m in (stem, plain)]
    assert found.dtype == parent.dtype == torch.bfloat16 and found.shape == parent.shape
    torch.testing.assert_close(found.float(), parent.float(), rtol=2**-7, atol=2**-7)
    for a, b in zip(*gradients, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


# Settings of the machine


def test_on_a_cpu_there_is_one_precision_and_nothing_is_compiled():
    settings = resolved("device=cpu")
    assert (settings.precision, settings.compile, settings.lanes, settings.deterministic) == (
        *("fp32", False, LANES),
        False,
    )
    assert build_engine(settings) == Engine(CPU, "fp32", LANES, stack=STACK)
    chosen = resolved(
        "device=cpu", "precision=fp32", "compile=false", "lanes=3", "stack=1", "deterministic=true"
    )
    assert build_engine(chosen) == Engine(CPU, "fp32", 3, deterministic=True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision=bf16", r"precision=bf16 is for a GPU: on a CPU it is fp32"),
        ("precision=tf32", r"precision=tf32 is for a GPU"),
        ("precision=fp16", r"precision: .*'auto', 'bf16', 'tf32' or 'fp32'"),
        ("compile=true", "compile=true is for a GPU"),
        ("compile=1", "compile: .*got 1"),
        ("lanes=0", "lanes: .*greater than or equal to 1, got 0"),
        ("lanes=257", "lanes: .*256, got 257"),
        ("stack=0", "stack: .*greater than or equal to 1, got 0"),
        ("lanes=1.5", r"lanes: .*got 1\.5"),
        ("deterministic=maybe", "deterministic: .*got 'maybe'"),
    ],
)
def test_errors_of_machine_settings(word, message):
    with pytest.raises(UserError, match=message):
        resolved("device=cpu", word)


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_takes_the_fastest_precision_that_it_has(supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert resolved_precision("auto", "cuda") == ("bf16" if supported else "tf32")
    assert [resolved_precision(p, "cuda") for p in ("bf16", "tf32", "fp32")] == ["bf16", "tf32", "fp32"]
    assert resolved_precision("auto", "cpu") == resolved_precision("fp32", "cpu") == "fp32"


def test_long_runs_are_compiled():
    def fused(device, **settings):
        return resolved_compile(Settings(**settings), device)

    long, short = COMPILED_ROUNDS, COMPILED_ROUNDS - 1
    assert fused("cuda", rounds=long) and not fused("cuda", rounds=short)
    assert not fused("cpu", rounds=long)
    assert fused("cuda", rounds=1, compile=True) and not fused("cuda", rounds=long, compile=False)
    assert not fused("cuda", rounds=long, deterministic=True)
    with pytest.raises(UserError, match=r"compile=true .*not with deterministic=true"):
        fused("cuda", rounds=long, compile=True, deterministic=True)


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    settings = resolved("device=auto", f"rounds={COMPILED_ROUNDS}")
    assert build_engine(settings) == Engine(torch.device("cuda"), "bf16", LANES, compile=True, stack=STACK)
    settings = resolved("device=cuda", "precision=fp32", "deterministic=true", "lanes=2", "stack=1")
    assert build_engine(settings) == Engine(torch.device("cuda"), "fp32", 2, False, True)


# Resuming on another device

ELSEWHERE = {
    "device": "cuda",
    "threads": 7,
    "workers": 4,
    "ray": "auto",
    "lanes": 3,
    "stack": 8,
    "precision": "bf16",
    "compile": True,
    "deterministic": False,
    "track": ["tensorboard"],
}


def moved_to_a_gpu(folder):
    """Changes the settings of a run to those of a GPU."""
    assert set(ELSEWHERE) == set(MACHINE)
    settings = reopen(folder.parent, "cpu").settings.as_toml() | ELSEWHERE
    folder.write_text(tomli_w.dumps(settings))


def test_a_run_reopened_on_another_device_forgets_the_settings_of_the_first(words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cut(words, tmp_path / "run", 1)
    before = reopen(tmp_path / "run").settings
    moved_to_a_gpu(tmp_path / "run" / "config.toml")
    with pytest.raises(UserError, match="device=cuda: PyTorch finds no CUDA device"):
        reopen(tmp_path / "run")
    settings = reopen(tmp_path / "run", "cpu").settings
    expected = resolved(
        "device=cpu", "lanes=3", "stack=8", "track=tensorboard"
    )  # settings that fit any device stay
    assert {name: getattr(settings, name) for name in MACHINE} == {
        name: getattr(expected, name) for name in MACHINE
    }
    as_before = {name: getattr(before, name) for name in ("threads", "lanes", "stack", "track")}
    assert settings.model_copy(update=as_before) == before


def test_a_run_reopened_before_it_was_resolved_forgets_them_too(words, tmp_path):
    asked = [*words, "device=cuda", "precision=bf16", "compile=true"]
    folder = claim(request(None, asked), tmp_path / "run").path
    settings = reopen(folder, "cpu").settings
    assert (settings.device, settings.precision, settings.compile) == ("cpu", "fp32", False)


def test_a_run_reopened_on_its_own_device_keeps_its_settings(words, tmp_path):
    """A run in float32, or a deterministic one, continues the same way."""
    folder = claim(
        request(None, [*words, "threads=3", "lanes=2", "deterministic=true"]), tmp_path / "run"
    ).path
    assert reopen(folder, "cpu").settings == reopen(folder).settings


def test_a_run_from_a_gpu_resumes_on_a_cpu(eight_rounds, whole, tmp_path):
    """All rounds run on a CPU, so the result equals the uninterrupted run; only the settings name a GPU."""
    folder = tmp_path / "run"
    cut(eight_rounds, folder, 3)
    moved_to_a_gpu(folder / "config.toml")
    code, _, err = call("resume", folder, "--device", "cpu")
    assert (code, err) == (0, "")
    assert but_seconds(metrics_of(folder)) == but_seconds(metrics_of(whole))
    assert small.same(
        small.tensors_of(folder / "model.safetensors"), small.tensors_of(whole / "model.safetensors")
    )
    assert small.summary_of(folder)["settings_hash"] == small.summary_of(whole)["settings_hash"]
