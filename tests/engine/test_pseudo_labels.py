"""Pseudo-labels of clients, and their counts."""

from dataclasses import dataclass

import numpy as np
import pytest
import small
import torch
from by_hand import order_end_to_end, order_of_epochs
from on_lanes import assert_lanes_train_as_eagerly, clients, pool
from small import QUICK, hassle, made, trained

from fedhassle.engine.client import batches_of, prepare, visit
from fedhassle.engine.job import draw
from fedhassle.errors import UserError
from fedhassle.method import Descent, Labelled, Phase, Stream, as_models
from fedhassle.methods import METHODS, FedAvg, FixMatchGlobal, Hassle
from fedhassle.nets import IMAGES_A_PASS
from fedhassle.randomness import generator


def labelled_by_hand(method, state, site):
    """Eq. 5 on clean images, one at a time; −1 below the confidence."""
    found = []
    for row in site.samples.unlabelled.tolist():
        pixels = site.samples.images[row].numpy().astype(np.float64) / 255
        x = torch.from_numpy(((pixels - 0.5) / 0.25).transpose(2, 0, 1).astype(np.float32))
        z = method.net.logits(state["w_S" if "w_S" in state else "w"], x[None])[0].double().numpy()
        sure = np.exp(z.max()) / np.exp(z).sum() >= method.confidence
        found.append(int(z.argmax()) if sure else -1)
    return found


def with_truth(site, truth):
    """The site with other true labels of its unlabelled samples; None: they are unknown."""
    truth = torch.full_like(site.samples.unlabelled, -1) if truth is None else truth
    return site._replace(samples=site.samples._replace(truth=truth))


@pytest.mark.parametrize("pseudo_labels", ["round", "online"])
def test_true_labels_of_unlabelled_samples_never_influence_training(pseudo_labels):
    method = hassle(pseudo_labels=pseudo_labels)
    site = small.site(labelled=range(11), unlabelled=range(40, 61))
    first = trained(method, site)
    other = trained(method, with_truth(site, (site.samples.truth + 1) % 4))
    blind = trained(method, with_truth(site, None))
    assert small.same(first.arrays, other.arrays) and small.same(first.arrays, blind.arrays)
    assert small.same(first.losses, other.losses) and small.same(first.losses, blind.losses)
    assert blind.labelling.tolist() == [0, *first.labelling[1:3].tolist(), 0]
    assert first.labelling[0] != other.labelling[0] and torch.equal(first.labelling[1:], other.labelling[1:])


def test_labels_given_once_a_round_are_counted_against_the_truth():
    """On clean images, although training flips and crops them."""
    method = Hassle(small.net(small.Linear), **QUICK, residual_steps=5)
    site = small.site(small.dataset(flip=True, crop=4), labelled=range(4), unlabelled=range(40, 61))
    state = method.initial(0)
    given = labelled_by_hand(method, state, site)
    assert len(set(given)) > 1
    right = sum(a == b for a, b in zip(given, site.samples.truth.tolist(), strict=True))
    assert trained(method, site, state).labelling.tolist() == [right, 21, 21, 21]
    truth = torch.tensor([(y + 1) % 4 if i % 3 else y for i, y in enumerate(given)])  # each third is right
    assert trained(method, with_truth(site, truth), state).labelling.tolist() == [7, 21, 21, 21]
    truth[::2] = -1  # of every second one it is not known: places 3, 9 and 15 are right
    assert trained(method, with_truth(site, truth), state).labelling.tolist() == [3, 21, 21, 10]


def test_labels_below_the_confidence_count_as_not_given():
    """At a confidence of 1 an untrained network gives no label, and w_U keeps its weights."""
    method = hassle(confidence=1.0, mpa=False, gra=False)
    site = small.site(unlabelled=range(40, 61))
    state = method.initial(0)
    update = trained(method, site, state)
    assert update.labelling.tolist() == [0, 0, 21, 0]
    weights = method.net.n_weights
    assert torch.equal(update.arrays["w_U"][:weights], state["w_U"][:weights])
    assert update.losses["w_U"].item() == 0


@pytest.mark.parametrize("confidence", [0.0, 0.35])
def test_online_labels_are_counted_at_every_step(confidence):
    """Without augmentation a label is the same at each step, so the counts follow from the walks.

    The dual walks 2 epochs of 3 batches of 8, the residual 5 batches: 88 labels in total.
    """
    settings = {"pseudo_labels": "online", "confidence": confidence, "residual_steps": 5}
    method = Hassle(small.net(small.Linear), **QUICK, **settings)
    site = small.site(unlabelled=range(40, 61), name="bo")
    state = method.initial(0)
    labels = np.array(labelled_by_hand(method, state, site))
    given, right = labels >= 0, labels == site.samples.truth.numpy()
    assert given.all() if confidence == 0 else 0 < given.sum() < 21
    dual = order_of_epochs(21, 8, 2, generator(0, 1, "bo", "unlabelled"))
    residual = order_end_to_end(21, 8, 5, generator(0, 1, "bo", "unlabelled residual"))
    expected = [sum(int(found[batch].sum()) for batch in dual + residual) for found in (right, given)]
    assert trained(method, site, state).labelling.tolist() == [*expected, 88, expected[1]]
    assert confidence or expected[1] == 88


