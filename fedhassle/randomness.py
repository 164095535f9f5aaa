"""Randomness as data: every draw comes from a key such as (seed, round, client, phase)."""

from __future__ import annotations

import zlib

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    """A generator that depends on `key` alone, on every machine."""
    words = [part if isinstance(part, str) else int(part) for part in key]  # NumPy's integers as Python's
    return np.random.default_rng([zlib.crc32(repr(word).encode()) for word in words])


def number(*key: int | str) -> int:
    """An integer that depends on `key` alone: a seed for another generator."""
    return int(generator(*key).integers(2**62))
