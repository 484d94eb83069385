"""The tests on the GPU, tests/gpu, until their time is over; some have a part of their own.

pytest runs in a process of its own, and again when a kernel has ended that process. In a dry run
FLASHGEN_GPU_DRY=1 makes the tests use the emulator as the device.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.suite.cases import ROOT
from benchmarks.suite.context import Context
from benchmarks.suite.journal import entries, open_steps
from benchmarks.suite.supervisor import RESTART, environment, watch

STALL = 120.0
"""Seconds in which no test ended; the longest one and its compilation take less."""
MOST_PROCESSES = 6
DRY_SECONDS = 20.0
"""In which tests begin in a dry run: all of them run without a GPU among the other tests too."""
COMPLETE = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, nothing to run."""


BOXES = ("tests/gpu/test_0_launch.py", "tests/gpu/test_1_boxes.py")
"""Boxes of copies that are larger than the tensor."""
PATHS = ("tests/gpu/test_9_hopper.py",)
"""The code path of one architecture alone."""


def run(context: Context) -> None:
    files = sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )
    run_files(context, [file for file in files if file not in (*BOXES, *PATHS)])


def run_boxes(context: Context) -> None:
    run_files(context, BOXES)


def run_paths(context: Context) -> None:
    run_files(context, PATHS)


def run_files(context: Context, files: Sequence[str]) -> None:
    """Runs some files of tests/gpu; each part has its own record of outcomes."""
    outcomes = context.work / f"outcomes-{context.journal.path.stem}.jsonl"
    variables = environment() | ({"FLASHGEN_GPU_DRY": "1"} if context.tiny else {})
    # A test that has begun is let finish: the process is stopped only well behind the deadline.
    deadline = context.budget.deadline - min(15.0, 0.2 * context.budget.left)
    if context.tiny:
        deadline = min(deadline, time.time() + DRY_SECONDS)
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite.pytest_outcomes"]
    command += ["--outcomes", str(outcomes), "--deadline", str(deadline), "-q", "--no-header"]
    command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    reasons: dict[str, str] = {}
    log = context.work / f"pytest-{context.journal.path.stem}.log"
    for _ in range(MOST_PROCESSES):
        before = len(entries(outcomes))

        def sign_of_life() -> int:
            size = outcomes.stat().st_size if outcomes.exists() else 0
            context.journal.path.touch()  # the process that waits for this one looks there
            return size

        ended = watch(
            [*command, *files],
            log=log,
            budget=context.budget,
            environment=variables,
            alive=sign_of_life,
            stall=STALL,
        )
        lines = entries(outcomes)
        if ended.code in COMPLETE or ended.out_of_time or len(lines) == before:
            break
        # Without the test that took the process with it, there is more to be run.
        reasons |= {test: ended.reason for test in open_steps(lines) if test not in reasons}
    if ended.code not in (*COMPLETE, RESTART) and not ended.out_of_time:
        tail = log.read_text(encoding="utf-8", errors="replace")[-600:]
        context.journal.failed(f"pytest: {ended.reason}: {tail}")
    record(context, entries(outcomes), reasons)


def record(context: Context, lines: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    """Counts of outcomes, and a row and a line of the summary for each test that failed."""
    ended = {entry["step"]: entry for entry in lines if entry["event"] == "end"}
    counts = Counter(entry["outcome"] for entry in ended.values())
    lost = open_steps(lines)
    begun = {entry["step"] for entry in lines if entry["event"] == "begin"}
    collected = [test for e in lines if e["event"] == "collected" for test in e["tests"]]
    left = [test for test in dict.fromkeys(collected) if test not in begun]
    counts.update({"lost": len(lost), "not run": len(left)})
    for outcome in ("passed", "failed", "skipped", "lost", "not run"):
        context.writer.measure("tests/gpu", outcome, counts[outcome], "tests")
    skipped = Counter(e["text"] for e in ended.values() if e["outcome"] == "skipped")
    for reason, count in skipped.items():
        context.writer.measure("tests/gpu", "skipped", count, "tests", "", reason)
    for test, entry in ended.items():
        if entry["outcome"] == "failed":
            context.writer.measure(test, "failed", 1, "", "", entry["text"])
            context.journal.failed(f"{test}: {entry['text']}")
    for test in lost:
        reason = reasons.get(test, "stopped: time was out")
        context.writer.measure(test, "lost", 1, "", "", reason)
        context.journal.failed(f"{test}: its process was lost: {reason}")
    if left:
        context.journal.skipped(f"{len(left)} tests: {', '.join(left)}")
