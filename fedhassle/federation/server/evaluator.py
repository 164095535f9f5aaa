"""Evaluates a federation's run: at the sites, on the coordinator's test images, and against its own past."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from fedhassle.data.views import make_views
from fedhassle.engine.evaluate import Scores, score
from fedhassle.engine.privacy.account import is_noisy
from fedhassle.engine.tensor_files import read_arrays, write_arrays
from fedhassle.errors import DamagedError, require
from fedhassle.federation.audit_log import Event
from fedhassle.federation.messages import PATIENTS
from fedhassle.federation.server.audit import AGREED, COUNTED, Audit
from fedhassle.federation.server.bounds import drop
from fedhassle.federation.server.federation import FlowerFederation
from fedhassle.runs.about import about_model
from fedhassle.runs.checkpoints import Checkpoint
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import BY_CLASS, LOSS, TEST_FALLBACK, Evaluation, Metrics, by_class
from fedhassle.runs.run import Run
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

Images = tuple[np.ndarray, np.ndarray]
Figures = dict[str, Any]  # by site: its accuracies, and the number of its validation images
UNDONE = "undone"  # in a line of metrics: the accuracy of a model that was not taken in
KEPT = ("sites", "test", LOSS, BY_CLASS, TEST_FALLBACK)  # of a line of metrics: about its model
MOST_UNDONE = 3  # evaluations in a row after which the run stops


class BestRound(NamedTuple):
    """The round with the best accuracy on the sites' validation images."""

    round: int
    accuracy: dict[str, float]  # by prediction


class Evaluator:
    """Evaluates the state of a run, keeps the model of the best round, and undoes rounds that spoil it.

    `start`: the checkpoint from which the run goes on.
    """

    def __init__(
        self, run: Run, federation: FlowerFederation, test: Images | None, start: Checkpoint
    ) -> None:
        self.run, self.federation, self.test = run, federation, test
        self.history, self.last = list(start.history), start.t
        best = best_so_far(run.folder)
        until = best.round if best is not None and best.round <= start.t else 0
        self.figures = latest_figures(self.history)
        self.best = latest_figures(line for line in self.history if line["round"] <= until)

    def __call__(self, state: Arrays, t: int) -> Evaluation | None:
        """Accuracy on the sites' validation images and, if the server has test images, on these and by class.

        If no site can evaluate, the test images stand in, and the metrics say so. They never choose the best
        round, or they would no longer be a test.
        """
        found, last = self.federation.evaluate(self.run.method, state, t), self.last
        self.last = t
        if found is not None and self._spoilt(found):
            return self._undone(found, t, last)
        made = self._with_tests(state, t, found)
        self.history += [] if made is None else [{"accuracy": made.accuracy, **made.more}]
        return made

    def _spoilt(self, found: Evaluation) -> bool:
        """True if the sites find a model much worse than usual."""
        before = taken_in(self.history)
        worst = self.federation.rules.worst_drop
        return drop(found.more["sites"], before, self.run.method.headline) > worst

    def _undone(self, found: Evaluation, t: int, last: int) -> Evaluation:
        """The evaluation before, for a round whose model stays; raises after several such rounds in a row."""
        headline, worst = self.run.method.headline, self.federation.rules.worst_drop
        score, allowed = 100 * found.accuracy[headline], f"rules.worst_drop={worst:g}"
        log.warning(
            "round %d is undone: %s is %.1f %%, far below what it was; the model of round %d stays (%s)",
            *(t, headline, score, self.federation.audit.taken_in(last), allowed),
        )
        self.federation.audit.write("undone", round=t, to=last, accuracy=found.accuracy)
        self.history.append({**self.history[-1], UNDONE: found.accuracy})
        require(
            not all(UNDONE in line for line in self.history[-MOST_UNDONE:]),
            f"round {t}: the model was spoilt {MOST_UNDONE} times in a row ({allowed}); earlier rounds are "
            "saved. See audit.jsonl for the sites that contributed, expel the one that spoils it or change "
            "the rule, and resume the run",
        )
        kept = {key: value for key, value in self.history[-1].items() if key in KEPT or key == UNDONE}
        return Evaluation(self.history[-1]["accuracy"], kept, undo=True)

    def _with_tests(self, state: Arrays, t: int, found: Evaluation | None) -> Evaluation | None:
        """Keeps the best model, and adds the results on the coordinator's test images."""
        if found is not None:
            self._keep_best(state, t, found)
        if self.test is None:
            return found
        tested = self._tested(state)
        found = Evaluation(tested.accuracy, {TEST_FALLBACK: True}) if found is None else found
        classes = by_class(self.run.dataset.class_names, tested.by_class)
        more = {**found.more, "test": tested.accuracy, LOSS: tested.loss, **classes}
        return Evaluation(found.accuracy, more)

    def _keep_best(self, state: Arrays, t: int, found: Evaluation) -> None:
        """Writes the model if its validation accuracy is the best so far.

        A site that did not evaluate it counts with its figures before. Otherwise a round could be the best
        because a site with difficult images is missing. Once a site is new, the best round is chosen afresh.
        Not with noise: which model is best would depend on the sites' figures, which have none.
        """
        run, headline = self.run, self.run.method.headline
        self.figures |= found.more["sites"]
        is_new = self.figures.keys() != self.best.keys()
        is_better = is_new or share(self.figures, headline) > share(self.best, headline)
        if is_better and not is_noisy(run.privacy):
            self.best = dict(self.figures)
            sites = participation(self.federation.audit)["sites"]
            words = about_model(run, sites) | {"round": t, "validation": found.accuracy}
            write_arrays(run.folder.best, run.method.model(state), words)

    def _tested(self, state: Arrays) -> Scores:
        assert self.test is not None
        data = self.run.dataset
        views = make_views(data.mean, data.std, False, 0, torch.device("cpu"))
        x, y = (torch.from_numpy(array) for array in self.test)
        return score(self.run.method, state, x, y, views)


