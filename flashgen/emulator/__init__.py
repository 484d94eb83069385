"""Executes PTX on the CPU with numpy: no GPU, no driver; with checkers and counters.

It knows PTX only, nothing of attention or of the compiler that wrote the text. :func:`launch` is
the entry. The path of a kernel: ``lexer`` and ``parser`` (text to :mod:`ptx` data), ``flatten``
(calls inlined), ``program`` (flow and liveness), ``codegen`` with the ``emit_*`` modules (one
Python function per segment), ``machine`` (cohorts of warps through segments). What instructions
mean is in ``integers``, ``floats``, ``halves``, ``convert``, ``warp``, ``tensor``, ``access``,
``atomics``, ``copies`` and ``barriers``; ``races`` checks, ``counters`` counts.
"""

from flashgen.emulator.counters import Counters
from flashgen.emulator.entry import launch, load
from flashgen.emulator.errors import (
    BarrierDivergence,
    DeadlockError,
    LaunchArguments,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    RaceError,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
)

__all__ = [
    "BarrierDivergence",
    "Counters",
    "DeadlockError",
    "LaunchArguments",
    "Misaligned",
    "OutOfBounds",
    "PtxSyntaxError",
    "RaceError",
    "StepLimit",
    "Trapped",
    "UninitialisedRead",
    "UnknownInstruction",
    "launch",
    "load",
]
