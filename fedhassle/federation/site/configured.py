"""From the configuration of a node to its site: reads agreement and images, and logs their problems."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch

from fedhassle.data.site.folder import SiteData, read_site
from fedhassle.data.site.survey import conversions, skipped
from fedhassle.errors import require
from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.build import engine_of
from fedhassle.federation.masks.signatures import PEERS, read_signer
from fedhassle.federation.site.new_labels import LabelSource, LabelWatch
from fedhassle.federation.site.node import SiteNode
from fedhassle.files import write_text
from fedhassle.names import some_of

log = logging.getLogger("fedhassle")

CONFIG_KEYS = ("site", "data", "file", "memory")  # of a node's configuration
SECRET = "patients.key"  # in a node's folder
SHOWN = 100  # skipped files that the log names


def site_node(config: Mapping[str, object]) -> SiteNode:
    """Builds the site that a node's configuration describes: its name, images, federation's file and memory.

    `labels` names a label file outside the folder of images; `device` and `threads` are for training; `audit`
    names the site's audit log, `key` its private key.
    """
    missing = [key for key in CONFIG_KEYS if not config.get(key)]
    require(not missing, f"the node's configuration lacks {', '.join(missing)}")
    name, data, file, memory = (str(config[key]) for key in CONFIG_KEYS)
    torch.set_num_threads(int(str(config.get("threads", 1))))
    agreement, labels = read_agreement(Path(file)), str(config.get("labels") or "")
    agreed, label_file = agreement.data.form, Path(labels) if labels else None
    source = LabelSource(Path(data), label_file, agreed.class_names, agreed.patients)
    before = source.stamp()  # first: the file may change while images are read
    secret = patient_secret(Path(memory).parent) if agreement.data.patients else b""
    site = read_site(source.images, agreed, label_file, secret=secret)
    log_problems(site)
    engine = engine_of(agreement, str(config.get("device", "auto")))
    watch = LabelWatch(source, site.files, before, patients=site.patients)
    audit = Path(str(config["audit"])) if config.get("audit") else None
    images, place = (site.x, site.y), Path(memory)
    signer = read_signer(Path(str(config["key"])), Path(file).parent / PEERS) if config.get("key") else None
    return SiteNode(name, agreement, *images, place, engine, watch.changed, site.patients, audit, signer)


def patient_secret(home: Path) -> bytes:
    """The key of the hashes that stand for patients, made once: with it the choice for validation stays."""
    file = home / SECRET
    if not file.exists():
        write_text(file, secrets.token_hex(32))  # nobody else can enter this folder
    found = file.read_text("ascii").strip()
    require(len(found) == 64, f"{file} is damaged: restore it, or delete it and start a new run")
    return bytes.fromhex(found)


def log_problems(site: SiteData) -> None:
    """Logs the files that are skipped, and those that are converted."""
    for note in site.notes:
        log.warning("%s", note)
    lost = skipped(site.problems)
    for problem in lost[:SHOWN]:
        log.warning("skipped %s: %s", problem.path, problem.what)
    if len(lost) > SHOWN:
        log.warning("skipped %d more (list them with: fedhassle data check --all)", len(lost) - SHOWN)
    for what, files in conversions(site.problems, leave_out=()):
        log.info("converted: %s: %d images: %s", what, len(files), some_of(files, 3))
