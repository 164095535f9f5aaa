"""Bounds on what one site can do: its change is clipped or refused, its weight capped, a bad round undone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhassle.engine.client import samples_by_name
from fedhassle.federation.agreement import Rules
from fedhassle.method import Method, Update
from fedhassle.predict.scores import wilson
from fedhassle.robust import capped, change_norm, clipped, lower_median
from fedhassle.vectors import Arrays

STATISTICS = " statistics"  # behind the name of a model: its BatchNorm statistics, which have their own scale
RECENT = 10  # rounds of a site whose largest change counts
USUAL = 5  # evaluations whose median is a site's usual accuracy

Changes = dict[str, float]
"""The norm of a site's change of each model, as the server merges it."""

SiteScores = Mapping[str, Mapping[str, Any]]
"""By site, its entry in a line of metrics: `accuracy` by prediction, and `count`."""


class Bounded(NamedTuple):
    """The updates of a round within the bounds, by site."""

    updates: dict[str, Update]
    changes: dict[str, Changes]  # after clipping
    clipped: dict[str, str]  # by site: what was clipped, and to what
    refused: dict[str, str]  # by site: why


def bounded(
    method: Method,
    updates: Mapping[str, Update],
    sent: Mapping[str, Arrays],
    history: Mapping[str, Sequence[Changes]],
    rules: Rules,
) -> Bounded:
    """Clips the changes that are too large for the round or for their site, and refuses the largest ones.

    `sent`: the models that each site received; `history`: its changes in earlier rounds, oldest first.
    """
    changes = {name: changes_of(method, update, sent[name]) for name, update in updates.items()}
    usual = usual_changes(method, changes, sent)
    found = Bounded({}, {}, {}, {})
    for name, update in updates.items():
        too_large = [
            f"its change of {part} has norm {norm:.4g}, more than {rules.refuse_above:g} times the usual "
            f"{usual[part]:.4g} (rules.refuse_above)"
            for part, norm in changes[name].items()
            if rules.refuse_above and norm > rules.refuse_above * usual[part]
        ]
        if too_large:
            found.refused[name] = too_large[0]
            continue
        bounds = bounds_of(changes[name], usual, history.get(name, ()), rules)
        arrays = {
            model: within(method, model, vector, sent[name].get(model), bounds)
            for model, vector in update.arrays.items()
        }
        found.updates[name] = update._replace(arrays=arrays)
        found.changes[name] = {part: min(norm, bounds[part]) for part, norm in changes[name].items()}
        cut = [(part, norm) for part, norm in changes[name].items() if norm > bounds[part]]
        if cut:
            words = [f"{part} from norm {norm:.4g} to {bounds[part]:.4g}" for part, norm in cut]
            found.clipped[name] = ", ".join(words)
    return found


def parts(method: Method, model: str, vector: Tensor) -> dict[str, Tensor]:
    """Splits a vector into its weights and, if it has any, its BatchNorm statistics."""
    net = method.networks().get(model)
    if net is None or not net.n_statistics:
        return {model: vector}
    weights, statistics = net.parts(vector)
    return {model: weights, model + STATISTICS: statistics}


def changes_of(method: Method, update: Update, sent: Arrays) -> Changes:
    """The norm of each change that an update makes to what the site received."""
    norms: Changes = {}
    for model, vector in update.arrays.items():
        before = parts(method, model, sent[model] if model in sent else vector.new_zeros(len(vector)))
        norms |= {k: change_norm(part, before[k]) for k, part in parts(method, model, vector).items()}
    return norms


def usual_changes(
    method: Method, changes: Mapping[str, Changes], sent: Mapping[str, Arrays]
) -> dict[str, float]:
    """The usual change of each model: the median over sites, where the model's own norm is one more value.

    So one site of two, or one alone, does not define what is usual. Zeros do not count.
    """
    norms: dict[str, list[float]] = {}
    for found in changes.values():
        for part, norm in found.items():
            norms.setdefault(part, []).extend([norm] if norm else [])
    own: dict[str, list[float]] = {}
    for arrays in sent.values():
        for model, vector in arrays.items():
            for part, values in parts(method, model, vector).items():
                own.setdefault(part, []).append(float(values.double().norm()))
    for part, found_norms in norms.items():
        size = lower_median(own[part]) if part in own else 0.0
        found_norms.extend([size] if size else [])
    return {part: lower_median(found) if found else 0.0 for part, found in norms.items()}


def bounds_of(
    changes: Changes, usual: Mapping[str, float], history: Sequence[Changes], rules: Rules
) -> Changes:
    """The norm to which each change of a site is clipped."""
    if not rules.clip_above:
        return dict.fromkeys(changes, float("inf"))
    made = {}
    for part in changes:
        before = [earlier[part] for earlier in history if earlier.get(part)][-RECENT:]
        made[part] = rules.clip_above * min(usual[part], max(before, default=usual[part]))
    return made


def within(method: Method, model: str, vector: Tensor, before: Tensor | None, bounds: Changes) -> Tensor:
    """Returns a vector with its change, or that of its statistics, clipped to their bounds."""
    received = parts(method, model, vector.new_zeros(len(vector)) if before is None else before)
    halves = parts(method, model, vector)
    cut = {part: clipped(values, received[part], bounds[part]) for part, values in halves.items()}
    if all(cut[part] is values for part, values in halves.items()):
        return vector  # the same bits
    return torch.cat(list(cut.values()))


def with_capped_weights(method: Method, updates: Sequence[Update], share: float, t: int) -> list[Update]:
    """Lowers the counts of sites that would have more than a share of the weight of all updates.

    Labelled and unlabelled images are capped each by themselves, and all weights follow from these counts.
    """
    clients = [update.client for update in updates]
    labelled = capped([client.labelled for client in clients], share)
    unlabelled = capped([client.unlabelled for client in clients], share)
    made = []
    for update, n_l, n_u in zip(updates, labelled, unlabelled, strict=True):
        client = update.client._replace(labelled=n_l, unlabelled=n_u)
        samples = samples_by_name(method.phases(client, t), client)
        made.append(update._replace(client=client, samples=samples))
    return made


def drop(now: SiteScores, before: Sequence[SiteScores], headline: str) -> float:
    """The drop of a model below its usual accuracy: the median over sites; negative if nobody sees one.

    A site's usual accuracy is the median of its last evaluations. Its accuracy now counts as the upper end of
    its 95 % interval, so that a few images cannot tell much. More than half of the sites must see the drop.
    """
    found = []
    for name, scores in now.items():
        known = [line[name]["accuracy"][headline] for line in before if name in line][-USUAL:]
        count = scores["count"]
        if known:
            best = wilson(round(scores["accuracy"][headline] * count), count).high
            found.append(statistics.median(known) - best)
    return lower_median(found) if found else -1.0
