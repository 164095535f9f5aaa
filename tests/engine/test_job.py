"""The schedule of a job: drawn on the host, and one transfer to the device."""

import numpy as np
import pytest
import small
import torch
from torch.utils import _pytree as pytree

from fedhassle.engine import job as jobs
from fedhassle.engine.client import visit
from fedhassle.engine.job import draw, packed, together, unpacked
from fedhassle.methods import METHODS

ARRAYS = [
    np.arange(15, dtype=np.int64).reshape(5, 3)[::-1],  # not contiguous
    np.linspace(0, 1, 7, dtype=np.float32),
    np.zeros((4, 0, 2), np.float32),
    np.array([-1, 2**31 - 1, 3], np.int32),
    np.array(2.5, np.float32),
    np.arange(2, dtype=np.int64),
]


def test_packed_arrays_come_out_as_they_went_in():
    found = unpacked(packed(ARRAYS), ARRAYS)
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype and tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % 16 == found[0].data_ptr() % 16


def test_no_arrays_are_packed_to_nothing():
    assert unpacked(packed([]), []) == together([], small.CPU) == []


def job_of(name):
    """A job of a method, with dropout; a client of 60 labels and 30 images without."""
    method = METHODS[name](small.net(small.Dropping), batch=8, epochs=1)
    here = small.site(small.dataset(flip=True, crop=2), range(60), range(60, 90))
    return visit(method, here, method.initial(0), None, 1, 0).jobs[-1]


@pytest.mark.parametrize("name", ["fedavg", "mixmatch", "hassle"])
def test_a_schedule_is_one_transfer(name, monkeypatch):
    """Packed and unpacked as for a GPU, its values are the same."""
    expected, calls = draw(job_of(name)), []

    def transfer(arrays, device):
        calls.append(len(arrays))
        return unpacked(packed(arrays), arrays)

    monkeypatch.setattr(jobs, "together", transfer)
    found = draw(job_of(name))
    streams, draws = len(found.feeds), len(found.draws)
    assert calls == [streams + sum(len(feed.uniforms) for feed in found.feeds) + draws + 1]
    assert draws == (name == "mixmatch") and len(found.seeds) == 1
    for tensor, same in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert tensor.dtype == same.dtype and torch.equal(tensor, same)


@pytest.mark.parametrize("name", ["fedavg", "mixmatch", "hassle"])
def test_the_tensors_of_a_schedule_are_its_leaves(name):
    schedule = draw(job_of(name))
    leaves = pytree.tree_leaves(schedule)
    assert [id(tensor) for tensor in schedule.tensors] == [id(leaf) for leaf in leaves] and len(leaves) > 4


def test_a_split_schedule_has_all_steps_in_order():
    schedule = draw(job_of("fedavg"))
    first, second = list(schedule.split([5, 3]))
    for tensors, (begin, end) in ((first, (0, 5)), (second, (5, 8))):
        for tensor, whole in zip(tensors, pytree.tree_leaves(schedule), strict=True):
            assert torch.equal(tensor, whole[begin:end])
    with pytest.raises(RuntimeError):
        list(schedule.split([5]))
