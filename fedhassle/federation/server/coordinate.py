"""The server's side of a run: from the federation's file to a finished run folder, round by round."""

from __future__ import annotations

import hashlib
import logging
import os
import statistics
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from fedhassle.data.site.folder import read_site
from fedhassle.data.split.split import Split
from fedhassle.data.views import make_views
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.evaluate import accuracy
from fedhassle.engine.tensor_files import read_arrays, write_arrays
from fedhassle.errors import DamagedError, require
from fedhassle.federation.agreement import Agreement, agreement_hash
from fedhassle.federation.flower.processes import is_left_by
from fedhassle.federation.flower.transport import Grid
from fedhassle.federation.messages import Introduction, to_json
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.server.federation import FlowerFederation
from fedhassle.federation.server.sites import Clock, Sites
from fedhassle.federation.terms import agreed_method, described, settings_in, settled
from fedhassle.files import locked, write_text
from fedhassle.runs.about import about_model
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import TEST_FALLBACK, Evaluation, Step
from fedhassle.runs.run import Run
from fedhassle.runs.trackers import require_installed
from fedhassle.runs.train import log_to_file, train_in_federation
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

PATIENCE = 30.0  # seconds that nodes have at the start to say who they are, though there are enough
Images = tuple[np.ndarray, np.ndarray]


def coordinate(
    grid: Grid,
    agreement: Agreement,
    path: Path,
    test: Images | Path | None = None,
    clock: Clock | None = None,
) -> Iterator[Step]:
    """Trains with the sites that are there; a folder that holds a run that was cut goes on with it.

    `test`: labelled images at the server, or where they lie.
    """
    folder = Folder(path)
    path.mkdir(parents=True, exist_ok=True)
    require(not folder.summary.exists(), f"{path} holds a finished run: choose another folder")
    with locked(path), log_to_file(folder.log, alone=True):
        audit, parent = Audit(folder.audit), os.getppid()
        try:
            uid = identity(audit, agreement, str(test.resolve()) if isinstance(test, Path) else "")
            images = coordinators_images(test, agreement) if isinstance(test, Path) else test
            rules = agreement.rules
            sites = Sites(grid, agreement, audit, clock)
            there = sites.gather(rules.minimum_sites, min(PATIENCE, rules.wait))
            run = prepared(folder, agreement)
            federation = FlowerFederation(sites, plan(uid, run), ClientState(folder.memory))
            judge = Judge(run, federation, images)
            require_judges(there, images)
            told = about(agreement, run)
            for step in train_in_federation(run, federation, judge, told, partial(took_part, audit)):
                audit.write("done", round=step.t, clients=[client.name for client in step.clients])
                yield step
        except GeneratorExit:
            raise
        except (SystemExit, KeyboardInterrupt):
            # Flower ends this program so whether somebody has asked for it or the server is gone.
            ended = is_left_by(parent)
            audit.write("stopped", why="the server's process has ended" if ended else "it was asked to stop")
            raise
        except BaseException as error:
            audit.write("stopped", why=str(error) or type(error).__name__)
            raise
        audit.write("finished")


def identity(audit: Audit, agreement: Agreement, test: str = "") -> str:
    """The name under which sites keep what they keep for this run; the first line of its audit log.

    Where its test images lie is written there too, and again when it goes on with others.
    """
    agreed = agreement_hash(agreement)
    for event in audit.read():
        if event["event"] == "created":
            require(
                event["agreed"] == agreed,
                "federation.toml has changed since this run began, in what sites share: begin another run",
            )
            if test not in ("", audit.tested_on()):
                audit.write("testing", test=test)
            return str(event["run"])
    uid = uuid.uuid4().hex
    audit.write("created", run=uid, federation=agreement.name, agreed=agreed, test=test)
    return uid


def coordinators_images(path: Path, agreement: Agreement) -> Images:
    """The labelled images of a folder or an .npz, as agreed; none that can be used is an error."""
    site = read_site(path, agreement.data.form, labelled_only=True)
    return site.x, site.y


