"""The cost model of the forward kernel on the sm_80 path where caches hold codes of 8 bits.

A thread copies 8 codes into the half of the 16-byte vector that they become, and converts them
there: each code once, whatever the number of warps whose products read it. Conversion on the way
from shared memory to fragments would be done by each warp again.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models.kernel_model import KernelModel
from flashgen.kernels.planner.quantities import Number
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, Arch, version_of
from flashgen.shared.dtypes import CACHE_DTYPES

WARPS_OF_FEW_ROWS = 1
"""Computing warps of a tile for the few rows of a decoding call: fewer compute fewer rows that the
call does not have, and each code is converted once in any case."""

_DECODED = {"int8": 2.5, "e5m2": 1.0, "e4m3": 7.0}
"""Instructions that make two float16 of two codes, counted from `templates/common/codes.cuh.j2`."""

_DECODED_BY_CVT = 1.5
"""The same for e4m3 where there is an instruction for it: half of the pairs have to be shifted."""

_SCALED = 5.0
"""Instructions that make two elements of two float16: conversions, products, and their packing."""

_OF_VECTOR = 12.0
"""Instructions for 8 codes besides: the copy, the load and the store, their addresses, and
exchanges of the row's page, slot and scale."""


def quantities_of(kv_dtype: str, arch: Arch) -> dict[str, Number]:
    """The quantities of codes: bytes per code, and instructions for one."""
    kind = CACHE_DTYPES[kv_dtype]
    decoded = _DECODED[kind.short]
    if kind.short == "e4m3" and version_of(arch.name)[:2] >= (8, 9):
        decoded = _DECODED_BY_CVT
    return {"e_kv": kind.itemsize, "convert_ops": (decoded + _SCALED) / 2 + _OF_VECTOR / 8}


@functools.cache
def of_codes(model: KernelModel) -> KernelModel:
    """The model of the kernel that converts codes, from that of the kernel without."""
    more = {
        "rest": " + convert_ops*(d_qk + d_v)/block_q",
        # 8 codes are read and 8 elements written besides the copy, which has fewer bytes.
        "shared": f" + 2*(d_qk + d_v)/block_q/{SMEM_BYTES_PER_CLOCK}",
    }
    steps = []
    for formula in model.cost_steps:
        text = formula.text + more.get(formula.name, "")
        if formula.name == "l2":
            text = text.replace("e*(", "e_kv*(")
        steps.append(Formula(formula.name, text, formula.unit))
    other = of_codes(model.other_form) if model.other_form else None
    return replace(
        model, cost_steps=tuple(steps), warps_of_few_rows=WARPS_OF_FEW_ROWS, other_form=other
    )
