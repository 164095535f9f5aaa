"""Pseudo-labels of clients, and their counts."""

import numpy as np
import pytest
import small
import torch
from by_hand import order_end_to_end, order_of_epochs
from small import QUICK, hassle, trained

from fedhassle.methods import Hassle
from fedhassle.randomness import generator


def labelled_by_hand(method, state, site):
    """Eq. 5 on clean images, one at a time; −1 below the confidence."""
    found = []
    for row in site.samples.unlabelled.tolist():
        pixels = site.samples.images[row].numpy().astype(np.float64) / 255
        x = torch.from_numpy(((pixels - 0.5) / 0.25).transpose(2, 0, 1).astype(np.float32))
        z = method.net.logits(state["w_S"], x[None])[0].double().numpy()
        sure = np.exp(z.max()) / np.exp(z).sum() >= method.confidence
        found.append(int(z.argmax()) if sure else -1)
    return found


def with_truth(site, truth):
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
    assert blind.labelling is None
    assert not torch.equal(first.labelling, other.labelling)


def test_labels_given_once_a_round_are_counted_against_the_truth():
    """On clean images, although training flips and crops them."""
    method = Hassle(small.net(small.Linear), **QUICK, residual_steps=5)
    site = small.site(small.dataset(flip=True, crop=4), labelled=range(4), unlabelled=range(40, 61))
    state = method.initial(0)
    given = labelled_by_hand(method, state, site)
    assert len(set(given)) > 1
    right = sum(a == b for a, b in zip(given, site.samples.truth.tolist(), strict=True))
    assert trained(method, site, state).labelling.tolist() == [right, 21]
    truth = torch.tensor([(y + 1) % 4 if i % 3 else y for i, y in enumerate(given)])  # each third is right
    assert trained(method, with_truth(site, truth), state).labelling.tolist() == [7, 21]


def test_labels_below_the_confidence_count_as_not_given():
    """At a confidence of 1 an untrained network gives no label, and w_U keeps its weights."""
    method = hassle(confidence=1.0, mpa=False, gra=False)
    site = small.site(unlabelled=range(40, 61))
    state = method.initial(0)
    update = trained(method, site, state)
    assert update.labelling.tolist() == [0, 0]
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
    assert trained(method, site, state).labelling.tolist() == expected
    assert confidence or expected[1] == 88


def test_without_augmentation_online_labels_are_those_given_once():
    site = small.site(labelled=range(4), unlabelled=range(40, 61))
    once, online = (trained(hassle(pseudo_labels=when), site).arrays for when in ("round", "online"))
    assert small.same(once, online)
    site = small.site(small.dataset(flip=True, crop=3), unlabelled=range(40, 61))
    state = hassle().initial(1)
    once, online = (trained(hassle(pseudo_labels=when), site, state).arrays for when in ("round", "online"))
    assert not small.same(once, online)