def prepared(folder: Folder, agreement: Agreement) -> Run:
    """The run that is agreed on, or the one that the folder holds; its settings are written down."""
    settings, dataset = settings_in(folder, agreement), described(agreement)
    require_installed(settings.track or ())
    method = agreed_method(settings, dataset)
    settings = settled(settings, method)
    tables = settings.as_toml()
    tables.pop("split")  # who holds what is not the server's to say
    write_text(folder.config, tomli_w.dumps(tables))
    return Run(folder, settings, dataset, Split((), ()), method)


def plan(uid: str, run: Run) -> dict[str, Any]:
    """What every message says of the run, so that a site needs to remember nothing."""
    settings = run.settings
    net = settings.net or run.dataset.net
    return {"run": uid, "method": settings.method.model_dump(), "net": net, "seed": settings.seed}


def about(agreement: Agreement, run: Run) -> dict[str, Any]:
    """What a summary says of a federation."""
    agreed = agreement_hash(agreement)
    words = to_json({"agreed": agreed, **plan("", run), "seed": 0, "rounds": run.settings.rounds})
    return {
        "settings_hash": hashlib.sha256(words.encode()).hexdigest()[:16],
        "split_hash": None,  # each site has its own images
    }


def took_part(audit: Audit) -> dict[str, Any]:
    """What a summary says of the sites that were there: what each held, and how many rounds it served.

    And how many of them contributed to a round.
    """
    joined = {event["site"]: event for event in audit.read() if event["event"] == "joined"}
    by_round = list(audit.contributors().values())
    sites = {
        name: {
            "labelled": joined[name]["labelled"],
            "unlabelled": joined[name]["unlabelled"],
            "rounds": sum(name in names for names in by_round),
        }
        for name in sorted(joined)
    }
    counts = [len(names) for names in by_round] or [0]
    per_round = {"least": min(counts), "most": max(counts), "mean": statistics.fmean(counts)}
    return {"sites": sites, "sites_per_round": per_round}


def require_judges(there: dict[str, Introduction], test: Images | None) -> None:
    """Refuses a run of which nobody could say how good it is."""
    able = test is not None or any(said.validation for said in there.values())
    require(
        able,
        "no site has labelled images for validation, and there is no test set at the server: nobody could "
        "say how good the model is (set data.validation, or give a test set)",
    )


class Judge:
    """Says how good a state is, and keeps the model of the best one."""

    def __init__(self, run: Run, federation: FlowerFederation, test: Images | None) -> None:
        self.run, self.federation, self.test = run, federation, test
        self.best = best_so_far(run.folder)

    def __call__(self, state: Arrays, t: int) -> Evaluation | None:
        """Accuracy on the sites' validation images; if there are test images at the server, on these too.

        Where no site can tell, these stand in, and the line of metrics says so; the best round is never
        chosen by them, or they would be a test no more.
        """
        found = self.federation.evaluate(self.run.method, state, t)
        if found is not None:
            self._keep_best(state, t, found.accuracy)
        if self.test is None:
            return found
        tested = self._tested(state)
        found = Evaluation(tested, {TEST_FALLBACK: True}) if found is None else found
        return Evaluation(found.accuracy, {**found.more, "test": tested})

    def _keep_best(self, state: Arrays, t: int, validation: dict[str, float]) -> None:
        """Writes the model of a round that the sites' validation images found better than all before it."""
        run, score = self.run, validation[self.run.method.headline]
        if score > self.best:
            self.best = score
            sites = took_part(self.federation.audit)["sites"]
            words = about_model(run, sites) | {"round": t, "validation": validation}
            write_arrays(run.folder.best, run.method.model(state), words)

    def _tested(self, state: Arrays) -> dict[str, float]:
        assert self.test is not None
        data = self.run.dataset
        views = make_views(data.mean, data.std, False, 0, torch.device("cpu"))
        x, y = (torch.from_numpy(array) for array in self.test)
        return accuracy(self.run.method, state, x, y, views)


def best_so_far(folder: Folder) -> float:
    """The best score of a run that was cut; below any where there is none."""
    if not folder.best.exists():
        return -1.0
    try:
        _, words = read_arrays(folder.best)
        return float(words["validation"][words["headline"]])
    except (DamagedError, KeyError, TypeError):
        return -1.0
