"""Random numbers that are a function of (seed, index, position) and of nothing else.

A counter-based generator has no state, so a draw does not depend on what was drawn before it, on its place in a batch,
or on whether the request was preempted in between. Computed on the host, in integers, so that every device draws the
same.

Philox4x32-10, from Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    UInt64Array = npt.NDArray[np.uint64]


def uniforms(
    seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int32], position: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """One number for each row, float64[S] in [0, 1), a multiple of 2**-53.

    The seed is the key. The counter's words are position, index, 0, 0. Of the result, the first word gives the high 32
    bits of the fraction and the second the low 21.

    Args:
        seed: uint64[S].
        index: int32[S], not negative.
        position: int32[S], not negative.
    """
    zero = np.zeros(len(seed), np.uint64)
    high, low, _, _ = philox4x32(seed, (position.astype(np.uint64), index.astype(np.uint64), zero, zero))
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53


def philox4x32(
    key: UInt64Array, counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """The block function, ten rounds.

    Args:
        key: uint64[S]; the low 32 bits are the first word of the key.
        counter: Four words, each uint64[S] below 2**32.

    Returns:
        Four words, likewise.
    """
    word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key0, key1 = key & word, key >> half
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ key0,
            product1 & word,
            (product0 >> half) ^ c3 ^ key1,
            product0 & word,
        )
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & word, (key1 + np.uint64(0xBB67AE85)) & word
    return c0, c1, c2, c3
