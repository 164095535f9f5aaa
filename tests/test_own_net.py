"""A custom network, named by its import path."""

import pytest
import small
from small import built

from fedhassle.errors import UserError
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

NET = """
    import torch
    from torch import nn

    class Flat(nn.Module):
        def __init__(self, shape, classes, width=1.0):
            super().__init__()
            self.output = nn.Linear(shape[0] * shape[1] * shape[2], classes{extra})

        def forward(self, x):
            return self.output(x.flatten(1))

    class Fails(nn.Module):
        def __init__(self, shape, classes, width=1.0):
            super().__init__()
            raise OSError("no weights here")

    def nothing(shape, classes, width=1.0):
        return None
"""


@pytest.mark.parametrize("place", ["own_net", "own_net.py", "./own_net.py"])
def test_a_custom_network_is_built(place, module, images, tmp_path, monkeypatch):
    """Named by import path, or by the path of its file."""
    module("own_net", NET.format(extra=""))
    monkeypatch.chdir(tmp_path)
    words = {**small.SETTINGS, "data": str(images), "net": f"{place}:Flat"}
    dataset, _, method = built(resolve(request("paper", words)))
    assert method.net.n_parameters == 12 * 12 * 4 + 4 and dataset.net == "lenet"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_bad_net:Flat", r"logits of shape \(B, 4\), got \(2, 5\)"),
        ("own_bad_net:Absent", "'own_bad_net' has no class 'Absent'"),
        ("own_bad_net:torch", "cannot be built"),
        ("torch.nn:ReLU", "cannot be built"),
        ("own_bad_net:nothing", "own_bad_net:nothing"),
        ("own_bad_net:Fails", "no weights here"),
        ("builtins:print", "builtins:print"),
    ],
)
def test_errors_of_custom_networks(name, message, module, images):
    module("own_bad_net", NET.format(extra=" + 1"))
    with pytest.raises(UserError, match=message):
        built(resolve(request("paper", {**small.SETTINGS, "data": str(images), "net": name})))
