"""The validation images of a run at a site: drawn when the run begins, and the same after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.patients import Patients
from fedhassle.data.site.validation import Partition, as_begun, digests_of, partition
from fedhassle.files import write_json

FILE = "validation.json"  # in the memory of a run: the digests of its validation images


def uses_in(folder: Path, x: Images, y: Labels, share: float, patients: Patients | None) -> Partition:
    """Returns the uses of a site's images in the run whose memory is in this folder.

    The run may have trained on all images but those that it began to validate on, under whatever labels.
    """
    file = folder / FILE
    if file.exists():
        return as_begun(x, y, patients, np.array(json.loads(file.read_text("ascii")), np.uint64))
    uses = partition(x, y, share, patients)
    write_json(file, digests_of(x[uses.validation]).tolist())
    return uses
