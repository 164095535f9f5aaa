"""Pseudo-labels that are given once per round, and counts of labels and of those that are right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from fedhassle.engine.job import Samples, Site
from fedhassle.method import Models, Phase, Stream
from fedhassle.nets import images_a_pass


def give_labels(phases: tuple[Phase, ...], site: Site, received: Models) -> dict[Stream, Tensor]:
    """The pseudo-labels that streams request once per round, from clean images."""
    streams = dict.fromkeys(stream for phase in phases for stream in phase.streams)
    return {s: label(s, site, received) for s in streams if s.logits is not None and not s.online}


@torch.no_grad()
def label(stream: Stream, site: Site, received: Models) -> Tensor:
    """Pseudo-labels (n,) of one stream: logits are computed in large batches, labels from all of them."""
    assert stream.logits is not None
    rows = site.samples.rows(stream.part)
    batches = torch.split(rows, images_a_pass(site.samples.images))
    images = (site.views.normalise(site.samples.images[rows]) for rows in batches)
    return stream.label(torch.cat([stream.logits(received, x) for x in images]))


def count_given(labels: Mapping[Stream, Tensor], samples: Samples) -> Tensor:
    """Counts the labels that unlabelled samples get once per round."""
    counts = no_labels(samples.images.device)
    for stream, y in labels.items():
        if stream.part == "unlabelled":
            counts = counts + count_labels(y, samples.truth)
    return counts


@cache
def no_labels(device: torch.device) -> Tensor:
    """The counts of no labels, never written to: one tensor for all clients, which costs no launch.

    It is copied from the host, which waits for the copy: other streams may read the tensor at once.
    """
    return torch.zeros(4).to(device)


def count_labels(y: Tensor, truth: Tensor) -> Tensor:
    """Number of correct labels, of labels, of samples, and of labels that can be judged, (4,); −1 = none."""
    given = y >= 0
    counted = (given & (y == truth), given, torch.ones_like(given), given & (truth >= 0))
    return torch.stack(counted).flatten(1).sum(1)
