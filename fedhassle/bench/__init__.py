"""How fast rounds are: against a plain training loop, against the device, and as they grow."""

from fedhassle.bench.benchmark import Options, Size, run

__all__ = ["Options", "Size", "run"]
