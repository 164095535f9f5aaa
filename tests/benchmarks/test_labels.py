"""The benchmark of more labels: who gets how many, and from where."""

import numpy as np

from benchmarks.labels import at_random, more_labels
from fedhassle.data.split.split import Split


def test_more_labels_are_shared_among_clients_with_unlabelled_images():
    before = Split.of([[0, 1], [2], []], [[], range(10, 20), range(20, 40)])
    after = more_labels(before, 5, lambda rows, count: rows[:count])
    assert [part.tolist() for part in after.labelled] == [[0, 1], [2, 10, 11, 12], [20, 21]]
    assert [len(part) for part in after.unlabelled] == [0, 7, 18]
    after.check()


def test_random_labels_depend_on_the_seed_alone():
    rows = np.arange(100)
    first, again, other = (at_random(seed)(rows, 9).tolist() for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) == 9
