"""compute-sanitizer over one run of each kernel family, where the tool works.

In a dry run the emulator's own checkers for memory, races and barriers take its place.
"""

from __future__ import annotations

import re
import shutil
import sys

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import environment, watch

TOOLS = ("memcheck", "racecheck", "synccheck")
FAMILIES = (
    ("forward", "--seq", "200"),
    ("fused", "--seq", "200"),
    ("split", "--seq", "200"),
    ("unaligned", "--seq", "130"),
    ("forward", "--seq", "130", "--dtype", "float32"),
    ("fused", "--seq", "130", "--spec", "softcap", "--dropout", "0.2"),
)
FILTER = ("--kernel-name-exclude", "kns=at6native")
"""Leaves out torch's own kernels. To name flashgen's instead could miss them and say nothing."""
LIMIT = 60.0
"""Seconds for one run."""
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def run(context: Context) -> None:
    tool_path = shutil.which("compute-sanitizer")
    if tool_path is None and context.device.kind == "gpu":
        context.journal.skipped("compute-sanitizer is not installed")
        return
    for tool in TOOLS[:1] if context.tiny else TOOLS:
        for family, *options in FAMILIES[:3:2] if context.tiny else FAMILIES:
            step = " ".join((tool, family, *options))
            if context.journal.done(step) or context.journal.lost(step):
                continue
            if context.budget.left < 5:
                context.journal.skipped(f"sanitizer: {step}")
                continue
            with context.journal.step(step):
                _checked(context, tool_path, tool, family, options, step)


def _checked(
    context: Context, path: str | None, tool: str, family: str, options: list[str], step: str
) -> None:
    program = [sys.executable, "-m", "benchmarks.suite.one_kernel", "--family", family, *options]
    program += ["--device", context.device.kind, "--heads", "1" if context.tiny else "2"]
    log = context.work / f"sanitizer-{step.replace(' ', '_')}.log"
    on_gpu = context.device.kind == "gpu" and path is not None
    start = [str(path), "--tool", tool, "--error-exitcode", "9"]
    # Without the filter where this version of the tool does not know it.
    commands = [[*start, *FILTER, *program], [*start, *program]] if on_gpu else [program]
    for command in commands:
        ended = watch(
            command, log=log, budget=context.budget.at_most(LIMIT), environment=environment()
        )
        text = log.read_text(encoding="utf-8", errors="replace")
        found = errors_in(text) if on_gpu else ended.code
        if found is not None or ended.out_of_time:
            break
    tool = tool if on_gpu else "emulator"
    context.writer.measure(
        family, "errors", found, "", f"tool={tool} {' '.join(options)}", ended.reason
    )
    if ended.out_of_time:
        context.journal.skipped(f"sanitizer: {step}: more than {LIMIT:.0f} s")
    elif "Device not supported" in text:
        context.journal.skipped(f"sanitizer: {step}: the tool does not support this device")
    elif ended.code or found != 0:
        context.journal.failed(f"sanitizer: {step}: {ended.reason}: {text[-400:]}")


def errors_in(text: str) -> int | None:
    """How many errors the tool's last line counts; None when it has none."""
    found = SUMMARY.findall(text)
    return int(found[-1][0] or found[-1][1]) if found else None
