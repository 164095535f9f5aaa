"""Evaluation of a simulated run on its test images: the figures of a line of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedhassle.data.split.table import table
from fedhassle.data.views import Views
from fedhassle.engine.cores import available_cores
from fedhassle.engine.evaluate import Counts, counts_of, scores_of, shares_right
from fedhassle.engine.metrics import (
    Metric,
    Predictions,
    class_mixes,
    client_accuracy,
    measure,
    spread_of_clients,
    try_metrics,
)
from fedhassle.engine.trainer import dataset_views
from fedhassle.method import Method
from fedhassle.runs.record import BY_CLIENT, CLIENTS, LOSS, OWN, Evaluation, Metrics, by_class
from fedhassle.runs.run import Run
from fedhassle.settings.build import build_metrics
from fedhassle.vectors import Arrays


@dataclass(frozen=True)
class Evaluator:
    """The test images of a run on its device, and what is measured on them."""

    method: Method
    images: Tensor  # (N, H, W, C)
    y: Tensor  # (N,)
    views: Views
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    mixes: np.ndarray  # (K, M): the share of each class in each client's data
    metrics: Mapping[str, Metric]  # a user's own
    threads: int
    failed: set[str] = field(default_factory=set)  # metrics whose failure was logged

    def evaluate(self, state: Arrays, t: int) -> Evaluation:
        """Returns the figures of the state after round t."""
        counted = self._count(state)
        found = scores_of(self.method, counted, self.y)
        own = self._own_accuracy(counted)
        clients = spread_of_clients([*own.values()] or client_accuracy(self.mixes, found.by_class))
        more: Metrics = {LOSS: found.loss} | ({CLIENTS: clients} if clients else {})
        if own:
            more[BY_CLIENT] = own
        if self.metrics:
            more[OWN] = measure(self.metrics, self._seen(state, t, counted), self.failed)
        return Evaluation(found.accuracy, more | by_class(self.class_names, found.by_class))

    def try_metrics(self, state: Arrays) -> None:
        """Raises a `UserError` if a user's own metric does not work on these images; before training."""
        if self.metrics:
            try_metrics(self.metrics, self._seen(state, 0, self._count(state)))

    def _own_accuracy(self, counted: Counts) -> dict[str, float | None]:
        """The accuracy of each client's own prediction on its class mix; empty if clients share a model.

        None for a client that has no model yet.
        """
        own = {name: self.method.own_prediction(name) for name in self.client_names}
        if None in own.values():
            return {}
        shares = shares_right(counted, self.y)
        unknown: list[float | None] = [None] * len(self.class_names)
        found = [
            client_accuracy(mix[None], shares.get(prediction or "", unknown))[0]
            for prediction, mix in zip(own.values(), self.mixes, strict=True)
        ]
        return dict(zip(own, found, strict=True))

    def _count(self, state: Arrays) -> Counts:
        keep = bool(self.metrics)
        return counts_of(self.method, state, self.images, self.y, self.views, self.threads, keep)

    def _seen(self, state: Arrays, t: int, counted: Counts) -> Predictions:
        main = self.method.headline if self.method.headline in counted.logits else next(iter(counted.logits))
        mixes = torch.from_numpy(self.mixes).float().to(self.y.device)
        return Predictions(t, state, counted.logits, self.y, main, mixes)


def evaluator(run: Run) -> Evaluator:
    """The test images of a run, and its metrics."""
    dataset, settings = run.dataset, run.settings
    threads = min(available_cores(), run.threads * settings.workers)  # workers wait meanwhile
    return Evaluator(
        method=run.method,
        images=torch.from_numpy(dataset.x_test).to(run.device),
        y=torch.from_numpy(dataset.y_test).to(run.device),
        views=dataset_views(dataset, run.device),
        class_names=dataset.class_names,
        client_names=run.split.names,
        mixes=mixes_of(run),
        metrics=build_metrics(settings),
        threads=1 if run.device.type == "cuda" else threads,
    )


def mixes_of(run: Run) -> np.ndarray:
    """The share of each class in the data of each client of a run (K, M), as far as labels are known."""
    rows = table(run.split, run.dataset.y_train, run.dataset.classes)
    return class_mixes(np.array([np.add(row.labelled_counts, row.unlabelled_counts) for row in rows]))


def accuracy_by_client(run: Run, on_classes: Mapping[str, float | None]) -> dict[str, float | None]:
    """The accuracy on each client's class mix, by its name, from the accuracy on each class."""
    found = client_accuracy(mixes_of(run), [on_classes.get(name) for name in run.dataset.class_names])
    return dict(zip(run.split.names, found, strict=True))
