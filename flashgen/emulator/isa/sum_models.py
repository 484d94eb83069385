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


# Dense products without saturation; the types are those of D, A, B and C, of wgmma D, A and B, and
# of wmma with operands of float16 D and C.
_PRODUCTS = re.compile(
    r"(?:wgmma\.mma_async|w?mma(?:\.mma)?)\.sync\.aligned(?:\.row|\.col)*"
    r"\.m\d+n\d+k(?P<k>\d+)(?:\.row|\.col)*\.(?P<types>(?:f16|f32)(?:\.\w+){1,3})"
)


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


def model_of(arch: str, instruction: str, kind: str, k: int, half: bool) -> SumModel | None:
    """The model of an instruction on an architecture; None where how it adds is not known.

    Args:
        instruction: "mma" or "wgmma".
        kind: the operands' type, that of A.
        k: products of a sum in one instruction.
        half: accumulators of f16 instead of f32.
    """
    number = re.match(r"sm_(\d+)", arch)
    capability = int(number[1]) if number else 80
    path = "sm_90" if capability >= 90 else "sm_80"
    small = kind in ("e4m3", "e5m2")
    found = _BLOCKS.get((path, instruction, "fp8" if small else kind))
    # How the tensor cores of Blackwell add 8-bit floats is not published.
    if found is None or capability < 80 or (small and capability >= 100):
        return None
    most, fraction = found
    apart = k if small and (path, instruction) == ("sm_90", "mma") else 0
    result = "f16" if half else "e8m13" if fraction == 13 else "f32"
    return SumModel(min(k, most), fraction, result, _FLOORS[path]["f16" if half else "f32"], apart)


def has_sums_of(gpu: str, target: str, instruction: str) -> bool:
    """Whether an instruction adds on a GPU as in the emulator, bit for bit.

    Args:
        gpu: the architecture of the GPU.
        target: the ``.target`` of the module, whose tensor cores the emulator models.
        instruction: an opcode with its modifiers, such as
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32".
    """
    form = _PRODUCTS.fullmatch(instruction)
    if form is None:
        return False
    into, *kinds = form["types"].split(".")
    unit = "wgmma" if instruction.startswith("wgmma") else "mma"
    if unit == "mma" and kinds.pop() != into:
        return False
    how = (unit, kinds[0] if kinds else "f16", int(form["k"]), into == "f16")
    model = model_of(gpu, *how)
    return model is not None and model == model_of(target, *how)


class SumModels:
    """The models of the instructions of a kernel; its module's ``.target`` is the architecture."""

    def __init__(self, program: PtxProgram) -> None:
        self._program = program

    def of(self, instruction: str, kind: str, k: int, half: bool) -> SumModel:
        """`model_of` the architecture.

        Raises:
            UnknownInstruction: how the architecture adds is not known.
        """
        found = model_of(self._program.module.target, instruction, kind, k, half)
        if found is None:
            raise UnknownInstruction(
                "how the tensor cores of this architecture add is not known to the emulator",
                where=f"kernel {self._program.name}",
                numbers=f".target {self._program.module.target}, {instruction} of {kind}",
                way_out='sums="rounded" adds in float64; known are sm_80 and later, without 8-bit '
                "floats from sm_100 on",
            )
        return found
