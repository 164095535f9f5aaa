"""The same on a GPU: run these where there is one (`pytest -m gpu`)."""

import pytest
import small
import torch

import fedhassle
from fedhassle.local import Samples, Site, train
from fedhassle.methods import METHODS
from fedhassle.nets import LeNet, ResNet8
from fedhassle.simulator import dataset_views

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on(device: torch.device, data) -> Site:
    """A partial client whose data lie on a device."""
    here = small.site(data, labelled=range(20), unlabelled=range(40, 61))
    samples = Samples(*(value.to(device) for value in here.samples))
    return Site(here.client, samples, dataset_views(data, device))


@pytest.mark.parametrize("build", [LeNet, ResNet8, small.ConvNet])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_on_the_gpu_is_that_of_the_cpu(name, build, monkeypatch):
    """One epoch of one batch, so that rounding has no time to grow; TF32 off, which rounds to 10 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    data = small.dataset(channels=3, flip=True, crop=2)
    short = {"residual_steps": 1} if name == "hassle" else {}
    # Seven classes: a bias of odd length, behind which BatchNorm's gains must be aligned all the same.
    method = METHODS[name](net=small.net(build, channels=3, classes=7), batch=32, epochs=1, lr=0.01, **short)
    results = {}
    for device in (torch.device("cpu"), torch.device("cuda")):
        site = on(device, data)
        state = {k: v.to(device) for k, v in method.initial(0).items()}
        update, _ = train(method, site, method.message(state, site.client, 1), None, 1, 0)
        assert all(v.device.type == device.type for v in update.arrays.values())
        results[device.type] = {k: v.cpu() for k, v in update.arrays.items()}
    for trained, expected in results["cpu"].items():
        torch.testing.assert_close(results["cuda"][trained], expected, rtol=1e-3, atol=1e-5)


def test_a_run_on_the_gpu_ends_in_a_model(tmp_path):
    settings = {"rounds": 2, "device": "cuda", "method.epochs": 1, "method.residual_steps": 2}
    result = fedhassle.run("paper", settings, out=tmp_path / "run", quiet=True)
    assert result.summary["hardware"]["device"] == "cuda"
    assert set(result.accuracy) == {"SM", "UM", "EM", "w_S", "w_U"}
