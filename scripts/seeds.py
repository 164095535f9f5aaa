"""Runs methods over many seeds, side by side, and prints mean ± std and whether every model lived.

    python scripts/seeds.py results/fmnist-mini hassle fedavg --seeds 10 --jobs 2 -- paper rounds=40

What follows `--` goes to `fedhassle run`. Each run's summary is kept as FOLDER/METHOD-SEED.json; one that
is there is not run again, one that was cut goes on.
"""

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FEDHASSLE = [sys.executable, "-m", "fedhassle"]


def run(folder: Path, method: str, seed: int, words: list[str]) -> Path:
    """One run, or what is left of it; returns its summary."""
    summary = folder / f"{method}-{seed}.json"
    if not summary.exists():
        work = Path("runs") / folder.name / f"{method}-{seed}"
        start = ["run", *words, f"method={method}", f"seed={seed}", "--out", str(work)]
        begun = (work / "config.toml").exists() or (work / "request.json").exists()
        subprocess.run(
            [*FEDHASSLE, *(["resume", str(work)] if begun else start)], check=True, capture_output=True
        )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(work / "summary.json", summary)
        print(f"{method} seed {seed}: {headline(summary)}", flush=True)
    return summary


def headline(path: Path) -> str:
    """A run's accuracies in a line."""
    scores = json.loads(path.read_text())["accuracy"]
    return "  ".join(f"{name} {100 * score['mean_of_last']:.2f}" for name, score in scores.items())


def stuck(path: Path) -> list[str]:
    """The predictions that stayed at chance in the last ten evaluations."""
    run = json.loads(path.read_text())
    return [name for name in run["accuracy"] if max(m["accuracy"][name] for m in run["history"][-10:]) < 0.2]


def main() -> None:
    """Parses the command line, runs all and prints a table."""
    words = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else ["paper"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    known = parser.parse_args(sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else None)
    with ThreadPoolExecutor(known.jobs) as pool:
        jobs = [(method, seed) for method in known.methods for seed in range(known.seeds)]
        paths = list(pool.map(lambda job: run(known.folder, *job, words), jobs))
    subprocess.run(
        [*FEDHASSLE, "compare", *map(str, paths), "--picture", str(known.folder / "curves.png")], check=True
    )
    print("at chance in the last 10 evaluations:", {str(p): s for p in paths if (s := stuck(p))} or "none")


if __name__ == "__main__":
    main()
