"""Shamir's secret sharing: a secret in n shares, any t of which give it back, and fewer nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1  # of the field, above every secret
SECRET = 32  # bytes of a secret
SHARE = 66  # bytes of a share


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, bytes]:
    """The share of each point, which is a positive number: a random polynomial through (0, secret)."""
    assert len(secret) == SECRET and 0 < threshold <= len(points) == len(set(points)) and min(points) > 0
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: value_at(polynomial, x).to_bytes(SHARE) for x in points}


def value_at(polynomial: Sequence[int], x: int) -> int:
    """The value of a polynomial in the field, its constant first."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret behind shares, by Lagrange's interpolation at 0; raises if it cannot be one."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares of a secret, but {threshold} are needed")
    points = {x: int.from_bytes(share) for x, share in list(shares.items())[:threshold]}
    total = 0
    for x, share in points.items():
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += share * above * pow(below, -1, PRIME)
    try:
        return (total % PRIME).to_bytes(SECRET)
    except OverflowError as error:
        raise ValueError("these shares belong to no secret") from error
