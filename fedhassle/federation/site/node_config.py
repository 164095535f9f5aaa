"""The site that a node's configuration describes: what its worker and Flower's ClientApp begin with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from fedhassle.data.site.folder import SiteData, read_site
from fedhassle.data.site.survey import conversions, skipped
from fedhassle.errors import UserError
from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.site.node import SiteNode
from fedhassle.federation.terms import engine_of
from fedhassle.names import some_of

log = logging.getLogger("fedhassle")

SHOWN = 100  # problems of one kind that are named
NEEDED = ("site", "data", "file", "memory")


def site_node(config: Mapping[str, object]) -> SiteNode:
    """The site that a node's configuration describes: its name, images, federation's file and memory.

    `labels` in it names a label file that lies elsewhere than in the folder of images.
    """
    missing = [key for key in NEEDED if not config.get(key)]
    if missing:
        raise UserError(f"the node's configuration lacks {', '.join(missing)}")
    name, data, file, memory = (str(config[key]) for key in NEEDED)
    torch.set_num_threads(int(str(config.get("threads", 1))))
    agreement, labels = read_agreement(Path(file)), str(config.get("labels") or "")
    site = read_site(Path(data), agreement.data.form, Path(labels) if labels else None)
    tell_problems(site)
    engine = engine_of(agreement, str(config.get("device", "auto")))
    return SiteNode(name, agreement, site.x, site.y, Path(memory), engine)


def tell_problems(site: SiteData) -> None:
    """Logs which files are not used, and which only after a conversion."""
    for note in site.notes:
        log.warning("%s", note)
    lost = skipped(site.problems)
    for problem in lost[:SHOWN]:
        log.warning("skipped %s: %s", problem.path, problem.what)
    if len(lost) > SHOWN:
        log.warning("skipped %d more (fedhassle data check --all names them)", len(lost) - SHOWN)
    for what, files in conversions(site.problems, leave_out=()):
        log.info("converted: %s: %d images: %s", what, len(files), some_of(files, 3))
