"""Executes PTX on the CPU with numpy, with checkers and counters; needs neither GPU nor driver.

The emulator executes any PTX module and contains nothing specific to attention. :func:`launch`
is the entry point. The package consists of floors; a module imports its own floor and the floors
above it in this list, never those below:

``errors``    The error classes.
``ptx``       PTX text to data: lexer, parser, inlined calls; control flow, liveness, register types
              and polls of one kernel (`PtxProgram`).
``state``     Cohorts (warps that execute together), memories, `Wave`, the state of a launch that
              all floors below read, and `Execution`, an instruction and the lanes that execute it,
              which most functions of these floors take.
``counters``  Instruction and byte counters, bank conflicts, the recorder of profiled launches, and
              a model of the L2 cache.
``checks``    Bounds, races in shared and global memory (vector clocks) between warps and between
              the lanes of a warp, the lanes that take part in warp-wide instructions, the
              asynchronous proxy and the sources of copies, waits for mbarriers that come too late,
              launches that overlap, registers of wgmma in flight, and the deadlock report.
``isa``       The instructions, one module per family. `instruction` registers an opcode, once: its
              facts (`Opcode`: unit, result, width, accesses) and the emitter that writes its code.
              Emitters write one Python function per segment of PTX; it calls the functions over
              numpy arrays that stand in the same module.
``machine``   Scheduler, barriers, mbarriers, asynchronous and bulk copies, tensor maps, wgmma.
``entry``     `launch`, `load`, `profiling` and `watching`.

To add an instruction, register it in the module of its family in ``isa``. To add a checker, write
its class in ``checks``, create it in `machine.Machine`, declare it in `state.Wave`, and call it
where ``isa`` or ``machine`` accesses memory.
"""

from ptx_emulator.counters.totals import Counters, Totals
from ptx_emulator.entry import launch, load, profiling, watching
from ptx_emulator.errors import (
    FORGIVEN,
    BarrierDivergence,
    DeadlockError,
    FenceError,
    InFlight,
    LaunchArguments,
    MbarrierMisuse,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    RaceError,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
    severity,
)
from ptx_emulator.isa.tensor_core_sums import has_sums_of
from ptx_emulator.machine.tma import TensorMap

__all__ = [
    "FORGIVEN",
    "BarrierDivergence",
    "Counters",
    "DeadlockError",
    "FenceError",
    "InFlight",
    "LaunchArguments",
    "MbarrierMisuse",
    "Misaligned",
    "OutOfBounds",
    "PtxSyntaxError",
    "RaceError",
    "StepLimit",
    "TensorMap",
    "Totals",
    "Trapped",
    "UninitialisedRead",
    "UnknownInstruction",
    "has_sums_of",
    "launch",
    "load",
    "profiling",
    "severity",
    "watching",
]
