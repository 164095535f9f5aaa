"""A site: its images, and its answers to the server. Without Flower, so that it can be tested alone.

It trains by the simulator's code, with a single client. It runs no code that the server sends: methods and
networks come from this package, or are named in the site's own copy of federation.toml.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.data.npz import Labels
from fedhassle.data.site.patients import Patients, told_apart
from fedhassle.data.split.split import Split
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.device import Engine
from fedhassle.engine.evaluate import counts_of
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.transfer import HELD
from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.build import mask_terms, own_code_in, run_settings
from fedhassle.federation.figures import own_figures
from fedhassle.federation.masks.signatures import Signer
from fedhassle.federation.messages import (
    Payload,
    count_of,
    failure,
    packed,
    to_json,
    unpacked,
    update_words,
)
from fedhassle.federation.site.images import Holding, SiteImages
from fedhassle.federation.site.leaving import AnswerLog, outward
from fedhassle.federation.site.masked import MaskedRounds
from fedhassle.federation.site.plan import PLAN, agreed_method, require_lengths
from fedhassle.method import Method, Update
from fedhassle.predict.scores import effective_images
from fedhassle.provenance import versions
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

RUNS_KEPT = 3  # recent runs whose memory a site keeps


class LostError(UserError):
    """The site no longer has what it kept for this run, and tells the server so."""


def megabytes(arrays: Mapping[str, np.ndarray]) -> float:
    """The size of arrays."""
    return sum(array.nbytes for array in arrays.values()) / 1e6


class SiteRun(NamedTuple):
    """The run that a site takes part in."""

    plan: str  # as JSON
    held: Holding
    method: Method
    simulator: Simulator


class SiteNode:
    """Answers the server's messages with a site's images; remembers the run that it was last in."""

    def __init__(
        self,
        name: str,
        agreement: Agreement,
        x: np.ndarray,
        y: np.ndarray,
        memory: Path,
        engine: Engine,
        new_labels: Callable[[], Labels | None] = lambda: None,
        patients: Patients | None = None,
        audit: Path | None = None,
        signer: Signer | None = None,
    ) -> None:
        terms = mask_terms(agreement, run_settings(agreement))
        hides = terms is not None and terms.hide
        self.images = SiteImages(name, agreement, x, y, new_labels, patients, hides)
        self.name, self.agreement, self.memory, self.engine = name, agreement, memory, engine
        self.answers = AnswerLog(audit or memory / "audit.jsonl", f"{agreement.name} at {agreement.address}")
        self.masks = None if terms is None else MaskedRounds(name, terms, signer)
        self.own = own_code_in(agreement)  # once: a file that changes later is not imported again
        self._run: SiteRun | None = None

    def answer(self, kind: str, payload: Payload) -> Payload:
        """Answers a message; errors become an answer too, and so do new labels."""
        answers: dict[str, Callable[[Payload], Payload]] = {
            "query": self.introduce,
            "train": self.train,
            "evaluate": self.evaluate,
        }
        try:
            require(kind in answers, f"unknown kind of message {kind!r}")
            self.images.notice_labels()
            with self.engine.active():
                made = answers[kind](payload)
        except Exception as error:  # tell the server in any case, or it would wait
            known = isinstance(error, UserError)
            log.error("answering a %s message failed: %s", kind, error, exc_info=not known)
            made = failure(outward(error), isinstance(error, LostError))
        counts = self.images.counts(self.images.newest)
        told = payload.words.get("counts", counts)
        made = made if told == counts else made._replace(words={**made.words, "labels": counts})
        try:
            self.answers.write(kind, payload, made)
        except OSError as error:  # what cannot be logged does not leave
            log.error("the audit log %s cannot be written: %s", self.answers.log.path, error)
            return failure(f"its audit log cannot be written: {error.strerror}")
        return made

    def _draw_for(self, run: object) -> None:
        """Draws validation images when a run begins; removes the memory of old runs."""
        if run not in (None, self.images.drawn_for):
            folder = self._memory_of(run)
            self._tidy(folder)
            self.images.draw_for(run, folder)

    def _memory_of(self, run: object) -> Path:
        """The folder of what is kept for a run."""
        sound = isinstance(run, str) and run.isalnum() and run.isascii() and len(run) <= 64
        require(sound, f"{str(run)[:64]!r} cannot name a run: expected letters and digits")
        return self.memory / str(run)

    def introduce(self, payload: Payload) -> Payload:
        """Reports the site's name and counts; logs the reason if the server refuses it."""
        if "refused" in payload.words:
            log.warning("the server refuses this site: %s", " ".join(str(payload.words["refused"]).split()))
        self.images.use_labels(None)
        self._draw_for(payload.words.get("run"))
        return Payload(
            {
                "site": self.name,
                **self.images.counts(self.images.now),
                "agreed": agreement_hash(self.agreement),
                "versions": versions() | self.own,
                **self.images.patient_counts(),
            }
        )

    def train(self, payload: Payload) -> Payload:
        """Trains for a round, or takes one of the steps of a round under masks."""
        self._draw_for(payload.words.get("run"))
        self.images.use_labels(payload.words.get("counts"))
        if self.masks is not None:
            return self.masks.answer(payload, lambda: self._trained(payload))
        asked = "step" in payload.words
        require(not asked, "the server asks for masks, which this site's federation.toml does not name")
        update, received = self._trained(payload)
        least = self._run_of(payload.words).method.unsent()
        words = update_words(update, self.agreement.data.coarse_counts)
        return Payload(words, packed(update.arrays, received if least else {}))

    def _trained(self, payload: Payload) -> tuple[Update, Arrays]:
        """Trains for a round: the update, and the vectors that it started from."""
        run, words = self._run_of(payload.words), payload.words
        t, since = count_of(words.get("round"), "round"), count_of(words.get("since"), "since")
        checkpoints = [count_of(n, "checkpoint") for n in words.get("checkpoints", [])]
        simulator, method = run.simulator, run.method
        least, memory = method.unsent(), simulator.client_state
        require_lengths(method, payload.arrays)
        # Forget what was kept in rounds that the server did not merge, whichever side was restarted.
        memory.rewind(since)
        memory.prune([*checkpoints, since])
        if least and since != memory.last(HELD + self.name, t):
            raise LostError(f"its memory of round {since} is lost; it starts afresh in the next round")
        known = simulator.transfer.known(self.name, least, t)
        message = unpacked(payload.arrays, known)
        received = {name: vector.to(self.engine.device) for name, vector in message.items()}
        began = time.perf_counter()
        (reply,) = simulator.train(method, [(run.held.client, received)], t)
        log.info(
            "round %d: trained %s in %.1f s; received %.2f MB, sends %.2f MB",
            *(t, ", ".join(reply.update.arrays) or "nothing", time.perf_counter() - began),
            *(megabytes(payload.arrays), reply.bytes_up / 1e6),
        )
        return reply.update, received

    def evaluate(self, payload: Payload) -> Payload:
        """Evaluates a model on the site's validation images."""
        self._draw_for(payload.words.get("run"))
        self.images.use_labels(payload.words.get("counts"))
        run = self._run_of(payload.words)
        dataset, rows = run.held.dataset, run.held.rows.validation
        require(len(rows) > 0, "this site has no validation images")
        require_lengths(run.method, payload.arrays)
        device = self.engine.device
        state = {name: vector.to(device) for name, vector in unpacked(payload.arrays, {}).items()}
        images, y = (torch.from_numpy(a[rows]).to(device) for a in (dataset.x_train, dataset.y_train))
        views, agreed = run.simulator.trainer.views, self.agreement.data
        keep = agreed.class_figures is not None or self.images.patients is not None
        found = counts_of(run.method, state, images, y, views, keep=keep)
        log.info(
            "round %s: evaluated the model on %d validation images", payload.words.get("round"), len(rows)
        )
        # Not by class: that would tell how many images of each class the site holds.
        count, right = self.images.reported(len(rows)), {name: sum(hit) for name, hit in found.right.items()}
        words = {"right": {k: round(n * count / len(rows)) for k, n in right.items()}, "count": count}
        if not keep:
            return Payload(words)
        shares, labels = found.logits[run.method.headline].softmax(1).cpu().numpy(), y.cpu().numpy()
        people = None if self.images.patients is None else told_apart(self.images.patients[rows])
        if people is not None:
            worth = effective_images(shares.argmax(1) == labels, people)
            words["effective"] = self.images.reported(max(1, int(worth)))
        if agreed.class_figures is None:
            return Payload(words)
        figures = own_figures(shares, labels, agreed.class_names, agreed.class_figures, people)
        return Payload({**words, "figures": figures})

    def _run_of(self, words: Mapping[str, Any]) -> SiteRun:
        """The run that a message belongs to."""
        plan = to_json({key: words.get(key) for key in PLAN})
        run = self._run
        if run is None or run.plan != plan or run.held is not self.images.now:
            run = self._run = self._begin(plan, words)
        return run

    def _begin(self, plan: str, words: Mapping[str, Any]) -> SiteRun:
        seed, folder = count_of(words["seed"], "seed"), self._memory_of(words["run"])
        held = self.images.now
        method = agreed_method(self.agreement, held.dataset, words)
        folder.mkdir(parents=True, exist_ok=True)
        split = Split((held.rows.labelled,), (held.rows.unlabelled,))
        state = ClientState(folder)
        simulator = Simulator(held.dataset, split, seed, self.engine, client_state=state, names=(self.name,))
        return SiteRun(plan, held, method, simulator)

    def _tidy(self, folder: Path) -> None:
        """Removes the memory of old runs."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.touch()
        runs = sorted(self.memory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in [path for path in runs if path.is_dir() and path != folder][RUNS_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
