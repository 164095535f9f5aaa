"""The optimisers of local training as data, SGD and AdamW, and the learning rate over rounds."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from fedhassle.errors import UserError

STEPS = (0.5, 0.75)  # shares of the rounds after each of which schedule=step divides the rate by ten

RateSchedule = Literal["constant", "cosine", "step"]


class SGD(NamedTuple):
    """Clip the gradient (0: do not), add weight decay, then momentum; fresh for every client and round."""

    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 0.0
    clip: float = 5.0
    nesterov: bool = False


class AdamW(NamedTuple):
    """Clip the gradient (0: do not), then AdamW (Loshchilov and Hutter, 2019), with PyTorch's constants.

    Weight decay does not pass through the moments. Fresh for every client and round.
    """

    lr: float = 0.001
    decay: float = 0.0
    clip: float = 5.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


Optimiser = SGD | AdamW


def share_of_rate(t: int, schedule: RateSchedule | None, horizon: int | None, warmup: int) -> float:
    """Returns the share of the learning rate that round t has.

    It rises over the first `warmup` rounds: 1/(W + 1), 2/(W + 1), …, and then follows the schedule over the
    remaining rounds of the horizon.
    """
    if t <= warmup:
        return t / (warmup + 1)
    if schedule in (None, "constant"):
        return 1.0
    if horizon is None:
        raise UserError("schedule needs the rounds of the run, which for_run did not pass on: set horizon")
    gone = min((t - 1 - warmup) / (horizon - warmup), 1.0)  # share of the rounds before this one
    if schedule == "cosine":
        return (1 + math.cos(math.pi * gone)) / 2
    return 0.1 ** sum(gone >= share for share in STEPS)
