"""The images that a site keeps for validation: by pixels, and by patients."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from fedhassle.data.site.validation import Partition, groups_of, partition, relabelled


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (count, 4, 4, 1)).astype(np.uint8)


def test_the_validation_rows_are_about_their_share_and_disjoint_from_the_rest():
    x, y = images(2000), np.arange(2000) % 5 - 1  # a fifth is unlabelled
    parts = partition(x, y, 0.1)
    assert 120 < len(parts.validation) < 200  # 160 of 1600 labelled: three standard deviations are 36
    assert sorted(np.concatenate(parts)) == list(range(2000))
    assert (y[parts.unlabelled] == -1).all() and (y[parts.validation] >= 0).all()


def test_a_validation_image_stays_one_when_others_are_added_or_sorted():
    x, y = images(300), np.zeros(300, np.int64)
    chosen = {x[row].tobytes() for row in partition(x, y, 0.2).validation}
    more = np.concatenate([images(200, seed=1), x[::-1]])
    then = {more[row].tobytes() for row in partition(more, np.zeros(500, np.int64), 0.2).validation}
    assert chosen <= then


def test_equal_images_have_equal_uses():
    x = np.repeat(images(50), 3, axis=0)
    parts = partition(x, np.zeros(150, np.int64), 0.3)
    assert not {x[r].tobytes() for r in parts.validation} & {x[r].tobytes() for r in parts.labelled}


@pytest.mark.parametrize(("count", "held"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_few_labels_keep_one_for_validation_and_one_to_train_on(count, held):
    for seed in range(20):
        parts = partition(images(count, seed), np.zeros(count, np.int64), 0.001)
        assert (len(parts.validation), len(parts.labelled)) == (held, count - held)


def test_without_a_share_no_image_is_for_validation():
    assert not len(partition(images(50), np.zeros(50, np.int64), 0.0).validation)


def test_without_patients_the_choice_is_by_the_digest_of_the_pixels():
    """A site that names no patients keeps its draw from one version to the next: BLAKE2b below the share."""
    x, y = images(400), np.arange(400) % 3 - 1
    digests = [hashlib.blake2b(one.tobytes(), digest_size=8, person=b"validation").digest() for one in x]
    expected = [k for k in range(400) if y[k] >= 0 and int.from_bytes(digests[k], "big") < 0.1 * 2**64]
    assert partition(x, y, 0.1).validation.tolist() == expected


def test_unlabelled_copies_of_validation_images_are_not_trained_on():
    x, y = images(200), np.zeros(200, np.int64)
    doubled, labels = np.concatenate([x, x]), np.concatenate([y, y - 1])
    parts = partition(doubled, labels, 0.2)
    assert parts.validation.tolist() == partition(x, y, 0.2).validation.tolist()
    assert sorted(parts.unlabelled - 200) == parts.labelled.tolist()


# Patients


def site_of(patients, per_patient=4, classes=2, seed=0):
    """Patients with several images each, of which one is unlabelled, in any order; classes by patient."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(1, 2**63, patients).astype(np.uint64)
    who = rng.permutation(np.repeat(np.arange(patients), per_patient))
    y = np.where(rng.random(len(who)) < 0.25, -1, who % classes)
    return images(len(who), seed), y.astype(np.int64), keys[who]


@pytest.mark.parametrize("seed", range(10))
def test_no_patient_is_trained_on_and_validated_on(seed):
    x, y, patients = site_of(29, seed=seed)
    parts = partition(x, y, 0.2, patients)
    kept = {*patients[parts.validation]}
    assert kept and not kept & {*patients[parts.labelled]} and not kept & {*patients[parts.unlabelled]}
    unused = {*range(len(y))} - {*np.concatenate(parts)}
    assert unused == {k for k in range(len(y)) if y[k] < 0 and patients[k] in kept}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_each_class_keeps_its_share_of_patients_those_with_the_lowest_keys(share):
    x, y, patients = site_of(100, classes=3)
    parts = partition(x, y, share, patients)
    for k in range(3):
        mine = np.unique(patients[y == k])
        expected = np.sort(mine)[: round(share * len(mine))]
        assert np.unique(patients[parts.validation][y[parts.validation] == k]).tolist() == expected.tolist()


def test_a_patient_of_several_classes_counts_for_the_rarest():
    """Eight patients of class 0 alone, four of both: a quarter of each is two and one."""
    patients = np.repeat(np.arange(1, 13, dtype=np.uint64), 2)
    y = np.array([0, 0] * 8 + [0, 1] * 4)
    parts = partition(images(24), y, 0.25, patients)
    assert np.unique(patients[parts.validation]).tolist() == [1, 2, 9]


@pytest.mark.parametrize(
    ("by_class", "kept"),
    [((1,), 0), ((2,), 1), ((3,), 1), ((1, 1), 0), ((2, 1), 1), ((2, 5), 1), ((3, 5), 2), ((0, 40), 4)],
)
def test_few_patients_keep_one_for_validation_and_one_to_train_on(by_class, kept):
    y = np.repeat(np.arange(len(by_class)), by_class).astype(np.int64)
    patients = np.random.default_rng(0).permutation(len(y)).astype(np.uint64) + np.uint64(1)
    parts = partition(images(len(y)), y, 0.1, patients)
    assert len(parts.validation) == kept and {*y[parts.labelled]} == {*y}


def test_the_choice_is_the_same_in_any_order_and_without_a_share_there_is_none():
    x, y, patients = site_of(40)
    chosen = {*patients[partition(x, y, 0.2, patients).validation]}
    order = np.random.default_rng(5).permutation(len(y))
    assert {*patients[order][partition(x[order], y[order], 0.2, patients[order]).validation]} == chosen
    assert not len(partition(x, y, 0.0, patients).validation)


def test_an_image_without_a_patient_is_alone_and_identical_images_join_their_patients():
    """Patients 5 and 7 share an image, 7 and 9 another, and an image of 9 has a copy without a patient."""
    x = images(9)
    x[2], x[4], x[6] = x[1], x[3], x[5]
    patients = np.array([5, 5, 7, 7, 9, 9, 0, 0, 11], np.uint64)
    groups, keys = groups_of(patients, np.array([int(one.sum()) * 100 + 13 for one in x], np.uint64))
    together = Counter(groups.tolist())
    assert sorted(together.values()) == [1, 1, 7] and len({*groups[:7]}) == 1
    assert keys[groups[0]] == 5 and keys[groups[8]] == 11 and len(keys) == 3


def test_new_labels_leave_validation_as_it_is():
    """Images to train on never become validation images; a withdrawn label takes one away, and back again."""
    uses = Partition(np.array([0, 3]), np.array([1, 4]), np.array([2, 5]))  # 6 has no use
    after = relabelled(uses, np.array([0, 1, 1, -1, -1, -1, 0]))
    assert [part.tolist() for part in after] == [[0, 1], [3, 4], [2]]
    again = relabelled(uses, np.array([0, 1, 1, 2, 2, 0, 0]))
    assert [part.tolist() for part in again] == [[0, 1, 3, 4], [], [2, 5]]
