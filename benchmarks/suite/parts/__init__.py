"""The parts of a run, most important first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.suite.budget import Share
from benchmarks.suite.context import Context


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        share: of the time; weights are about the seconds of a run of nine minutes.
        module: of this package, whose ``run(context)`` is called in a process of its own.
        stall: seconds without a line in the journal after which that process is taken for hung.
        what: in words.
        times: nothing may run beside it.
        needs: parts whose numbers it uses.
    """

    share: Share
    module: str
    stall: float
    what: str
    times: bool = True
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.share.name

    def load(self) -> Callable[[Context], None]:
        run: Callable[[Context], None] = importlib.import_module(
            f"benchmarks.suite.parts.{self.module}"
        ).run
        return run


PARTS = (
    Part(Share("correctness", 150, 20), "correctness", 90, "tests/test_gpu_*.py", times=False),
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
