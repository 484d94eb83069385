"""A process with a deadline, watched for signs of life."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.budget import Budget

RESTART = 75
"""Exit code of a process that found its GPU unusable and wants to be started again."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit code; negative for a signal.
        reason: in words; empty for exit code 0.
        out_of_time: it was stopped at its deadline.
    """

    code: int
    reason: str = ""
    out_of_time: bool = False


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
    """Runs a command to its end, its deadline, or until it shows no sign of life.

    Its output is appended to ``log``. It is stopped with all processes that it has started.

    Args:
        alive: something that changes as long as the process gets on.
        stall: seconds without a change after which it is taken for hung.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
        try:
            return _waited(process, budget, alive, stall, poll)
        finally:
            stop(process)


def _waited(
    process: subprocess.Popen[bytes],
    budget: Budget,
    alive: Callable[[], object] | None,
    stall: float | None,
    poll: float,
) -> Ended:
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


def described(code: int) -> str:
    if code == 0:
        return ""
    if code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"exit code {code}"


def start(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a command in the background; end it with `stop`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `start` or `watch` and all that it started, and waits for it."""
    # Its own group, made by start_new_session: its children may still run when it does not.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
