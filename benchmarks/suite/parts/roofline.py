"""The hardware's counters for the main kernels, beside the emulator's counters.

Nsight Compute runs a process that launches each kernel of a family once. The problem is small for
the comparison with the emulator, which executes the same launch, and large for the utilisation.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import environment, watch

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
WANTED = re.compile(
    r"gpu__time_duration\.sum"
    r"|sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)"
    r"|sm__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|dram__bytes_(read|write)\.sum|dram__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|\w*bank_conflicts\w*\.sum|smsp__inst_executed\.sum|sm__warps_active\.avg\.pct\w*"
    r"|smsp__average_warps?_issue_stalled_\w+_per_issue_active\.ratio"
    r"|smsp__average_warp_latency_issue_stalled_\w+\.ratio"
    r"|l1tex__t_sectors_pipe_lsu_mem_global_op_(ld|st)\.sum|launch__registers_per_thread"
)
"""The metrics of the sections that are recorded."""

SMALL = ("--heads", "2", "--seq", "256", "--head-dim", "64")
LARGE = ("--heads", "16", "--seq", "8192", "--head-dim", "128")


def run(context: Context) -> None:
    ncu = shutil.which("ncu")
    if ncu is None:
        context.journal.skipped("hardware counters: ncu is not installed")
    families = ("forward", "fused", "split")
    for size in ("small", "large"):
        for family in families[:2] if context.tiny else families:
            step = f"{family}, {size}"
            if context.journal.done(step) or context.journal.lost(step):
                continue
            if context.budget.left < 5:
                context.journal.skipped(f"counters of {step}")
                continue
            with context.journal.step(step):
                _family(context, ncu, family, size)


def _family(context: Context, ncu: str | None, family: str, size: str) -> None:
    sizes = SMALL if size == "small" else LARGE
    if context.tiny:
        sizes = ("--heads", "1", "--seq", "64", "--head-dim", "64")
    arguments = ("--family", family, *sizes)
    if size == "small":
        for row in emulated(context, arguments):
            kernel = row.pop("kernel")
            for metric, value in row.items():
                context.writer.measure(kernel, metric, value, "", "emulator", " ".join(arguments))
    if ncu is None or context.device.kind != "gpu":
        return
    log = context.work / f"ncu-{family}-{size}.csv"
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["-k", f"regex:{'_forward_' if family == 'forward' else '_backward_'}"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    ended = watch(
        [*command, *program("gpu", arguments)],
        log=log,
        budget=context.budget.at_most(60),
        environment=environment(),
    )
    rows = parse(log.read_text(encoding="utf-8", errors="replace"))
    if not rows:
        text = log.read_text(encoding="utf-8", errors="replace")[-300:]
        context.journal.skipped(f"counters of {family}, {size}: ncu: {ended.reason or text}")
    for row in rows:
        kernel = row.pop("kernel")
        for metric, (value, unit) in row.items():
            context.writer.measure(kernel, metric, value, unit, "ncu", " ".join(arguments))


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
    found: list[dict[str, Any]] = json.loads(text.strip().splitlines()[-1])
    return found


def parse(text: str) -> list[dict[str, Any]]:
    """The wanted metrics of ncu's raw page: one row per kernel, metric -> (value, unit).

    The page is a table with a line of names and a line of units, behind lines of other text.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    table = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    names, units, found = table[0], table[1], []
    for cells in table[2:]:
        if len(cells) != len(names):
            continue
        row: dict[str, Any] = {"kernel": cells[names.index("Kernel Name")].split("(")[0]}
        for name, unit, cell in zip(names, units, cells, strict=True):
            if WANTED.fullmatch(name) and (value := number(cell)) is not None:
                row[name] = (value, unit)
        found.append(row)
    return found


def number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
