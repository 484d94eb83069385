"""compute-sanitizer over one run of each kernel family, where the tool works.

Packed sequences have a part of their own, which comes early: each path runs doctor's problem with
NaN in the rows between and behind its sequences. In a dry run the emulator takes the tool's place.
"""

from __future__ import annotations

import re
import shutil
import sys

from benchmarks.suite.context import Context
from benchmarks.suite.supervisor import environment, watch
from flashgen.calls.trust import trial
from flashgen.tools.doctor.diagnosis import NO_DEVICE

TOOLS = ("memcheck", "racecheck", "synccheck")
FAMILIES = (
    ("forward", "--seq", "200"),
    ("fused", "--seq", "200"),
    ("split", "--seq", "200"),
    ("unaligned", "--seq", "130"),
    ("forward", "--seq", "130", "--dtype", "float32"),
    ("fused", "--seq", "130", "--spec", "softcap", "--dropout", "0.2"),
)
FILTER = ("--kernel-name-exclude", "kns=at6native", "--report-api-errors", "no")
"""Leaves out torch's own kernels, and calls of the driver that return an error: cuda-bindings asks
for functions that an older driver does not have. To name flashgen's kernels instead could miss them
and say nothing."""
LIMIT = 60.0
"""Seconds for one run."""
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


PACKED = "packed, poisoned neighbours, bfloat16, d 64"
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, so that the tool sees an access beside it."""


def run_packed(context: Context) -> None:
    on_gpu = context.device.kind == "gpu"
    tool_path = _tool(context)
    if tool_path is None and on_gpu:
        return
    device = context.device.torch.index or 0 if on_gpu else NO_DEVICE
    for arch in context.device.archs:
        program = trial.command(arch, device, "--problem", PACKED)
        _step(context, tool_path, TOOLS[0], (f"packed {arch}",), program)


def run(context: Context) -> None:
    tool_path = _tool(context)
    if tool_path is None and context.device.kind == "gpu":
        return
    for tool in TOOLS[:1] if context.tiny else TOOLS:
        for family, *options in FAMILIES[:3:2] if context.tiny else FAMILIES:
            program = [sys.executable, "-m", "benchmarks.suite.one_kernel", "--family", family]
            program += [*options, "--device", context.device.kind]
            program += ["--heads", "1" if context.tiny else "2"]
            _step(context, tool_path, tool, (family, *options), program)


def _tool(context: Context) -> str | None:
    """The path of the tool; its absence on a GPU is noted."""
    path = shutil.which("compute-sanitizer")
    if path is None and context.device.kind == "gpu":
        context.journal.skipped("compute-sanitizer is not installed")
    return path


def _step(
    context: Context, path: str | None, tool: str, words: tuple[str, ...], program: list[str]
) -> None:
    """Runs a program under the tool once, while there is time."""
    step = " ".join((tool, *words))
    if context.journal.done(step) or context.journal.lost(step):
        return
    if context.budget.left < 5:
        context.journal.skipped(f"sanitizer: {step}")
        return
    with context.journal.step(step):
        _checked(context, path, tool, words, program, step)


def _checked(
    context: Context,
    path: str | None,
    tool: str,
    words: tuple[str, ...],
    program: list[str],
    step: str,
) -> None:
    log = context.work / f"sanitizer-{step.replace(' ', '_')}.log"
    on_gpu = context.device.kind == "gpu" and path is not None
    start = [str(path), "--tool", tool, "--error-exitcode", "9"]
    # Without the filter where this version of the tool does not have it.
    commands = [[*start, *FILTER, *program], [*start, *program]] if on_gpu else [program]
    for command in commands:
        ended = watch(
            command,
            log=log,
            budget=context.budget.at_most(LIMIT),
            environment=environment() | UNCACHED,
        )
        text = log.read_text(encoding="utf-8", errors="replace")
        errors = errors_in(text) if on_gpu else ended.code
        if errors is not None or ended.out_of_time:
            break
    setting = f"tool={tool if on_gpu else 'emulator'} {' '.join(words[1:])}"
    context.writer.measure(words[0], "errors", errors, "", setting, ended.reason)
    if ended.out_of_time:
        context.journal.skipped(f"sanitizer: {step}: more than {LIMIT:.0f} s")
    elif "Device not supported" in text:
        context.journal.skipped(f"sanitizer: {step}: the tool does not support this device")
    elif ended.code or errors != 0 or '"ok": false' in text:
        context.journal.failed(f"sanitizer: {step}: {ended.reason}: {text[-400:]}")


def errors_in(text: str) -> int | None:
    """How many errors the tool's last line counts; None when it has none."""
    counts = SUMMARY.findall(text)
    return int(counts[-1][0] or counts[-1][1]) if counts else None
