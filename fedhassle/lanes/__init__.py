"""Many clients at once on one GPU: their steps are recorded once per shape of job, then replayed on lanes.

`scheduling` is where to begin; `recording` follows one job through.
"""

from fedhassle.lanes.scheduling import Lanes

__all__ = ["Lanes"]
