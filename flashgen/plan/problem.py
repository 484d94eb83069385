"""From a spec and an architecture to the numbers that the model works with."""

from __future__ import annotations

import sympy

from flashgen.analysis import Block, analyse_score, kind_of_sum, row_interval
from flashgen.arch import Arch
from flashgen.expr import SCORE, FloorDiv, FloorMod, elements_of
from flashgen.plan import registers_sm90
from flashgen.plan.model_backward import OF_CAPTURED
from flashgen.plan.model_sm90 import SEARCHING_REGISTERS, SEARCHING_TILES
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
DROPOUT_REGISTERS = 10
# The same for backward kernels, whose score_mod comes with its derivative; and where the rows of
# their operands are not equally long, they are copied by two patterns.
BACKWARD_SCORE_REGISTERS = 16
BACKWARD_MASK_REGISTERS = 12
BACKWARD_NEWER_REGISTERS = {2: 8, 4: 16}  # by element size
BACKWARD_CONSUMER_REGISTERS = 16  # on sm_86 and sm_89, which the compiler schedules differently
BACKWARD_DROPOUT_REGISTERS = 28
UNEQUAL_REGISTERS = 8
# For each index but one of an element that every score adds to by itself: strides are of 64 bits.
PLACE_REGISTERS = 10

# Registers that a backward kernel takes per accumulator of S and dP besides it. A fragment of
# float32 is three times as large as one of 16 bits; random bits are made for several elements.
PENDING = {2: 1 / 8, 4: 1 / 2}
PENDING_BY_DROPOUT = 1 / 8

# Instructions per index of an element that is read: it is moved inside the tensor, and multiplied
# by a stride of 64 bits.
READ_OPS = 5

# Instructions of dropout per element, counted in compiled kernels: Philox4x32-7 for 8 elements, and
# for each a comparison and a selection. Where scores are transposed, a call serves the elements of
# two lanes, which hand halves of it over to each other.
DROPOUT_OPS = 6
TRANSPOSED_DROPOUT_OPS = 12
TRANSPOSED = ("dkdv", "fused")


def problem_of(
    spec: AttentionSpec,
    arch: Arch,
    sram: int | None,
    access_bytes: int,
    spare_registers: int = 0,
    kernel: str = "forward",
    heads_per_tile: int = 1,
) -> Problem:
    """The planner's view of a spec: sizes, capacities, and what score_mod and dropout add."""
    limit = arch.smem_per_block if sram is None else sram
    path, path_note = _path(spec, arch, access_bytes)
    if path == "sm_90a" and kernel != "forward":
        extra = registers_sm90.extra(spec) + registers_sm90.PLACE * _places(spec, kernel)
        pending = registers_sm90.pending(spec)
        searching = registers_sm90.searching(spec, spare_registers)
    else:
        extra, pending = _extra_registers(spec, arch, kernel), _pending(spec, kernel)
        searching = _searching(spec, spare_registers) if path == "sm_90a" else 0
    return Problem(
        kernel=kernel,
        arch=arch,
        dtype=spec.dtype,
        itemsize=ITEMSIZE[spec.dtype],
        d_qk=spec.head_dim,
        d_v=spec.head_dim_v or spec.head_dim,
        access_bytes=access_bytes,
        smem_limit=limit,
        # Every architecture has 1 KiB more per SM than one block can have.
        smem_of_sm=limit + arch.smem_per_sm - arch.smem_per_block,
        extra_registers=extra + spare_registers,
        pending=pending,
        score_ops=_score_ops(spec) if kernel == "forward" else _slope_ops(spec),
        dropout_ops=_dropout_ops(spec, kernel),
        sink_bytes=0 if spec.sink is None or kernel != "forward" else ITEMSIZE[spec.sink.dtype],
        layout=spec.block_sparse.described if spec.block_sparse else "",
        searching=searching,
        heads_per_tile=heads_per_tile,
        path=path,
        path_note=path_note,
    )


