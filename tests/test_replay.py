"""A step can be recorded once and replayed over its buffers, which is what a CUDA graph does."""

import dataclasses

import pytest
import small
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedhassle.local import Job, give_labels, prepare, step
from fedhassle.method import as_models
from fedhassle.methods import METHODS
from fedhassle.nets import LeNet, ResNet8


def jobs(method, site, t=1):
    """The jobs of a client's round, with the buffers that they start from."""
    message = method.message(method.initial(0), site.client, t)
    networks, phases = method.networks(), method.phases(site.client, t)
    labels = give_labels(phases, site, as_models(message, networks))
    for phase in phases:
        job = Job(phase, site, networks, message, labels, (0, t, site.client.name, phase.name))
        yield job, prepare(job, message, {})


def recorded(job, buffers):
    """The tensor operations of one step, recorded on copies of the buffers."""
    leaves, spec = pytree.tree_flatten(buffers)
    there = [leaf is not None for leaf in leaves]

    def pure(*tensors):
        given = iter(tensors)
        step(job, pytree.tree_unflatten([next(given) if here else None for here in there], spec))

    for net in job.networks.values():  # made at the first call: not a part of any step
        net.own_copy(training=True), net.own_copy(training=False)
    # Not in the buffers, but at fixed places too: the scale and shift of the views.
    trace = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = trace(*[leaf.clone() for leaf in leaves if leaf is not None])
    return lambda: graph(*[leaf for leaf in leaves if leaf is not None])


def written(buffers):
    return {
        f"{kind}/{name}": value.clone()
        for kind in ("weights", "statistics", "momentum", "losses")
        for name, value in getattr(buffers, kind).items()
    } | {"labelling": buffers.labelling.clone(), "step": buffers.step.clone()}


@pytest.mark.parametrize("build", [LeNet, ResNet8, small.ConvNet])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {}),
        ("fedprox", {"mu": 0.1}),
        ("hassle", {}),
        ("hassle", {"pseudo_labels": "online", "threshold": 0.3, "residual_target": "with_residual"}),
        ("hassle", {"proximity": "norm"}),
    ],
    ids=["fedavg", "fedprox", "hassle", "hassle online", "hassle norm"],
)
def test_replayed_steps_are_the_eager_ones(name, settings, build):
    """The first step is recorded; replaying it for all steps must give the bits of running each."""
    short = {"residual_steps": 3} if name == "hassle" else {}
    method = METHODS[name](net=small.net(build), batch=8, epochs=2, **short, **settings)
    site = small.site(small.dataset(flip=True, crop=2), labelled=range(12), unlabelled=range(40, 53))
    pairs = list(zip(jobs(method, site), jobs(method, site), strict=True))
    assert len(pairs) == (4 if name == "hassle" else 1)
    for (job, eager), (_, replayed) in pairs:
        replay = recorded(job, replayed)
        start = written(eager)
        assert small.same(start, written(replayed))  # recording touched nothing
        for _ in range(job.steps):
            step(job, eager)
            replay()
        assert small.same(written(eager), written(replayed))
        trained = f"weights/{job.phase.trained[0]}"
        assert job.steps > 1 and not torch.equal(written(eager)[trained], start[trained])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_loss_compiles_as_one_graph(name):
    """No break in the graph, and the loss is that of the eager step."""
    method = METHODS[name](net=small.net(small.ConvNet), batch=8, epochs=1)
    site = small.site(labelled=range(12), unlabelled=range(40, 53))
    for (job, eager), (_, compiled) in zip(jobs(method, site), jobs(method, site), strict=True):
        for net in job.networks.values():
            net.own_copy(training=True), net.own_copy(training=False)
        (descent,) = job.phase.descents
        loss = torch.compile(descent.loss, backend="aot_eager", fullgraph=True)
        phase = dataclasses.replace(job.phase, descents=(dataclasses.replace(descent, loss=loss),))
        step(job, eager)
        step(job._replace(phase=phase), compiled)
        for trained, value in eager.losses.items():
            torch.testing.assert_close(compiled.losses[trained], value, rtol=1e-5, atol=1e-6)
