"""Which images was a model trained on? A loss-threshold attack: `python -m benchmarks.membership RUN…`.

An attacker who has the model, an image and its label guesses "trained on" if the loss is below a threshold
(Yeom et al., 2018). Under (ε, δ)-differential privacy, P(guess | trained) ≤ e^ε·P(guess | not) + δ for every
attack, so what the attack achieves is a lower bound of ε, which must not exceed the one that a run claims.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer

import fedhassle
from fedhassle.cli.main import guarded
from fedhassle.data.split.split import Split
from fedhassle.losses import cross_entropy_each
from fedhassle.predict.model import TrainedModel
from fedhassle.predict.scores import auroc, wilson
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import EPSILON, read_summary

CHUNK = 2000  # images in a pass


class Attack(NamedTuple):
    """The success of an attack."""

    members: int
    others: int
    area: float  # under the ROC curve; 0.5: guessing
    advantage: float  # P(guess | trained) − P(guess | not), at the best threshold
    epsilon: float  # ε is at least this, by 95 % intervals


def attack(members: np.ndarray, others: np.ndarray, delta: float, seed: int = 0) -> Attack:
    """Attacks by the losses of images that were trained on and of others.

    The threshold is chosen on one half of both and judged on the other half.
    """
    rng = np.random.default_rng(seed)
    halves = [np.array_split(rng.permutation(losses), 2) for losses in (members, others)]
    (chosen_in, judged_in), (chosen_out, judged_out) = halves
    thresholds = np.quantile(np.concatenate([chosen_in, chosen_out]), np.linspace(0.01, 0.99, 99))
    best = max(thresholds, key=lambda loss: (chosen_in <= loss).mean() - (chosen_out <= loss).mean())
    low = max(thresholds, key=lambda loss: least_epsilon(chosen_in, chosen_out, loss, delta))
    everyone = np.concatenate([members, others])
    return Attack(
        len(members),
        len(others),
        auroc(-everyone, np.arange(len(everyone)) < len(members)),
        float((judged_in <= best).mean() - (judged_out <= best).mean()),
        least_epsilon(judged_in, judged_out, low, delta),
    )


def least_epsilon(members: np.ndarray, others: np.ndarray, loss: float, delta: float) -> float:
    """The least ε that allows a threshold's success: log((P(in) − δ) / P(out)), or that of its complement."""
    inside, outside = (wilson(int((x <= loss).sum()), len(x)) for x in (members, others))
    pairs = ((inside.low, outside.high), (1 - outside.high, 1 - inside.low))
    return max([0.0, *(math.log((p - delta) / q) for p, q in pairs if p > delta and q > 0)])


def losses_of(model: TrainedModel, mode: str, images: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The loss of each image, under one of the model's predictions."""
    found = []
    for start in range(0, len(y), CHUNK):
        part = slice(start, start + CHUNK)
        z = model.logits(images[part])[mode]
        found.append(cross_entropy_each(z, torch.from_numpy(y[part]).to(z.device)).cpu().numpy())
    return np.concatenate(found)


def attacked(path: Path) -> tuple[Attack, float, float]:
    """The attack on the model of a finished run, by its labelled images; and the ε and δ that it claims."""
    summary, folder = read_summary(path), Folder(path)
    settings = summary["settings"]
    data = fedhassle.dataset(settings["data"]["name"])
    rows = np.concatenate(Split.load(folder.split).labelled)
    model, mode = fedhassle.load(folder.model), summary["headline"]
    claimed = summary.get("privacy", {EPSILON: math.inf, "delta": 1e-5})
    inside = losses_of(model, mode, data.x_train[rows], data.y_train[rows])
    outside = losses_of(model, mode, data.x_test, data.y_test)
    return attack(inside, outside, claimed["delta"]), claimed[EPSILON], claimed["delta"]


def main(runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")]) -> None:
    """Attacks the models of finished runs, and prints what each attack achieves."""
    lines = ["| run | trained on / others | area | advantage | ε at least | ε claimed |", "|---" * 6 + "|"]
    exceeded = []
    for run in runs:
        found, epsilon, _ = attacked(run)
        claim = "∞" if math.isinf(epsilon) else f"{epsilon:.2f}"
        counts = f"{found.members:,} / {found.others:,}"
        figures = f"{found.area:.3f} | {found.advantage:.3f} | {found.epsilon:.2f} | {claim}"
        lines.append(f"| {run.name} | {counts} | {figures} |")
        exceeded += [run.name] if found.epsilon > epsilon else []
    typer.echo("\n".join(lines))
    if exceeded:
        typer.echo(f"more than was claimed: {', '.join(exceeded)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(guarded(lambda: typer.run(main)))
