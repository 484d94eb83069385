"""The compiled segments of a kernel: each is compiled when it is first executed, and kept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ptx_emulator.checks import bounds
from ptx_emulator.checks.wgmma_registers import WgmmaHazards
from ptx_emulator.isa import (
    atomics,
    barriers,
    cluster,
    comparisons,
    control,
    convert,
    copies,
    definedness,
    floats,
    integers,
    memory,
    mma,
    printing,
    warp,
    wgmma,
    wmma,
)
from ptx_emulator.isa.generator import RUNTIME, Generator
from ptx_emulator.ptx.program import PtxProgram

# They register the opcodes, and have the functions that their code calls.
for _family in (
    *(atomics, barriers, bounds, cluster, comparisons, control, convert, copies, definedness),
    *(floats, integers, memory, mma, printing, warp, wgmma, wmma),
):
    RUNTIME.update(inspect.getmembers(_family, inspect.isfunction))


class Segment(NamedTuple):
    """A compiled stretch of code: instructions ``start`` to ``end`` (exclusive).

    ``run(machine, cohort)`` returns True when it did nothing because the cohort has to wait.
    """

    run: Callable[[Any, Any], Any]
    start: int
    end: int
    text: str


class Segments:
    """The segments of one program."""

    def __init__(self, program: PtxProgram) -> None:
        self.program = program
        self._hazards = WgmmaHazards(program)
        self.segment_at = functools.cache(self._segment_at)

    def _segment_at(self, pc: int, masked: bool, check: bool, profile: bool = False) -> Segment:
        """The segment that starts at instruction ``pc``.

        Args:
            masked: for cohorts with inactive lanes.
            check: with the code of the checkers.
            profile: with the code of the recorder.
        """
        generator = Generator(self.program, self._hazards, masked, check, profile)
        return Segment(generator.generate(pc), pc, generator.end, generator.text)
