"""Training a run to its end: rounds, metrics, checkpoints, and the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from fedhassle.data.dataset import Dataset
from fedhassle.data.site.identical import trained_on
from fedhassle.data.split.split import pooled
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.cluster import LOCAL, connected
from fedhassle.engine.cores import on_cores
from fedhassle.engine.device import Engine
from fedhassle.engine.evaluate import check_headline, check_predictions
from fedhassle.engine.privacy.account import Guarantee, is_noisy
from fedhassle.engine.ray_federation import RayFederation
from fedhassle.engine.rounds import Federation, Plan, federate
from fedhassle.engine.simulator import Simulator
from fedhassle.engine.tensor_files import round_files, write_arrays
from fedhassle.errors import UserError
from fedhassle.files import locked, write_json, write_text
from fedhassle.method import Method
from fedhassle.runs.about import about_model, about_run
from fedhassle.runs.card import model_card
from fedhassle.runs.checkpoints import (
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from fedhassle.runs.curves import draw_curves
from fedhassle.runs.evaluation import Evaluator, accuracy_by_client, evaluator
from fedhassle.runs.folder import Folder, release, resume_command
from fedhassle.runs.logs import log_to_file
from fedhassle.runs.record import (
    BY_CLASS,
    BY_CLIENT,
    CLIENTS,
    EPSILON,
    FINAL_MEANS,
    Evaluation,
    Metrics,
    Step,
    Tally,
    final_means,
    final_scores,
    metrics_line,
    shortened,
)
from fedhassle.runs.resume import initial_state, resumed
from fedhassle.runs.run import Run, write_settings
from fedhassle.runs.seeds import grouped
from fedhassle.runs.trackers import tracking
from fedhassle.settings.build import build_engine
from fedhassle.settings.hashing import own_code_of
from fedhassle.settings.request import flat
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

Evaluate = Callable[[Arrays, int], Evaluation | None]
"""A function that evaluates the state after a round."""

SHARED_LANES = 24  # of all runs that share a GPU; a run alone has as many as its settings say


def train_run(run: Run, sharing: int = 1) -> Generator[Step]:
    """Trains a run in a simulator to its end, round by round, then writes its result.

    `sharing`: the number of runs that share the process and its GPU, this one included.
    """
    memory = ClientState(run.folder.memory)
    engine = build_engine(run.settings)
    if sharing > 1:
        engine = engine._replace(lanes=min(engine.lanes, max(1, SHARED_LANES // sharing)))
    evaluation = evaluator(run)
    try_out(run, evaluation)

    with (
        locked(run.folder.path),
        log_to_file(run.folder.log, sharing == 1, run.name),
        engine.active(),
        on_cores(1),  # clients run side by side instead: `side_by_side` says why
    ):
        start = resumed(run, may_grow=True)
        memory.require(start.kept or {})
        write_settings(run)
        with simulated(run, engine, memory) as federation:
            yield from train_in_federation(run, federation, evaluation.evaluate, start)


def try_out(run: Run, evaluation: Evaluator) -> None:
    """Refuses predictions or metrics that do not work, before anything trains; a new run leaves no folder."""
    state = initial_state(run.method, run.plan.seed, run.device)
    try:
        require_predictions(run, state)
        evaluation.try_metrics(state)
    except Exception:
        if not run.folder.config.exists():
            release(run.folder)
        raise


def require_predictions(run: Run, state: Arrays) -> None:
    """Refuses a method whose predictions cannot be evaluated."""
    blank = torch.zeros(2, *run.dataset.shape, device=run.device)
    check_predictions(run.method, state, blank, run.dataset.classes)


@contextmanager
def simulated(run: Run, engine: Engine, memory: ClientState) -> Iterator[Federation]:
    """The clients of a run: in this process, or on the workers of a Ray cluster."""
    settings, dataset = run.settings, run.dataset
    split = pooled(run.split, run.method.pooled) if run.method.pooled else run.split
    common = dataset, split, settings.seed, engine, run.threads
    if not settings.distributed:
        yield Simulator(*common, memory)
        return
    with (
        connected(settings.ray or LOCAL, dataset.x_train.nbytes),
        closing(
            RayFederation(
                *(*common, settings.workers, memory, own_code_of(settings)), whole=run.privacy is not None
            )
        ) as federation,
    ):
        yield federation


def train_in_federation(
    run: Run,
    federation: Federation,
    evaluate: Evaluate,
    start: Checkpoint,
    about: Metrics | None = None,
    participation: Callable[[], Metrics] | None = None,
) -> Iterator[Step]:
    """Trains the rounds of a run, simulated or real, after a checkpoint, then writes its result.

    `about`: entries of the summary that add to or replace the usual ones. `participation`: called at the end
    of a real federation's run, returns what the summary says about its sites.
    """
    for note in run.split.notes:
        log.info("split: %s", note)
    tell_copies(run.dataset)
    tell_privacy(run)
    every, origin = run.settings.evaluate_every, about_run(run) | (about or {})
    require_predictions(run, start.state)
    with tracking(run.settings.track or (), run.folder) as trackers:
        parameters = dict(flat(origin["settings"])) | {"settings_hash": origin["settings_hash"]}
        trackers.begin(parameters, start.history)
        for step in train_rounds(run.folder, run.method, federation, run.plan, evaluate, every, start):
            if step.metrics is not None:
                trackers.evaluated(step.metrics)
            yield step
        sites = participation() if participation is not None else {}
        trackers.end(write_result(run, origin | sites, about_model(run, sites.get("sites"))))


def train_rounds(
    folder: Folder,
    method: Method,
    federation: Federation,
    plan: Plan,
    evaluate: Evaluate,
    evaluate_every: int,
    start: Checkpoint,
) -> Iterator[Step]:
    """Trains the rounds after a checkpoint, with metrics and new checkpoints; yields after every round.

    If an evaluation returns None, as when no site can evaluate, there is no line of metrics. If it says that
    the rounds since the last one are undone, the next round starts from the state of that one.
    """
    history, tally = start.history, Tally(method)
    clock = time.perf_counter()
    state, rounds = start.state, federate(method, federation, plan, start.state, start.t + 1)
    while (done := next(rounds, None)) is not None:
        tally.add(done)
        metrics = None
        if done.t % evaluate_every == 0 or done.t == plan.rounds:
            found = evaluate(done.state, done.t)
            if found is not None:
                check_headline(method, found.accuracy)
                metrics = tally.metrics(done.t, found, time.perf_counter() - clock)
                metrics |= spending(plan.privacy, done.t)
                clock, tally = time.perf_counter(), Tally(method)
                history = [*history, metrics]
                with folder.metrics.open("a", encoding="utf-8") as file:
                    file.write(metrics_line(metrics))
            if found is not None and found.undo:
                rounds = federate(method, federation, plan, state, done.t + 1)
            else:
                state = done.state
            made = Checkpoint(done.t, state, history, start.settings, federation.kept())
            save_checkpoint(folder.checkpoints, made)
            federation.prune(list(round_files(folder.checkpoints)))
        merged = {reply.update.client.name for reply in done.replies}
        yield Step(done.t, tuple(client for client in done.clients if client.name in merged), metrics)
    federation.prune(list(round_files(folder.checkpoints)))  # if the last checkpoint's process was killed


def spending(privacy: Guarantee | None, t: int) -> Metrics:
    """The entries of a line of metrics with ε after round t, and δ, if the run has noise."""
    if privacy is None or not is_noisy(privacy):
        return {}
    return {EPSILON: privacy.epsilon(t), "delta": privacy.delta}


def tell_copies(dataset: Dataset) -> None:
    """Logs how many test images of a user's own data are training images too."""
    for note in trained_on(dataset.x_test, dataset.x_train) if dataset.content is not None else ():
        log.warning("%s", note)


