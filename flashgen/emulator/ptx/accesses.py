"""What the accesses of a kernel to memory are: how narrow, strong or weak, releasing, read-only."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.emulator.ptx.instructions import fact, may_access_between_threads, opcode_of
from flashgen.emulator.ptx.syntax import Instruction


class Accesses(NamedTuple):
    """The accesses of a kernel; the sets hold numbers of instructions.

    Attributes:
        shared_vector, global_vector: bytes of the narrowest access to shared and to global memory.
            Accesses are aligned to their size, so a shadow with vectors of this width is exact.
        strong: atomic, or with an order (.relaxed, .acquire, ...), or volatile.
        volatile: the volatile ones of these.
        releases: strong ones that release.
        read_only: loads from global memory that nothing may write (.nc).
        between_threads: whether one thread may read what another one writes.
        synchronises: whether fences and strong accesses may order other accesses.
    """

    shared_vector: int
    global_vector: int
    strong: frozenset[int]
    volatile: frozenset[int]
    releases: frozenset[int]
    read_only: frozenset[int]
    between_threads: bool
    synchronises: bool


def find_accesses(code: list[Instruction]) -> Accesses:
    """The accesses of flat code."""
    shared, device = 16, 16
    strong, volatile, releases, read_only = (set[int]() for _ in range(4))
    fences = False
    for pc, ins in enumerate(code):
        fences |= ins.op in ("membar", "fence")
        narrowest = opcode_of(ins).accesses
        if narrowest is not None:
            of_shared, of_device = narrowest(ins)
            shared, device = min(shared, of_shared), min(device, of_device)
        if fact("strong", ins):
            strong.add(pc)
            if "volatile" in ins.mods:
                volatile.add(pc)
            if {"release", "acq_rel"} & set(ins.mods):
                releases.add(pc)
                fences = True
        if "nc" in ins.mods or ins.op == "ldu":
            read_only.add(pc)
    return Accesses(
        shared,
        device,
        frozenset(strong),
        frozenset(volatile),
        frozenset(releases),
        frozenset(read_only),
        any(may_access_between_threads(ins) for ins in code),
        fences and bool(strong),
    )
