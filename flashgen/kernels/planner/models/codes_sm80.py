"""The cost model of the forward kernel on the sm_80 path where caches hold codes of 8 bits.

There are two forms. Where one warp has all rows of a tile, as in decoding calls, tiles in shared
memory hold codes, and the warp converts them on their way to the fragments of its products. Where
several warps multiply the same keys, each of them would convert all codes: there a thread copies 8
codes into the half of the 16-byte vector that they become, and converts them there, each code once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models.kernel_model import SPACE, STEP, VECTOR, KernelModel
from flashgen.kernels.planner.quantities import Number
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, version_of
from flashgen.shared.dtypes import CACHE_DTYPES

if TYPE_CHECKING:
    from flashgen.kernels.planner.tile_problem import TileProblem

WARPS_OF_FEW_ROWS = 1
"""Computing warps of a tile for the few rows of a decoding call: fewer compute fewer rows that the
call does not have, and one converts each code once in any case."""

# ---- tiles of codes ------------------------------------------------------------------------------

SMEM = Formula("smem", "max(e*block_q*d_qk + stages*block_k*(k_row + v_row), e*block_q*d_v)", "B")
PARTS = (
    Formula("smem_q", "e*block_q*d_qk"),
    Formula("O's end", "max(0, e*block_q*(d_v - d_qk) - stages*block_k*(k_row + v_row))"),
    Formula("smem_k", "stages*block_k*k_row"),
    Formula("smem_v", "stages*block_k*v_row"),
)
BLOCK_K_BY_SMEM = Formula("block_k", f"({SPACE} - e*block_q*d_qk)/(stages*(k_row + v_row))")

# ---- instructions of a warp, counted in machine code (benchmarks/NOTES.md) -----------------------

_CONVERTED = {"int8": 3.25, "e5m2": 3.0, "e4m3": 5.5}
"""To make an element of a code in a register: two float16 of two codes (0.75, 0.5 and 3 for each of
them), a float32 of each, its product with the scale, and half of the rounding of a pair."""

_CONVERTED_BY_CVT = 3.0
"""The same for e4m3 where there is an instruction that makes two float16."""

_OF_COPY = 7.5
"""To copy 16 codes: two exchanges of the row's address, its sum with the place in the row, the
place in shared memory, the copy; 7.2 on sm_90 and 8.1 on sm_80."""

_OF_ROW = 108 / 32
"""To find a row: its page, slot, scales and addresses, which a warp does for 32 rows at once."""

_OF_BLOCKS_OF_8 = 0.75
"""For a code of K where tensor cores add a step in blocks of 8 elements, of which a lane then has
two: two reads of 4 codes, of which half are its own, and a permutation for 4 codes."""

_IN_TILE = 28.0
"""For 8 codes that become elements in shared memory: the copy, the load and the store, addresses,
and exchanges of the row's page, slot and scale."""


def quantities_of(problem: TileProblem, kv_dtype: str, *, in_registers: bool) -> dict[str, Number]:
    """The quantities of codes: bytes of a code, and instructions for a code and for a row of them.

    Args:
        in_registers: as in `model_of_codes`.
    """
    kind, version = CACHE_DTYPES[kv_dtype], version_of(problem.arch.name)[:2]
    ops = _CONVERTED[kind.short]
    if kind.short == "e4m3" and version >= (8, 9):
        ops = _CONVERTED_BY_CVT
    quantities: dict[str, Number] = {"e_kv": kind.itemsize, "row_ops": _OF_ROW}
    if not in_registers:
        return {**quantities, "convert_ops": ops + _IN_TILE / 8}
    d_qk, d_v = problem.quantities["d_qk"], problem.quantities["d_v"]
    by_8 = version < (9, 0) or d_qk < STEP
    return {
        **quantities,
        "convert_ops": ops,
        # Where rows are no multiple of 16 codes, 8 are copied at once.
        "copy_ops": _OF_COPY * (2 if d_qk % VECTOR or d_v % VECTOR else 1),
        "k_row": VECTOR * math.ceil(d_qk / VECTOR),
        "v_row": VECTOR * math.ceil(d_v / VECTOR),
        "k_reads": 2 if by_8 else 1,
    }


@functools.cache
def model_of_codes(model: KernelModel, *, in_registers: bool) -> KernelModel:
    """The model of a kernel that converts codes, made from the model of the kernel without codes.

    Args:
        in_registers: whether tiles of K and V hold codes, which each warp converts for its own
            products; else they hold the elements that threads have made of them.
    """
    converted = " + convert_ops*(d_qk + d_v)/block_q + 2*row_ops/row_groups"
    rest = next(formula.text for formula in model.cost_steps if formula.name == "rest")
    shared = next(formula.text for formula in model.cost_steps if formula.name == "shared")
    # 8 codes are read and 8 elements written besides the copy, which has fewer bytes.
    texts = {
        "rest": rest + converted,
        "shared": f"{shared} + 2*(d_qk + d_v)/block_q/{SMEM_BYTES_PER_CLOCK}",
    }
    narrower = ["l2"]
    if in_registers:
        texts = {
            "rest": rest.replace("e*(d_qk + d_v)", "(k_row + v_row)")
            + f"{converted} + {_OF_BLOCKS_OF_8}*(k_reads - 1)*d_qk/block_q",
            "shared": (
                "((k_reads*k_row + v_row)/(16*row_groups) + e*d_qk/block_k"
                f" + (k_row + v_row)/block_q)/{SMEM_BYTES_PER_CLOCK}"
            ),
        }
        narrower.append("products")  # loads of fragments
    steps = []
    for formula in model.cost_steps:
        text = texts.get(formula.name, formula.text)
        if formula.name in narrower:
            text = text.replace("e*(", "e_kv*(")
        steps.append(Formula(formula.name, text, formula.unit))
    changed = replace(model, cost_steps=tuple(steps), warps_of_few_rows=WARPS_OF_FEW_ROWS)
    if not in_registers:
        others = (model_of_codes(form, in_registers=False) for form in model.other_forms)
        return replace(changed, other_forms=tuple(others))
    return replace(changed, smem=SMEM, parts=PARTS, smem_bound=BLOCK_K_BY_SMEM, other_forms=())
