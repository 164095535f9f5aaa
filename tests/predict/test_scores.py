"""Metrics of predictions against their definitions and known values."""

import itertools
import json
import math

import numpy as np
import pytest

from fedhassle.predict.scores import (
    as_json,
    auroc,
    balanced_interval,
    calibration_error,
    confusion,
    effective_images,
    macro_auroc,
    recall,
    recall_intervals,
    reliability,
    score,
    wilson,
)


def pairs_auroc(scores, positive):
    """O(n²): over all pairs of a positive and a negative, won ones count 1, ties ½."""
    won = total = 0
    for i, j in itertools.product(range(len(scores)), repeat=2):
        if positive[i] and not positive[j]:
            total += 1
            won += 1 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0
    return won / total if total else math.nan


def softmaxed(rng, n, m, digits=None):
    z = np.exp(rng.normal(size=(n, m)) * 2)
    p = z / z.sum(1, keepdims=True)
    return p if digits is None else np.round(p, digits)


@pytest.mark.parametrize("digits", [None, 1], ids=["no ties", "many ties"])
@pytest.mark.parametrize("m", [2, 3, 7])
def test_auroc_counts_pairs(m, digits, rng):
    p, y = softmaxed(rng, 60, m, digits), rng.integers(0, m, 60)
    expected = [pairs_auroc(p[:, k], y == k) for k in range(m)]
    assert [auroc(p[:, k], y == k) for k in range(m)] == pytest.approx(expected, abs=1e-12)
    assert macro_auroc(p, y) == pytest.approx(np.mean(expected), abs=1e-12)


def test_auroc_of_known_values():
    y = np.array([False, False, True, True])
    assert auroc(np.array([0.1, 0.4, 0.35, 0.8]), y) == 0.75  # the example of many a textbook
    assert auroc(np.array([0.0, 0.1, 0.2, 0.3]), y) == 1
    assert auroc(np.array([0.3, 0.2, 0.1, 0.0]), y) == 0
    assert auroc(np.full(4, 0.5), y) == 0.5
    assert math.isnan(auroc(np.array([0.1, 0.2]), np.array([True, True])))


def test_for_two_classes_the_macro_auroc_is_the_usual_one(rng):
    p, y = softmaxed(rng, 50, 2), rng.integers(0, 2, 50)
    assert macro_auroc(p, y) == pytest.approx(pairs_auroc(p[:, 1], y == 1), abs=1e-12)


def test_classes_that_do_not_occur_are_left_out_of_the_auroc(rng):
    p, y = softmaxed(rng, 40, 5), rng.integers(0, 2, 40)  # of classes 0 and 1 alone
    assert macro_auroc(p, y) == pytest.approx(np.mean([pairs_auroc(p[:, k], y == k) for k in (0, 1)]))
    assert math.isnan(macro_auroc(p, np.zeros(40, int)))


def balanced(matrix):
    """The interval of the mean recall of a confusion matrix."""
    return balanced_interval(matrix, recall_intervals(matrix))


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Newcombe 1998, table I: method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right, total, low, high):
    assert wilson(right, total) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(total - right, total)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(("right", "total"), [(0, 1), (1, 1), (3, 7), (500, 1000), (999, 1000)])
def test_wilson_inverts_the_score_test(right, total):
    """Its limits are the shares p at which |right/total − p| is z standard errors of p; by bisection."""
    share, z = right / total, 1.959963984540054

    def bisected(inside, outside):
        for _ in range(200):
            middle = (inside + outside) / 2
            near = abs(share - middle) <= z * math.sqrt(middle * (1 - middle) / total)
            inside, outside = (middle, outside) if near else (inside, middle)
        return inside

    assert wilson(right, total) == pytest.approx((bisected(share, 0), bisected(share, 1)), abs=1e-9)


def test_the_balanced_interval_by_hand():
    """Two classes, 8 of 10 and 1 of 4: squares of the distances to Wilson's limits added up, over 2."""
    matrix = np.array([[8, 2], [3, 1]])
    (l1, u1), (l2, u2) = wilson(8, 10), wilson(1, 4)
    low = 0.525 - math.sqrt((0.8 - l1) ** 2 + (0.25 - l2) ** 2) / 2
    high = 0.525 + math.sqrt((u1 - 0.8) ** 2 + (u2 - 0.25) ** 2) / 2
    assert balanced(matrix) == pytest.approx((low, high))


