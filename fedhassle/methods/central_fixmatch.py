"""The ceiling: FixMatch where nothing is federated, all data in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedhassle.method import Method, Part
from fedhassle.methods.central import Central
from fedhassle.methods.fixmatch import FixMatch
from fedhassle.methods.fixmatch_global import FixMatchGlobal


@dataclass(frozen=True)
class CentralFixMatch(Central, FixMatch):
    """A reference: labelled and unlabelled data of all clients in one place, trained by FixMatch.

    A round has as many steps as FixMatch-global's: in FixMatch unlabelled clients would make none.
    """

    pooled: ClassVar[tuple[Part, ...]] = ("labelled", "unlabelled")

    def federated(self) -> Method:
        """FixMatch-global, which trains every client."""
        return FixMatchGlobal(self.net, self.batch, self.epochs, ratio=self.ratio)
