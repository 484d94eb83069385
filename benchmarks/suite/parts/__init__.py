"""The parts of a run, most important first."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import Part, Share

PARTS = (
    Part(Share("correctness", 150, 20), "correctness", 90, "tests/gpu", times=False),
    Part(Share("ceilings", 10, 5), "ceilings", 30, "copy bandwidth and matmul rate"),
    Part(
        Share("suite", 190, 20),
        "speed",
        100,
        "flashgen and its peers side by side",
        needs=("ceilings",),
    ),
    Part(Share("overhead", 12, 6), "overhead", 30, "host time per call"),
    Part(Share("compile", 45, 12), "compiling", 100, "first call of a new variant"),
    Part(Share("memory", 12, 6), "memory", 40, "peak memory against N"),
    Part(
        Share("sparsity", 25, 8),
        "sparsity",
        60,
        "time against the live share of a mask",
        needs=("ceilings",),
    ),
    Part(Share("blocks", 20, 8), "blocks", 40, "time against block size"),
    Part(Share("roofline", 40, 10), "roofline", 60, "hardware counters, where ncu works"),
    Part(Share("sanitizer", 30, 10), "sanitizer", 90, "compute-sanitizer, where it works"),
)
"""The summary, which every run ends with, is no part: it needs neither GPU nor time."""


def named(name: str) -> Part:
    """
    Raises:
        KeyError: there is no such part.
    """
    return {part.name: part for part in PARTS}[name]


def load(part: Part) -> Callable[[Context], None]:
    """The function of a part's module that runs it."""
    run: Callable[[Context], None] = importlib.import_module(f"{__name__}.{part.module}").run
    return run
