"""Federations in one process: sites that answer, a network that loses and garbles, and a clock that flies."""

from dataclasses import dataclass, field

import numpy as np
import small

from fedhassle.data.split.split import Split
from fedhassle.engine.device import Engine
from fedhassle.federation.agreement import Agreement, DataTerms, Rules
from fedhassle.federation.flower.transport import Answer, Node, from_records, to_records
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.federation import FlowerFederation
from fedhassle.federation.server.sites import Clock, Sites
from fedhassle.federation.site.node import SiteNode
from fedhassle.settings.request import parsed

ENGINE = Engine(small.CPU)
NET = "small:ConvNet"


def terms(validation=0.0, run="", coarse=False, **rules):
    """The agreement of a federation on the images of `small.dataset`; `run`: more settings, as TOML."""
    side = small.SIDE
    data = DataTerms(("a", "b", "c", "d"), side, side, 1, (0.5,), (0.25,), False, 0, validation, coarse)
    settings = {"net": NET, **parsed(run, "run")}
    return Agreement("small", "127.0.0.1:9", data, settings, Rules(**{"timeout": 60, "wait": 120} | rules))


def held(data, split=small.SPLIT):
    """The images and labels of each client of a split, as sites hold them."""
    made = {}
    for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True):
        y = np.concatenate([data.y_train[labelled], np.full(len(unlabelled), -1)]).astype(np.int64)
        made[name] = (data.x_train[np.concatenate([labelled, unlabelled])], y)
    return made


def site(folder, name, x, y, agreed=None):
    return SiteNode(name, agreed or terms(), x, y, folder / name, ENGINE)


@dataclass
class Flying:
    """Time that passes when somebody waits."""

    time: float = 0.0

    def pause(self, seconds):
        self.time += seconds

    @property
    def clock(self):
        return Clock(lambda: self.time, self.pause)


@dataclass
class FakeGrid:
    """Nodes that answer at once, unless they are told to misbehave; all goes through Flower's records."""

    sites: dict  # by name: (kind, content) -> content
    named: bool = True  # whether keys were admitted under the sites' names
    ids: dict = field(default_factory=dict)
    since: dict = field(default_factory=dict)
    gone: set = field(default_factory=set)  # sites that are not there
    behaviour: dict = field(default_factory=dict)  # (site, kind) -> what it does in place of answering
    answers: dict = field(default_factory=dict)
    letters: list = field(default_factory=list)

    def __post_init__(self):
        # Numbers in another order than names: nothing may depend on them.
        self.ids = {name: 1000 - k for k, name in enumerate(self.sites)}

    def nodes(self):
        return [
            Node(self.ids[name], name if self.named else "", self.since.get(name, "today"))
            for name in self.sites
            if name not in self.gone
        ]

    def push(self, letters):
        return [self.send(letter) for letter in letters]

    def send(self, letter):
        number = f"letter {len(self.letters)}"
        self.letters.append(letter)
        name = next(name for name, node in self.ids.items() if node == letter.node)
        content = from_records(to_records(letter.content))
        act = self.behaviour.get((name, letter.kind), lambda answer, content: answer(content))
        made = act(lambda content: self.sites[name](letter.kind, content), content)
        if made is not None:
            self.answers[number] = made
        return number

    def pull(self, ids):
        found = [(number, self.answers.pop(number)) for number in ids if number in self.answers]
        return [
            Answer(number, None, made)
            if isinstance(made, str)
            else Answer(number, from_records(to_records(made)))
            for number, made in found
        ]


def federation(folder, method, name, data=None, agreed=None, split=small.SPLIT, settings=None):
    """A federation of the sites of a split, and its network."""
    agreed = agreed or terms()
    nodes = {
        k: site(folder, k, x, y, agreed)
        for k, (x, y) in held(small.dataset() if data is None else data, split).items()
    }
    grid = FakeGrid({k: node.answer for k, node in nodes.items()})
    sites = Sites(grid, agreed, Audit(folder / "audit.jsonl"), Flying().clock)
    plan = {"run": "abc", "method": {"name": name, **(settings or {})}, "net": NET, "seed": 0}
    return FlowerFederation(sites, plan), grid


FEW = Split(small.SPLIT.labelled[:3], small.SPLIT.unlabelled[:3])
