"""The server's side of a run: from an agreement to a finished run folder, round by round."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from fedhassle.data.site.folder import read_site
from fedhassle.data.split.split import Split
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.privacy.by_site import SitePrivacy
from fedhassle.errors import require
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.build import (
    agreed_method,
    agreed_privacy,
    empty_dataset,
    mask_terms,
    required_in,
    settings_in,
    with_settings_of,
)
from fedhassle.federation.flower.processes import outlives
from fedhassle.federation.flower.transport import Transport
from fedhassle.federation.messages import Introduction, to_json
from fedhassle.federation.server.audit import DISK_FULL, SERVER_ENDED, Audit
from fedhassle.federation.server.evaluator import Evaluator, Images, best_so_far, participation
from fedhassle.federation.server.federation import FlowerFederation
from fedhassle.federation.server.sites import Clock, Sites
from fedhassle.files import locked, write_text
from fedhassle.runs.folder import Folder
from fedhassle.runs.logs import log_to_file
from fedhassle.runs.record import Step
from fedhassle.runs.resume import resumed
from fedhassle.runs.run import Run
from fedhassle.runs.trackers import require_installed
from fedhassle.runs.train import train_in_federation

log = logging.getLogger("fedhassle")

INTRODUCTIONS = 30.0  # seconds at the start to wait for nodes that are online but not introduced yet


def coordinate(
    transport: Transport,
    agreement: Agreement,
    path: Path,
    test: Images | Path | None = None,
    clock: Clock | None = None,
) -> Iterator[Step]:
    """Trains with the sites that are online; resumes the run that the folder holds, if any.

    `test`: labelled images at the server, or their path.
    """
    folder = Folder(path)
    path.mkdir(parents=True, exist_ok=True)
    require(not folder.summary.exists(), f"{path} holds a finished run: choose another folder")
    with locked(path), log_to_file(folder.log, alone=True):
        audit, parent = Audit(folder.audit), os.getppid()
        try:
            uid = identity(audit, agreement, str(test.resolve()) if isinstance(test, Path) else "")
            images = read_test_images(test, agreement) if isinstance(test, Path) else test
            rules = agreement.rules
            sites = Sites(transport, agreement, audit, clock, uid)
            there = sites.gather(rules.minimum_sites, min(INTRODUCTIONS, rules.wait))
            run = prepared(folder, agreement)
            start, told = resumed(run), plan(uid, run)  # with the rounds that the method was made for
            run = with_lost_rounds(run, audit, start.t)
            write_agreed(run)
            terms, memory = mask_terms(agreement, run.settings), ClientState(folder.memory)
            federation = FlowerFederation(sites, told, memory, terms, run.privacy)
            evaluator = Evaluator(run, federation, images, start)
            require_evaluation(there, images)
            hashes = summary_hashes(agreement, run)
            for step in train_in_federation(
                run, federation, evaluator, start, hashes, partial(outcome, audit, folder)
            ):
                audit.write("done", round=step.t, clients=[client.name for client in step.clients])
                yield step
        except GeneratorExit:
            raise
        except (SystemExit, KeyboardInterrupt):
            # Flower ends this program in the same way for a stopped run and for a server that has ended.
            ended = outlives(parent)
            audit.write("stopped", why=SERVER_ENDED if ended else "it was asked to stop")
            raise
        except BaseException as error:
            with suppress(OSError):  # the disk may be full
                audit.write("stopped", why=why_stopped(error))
            raise
        audit.write("finished")


def why_stopped(error: BaseException) -> str:
    """The reason of a run's end, as its audit log says it."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return DISK_FULL if full else str(error) or type(error).__name__


def identity(audit: Audit, agreement: Agreement, test: str = "") -> str:
    """The run's id, under which sites keep their memory; the first line of its audit log.

    The path of its test images is logged there too, and again if it is resumed with others.
    """
    agreed = agreement_hash(agreement)
    for event in audit.read():
        if event["event"] == "created":
            require(
                event["agreed"] == agreed,
                "federation.toml has changed since this run began, in a part that sites share: restore the "
                "file, or start a new run with another --out",
            )
            if test not in ("", audit.tested_on()):
                audit.write("testing", test=test)
            return str(event["run"])
    uid = uuid.uuid4().hex
    audit.write("created", run=uid, federation=agreement.name, agreed=agreed, test=test)
    return uid


def read_test_images(path: Path, agreement: Agreement) -> Images:
    """Reads the labelled images of a folder or an .npz, in the agreed form; raises if there are none."""
    site = read_site(path, agreement.data.form, labelled_only=True)
    return site.x, site.y


def prepared(folder: Folder, agreement: Agreement) -> Run:
    """Prepares the agreed run, or the one that the folder holds."""
    settings, dataset = settings_in(folder, agreement), empty_dataset(agreement)
    require_installed(settings.track or ())
    method = agreed_method(settings, dataset)
    privacy = agreed_privacy(settings, method)
    built, required = with_settings_of(method, settings), required_in(agreement)
    return Run(folder, built, dataset, Split((), ()), method, privacy, required)


def with_lost_rounds(run: Run, audit: Audit, t: int) -> Run:
    """The run with the rounds after t that a crash has undone: sites saw their models, so they count."""
    if not isinstance(run.privacy, SitePrivacy):
        return run
    return replace(run, privacy=replace(run.privacy, lost=audit.rounds_trained() - t))


def write_agreed(run: Run) -> None:
    """Writes the settings of a run."""
    tables = run.settings.as_toml()
    tables.pop("split")  # the server does not know it
    write_text(run.folder.config, tomli_w.dumps(tables))


def plan(uid: str, run: Run) -> dict[str, Any]:
    """The description of the run in every message, so that a site need not remember it."""
    settings = run.settings
    net = settings.net or run.dataset.net
    method, rounds = settings.method.model_dump(), run.rounds
    return {"run": uid, "method": method, "net": net, "seed": settings.seed, "rounds": rounds}


def summary_hashes(agreement: Agreement, run: Run) -> dict[str, Any]:
    """The hashes in a run's summary."""
    agreed = agreement_hash(agreement)
    words = to_json({"agreed": agreed, **plan("", run), "seed": 0, "rounds": run.settings.rounds})
    return {
        "settings_hash": hashlib.sha256(words.encode()).hexdigest()[:16],
        "split_hash": None,  # each site has its own images
    }


def outcome(audit: Audit, folder: Folder) -> dict[str, Any]:
    """The entries of a federation's summary: its sites, and its best round if sites have validated."""
    best = best_so_far(folder)
    return participation(audit) | ({} if best is None else {"best": best._asdict()})


def require_evaluation(there: dict[str, Introduction], test: Images | None) -> None:
    """Raises if no images are left to evaluate the model on."""
    require(
        test is not None or any(said.validation for said in there.values()),
        "the model cannot be evaluated: no site keeps images for validation, and the server has no test set; "
        "set validation under [data] in federation.toml, or give labelled images with --test",
    )
