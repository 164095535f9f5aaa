"""Real numbers as integers modulo 2³², in which masks are added and vanish again."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedhassle.errors import UserError

WORD = np.dtype("<u4")  # a number of the ring
HALF = 2**31 - 1  # the largest number that counts as positive


def step_of(limit: float, sites: int) -> float:
    """The distance of two numbers, if the sum of so many sites' values lies within ±limit."""
    return limit / (HALF - sites)  # each site's rounding may add a half


def encoded(values: np.ndarray, share: float, step: float, limit: float) -> np.ndarray:
    """A share of values within ±limit as numbers of the ring, each rounded to the nearest."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= limit:
        raise UserError(
            f"an entry of this site's update changed by {largest:.3g}, and masks allow {limit:.3g}: set "
            "privacy.clip in federation.toml, or a smaller method.lr"
        )
    return wrapped(np.rint(share * values / step))


def wrapped(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers, modulo 2³²."""
    return (numbers.astype(np.int64) & 0xFFFFFFFF).astype(WORD)


def decoded(numbers: np.ndarray, step: float) -> np.ndarray:
    """The values (float64) of numbers of the ring."""
    return numbers.astype(WORD).view("<i4").astype(np.float64) * step


def stream(seed: bytes, label: str, size: int) -> np.ndarray:
    """Numbers of the ring that look random to all who lack the seed (AES-256 in counter mode)."""
    key = derived(seed, f"mask of {label}")
    zeros = bytes(size * WORD.itemsize)  # the counter starts at 0: a key is used once
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(zeros), WORD)


def derived(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose."""
    return HKDF(SHA256(), 32, salt=None, info=purpose.encode()).derive(secret)
