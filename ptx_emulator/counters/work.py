"""Classes of PTX instructions, by the functional units of an SM that execute them.

Each PTX instruction counts as one. The assembler may translate it into several machine instructions
(such as a division), fuse two (mul and add) or remove one (most moves).
"""

from __future__ import annotations

import math
import re

from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.ptx.instructions import Width, fact
from ptx_emulator.ptx.syntax import Instruction

CLASSES = {
    "tensor": "products of matrices on the tensor cores",
    "float": "additions, multiplications and fused multiply-adds of at most 32 bits: the FMA pipe",
    "double": "arithmetic in float64",
    "special": "ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, and divisions of floats",
    "compare": "extrema, comparisons, selections and signs, of floats and integers",
    "integer": "integer arithmetic, logic, shifts and bits",
    "convert": "conversions between types",
    "move": "moves, constants and addresses",
    "exchange": "between the lanes of a warp",
    "memory": "loads, stores, copies and atomics, and waiting for copies",
    "barrier": "barriers and fences",
    "control": "branches and ends",
}

_FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2"))
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def class_of(ins: Instruction) -> str:
    """The class of an instruction, one of `CLASSES`: its unit, but for the types of arithmetic.

    Raises:
        UnknownInstruction: the opcode is not registered.
    """
    unit: str = fact("unit", ins)
    if not unit:
        what = f"{ins.name} belongs to no class of instructions"
        where = f".loc line {ins.line[1]}"
        numbers = f"classes: {', '.join(CLASSES)}"
        way_out = "register its opcode in ptx_emulator/isa/"
        raise UnknownInstruction(what, where=where, numbers=numbers, way_out=way_out)
    if unit in ("float", "special", "compare") and "f64" in ins.mods:
        return "double"
    whole = unit in ("float", "special") and _FLOATS.isdisjoint(ins.mods)
    return "integer" if whole else unit


def multiply_adds(ins: Instruction) -> int:
    """Multiply-adds of one execution by a warp; 0 if it does not use the tensor cores.

    The four warps of a warpgroup count equal parts of the multiply-adds of its product.
    """
    shape = _SHAPE.search(ins.name) if fact("unit", ins) == "tensor" else None
    warps = 4 if fact("width", ins) is Width.WARPGROUP else 1
    return math.prod(map(int, shape.groups())) // warps if shape else 0


def kind_of_product(ins: Instruction) -> str:
    """Shape and types of a product, such as "m16n8k16 f32 f16 f16 f32"."""
    other = ("mma_async", "sync", "aligned", "row", "col")
    return " ".join(mod for mod in ins.mods if mod not in other)
