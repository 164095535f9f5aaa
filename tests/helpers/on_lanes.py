"""Training on lanes, compared with training each client alone, step by step."""

import numpy as np
import small
import torch

from fedhassle.engine.client import train, visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes


def pool(lanes=3, **settings):
    return Lanes(Engine(small.CPU, lanes=lanes, **settings))


def clients(channels=1, side=small.SIDE):
    """Clients of every kind and of many sizes.

    In two epochs of batches of 8 they take 12 labelled steps; 4 labelled and 10 unlabelled; 22 unlabelled;
    2 and 2; 2 and 4: fewer than a stretch of ten, as many, and more.
    """
    data = small.dataset(channels, side, flip=True, crop=2)
    return small.beside(
        small.site(data, range(47), (), "full"),
        small.site(data, range(47, 59), range(40, 75), "partial"),
        small.site(data, (), range(36, 120), "unlabelled"),
        small.site(data, range(3), range(61, 65), "little"),
        small.site(data, range(60, 66), range(20, 29), "unknown truth", truth=False),
    )


def assert_same(found, expected):
    """Asserts equal updates and states, bit for bit, with names in the same order."""
    (update, kept), (other, memory) = found, expected
    assert update.client == other.client and update.samples == other.samples
    for mine, its in ((update.arrays, other.arrays), (update.losses, other.losses), (kept, memory)):
        assert list(mine) == list(its) and small.same(mine, its)
    torch.testing.assert_close(update.labelling, other.labelling, rtol=0, atol=0)


def assert_lanes_train_as_eagerly(made, method, sites, rounds=2, assert_same=assert_same):
    """Asserts that lanes train like eager training, round after round, and do not change their inputs."""
    state, memory = method.initial(0), {}
    for t in range(1, rounds + 1):
        asked = [
            (method, site, method.message(state, site.client, t), memory.get(site.client.name), t, 0)
            for site in sites
            if method.phases(site.client, t)
        ]
        expected = [train(*one) for one in asked]
        given = [{k: v.clone() for k, v in (one[2] | (one[3] or {})).items()} for one in asked]
        found = made.train([visit(*one) for one in asked])
        assert [update.client.name for update, _ in found] == [one[1].client.name for one in asked]
        for one, mine, its, before in zip(asked, found, expected, given, strict=True):
            assert_same(mine, its)
            assert small.same(one[2] | (one[3] or {}), before)
        memory = {update.client.name: kept for update, kept in found if kept}
        state = method.merge(state, [update for update, _ in found], t, np.random.default_rng(t))
        assert all(torch.isfinite(v).all() for v in state.values())
    return state
