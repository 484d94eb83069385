"""Registers that a spec adds to a backward kernel of the sm_90a path, measured on compiled kernels.

Such that no chosen tile of any example spills: test_backward_sm90.py and test_captured_sm90.py in
tests/. What the compiler makes of an instruction more is no smooth function: these are steps
between tiles, and on the safe side. Beside dropout, and where a score reads several tensors, a
first plan may spill all the same, and `flashgen.build` makes a second one.
"""

from __future__ import annotations

from flashgen.analysis import kind_of_sum, row_interval
from flashgen.expr import SCORE, elements_of
from flashgen.plan.model_sm90 import SEARCHING_REGISTERS
from flashgen.spec import AttentionSpec

# Per accumulator of S and dP: for all kernels, for random bits, for elements of captured tensors
# that each score reads for itself, and those that a row or a column of scores does, and for those
# that the mask reads where it is asked for each score.
PENDING = 1 / 8
DROPOUT_PENDING = 1 / 4
READ_PENDING = {"element": 1 / 2, "row": 3 / 16, "column": 3 / 16, "block": 0.0}
MASK_PENDING = 1 / 4

DROPOUT = 4
SCORE_MOD = 13
MASK_OF_TENSORS = 5
# For each index but one of an element that every score adds to by itself.
PLACE = 8
# More of a warp that copies, where it reads captured tensors to find tiles.
SEARCHING_TENSORS = 16


def extra(spec: AttentionSpec) -> int:
    """Of a thread that computes, whatever the step."""
    dropout, reads = spec.dropout, _reads(spec)
    score = SCORE_MOD if reads > 0 or (spec.score != SCORE and not dropout) else 0
    mask = MASK_OF_TENSORS if _mask_reads(spec) else 0
    return score + mask + (DROPOUT if dropout else 0)


def pending(spec: AttentionSpec) -> float:
    """Of a thread that computes, per accumulator of S and dP."""
    random = DROPOUT_PENDING if spec.dropout else 0
    mask = MASK_PENDING if _mask_reads(spec) else 0
    return PENDING + random + mask + _reads(spec)


def searching(spec: AttentionSpec, spare: int) -> int:
    """Of a thread that copies, where it takes more than one bound of an interval; else 0.

    Args:
        spare: registers to keep free: the compiler does not say which threads lack them.
    """
    reads = next(iter(elements_of(spec.mask)), None) is not None
    row = row_interval(spec.mask)
    searches = spec.block_sparse is not None or row is None
    more = SEARCHING_REGISTERS + SEARCHING_TENSORS
    if (searches and reads) or spare > SEARCHING_TENSORS or (spare and reads):
        return more
    bounded = row is not None and row.lo is not None and row.hi is not None
    return SEARCHING_REGISTERS if searches or reads or bounded or spare else 0


def _reads(spec: AttentionSpec) -> float:
    """The same for what the score reads."""
    read = elements_of(spec.score)
    return max((READ_PENDING[kind_of_sum(each)] for each in read), default=0.0)


def _mask_reads(spec: AttentionSpec) -> bool:
    """The mask is asked for each element, and reads captured tensors then."""
    return row_interval(spec.mask) is None and any(True for _ in elements_of(spec.mask))
