"""Federations in one process: sites, a transport that can lose messages, and a clock that jumps."""

from dataclasses import dataclass, field, replace

import numpy as np
import small

from fedhassle.data.split.split import Split
from fedhassle.engine.device import Engine
from fedhassle.federation.agreement import Agreement, DataTerms, Rules
from fedhassle.federation.build import (
    agreed_method,
    empty_dataset,
    mask_terms,
    run_settings,
    with_settings_of,
)
from fedhassle.federation.flower.transport import Answer, ConnectedNode, from_records, to_records
from fedhassle.federation.messages import Payload
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.federation import FlowerFederation
from fedhassle.federation.server.sites import Clock, Sites
from fedhassle.federation.site.node import SiteNode
from fedhassle.settings.build import build_method, build_privacy
from fedhassle.settings.request import parsed

ENGINE = Engine(small.CPU)
NET = "small:ConvNet"
SHORT = {"batch": 8, "epochs": 1}
FEW = Split(small.SPLIT.labelled[:3], small.SPLIT.unlabelled[:3])


def terms(validation=0.0, run="", coarse=False, **rules):
    """The agreement of a federation on the images of `small.dataset`; `run`: more settings, as TOML."""
    side = small.SIDE
    data = DataTerms(("a", "b", "c", "d"), side, side, 1, (0.5,), (0.25,), False, 0, validation, coarse)
    settings = {"net": NET, **parsed(run, "run")}
    # One of these few sites has more than half of all labels: counts are believed, as in a simulation.
    common = {"timeout": 60, "wait": 120, "largest_share": 1.0}
    return Agreement("small", "127.0.0.1:9", data, settings, Rules(**common | rules))


def settings_of(name):
    """Settings with which few steps use all that a method has."""
    return {**SHORT, **small.TELLING.get(name, {})}


def method_named(name, **settings):
    """A method on the small network."""
    return build_method(name, {**settings_of(name), **settings}, small.net())


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
    """A clock that advances only when somebody waits."""

    time: float = 0.0

    def pause(self, seconds):
        self.time += seconds

    @property
    def clock(self):
        return Clock(lambda: self.time, self.pause)


@dataclass
class FakeTransport:
    """Nodes that answer at once, unless they are told to misbehave; all messages pass Flower's records."""

    sites: dict  # by name: (kind, payload) -> payload
    named: bool = True  # keys were admitted under the sites' names
    ids: dict = field(default_factory=dict)
    since: dict = field(default_factory=dict)
    images: dict = field(default_factory=dict)  # by name: the most that a site was admitted with
    gone: set = field(default_factory=set)  # sites that are offline
    behaviour: dict = field(default_factory=dict)  # by (site, kind): a function that answers instead
    answers: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)
    arrays_up: list = field(default_factory=list)  # of the answers to training

    def __post_init__(self):
        # Numbers in another order than names: nothing may depend on them.
        self.ids = {name: 1000 - k for k, name in enumerate(self.sites)}

    def nodes(self):
        return [
            ConnectedNode(
                self.ids[name],
                name if self.named else "",
                self.since.get(name, "today"),
                self.images.get(name),
            )
            for name in self.sites
            if name not in self.gone
        ]

    def push(self, requests):
        return [self.send(request) for request in requests]

    def send(self, request):
        number = f"request {len(self.requests)}"
        self.requests.append(request)
        name = next(name for name, node in self.ids.items() if node == request.node)
        payload = from_records(to_records(request.payload))
        act = self.behaviour.get((name, request.kind), lambda answer, payload: answer(payload))
        made = act(lambda payload: self.sites[name](request.kind, payload), payload)
        if made is not None:
            self.answers[number] = made
        if request.kind == "train" and isinstance(made, Payload):
            self.arrays_up.append(made.arrays)
        return number

    def pull(self, ids):
        found = [(number, self.answers.pop(number)) for number in ids if number in self.answers]
        return [
            Answer(number, None, made)
            if isinstance(made, str)
            else Answer(number, from_records(to_records(made)))
            for number, made in found
        ]


def deaf(answer, payload):
    """Answers as a site does that has lied about its counts, and hears of no others."""
    return answer(payload._replace(words={k: v for k, v in payload.words.items() if k != "counts"}))


def network(folder, agreed, split=FEW):
    """The sites of a split, and their transport."""
    nodes = {k: site(folder, k, x, y, agreed) for k, (x, y) in held(small.dataset(), split).items()}
    return FakeTransport({k: node.answer for k, node in nodes.items()})


def federation(folder, name, agreed=None, split=small.SPLIT, **settings):
    """A method, a federation of the sites of a split that trains it, and its transport."""
    agreed = agreed_on(name, agreed, **settings)
    transport = network(folder, agreed, split)
    sites = Sites(transport, agreed, Audit(folder / "audit.jsonl"), Flying().clock)
    method, plan = planned(agreed)
    made = run_settings(agreed)
    protection = None, mask_terms(agreed, made), build_privacy(made)
    return method, FlowerFederation(sites, plan, *protection), transport


def agreed_on(name, agreed=None, **settings):
    """An agreement on a method, with settings with which few steps use all that it has."""
    agreed = agreed or terms()
    method = {"name": name, **settings_of(name), **settings}
    return replace(agreed, run={"rounds": 1, **agreed.run, "method": method})


def planned(agreed):
    """The method of an agreement, and the plan that the server sends with every message."""
    settings, dataset = run_settings(agreed), empty_dataset(agreed)
    method = agreed_method(settings, dataset)
    words = with_settings_of(method, settings).method.model_dump()
    return method, {"run": "abc", "method": words, "net": NET, "seed": 0, "rounds": settings.rounds}