def test_without_augmentation_online_labels_are_those_given_once():
    site = small.site(labelled=range(4), unlabelled=range(40, 61))
    once, online = (trained(hassle(pseudo_labels=when), site).arrays for when in ("round", "online"))
    assert small.same(once, online)
    site = small.site(small.dataset(flip=True, crop=3), unlabelled=range(40, 61))
    state = hassle().initial(1)
    once, online = (trained(hassle(pseudo_labels=when), site, state).arrays for when in ("round", "online"))
    assert not small.same(once, online)


# Labels that depend on the whole client


def commonest(z):
    """The class that most samples look like, for each of them; of several the highest."""
    likeliest = z.argmax(1)
    votes = (likeliest[:, None] == torch.arange(z.shape[1])).sum(0)
    return torch.full_like(likeliest, int((votes + torch.arange(z.shape[1]) / 10).argmax()))


@dataclass(frozen=True)
class Commonest(FedAvg):
    """FedAvg on the unlabelled samples, which are all taken for the client's commonest class."""

    online: bool = False

    def phases(self, client, t):
        walk = Stream("unlabelled", self.batch, logits=self.teach, labels=commonest, online=self.online)
        return (Phase("all", (walk,), (Descent("w", self.loss, self.local_optimiser()),), self.epochs),)

    def teach(self, received, x):
        return received["w"](x)


@pytest.mark.parametrize("images", [1, 4, 1000])
def test_labels_see_the_whole_client_for_any_size_of_the_chunks(images, monkeypatch):
    monkeypatch.setitem(IMAGES_A_PASS, "cpu", images)
    method = Commonest(small.net(small.Linear), **QUICK)
    site = small.site(unlabelled=range(40, 61))
    state = method.initial(0)
    x = site.views.normalise(site.samples.images[40:61])
    likeliest = method.net.logits(state["w"], x).argmax(1).tolist()
    assert len({commonest(method.net.logits(state["w"], part)).item() for part in x.split(1)}) > 1
    (job,) = visit(method, site, state, None, 1, 0).jobs
    expected = max(range(4), key=lambda m: (likeliest.count(m), m))
    assert set(draw(job).feeds[0].y.flatten().tolist()) == {expected}
    right = site.samples.truth.tolist().count(expected)
    assert trained(method, site, state).labelling.tolist() == [right, 21, 21, 21]


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_online_labels_see_one_batch_for_any_number_of_steps_at_once(steps):
    method = Commonest(small.net(small.Linear), **QUICK, online=True)
    site = small.site(small.dataset(flip=True, crop=4), unlabelled=range(40, 61))
    (job,) = visit(method, site, method.initial(0), None, 1, 0).jobs
    schedule, buffers = draw(job), prepare(job, job.message, {})
    received = as_models(job.message, job.networks)
    found = []
    for first in range(0, 6, steps):
        (batch,) = batches_of(job, buffers, received, schedule.between(first, first + steps))
        for x, y in zip(batch.views[0], batch.y, strict=True):
            likeliest = received["w"](x).argmax(1).tolist()
            found.append(max(range(4), key=lambda m: (likeliest.count(m), m)))
            assert y.tolist() == [found[-1]] * 8
    assert len(found) == job.steps == 6 and len(set(found)) > 1


@pytest.mark.parametrize("online", [False, True])
def test_labels_of_whole_clients_are_the_same_on_lanes(online):
    sites = [site for site in clients() if site.client.unlabelled]
    method = Commonest(small.net(), batch=8, epochs=2, online=online)
    assert_lanes_train_as_eagerly(pool(), method, sites)


def test_labels_of_the_wrong_shape_are_refused():
    walk = Stream("unlabelled", logits=lambda received, x: x.flatten(1), labels=lambda z: z)
    with pytest.raises(UserError, match=r"labels for logits \(3, 2\) are \(3, 2\), not \(3,\)"):
        walk.label(torch.zeros(3, 2))


def test_labels_without_logits_are_refused():
    with pytest.raises(UserError, match=r"needs their logits: Stream\(…, logits=…, labels=…\)"):
        Stream("unlabelled", labels=commonest)


# Labels that a loss gives


