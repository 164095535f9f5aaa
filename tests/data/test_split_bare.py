"""Drawn splits of data sets in which some images have no label (−1)."""

import numpy as np
import pytest

from fedhassle.data.split.cuts import SPLIT_KINDS
from fedhassle.data.split.draw import ANNOTATIONS, split
from fedhassle.data.split.split import Split
from fedhassle.data.split.table import table
from fedhassle.errors import UserError

KINDS = pytest.mark.parametrize("kind", SPLIT_KINDS)
BOTH = pytest.mark.parametrize("annotation", ANNOTATIONS)


def partly(known, bare, classes=10, seed=0):
    """Classes of samples in random order, of which `bare` have no label."""
    return np.random.default_rng(seed).permutation(
        np.concatenate([np.arange(known) % classes, np.full(bare, -1)])
    )


@KINDS
@BOTH
@pytest.mark.parametrize("labels", ["10%", "PL", "LPL", "LU", "5%"])
@pytest.mark.parametrize(("known", "bare"), [(1900, 100), (1000, 1000), (400, 1600)])
def test_images_without_labels_are_never_labelled(kind, annotation, labels, known, bare):
    y = partly(known, bare)
    try:
        made = split(y, kind=kind, annotation=annotation, labels=labels, seed=1)
    except UserError as error:  # the sizes of a textbook split are random
        assert (annotation, kind) == ("own", "dirichlet") and "the drawn sizes" in str(error)
        return
    made.check(y)
    everything = np.concatenate([*made.labelled, *made.unlabelled])
    assert sorted(everything) == list(range(2000))  # all rows, once
    planned = {"5%": 100}.get(labels, 200)
    assert sum(part.size for part in made.labelled) == planned or annotation == "own"
    assert made.notes[-1] == f"{bare:,} images without a label: unlabelled, and shared out at random"


@KINDS
def test_they_are_shared_out_in_proportion_whatever_the_kind(kind):
    """Half of the unlabelled images have no label: so do 50 of 100 at each of the ten unlabelled clients."""
    y = partly(1100, 900)
    made = split(y, kind=kind, labels="10%", seed=2)
    bare = [int((y[part] < 0).sum()) for part in made.unlabelled]
    assert bare[0] == 0 and sum(bare) == 900  # the full client has none
    assert max(bare[10:]) - min(bare[10:]) <= 2 and max(bare[1:10]) - min(bare[1:10]) <= 2
    assert 48 <= np.mean(bare[10:]) <= 52 and 42 <= np.mean(bare[1:10]) <= 47  # of 100, and of 88 or 89


@KINDS
@BOTH
def test_full_clients_hold_only_images_with_labels(kind, annotation):
    y = partly(300, 300)
    labels = {"full": 2, "partial": 1, "unlabelled": 3, "share": 0.36}
    try:
        made = split(y, kind=kind, annotation=annotation, clients=6, labels=labels)
    except UserError as error:  # the sizes of a textbook split are random
        assert (annotation, kind) == ("own", "dirichlet") and "the drawn sizes" in str(error)
        return
    kinds = [row.kind for row in table(made, y, 10)]
    assert kinds == ["full", "full", "partial", "unlabelled", "unlabelled", "unlabelled"]


def test_the_labelled_data_have_the_classes_evenly():
    y = partly(500, 4500)
    made = split(y, labels={"full": 0, "partial": 20, "share": 0.05}, kind="iid")
    counts = np.bincount(y[np.concatenate(made.labelled)], minlength=10)
    assert counts.sum() == 250 and np.ptp(counts) <= 2


@KINDS
@BOTH
def test_every_label_can_be_used(kind, annotation):
    """As in STL-10: all labels are asked for, and all other images have none."""
    y = partly(200, 1800)
    try:
        made = split(y, kind=kind, annotation=annotation, labels="UPL", seed=3)
    except UserError as error:  # the sizes of a textbook split are random
        assert annotation == "own" and kind == "dirichlet" and "the drawn sizes" in str(error)
        return
    assert sorted(np.concatenate(made.labelled)) == np.flatnonzero(y >= 0).tolist()


@pytest.mark.parametrize(
    ("labels", "more"),
    [("10%", {}), ({"full": 1, "partial": 9, "unlabelled": 10, "share": 0.1}, {}), ([0.1] * 20, {})],
)
def test_too_few_labels_are_an_error_that_says_what_works(labels, more):
    with pytest.raises(UserError, match=r"asks for 200 labels, but only 150 of 2,000 .* at most 0\.075"):
        split(partly(150, 1850), labels=labels, **more)
    split(partly(150, 1850), labels={"full": 0, "partial": 10, "unlabelled": 10, "share": 0.075})


def test_no_label_at_all_is_an_error():
    with pytest.raises(UserError, match="only 0 of 40 images have one"):
        split(np.full(40, -1), clients=2, labels={"full": 1, "unlabelled": 1})


def test_labels_of_unequal_clients_go_where_there_are_images_with_labels():
    """Textbook sizes: no partial client is asked for more labels than it has."""
    y, drawn = partly(90, 310, classes=3), 0
    for seed in range(20):
        try:
            made = split(y, kind="dirichlet", annotation="own", clients=4, labels=[0.2] * 4, seed=seed)
        except UserError as error:
            assert "the drawn sizes" in str(error)
            continue
        made.check(y)
        drawn += 1
        assert all(part.size for part in made.labelled)
    assert drawn > 10


def test_the_table_counts_known_classes():
    y = np.array([0, 1, 1, -1, -1, 0])
    (row,) = table(Split.of([[0, 1]], [[2, 3, 4]]), y, 2)
    assert (row.labelled, row.unlabelled) == (2, 3)
    assert (row.labelled_counts, row.unlabelled_counts) == ((1, 1), (0, 1))
    assert row.effective_unlabelled == 1.0
