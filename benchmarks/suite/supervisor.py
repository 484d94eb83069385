"""Runs the parts one after another within a time limit, each in a child process of its own.

A kernel that fails can take its process with it, or never return. The supervisor gives every part a
share of the time that is left, watches the part's journal (`journal`) for progress, stops a process
at its deadline or when it hangs, and starts it again behind the step in which it was lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.suite.journal import Journal, entries, open_steps

ROOT = Path(__file__).resolve().parents[2]
RESTART = 75
"""Exit code of a process that found its GPU unusable and needs to be started again."""
MOST_PROCESSES = 8
"""Processes per part: a device that fails again and again ends the part."""
GRACE = 10.0
"""Seconds between the deadline of a part and the end of its process: a part reads the clock only
between two cases."""


# ---- time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """A deadline, in seconds since the epoch so that processes can share it."""

    deadline: float
    clock: Callable[[], float] = time.time

    @property
    def left(self) -> float:
        """Seconds; never negative."""
        return max(0.0, self.deadline - self.clock())

    @property
    def out(self) -> bool:
        return self.left <= 0

    def at_most(self, seconds: float) -> Budget:
        return Budget(min(self.deadline, self.clock() + seconds), self.clock)


@dataclass(frozen=True)
class Share:
    """The share of the time that a part gets.

    Attributes:
        weight: the share of the remaining time, relative to the parts that are still to come.
        least: seconds below which the part is not started.
    """

    name: str
    weight: float
    least: float


def allowed(share: Share, later: Sequence[Share], left: float) -> float:
    """Seconds for a part while the parts of ``later`` are still to come; 0 to skip the part.

    Time that an earlier part did not use goes to the later ones. The least of each later part is
    not held back: an early part is more important.
    """
    weights = share.weight + sum(other.weight for other in later)
    seconds = min(max(share.least, left * share.weight / weights), left)
    return seconds if seconds >= share.least else 0.0


# ---- one process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit code; negative for a signal.
        reason: the reason in words; empty for exit code 0.
        out_of_time: it was stopped at its deadline.
    """

    code: int
    reason: str = ""
    out_of_time: bool = False


def environment() -> dict[str, str]:
    """Variables for a process that runs modules of this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def start(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own; its output is appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `start` and all processes that it started, and waits for it."""
    # The whole group: children may still run when the process itself has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(
    command: Sequence[str],
    *,
    log: Path,
    budget: Budget,
    environment: Mapping[str, str] | None = None,
    alive: Callable[[], object] | None = None,
    stall: float | None = None,
    poll: float = 0.1,
) -> Ended:
    """Runs a command to its end or its deadline, or until it makes no more progress.

    Args:
        alive: a value that changes as long as the process makes progress.
        stall: seconds without a change after which the process counts as hung.
    """
    process = start(command, log=log, environment=environment)
    try:
        last, since = (alive() if alive else None), time.monotonic()
        while True:
            code = process.poll()
            if code is not None:
                return Ended(code, described(code))
            if budget.out:
                return Ended(-signal.SIGKILL, "stopped: its time was out", out_of_time=True)
            if alive is not None:
                now = alive()
                if now != last:
                    last, since = now, time.monotonic()
                elif stall is not None and time.monotonic() - since > stall:
                    return Ended(-signal.SIGKILL, f"hung: no sign of life for {stall:.0f} s")
            time.sleep(poll)
    finally:
        stop(process)


