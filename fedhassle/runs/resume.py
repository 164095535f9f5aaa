"""Resuming a run: after it was cut, on another device or other workers, or with more rounds than before."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fedhassle.engine.tensor_files import round_files
from fedhassle.errors import UserError, require
from fedhassle.files import remove_unfinished, write_text
from fedhassle.method import Method
from fedhassle.names import brief, escaped, some_of
from fedhassle.runs.checkpoints import (
    Checkpoint,
    discard_after,
    discard_old,
    load_checkpoint,
    save_checkpoint,
)
from fedhassle.runs.folder import Folder, resume_command, stored_request
from fedhassle.runs.record import metrics_line
from fedhassle.runs.run import Load, Run, method_for_run, own_code_text, prepare
from fedhassle.settings.build import build_dataset
from fedhassle.settings.hashing import binding_settings, own_code_of
from fedhassle.settings.request import Request
from fedhassle.settings.schema import PER_DEVICE, PER_WORKERS, resolve, resolved_device
from fedhassle.vectors import Arrays
from fedhassle.wrapped import unwrapped

log = logging.getLogger("fedhassle")


# The run


def reopen(
    path: Path,
    device: str | None = None,
    load: Load = build_dataset,
    workers: int | None = None,
    ray: str | None = None,
    rounds: int | None = None,
) -> Run:
    """A run that was cut, ready to resume; on another device, on other workers, or with more rounds."""
    folder = Folder(path)
    if folder.audit.exists():
        raise UserError(f"{path} is a federation's run: resume it with {resume_command(folder)}")
    if not folder.begun:
        raise UserError(f"{path} holds no run (no config.toml): start one with fedhassle run --out {path}")
    request = stored_request(folder)
    if device is not None:
        request = on_device(request, device)
    if workers is not None or ray is not None:
        request = on_workers(request, workers, ray)
    run = prepare(folder, request if rounds is None else Request((*request.layers, {"rounds": rounds})), load)
    require_same_code(run)
    if rounds is not None:
        before = resolve(request).rounds
        require(rounds >= before, f"{path} is a run of {before} rounds: it cannot be cut to {rounds}")
        require_extendable(run, before)
    return run


def on_device(request: Request, device: str) -> Request:
    """A request on another device, without the settings that were chosen for the old one."""
    if resolved_device(device) == stored_device(request):
        return request
    layers = [{k: v for k, v in layer.items() if k not in PER_DEVICE} for layer in request.layers]
    return Request((*layers, {"device": device}))


def on_workers(request: Request, workers: int | None, ray: str | None) -> Request:
    """A request on other workers or another cluster, with threads that suit their number.

    One worker without a cluster is this process.
    """
    layers = [{k: v for k, v in layer.items() if k not in PER_WORKERS} for layer in request.layers]
    number = request.top("workers", 1) if workers is None else workers
    return Request((*layers, {"workers": number} | ({} if ray is None else {"ray": ray})))


def stored_device(request: Request) -> str:
    """The device of a request; `auto` is that of this machine."""
    named = str(request.top("device", "auto"))
    return resolved_device(named) if named == "auto" else named


def require_same_code(run: Run) -> None:
    """Refuses to resume a run whose own method, network or metric has changed."""
    noted, own = run.folder.own_code, own_code_of(run.settings)
    if not noted.exists() or noted.read_text("utf-8") == own_code_text(own):
        return
    files = " or ".join(name.rpartition(":")[0] for name in own)
    raise UserError(
        f"{files} has changed since {run.folder.path} began: its rounds would mix both. Start a new "
        f"run in another folder, or put the code back; or remove {noted} to resume all the same"
    )


def require_extendable(run: Run, before: int) -> None:
    """Refuses a run of more rounds than before if its method depends on their number: a schedule, a start."""
    shorter = method_for_run(run.settings.model_copy(update={"rounds": before}), run.dataset, run.split)
    changed = [
        f"method.{name} is {value!r} in a run of {before} rounds and {other!r} in one of {run.rounds}"
        for name, value, other in differences(shorter, run.method)
    ]
    if run.settings.privacy.epsilon is not None and run.settings.privacy.noise is None:
        changed.append("privacy.noise follows from privacy.epsilon and the number of rounds")
    require(
        not changed,
        f"{run.folder.path} cannot go on from {before} to {run.rounds} rounds, since its first rounds would "
        f"have been others: {'; '.join(changed)}. Start a new run with rounds={run.rounds}; one that has "
        "this setting given can go on later",
    )


def differences(one: Method, other: Method) -> list[tuple[str, Any, Any]]:
    """The settings in which two methods of a class differ: name, and both values."""
    one, other = unwrapped(one), unwrapped(other)
    names = [field.name for field in fields(one) if field.name != "net"]
    both = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [(name, a, b) for name, a, b in both if a != b]


# Its checkpoint


def resumed(run: Run, may_grow: bool = False) -> Checkpoint:
    """The checkpoint from which a run goes on; refuses one that was made under other settings.

    If it `may_grow`, it can have more rounds than before, as far as that does not change the rounds before.
    """
    start = restore(run.folder, run.method, run.plan.seed, run.device)
    now = binding_settings(run.settings, run.dataset, run.split)
    made = now if start.settings is None else start.settings
    before = made.get("rounds")
    if may_grow and isinstance(before, int) and 0 < before < run.rounds:
        require_extendable(run, before)
        log.warning("%s had %d rounds and continues to %d", run.folder.path, before, run.rounds)
        made = made | {"rounds": run.rounds}
    require_same_settings(run.folder, start.t, made, now)
    require_headline(run, start)
    beyond = start.t % run.settings.evaluate_every
    if beyond and start.t < run.rounds:  # the end of a shorter run, where the longer one is not evaluated
        discard_after(run.folder.checkpoints, start.t - beyond)
        start = restore(run.folder, run.method, run.plan.seed, run.device)
    start = start._replace(settings=now)
    if not round_files(run.folder.checkpoints):  # so that the settings are known from the beginning
        save_checkpoint(run.folder.checkpoints, start)
    return start


def restore(folder: Folder, method: Method, seed: int, device: torch.device) -> Checkpoint:
    """The newest undamaged checkpoint, or the state before round 1; cuts the metrics on disk to match."""
    remove_unfinished(folder.path)
    remove_unfinished(folder.checkpoints)
    found = load_checkpoint(folder.checkpoints, device)
    if found is None:
        found = Checkpoint(0, initial_state(method, seed, device), [])
    discard_after(folder.checkpoints, found.t)
    discard_old(folder.checkpoints)  # left by a kill just after a checkpoint
    write_text(folder.metrics, "".join(map(metrics_line, found.history)))
    return found


def initial_state(method: Method, seed: int, device: torch.device) -> Arrays:
    """The state before round 1."""
    return {name: vector.to(device) for name, vector in method.initial(seed).items()}


def require_headline(run: Run, start: Checkpoint) -> None:
    """Refuses a checkpoint whose metrics are of another method."""
    if not all(run.headline in metrics["accuracy"] for metrics in start.history):
        raise UserError(
            f"the checkpoint of round {start.t} in {run.folder.checkpoints} lacks accuracies of "
            f"{run.headline!r}: remove {run.folder.checkpoints} to train all rounds again"
        )


def require_same_settings(folder: Folder, t: int, made: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to go on after round t with other settings than before; its rounds would mix both."""
    changed = [key for key in (now | made) if now.get(key) != made.get(key)]
    if changed:
        pairs = [
            f"{escaped(key)[:50]}={brief(now.get(key))} instead of {brief(made.get(key))}" for key in changed
        ]
        since = f"the checkpoint of round {t}" if t else "the run began"
        raise UserError(
            f"{folder.config} or the images have changed since {since}: {some_of(pairs, 3)}. "
            f"Put them back, or remove {folder.checkpoints} to train all rounds again"
        )
