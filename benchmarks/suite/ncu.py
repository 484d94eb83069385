"""Nsight Compute: runs a program under it, and reads the pages of its report.

Columns are found by their names, because their number and order differ between versions.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import environment, watch

SECONDS = 60.0
"""For one program under it."""
OURS = "_(forward|backward)_"
"""In the names of flashgen's kernels that compute scores."""
WANTED = re.compile(
    r"gpu__time_duration\.sum|sm__cycles_elapsed\.max"
    r"|sm__(inst_executed_)?pipe_tensor\w*\.(sum|avg\.pct_of_peak_sustained_(active|elapsed))"
    r"|sm__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|dram__bytes_(read|write)\.sum|dram__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|\w*bank_conflicts\w*\.sum|smsp__inst_executed(_pipe_(xu|lsu|alu|fma)|_op_shared_(ld|st))?\.sum"
    r"|l1tex__data_pipe_lsu_wavefronts_mem_shared(_op_(ld|st))?\.sum"
    r"|lts__t_sector_hit_rate\.pct|lts__t_(sectors|requests)_op_red\.sum"
    r"|smsp__inst_issued\.avg\.per_cycle_active|sm__warps_active\.avg\.pct\w*"
    r"|smsp__average_warps?_issue_stalled_\w+_per_issue_active\.ratio"
    r"|smsp__average_warp_latency_issue_stalled_\w+\.ratio"
    r"|l1tex__t_sectors_pipe_lsu_mem_global_op_(ld|st)\.sum|launch__registers_per_thread"
)
"""The metrics that are recorded."""


def missing(context: Context) -> bool:
    """Whether there is a GPU and no Nsight Compute, which is noted."""
    absent = context.device.kind == "gpu" and shutil.which("ncu") is None
    if absent:
        context.journal.skipped("hardware counters: ncu is not installed")
    return absent


def pages(
    context: Context,
    name: str,
    kernels: str,
    options: Sequence[str],
    program: Sequence[str],
    page_names: Sequence[str] = ("raw",),
) -> dict[str, str]:
    """The text of pages of the report on a program's kernels; {} where there is none, as is noted.

    Args:
        name: the name of its files in the folder of logs.
        kernels: a regular expression for names of kernels.
        options: options of ncu that select the measurements.
        program: the command.
        page_names: pages of ncu, such as "raw" and "source".
    """
    report, budget = context.work / f"{name}.ncu-rep", context.budget.at_most(SECONDS)
    log = context.work / f"ncu-{name}.log"
    for file in (report, log):
        file.unlink(missing_ok=True)
    # Without processes that the program starts, such as the trial of a code path.
    command = ["ncu", "--clock-control", "none", "--target-processes", "application-only"]
    command += [
        "-k",
        f"regex:{kernels}",
        *options,
        "-f",
        "-o",
        str(report.with_suffix("")),
        *program,
    ]
    ended = watch(command, log=log, budget=budget, environment=environment())
    if not report.exists():
        tail = log.read_text(encoding="utf-8", errors="replace")[-300:]
        context.journal.skipped(f"counters of {name}: ncu: {ended.reason}: {tail}")
        return {}
    texts = {}
    for page in page_names:
        file = context.work / f"{name}-{page}.csv"
        file.unlink(missing_ok=True)
        command = ["ncu", "-i", str(report), "--page", page, "--csv"]
        command += ["--print-units", "base"] if page == "raw" else []
        watch(command, log=file, budget=context.budget.at_most(SECONDS), environment=environment())
        texts[page] = file.read_text(encoding="utf-8", errors="replace")
    return texts


def raw(text: str) -> list[dict[str, Any]]:
    """The wanted metrics of ncu's raw page: one row per kernel, metric -> (value, unit).

    The page is a table with a line of names and a line of units, behind lines of other text.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    table = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    names, units, rows = table[0], table[1], []
    for cells in table[2:]:
        if len(cells) != len(names):
            continue
        row: dict[str, Any] = {"kernel": cells[names.index("Kernel Name")].split("(")[0]}
        for name, unit, cell in zip(names, units, cells, strict=True):
            if WANTED.fullmatch(name) and (value := number(cell)) is not None:
                row[name] = (value, unit)
        rows.append(row)
    return rows


def number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


# ---- samples of instructions -----------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """One instruction of a kernel.

    Attributes:
        text: as it is disassembled.
        samples: how often a warp was found at it.
        executed: the number of warps that ran it.
        stalls: the samples by the reason of the wait, without zeros.
    """

    text: str
    samples: float
    executed: float = 0.0
    stalls: Counter[str] = field(default_factory=Counter)

    @property
    def op(self) -> str:
        """The operation with its modifiers, without a predicate."""
        words = self.text.split()
        return next((word.rstrip(";") for word in words if not word.startswith("@")), "")


STALL = re.compile(r"stall_(\w+)")
SAMPLES = (r"Warp Stall Sampling \(All\b.*", r"# Samples", r".*\bSamples\b.*")
"""The column of all samples, by what versions of ncu call it; the first that is there."""


def source(text: str) -> list[tuple[str, list[Sampled]]]:
    """The kernels of ncu's source page, in the order of their launches, with their instructions.

    Before each table stands a line with the kernel's name, then one with the names of columns.
    """
    kernels: list[tuple[str, list[Sampled]]] = []
    kernel, names = "", None
    for cells in csv.reader(io.StringIO(text)):
        if cells[:1] == ["Kernel Name"]:
            kernel, names = cells[1].split("(")[0], None
        elif "Source" in cells and any("Address" in cell for cell in cells):
            names = cells
            kernels.append((kernel, []))
        elif names is not None and len(cells) == len(names):
            kernels[-1][1].append(_instruction(names, cells))
    return kernels


def _instruction(names: list[str], cells: list[str]) -> Sampled:
    def value(*patterns: str) -> float:
        for pattern in patterns:
            for name, cell in zip(names, cells, strict=True):
                if re.fullmatch(pattern, name):
                    return number(cell) or 0.0
        return 0.0

    stalls: Counter[str] = Counter()
    for name, cell in zip(names, cells, strict=True):
        # Beside each stands "stall_x (Not Issued)", a part of it.
        if (match := STALL.fullmatch(name)) and (count := number(cell)):
            stalls[match[1]] += int(count)
    text = cells[names.index("Source")].strip()
    executed = value("Instructions Executed", ".*Instructions Executed.*")
    return Sampled(text, value(*SAMPLES), executed, stalls)
