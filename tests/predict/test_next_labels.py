"""Which images to label next: doubts by hand, and how the choice spreads."""

import math

import numpy as np
import pytest

from fedhassle.predict.model import Prediction
from fedhassle.predict.next_labels import doubts, spread


def prediction(*rows):
    p = np.array(rows, np.float64)
    return Prediction(p.argmax(1), p)


def entropy_by_hand(p):
    return -sum(share * math.log(share) for share in p if share > 0)


def test_doubts_are_the_entropy_of_em_and_the_divergence_of_sm_and_um():
    sm, um, em = [0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.35, 0.45, 0.2]
    sure, other = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    even = [1 / 3] * 3
    found = doubts(
        {
            "SM": prediction(sm, sure, sure, even),
            "UM": prediction(um, sure, other, even),
            "EM": prediction(em, sure, [0.5, 0.5, 0.0], even),
        },
        "EM",
    )
    mean = [(a + b) / 2 for a, b in zip(sm, um, strict=True)]
    divergence = entropy_by_hand(mean) - (entropy_by_hand(sm) + entropy_by_hand(um)) / 2
    uncertainty = [entropy_by_hand(em) / math.log(3), 0, math.log(2) / math.log(3), 1]
    assert found.uncertainty == pytest.approx(uncertainty)
    assert found.disagreement == pytest.approx([divergence / math.log(2), 0, 1, 0])
    assert found.score == pytest.approx((found.uncertainty + found.disagreement) / 2)


def test_a_model_with_one_prediction_does_not_disagree_with_itself():
    found = doubts({"model": prediction([0.5, 0.5], [1.0, 0.0])}, "model")
    assert found.uncertainty == pytest.approx([1, 0]) and found.disagreement.tolist() == [0, 0]


def test_the_choice_takes_turns_among_the_predicted_classes():
    score, classes = np.array([0.9, 0.8, 0.7, 0.6, 0.1]), np.array([0, 0, 0, 1, 2])
    assert spread(score, classes, 4).tolist() == [0, 3, 4, 1]
    assert spread(score, classes, 9).tolist() == [0, 3, 4, 1, 2]  # there are no more
    assert spread(score[:0], classes[:0], 3).tolist() == []


def test_the_choice_takes_turns_among_patients_first():
    """Each patient once, then each twice; among equals the class with the fewest, then the score."""
    score = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    classes, patients = np.array([0, 0, 1, 1, 0]), np.array([5, 5, 5, 2, 2])
    assert spread(score, classes, 4, patients).tolist() == [0, 3, 1, 4]


def test_the_order_does_not_depend_on_the_number():
    rng = np.random.default_rng(0)
    score, classes, patients = rng.random(200), rng.integers(0, 4, 200), rng.integers(0, 30, 200)
    long = spread(score, classes, 100, patients)
    assert len(set(long.tolist())) == 100 and (spread(score, classes, 40, patients) == long[:40]).all()
    assert np.bincount(patients[long], minlength=30).max() - np.bincount(patients[long]).min() <= 1
