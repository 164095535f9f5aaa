"""From a site's update to numbers that masks can hide, and from their sum to the means of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedhassle.engine.privacy.by_site import secret_normals
from fedhassle.errors import require
from fedhassle.federation.masks.protocol import Members, Vectors, least_survivors
from fedhassle.federation.masks.ring import decoded, encoded, step_of, wrapped
from fedhassle.robust import PAIR, clipped_jointly, differences, joint_norm
from fedhassle.vectors import Arrays

LIMIT = 512.0  # largest change of an entry, if updates are not clipped
DEVIATIONS = 17.0  # of the noise that fit beside an update: √2 for sites too many, times 12


class MaskTerms(NamedTuple):
    """The terms of the sites of a federation for the vectors under masks."""

    clip: float | None = None  # C, largest norm of an update
    noise: float = 0.0  # z: the noise in a sum of updates has a standard deviation of at least z·C
    hide: bool = False  # sites hide which models they train, and how many images they have

    @property
    def whole(self) -> bool:
        """True if every site sends every model: zeros, or noise alone, for those that it does not train."""
        return self.hide or self.noise > 0

    @property
    def counted(self) -> bool:
        """True if the vector of a model ends with a number that counts the sites that trained it."""
        return self.hide and not self.noise

    def limit(self, sites: int) -> float:
        """The largest entry of a sum."""
        bound = LIMIT if self.clip is None else self.clip
        return bound * (1 + DEVIATIONS * self.noise / sites)


def share_of(name: str, model: str, members: Members, terms: MaskTerms) -> float:
    """The share of a site in the sum of a model: by its weight, or each site alike."""
    if terms.whole:
        return 1 / len(members)
    total = sum(member.models.get(model, 0) for member in members.values())
    return members[name].models[model] / max(1, total)


def contribution(
    name: str,
    arrays: Arrays,
    received: Arrays,
    members: Members,
    lengths: Mapping[str, int],
    terms: MaskTerms,
) -> Vectors:
    """A site's vectors for masks: shares of its clipped changes, zeros for models that it has not trained."""
    changes = differences(arrays, received)
    if terms.clip is not None:
        changes = clipped_jointly(changes, terms.clip)
    limit = terms.limit(len(members))
    step = step_of(limit, len(members))
    found = {}
    for model in members[name].models:
        trained, share = model in changes, share_of(name, model, members, terms)
        require(
            terms.whole or share <= PAIR,
            f"this site would have {share:.0%} of the weight of {model}: the sum would show what it sent",
        )
        values = changes[model].double().cpu().numpy() if trained else np.zeros(lengths[model])
        if terms.counted:
            values = np.append(values, limit if trained else 0.0)
        numbers = encoded(values, share, step, limit)
        found[model] = numbers + noise_of(len(numbers), members, sum(lengths.values()), terms)
    return found


def deviation(members: Members, entries: int, terms: MaskTerms) -> float:
    """The standard deviation of the noise that one site adds: the fewest survivors have enough together.

    What they hide is a site's n-th part of an update of norm C, lengthened by the rounding of its entries.
    """
    assert terms.clip is not None
    step = step_of(terms.limit(len(members)), len(members))
    longest = terms.clip / len(members) + step / 2 * math.sqrt(entries)
    return terms.noise * longest / math.sqrt(least_survivors(members))


def noise_of(size: int, members: Members, entries: int, terms: MaskTerms) -> np.ndarray:
    """A site's own noise for a model, as numbers of the ring; `entries`: of all models.

    A rounded normal number differs from a discrete Gaussian one of thousands of steps by less than float64
    can tell, and the sum of such numbers is one again (Kairouz et al., 2021).
    """
    if not terms.noise:
        return wrapped(np.zeros(size))
    step = step_of(terms.limit(len(members)), len(members))
    return wrapped(np.rint(deviation(members, entries, terms) / step * secret_normals(size)))


def means_of(
    sums: Vectors,
    start: Arrays,
    members: Members,
    survivors: Sequence[str],
    counts: Mapping[str, float],
    terms: MaskTerms,
) -> Arrays:
    """The mean of each model: where it started, and the mean change of the sites that trained it.

    `counts`: by model, how many sites are expected to train it; the divisor if there is noise.
    """
    limit = terms.limit(len(members))
    step, found = step_of(limit, len(members)), {}
    for model, numbers in sums.items():
        total = decoded(numbers, step)
        if terms.noise:
            weight = counts[model] / len(members)
        elif terms.counted:
            weight, total = total[-1] / limit, total[:-1]
        else:
            senders = [name for name in survivors if model in members[name].models]
            weight = sum(share_of(name, model, members, terms) for name in senders)
        if weight > 0.5 / len(members):  # else nobody has trained it
            change = torch.from_numpy(total / weight)
            found[model] = (start[model].double().cpu() + change).to(start[model])
    return found


def require_length(
    sums: Vectors, members: Members, survivors: Sequence[str], lengths: Mapping[str, int], terms: MaskTerms
) -> None:
    """Raises ValueError if a sum is longer than those of clipped updates can be: all that can be verified.

    Whose update is too long remains unknown, and a site may use up what the others left of the bound.
    """
    if terms.clip is None:
        return
    step = step_of(terms.limit(len(members)), len(members))
    found = joint_norm(
        {model: torch.from_numpy(decoded(v[: lengths[model]], step)) for model, v in sums.items()}
    )
    shares = [
        max((share_of(name, model, members, terms) for model in members[name].models), default=0.0)
        for name in survivors
    ]
    entries = sum(lengths.values())
    rounding = step * len(members) * math.sqrt(entries)
    noise = deviation(members, entries, terms) * math.sqrt(len(survivors)) * (math.sqrt(entries) + 8)
    allowed = terms.clip * sum(shares) + rounding + noise
    if found > allowed:
        raise ValueError(
            f"the sum of {len(survivors)} updates has norm {found:.4g}, and clipped ones have at most "
            f"{allowed:.4g}: a site has not clipped its update, and masks hide which one"
        )