@pytest.mark.parametrize("confidence", [0.0, 0.35, 1.0])
def test_labels_of_fixmatch_global_are_counted_at_every_step(confidence):
    """Without augmentation the model received gives a sample the same label at each step.

    An unlabelled client of 21 samples walks 2 epochs of 2 batches of 16.
    """
    method = FixMatchGlobal(small.net(small.Linear), **QUICK, confidence=confidence)
    site = small.site(unlabelled=range(40, 61), name="bo")
    state = method.initial(0)
    labels = np.array(labelled_by_hand(method, state, site))
    given, right = labels >= 0, labels == site.samples.truth.numpy()
    assert given.sum() == {0.0: 21, 1.0: 0}.get(confidence, given.sum()) and (right.any() or confidence == 1)
    assert confidence != 0.35 or 0 < given.sum() < 21
    walk = order_of_epochs(21, 16, 2, generator(0, 1, "bo", "unlabelled"))
    expected = [sum(int(found[batch].sum()) for batch in walk) for found in (right, given)]
    assert trained(method, site, state).labelling.tolist() == [*expected, 64, expected[1]]
    blind = trained(method, with_truth(site, None), state).labelling
    assert blind.tolist() == [0, expected[1], 64, 0]


LABELLING = {"mixmatch", "fixmatch", "fedmatch", "rscfed", "fixmatch-global", "sage", "central-fixmatch"}
ONCE = {"hassle", "hassle+"}  # a round
IDLE = {"mixmatch", "fixmatch", "central-fixmatch"}  # at unlabelled clients


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["full", "partial", "unlabelled"])
def test_every_method_that_labels_counts_a_label_for_each_sample_of_a_batch(name, kind):
    """Of two views of a sample one label; MixMatch and RSCFed give one to each sample."""
    method = made(name)
    rows = {"full": (range(20), ()), "partial": (range(9), range(40, 61)), "unlabelled": ((), range(40, 61))}
    site = small.site(small.dataset(flip=True), *rows[kind])
    phases = method.phases(site.client, 1)
    right, given, asked, judged = trained(method, site).labelling.tolist() if phases else (0, 0, 0, 0)
    labels = name in LABELLING | ONCE and kind != "full" and not (kind == "unlabelled" and name in IDLE)
    assert (asked > 0) == labels and right <= given == judged <= asked
    if name in ONCE:
        assert asked == labels * 21
    elif labels:
        (phase,) = phases
        (walk,) = (stream for stream in phase.streams if stream.part == "unlabelled")
        assert asked == phase.length(site.client) * walk.batch
    if name in ("mixmatch", "rscfed"):
        assert given == asked


@dataclass(frozen=True)
class Telling(FedAvg):
    """FedAvg whose loss labels the first sample of a batch with class 2, and no other."""

    parts: tuple[str, ...] = ("labelled", "unlabelled")
    size: int = 6

    def phases(self, client, t):
        streams = tuple(Stream(part, 4 + 2 * i) for i, part in enumerate(self.parts))
        return (Phase("all", streams, (Descent("w", self.labelling, self.local_optimiser()),), steps=13),)

    def labelling(self, local, received, *batches):
        y = torch.full_like(batches[-1].y, -1)[:1].expand(self.size).clone()
        y[0] = 2
        return Labelled(self.loss(local, received, batches[0]), y)


def test_labels_of_a_loss_are_those_of_the_first_unlabelled_stream():
    """Batches of 4 labelled, 6 and 8 unlabelled samples: the six are labelled, 13 times."""
    site = small.site(small.dataset(flip=True), labelled=range(9), unlabelled=range(40, 61))
    for parts in (("labelled", "unlabelled"), ("labelled", "unlabelled", "unlabelled")):
        method = Telling(small.net(), parts=parts)
        (job,) = visit(method, site, method.initial(0), None, 1, 0).jobs
        right = (draw(job).feeds[1].truth[:, 0] == 2).sum().item()
        update = trained(method, site)
        assert update.labelling.tolist() == [right, 13, 78, 13] and 0 < right < 13
        assert_lanes_train_as_eagerly(pool(), method, [site])


@pytest.mark.parametrize("on_lanes", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ("labelled",)}, "phase 'all' returned labels, but the phase has no unlabelled stream"),
        (
            {"size": 5},
            r"labels of shape \(5,\); expected \(6,\), one for each sample of its first unlabelled",
        ),
    ],
)
def test_labels_of_a_loss_that_belong_to_nothing_are_refused(settings, message, on_lanes):
    method = Telling(small.net(), **settings)
    site = small.site(labelled=range(9), unlabelled=range(40, 61))
    with pytest.raises(UserError, match=message):
        if on_lanes:
            pool().train([visit(method, site, method.initial(0), None, 1, 0)])
        else:
            trained(method, site)


def test_counting_labels_changes_no_bit_of_the_training():
    @dataclass(frozen=True)
    class Silent(FixMatchGlobal):
        def alone(self, *args):
            return super().alone(*args).loss

    site = small.site(small.dataset(flip=True, crop=2), unlabelled=range(40, 61))
    first, other = (
        trained(kind(small.net(), **QUICK, confidence=0.3), site) for kind in (FixMatchGlobal, Silent)
    )
    assert small.same(first.arrays, other.arrays) and small.same(first.losses, other.losses)
    assert first.labelling[2] == 64 and other.labelling.tolist() == [0, 0, 0, 0]