def test_the_balanced_interval_of_one_class_is_wilsons():
    assert balanced(np.array([[7, 2], [0, 0]])) == pytest.approx(wilson(7, 9))


def test_the_balanced_interval_has_a_width_where_all_is_right_and_stays_in_its_bounds():
    low, high = balanced(np.diag([20, 5, 100]))
    assert high == 1 and 0.8 < low < 0.97
    low, high = balanced(np.array([[0, 3], [2, 0]]))
    assert low == 0 and 0.3 < high < 0.6


def test_the_balanced_interval_covers_the_truth():
    """1,500 samples of four classes of unequal sizes and recalls: the truth lies inside in 95 % or more."""
    rng, truth, sizes = np.random.default_rng(0), np.array([0.5, 0.9, 0.98, 0.2]), np.array([20, 40, 60, 15])
    inside = 0
    for right in rng.binomial(sizes, truth, (1500, 4)):
        matrix = np.zeros((4, 4), int)
        matrix[range(4), range(4)] = right
        matrix[range(4), [1, 2, 3, 0]] = sizes - right
        low, high = balanced(matrix)
        inside += low <= truth.mean() <= high
    assert 0.94 < inside / 1500 < 0.98


def test_confusion_recall_and_precision_by_counting(rng):
    y, classes = rng.integers(0, 4, 80), rng.integers(0, 5, 80)  # class 4 is predicted and never true
    matrix = confusion(classes, y, 5)
    for true, predicted in itertools.product(range(5), repeat=2):
        assert matrix[true, predicted] == sum(
            a == true and b == predicted for a, b in zip(y, classes, strict=True)
        )
    found = recall(matrix)
    for k in range(4):
        assert found[k] == sum((y == k) & (classes == k)) / sum(y == k)
    assert math.isnan(found[4])
    p = softmaxed(rng, 80, 5)
    precision = score(classes, p, y).precision
    for k in range(5):
        assert precision[k] == sum((y == k) & (classes == k)) / sum(classes == k)


def test_the_calibration_error_by_sorting_into_bins(rng):
    confidence, right = rng.uniform(0, 1, 300), rng.random(300) < 0.6
    error = 0.0
    for b in range(15):
        there = [i for i in range(300) if b / 15 < confidence[i] <= (b + 1) / 15]
        if there:
            gap = sum(confidence[i] for i in there) / len(there) - sum(right[i] for i in there) / len(there)
            error += len(there) / 300 * abs(gap)
    assert calibration_error(reliability(confidence, right)) == pytest.approx(error, abs=1e-12)


def test_calibration_errors_of_known_values():
    sure = np.ones(10)
    assert calibration_error(reliability(sure, np.ones(10, bool))) == 0
    assert calibration_error(reliability(sure, np.arange(10) < 7)) == pytest.approx(0.3)
    bins = reliability(np.array([0.0, 0.2, 0.21, 1.0]), np.array([1, 0, 1, 1], bool), 5)
    assert bins.images.tolist() == [2, 1, 0, 0, 1]  # 0 is in the first bin, an edge in the bin below it
    assert bins.accuracy[[0, 1, 4]].tolist() == [0.5, 1, 1] and math.isnan(bins.accuracy[2])


def test_all_metrics_together(rng):
    p, y = softmaxed(rng, 90, 3), rng.integers(0, 3, 90)
    classes = p.argmax(1)
    made = score(classes, p, y)
    right = int((classes == y).sum())
    assert made.accuracy == right / 90 and made.accuracy_interval == wilson(right, 90)
    assert made.balanced == pytest.approx(np.mean([(classes[y == k] == k).mean() for k in range(3)]))
    assert made.auroc == macro_auroc(p, y)
    assert made.calibration_error == calibration_error(reliability(p.max(1), classes == y))


def test_json_has_all_metrics_and_no_nan(rng):
    p, y = softmaxed(rng, 30, 3), rng.integers(0, 2, 30)
    classes = np.minimum(p.argmax(1), 1)  # class 2 neither occurs nor is predicted
    plain = as_json(score(classes, p, y), ["a", "b", "c"])
    json.dumps(plain, allow_nan=False)
    assert plain["classes"][2] == {
        "name": "c",
        "images": 0,
        "recall": None,
        "recall_95": None,
        "precision": None,
    }
    assert [row["images"] for row in plain["classes"]] == [int((y == k).sum()) for k in range(3)]
    assert sum(row["images"] for row in plain["reliability"]) == 30
    assert all((row["accuracy"] is None) == (not row["images"]) for row in plain["reliability"])
    assert (plain["reliability"][0]["from"], plain["reliability"][14]["to"]) == (0, 1)
    alone = as_json(score(np.zeros(4, int), np.ones((4, 1)), np.zeros(4, int)), ["a"])
    assert alone["auroc"] is None and alone["accuracy"] == 1


