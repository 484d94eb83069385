"""The parts of a run, most important first."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import Part, Share

PARTS = (
    Part(Share("doctor", 120, 20), "doctor", 120, "flashgen doctor on each code path", times=False),
    Part(
        Share("boxes", 15, 10),
        "correctness:run_boxes",
        90,
        "copies of boxes larger than the tensor",
        times=False,
    ),
    Part(
        Share("paths", 40, 15),
        "correctness:run_paths",
        90,
        "the tests of one architecture's code path",
        times=False,
    ),
    Part(
        Share("packed", 15, 10),
        "sanitizer:run_packed",
        90,
        "compute-sanitizer on packed sequences with poisoned neighbours",
        times=False,
    ),
    Part(Share("correctness", 90, 20), "correctness", 90, "tests/gpu, the rest", times=False),
    Part(Share("stalls", 40, 15), "stalls", 150, "where warps wait, where ncu works"),
    Part(Share("ceilings", 10, 5), "ceilings", 30, "copy bandwidth and matmul rate"),
    Part(Share("forms", 45, 15), "forms", 90, "forms of one call: tiles, edited kernels"),
    Part(
        Share("suite", 140, 20),
        "speed",
        100,
        "flashgen and its peers side by side",
        needs=("ceilings",),
    ),
    Part(Share("overhead", 12, 6), "overhead", 30, "host time per call"),
    Part(
        Share("models", 90, 30),
        "models",
        120,
        "three whole models on each attention backend, trained and decoding",
    ),
    Part(Share("compile", 25, 12), "compiling", 100, "first call of a new variant"),
    Part(Share("memory", 10, 6), "memory", 40, "peak memory against N"),
    Part(
        Share("sparsity", 15, 8),
        "sparsity",
        60,
        "time against the live share of a mask",
        needs=("ceilings",),
    ),
    Part(Share("roofline", 15, 10), "roofline", 90, "counters beside the emulator's"),
    Part(Share("sanitizer", 15, 10), "sanitizer", 90, "compute-sanitizer, where it works"),
)
"""The summary, which every run ends with, is no part: it needs neither GPU nor time."""


def named(name: str) -> Part:
    """
    Raises:
        KeyError: there is no such part.
    """
    return {part.name: part for part in PARTS}[name]


def load(part: Part) -> Callable[[Context], None]:
    """The function that runs a part: ``run`` of its module, or the one named behind a colon."""
    module, _, function = part.module.partition(":")
    loaded = importlib.import_module(f"{__name__}.{module}")
    run: Callable[[Context], None] = getattr(loaded, function or "run")
    return run
