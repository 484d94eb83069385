"""Executes PTX on the CPU with numpy: no GPU, no driver; with checkers and counters.

It knows PTX only, nothing of attention or of the compiler that wrote the text. :func:`launch` is
the entry. The path of a kernel: ``lexer`` and ``parser`` (text to :mod:`ptx` data), ``flatten``
(calls inlined), ``program`` (flow and liveness), ``codegen`` with the ``emit_*`` modules (one
Python function per segment), ``machine`` (cohorts of warps through segments). What instructions
mean is in ``integers``, ``floats``, ``halves``, ``convert``, ``warp``, ``tensor``, ``access``,
``atomics``, ``copies`` and ``barriers``; those of sm_90 in ``mbarriers``, ``bulk`` with ``tma``,
``wgmma`` with ``chains``, ``products`` and ``descriptors``, ``register_order`` with ``hazards``,
``warpgroup`` and ``clusters``. ``races`` checks, with ``clocks``, and ``proxy`` for what is
asynchronous; ``counters`` counts: in a launch with profile=True also what ``recorder`` records, by
the models of ``banks`` and ``work``. ``l2`` runs what was recorded through a cache.
"""

from flashgen.emulator.counters import Counters, Totals
from flashgen.emulator.entry import launch, load, profiling
from flashgen.emulator.errors import (
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
)
from flashgen.emulator.tma import TensorMap

__all__ = [
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
    "launch",
    "load",
    "profiling",
]
