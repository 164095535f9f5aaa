"""Compiled kernels outlive their process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from fedhassle.engine.gpu import graphs
from fedhassle.engine.gpu.graphs import KERNELS, keep_kernels

# A step of a network with BatchNorm, rewritten to our own operations, and how often it was compiled.
STEP = """
import torch
from torch._dynamo.utils import counters
from fedhassle.engine.gpu import rewriting
from fedhassle.engine.gpu.graphs import Compiler

rewriting.DEVICES = {"cpu"}
table = torch.arange(4.0)

def step(x, gain, shift, mean, variance):
    leaf = gain.detach().requires_grad_()
    z = torch.nn.functional.batch_norm(x, mean, variance, leaf, shift, True)
    return torch.autograd.grad((z.relu() * table).sum(), leaf)[0]

torch.manual_seed(0)
x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
given = (x, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3))
compiled = Compiler()(step, *given)
torch.testing.assert_close(compiled(*given), step(*given))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """A user who has chosen no folder for kernels; the caches are in a temporary folder."""
    monkeypatch.setenv(KERNELS, "")  # so that what a test sets is undone
    monkeypatch.delenv(KERNELS)
    monkeypatch.setattr(graphs, "cache_folder", lambda: tmp_path / "fedhassle")
    return tmp_path / "fedhassle" / "kernels"


def test_kernels_are_kept_in_the_cache_folder(unset):
    keep_kernels()
    folder = Path(os.environ[KERNELS])
    assert folder.parent == unset and folder.is_dir()


def test_other_code_of_our_operations_has_another_folder(unset, tmp_path, monkeypatch):
    keep_kernels()
    before = os.environ.pop(KERNELS)
    (tmp_path / "operators.py").write_text("# a later version\n")
    monkeypatch.setattr(graphs.operators, "__file__", str(tmp_path / "operators.py"))
    keep_kernels()
    assert os.environ[KERNELS] != before and Path(os.environ[KERNELS]).parent == unset


def test_the_choice_of_the_compiler_is_none_of_the_users(unset, monkeypatch):
    monkeypatch.setenv(KERNELS, default_cache_dir())  # as the compiler does
    keep_kernels()
    assert Path(os.environ[KERNELS]).parent == unset


def test_a_folder_that_the_user_has_chosen_stays(unset, monkeypatch):
    monkeypatch.setenv(KERNELS, "mine")
    keep_kernels()
    assert os.environ[KERNELS] == "mine" and not unset.exists()


def test_without_a_folder_that_can_be_written_the_compiler_chooses(unset, monkeypatch):
    unset.parent.touch()  # a file, where a folder should be
    keep_kernels()
    assert os.environ.get(KERNELS) in (None, default_cache_dir())

    def homeless():
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(graphs, "cache_folder", homeless)
    keep_kernels()
    assert os.environ.get(KERNELS) in (None, default_cache_dir())


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_second_process_compiles_nothing(tmp_path):
    """Our operations and tensors that a step holds are no obstacle."""
    environment = small.environment(XDG_CACHE_HOME=str(tmp_path))
    environment.pop(KERNELS, None)
    said = [
        subprocess.run(
            [sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["1", "0"], ["0", "1"]]
    (kept,) = (tmp_path / "fedhassle" / "kernels").iterdir()
    assert (kept / "fxgraph").is_dir()
