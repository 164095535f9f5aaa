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

from fedhassle.data.dataset import Dataset
from fedhassle.data.npz import Labels
from fedhassle.data.site.patients import UNKNOWN, Patients, count_patients, told_apart
from fedhassle.data.site.validation import Partition, partition, relabelled
from fedhassle.data.split.split import Split
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.device import Engine
from fedhassle.engine.evaluate import counts_of
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.transfer import HELD
from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.build import dataset_of, mask_terms, own_code_in, run_settings
from fedhassle.federation.figures import own_figures
from fedhassle.federation.masks.signatures import Signer
from fedhassle.federation.messages import (
    Payload,
    coarse,
    count_of,
    failure,
    packed,
    to_json,
    unpacked,
    update_words,
)
from fedhassle.federation.site.begun import uses_in
from fedhassle.federation.site.leaving import AnswerLog, outward
from fedhassle.federation.site.masked import MaskedRounds
from fedhassle.federation.site.plan import PLAN, agreed_method, require_lengths
from fedhassle.method import Client, Method, Update
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
    method: Method
    simulator: Simulator


class Holding(NamedTuple):
    """A site's images under one set of labels."""

    dataset: Dataset
    rows: Partition
    client: Client


class SiteNode:
    """Answers the server's messages with a site's images; remembers the run that it was last in.

    `new_labels` returns the labels of all images if they have changed since it was last called.
    """

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
        agreed = agreement.data
        shape = (agreed.height, agreed.width, agreed.channels)
        require(x.shape[1:] == shape, f"the images have shape {x.shape[1:]}, but {shape} is agreed")
        self.name, self.agreement, self.memory, self.engine = name, agreement, memory, engine
        self.patients = patients
        self._uses = partition(x, y, agreed.validation, patients)
        self.answers = AnswerLog(audit or memory / "audit.jsonl", f"{agreement.name} at {agreement.address}")
        self.dataset, self.rows, self.client = self._holding(x, y)
        terms = mask_terms(agreement, run_settings(agreement))
        self.masks = None if terms is None else MaskedRounds(name, terms, signer)
        self.own = own_code_in(agreement)  # once: a file that changes later is not imported again
        self._new_labels = new_labels
        self._next: Holding | None = None  # with labels that the server does not count yet
        self._run: SiteRun | None = None
        self._drawn_for: object = None  # the run for which validation images were drawn last

    def _holding(self, x: np.ndarray, y: Labels) -> Holding:
        """The site's images with these labels; none that may have been trained on goes to validation."""
        agreed = self.agreement.data
        require(
            len(y) == len(x) and (not len(y) or int(y.max()) < len(agreed.class_names)),
            f"expected one label below {len(agreed.class_names)} for each image",
        )
        rows = relabelled(self._uses, y)
        client = Client(self.name, len(rows.labelled), len(rows.unlabelled))
        return Holding(dataset_of(self.agreement, x, y), rows, client)

    def answer(self, kind: str, payload: Payload) -> Payload:
        """Answers a message; errors become an answer too, and so do new labels."""
        answers: dict[str, Callable[[Payload], Payload]] = {
            "query": self.introduce,
            "train": self.train,
            "evaluate": self.evaluate,
        }
        try:
            require(kind in answers, f"unknown kind of message {kind!r}")
            self._notice_labels()
            with self.engine.active():
                made = answers[kind](payload)
        except Exception as error:  # tell the server in any case, or it would wait
            known = isinstance(error, UserError)
            log.error("answering a %s message failed: %s", kind, error, exc_info=not known)
            made = failure(outward(error), isinstance(error, LostError))
        counts = self._counts(self._next or self._now)
        told = payload.words.get("counts", counts)
        made = made if told == counts else made._replace(words={**made.words, "labels": counts})
        try:
            self.answers.write(kind, payload, made)
        except OSError as error:  # what cannot be logged does not leave
            log.error("the audit log %s cannot be written: %s", self.answers.log.path, error)
            return failure(f"its audit log cannot be written: {error.strerror}")
        return made

    @property
    def _now(self) -> Holding:
        return Holding(self.dataset, self.rows, self.client)

    def _notice_labels(self) -> None:
        """Keeps new labels for the time when the server counts them."""
        y = self._new_labels()
        if y is not None:
            y = self._without_strangers(y)
            self._next = self._holding(self.dataset.x_train, y)
            log.info("the labels have changed: %s", self._counts(self._next))

    def _without_strangers(self, y: Labels) -> Labels:
        """Labels without the new ones of images whose patient was not known at the start.

        Such a patient may be one of validation; a restart finds out.
        """
        if self.patients is None:
            return y
        new = (y >= 0) & (self.dataset.y_train < 0) & (self.patients == UNKNOWN)
        if new.any():
            why = "their patients were not known at its start"
            log.warning("%d new labels are not used before the node is restarted: %s", new.sum(), why)
        return np.where(new, -1, y)

    def _use_labels(self, counts: object) -> None:
        """Uses the labels that the server counts: new ones as soon as it does, never others than these."""
        if self._next is not None and counts in (None, self._counts(self._next)):
            (self.dataset, self.rows, self.client), self._next = self._next, None
            self._run = None
            log.info("the new labels are in use")
        known = counts in (None, self._counts(self._now))
        require(known, "its labels have changed; it takes part again when the server has counted them")

    def _draw_for(self, run: object) -> None:
        """Draws validation images when a run begins, and the same ones after a restart in its middle."""
        if run in (None, self._drawn_for):
            return
        folder, x, y = self._memory_of(run), self.dataset.x_train, self.dataset.y_train
        self._tidy(folder)
        self._uses = uses_in(folder, x, y, self.agreement.data.validation, self.patients)
        self.dataset, self.rows, self.client = self._holding(x, y)
        if self._next is not None:
            self._next = self._holding(x, self._next.dataset.y_train)
        self._run, self._drawn_for = None, run

    def _memory_of(self, run: object) -> Path:
        """The folder of what is kept for a run."""
        sound = isinstance(run, str) and run.isalnum() and run.isascii() and len(run) <= 64
        require(sound, f"{str(run)[:64]!r} cannot name a run: expected letters and digits")
        return self.memory / str(run)

    def _counts(self, held: Holding) -> dict[str, int]:
        """The numbers of images that the server may know: coarse if that is agreed, 1 if they are hidden."""
        hidden = self._hides
        return {
            "labelled": 1 if hidden else self._reported(held.client.labelled),
            "unlabelled": 1 if hidden else self._reported(held.client.unlabelled),
            "validation": self._reported(len(held.rows.validation)),
        }

    @property
    def _hides(self) -> bool:
        """True if sites hide how many images they have."""
        return self.masks is not None and self.masks.terms.hide

    def introduce(self, payload: Payload) -> Payload:
        """Reports the site's name and counts; logs the reason if the server refuses it."""
        if "refused" in payload.words:
            log.warning("the server refuses this site: %s", " ".join(str(payload.words["refused"]).split()))
        self._use_labels(None)
        self._draw_for(payload.words.get("run"))
        return Payload(
            {
                "site": self.name,
                **self._counts(self._now),
                "agreed": agreement_hash(self.agreement),
                "versions": versions() | self.own,
                **self._patients(),
            }
        )

    def _patients(self) -> dict[str, int]:
        """The numbers of patients as they leave the site; none if it knows none, or hides its counts."""
        if self.patients is None or self._hides:
            return {}
        used = np.concatenate(self.rows)
        return {
            "patients": self._reported(count_patients(self.patients[used])),
            "validation_patients": self._reported(count_patients(self.patients[self.rows.validation])),
        }

    def _reported(self, count: int) -> int:
        """A count as it leaves the site: coarse if that is agreed."""
        return coarse(count) if self.agreement.data.coarse_counts else count

    def train(self, payload: Payload) -> Payload:
        """Trains for a round, or takes one of the steps of a round under masks."""
        self._draw_for(payload.words.get("run"))
        self._use_labels(payload.words.get("counts"))
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
        (reply,) = simulator.train(method, [(self.client, received)], t)
        log.info(
            "round %d: trained %s in %.1f s; received %.2f MB, sends %.2f MB",
            *(t, ", ".join(reply.update.arrays) or "nothing", time.perf_counter() - began),
            *(megabytes(payload.arrays), reply.bytes_up / 1e6),
        )
        return reply.update, received

    def evaluate(self, payload: Payload) -> Payload:
        """Evaluates a model on the site's validation images."""
        self._draw_for(payload.words.get("run"))
        self._use_labels(payload.words.get("counts"))
        run, rows = self._run_of(payload.words), self.rows.validation
        require(len(rows) > 0, "this site has no validation images")
        require_lengths(run.method, payload.arrays)
        device = self.engine.device
        state = {name: vector.to(device) for name, vector in unpacked(payload.arrays, {}).items()}
        images, y = (
            torch.from_numpy(a[rows]).to(device) for a in (self.dataset.x_train, self.dataset.y_train)
        )
        views, agreed = run.simulator.trainer.views, self.agreement.data
        keep = agreed.class_figures is not None or self.patients is not None
        found = counts_of(run.method, state, images, y, views, keep=keep)
        log.info(
            "round %s: evaluated the model on %d validation images", payload.words.get("round"), len(rows)
        )
        # Not by class: that would tell how many images of each class the site holds.
        count, right = self._reported(len(rows)), {name: sum(hit) for name, hit in found.right.items()}
        words = {"right": {k: round(n * count / len(rows)) for k, n in right.items()}, "count": count}
        if not keep:
            return Payload(words)
        shares, labels = found.logits[run.method.headline].softmax(1).cpu().numpy(), y.cpu().numpy()
        people = None if self.patients is None else told_apart(self.patients[rows])
        if people is not None:
            worth = effective_images(shares.argmax(1) == labels, people)
            words["effective"] = self._reported(max(1, int(worth)))
        if agreed.class_figures is None:
            return Payload(words)
        figures = own_figures(shares, labels, agreed.class_names, agreed.class_figures, people)
        return Payload({**words, "figures": figures})

    def _run_of(self, words: Mapping[str, Any]) -> SiteRun:
        """The run that a message belongs to."""
        plan = to_json({key: words.get(key) for key in PLAN})
        if self._run is None or self._run.plan != plan:
            self._run = self._begin(plan, words)
        return self._run

    def _begin(self, plan: str, words: Mapping[str, Any]) -> SiteRun:
        seed, folder = count_of(words["seed"], "seed"), self._memory_of(words["run"])
        method = agreed_method(self.agreement, self.dataset, words)
        folder.mkdir(parents=True, exist_ok=True)
        split = Split((self.rows.labelled,), (self.rows.unlabelled,))
        simulator = Simulator(
            self.dataset, split, seed, self.engine, client_state=ClientState(folder), names=(self.name,)
        )
        return SiteRun(plan, method, simulator)

    def _tidy(self, folder: Path) -> None:
        """Removes the memory of old runs."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.touch()
        runs = sorted(self.memory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in [path for path in runs if path.is_dir() and path != folder][RUNS_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
