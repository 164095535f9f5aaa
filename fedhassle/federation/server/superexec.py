"""Flower's SuperExec, the program that starts runs, with our log format, and with more patience."""

from __future__ import annotations

import sys

from flwr.supercore.cli import flower_superexec

from fedhassle.federation.flower.logs import log_to_output
from fedhassle.federation.flower.patches import retry_server_errors


def main() -> None:
    """Runs a SuperExec with the options of `flower-superexec`; it ends with the process that started it."""
    log_to_output(also=("flwr",))
    retry_server_errors()
    sys.argv[0] = "flower-superexec"
    flower_superexec()


if __name__ == "__main__":
    main()
