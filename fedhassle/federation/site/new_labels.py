"""Labels that come later: notices a changed label file while a node runs, and reads it as at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.npz import Labels
from fedhassle.data.site.labels import folder_labels
from fedhassle.data.site.listing import ImageFiles, file_of, find_images, find_label_file, printable
from fedhassle.data.site.patients import UNKNOWN, PatientRule, Patients, folder_patients, known_patients
from fedhassle.errors import UserError
from fedhassle.files import Stamp, stamp

log = logging.getLogger("fedhassle")

SETTLED = 2.0  # seconds without a change after which a file counts as written to its end


class LabelSource(NamedTuple):
    """A site's images, and the file of their labels: given, or the one in the folder."""

    images: Path
    label_file: Path | None
    class_names: Sequence[str]
    patients: PatientRule | None = None  # None: patients are not asked for

    def stamp(self) -> Stamp:
        """Returns size and modification time of the label file; zeros if there is none, as for an .npz."""
        if not self.images.is_dir():
            return 0, 0
        file = self.label_file or find_label_file(self.images)
        return (0, 0) if file is None else stamp(file)

    def read(self, identified: Mapping[str, bool]) -> dict[str, int]:
        """Reads the label of each image by its name; logs the rows without an image.

        `identified`: the images that the node has read, and whether it knows their patients.
        """
        found = find_images(self.images, self.label_file)
        y, problems = folder_labels(self.images, found, self.class_names, self.label_file)
        self._require_patients(found, y, identified)
        for problem in problems:
            log.warning("skipped %s: %s", problem.path, problem.what)
        return dict(zip(map(printable, found.files), y.tolist(), strict=True))

    def _require_patients(self, found: ImageFiles, y: Labels, identified: Mapping[str, bool]) -> None:
        """Raises for a labelled image without a known patient, as the start of a node does.

        Of DICOM files, those count that the node has read; new files wait for its restart.
        """
        if self.patients is None:
            return
        names = list(map(printable, found.files))
        old = np.array([name in identified for name in names])
        named = np.array([self.patients.dicom and identified.get(name, False) for name in names])
        people = folder_patients(self.patients, found, self.label_file, b"")
        people[named] = 1  # any number but UNKNOWN
        known_patients(self.patients, people, np.where(old, y, -1), found.files, str(self.images))


class LabelWatch:
    """Notices when the labels of the images that a node has read change; `seen`: the stamp before that."""

    def __init__(
        self,
        source: LabelSource,
        files: Sequence[str],
        seen: Stamp,
        now: Callable[[], float] = time.time,
        patients: Patients | None = None,
    ) -> None:
        self.source, self.files, self.now = source, files, now
        self._seen = seen
        known = [False] * len(files) if patients is None else (patients != UNKNOWN).tolist()
        self._identified = dict(zip(files, known, strict=True))
        self._identified |= dict(zip(map(file_of, files), known, strict=True))  # of frames, their file

    def changed(self) -> Labels | None:
        """Returns the labels of all images if the file has changed; None otherwise.

        A file with a mistake is logged, and the labels stay as they are until it changes again; they also
        stay while the folder cannot be read, such as one on a network drive that comes and goes.
        """
        try:
            found = self.source.stamp()
            if found == self._seen or self.now() - found[1] / 1e9 < SETTLED:
                return None
            self._seen = found
            label = self.source.read(self._identified)
        except (UserError, OSError) as error:
            log.warning("the labels in the file cannot be used, those before stay in use: %s", error)
            return None
        if new := label.keys() - {*self.files, *map(file_of, self.files)}:
            log.info("%d images are not used before the node is restarted, such as %s", len(new), min(new))
        return np.array([label.get(name, label.get(file_of(name), -1)) for name in self.files], np.int64)
