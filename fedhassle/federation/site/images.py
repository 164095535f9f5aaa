"""A site's images under its labels: those that train, those that validate, and labels that come later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.dataset import Dataset
from fedhassle.data.npz import Labels
from fedhassle.data.site.patients import UNKNOWN, Patients, count_patients
from fedhassle.data.site.validation import Partition, partition, relabelled
from fedhassle.errors import require
from fedhassle.federation.agreement import Agreement
from fedhassle.federation.build import dataset_of
from fedhassle.federation.messages import coarse
from fedhassle.federation.site.begun import uses_in
from fedhassle.method import Client

log = logging.getLogger("fedhassle")


class Holding(NamedTuple):
    """A site's images under one set of labels."""

    dataset: Dataset
    rows: Partition
    client: Client


class SiteImages:
    """The images of a site under the labels that the server counts; new labels wait until it counts them.

    `new_labels` returns the labels of all images if they have changed since it was last called. A site that
    `hides` its numbers of images says 1.
    """

    def __init__(
        self,
        name: str,
        agreement: Agreement,
        x: np.ndarray,
        y: Labels,
        new_labels: Callable[[], Labels | None] = lambda: None,
        patients: Patients | None = None,
        hides: bool = False,
    ) -> None:
        agreed = agreement.data
        shape = (agreed.height, agreed.width, agreed.channels)
        require(x.shape[1:] == shape, f"the images have shape {x.shape[1:]}, but {shape} is agreed")
        self.name, self.agreement, self.patients, self.hides = name, agreement, patients, hides
        self._new_labels = new_labels
        self._uses = partition(x, y, agreed.validation, patients)
        self.drawn_for: object = None  # the run for which validation images were drawn last
        self.now = self._holding(x, y)
        self._next: Holding | None = None  # with labels that the server does not count yet

    @property
    def newest(self) -> Holding:
        """The images under the newest labels, whether the server counts these or not."""
        return self._next or self.now

    def _holding(self, x: np.ndarray, y: Labels) -> Holding:
        """The images with these labels; none that may have been trained on goes to validation."""
        agreed = self.agreement.data
        require(
            len(y) == len(x) and (not len(y) or int(y.max()) < len(agreed.class_names)),
            f"expected one label below {len(agreed.class_names)} for each image",
        )
        rows = relabelled(self._uses, y)
        client = Client(self.name, len(rows.labelled), len(rows.unlabelled))
        return Holding(dataset_of(self.agreement, x, y), rows, client)

    def notice_labels(self) -> None:
        """Keeps new labels for the time when the server counts them."""
        y = self._new_labels()
        if y is not None:
            y = self._without_strangers(y)
            self._next = self._holding(self.now.dataset.x_train, y)
            log.info("the labels have changed: %s", self.counts(self._next))

    def _without_strangers(self, y: Labels) -> Labels:
        """Labels without the new ones of images whose patient was not known at the start.

        Such a patient may be one of validation; a restart finds out.
        """
        if self.patients is None:
            return y
        new = (y >= 0) & (self.now.dataset.y_train < 0) & (self.patients == UNKNOWN)
        if new.any():
            why = "their patients were not known at its start"
            log.warning("%d new labels are not used before the node is restarted: %s", new.sum(), why)
        return np.where(new, -1, y)

    def use_labels(self, counts: object) -> None:
        """Uses the labels that the server counts: new ones as soon as it does, never others than these."""
        if self._next is not None and counts in (None, self.counts(self._next)):
            self.now, self._next = self._next, None
            log.info("the new labels are in use")
        known = counts in (None, self.counts(self.now))
        require(known, "its labels have changed; it takes part again when the server has counted them")

    def draw_for(self, run: object, folder: Path) -> None:
        """Draws validation images for a run with this memory: the same ones after a restart in its middle."""
        x, y = self.now.dataset.x_train, self.now.dataset.y_train
        self._uses = uses_in(folder, x, y, self.agreement.data.validation, self.patients)
        self.now = self._holding(x, y)
        if self._next is not None:
            self._next = self._holding(x, self._next.dataset.y_train)
        self.drawn_for = run

    # Numbers that leave the site

    def counts(self, held: Holding) -> dict[str, int]:
        """The numbers of images that the server may know: coarse if that is agreed, 1 if they are hidden."""
        return {
            "labelled": 1 if self.hides else self.reported(held.client.labelled),
            "unlabelled": 1 if self.hides else self.reported(held.client.unlabelled),
            "validation": self.reported(len(held.rows.validation)),
        }

    def patient_counts(self) -> dict[str, int]:
        """The numbers of patients as they leave the site; none if it knows none, or hides its counts."""
        if self.patients is None or self.hides:
            return {}
        rows = self.now.rows
        return {
            "patients": self.reported(count_patients(self.patients[np.concatenate(rows)])),
            "validation_patients": self.reported(count_patients(self.patients[rows.validation])),
        }

    def reported(self, count: int) -> int:
        """A count as it leaves the site: coarse if that is agreed."""
        return coarse(count) if self.agreement.data.coarse_counts else count
