"""What the accesses of a kernel to memory are: how narrow, strong or weak, releasing, read-only."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.emulator.ptx.instructions import as_immediate, may_access_between_threads
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_ORDERED = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


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
        if ins.op == "wmma" and "mma" not in ins.mods:
            element = TYPE_BYTES[ins.mods[-1]]
            shared, device = min(shared, element), min(device, element)
        if ins.op == "tensormap":
            shared, device = min(shared, 4), min(device, 4)
        if ins.op == "mbarrier":
            shared = min(shared, 8)
        if ins.op not in ("ld", "ldu", "st", "atom", "red", "cp"):
            continue
        kinds = [m for m in ins.mods if m in TYPE_BYTES]
        if "bulk" in ins.mods:
            continue  # in chunks of 16 bytes
        if ins.op == "cp":
            size = as_immediate(ins.operands[2]) if len(ins.operands) > 2 else 16
            shared, device = min(shared, size or 16), min(device, size or 16)
            if len(ins.operands) > 3 and "commit_group" not in ins.mods:
                device = min(device, _smallest_source(ins))
            continue
        if not kinds or "param" in ins.mods or "local" in ins.mods:
            continue
        size = TYPE_BYTES[kinds[-1]]
        vector = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
        size = size if ins.op in ("atom", "red") else size * vector
        if not any(m.startswith("global") for m in ins.mods):
            shared = min(shared, size)
        if not any(m.startswith("shared") for m in ins.mods):
            device = min(device, size)
        if _ORDERED.intersection(ins.mods) or ins.op in ("atom", "red"):
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


def _smallest_source(ins: Instruction) -> int:
    """Bytes of the smallest global read of a cp.async with a source size."""
    size = as_immediate(ins.operands[2])
    given = as_immediate(ins.operands[3])
    if given is None or size is None:
        # A run-time size is 0 or the whole size in practice; others are copied byte by byte.
        return size or 16
    return size if given in (0, size) else 1
