"""The order in which a client goes through its samples."""

import numpy as np
from by_hand import order_end_to_end, order_of_epochs
from hypothesis import given
from hypothesis import strategies as st

from fedhassle.engine.job import endless_walk, epochs_walk
from fedhassle.method import Client, Phase, Stream


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 4), st.integers(0, 99))
def test_walks_by_epochs(n, batch, epochs, seed):
    """Each epoch contains every sample, and is filled up from its start."""
    per_epoch = -(-n // batch)
    walk = epochs_walk(n, batch, epochs * per_epoch, np.random.default_rng(seed))
    assert walk.tolist() == order_of_epochs(n, batch, epochs, np.random.default_rng(seed))
    for epoch in walk.reshape(epochs, -1):
        counts = np.bincount(epoch, minlength=n)
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        assert (epoch[n:] == epoch[: len(epoch) - n]).all()


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 30), st.integers(0, 99))
def test_walks_end_to_end(n, batch, steps, seed):
    """Every n indices in a row, counted from the start, are a permutation."""
    walk = endless_walk(n, batch, steps, np.random.default_rng(seed))
    assert walk.shape == (steps, batch)
    flat = walk.reshape(-1)
    for i in range(0, len(flat) - n + 1, n):
        assert sorted(flat[i : i + n]) == list(range(n))
    assert walk.tolist() == order_end_to_end(n, batch, steps, np.random.default_rng(seed))


@given(st.integers(1, 500), st.integers(1, 128), st.integers(1, 10))
def test_the_length_of_a_phase(n, batch, epochs):
    """Ruling 7: ⌈n/B⌉ steps per epoch; 278 labels are 3 steps of 128."""
    walk = Stream("labelled", batch)
    assert Phase("p", (walk,), (), epochs=epochs).length(Client("k", n, 3)) == epochs * int(
        np.ceil(n / batch)
    )
    assert Phase("p", (walk,), (), steps=7).length(Client("k", n, 3)) == 7
    assert Phase("p", (Stream("labelled"),), (), epochs=10).length(Client("k", 278, 3)) == 30
