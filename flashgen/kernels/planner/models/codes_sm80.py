"""The cost model of the forward kernel on the sm_80 path where caches hold codes of 8 bits.

A thread copies 8 codes into the half of the 16-byte vector that they become, and converts them
there: each code once, whatever the number of warps whose products read it. Conversion on the way
from shared memory to fragments would be done by each warp again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models.kernel_model import STEP, VECTOR, KernelModel
from flashgen.kernels.planner.quantities import Number
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, version_of
from flashgen.shared.dtypes import CACHE_DTYPES

if TYPE_CHECKING:
    from flashgen.kernels.planner.tile_problem import TileProblem

WARPS_OF_FEW_ROWS = 1
"""Computing warps of a tile for the few rows of a decoding call: fewer compute fewer rows that the
call does not have, and each code is converted once in any case."""

_DECODED = {"int8": 2.5, "e5m2": 1.0, "e4m3": 7.0}
"""Instructions that make two float16 of two codes, counted from `templates/common/codes.cuh.j2`."""

_DECODED_BY_CVT = 1.5
"""The same for e4m3 where there is an instruction for it: half of the pairs have to be shifted."""

_SCALED = 5.0
"""Instructions that make two elements of two float16: conversions, products, and their packing."""

_OF_COPY = 8.0
_OF_BLOCKS_OF_8 = 6.0

SMEM = Formula(
    "smem", "max(e*block_q*d_qk + stages*block_k*(k_row + v_row), e*block_q*d_v)", "B"
)
PARTS = (
    Formula("smem_q", "e*block_q*d_qk"),
    Formula("O's end", "max(0, e*block_q*(d_v - d_qk) - stages*block_k*(k_row + v_row))"),
    Formula("smem_k", "stages*block_k*k_row"),
    Formula("smem_v", "stages*block_k*v_row"),
)
BLOCK_K_BY_SMEM = Formula(
    "block_k", "(min(M, M_sm/blocks - reserved) - e*block_q*d_qk)/(stages*(k_row + v_row))"
)

_OF_VECTOR = 12.0
"""Instructions for 8 codes besides: the copy, the load and the store, their addresses, and
exchanges of the row's page, slot and scale."""


def quantities_of(
    problem: TileProblem, kv_dtype: str, *, in_registers: bool
) -> dict[str, Number]:
    """The quantities of codes: bytes per code, instructions for one, and rows of tiles of codes."""
    kind, version = CACHE_DTYPES[kv_dtype], version_of(problem.arch.name)[:2]
    decoded = _DECODED[kind.short]
    if kind.short == "e4m3" and version >= (8, 9):
        decoded = _DECODED_BY_CVT
    if not in_registers:
        ops = (decoded + _SCALED) / 2 + _OF_VECTOR / 8
        return {"e_kv": kind.itemsize, "convert_ops": ops}
    rows = {
        name: VECTOR * math.ceil(problem.given[dim] / VECTOR)
        for name, dim in (("k_row", "d_qk"), ("v_row", "d_v"))
    }
    apart = version < (9, 0) or problem.given["d_qk"] < STEP
    ops = (decoded + _SCALED) / 2 + _OF_COPY / 16 + apart * _OF_BLOCKS_OF_8 / 8
    return {"e_kv": kind.itemsize, "convert_ops": ops, **rows, "k_reads": 1 + apart}


@functools.cache
def of_codes(model: KernelModel, *, in_registers: bool) -> KernelModel:
    """The model of a kernel that converts codes, from that of the kernel without.

    Args:
        in_registers: whether each warp converts the codes of its products, and tiles of K and V in
            shared memory hold codes; else they hold the elements that threads have made of them.
    """
    more = {
        "rest": " + convert_ops*(d_qk + d_v)/block_q",
        # 8 codes are read and 8 elements written besides the copy, which has fewer bytes.
        "shared": f" + 2*(d_qk + d_v)/block_q/{SMEM_BYTES_PER_CLOCK}",
    }
    other: dict[str, str] = {}
    if in_registers:
        other = {
            "shared": (
                "((k_reads*k_row + v_row)/(16*row_groups) + e*d_qk/block_k"
                f" + (k_row + v_row)/block_q)/{SMEM_BYTES_PER_CLOCK}"
            ),
        }
        del more["shared"]
    steps = []
    for formula in model.cost_steps:
        text = other.get(formula.name, formula.text) + more.get(formula.name, "")
        if formula.name == "l2" or (in_registers and formula.name == "products"):
            text = text.replace("e*(", "e_kv*(")
        steps.append(Formula(formula.name, text, formula.unit))
    changed = replace(model, cost_steps=tuple(steps), warps_of_few_rows=WARPS_OF_FEW_ROWS)
    if not in_registers:
        return changed
    return replace(changed, smem=SMEM, parts=PARTS, smem_bound=BLOCK_K_BY_SMEM)
