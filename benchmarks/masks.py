"""What masks cost: bytes and seconds of a round beside plain ones, for 3, 10 and 50 sites.

`python -m benchmarks.masks`: the messages and the arithmetic of rounds in one process, without training and
without a network; models are those of a partial site of HASSLE with LeNet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, NamedTuple

import torch
import typer

from fedhassle.cli.main import guarded
from fedhassle.federation.masks.contribution import MaskTerms
from fedhassle.federation.messages import Failure, Payload, packed, read_update, update_words
from fedhassle.federation.server.masked import MaskedRound, size_of
from fedhassle.federation.server.sites import Answers
from fedhassle.federation.site.masked import MaskedRounds
from fedhassle.method import Client, Update, average
from fedhassle.methods.hassle import Hassle
from fedhassle.nets import NETS, Net
from fedhassle.vectors import Arrays

DROPPED = 0.1  # share of the sites that drop out before they send their vectors
REPEATS = 3
PLAN = {"run": "benchmark"}


class Cost(NamedTuple):
    """The costs of a round."""

    sites: int
    kind: str
    up: float  # MB of a site
    down: float
    site: float  # seconds of a site, mean
    server: float  # seconds of the server


class Sites:
    """Sites in this process whose seconds are counted; some drop out."""

    def __init__(self, update: Mapping[str, Update], start: Arrays, dropped: int) -> None:
        self.update, self.start = update, start
        self.nodes = {name: MaskedRounds(name, MaskTerms()) for name in update}
        self.gone = list(update)[:dropped]
        self.seconds = 0.0

    def ask(self, payloads: Mapping[str, Payload]) -> Answers:
        """The answers of all sites that are left."""
        began = time.perf_counter()
        here = {n: p for n, p in payloads.items() if n not in self.gone or p.words["step"] != "vectors"}
        found: Answers = {n: self.nodes[n].answer(p, partial(self._trained, n)) for n, p in here.items()}
        self.seconds += time.perf_counter() - began
        return found | {n: Failure("killed") for n in payloads if n not in here}

    def _trained(self, name: str) -> tuple[Update, Arrays]:
        return self.update[name], self.start


def costs(sites: int) -> list[Cost]:
    """The costs of a plain round, of one under masks, and of one in which sites drop out."""
    method = Hassle(Net(NETS["lenet"], (1, 28, 28), 10))
    state = method.initial(0)
    clients = [Client(f"site {k:02}", 100, 100) for k in range(sites)]
    trained = [name for phase in method.phases(clients[0], 1) for name in phase.trained]
    start = {name: state[name] for name in trained}
    samples = dict.fromkeys(trained, 100)
    losses = {name: torch.zeros(1) for name in trained}
    changed = {name: vector + 0.01 for name, vector in start.items()}
    updates = {client.name: Update(client, changed, samples, losses) for client in clients}
    message = Payload({**PLAN, "round": 1}, packed(method.message(state, clients[0], 1), {}))
    began = time.perf_counter()
    answers = {n: Payload(update_words(u), packed(u.arrays, {})) for n, u in updates.items()}
    sent = time.perf_counter() - began
    read = [read_update(answers[c.name], method, c, method.message(state, c, 1), 1) for c in clients]
    average(read)
    server = time.perf_counter() - began - sent
    up, down = size_of(next(iter(answers.values()))) / 1e6, size_of(message) / 1e6
    found = [Cost(sites, "plain", up, down, sent / sites, server)]
    some = max(1, int(DROPPED * sites))
    for kind, dropped in (("masks", 0), (f"masks, {some} dropped", some)):
        here = Sites(updates, start, dropped)
        going = MaskedRound(here.ask, MaskTerms(), PLAN, 1)
        began = time.perf_counter()
        done = going.run(method, clients, dict.fromkeys(updates, message), start, 1.0)
        server = time.perf_counter() - began - here.seconds
        left = done.contributed
        up, down = (sum(of[n] for n in left) / len(left) / 1e6 for of in (done.up, done.down))
        found.append(Cost(sites, kind, up, down, here.seconds / sites, server))
    return found


def main(
    sites: Annotated[list[int] | None, typer.Argument(help="Numbers of sites (default: 3 10 50).")] = None,
) -> None:
    """Measures rounds in one process and one thread, each three times, and prints the shortest."""
    torch.set_num_threads(1)
    heading = ("sites", "round", "MB up a site", "MB down a site", "s a site", "s at the server")
    typer.echo(f"| {' | '.join(heading)} |\n" + "|---" * len(heading) + "|")
    for n in sites or [3, 10, 50]:
        for times in zip(*(costs(n) for _ in range(REPEATS)), strict=True):
            cost = min(times, key=lambda one: one.site + one.server)
            figures = f"{cost.up:.2f} | {cost.down:.2f} | {cost.site:.3f} | {cost.server:.3f}"
            typer.echo(f"| {cost.sites} | {cost.kind} | {figures} |")


if __name__ == "__main__":
    sys.exit(guarded(lambda: typer.run(main)))
