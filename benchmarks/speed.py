"""How fast rounds are on this machine: python -m benchmarks.speed [OPTIONS]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fedhassle.bench import Options, run
from fedhassle.errors import UserError


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    made.add_argument("--quick", action="store_true", help="shorter rounds, and fewer of them")
    made.add_argument("--no-scaling", action="store_true", help="leave the scaling tables out")
    made.add_argument("--no-compile", action="store_true", help="do not fuse kernels (on a GPU)")
    made.add_argument("--method", nargs="+", default=Options.methods, metavar="NAME", help="or: all")
    made.add_argument("--net", help="resnet8 (on a GPU) or lenet (on a CPU)")
    made.add_argument("--rounds", type=int, metavar="N", help="rounds to measure of each method")
    made.add_argument("--json", type=Path, metavar="PATH", help="where all figures go")
    return made


def main() -> int:
    """Runs the benchmark."""
    given = parser().parse_args()
    options = Options(
        methods=tuple(given.method),
        net=given.net,
        rounds=given.rounds,
        quick=given.quick,
        scaling=not given.no_scaling,
        compile=not given.no_compile,
        json=given.json,
    )
    try:
        run(options, Console())
    except UserError as error:
        Console(stderr=True).print(str(error), highlight=False, soft_wrap=True, markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
