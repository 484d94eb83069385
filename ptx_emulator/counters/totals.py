"""Counters of a launch, and their totals by instruction and by source line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flashgen.shared.errors import called_by_users
from ptx_emulator.counters.recorder import Recorder
from ptx_emulator.counters.work import class_of, kind_of_product, multiply_adds
from ptx_emulator.errors import LaunchArguments
from ptx_emulator.ptx.instructions import is_barrier
from ptx_emulator.ptx.program import PtxProgram

FileLine = tuple[str, int]
"""A file and a line; line 0 stands for code without a source line."""


@called_by_users()
@dataclass(frozen=True)
class Totals:
    """Sums over some instructions of a kernel.

    Attributes:
        warps: warp instructions by class of work, `ptx_emulator.counters.work.CLASSES`.
        lanes: the same, multiplied by the number of active lanes.
        multiply_adds: multiply-adds on the tensor cores, by shape and types of the instruction.
        global_bytes: bytes of global memory requested by lanes; bytes of an atomic count once.
        sectors, sectors_least: 32-byte sectors of the accesses to global memory, and the minimum
            for the same bytes.
        shared_bytes: bytes that lanes moved to or from shared memory.
        wavefronts, wavefronts_least: wavefronts of shared memory and their minimum, by the model
            of `ptx_emulator.counters.banks`.
        barriers: block-wide barriers executed by warps.
    """

    warps: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, int] = field(default_factory=dict)
    multiply_adds: Mapping[str, int] = field(default_factory=dict)
    global_bytes: int = 0
    sectors: int = 0
    sectors_least: int = 0
    shared_bytes: int = 0
    wavefronts: int = 0
    wavefronts_least: int = 0
    barriers: int = 0

    @property
    def warp_instructions(self) -> int:
        return sum(self.warps.values())

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts in excess of the minimum."""
        return self.wavefronts - self.wavefronts_least

    @property
    def tensor_multiply_adds(self) -> int:
        return sum(self.multiply_adds.values())


_RECORDED = ("sectors", "sectors_least", "shared_bytes", "wavefronts", "wavefronts_least")


