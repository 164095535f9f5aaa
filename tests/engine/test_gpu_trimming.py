"""Jobs receive only the arrays that their steps read, so that more jobs share a recording."""

from dataclasses import dataclass

import pytest
import small
import torch
from small import CPU

from fedhassle.engine.client import train, visit
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.lanes import Lanes
from fedhassle.engine.gpu.precompute import EVERY, NameRecorder
from fedhassle.engine.rounds import Plan, federate
from fedhassle.methods import METHODS, FedAvg, Hassle
from fedhassle.randomness import generator

NET = small.net(small.ConvNet)
SITES = small.beside(
    small.site(labelled=range(12), unlabelled=(), name="full"),
    small.site(labelled=range(20, 29), unlabelled=range(40, 53), name="both"),
    small.site(labelled=(), unlabelled=range(60, 80), name="none"),
)


def trained_on(pool, method, state, t):
    """Updates of all sites on lanes; asserts that they equal training each alone."""
    messages = [method.message(state, site.client, t) for site in SITES]
    asked = [(s, m) for s, m in zip(SITES, messages, strict=True) if method.phases(s.client, t)]
    found = pool.train([visit(method, s, m, None, t, 0) for s, m in asked])
    for (site, message), (update, _) in zip(asked, found, strict=True):
        expected, _ = train(method, site, message, None, t, 0)
        assert small.same(update.arrays, expected.arrays)
    return [update for update, _ in found]


def test_hassles_four_phases_are_four_shapes():
    """For all clients, even though a message of round 1 lacks the earlier duals."""
    method, pool = Hassle(NET, batch=8, epochs=1, residual_steps=3), Lanes(Engine(CPU, lanes=2))
    state = method.initial(0)
    for t in (1, 2, 3):
        updates = trained_on(pool, method, state, t)
        state = method.merge(state, updates, t, None)
    assert "w_S_before" in state
    assert sorted(form.shape[0] for form in pool.seconds) == [
        "labelled",
        "labelled residual",
        "unlabelled",
        "unlabelled residual",
    ]


@dataclass(frozen=True)
class Curious(FedAvg):
    """FedAvg that reads more names once they exist."""

    def message(self, state, client, t):
        more = {2: {"more": state["w"] * 2}, 3: {"more": state["w"] * 3, "most": state["w"] + 1}}
        return state | {"never": state["w"]} | more.get(t, {})

    def loss(self, local, received, batch):
        loss = super().loss(local, received, batch)
        if "more" in received:
            weight = 0.1 if received.get("most") is None else 0.2 + 1e-3 * received["most"].sum()
            gap = local["w"].weights - received["more"][: self.net.n_weights]
            loss = loss + weight * gap.square().sum()
        return loss


def test_the_names_read_may_depend_on_the_names_present():
    """Rounds 2 and 3 take other branches of the loss than rounds 1 and 4."""
    method, pool = Curious(NET, batch=8, epochs=1, lr=0.01), Lanes(Engine(CPU, lanes=2))
    for t in (1, 2, 3, 4, 2):
        trained_on(pool, method, method.initial(0), t)
    received = [{name for name, *_ in form.shape[-1]} for form in pool.seconds]
    assert received == [{"w"}, {"w", "more"}, {"w", "more", "most"}]


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda r: r["a"], {"a"}),
        (lambda r: r.get("b"), {"b"}),
        (lambda r: r.get("z", 1), {"z"}),
        (lambda r: "z" in r, {"z"}),
        (list, {EVERY}),
        (lambda r: r.items(), {EVERY}),
        (lambda r: r.values(), {EVERY}),
        (lambda r: r.keys(), {EVERY}),
        (len, {EVERY}),
        (lambda r: {**r}, {EVERY}),
        (lambda r: 1, set()),
    ],
)
def test_every_kind_of_access_is_recorded(ask, names):
    noted: set[str] = set()
    ask(NameRecorder({"a": 1, "b": 2}, noted))
    assert noted - {"a", "b"} == names - {"a", "b"} and names <= noted


@pytest.mark.parametrize("name", METHODS)
def test_every_method_receives_what_it_reads(name):
    """Two rounds of every kind of client, on lanes and eagerly."""
    short = {"residual_steps": 2} if name == "hassle" else {}
    method, pool = METHODS[name](NET, batch=8, epochs=1, **short), Lanes(Engine(CPU, lanes=2))
    state = method.initial(0)
    for t in (1, 10):
        updates = trained_on(pool, method, state, t)
        assert updates and all(torch.isfinite(v).all() for u in updates for v in u.arrays.values())
        state = method.merge(state, updates, t, generator(t))


def test_a_whole_federation_ends_in_the_same_bits():
    method = Hassle(NET, batch=8, epochs=1, residual_steps=3)
    states = []
    for lanes in (False, True):
        federation = small.simulator()
        if lanes:
            federation.lanes = Lanes(Engine(CPU, lanes=3))
        *_, last = federate(method, federation, Plan(3, 3, 0), method.initial(0))
        states.append(last.state)
    assert small.same(*states)
