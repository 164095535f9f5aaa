"""Logits of frozen models computed ahead: the questions of a loss, and their answers."""

from dataclasses import dataclass

import pytest
import small
import torch
from torch.utils import _pytree as pytree

from fedhassle.engine.client import batches_of, local_models, prepare, visit
from fedhassle.engine.gpu.precompute import Question, answer, questions, with_answers
from fedhassle.engine.job import draw
from fedhassle.losses import cross_entropy
from fedhassle.method import Descent, Phase, Stream, as_models
from fedhassle.methods import FedAvg, FedProx, Hassle

STEPS = 5


class Scene:
    """A job with its buffers and the inputs of its first steps."""

    def __init__(self, method, phase="labelled", state=None):
        site = small.site(small.dataset(flip=True, crop=2), labelled=range(40), unlabelled=range(40, 80))
        state = method.initial(0) if state is None else state
        planned = visit(method, site, method.message(state, site.client, 1), None, 1, 0)
        (self.job,) = (job for job in planned.jobs if job.phase.name == phase)
        self.buffers = prepare(self.job, self.job.message | planned.kept, planned.kept)
        self.received = as_models(self.buffers.received, self.job.networks)
        schedule = draw(self.job).between(0, STEPS)
        self.batches = batches_of(self.job, self.buffers, self.received, schedule)
        self.draws = schedule.draws

    def at(self, i):
        """The batches and draws of a step."""
        return [batch.at(i) for batch in self.batches], [draw[i] for draw in self.draws]

    def asked(self):
        return set(questions(self.job, self.buffers, self.received, *self.at(0)))

    def loss(self, received, batches, draws):
        """The loss of the only descent, on statistics of its own."""
        (descent,) = self.job.phase.descents
        kept = {k: v.clone() for k, v in self.buffers.statistics.items()}
        local = local_models(self.job, self.buffers._replace(statistics=kept))
        return descent.loss(local, received, *batches, *draws)


def hassle(**settings):
    return Hassle(small.net(), batch=8, epochs=1, residual_steps=STEPS, **settings)


# Questions


@pytest.mark.parametrize("side", ["labelled", "unlabelled"])
@pytest.mark.parametrize("pseudo_labels", ["round", "online"])
def test_the_loss_of_a_residual_asks_both_duals(side, pseudo_labels):
    """Eqs. 6 and 8: f(x; w_S) and f(x; w_U) of the only view of the only stream."""
    scene = Scene(hassle(pseudo_labels=pseudo_labels), f"{side} residual")
    assert scene.asked() == {Question("w_S", 0, 0), Question("w_U", 0, 0)}


def later(method):
    """A state in which both residuals have been trained."""
    before = {"w_S_before": method.net.initial(5), "w_U_before": method.net.initial(6)}
    return method.initial(0) | before


@pytest.mark.parametrize(
    ("side", "names"),
    [("labelled", ("w_S", "w_U_before", "r_SU")), ("unlabelled", ("w_U", "w_S_before", "r_US"))],
)
def test_the_scripts_target_asks_the_other_residual_and_the_dual_that_it_belongs_to(side, names):
    """Instead of the other dual; before that dual exists, only the other dual."""
    method = hassle(residual_target="with_residual")
    scene = Scene(method, f"{side} residual", later(method))
    assert scene.asked() == {Question(name, 0, 0) for name in names}
    first = Scene(method, f"{side} residual")
    assert first.asked() == {Question("w_S", 0, 0), Question("w_U", 0, 0)}


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        (FedAvg(small.net(), batch=8, epochs=1), "labelled"),
        (FedProx(small.net(), batch=8, epochs=1, mu=0.1), "labelled"),
        (hassle(), "labelled"),
        (hassle(), "unlabelled"),
        (small.Tutored(small.net(), epochs=1), "both"),  # its teacher is kept, and changes with every step
    ],
    ids=["fedavg", "fedprox", "supervised dual", "unsupervised dual", "teacher"],
)
def test_a_loss_that_calls_no_received_model_asks_nothing(method, phase):
    assert Scene(method, phase).asked() == set()


@dataclass(frozen=True)
class Curious(FedAvg):
    """Two streams with three views, and losses that call received models in many ways."""

    def networks(self):
        return {"w": self.net, "v": self.net}

    def initial(self, seed):
        return {"w": self.net.initial(seed), "v": self.net.initial(seed, 1), "number": torch.ones(3)}

    def phases(self, client, t):
        streams = (Stream("labelled", 8), Stream("unlabelled", 6, views=("weak", "clean")))
        descents = (
            Descent("w", self.loss, self.local_optimiser()),
            Descent("v", self.second, self.local_optimiser()),
        )
        return (Phase("labelled", streams, descents, self.epochs),)

    def loss(self, local, received, labelled, unlabelled):
        x, (_, clean) = labelled.views[0], unlabelled.views
        target = received["v"](clean)  # asked
        near = received["w"](x + 0.1)  # not a view
        part = received["w"](x[:4])  # nor is a part of one
        fit = cross_entropy(local["w"](x), labelled.y) + (local["w"](clean) - target).square().mean()
        return fit + near.square().mean() + part.square().mean() + received["number"].sum()

    def second(self, local, received, labelled, unlabelled):
        weak, clean = unlabelled.views
        moved = received["v"].at(local["v"].weights)(weak)  # other weights
        return (moved - received["v"](clean)).square().mean() + received["w"](labelled.views[0]).mean()