# Patients


def test_the_effective_images_by_hand():
    """Three patients with 2, 1 and 3 images, of which 2, 0 and 2 are right: p = 4/6.

    The sums r − p·n are 2/3, −2/3 and 0: the variance is 3/2 · 8/9 / 36 = 1/27, and p(1 − p) = 2/9.
    """
    right = np.array([True, True, False, True, True, False])
    assert effective_images(right, np.array([5, 5, 9, 7, 7, 7])) == pytest.approx(6)
    pairs = np.array([True, True, False, False, True, True])  # 2·2/3, 2·(−4/3), 2·2/3: 3/2 · 8/3 / 36 = 1/9
    assert effective_images(pairs, np.array([1, 1, 2, 2, 3, 3])) == pytest.approx(2)


def test_the_effective_images_where_all_is_right_or_one_patient_is_all():
    """Kish: 6²/(4² + 1 + 1) = 2; images of different patients count each."""
    assert effective_images(np.ones(6, bool), np.array([1, 1, 1, 1, 2, 3])) == pytest.approx(2)
    assert effective_images(np.zeros(6, bool), np.arange(6)) == 6
    assert effective_images(np.array([True, False]), np.array([4, 4])) == 1
    assert effective_images(np.zeros(0, bool), np.zeros(0)) == 0


def test_intervals_by_patient_cover_the_truth_where_wilsons_do_not():
    """40 patients with 10 images each, all right or all wrong: 400 images tell no more than 40."""
    rng, covered, narrow = np.random.default_rng(0), 0, 0
    for _ in range(400):
        right = np.repeat(rng.random(40) < 0.8, 10)
        patients = np.repeat(np.arange(40), 10)
        classes, y = (~right).astype(np.int64), np.zeros(400, np.int64)
        probabilities = np.eye(2)[classes]
        low, high = score(classes, probabilities, y, patients).accuracy_interval
        covered += low <= 0.8 <= high
        low, high = score(classes, probabilities, y).accuracy_interval
        narrow += low <= 0.8 <= high
    assert covered > 0.92 * 400 and narrow < 0.6 * 400


def test_recalls_have_intervals_of_their_own_by_patient():
    """Class a: 10 images of 5 patients in pairs, 4 pairs right, like 5 images; class b: 3 of 4 right."""
    right = np.array([True] * 8 + [False] * 2 + [True, True, True, False])
    y = np.array([0] * 10 + [1] * 4)
    patients = np.array([*np.repeat(np.arange(5), 2), 10, 11, 12, 13])
    classes = np.where(right, y, 1 - y)
    made = score(classes, np.eye(3)[classes], y, patients)
    # p = 0.8; the sums r − p·n are 4 times 0.4 and once −1.6: the variance is 5/4 · 3.2 / 100 = 0.04.
    assert made.recall_intervals[0] == pytest.approx(wilson(8, 10, 0.16 / 0.04))
    assert made.recall_intervals[1] == pytest.approx(wilson(3, 4, 0.1875 / (4 / 3 * 0.75 / 16)))
    assert made.recall_intervals[2] is None
    plain = score(classes, np.eye(3)[classes], y)
    assert plain.recall_intervals[:2] == (wilson(8, 10), wilson(3, 4))
    (low, high), _, absent = (each["recall_95"] for each in as_json(made, "abc")["classes"])
    assert (low, high) == made.recall_intervals[0] and absent is None


def test_with_a_patient_for_each_image_the_intervals_are_about_wilsons(rng):
    y, classes = rng.integers(0, 3, 300), rng.integers(0, 3, 300)
    made, plain = (score(classes, softmaxed(rng, 300, 3), y, who) for who in (np.arange(300), None))
    assert made.accuracy_interval == pytest.approx(plain.accuracy_interval, abs=1e-3)
    assert made.balanced_interval == pytest.approx(plain.balanced_interval, abs=1e-3)
