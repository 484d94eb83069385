"""The elements that dropout keeps: a pure function of (seed, offset, b, h, q, k), in NumPy.

This module defines the function. The reference, the CPU path and the tests call it; the kernels
(templates/common/dropout.cuh.j2) compute the same bits with the same counters.

Random bits come from Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) with 7 rounds, the fewest with which the paper's generator passes BigCrush.
The key is the seed. One call gives 128 bits, 16 for each of 8 elements: in every block of 16 x 16
elements, call (a, c) is for rows a and a + 8 and columns 2c, 2c + 1, 2c + 8 and 2c + 9. One lane
holds these elements of an accumulator of mma.m16n8, so that a lane needs one call for 8 elements.
For a transposed accumulator it needs one call and an exchange with one other lane.

q and k are global positions, q_offset and k_offset of the call included, so that calls on parts of
the queries or keys drop what one call on all of them does. Offsets are multiples of 16, so that
kernels make whole blocks. Counters are taken modulo 2^32, for negative positions too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.shared.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]

LEVELS = 1 << 16
"""The keep probability is a multiple of 1 / LEVELS."""

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two halves of the key in each round
LOW = np.uint64(0xFFFFFFFF)
BLOCK = 16  # rows and columns of the blocks by which calls of Philox are numbered
_CALLS_AT_ONCE = 1 << 14  # 128 KiB per array of words


def kept_levels(p: float) -> int:
    """The number of `LEVELS` values of an element's 16 bits that keep it: round((1 - p) * LEVELS).

    Raises:
        InputError: p is not a number in [0, 1), or is so close to 1 that no element is kept.
    """
    number = isinstance(p, int | float) and not isinstance(p, bool)
    levels = round((1.0 - p) * LEVELS) if number and 0.0 <= p < 1.0 else 0
    if levels < 1:
        raise InputError(
            "dropout_p is not a probability of dropping below 1",
            where="argument dropout_p",
            numbers=f"given {p!r}; from 0 to below 1, in steps of 1 / {LEVELS:,}",
            way_out="dropout_p=0.1, for example; 0 while evaluating",
        )
    return levels


def keep_scale(p: float) -> float:
    """The factor on kept elements: 1 / (the rounded keep probability)."""
    return LEVELS / kept_levels(p)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> Array:
    """Philox4x32-7 of counters given as four arrays of uint32 values that broadcast together.

    Returns:
        uint32, [..., 4].
    """
    return np.stack([word.astype(np.uint32) for word in _words(counter, key)], axis=-1)


def _words(
    counter: tuple[Array, Array, Array, Array], key: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """The four words as arrays of uint64, each of the shape that all counters broadcast to."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c2 = _next(second, c1, k0), _next(first, c3, k1)
        second &= LOW
        first &= LOW
        c1, c3 = second, first
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    c0, c1, c2, c3 = np.broadcast_arrays(c0, c1, c2, c3)
    return c0, c1, c2, c3


def _next(product: Array, word: Array, key: int) -> Array:
    """The high half of ``product``, with ``word`` and the key xored in."""
    high = product >> np.uint64(32)
    # In place where the shapes agree, because allocating new arrays takes most of the time.
    whole = high.ndim > 0 and np.broadcast_shapes(high.shape, word.shape) == high.shape
    xored = np.bitwise_xor(high, word, out=high) if whole else high ^ word
    xored ^= np.uint64(key)
    return xored


def keep_mask(
    p: float,
    seed: int,
    offset: int,
    pairs: Array,
    rows: range,
    keys: range,
) -> Array:
    """The elements of P that dropout keeps.

    Args:
        p: probability of dropping, in [0, 1).
        seed: 64 bits; negative numbers stand for their two's complement.
        offset: an integer; its low 32 bits are used.
        pairs: [n], the numbers b * heads_q + h of the (batch entry, head) pairs.
        rows, keys: ranges of step 1 of global positions.

    Returns:
        bool, [n, len(rows), len(keys)].

    Raises:
        InputError: p is not in [0, 1), or is so close to 1 that no element is kept.
    """
    levels = kept_levels(p)
    first_q, first_k = rows.start // BLOCK, keys.start // BLOCK
    blocks_q = -(-rows.stop // BLOCK) - first_q
    blocks_k = -(-keys.stop // BLOCK) - first_k
    # Axes: pair, block of rows, a, block of columns, c
    c0 = np.arange(8 * first_q, 8 * (first_q + blocks_q)).reshape(1, -1, 8, 1, 1) & 0xFFFFFFFF
    c1 = np.arange(4 * first_k, 4 * (first_k + blocks_k)).reshape(1, 1, 1, -1, 4) & 0xFFFFFFFF
    c2 = np.asarray(pairs, dtype=np.uint64).reshape(-1, 1, 1, 1, 1) & LOW
    c3 = np.full((1, 1, 1, 1, 1), offset & 0xFFFFFFFF)
    key = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    n = c2.shape[0]
    keep = np.empty((n, blocks_q, 2, 8, blocks_k, 2, 8), dtype=bool)
    # Few pairs at a time: the words then stay in the processor's cache.
    together = max(1, _CALLS_AT_ONCE // max(1, blocks_q * blocks_k * 32))
    for start in range(0, n, together):
        part = slice(start, start + together)
        words = _words((c0, c1, c2[part], c3), key)
        # Word 2i + j is for row a + 8i and columns 8j + 2c (low half) and 8j + 2c + 1 (high half).
        for number, word in enumerate(words):
            halves = word.astype("<u4").view("<u2")  # the last axis: c and half
            np.less(halves, levels, out=keep[part, :, number // 2, :, :, number % 2])
    grid = keep.reshape(n, blocks_q * BLOCK, blocks_k * BLOCK)
    skip_q, skip_k = rows.start - first_q * BLOCK, keys.start - first_k * BLOCK
    return grid[:, skip_q : skip_q + len(rows), skip_k : skip_k + len(keys)]
