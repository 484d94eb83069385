"""Static properties of instructions: results, barriers, warp-wide execution, registers."""

from __future__ import annotations

from flashgen.emulator.ptx.syntax import Group, Imm, Instruction, Mem, Not, Operand, Pair, Reg, Vec

# Instructions whose first operand is not a destination.
_NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bar",
        "barrier",
        "cp",
        "bra",
        "brx",
        "ret",
        "exit",
        "membar",
        "fence",
        "prefetch",
        "prefetchu",
        "trap",
        "brkpt",
        "nanosleep",
        "discard",
        "applypriority",
        "call",
        "griddepcontrol",
        "pmevent",
        "stmatrix",
        "setmaxnreg",
        "tensormap",
    ]
)
ENDS = frozenset(("bra", "brx", "ret", "exit", "trap", "brkpt"))
# All lanes of a warp execute these together.
WARP_WIDE = frozenset(
    [
        "shfl",
        "vote",
        "match",
        "redux",
        "ldmatrix",
        "stmatrix",
        "mma",
        "wmma",
        "movmatrix",
        "elect",
        "wgmma",
        "setmaxnreg",
    ]
)
# The four warps of a warpgroup execute these together.
WARPGROUP_WIDE = frozenset(("wgmma", "setmaxnreg"))
# All lanes of a warp, of which none has exited, execute these together (.aligned).
_WHOLE_WARP = frozenset(("ldmatrix", "stmatrix", "mma", "wmma", "movmatrix"))
_EXCHANGES = frozenset(("shfl", "vote", "match", "redux"))
_SYNCHRONISE = _EXCHANGES | {"elect", "wgmma", "setmaxnreg"}
_ACCESSES = frozenset(
    ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wmma", "mbarrier")
)
_MBARRIER_RESULTS = frozenset(
    ("arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"),
)


def has_result(ins: Instruction) -> bool:
    if ins.op in ("bar", "barrier"):
        return "red" in ins.mods
    if ins.op == "wgmma":
        return accumulates(ins)
    if ins.op == "wmma":
        return "store" not in ins.mods
    if ins.op == "mbarrier":
        return bool(_MBARRIER_RESULTS.intersection(ins.mods))
    return ins.op not in _NO_RESULT


def accumulates(ins: Instruction) -> bool:
    """Whether the first operand is read as well as written."""
    return ins.op == "wgmma" and "mma_async" in ins.mods


def is_barrier(ins: Instruction) -> bool:
    return ins.op in ("bar", "barrier") and "warp" not in ins.mods


def is_wait(ins: Instruction) -> bool:
    """Whether it tests or waits for a phase of an mbarrier."""
    return ins.op == "mbarrier" and bool({"try_wait", "test_wait"}.intersection(ins.mods))


def may_block(ins: Instruction) -> bool:
    """Whether the instruction may block its warps, so that it must begin a segment."""
    return ins.op == "setmaxnreg" or (ins.op == "mbarrier" and "try_wait" in ins.mods)


def is_asynchronous(ins: Instruction) -> bool:
    """Whether it uses the asynchronous proxy, or waits for an operation that does."""
    return ins.op in ("mbarrier", "wgmma") or bool(
        {"bulk", "mbarrier", "mbarrier::complete_tx::bytes"}.intersection(ins.mods)
    )


def synchronises_lanes(ins: Instruction) -> bool:
    """Whether it orders the accesses of the lanes of a warp that execute it, barriers apart."""
    if ins.op in ("bar", "barrier"):
        return "warp" in ins.mods
    return ins.op in _SYNCHRONISE and (ins.op not in _EXCHANGES or "sync" in ins.mods)


def may_access_between_threads(ins: Instruction) -> bool:
    """Whether it may access memory that other threads access, too."""
    return ins.op in _ACCESSES and not {"local", "param", "const", "nc"}.intersection(ins.mods)


def is_warp_wide(ins: Instruction) -> bool:
    if ins.op in WARP_WIDE or (ins.op == "tensormap" and "cp_fenceproxy" in ins.mods):
        return True
    return ins.op in ("bar", "barrier") and "warp" in ins.mods


def needs_whole_warp(ins: Instruction) -> bool:
    """Whether it is undefined if a lane of the warp is missing or has exited."""
    return ins.op in _WHOLE_WARP or (ins.op == "tensormap" and "cp_fenceproxy" in ins.mods)


def registers_in(operand: Operand) -> list[int]:
    """Numbers of all registers of an operand."""
    if isinstance(operand, Reg):
        return [operand.index]
    if isinstance(operand, Not):
        return [operand.reg.index]
    if isinstance(operand, Mem):
        items = (operand.base, *operand.coordinates)
        return [r for item in items for r in registers_in(item)]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    if isinstance(operand, (Vec, Group)):
        return [r for item in operand.items for r in registers_in(item)]
    return []


def mask_of(registers: list[int]) -> int:
    """A bit mask of registers."""
    mask = 0
    for register in registers:
        mask |= 1 << register
    return mask


def as_immediate(operand: Operand) -> int | None:
    """The value of an integer immediate, else None."""
    if isinstance(operand, Imm) and not operand.float_bits:
        return operand.value
    return None


def gates(code: list[Instruction], leaders: set[int]) -> set[int]:
    """Warpgroup-wide instructions before which warps may have to wait for each other.

    Warps stay together within a segment, so only the first such instruction of each segment is a
    gate; a segment starts there.
    """
    found = set()
    together = False
    for pc, ins in enumerate(code):
        together = together and pc not in leaders
        if ins.op in WARPGROUP_WIDE and not together:
            found.add(pc)
            together = True
    return found
