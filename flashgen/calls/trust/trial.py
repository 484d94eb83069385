"""A child process that runs problems on a GPU, so that a hang or a fault cannot reach the caller.

The child, `flashgen.tools.doctor.child`, writes a line of JSON for each step:

============================  ======================================================================
{"event": "ready"}            the device can be used
{"event": "building", ...}    the kernels of the problem of this name are being compiled
{"event": "running", ...}     the problem runs on the device
{"event": "comparing", ...}   its results have arrived and are compared
{"event": "result", ...}      the problem ended: "problem", "ok", "text" and more
{"event": "end"}              all problems have run
============================  ======================================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from flashgen.shared import config

SECONDS = 120.0
"""The time limit of a trial."""
RUNNING_SECONDS = 60.0
"""The time limit for one problem on the device, where its kernels take milliseconds."""
_LAST_SECONDS = 10.0  # for the end of a process that was killed: the driver may hold it longer

Event = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The end of a child process.

    Attributes:
        events: the events that it wrote, in order.
        reason: why it did not run to its end, in words; "" where it did.
        out_of_time: whether it was stopped because its whole time was over.
    """

    events: tuple[Event, ...]
    reason: str = ""
    out_of_time: bool = False

    @property
    def results(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event["event"] == "result")

    @property
    def lost(self) -> str | None:
        """The problem that was on the device when the process was lost or hung, or None."""
        last = self.events[-1] if self.events and self.reason and not self.out_of_time else {}
        return str(last["problem"]) if last.get("event") == "running" else None


def command(arch: str, device: int, *options: str) -> list[str]:
    """The command of a child process. `flashgen.tools.doctor.child` has the options."""
    # Without -P, modules in the current folder would replace installed ones.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    arguments = ["--arch", arch, "--device", str(device), *options]
    return [sys.executable, *safe, "-m", "flashgen.tools.doctor.child", *arguments]


def run(
    words: Sequence[str], *, seconds: float = SECONDS, tell: Callable[[Event], None] | None = None
) -> Ended:
    """Runs a child process to its end, or stops it: after ``seconds``, or when a problem hangs.

    Args:
        words: the command.
        tell: called with each event when it arrives.
    """
    end, end_of_step = time.monotonic() + seconds, math.inf
    events: list[Event] = []

    def late() -> Ended:
        whole = end <= end_of_step
        limit = seconds if whole else RUNNING_SECONDS
        return Ended(tuple(events), f"no end within {limit:.0f} s", whole)

    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=config.child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            return Ended((), f"a child process cannot be started: {error}")
        assert process.stdout is not None, "it is a pipe"
        lines = _lines(process.stdout)
        try:
            while True:
                try:
                    line = lines.get(timeout=max(0.0, min(end, end_of_step) - time.monotonic()))
                except queue.Empty:
                    return late()
                if line is None:
                    break
                event = _event(line)
                if event is not None:
                    events.append(event)
                    on_device = event["event"] == "running"
                    end_of_step = time.monotonic() + RUNNING_SECONDS if on_device else math.inf
                    if tell is not None:
                        tell(event)
            try:
                code = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return late()
        finally:
            _stop(process)
        return Ended(tuple(events), _described(code, _last_line(errors)))


def _event(line: bytes) -> Event | None:
    """An event, or None for a line that is cut short or that something else has printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _lines(stream: IO[bytes]) -> queue.SimpleQueue[bytes | None]:
    """The lines of a pipe, then None, read by a thread so that waiting for one can time out."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        with stream:
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_SECONDS)


def _described(code: int, said: str) -> str:
    """An exit code in words, with the last line on stderr."""
    if code == 0:
        return ""
    words = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            words = f"ended by {signal.Signals(-code).name}"
    return f"{words}: {said}" if said else words


def _last_line(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 2000))
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
