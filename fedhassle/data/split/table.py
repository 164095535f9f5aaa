"""The table of a split: the data of each client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedhassle.data.split.layout import Holding
from fedhassle.data.split.split import Split


@dataclass(frozen=True)
class ClientRow:
    """The data of one client, as shown in tables and pictures."""

    name: str
    kind: str  # full, partial or unlabelled
    labelled: int
    unlabelled: int
    effective_labelled: float
    effective_unlabelled: float
    effective: float
    labelled_counts: tuple[int, ...]  # by class
    unlabelled_counts: tuple[int, ...]


def effective_classes(counts: npt.ArrayLike) -> float:
    """Returns the number of equal classes with the same entropy, its exp; 0 without samples."""
    n = np.asarray(counts, dtype=np.float64)
    shares = n[n > 0] / max(n.sum(), 1)
    return float(np.exp(-(shares * np.log(shares)).sum())) if shares.size else 0.0


def table(split: Split, y: npt.NDArray[np.integer], classes: int) -> list[ClientRow]:
    """Returns one row for each client; counts by class are of images whose class is known."""
    y = np.asarray(y)
    rows = []
    for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True):
        known = [y[part][y[part] >= 0] for part in (labelled, unlabelled)]
        n_l, n_u = (np.bincount(part, minlength=classes) for part in known)
        rows.append(
            ClientRow(
                name=name,
                kind=Holding(labelled.size, unlabelled.size).kind,
                labelled=labelled.size,
                unlabelled=unlabelled.size,
                effective_labelled=effective_classes(n_l),
                effective_unlabelled=effective_classes(n_u),
                effective=effective_classes(n_l + n_u),
                labelled_counts=tuple(n_l.tolist()),
                unlabelled_counts=tuple(n_u.tolist()),
            )
        )
    return rows