def tell_privacy(run: Run) -> None:
    """Logs the noise of a run, and a budget that ends it early."""
    privacy = run.privacy
    if privacy is None or not is_noisy(privacy):
        return
    log.info(
        "privacy by %s: noise %.3g, %s clipped to %g; ε = %.3g at δ = %g after %d rounds",
        *(
            privacy.unit,
            privacy.noise,
            privacy.protects,
            privacy.clip,
            privacy.epsilon(run.rounds),
            privacy.delta,
            run.rounds,
        ),
    )
    if run.rounds < run.settings.rounds:
        log.warning(
            "privacy: the run ends after round %d of %d, since another would spend more than ε = %g",
            *(run.rounds, run.settings.rounds, run.settings.privacy.epsilon),
        )


def write_result(run: Run, origin: Metrics, about: dict[str, Any]) -> Metrics:
    """Writes the model of the last checkpoint, its card, the curves and the summary, which it returns."""
    folder, method = run.folder, run.method
    last = load_checkpoint(folder.checkpoints, torch.device("cpu"))
    t = 0 if last is None else last.t
    if last is None or t != run.rounds:
        raise UserError(
            f"{folder.path} has {run.rounds} rounds, but its newest undamaged checkpoint is of round {t}: "
            f"resume it with {resume_command(folder)}"
        )
    if not last.history:
        raise UserError(f"{folder.path}: no round could be evaluated, so there is no result to write")
    scores, on_classes = final_scores(last.history), final_means(last.history, BY_CLASS)
    by_client: dict[str, float | None] = {}
    if CLIENTS in last.history[-1]:  # a federation does not know the classes of its sites
        by_client = final_means(last.history, BY_CLIENT) or accuracy_by_client(run, on_classes)
    summary: Metrics = {
        **origin,
        "rounds": last.t,
        "headline": method.headline,
        "modes": dict(method.modes),
        "accuracy": scores,
        BY_CLASS: on_classes,
        **{table: means for table in FINAL_MEANS if (means := final_means(last.history, table))},
        **({BY_CLIENT: by_client} if by_client else {}),
        "seconds": round(sum(m["seconds"] for m in last.history), 1),
        "history": [shortened(metrics) for metrics in last.history],
    }
    write_arrays(folder.model, method.model(last.state), about | {"scores": scores})
    write_text(folder.card, model_card(summary, about))
    try:
        draw_curves(grouped([summary]), folder.curves)
    except Exception as error:  # no reason to lose a result
        log.warning("%s could not be drawn: %s: %s", folder.curves, type(error).__name__, error)
    write_json(folder.summary, summary)  # last: only finished runs have it
    return summary