@called_by_users()
class Counters:
    """Totals over all warps of a launch.

    Attributes:
        segments: number of warps that executed each range of instructions (start, end).
        segment_runs: number of executed segments.
        global_read_bytes, global_write_bytes: bytes requested by active lanes.
        global_read_sectors, global_write_sectors: distinct 32-byte sectors per warp request.
        shared_read_bytes, shared_write_bytes: bytes moved by active lanes.
        seconds: wall time of the execution.
        recorded: the recorder of a launch with profile=True, else None.
    """

    def __init__(self, program: PtxProgram, recorded: Recorder | None) -> None:
        self._program = program
        self.recorded = recorded
        self.segments: dict[tuple[int, int], int] = {}
        self.segment_runs = 0
        self.global_read_bytes = 0
        self.global_write_bytes = 0
        self.global_read_sectors = 0
        self.global_write_sectors = 0
        self.shared_read_bytes = 0
        self.shared_write_bytes = 0
        self.local_bytes = 0
        self.seconds = 0.0

    def add(self, other: Counters) -> None:
        """Adds the totals of another launch of the same kernel; `recorded` stays."""
        for name, value in vars(other).items():
            if isinstance(value, int | float):
                setattr(self, name, getattr(self, name) + value)
        for segment, warps in other.segments.items():
            self.segments[segment] = self.segments.get(segment, 0) + warps

    def instruction_counts(self) -> list[int]:
        """Number of warps that executed each instruction of the kernel."""
        size = len(self._program.code)
        steps = [0] * (size + 2)
        for (start, end), warps in self.segments.items():
            steps[start] += warps
            steps[end] -= warps
        return list(itertools.accumulate(steps))[:size]

    @property
    def opcodes(self) -> Counter[str]:
        """Warp instructions by full name, such as ``mul.f32``."""
        return self._counted(lambda pc: self._program.code[pc].name)

    @property
    def classes(self) -> Counter[str]:
        """Warp instructions by opcode without modifiers, such as ``mul``."""
        return self._counted(lambda pc: self._program.code[pc].op)

    @property
    def lines(self) -> Counter[str]:
        """Warp instructions by ``file:line`` of the source."""
        return self._counted(self._program.source_line)

    def _counted(self, name: Callable[[int], str]) -> Counter[str]:
        totals: Counter[str] = Counter()
        for pc, count in enumerate(self.instruction_counts()):
            if count:
                totals[name(pc)] += count
        return totals

    @property
    def warp_instructions(self) -> int:
        return sum(self.instruction_counts())

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds on the tensor cores."""
        counts = enumerate(self.instruction_counts())
        return sum(count * multiply_adds(self._program.code[pc]) for pc, count in counts if count)

    # ---- of launches with profile=True

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self._program.name

    def total(self) -> Totals:
        """Totals of the whole launch.

        Raises:
            LaunchArguments: the launch was not profiled.
        """
        counts = self.instruction_counts()
        return self._totals(range(len(counts)), counts)

    def by_line(self, outermost: bool = False) -> dict[FileLine, Totals]:
        """Totals by source line, sorted.

        Args:
            outermost: an instruction of an inlined function counts for the line of the kernel that
                called it, rather than for its own.

        Raises:
            LaunchArguments: the launch was not profiled.
        """
        instructions: dict[FileLine, list[int]] = {}
        files = self._program.module.files
        for pc, ins in enumerate(self._program.code):
            number, line = ins.outer if outermost else ins.line
            instructions.setdefault((files.get(number, "?"), line), []).append(pc)
        counts = self.instruction_counts()
        sources = sorted(instructions)
        counted = {source: self._totals(instructions[source], counts) for source in sources}
        return {source: totals for source, totals in counted.items() if totals.warps}

    def by_instruction(self) -> list[tuple[str, Totals]]:
        """Totals of each executed instruction, with its PTX text, in program order.

        Raises:
            LaunchArguments: the launch was not profiled.
        """
        counts = self.instruction_counts()
        executed = [pc for pc, count in enumerate(counts) if count]
        return [(self._program.text(pc), self._totals((pc,), counts)) for pc in executed]

    def _totals(self, chosen: Iterable[int], counts: list[int]) -> Totals:
        recorded = self.recorded
        if recorded is None:
            what = "this launch was not profiled"
            where = f"kernel {self.kernel}"
            numbers = "it ran with profile=False, the default, because recording is slower"
            way_out = "use emulator.launch(..., profile=True), or `with emulator.profiling():`"
            raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
        active = recorded.lanes
        warps: Counter[str] = Counter()
        lanes: Counter[str] = Counter()
        products: Counter[str] = Counter()
        executed, barriers = [], 0
        for pc in chosen:
            if not counts[pc]:
                continue
            executed.append(pc)
            ins = self._program.code[pc]
            kind = class_of(ins)
            warps[kind] += counts[pc]
            lanes[kind] += int(active[pc])
            if kind == "tensor":
                products[kind_of_product(ins)] += counts[pc] * multiply_adds(ins)
            elif is_barrier(ins):
                barriers += counts[pc]
        return Totals(
            warps=dict(warps),
            lanes=dict(lanes),
            multiply_adds=dict(products),
            global_bytes=int(recorded.bytes[executed].sum()),
            barriers=barriers,
            **{name: int(getattr(recorded, name)[executed].sum()) for name in _RECORDED},
        )

    def __repr__(self) -> str:
        return (
            f"Counters(warp_instructions={self.warp_instructions:,}, "
            f"global read {self.global_read_bytes:,} B in {self.global_read_sectors:,} sectors, "
            f"written {self.global_write_bytes:,} B in {self.global_write_sectors:,} sectors, "
            f"shared read {self.shared_read_bytes:,} B, written {self.shared_write_bytes:,} B)"
        )


def added(parts: Iterable[Totals]) -> Totals:
    """The sum of several totals."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name in [total.name for total in fields(Totals)]:
            value = getattr(part, name)
            if isinstance(value, Mapping):
                whole[name] = dict(Counter(whole.get(name, {})) + Counter(value))
            else:
                whole[name] = whole.get(name, 0) + value
    return Totals(**whole)
