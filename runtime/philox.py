"""Counter-based random numbers: a value is a function of its coordinates, not of a history.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. With no state to advance, a request's draws cannot depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds over 32-bit words held in uint64: ``[4, N]`` and ``[2, N]`` give ``[4, N]``."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(
    seeds: Sequence[int], streams: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """One number in ``[0, 1)`` for each coordinate, with 53 random bits.

    The 64-bit seed is the key; the counter is the position and then the 64-bit stream.
    """
    seed = np.array([s % 2**64 for s in seeds], dtype=np.uint64)
    stream = np.array([s % 2**64 for s in streams], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = np.stack([position & _LOW, position >> _HALF, stream & _LOW, stream >> _HALF])
    high, low, _, _ = philox4x32(counter, np.stack([seed & _LOW, seed >> _HALF]))
    # 27 + 26 bits, as NumPy's and the Mersenne Twister's doubles are made.
    bits = (high >> np.uint64(5)) * np.uint64(2**26) + (low >> np.uint64(6))
    values: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return values