def taken_in(history: Iterable[Metrics]) -> list[Figures]:
    """The sites' figures at each evaluation whose model was taken in."""
    return [line["sites"] for line in history if "sites" in line and UNDONE not in line]


def latest_figures(history: Iterable[Metrics]) -> Figures:
    """The figures of each site at its last evaluation."""
    return {name: site for sites in taken_in(history) for name, site in sites.items()}


def share(sites: Figures, headline: str) -> float:
    """The accuracy over the images of several sites, from the figures of each."""
    right = sum(site["accuracy"][headline] * site["count"] for site in sites.values())
    return float(right / sum(site["count"] for site in sites.values()))


def best_so_far(folder: Folder) -> BestRound | None:
    """The round of the model that a run keeps as its best; None if there is none, or its file is damaged."""
    if not folder.best.exists():
        return None
    try:
        _, words = read_arrays(folder.best)
        accuracy = {name: float(share) for name, share in words["validation"].items()}
        return BestRound(words["round"], accuracy) if words["headline"] in accuracy else None
    except (DamagedError, KeyError, TypeError, AttributeError):
        return None


def participation(audit: Audit) -> dict[str, Any]:
    """The sites in a run's summary: the images and rounds of each, and the number of sites per round."""
    joined: dict[str, Event] = {}
    for event in audit.read():
        if event["event"] in COUNTED:  # new labels change neither what is agreed nor the patients' number
            before = joined.get(event["site"], {}) if event["event"] == "relabelled" else {}
            joined[event["site"]] = {**before, **event}
    by_round = list(audit.contributors().values())
    sites = {
        name: {
            "labelled": joined[name]["labelled"],
            "unlabelled": joined[name]["unlabelled"],
            **{key: joined[name][key] for key in (*PATIENTS, AGREED) if key in joined[name]},
            "rounds": sum(name in names for names in by_round),
        }
        for name in sorted(joined)
    }
    counts = [len(names) for names in by_round] or [0]
    per_round = {"least": min(counts), "most": max(counts), "mean": statistics.fmean(counts)}
    return {"sites": sites, "sites_per_round": per_round}
