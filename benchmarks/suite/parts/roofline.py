"""The hardware's counters for the main kernels, beside the emulator's counters of the same launch.

The problem is small, because the emulator executes it too; the part "stalls" has a large one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.suite import ncu
from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import environment, watch

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "LaunchStats",
    "Occupancy",
)
FAMILIES = ("fused", "split")


def run(context: Context) -> None:
    absent = ncu.missing(context)
    for family in FAMILIES[:1] if context.tiny else FAMILIES:
        if context.journal.done(family) or context.journal.lost(family):
            continue
        if context.budget.left < 5:
            context.journal.skipped(f"counters of {family}")
            continue
        with context.journal.step(family):
            _family(context, family, counted=not absent and context.device.kind == "gpu")


def _family(context: Context, family: str, *, counted: bool) -> None:
    arguments = ("--family", family, "--seq", "64" if context.tiny else "256")
    setting = " ".join(arguments)
    for row in emulated(context, arguments):
        kernel = row.pop("kernel")
        for metric, value in row.items():
            context.writer.measure(kernel, metric, value, "", "emulator", setting)
    if not counted:
        return
    options = [word for section in SECTIONS for word in ("--section", section)]
    texts = ncu.pages(context, family, ncu.OURS, options, program("gpu", arguments))
    for row in ncu.raw(texts.get("raw", "")):
        kernel = row.pop("kernel")
        for metric, (value, unit) in row.items():
            context.writer.measure(kernel, metric, value, unit, "ncu", setting)


def program(device: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.suite.one_kernel", "--device", device, *arguments]


def emulated(context: Context, arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    """The emulator's counters for the same launches."""
    log = Path(context.work) / f"emulated-{arguments[1]}.json"
    log.unlink(missing_ok=True)
    ended = watch(
        program("emulator", arguments),
        log=log,
        budget=context.budget.at_most(60),
        environment=environment(),
    )
    text = log.read_text(encoding="utf-8", errors="replace")
    if ended.out_of_time:
        context.journal.skipped(f"emulator's counters, {arguments[1]}: {ended.reason}")
        return []
    if ended.code:
        context.journal.failed(f"emulator, {arguments[1]}: {ended.reason}: {text[-400:]}")
        return []
    counts: list[dict[str, Any]] = json.loads(text.strip().splitlines()[-1])
    return counts
