"""The random numbers of ``fg.rand``: a pure function of a state, a stream and four integers.

The bits come from Philox4x32-7, whose rounds `flashgen.shared.dropout` describes, with the seed as
the key. One call gives the four numbers of two neighbouring q and two neighbouring k:

    counter = (q >> 1, (k >> 1) ^ 2^31, stream * 2^26 + b mod 2^16 * 2^10 + h mod 2^10, offset)
    word    = 2 * (q & 1) + (k & 1), of which the upper 24 bits are the number times 2^24

Every word of the counter is taken modulo 2^32. No two streams share a counter, because the third
word begins with the stream. None shares one with dropout either: the second word of dropout's
counters is 4 * (k // 16) plus 0 to 3, whose upper two bits are equal for every k of 32 bits, and
here they differ, because the upper two bits of k >> 1 are equal before one of them is flipped.
"""

from __future__ import annotations

from typing import Any

from flashgen.shared.dropout import MULTIPLIERS, ROUNDS, WEYL

RANDOM_STATE = "random_state"
"""The captured tensor of a spec that calls fg.rand, of dims (4,) and int32: the seed and the offset
that calls give as ``rng``, the low halves first."""

BITS = 24
STREAMS = 64
_LOW = 0xFFFFFFFF


def counter(offset: Any, stream: Any, b: Any, h: Any, q: Any, k: Any) -> tuple[Any, Any, Any, Any]:
    """The counter of the call of Philox that gives a number.

    The arguments are integers, or arrays or tensors of 64-bit ones.
    """
    pair = (stream << 26) + ((b & 0xFFFF) << 10) + (h & 0x3FF)
    return q >> 1 & _LOW, (k >> 1 ^ 1 << 31) & _LOW, pair, offset & _LOW


def random_bits(
    seed_low: Any, seed_high: Any, offset: Any, stream: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    """24 random bits from integers, or from arrays or tensors of 64-bit integers.

    Products of 64 bits wrap around; shifts and masks take the same bits as of unsigned products.
    """
    c0, c1, c2, c3 = counter(offset, stream, b, h, q, k)
    k0, k1 = seed_low & _LOW, seed_high & _LOW
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> 32 ^ c1 ^ k0) & _LOW, second & _LOW
        c2, c3 = (first >> 32 ^ c3 ^ k1) & _LOW, first & _LOW
        k0, k1 = k0 + WEYL[0] & _LOW, k1 + WEYL[1] & _LOW
    even, odd = c0 + (c2 - c0) * (q & 1), c1 + (c3 - c1) * (q & 1)
    return even + (odd - even) * (k & 1) >> 32 - BITS
