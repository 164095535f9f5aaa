"""Runs on images of which some have no label (−1), and on files without test images."""

import numpy as np
import pytest
import small
from small import call, metrics_of, strict, summary_of

from fedhassle.data.split.split import Split

WORDS = (
    *("rounds=2", "evaluate_every=1", "clients_per_round=4", "threads=1", "device=cpu", "method.epochs=1"),
    *("method.residual_steps=1", "method.batch=8", "split.clients=4", "data.flip=false", "data.crop=0"),
    "split.labels={full=1, partial=2, unlabelled=1, share=0.3}",
)


@pytest.fixture
def bare(tmp_path):
    """Saves 240 images of four classes, of which the first have labels; with test images only if asked."""

    def save(labels=120, test=False):
        data = small.dataset(train=240)
        y = np.where(np.arange(240) < labels, data.y_train, -1)
        more = {"x_test": data.x_test, "y_test": data.y_test} if test else {}
        np.savez(tmp_path / "bare.npz", x_train=data.x_train, y_train=y, **more)
        return tmp_path / "bare.npz"

    return save


def test_a_run_without_test_images_holds_some_out(bare, tmp_path):
    path = bare()
    out = tmp_path / "run"
    code, _, err = call("run", f"data={path}", *WORDS, "--out", out)
    assert code == 2 and "has no test images" in err and "data.holdout=0.1" in err and not out.exists()
    assert call("run", f"data={path}", *WORDS, "data.holdout=0.2", "--out", out)[0] == 0
    made = Split.load(out / "split.npz")
    kept = 240 - 24  # a fifth of the 120 labelled images
    assert sorted(np.concatenate([*made.labelled, *made.unlabelled])) == list(range(kept))
    assert sum(part.size for part in made.labelled) == round(0.3 * kept)
    assert summary_of(out)["history"][-1]["accuracy"].keys() >= {"SM", "UM", "EM"}


def test_the_accuracy_of_pseudo_labels_is_of_images_whose_class_is_known(bare, tmp_path):
    """HASSLE labels all 151 unlabelled images once a round; the classes of 96 − 65 of them are known."""
    out = tmp_path / "run"
    assert call("run", f"data={bare()}", *WORDS, "data.holdout=0.2", "--out", out)[0] == 0
    for line in metrics_of(out):
        assert line["pseudo_label_share"] == 1.0
        right = line["pseudo_label_accuracy"] * 31
        assert right == pytest.approx(round(right)) and 0 < right < 31


def test_without_known_classes_their_accuracy_is_unknown(bare, tmp_path):
    """All labels are used, so nobody knows the class of an unlabelled image."""
    out = tmp_path / "run"
    assert call("run", f"data={bare(72, test=True)}", *WORDS, "--out", out)[0] == 0
    assert [line["pseudo_label_accuracy"] for line in metrics_of(out)] == [None, None]
    assert all(line["pseudo_label_share"] == 1.0 for line in metrics_of(out))
    assert summary_of(out)["history"][0]["pseudo_label_accuracy"] is None


def test_split_shows_images_of_unknown_class(bare, tmp_path):
    words = ("split", f"data={bare()}", *WORDS, "data.holdout=0.2", "--picture", tmp_path / "x.png")
    code, out, _ = call(*words)
    assert code == 0 and "120 images without a label" in " ".join(out.split())
    found = strict(call(*words, "--json")[1])
    assert sum(sum(client["unlabelled_counts"]) for client in found["clients"]) == 216 - 65 - 120
    assert sum(client["unlabelled"] for client in found["clients"]) == 216 - 65


def test_a_plain_partition_and_held_out_images_exclude_each_other(bare, tmp_path):
    """The held-out images depend on the seed, and the rows of the others move."""
    words = [word for word in WORDS if not word.startswith("split.")]
    (tmp_path / "own.csv").write_text("row,client,labelled\n0,a,1\n200,b,0\n")
    own = [f"split.file={tmp_path / 'own.csv'}", "clients_per_round=2"]
    code, _, err = call("run", f"data={bare()}", *words, "data.holdout=0.2", *own, "--out", tmp_path / "run")
    assert code == 2 and "own.csv counts all training images, but data.holdout=0.2" in " ".join(err.split())
    code, _, _ = call("run", f"data={bare(test=True)}", *words, *own, "--out", tmp_path / "run")
    assert code == 0


def test_a_partition_without_labels_is_refused(bare, tmp_path):
    (tmp_path / "own.csv").write_text("row,client,labelled\n0,a,0\n200,b,0\n")
    words = [word for word in WORDS if not word.startswith("split.")]
    words += [f"split.file={tmp_path / 'own.csv'}", "clients_per_round=2"]
    code, _, err = call("run", f"data={bare(test=True)}", *words, "--out", tmp_path / "run")
    assert code == 2 and "own.csv has no labelled row" in " ".join(err.split())


def test_too_few_labels_end_a_run_before_it_starts(bare, tmp_path):
    code, _, err = call("run", f"data={bare(40)}", *WORDS, "data.holdout=0.2", "--out", tmp_path / "run")
    assert code == 2 and "but only 32 of 232 images have one" in " ".join(err.split())
