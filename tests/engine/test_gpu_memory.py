"""A GPU's memory: what a process may take, and errors that hide that it is full."""

import pytest
import torch

from fedhassle.engine.gpu import memory
from fedhassle.engine.gpu.graphs import traced
from fedhassle.engine.gpu.memory import free_memory, lacks_memory, share_memory, showing_lack_of_memory

CUDA = torch.device("cuda")
FULL = torch.OutOfMemoryError("CUDA out of memory: so it says")
OTHER = RuntimeError("CUDA error: out of memory")


def chained(*errors):
    """The last of errors, each raised while the one before was handled."""
    try:
        raise errors[-1] from chained(*errors[:-1]) if len(errors) > 1 else None
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "errors",
    [(FULL,), (FULL, KeyError(1), ValueError("x")), (OTHER, ValueError())],
)
def test_an_error_that_a_full_memory_led_to_is_an_out_of_memory_error(errors):
    with pytest.raises(torch.OutOfMemoryError), showing_lack_of_memory():
        raise chained(*errors)


def test_other_errors_stay_as_they_are():
    with pytest.raises(ValueError, match="memory of a goldfish"), showing_lack_of_memory():
        raise chained(KeyError(1), ValueError("memory of a goldfish"))
    assert not lacks_memory(None)


def test_a_compiled_function_hides_that_memory_is_full():
    """So the search is needed: the compiler takes the handling of the error for code to compile."""

    def out_of_memory(graph, inputs):
        def run(*given):
            raise FULL

        return run

    graph = traced(lambda x: 2 * x + 1, [torch.ones(3)])
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, backend=out_of_memory)
    with pytest.raises(Exception) as raised:
        compiled(torch.ones(3))
    assert lacks_memory(raised.value)
    with pytest.raises(torch.OutOfMemoryError), showing_lack_of_memory():
        compiled(torch.ones(3))


def test_a_process_may_take_its_share_and_no_more_than_is_free(monkeypatch):
    """Of 100 bytes; it has taken 5."""
    shares, free = [], 70
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: shares[-1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5)
    monkeypatch.setattr(memory, "FOR_TENSORS", 0.8)
    share_memory(torch.device("cpu"), 4)
    assert shares == []
    share_memory(CUDA, 4)
    assert free_memory(CUDA) == 15
    free = 12
    assert free_memory(CUDA) == 12
