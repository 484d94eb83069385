"""Classes of PTX instructions, by the functional units of an SM that execute them.

Each PTX instruction counts as one. The assembler may translate it into several machine instructions
(such as a division), fuse two (mul and add) or remove one (most moves).
"""

from __future__ import annotations

import math
import re

from flashgen.emulator.errors import UnknownInstruction
from flashgen.emulator.ptx.instructions import accumulates
from flashgen.emulator.ptx.syntax import Instruction

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

_OPCODES = {
    "tensor": "mma wgmma wmma",
    "special": "ex2 lg2 rcp rsqrt sqrt sin cos tanh",
    "compare": "abs neg min max set setp selp slct testp copysign",
    "integer": "addc subc and or xor not cnot shl shr shf lop3 prmt popc clz brev bfe bfi bfind "
    "bmsk szext sad mad24 mul24 madc dp2a dp4a rem fns",
    "convert": "cvt",
    "move": "mov cvta isspacep createpolicy mapa getctarank tensormap",
    "exchange": "shfl vote match redux elect activemask movmatrix",
    "memory": "ld ldu st ldmatrix stmatrix cp atom red prefetch prefetchu discard applypriority",
    "barrier": "bar barrier membar fence mbarrier",
    "control": "bra brx ret exit call trap brkpt nanosleep pmevent griddepcontrol alloca "
    "stacksave stackrestore setmaxnreg",
}
_CLASS_OF = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_BY_TYPE = ("add", "sub", "mul", "mad", "fma", "div")
_FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2"))
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def class_of(ins: Instruction) -> str:
    """The class of an instruction, one of `CLASSES`.

    Raises:
        UnknownInstruction: the opcode is in no class.
    """
    found = _CLASS_OF.get(ins.op)
    if ins.op == "wgmma" and not accumulates(ins):
        return "barrier"
    if ins.op == "wmma" and "mma" not in ins.mods:
        return "memory"
    if "f64" in ins.mods and (found in ("special", "compare") or ins.op in _BY_TYPE):
        return "double"
    if found is not None:
        return found
    if ins.op in _BY_TYPE:
        if not _FLOATS.intersection(ins.mods):
            return "integer"
        return "special" if ins.op == "div" else "float"
    raise UnknownInstruction(
        f"{ins.name} belongs to no class of instructions",
        where=f".loc line {ins.line[1]}",
        numbers=f"classes: {', '.join(CLASSES)}",
        way_out="add its opcode to flashgen/emulator/counters/work.py",
    )


def multiply_adds(ins: Instruction) -> int:
    """Multiply-adds of one execution by a warp; 0 if it does not use the tensor cores.

    A wgmma is executed by four warps; each of them counts a quarter of its multiply-adds.
    """
    multiplies = ins.op in ("mma", "wgmma") or (ins.op == "wmma" and "mma" in ins.mods)
    shape = _SHAPE.search(ins.name) if multiplies else None
    return math.prod(map(int, shape.groups())) // (4 if ins.op == "wgmma" else 1) if shape else 0


def kind_of_product(ins: Instruction) -> str:
    """Shape and types of a product, such as "m16n8k16 f32 f16 f16 f32"."""
    other = ("mma_async", "sync", "aligned", "row", "col")
    return " ".join(mod for mod in ins.mods if mod not in other)
