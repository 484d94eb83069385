"""Registers per thread that a spec and an architecture add to a kernel of the sm_80 path."""

from __future__ import annotations

from flashgen.analysis import kind_of_sum, row_interval
from flashgen.arch import Arch
from flashgen.language import SCORE, elements_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner.models import fitted_sm80 as fitted
from flashgen.planner.models.kernel_model import LEARNED_KERNELS
from flashgen.planner.quantities import ITEMSIZE


def extra(spec: AttentionSpec, arch: Arch, kernel: str) -> int:
    """Registers that do not depend on the tile."""
    d_v = spec.head_dim_v or spec.head_dim
    has_score, has_interval = spec.score != SCORE, row_interval(spec.mask) is not None
    if kernel == "forward":
        newer = fitted.FORWARD_NEWER_ARCH_REGISTERS if arch.major >= 9 else 0
        score = fitted.FORWARD_SCORE_MOD_REGISTERS if has_score else 0
        mask = 0 if has_interval else fitted.FORWARD_MASK_REGISTERS
        dropout = fitted.FORWARD_DROPOUT_REGISTERS if spec.dropout else 0
        longer = max(0, spec.head_dim - d_v) // fitted.LONGER_K_ELEMENTS_PER_REGISTER
        return newer + score + mask + longer + dropout
    if arch.major >= 9:
        newer = fitted.BACKWARD_NEWER_ARCH_REGISTERS[ITEMSIZE[spec.dtype]]
    else:
        newer = 0 if arch.name == "sm_80" else fitted.BACKWARD_CONSUMER_ARCH_REGISTERS
    score = fitted.BACKWARD_SCORE_MOD_REGISTERS if has_score else 0
    mask = 0 if has_interval else fitted.BACKWARD_MASK_REGISTERS
    dropout = fitted.BACKWARD_DROPOUT_REGISTERS if spec.dropout else 0
    unequal = fitted.UNEQUAL_HEAD_DIM_REGISTERS if spec.head_dim != d_v else 0
    indices = fitted.INDEX_REGISTERS * learned_indices(spec, kernel)
    return newer + score + mask + unequal + dropout + indices


def pending(spec: AttentionSpec, kernel: str) -> float:
    """Registers per accumulator element of S and dP; 0 in the forward kernel."""
    if kernel == "forward":
        return 0  # its formulas have a constant of their own
    dropout = fitted.BACKWARD_DROPOUT_PENDING if spec.dropout else 0
    return fitted.BACKWARD_PENDING[ITEMSIZE[spec.dtype]] + dropout


def learned_indices(spec: AttentionSpec, kernel: str) -> int:
    """The largest number of indices but one of a learned element that each score adds to."""
    if kernel not in LEARNED_KERNELS:
        return 0
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    read = (each for each in elements_of(spec.score) if each.tensor in learned)
    return max(
        (len(each.indices) - 1 for each in read if kind_of_sum(each) == "element"), default=0
    )