def described(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


# ---- one part --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a run.

    Attributes:
        share: the share of the time; weights are about the seconds of a run of nine minutes.
        module: a module in `benchmarks.suite.parts`; its ``run(context)``, or the function named
            behind a colon, is called in a child process.
        stall: seconds without a line in the journal after which that process counts as hung.
        description: the part in words.
        times: the part measures time, so nothing may run beside it.
        needs: parts whose results it uses.
    """

    share: Share
    module: str
    stall: float
    description: str
    times: bool = True
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.share.name


@dataclass(frozen=True)
class Settings:
    """Settings of a whole run.

    Attributes:
        minutes: time limit for all parts together.
        out: folder of the records.
        work: folder of logs and journals.
        device: "gpu" or "emulator".
        warm: compile in the background of parts that measure no time, behind the first of them.
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
    """How a part ended.

    Attributes:
        state: "done", "skipped" (for lack of time), "stopped" (at its deadline), or "failed" (its
            process did not run to its end).
        skipped, failed: the entries of its journal.
        processes: the number of processes that were started for it.
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

    def __str__(self) -> str:
        words = f"{self.name:<12} {self.state}"
        if self.state != "skipped":
            words += f", {self.seconds:.0f} s of {self.allowed:.0f}"
        for count, kind in ((len(self.failed), "failures"), (len(self.skipped), "left out")):
            words += f", {count} {kind}" if count else ""
        return words + (f": {self.note}" if self.note else "")


def journal_of(work: Path, part: str) -> Path:
    return work / f"{part}.jsonl"


def command_of(part: Part, settings: Settings, deadline: float) -> list[str]:
    """The command of a part's process: `benchmarks.suite.child`."""
    command = [sys.executable, "-m", "benchmarks.suite.child", "--part", part.name]
    command += ["--device", settings.device, "--deadline", str(deadline), "--run", settings.run]
    command += ["--out", str(settings.out), "--work", str(settings.work)]
    command += ["--commit", settings.commit]
    return [*command, "--tiny"] if settings.tiny else command


def run_part(
    part: Part,
    settings: Settings,
    seconds: float,
    command: Callable[[Part, Settings, float], list[str]] = command_of,
    grace: float = GRACE,
) -> Outcome:
    """Runs one part; starts a new process behind each step in which a process was lost."""
    begin = time.time()
    deadline = begin + seconds
    journal = journal_of(settings.work, part.name)
    journal.touch()
    earlier = len(entries(journal))  # of a run that is continued
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
        lines = entries(journal)
        if len(lines) == steps or not any(e["event"] == "begin" for e in lines[steps:]):
            break  # it was lost before its first step: the next process would be too
        reason = "its device failed" if ended.code == RESTART else ended.reason
        Journal(journal).note("restart", reason=reason)
        if time.time() > deadline:
            break
    lines = entries(journal)
    outcome = Outcome(
        part.name,
        "done" if ended.code == 0 else "stopped" if ended.out_of_time else "failed",
        time.time() - begin,
        seconds,
        ended.reason,
        count,
        [entry["what"] for entry in lines[earlier:] if entry["event"] == "skipped"],
        [entry["what"] for entry in lines if entry["event"] == "failed"],
    )
    if outcome.state == "stopped":
        outcome.skipped += [f"stopped in {step}" for step in open_steps(lines)[-1:]]
    if outcome.state == "failed" and not outcome.failed:
        outcome.failed = [f"{part.name}: {ended.reason}: {tail(log)}"]
    return outcome


def tail(log: Path, size: int = 400) -> str:
    """The end of a log, in one line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return " | ".join(line for line in text[-size:].splitlines() if line.strip())


# ---- all parts -------------------------------------------------------------------------------


def run_all(
    parts: Sequence[Part],
    settings: Settings,
    *,
    command: Callable[[Part, Settings, float], list[str]] = command_of,
    tell: Callable[[str], None] = print,
    grace: float = GRACE,
) -> list[Outcome]:
    """Runs every part in order; a part without time left is listed as skipped.

    On a GPU, consecutive parts that measure no time run side by side, because the host spends most
    of their time on compilation and on reference results. They get the share of the largest one.
    The kernels of later parts are compiled beside them when the first part, doctor, has ended: its
    verdicts are more important.
    """
    settings.work.mkdir(parents=True, exist_ok=True)
    whole = Budget(time.time() + 60 * settings.minutes)
    groups = groups_of(parts) if settings.device == "gpu" else [[part] for part in parts]
    outcomes: list[Outcome] = []

    background = contextlib.ExitStack()

    def ended(part: Part, seconds: float) -> Outcome:
        outcome = run_part(part, settings, seconds, command, min(grace, whole.left / 4))
        tell(str(outcome))
        if settings.warm and part is parts[0] and not part.times and len(parts) > 1:
            background.enter_context(warming(settings))
        return outcome

    with background:
        for index, group in enumerate(groups):
            if group[0].times:
                background.close()
            share = _share_of(group)
            later = [_share_of(other) for other in groups[index + 1 :]]
            seconds = allowed(share, later, whole.left)
            if seconds > 0:
                with ThreadPoolExecutor(len(group)) as pool:
                    outcomes += pool.map(ended, group, itertools.repeat(seconds))
            else:
                note = f"needs {share.least:.0f} s, {whole.left:.0f} s were left"
                left_out = [Outcome(part.name, "skipped", note=note) for part in group]
                outcomes += left_out
                for outcome in left_out:
                    tell(str(outcome))
    return outcomes


def groups_of(parts: Sequence[Part]) -> list[list[Part]]:
    """Consecutive parts that measure no time, together; every other part by itself."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and not part.times and not groups[-1][0].times:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _share_of(group: Sequence[Part]) -> Share:
    """The share of the time of a group; each of its parts gets all of it."""
    weight = max(part.share.weight for part in group)
    return Share(group[0].name, weight, max(part.share.least for part in group))


@contextlib.contextmanager
def warming(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Compiles the suite's kernels while a part runs that measures no time."""
    command = [sys.executable, "-m", "benchmarks.suite.warm", "--device", settings.device]
    if settings.tiny:
        command.append("--tiny")
    process = start(command, log=settings.work / "warm.log", environment=environment())
    try:
        yield process
    finally:
        stop(process)
