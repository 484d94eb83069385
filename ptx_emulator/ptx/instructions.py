"""What the emulator knows of each opcode before it runs, and the operands of instructions.

`isa` registers each opcode once (`isa.generator.instruction`): with the function that writes its
code, and with the facts below, by which all other parts of the emulator handle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from ptx_emulator.ptx.syntax import (
    Imm,
    Instruction,
    LabelRef,
    Mem,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
)

OfThis = Callable[[Instruction], bool]


class Width(Enum):
    """Which threads execute an instruction together."""

    THREAD = "each by itself"
    WARP = "lanes of a warp; with .sync those of the member mask, the last operand"
    WHOLE_WARP = "all lanes of a warp, of which none may have exited (.aligned)"
    WARPGROUP = "four whole warps"
    BLOCK = "all threads that a barrier of a block or a cluster counts"


class Opcode(NamedTuple):
    """The facts of an opcode. One that depends on the modifiers is a function of the instruction.

    Attributes:
        emit: writes the code of an instruction: (generator, instruction).
        unit: what executes it, one of `counters.work.CLASSES`.
        result: its first operand is a destination.
        width: the threads that execute it together.
        accesses: bytes of its narrowest access to shared and to global memory; None: it accesses
            no memory that other threads access.
        strong: it needs no order with other strong accesses: atomic, volatile, with an order.
        branches: it may continue elsewhere, or not at all.
        starts_segment, ends_segment: a segment of code starts with it, or ends with it.
        asynchronous: it uses the asynchronous proxy, or waits for an operation that does.
    """

    emit: Callable[[Any, Instruction], None] | None = None
    unit: str | Callable[[Instruction], str] = ""
    result: bool | OfThis = True
    width: Width | Callable[[Instruction], Width] = Width.THREAD
    accesses: Callable[[Instruction], tuple[int, int]] | None = None
    strong: bool | OfThis = False
    branches: bool = False
    starts_segment: bool | OfThis = False
    ends_segment: bool = False
    asynchronous: bool | OfThis = False


OPCODES: dict[str, Opcode] = {}
_UNKNOWN = Opcode()


def opcode_of(ins: Instruction) -> Opcode:
    """The facts of an instruction's opcode; an unknown opcode has the defaults."""
    return OPCODES.get(ins.op, _UNKNOWN)


def fact(name: str, ins: Instruction) -> Any:
    """A fact of `Opcode` for one instruction."""
    value = getattr(opcode_of(ins), name)
    return value(ins) if callable(value) else value


def accumulates(ins: Instruction) -> bool:
    """Whether the first operand is read as well as written."""
    return ins.op == "wgmma" and "mma_async" in ins.mods


def is_barrier(ins: Instruction) -> bool:
    return fact("width", ins) is Width.BLOCK


def is_relaxed_arrival_or_wait(ins: Instruction) -> bool:
    """Whether it is an arrival at an mbarrier or a wait for one that orders nothing by itself."""
    counts_bytes = not {"expect_tx", "complete_tx"}.isdisjoint(ins.mods)
    arrives = not {"arrive", "arrive_drop"}.isdisjoint(ins.mods)
    return ins.op == "mbarrier" and "relaxed" in ins.mods and (arrives or not counts_bytes)


def is_warp_barrier(ins: Instruction) -> bool:
    """Whether it is bar.warp.sync, at which lanes may also meet by different instructions."""
    return ins.op in ("bar", "barrier") and "warp" in ins.mods


def is_warp_wide(ins: Instruction) -> bool:
    """Whether lanes of a warp execute it together, of one warp or of several."""
    return fact("width", ins) not in (Width.THREAD, Width.BLOCK)


def has_members(ins: Instruction) -> bool:
    """Whether its last operand is a mask of the lanes that execute it together."""
    return "sync" in ins.mods and fact("width", ins) is Width.WARP


def synchronises_lanes(ins: Instruction) -> bool:
    """Whether it orders the accesses of the lanes of a warp that execute it, barriers apart."""
    return has_members(ins) or fact("width", ins) is Width.WARPGROUP


def may_access_between_threads(ins: Instruction) -> bool:
    """Whether it may access memory that other threads access, too."""
    private = {"local", "param", "const", "nc"}
    return opcode_of(ins).accesses is not None and private.isdisjoint(ins.mods)


def may_read_local(ins: Instruction) -> bool:
    """Whether it is a load from local memory, or of a generic address."""
    others = {"global", "shared", "shared::cta", "shared::cluster", "const", "param"}
    return ins.op == "ld" and others.isdisjoint(ins.mods)


def registers_in(operand: Operand) -> list[int]:
    """Numbers of all registers of an operand."""
    if isinstance(operand, Reg):
        return [operand.index]
    if isinstance(operand, (Imm, Special, Sym, LabelRef, Sink)):
        return []
    if isinstance(operand, Not):
        return [operand.reg.index]
    if isinstance(operand, Mem):
        return [r for item in (operand.base, *operand.coordinates) for r in registers_in(item)]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    return [r for item in operand.items for r in registers_in(item)]


