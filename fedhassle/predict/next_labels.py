"""The images to label next: those on which a model is least sure, spread over classes and patients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.site.folder import SiteData
from fedhassle.data.site.listing import file_of
from fedhassle.data.site.validation import digests_of, groups_of
from fedhassle.errors import require
from fedhassle.predict.model import Prediction, TrainedModel

Shares = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Doubts(NamedTuple):
    """A model's doubts about N images, each from 0 (none) to 1."""

    uncertainty: Shares  # (N,): entropy of the main prediction
    disagreement: Shares  # (N,): Jensen-Shannon divergence of the other predictions, SM and UM for HASSLE

    @property
    def score(self) -> Shares:
        """(N,): the mean of both; they count the same."""
        return (self.uncertainty + self.disagreement) / 2


def doubts_of(model: TrainedModel, images: np.ndarray) -> tuple[Doubts, Prediction]:
    """Returns a model's doubts about images (N, H, W, C), and its main prediction of them."""
    predictions = model.predictions(images)
    return doubts(predictions, model.method.headline), predictions[model.method.headline]


def doubts(predictions: Mapping[str, Prediction], headline: str) -> Doubts:
    """Returns the doubts that several predictions of the same images show.

    A model with a single prediction cannot disagree with itself: its disagreement is 0.
    """
    main = predictions[headline].probabilities  # (N, M)
    others = [one.probabilities for name, one in predictions.items() if name != headline]
    uncertainty = entropy(main) / np.log(main.shape[1]) if main.shape[1] > 1 else np.zeros(len(main))
    if len(others) < 2:
        return Doubts(uncertainty, np.zeros(len(main)))
    divergence = entropy(np.mean(others, axis=0)) - np.mean([entropy(p) for p in others], axis=0)
    return Doubts(uncertainty, np.clip(divergence / np.log(len(others)), 0, 1))


def entropy(p: Shares) -> Shares:
    """Returns the entropy of each row in nats; 0 · log 0 is 0."""
    found: Shares = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
    return found


def spread(score: Shares, classes: Numbers, count: int, patients: Numbers | None = None) -> Numbers:
    """Returns up to `count` rows to label, in order: each time the highest score where the least was chosen.

    The patients from whom the fewest images were chosen so far come first, among theirs the predicted classes
    that were chosen the least, and among these the highest score. Without patients, classes decide.
    """
    patients = np.zeros(len(score), np.int64) if patients is None else patients
    by_patient = np.zeros(int(patients.max(initial=0)) + 1, np.int64)
    by_class = np.zeros(int(classes.max(initial=0)) + 1, np.int64)
    left, chosen = np.argsort(-score, kind="stable"), list[int]()
    while len(left) and len(chosen) < count:
        burden = by_patient[patients[left]] * (count + 1) + by_class[classes[left]]
        place = int(np.argmin(burden))  # the first of several: the highest score
        row = int(left[place])
        chosen.append(row)
        by_patient[patients[row]] += 1
        by_class[classes[row]] += 1
        left = np.delete(left, place)
    return np.array(chosen, np.int64)


class Proposal(NamedTuple):
    """An image to label."""

    row: int  # in the site's data
    name: str  # of the picture: its file, or a frame of it
    uncertainty: float
    disagreement: float
    guesses: dict[str, str]  # class by prediction
    probability: float  # of the main prediction's class


def unlabelled_rows(site: SiteData) -> Numbers:
    """Returns the rows of a site's images without a label; none at all is an error."""
    rows = np.flatnonzero(site.y < 0)
    require(len(rows) > 0, "every image has a label: there is nothing left to label")
    return rows


def proposals(
    site: SiteData, rows: Numbers, predictions: Mapping[str, Prediction], model: TrainedModel, count: int
) -> list[Proposal]:
    """Returns up to `count` of these rows to label, by a model's predictions of them, in order.

    The frames of a file have one label: the frame with the highest score stands for the file.
    """
    main, doubt = predictions[model.method.headline], doubts(predictions, model.method.headline)
    order = np.argsort(-doubt.score, kind="stable")
    _, first = np.unique([file_of(site.files[rows[k]]) for k in order], return_index=True)
    alone = np.sort(order[first])
    known = np.zeros(len(site.x), np.uint64) if site.patients is None else site.patients
    groups, _ = groups_of(known[rows], digests_of(site.x[rows]))  # copies of an image are one patient's
    return [
        Proposal(
            row=int(rows[k]),
            name=site.files[rows[k]],
            uncertainty=float(doubt.uncertainty[k]),
            disagreement=float(doubt.disagreement[k]),
            guesses={mode: model.class_names[one.classes[k]] for mode, one in predictions.items()},
            probability=float(main.probabilities[k].max()),
        )
        for k in alone[spread(doubt.score[alone], main.classes[alone], count, groups[alone])]
    ]
