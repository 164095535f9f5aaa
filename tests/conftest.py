"""Every test process computes on one thread: sums have one order, and workers do not crowd each other."""

import numpy as np
import pytest
import small
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")


@pytest.fixture(scope="session", params=[1, 3], ids=["grey", "colour"])
def data(request):
    """Four classes of 12×12 images, with one channel and with three."""
    return small.dataset(channels=request.param)


@pytest.fixture
def global_randomness():
    """Fails the test if it moves the global state of torch or NumPy."""
    before = torch.get_rng_state(), np.random.get_state()[1:3]
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    key, position = np.random.get_state()[1:3]
    assert (key == before[1][0]).all() and position == before[1][1]
