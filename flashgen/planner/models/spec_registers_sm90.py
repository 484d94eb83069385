"""Registers per thread that a spec adds to a kernel of the sm_90a path."""

from __future__ import annotations

from flashgen.analysis import kind_of_sum, row_interval
from flashgen.language import SCORE, FloorDiv, FloorMod, elements_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner.models import fitted_sm90 as fitted
from flashgen.planner.models.spec_registers_sm80 import learned_indices


def extra(spec: AttentionSpec, kernel: str) -> int:
    """Registers of a consumer thread of a backward kernel that do not depend on the tile."""
    has_score = _score_pending(spec) > 0 or (spec.score != SCORE and not spec.dropout)
    score = fitted.SCORE_MOD_REGISTERS if has_score else 0
    mask = fitted.MASK_OF_TENSORS_REGISTERS if _mask_reads_elements(spec) else 0
    dropout = fitted.DROPOUT_REGISTERS if spec.dropout else 0
    return score + mask + dropout + fitted.INDEX_REGISTERS * learned_indices(spec, kernel)


def pending(spec: AttentionSpec) -> float:
    """Registers of a consumer thread of a backward kernel per accumulator element of S and dP."""
    dropout = fitted.DROPOUT_PENDING if spec.dropout else 0
    mask = fitted.MASK_PENDING if _mask_reads_elements(spec) else 0
    return fitted.PENDING + dropout + mask + _score_pending(spec)


def searching(spec: AttentionSpec, kernel: str, spare: int) -> int:
    """Registers of a producer thread, where it needs more than to evaluate one bound; else 0.

    Args:
        spare: registers to keep free. The compiler does not report which threads spill.
    """
    return _searching_forward(spec, spare) if kernel == "forward" else _searching(spec, spare)


def _searching_forward(spec: AttentionSpec, spare: int) -> int:
    row = row_interval(spec.mask)
    if row is None or spare > fitted.SEARCH_BY_MASK_REGISTERS:
        return fitted.SEARCH_REGISTERS + fitted.SEARCH_BY_MASK_REGISTERS
    # A range with two ends that are made from quotients or from elements of tensors.
    costly = spec.mask.has(FloorDiv, FloorMod) or _reads_elements(spec)
    two_costly = costly and None not in (row.lo, row.hi)
    return fitted.SEARCH_REGISTERS if spec.block_sparse or spec.packed or two_costly else 0


def _searching(spec: AttentionSpec, spare: int) -> int:
    reads = _reads_elements(spec)
    row = row_interval(spec.mask)
    searches = spec.block_sparse is not None or row is None
    by_tensors = fitted.SEARCH_BY_TENSORS_REGISTERS
    if (searches and reads) or spare > by_tensors or (spare and reads):
        return fitted.SEARCH_REGISTERS + by_tensors
    bounded = row is not None and row.lo is not None and row.hi is not None
    return fitted.SEARCH_REGISTERS if searches or reads or bounded or spare else 0


def _score_pending(spec: AttentionSpec) -> float:
    """Registers per accumulator element for the elements of tensors that the score reads."""
    read = elements_of(spec.score)
    return max((fitted.READ_PENDING[kind_of_sum(each)] for each in read), default=0.0)


def _mask_reads_elements(spec: AttentionSpec) -> bool:
    """Whether the mask is evaluated for each score and reads captured tensors then."""
    return row_interval(spec.mask) is None and _reads_elements(spec)


def _reads_elements(spec: AttentionSpec) -> bool:
    return next(iter(elements_of(spec.mask)), None) is not None
