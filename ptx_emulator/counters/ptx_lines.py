"""The instructions of a kernel by the lines of its PTX, with the lines of the source of each."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from ptx_emulator.counters.totals import Counters, FileLine
from ptx_emulator.errors import LaunchArguments
from ptx_emulator.ptx.program import PtxProgram


@dataclass(frozen=True)
class PtxLine:
    """A line of PTX with instructions, and the work that a launch counted for it.

    Attributes:
        line: the number of the line in the PTX text, from 1.
        last: the last line of the instruction, which is ``line`` for most.
        source: the file and line that ``.loc`` names; line 0 without a ``.loc``.
        outer: the file and line of the kernel at which the code of ``source`` is inlined.
        warps: warp instructions.
        sectors: 32-byte sectors of global memory.
        conflicts: wavefronts of shared memory in excess of the minimum.
        global_bytes, shared_bytes: bytes that lanes moved.
    """

    line: int
    last: int
    source: FileLine
    outer: FileLine
    warps: int = 0
    sectors: int = 0
    conflicts: int = 0
    global_bytes: int = 0
    shared_bytes: int = 0


def ptx_lines(program: PtxProgram, counters: Counters | None = None) -> tuple[PtxLine, ...]:
    """The lines of a kernel's PTX that have instructions, sorted.

    Several instructions of a line, and the copies of a device function that is inlined at several
    calls, are one entry.

    Args:
        program: the decoded kernel.
        counters: the counters of a launch of it; None for counts of 0. Those of a launch that was
            not profiled have warp instructions alone.

    Raises:
        LaunchArguments: the counters are those of another kernel.
    """
    if counters is not None and counters.kernel != program.name:
        what = "the counters are those of another kernel"
        where = "ptx_emulator.counters.ptx_lines"
        numbers = f"counters of {counters.kernel}; PTX of {program.name}"
        way_out = "the counters of a launch of this kernel"
        raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
    text, files = program.module.text, program.module.files
    starts = [0]
    starts += [position + 1 for position, letter in enumerate(text) if letter == "\n"]
    counts = [0] * len(program.code) if counters is None else counters.instruction_counts()
    recorded = None if counters is None else counters.recorded
    lines: dict[int, PtxLine] = {}
    for pc, ins in enumerate(program.code):
        line, last = (bisect_right(starts, position) for position in (ins.position, ins.end))
        file, outer_file = (files.get(number, "?") for number in (ins.line[0], ins.outer[0]))
        sources = (file, ins.line[1]), (outer_file, ins.outer[1])
        earlier = lines.get(line, PtxLine(line, last, *sources))
        work = {"warps": counts[pc]}
        if recorded is not None:
            conflicts = recorded.wavefronts[pc] - recorded.wavefronts_least[pc]
            work |= {"sectors": recorded.sectors[pc], "conflicts": conflicts}
            work |= {"global_bytes": recorded.bytes[pc], "shared_bytes": recorded.shared_bytes[pc]}
        sums = {name: getattr(earlier, name) + int(value) for name, value in work.items()}
        lines[line] = replace(earlier, last=max(last, earlier.last), **sums)
    return tuple(lines[line] for line in sorted(lines))
