"""Fixtures. Every test process uses one thread: sums keep their order, and workers do not compete."""

import multiprocessing
import os
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Compiled kernels stay for this user's next tests, but not among those of training.
KERNELS = f"fedhassle-tests-{os.getuid() if hasattr(os, 'getuid') else 'kernels'}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / KERNELS))
settings.register_profile("patient", deadline=None)  # a slow machine is not a failure
settings.load_profile("patient")


@pytest.fixture(scope="session", params=[1, 3], ids=["grey", "colour"])
def data(request):
    """Four classes of 12×12 images, with one channel and with three."""
    return small.dataset(channels=request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def quick_compiler(monkeypatch):
    """The compiler without its code generator, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


@pytest.fixture
def global_randomness():
    """Fails the test if it changes the global random state of torch or NumPy."""
    before = torch.get_rng_state(), np.random.get_state()[1:3]
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    key, position = np.random.get_state()[1:3]
    assert (key == before[1][0]).all() and position == before[1][1]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an importable user module, and removes it from sys.modules afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


# Runs


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """An .npz file with 240 small images of four classes."""
    path = tmp_path_factory.mktemp("images") / "small.npz"
    small.save_images(path, small.dataset(train=240))
    return path


@pytest.fixture(scope="session")
def without_residuals(images):
    """Settings of a run that takes a fraction of a second, for any method."""
    return [
        f"data={images}",
        *("rounds=4", "clients_per_round=4", "threads=1", "device=cpu", "split.clients=6"),
        "split.labels={full=1,partial=2,unlabelled=3,share=0.3}",
        *("method.epochs=1", "method.batch=16"),
    ]


@pytest.fixture(scope="session")
def words(without_residuals):
    """Settings of such a run of HASSLE."""
    return [*without_residuals, "method.residual_steps=2"]


@pytest.fixture(scope="session")
def finished(words, tmp_path_factory):
    """The folder of a finished run, and its output."""
    folder = tmp_path_factory.mktemp("runs") / "hassle"
    code, out, err = small.call("run", *words, "--out", folder)
    assert (code, err) == (0, "")
    return folder, out


@pytest.fixture(scope="module")
def forked():
    """Starts commands within milliseconds, in forks of a process that has imported PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedhassle.cli.main", "fedhassle.runs.train", "fedhassle.runs.live"])
    started = []

    def start(*words, output=os.devnull):
        arguments = [str(word) for word in words], str(output)
        process = context.Process(target=small.command, args=arguments, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join(small.LIMIT)


@pytest.fixture(scope="session")
def eight_rounds(words):
    """Settings of a longer run, to be interrupted."""
    return [*words, "rounds=8"]


@pytest.fixture(scope="session")
def whole(eight_rounds, tmp_path_factory):
    """The folder of the longer run, without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert small.call("run", *eight_rounds, "--out", folder)[0] == 0
    return folder
