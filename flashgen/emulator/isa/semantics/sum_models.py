"""How each architecture's tensor cores add, as data; `tensor_core_sums` executes it.

Sources: F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv 2512.07004),
and P. Xie and others, "MMA-Sim" (arXiv 2511.10909), which also has wgmma and the longer
instructions. They agree but for the smallest exponent of a block, which is that of the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashgen.emulator.errors import UnknownInstruction
from flashgen.emulator.ptx.program import PtxProgram

# By code path, instruction and operand type: products of a block at most, and F.
_BLOCKS = {
    ("sm_80", "mma", "f16"): (8, 24),
    ("sm_80", "mma", "bf16"): (8, 24),
    ("sm_80", "mma", "tf32"): (4, 24),
    ("sm_80", "mma", "fp8"): (16, 13),
    ("sm_90", "mma", "f16"): (16, 25),
    ("sm_90", "mma", "bf16"): (16, 25),
    ("sm_90", "mma", "tf32"): (8, 25),
    ("sm_90", "mma", "fp8"): (16, 25),
    ("sm_90", "wgmma", "f16"): (16, 25),
    ("sm_90", "wgmma", "bf16"): (16, 25),
    ("sm_90", "wgmma", "tf32"): (8, 25),
    ("sm_90", "wgmma", "fp8"): (32, 13),
}
# The smallest exponent of a block, by the type of the accumulators.
_FLOORS = {"sm_80": {"f32": -132, "f16": -20}, "sm_90": {"f32": -133, "f16": -21}}


@dataclass(frozen=True)
class SumModel:
    """How one instruction adds; see `tensor_core_sums` for the meaning of the terms.

    Attributes:
        products: L, the products of a block.
        fraction: F, the bits that are kept below the largest exponent of a block.
        result: the form of D: "f32" and "e8m13" (float32 with 13 fraction bits) are rounded toward
            zero, "f16" to nearest even.
        floor: the smallest exponent of a block.
        apart: 0; or k of an instruction that multiplies 8-bit floats as f16: it adds its products
            alone, those of k mod 4 < 2 before the others, and then C, rounded to nearest.
    """

    products: int
    fraction: int
    result: str
    floor: int
    apart: int = 0


class SumModels:
    """The models of the instructions of a kernel; its module's ``.target`` is the architecture."""

    def __init__(self, program: PtxProgram) -> None:
        self._program = program
        number = re.match(r"sm_(\d+)", program.module.target)
        self._capability = int(number[1]) if number else 80
        self._path = "sm_90" if self._capability >= 90 else "sm_80"

    def of(self, instruction: str, kind: str, k: int, half: bool) -> SumModel:
        """The model of an instruction.

        Args:
            instruction: "mma" or "wgmma".
            kind: the operands' type, that of A.
            k: products of a sum in one instruction.
            half: accumulators of f16 instead of f32.

        Raises:
            UnknownInstruction: how the architecture adds is not known.
        """
        small = kind in ("e4m3", "e5m2")
        found = _BLOCKS.get((self._path, instruction, "fp8" if small else kind))
        # How the tensor cores of Blackwell add 8-bit floats is not published.
        if found is None or self._capability < 80 or (small and self._capability >= 100):
            raise UnknownInstruction(
                "how the tensor cores of this architecture add is not known to the emulator",
                where=f"kernel {self._program.name}",
                numbers=f".target {self._program.module.target}, {instruction} of {kind}",
                way_out='sums="rounded" adds in float64; known are sm_80 and later, without 8-bit '
                "floats from sm_100 on",
            )
        most, fraction = found
        apart = k if small and (self._path, instruction) == ("sm_90", "mma") else 0
        result = "f16" if half else "e8m13" if fraction == 13 else "f32"
        floor = _FLOORS[self._path]["f16" if half else "f32"]
        return SumModel(min(k, most), fraction, result, floor, apart)
