"""Time to the first result of a new variant: cold, and with what an earlier process left on disk.

Each measurement has a process of its own, and each pair a folder of its own for all caches.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.suite.contenders import contenders
from benchmarks.suite.context import Context, OutOfTime
from benchmarks.suite.supervisor import environment, watch

SPECS = ("softcap", "causal", "sliding_window", "alibi")
NAMES = ("flashgen sm_80", "flashgen sm_90a", "flex")
CACHES = ("FLASHGEN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def run(context: Context) -> None:
    names = [c.name for c in contenders(context.device) if c.name in NAMES]
    for spec in SPECS[:1] if context.tiny else SPECS:
        for name in names:
            step = f"{name}, {spec}"
            if context.journal.done(step):
                continue
            if context.budget.left < 5:
                context.journal.skipped(f"compile time of {step}")
                continue
            try:
                with context.journal.step(step):
                    _pair(context, name, spec)
            except OutOfTime as reason:
                context.journal.skipped(f"compile time of {step}: {reason}")


def _pair(context: Context, name: str, spec: str) -> None:
    with tempfile.TemporaryDirectory(dir=context.work) as folder:
        variables = environment() | {name: str(Path(folder) / name.lower()) for name in CACHES}
        for cache in ("cold", "cached"):
            seconds = first_call(context, name, spec, variables, Path(folder) / f"{cache}.json")
            if seconds is None:
                return
            for metric, value in seconds.items():
                setting = f"spec={spec} cache={cache}"
                context.writer.measure(name, metric, value, "s", setting)


def first_call(
    context: Context, name: str, spec: str, variables: dict[str, str], log: Path
) -> dict[str, float] | None:
    """What `benchmarks.suite.first_call` prints; None when it failed.

    Raises:
        OutOfTime: it did not finish.
    """
    command = [sys.executable, "-m", "benchmarks.suite.first_call"]
    command += ["--device", context.device.kind, "--contender", name, "--spec", spec]
    if context.tiny:
        command += ["--seq", "64"]
    ended = watch(command, log=log, budget=context.budget, environment=variables)
    text = log.read_text(encoding="utf-8", errors="replace")
    if ended.out_of_time:
        raise OutOfTime(ended.reason)
    if ended.code:
        ours = name.startswith("flashgen")
        report = context.journal.failed if ours else context.journal.skipped
        report(f"compile time of {name}, {spec}: {ended.reason}: {text[-400:]}")
        return None
    seconds: dict[str, float] = json.loads(text.strip().splitlines()[-1])
    return seconds