def mask_of(registers: list[int]) -> int:
    """A bit mask of registers."""
    mask = 0
    for register in registers:
        mask |= 1 << register
    return mask


def bits_of(mask: int) -> tuple[int, ...]:
    """The registers of a bit mask."""
    return tuple(index for index, bit in enumerate(bin(mask)[:1:-1]) if bit == "1")


def as_immediate(operand: Operand) -> int | None:
    """The value of an integer immediate, else None."""
    return operand.value if isinstance(operand, Imm) and not operand.float_bits else None


def gates(code: list[Instruction], leaders: set[int]) -> set[int]:
    """Warpgroup-wide instructions before which warps may have to wait for each other.

    Warps stay together within a segment, so only the first such instruction of each segment is a
    gate; a segment starts there.
    """
    first_of_segments = set()
    together = False
    for pc, ins in enumerate(code):
        together = together and pc not in leaders
        if fact("width", ins) is Width.WARPGROUP and not together:
            first_of_segments.add(pc)
            together = True
    return first_of_segments


class Accesses(NamedTuple):
    """The accesses of a kernel; the sets hold numbers of instructions.

    Attributes:
        shared_vector, global_vector: bytes of the narrowest access to shared and to global memory.
            Accesses are aligned to their size, so a shadow with vectors of this width is exact.
        strong: atomic, or with an order (.relaxed, .acquire, ...), or volatile.
        volatile: the volatile ones of these.
        relaxed: loads and atomics with the order .relaxed, which is that of atomics without one.
            They acquire nothing by themselves.
        releases: strong ones that release.
        narrow: strong ones of scope .cta or .cluster.
        read_only: loads from global memory that nothing may write (.nc).
        guesses: weak loads whose value a compare-and-swap compares.
        between_threads: whether one thread may read what another one writes.
        synchronises: whether fences may order other accesses, with strong ones, with such barriers,
            or with relaxed arrivals at mbarriers and waits for them.
        relaxed_barriers: whether there are barriers that order nothing without a fence.
    """

    shared_vector: int
    global_vector: int
    strong: frozenset[int]
    volatile: frozenset[int]
    relaxed: frozenset[int]
    releases: frozenset[int]
    narrow: frozenset[int]
    read_only: frozenset[int]
    guesses: frozenset[int]
    between_threads: bool
    synchronises: bool
    relaxed_barriers: bool


def find_accesses(code: list[Instruction]) -> Accesses:
    """The accesses of flat code."""

    def selected(
        condition: Callable[[Instruction], bool], among: Iterable[int] = range(len(code))
    ) -> frozenset[int]:
        return frozenset(pc for pc in among if condition(code[pc]))

    accesses = [size_of(ins) for ins in code if (size_of := opcode_of(ins).accesses) is not None]
    shared, device = (min(sizes) for sizes in zip((16, 16), *accesses, strict=True))
    strong = selected(lambda ins: fact("strong", ins))
    volatile = selected(lambda ins: "volatile" in ins.mods, strong)
    orders = {"acquire", "acq_rel", "volatile"}
    relaxed = selected(lambda ins: ins.op in ("ld", "atom") and orders.isdisjoint(ins.mods), strong)
    releases = selected(lambda ins: not {"release", "acq_rel"}.isdisjoint(ins.mods), strong)
    narrow = selected(lambda ins: not {"cta", "cluster"}.isdisjoint(ins.mods), strong)
    read_only = selected(lambda ins: "nc" in ins.mods or ins.op == "ldu")
    guesses = _guessed_loads(code) - strong - read_only
    between_threads = any(may_access_between_threads(ins) for ins in code)
    fences = bool(releases) or any(ins.op in ("membar", "fence") for ins in code)
    barriers = any(is_barrier(ins) and "relaxed" in ins.mods for ins in code)
    mbarriers = any(is_relaxed_arrival_or_wait(ins) for ins in code)
    ordered = fences and (bool(strong) or barriers or mbarriers)
    sizes = (shared, device)
    sets = (strong, volatile, relaxed, releases, narrow, read_only, guesses)
    return Accesses(*sizes, *sets, between_threads, ordered, barriers)


def _guessed_loads(code: list[Instruction]) -> frozenset[int]:
    """The loads whose value, moved at most, is what an atom.cas expects to find."""
    expected = [o for ins in code if "cas" in ins.mods for o in ins.operands[2:3]]
    todo = [register for operand in expected for register in registers_in(operand)]
    if not todo:
        return frozenset()
    definitions: dict[int, list[int]] = {}
    for pc, ins in enumerate(code):
        if ins.op in ("ld", "mov") and ins.operands:
            for register in registers_in(ins.operands[0]):
                definitions.setdefault(register, []).append(pc)
    loads, seen = set(), set[int]()
    while todo:
        register = todo.pop()
        for pc in definitions.get(register, ()) if register not in seen else ():
            if code[pc].op == "mov":
                todo += [r for operand in code[pc].operands[1:] for r in registers_in(operand)]
            else:
                loads.add(pc)
        seen.add(register)
    return frozenset(loads)
