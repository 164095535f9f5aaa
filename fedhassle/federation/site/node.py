"""A site: its images, and what it answers to the server. Without Flower, so that it can be tested alone.

It trains by the code of the simulator, of which it is one with a single client. It runs no code that the
server sends: methods and networks are those of this package, or of the site's own copy of the federation's
file.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.data.split.split import Split
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.device import Engine
from fedhassle.engine.evaluate import hits
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.transfer import HELD
from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.messages import (
    Content,
    coarse,
    count_of,
    failure,
    packed,
    to_json,
    unpacked,
    update_words,
)
from fedhassle.federation.terms import dataset_of, method_settings, own_code_in
from fedhassle.method import Client, Method
from fedhassle.methods import METHODS
from fedhassle.names import find
from fedhassle.nets import NETS, Net
from fedhassle.provenance import versions
from fedhassle.settings.build import build_method
from fedhassle.settings.request import expanded

log = logging.getLogger("fedhassle")

RUNS_KEPT = 3  # runs of which a site keeps what the method has it keep: the last ones
UNSEEN = 2**64  # the digests of images are below it


class LostError(UserError):
    """What a site held for the run is gone, which the server is to know."""


class Parts(NamedTuple):
    """The rows of a site's images by what they are for."""

    labelled: np.ndarray
    unlabelled: np.ndarray
    validation: np.ndarray


def parted(x: np.ndarray, y: np.ndarray, share: float) -> Parts:
    """Labelled, unlabelled and validation rows.

    Whether an image is for validation follows from its pixels alone: it stays so when others are added, and
    of two equal images none is trained on while the other is for validation.
    """
    labelled = np.flatnonzero(y >= 0)
    digests = np.array([digest(x[row]) for row in labelled], np.uint64)
    chosen = digests < np.uint64(int(share * UNSEEN))
    if share and not chosen.any() and len(set(digests.tolist())) > 1:
        chosen = digests == digests.min()
    if chosen.all():
        chosen[:] = False  # none to train on otherwise
    return Parts(labelled[~chosen], np.flatnonzero(y < 0), labelled[chosen])


def digest(image: np.ndarray) -> int:
    """A number below 2⁶⁴ that depends on an image's pixels alone."""
    return int.from_bytes(
        hashlib.blake2b(image.tobytes(), digest_size=8, person=b"validation").digest(), "big"
    )


def megabytes(arrays: Mapping[str, np.ndarray]) -> float:
    """The size of arrays as they travel."""
    return sum(array.nbytes for array in arrays.values()) / 1e6


class Study(NamedTuple):
    """A run as a site takes part in it."""

    words: str  # the plan that it was made from
    method: Method
    simulator: Simulator


