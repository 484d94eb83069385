"""What a launch did, counted while it ran."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.emulator.program import Program


class Counters:
    """Totals over all warps of a launch.

    Attributes:
        segments: warps that executed each stretch of instructions (start, end).
        segment_runs: how many compiled segments were executed.
        global_read_bytes, global_write_bytes: bytes requested by active lanes.
        global_read_sectors, global_write_sectors: distinct 32-byte sectors per warp request.
        shared_read_bytes, shared_write_bytes: bytes moved by active lanes.
        seconds: wall time of the execution.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
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

    def instruction_counts(self) -> list[int]:
        """Warp executions of every instruction of the kernel."""
        size = len(self._program.code) + 1
        steps = [0] * (size + 1)
        for (start, end), warps in self.segments.items():
            steps[start] += warps
            steps[end] -= warps
        total, counts = 0, []
        for step in steps[: size - 1]:
            total += step
            counts.append(total)
        return counts

    @property
    def opcodes(self) -> Counter[str]:
        """Warp instructions by full name, such as ``mul.f32``."""
        found: Counter[str] = Counter()
        for ins, count in zip(self._program.code, self.instruction_counts(), strict=True):
            if count:
                found[ins.name] += count
        return found

    @property
    def classes(self) -> Counter[str]:
        """Warp instructions by opcode without modifiers, such as ``mul``."""
        found: Counter[str] = Counter()
        for name, count in self.opcodes.items():
            found[name.split(".")[0]] += count
        return found

    @property
    def lines(self) -> Counter[str]:
        """Warp instructions by ``file:line`` of the source."""
        found: Counter[str] = Counter()
        for pc, count in enumerate(self.instruction_counts()):
            if count:
                found[self._program.source_line(pc)] += count
        return found

    @property
    def warp_instructions(self) -> int:
        return sum(self.instruction_counts())

    def __repr__(self) -> str:
        return (
            f"Counters(warp_instructions={self.warp_instructions:,}, "
            f"global read {self.global_read_bytes:,} B in {self.global_read_sectors:,} sectors, "
            f"written {self.global_write_bytes:,} B in {self.global_write_sectors:,} sectors, "
            f"shared read {self.shared_read_bytes:,} B, written {self.shared_write_bytes:,} B)"
        )
