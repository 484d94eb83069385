"""Runs parts one after another within a limit of time, each in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite.budget import Budget, allowed
from benchmarks.suite.child import journal_of
from benchmarks.suite.context import environment
from benchmarks.suite.journal import Journal, entries
from benchmarks.suite.parts import Part
from benchmarks.suite.processes import RESTART, Ended, start, stop, watch

MOST_PROCESSES = 8
"""Of one part: a device that fails again and again is not asked for ever."""
GRACE = 10.0
"""Seconds behind its deadline after which the process of a part is stopped: it looks at the clock
only between two cases."""


@dataclass(frozen=True)
class Settings:
    """Of one run.

    Attributes:
        minutes: for everything.
        out: folder of the records.
        work: folder of logs and journals.
        device: "gpu" or "emulator".
        warm: whether to compile in the background of a part that times nothing.
    """

    minutes: float
    out: Path
    work: Path
    device: str
    run: str
    commit: str
    tiny: bool = False
    warm: bool = True


@dataclass
class Outcome:
    """How a part went.

    Attributes:
        state: "done", "skipped" (for time), "stopped" (at its deadline), or "failed" (its process
            did not come to its end).
        skipped, failed: what its journal says.
        processes: how many it took.
    """

    name: str
    state: str
    seconds: float = 0.0
    allowed: float = 0.0
    note: str = ""
    processes: int = 0
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.state != "failed" and not self.failed


def command_of(part: Part, settings: Settings, deadline: float) -> list[str]:
    """The process of a part."""
    command = [sys.executable, "-m", "benchmarks.suite.child", "--part", part.name]
    command += ["--device", settings.device, "--deadline", str(deadline), "--run", settings.run]
    command += ["--out", str(settings.out), "--work", str(settings.work)]
    command += ["--commit", settings.commit]
    return [*command, "--tiny"] if settings.tiny else command


def run_all(
    parts: Sequence[Part],
    settings: Settings,
    *,
    command: Callable[[Part, Settings, float], list[str]] = command_of,
    tell: Callable[[str], None] = print,
    grace: float = GRACE,
) -> list[Outcome]:
    """Every part in order; one that has no time left is listed as skipped."""
    settings.work.mkdir(parents=True, exist_ok=True)
    whole = Budget(time.time() + 60 * settings.minutes)
    outcomes = []
    for place, part in enumerate(parts):
        shares = [later.share for later in parts[place + 1 :]]
        seconds = allowed(part.share, shares, whole.left)
        if seconds <= 0:
            note = f"needs {part.share.least:.0f} s, {whole.left:.0f} s were left"
            outcomes.append(Outcome(part.name, "skipped", note=note))
            tell(f"{part.name:<12} skipped: {note}")
            continue
        warm = settings.warm and not part.times and len(parts) > 1
        with warming(settings) if warm else contextlib.nullcontext():
            outcome = run_part(part, settings, seconds, command, min(grace, whole.left / 4))
        outcomes.append(outcome)
        tell(line_of(outcome))
    return outcomes


def line_of(outcome: Outcome) -> str:
    words = f"{outcome.name:<12} {outcome.state}, {outcome.seconds:.0f} s"
    words += f" of {outcome.allowed:.0f}"
    for count, what in ((len(outcome.failed), "failures"), (len(outcome.skipped), "left out")):
        words += f", {count} {what}" if count else ""
    return words + (f": {outcome.note}" if outcome.note else "")


def run_part(
    part: Part,
    settings: Settings,
    seconds: float,
    command: Callable[[Part, Settings, float], list[str]] = command_of,
    grace: float = GRACE,
) -> Outcome:
    """One part, with as many processes as it takes to get past those that are lost."""
    begin = time.time()
    deadline = begin + seconds
    journal = journal_of(settings.work, part.name)
    journal.touch()
    log = settings.work / f"{part.name}.log"
    ended = Ended(0)
    count = 0
    for turn in range(MOST_PROCESSES):
        count = turn + 1
        steps = len(entries(journal))
        ended = watch(
            command(part, settings, deadline),
            log=log,
            budget=Budget(deadline + grace),
            environment=environment(),
            alive=lambda: (journal.stat().st_size, journal.stat().st_mtime_ns),
            stall=part.stall,
        )
        if ended.code in (0, 1) or ended.out_of_time:
            break
        found = entries(journal)
        if len(found) == steps or not any(e["event"] == "begin" for e in found[steps:]):
            break  # it was lost before it began with anything: it would be again
        reason = "its device failed" if ended.code == RESTART else ended.reason
        note_restart(journal, reason)
        if time.time() > deadline:
            break
    found = entries(journal)
    outcome = Outcome(
        part.name,
        "done" if ended.code == 0 else "stopped" if ended.out_of_time else "failed",
        time.time() - begin,
        seconds,
        ended.reason,
        count,
        [entry["what"] for entry in found if entry["event"] == "skipped"],
        [entry["what"] for entry in found if entry["event"] == "failed"],
    )
    if outcome.state == "stopped":
        outcome.skipped += [f"stopped in {step}" for step in open_steps(found)[-1:]]
    if outcome.state == "failed" and not outcome.failed:
        outcome.failed = [f"{part.name}: {ended.reason}: {tail(log)}"]
    return outcome


def open_steps(found: Sequence[dict[str, Any]]) -> list[str]:
    """What has begun and not ended."""
    begun: dict[str, None] = {}
    for entry in found:
        if entry["event"] == "begin":
            begun[entry["step"]] = None
        elif entry["event"] == "end":
            begun.pop(entry["step"], None)
    return list(begun)


def note_restart(journal: Path, reason: str) -> None:
    Journal(journal).note("restart", reason=reason)


def tail(log: Path, size: int = 400) -> str:
    """The end of a log, in one line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return " | ".join(line for line in text[-size:].splitlines() if line.strip())


@contextlib.contextmanager
def warming(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Compiles for the suite while the first part runs, which times nothing."""
    command = [sys.executable, "-m", "benchmarks.suite.warm", "--device", settings.device]
    if settings.tiny:
        command.append("--tiny")
    process = start(command, log=settings.work / "warm.log", environment=environment())
    try:
        yield process
    finally:
        stop(process)
