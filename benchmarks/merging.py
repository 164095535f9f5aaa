"""The cost of robust merging under skew, without and with an attacker: `python -m benchmarks.merging`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fedhassle.cli.main import guarded
from fedhassle.engine.cores import on_cores
from fedhassle.engine.evaluate import score
from fedhassle.engine.rounds import Plan, Reply, federate
from fedhassle.engine.simulator import Message, Simulator
from fedhassle.engine.trainer import dataset_views
from fedhassle.errors import DivergedError
from fedhassle.files import write_json
from fedhassle.method import Method
from fedhassle.settings.build import build_dataset, build_engine, build_method, build_net, build_split
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

CLIENTS = 20  # all of them in every round
ATTACKER = "client 6"  # a partial client: 67 of the 1,200 labels of fmnist-mini
LAST = 10  # rounds whose mean accuracy counts
MERGINGS = ("mean", "trimmed", "median")


class Attacked(Simulator):
    """A simulator in which one client sends so many times the opposite of what it has learned; 0: nobody."""

    attack = 0.0

    def train(self, method: Method, messages: Sequence[Message], t: int) -> list[Reply]:
        """Trains as a simulator does."""
        sent = {client.name: arrays for client, arrays in messages}
        replies = super().train(method, messages, t)
        return [self._reply(reply, sent[reply.update.client.name]) for reply in replies]

    def _reply(self, reply: Reply, sent: dict[str, torch.Tensor]) -> Reply:
        update = reply.update
        if not self.attack or update.client.name != ATTACKER:
            return reply
        arrays = {name: sent[name] - self.attack * (v - sent[name]) for name, v in update.arrays.items()}
        return reply._replace(update=update._replace(arrays=arrays))


def measured(method: str, merging: str, attack: float, seed: int, settings: Sequence[str]) -> float:
    """The mean accuracy of the last rounds of a run, in per cent; 0 if it diverges."""
    words = [f"method={method}", f"seed={seed}", f"clients_per_round={CLIENTS}", *settings]
    words += [] if merging == "mean" else [f"method.merging={merging}"]
    chosen = resolve(request("quick", words))
    dataset, engine = build_dataset(chosen), build_engine(chosen)
    built = build_method(method, chosen.method.settings, build_net(chosen, dataset)).for_run(chosen.rounds)
    simulator = Attacked(dataset, build_split(chosen, dataset), seed, engine, chosen.threads)
    simulator.attack = attack
    views = dataset_views(dataset, engine.device)
    x, y = (torch.from_numpy(array).to(engine.device) for array in (dataset.x_test, dataset.y_test))
    state = {name: vector.to(engine.device) for name, vector in built.initial(seed).items()}
    try:
        with engine.active(), on_cores(1):
            rounds = federate(built, simulator, Plan(chosen.rounds, CLIENTS, seed), state)
            last = [done.state for done in rounds if done.t > chosen.rounds - LAST]
    except DivergedError:
        return 0.0
    found = [score(built, one, x, y, views).accuracy[built.headline] for one in last]
    return 100 * statistics.fmean(found)


def main(
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of the runs: rounds=30.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, with commas.")] = "fedavg,hassle",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    attack: Annotated[float, typer.Option(help="How many times the opposite the attacker sends.")] = 10.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Measure the accuracy with each way of merging, without and with one attacker of twenty clients."""
    rows: list[dict[str, Any]] = []
    for method in methods.split(","):
        for merging in MERGINGS:
            for strength in (0.0, attack):
                found = [measured(method, merging, strength, seed, settings or []) for seed in range(seeds)]
                rows.append({"method": method, "merging": merging, "attack": strength, "accuracy": found})
                spread = f" ± {statistics.stdev(found):.1f}" if seeds > 1 else ""
                typer.echo(f"{json.dumps(rows[-1])}  {statistics.fmean(found):.1f}{spread}")
                if as_json is not None:
                    write_json(as_json, {"settings": list(settings or []), "runs": rows})


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["--help", "-h"]})(main)
    sys.exit(guarded(app))