def test_questions_cover_every_descent_but_only_calls_on_views():
    assert Scene(Curious(small.net(), epochs=1)).asked() == {Question("v", 1, 1), Question("w", 0, 0)}


def test_recording_questions_changes_nothing():
    """With BatchNorm: the statistics and all other buffers keep their bits."""
    for method in (Curious(small.net(), epochs=1), small.Tutored(small.net(), epochs=1)):
        scene = Scene(method, method.phases(None, 1)[0].name)
        buffers = scene.buffers
        before = [tensor.clone() for tensor in pytree.tree_leaves(buffers)]
        state = torch.get_rng_state()
        scene.asked()
        assert all(torch.equal(*both) for both in zip(pytree.tree_leaves(buffers), before, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert any(v.numel() for v in buffers.statistics.values())


# Answers


@pytest.mark.parametrize("target", ["difference", "with_residual"])
@pytest.mark.parametrize("side", ["labelled", "unlabelled"])
def test_a_loss_is_the_same_with_answers(side, target):
    """And so is its gradient; the answers come from one forward pass over all steps."""
    method = hassle(residual_target=target)
    scene = Scene(method, f"{side} residual", later(method))
    answers = answer(tuple(scene.asked()), scene.received, scene.batches)
    assert {z.shape for z in answers.values()} == {(STEPS, 8, small.CLASSES)}
    assert not any(z.requires_grad for z in answers.values())
    (name,) = scene.job.phase.trained
    scene.buffers.weights[name].requires_grad_()
    for i in range(STEPS):
        batches, draws = scene.at(i)
        knowing = with_answers(scene.received, {q: z[i] for q, z in answers.items()}, batches)
        found, expected = scene.loss(knowing, batches, draws), scene.loss(scene.received, batches, draws)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        gradients = [torch.autograd.grad(loss, scene.buffers.weights[name])[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
        assert gradients[0].abs().max() > 1e-3


def marked(scene, value=100.0):
    """Received models of the first step with wrong answers, which reveal a look-up."""
    batches, _ = scene.at(0)
    shapes = {question: len(batches[question.stream].y) for question in scene.asked()}
    wrong = {question: torch.full((n, small.CLASSES), value) for question, n in shapes.items()}
    return batches, with_answers(scene.received, wrong, batches)


def test_an_answer_is_looked_up_only_for_its_view():
    scene = Scene(hassle(), "labelled residual")
    batches, knowing = marked(scene)
    x = batches[0].views[0]
    for name in ("w_S", "w_U"):
        expected = scene.job.networks[name].logits(scene.job.message[name], x)
        assert (knowing[name](x) == 100).all()
        for same_pixels in (x.clone(), x[:], x + 0):
            assert torch.equal(knowing[name](same_pixels), expected)
        assert torch.equal(knowing[name](x[:3]), scene.received[name](x[:3]))
    assert knowing["r_US"] == scene.received["r_US"]  # not asked: as it came


def test_an_answering_model_with_other_weights_is_computed():
    scene = Scene(hassle(), "labelled residual")
    batches, knowing = marked(scene)
    x, model, net = batches[0].views[0], knowing["w_S"], scene.job.networks["w_S"]
    weights, statistics = net.parts(scene.job.message["w_S"])
    assert torch.equal(model.at(0.5 * weights)(x), net(0.5 * weights, statistics, x))
    assert torch.equal(model.at(weights.clone())(x), net(weights, statistics, x))
    other = scene.received["w_U"]
    mixed = model.lerp(other, torch.tensor(0.25))
    expected = net(weights.lerp(other.weights, 0.25), statistics.lerp(other.statistics, 0.25), x)
    torch.testing.assert_close(mixed(x), expected)


def test_an_answering_model_with_other_statistics_is_computed():
    scene = Scene(hassle(), "labelled residual")
    batches, knowing = marked(scene)
    x, net = batches[0].views[0], scene.job.networks["w_S"]
    weights, statistics = net.parts(scene.job.message["w_S"])
    model = knowing["w_S"]._replace(statistics=statistics + 1)
    assert torch.equal(model(x), net(weights, statistics + 1, x))


def test_a_loss_may_write_into_the_logits_that_it_gets():
    """As into computed logits; the next call returns the original values."""
    scene = Scene(hassle(), "labelled residual")
    batches, knowing = marked(scene)
    x = batches[0].views[0]
    knowing["w_S"](x).mul_(2)
    assert (knowing["w_S"](x) == 100).all()


def test_an_answering_model_in_training_mode_is_computed():
    """It normalises by the batch, and updates its statistics."""
    scene = Scene(hassle(), "labelled residual")
    batches, knowing = marked(scene)
    x, net = batches[0].views[0], scene.job.networks["w_S"]
    weights, statistics = (part.clone() for part in net.parts(scene.job.message["w_S"]))
    own = statistics.clone()
    found = knowing["w_S"]._replace(statistics=own, training=True)(x)
    assert torch.equal(found, net(weights, statistics, x, training=True))
    assert torch.equal(own, statistics)
