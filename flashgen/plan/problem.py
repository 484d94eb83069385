"""From a spec and an architecture to the numbers that the model works with."""

from __future__ import annotations

import sympy

from flashgen.analysis import row_interval
from flashgen.arch import Arch
from flashgen.expr import SCORE
from flashgen.plan.search import Problem
from flashgen.spec import AttentionSpec

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

# Registers beyond those of a plain kernel on sm_80, measured. A score_mod is computed for several
# elements at once; a mask that is not one interval of keys per row is asked about each tile; from
# sm_90 on the compiler interleaves more; and where rows of K are longer than those of V, more of
# K's operands are on their way than O's size suggests.
SCORE_REGISTERS = 16
MASK_REGISTERS = 4
NEWER_REGISTERS = 4
LONGER_K_STEP = 16  # a register for each of these elements


def problem_of(
    spec: AttentionSpec, arch: Arch, sram: int | None, access_bytes: int, spare_registers: int = 0
) -> Problem:
    """The planner's view of a spec: sizes, capacities, and what score_mod adds."""
    limit = arch.smem_per_block if sram is None else sram
    return Problem(
        arch=arch,
        dtype=spec.dtype,
        itemsize=ITEMSIZE[spec.dtype],
        d_qk=spec.head_dim,
        d_v=spec.head_dim_v or spec.head_dim,
        access_bytes=access_bytes,
        smem_limit=limit,
        # Every architecture has 1 KiB more per SM than one block can have.
        smem_of_sm=limit + arch.smem_per_sm - arch.smem_per_block,
        extra_registers=_extra_registers(spec, arch) + spare_registers,
        score_ops=_score_ops(spec),
    )


def _score_ops(spec: AttentionSpec) -> int:
    """Instructions per element for score_mod, one per operation of its expression."""
    return 0 if spec.score == SCORE else int(sympy.count_ops(spec.score)) + 1


def _extra_registers(spec: AttentionSpec, arch: Arch) -> int:
    newer = NEWER_REGISTERS if arch.major >= 9 else 0
    score = 0 if spec.score == SCORE else SCORE_REGISTERS
    mask = 0 if row_interval(spec.mask) is not None else MASK_REGISTERS
    longer = max(0, spec.head_dim - (spec.head_dim_v or spec.head_dim)) // LONGER_K_STEP
    return newer + score + mask + longer
