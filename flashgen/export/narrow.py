"""The ranges of a call's integers for which kernels with 32-bit integers serve, as plain numbers.

An export decides without expressions whether a call needs 64-bit integers. The ranges are found by
trial: every call inside of one set of them keeps all assumed expressions within int32. A call
outside of all of them may too, and then takes the wider kernel all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.built_kernel import Build
from flashgen.call import CallRanges
from flashgen.codegen import beyond_int32
from flashgen.dtypes import COUNT_LIMIT, POSITION_LIMIT, SCALAR_LIMIT
from flashgen.signature import CallSignature

_SIZES = {"batch": COUNT_LIMIT, "heads": COUNT_LIMIT}
_SIZES |= {"seq_q": POSITION_LIMIT, "seq_k": POSITION_LIMIT}
_POSITIONS = ("q", "k", "q_lo", "q_hi", "k_lo", "k_hi", "q_offset", "k_offset", "seq_q", "seq_k")
_COUNTS = ("b", "batch", "h", "heads")
_MOST_BITS = 30
_LEAST_BITS = 11  # of positions: threads compute some past the end of their tile

Ranges = dict[str, tuple[int, int]]


def widest(signature: CallSignature) -> CallRanges:
    """The ranges of all calls that are accepted."""
    scalars = {x.name: 0 for x in signature.scalars if x.dtype != "float32"}
    of_sequences = signature.packed or signature.paged
    offsets: dict[str, int | None] = {"q_offset": None, "k_offset": None}
    found = CallRanges.of(_SIZES, offsets, scalars, of_sequences)
    ends = dict(zip(found.names, found.ends, strict=True))
    ends |= {name: (0, most) for name, most in _SIZES.items()}
    ends |= dict.fromkeys(scalars, (-SCALAR_LIMIT, SCALAR_LIMIT))
    return CallRanges(tuple(ends), tuple(ends.values()))


def narrow_ranges(builds: Iterable[Build], signature: CallSignature) -> tuple[Ranges, ...] | None:
    """Sets of ranges in which kernels keep their integers within int32; None where all calls do.

    Each set has other limits of scalars, and the longest sequences that they leave.
    """
    blocks = [block for build in builds for block in build.source.assumptions if block.assumed]
    all_calls = widest(signature)
    if not blocks or not beyond_int32(blocks, all_calls):
        return None
    most = dict(zip(all_calls.names, all_calls.ends, strict=True))

    def ranges(positions: int, counts: int, scalars: int) -> Ranges:
        bits = dict.fromkeys(most, scalars)
        bits |= dict.fromkeys(_POSITIONS, positions) | dict.fromkeys(_COUNTS, counts)
        return {
            name: (max(low, -(1 << bits[name])), min(high, 1 << bits[name]))
            for name, (low, high) in most.items()
        }

    def fits(positions: int, counts: int, scalars: int) -> bool:
        ends = ranges(positions, counts, scalars)
        return not beyond_int32(blocks, CallRanges(tuple(ends), tuple(ends.values())))

    found: list[tuple[int, int, int]] = []
    for scalars in range(_MOST_BITS, -1, -1):
        for counts in (20, 10):  # as many as are accepted, and fewer
            bits = range(_MOST_BITS, _LEAST_BITS - 1, -1)
            longest = next((n for n in bits if fits(n, counts, scalars)), 0)
            inside = any(longest <= p and counts <= c and scalars <= s for p, c, s in found)
            if longest and not inside:
                found.append((longest, counts, scalars))
    return tuple(ranges(*bits) for bits in found)