def _searching(spec: AttentionSpec, spare: int) -> int:
    """Registers of a warp that copies, where it takes more than a few bounds; else 0.

    Args:
        spare: registers to keep free: the compiler does not say which threads lack them.
    """
    row = row_interval(spec.mask)
    if row is None or spare > SEARCHING_TILES:
        return SEARCHING_REGISTERS + SEARCHING_TILES
    # A range with two ends, of quotients or of elements of tensors.
    costly = spec.mask.has(FloorDiv, FloorMod) or next(iter(elements_of(spec.mask)), None)
    two_costly = costly and None not in (row.lo, row.hi)
    return SEARCHING_REGISTERS if spec.block_sparse or spec.packed or two_costly else 0


def _path(spec: AttentionSpec, arch: Arch, access_bytes: int) -> tuple[str, str]:
    """The code path of a kernel, and in words why it is not the architecture's own."""
    if arch.path == "sm_80":
        return arch.path, ""
    if ITEMSIZE[spec.dtype] != 2:
        why = "float32 is split into parts of tf32, which mma.sync multiplies"
    elif access_bytes != 16:
        why = "TMA takes addresses and strides in multiples of 16 bytes"
    else:
        return arch.path, ""
    return "sm_80", f"sm_80 path: {why}"


def _dropout_ops(spec: AttentionSpec, kernel: str) -> int:
    if not spec.dropout:
        return 0
    return TRANSPOSED_DROPOUT_OPS if kernel in TRANSPOSED else DROPOUT_OPS


def _score_ops(spec: AttentionSpec) -> int:
    """Instructions per element for score_mod, one per operation of its expression."""
    return 0 if spec.score == SCORE else _ops(spec.score) + 1


def _slope_ops(spec: AttentionSpec) -> int:
    """The same with the derivative, what both share counted once."""
    if spec.score == SCORE:
        return 0
    code: Block = analyse_score(spec.score).value_and_derivative
    return sum(_ops(expr) for _, expr in code.lets) + sum(_ops(expr) + 1 for expr in code.results)


def _ops(expr: sympy.Expr) -> int:
    """Operations of an expression, with those that find an element of a captured tensor."""
    reads = sum(READ_OPS * len(element.indices) for element in elements_of(expr))
    return int(sympy.count_ops(expr)) + reads


def _pending(spec: AttentionSpec, kernel: str) -> float:
    if kernel == "forward":
        return 0
    return PENDING[ITEMSIZE[spec.dtype]] + (PENDING_BY_DROPOUT if spec.dropout else 0)


def _extra_registers(spec: AttentionSpec, arch: Arch, kernel: str) -> int:
    has_score, d_v = spec.score != SCORE, spec.head_dim_v or spec.head_dim
    is_interval = row_interval(spec.mask) is not None
    if kernel == "forward":
        newer = NEWER_REGISTERS if arch.major >= 9 else 0
        mask = 0 if is_interval else MASK_REGISTERS
        score = SCORE_REGISTERS if has_score else 0
        dropout = DROPOUT_REGISTERS if spec.dropout else 0
        longer = max(0, spec.head_dim - d_v) // LONGER_K_STEP
        return newer + score + mask + longer + dropout
    if arch.major >= 9:
        newer = BACKWARD_NEWER_REGISTERS[ITEMSIZE[spec.dtype]]
    else:
        newer = 0 if arch.name == "sm_80" else BACKWARD_CONSUMER_REGISTERS
    mask = 0 if is_interval else BACKWARD_MASK_REGISTERS
    score = BACKWARD_SCORE_REGISTERS if has_score else 0
    dropout = BACKWARD_DROPOUT_REGISTERS if spec.dropout else 0
    unequal = UNEQUAL_REGISTERS if spec.head_dim != d_v else 0
    return newer + score + mask + unequal + dropout + PLACE_REGISTERS * _places(spec, kernel)


def _places(spec: AttentionSpec, kernel: str) -> int:
    """Of an element that every score adds to by itself, the indices but one; the most of any."""
    if kernel not in OF_CAPTURED:
        return 0
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    read = (each for each in elements_of(spec.score) if each.tensor in learned)
    return max(
        (len(each.indices) - 1 for each in read if kind_of_sum(each) == "element"), default=0
    )