class SiteNode:
    """A site that answers; it holds its images, and what it needs to go on with the run it was last in."""

    def __init__(
        self, name: str, agreement: Agreement, x: np.ndarray, y: np.ndarray, memory: Path, engine: Engine
    ) -> None:
        agreed = agreement.data
        shape = (agreed.height, agreed.width, agreed.channels)
        require(x.shape[1:] == shape, f"the images are {x.shape[1:]}, the federation agreed on {shape}")
        require(
            len(y) == len(x) and (not len(y) or int(y.max()) < len(agreed.class_names)),
            f"labels must be below {len(agreed.class_names)}, one for each image",
        )
        self.name, self.agreement, self.memory, self.engine = name, agreement, memory, engine
        self.parts = parted(x, y, agreed.validation)
        self.dataset = dataset_of(agreement, x, y)
        self.client = Client(name, len(self.parts.labelled), len(self.parts.unlabelled))
        self.own = own_code_in(agreement)  # as it is now: a file that changes later is not imported again
        self._study: Study | None = None

    def answer(self, kind: str, content: Content) -> Content:
        """The answer to a message; what goes wrong is an answer too."""
        answers: dict[str, Callable[[Content], Content]] = {
            "query": self.introduce,
            "train": self.train,
            "evaluate": self.evaluate,
        }
        try:
            require(kind in answers, f"a message of kind {kind!r} is not known here")
            with self.engine.active():
                return answers[kind](content)
        except Exception as error:  # whatever it is, the server is told: who says nothing is waited for
            known = isinstance(error, UserError)
            log.error("a %s message could not be answered: %s", kind, error, exc_info=not known)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            return failure(why, isinstance(error, LostError))

    def introduce(self, content: Content) -> Content:
        """Who it is, and how much it holds; why the server has refused that is said here as well."""
        if "refused" in content.words:
            log.warning("the server refuses this site: %s", " ".join(str(content.words["refused"]).split()))
        return Content(
            {
                "site": self.name,
                "labelled": self._told(self.client.labelled),
                "unlabelled": self._told(self.client.unlabelled),
                "validation": self._told(len(self.parts.validation)),
                "agreed": agreement_hash(self.agreement),
                "versions": versions() | self.own,
            }
        )

    def _told(self, count: int) -> int:
        """A count as others may know it."""
        return coarse(count) if self.agreement.data.coarse_counts else count

    def train(self, content: Content) -> Content:
        """A round of local training."""
        study, words = self._taking_part(content.words), content.words
        t, since = count_of(words.get("round"), "round"), count_of(words.get("since"), "since")
        checkpoints = [count_of(n, "checkpoint") for n in words.get("checkpoints", [])]
        simulator, method = study.simulator, study.method
        least, memory = method.unsent(), simulator.client_state
        # What was kept in rounds that did not count is forgotten, whoever of both ends was restarted.
        memory.rewind(since)
        memory.prune([*checkpoints, since])
        if least and since != memory.last(HELD + self.name, t):
            raise LostError(f"what it held after round {since} is gone; it can begin anew")
        known = simulator.transfer.known(self.name, least, t)
        message = unpacked(content.arrays, known)
        there = {name: vector.to(self.engine.device) for name, vector in message.items()}
        began = time.perf_counter()
        (reply,) = simulator.train(method, [(self.client, there)], t)
        arrays = packed(reply.update.arrays, there if least else {})
        log.info(
            "round %d: trained %s in %.1f s; received %.2f MB, sends %.2f MB",
            *(t, ", ".join(reply.update.arrays) or "nothing", time.perf_counter() - began),
            *(megabytes(content.arrays), megabytes(arrays)),
        )
        return Content(update_words(reply.update), arrays)

    def evaluate(self, content: Content) -> Content:
        """How a model does on the site's validation images."""
        study, rows = self._taking_part(content.words), self.parts.validation
        require(len(rows) > 0, "there are no validation images here")
        device = self.engine.device
        state = {name: vector.to(device) for name, vector in unpacked(content.arrays, {}).items()}
        images, y = (
            torch.from_numpy(a[rows]).to(device) for a in (self.dataset.x_train, self.dataset.y_train)
        )
        found = hits(study.method, state, images, y, study.simulator.views)
        log.info(
            "round %s: evaluated the model on %d validation images", content.words.get("round"), len(rows)
        )
        told = self._told(len(rows))
        return Content({"right": {k: round(n * told / len(rows)) for k, n in found.items()}, "count": told})

    def _taking_part(self, words: Mapping[str, Any]) -> Study:
        """The run that a message belongs to."""
        plan = to_json({key: words.get(key) for key in ("run", "method", "net", "seed")})
        if self._study is None or self._study.words != plan:
            self._study = self._begin(plan, words)
        return self._study

    def _begin(self, plan: str, words: Mapping[str, Any]) -> Study:
        run, seed = str(words["run"]), count_of(words["seed"], "seed")
        require(run.isalnum() and run.isascii() and len(run) <= 64, f"the run has the odd name {run[:64]!r}")
        method = self._method(dict(words["method"]), str(words["net"]))
        folder = self.memory / run
        self._tidy(folder)
        split = Split((self.parts.labelled,), (self.parts.unlabelled,))
        simulator = Simulator(
            self.dataset, split, seed, self.engine, client_state=ClientState(folder), names=(self.name,)
        )
        return Study(plan, method, simulator)

    def _method(self, settings: dict[str, Any], net: str) -> Method:
        """The run's method; one that is not of this package only if the site has agreed to it."""
        name, run = str(settings["name"]), expanded(dict(self.agreement.run))
        agreed = {"method": run.get("method", {}).get("name"), "net": run.get("net")}
        for what, wanted, known in (("method", name, METHODS), ("net", net, NETS)):
            require(
                wanted in known or wanted == agreed[what],
                f"the server asks for the {what} {wanted!r}, which is not in this site's federation file",
            )
        built = Net(find(net, NETS, "network"), self.dataset.shape, self.dataset.classes)
        return build_method(name, method_settings(settings), built)

    def _tidy(self, folder: Path) -> None:
        """Removes what was kept of runs that are long past."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.touch()
        runs = sorted(self.memory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in [path for path in runs if path.is_dir() and path != folder][RUNS_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
