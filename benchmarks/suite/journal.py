"""What a part has begun and ended, in a file that outlives the process.

A kernel that goes astray takes its process with it, or never returns. The next process of the part
reads here what was done and what was being done, leaves both out, and goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """One file of lines such as {"event": "begin", "step": "...", "time": 1.5}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done: set[str] = set()
        self._lost: dict[str, str] = {}
        self._read()

    def _read(self) -> None:
        open_steps: dict[str, None] = {}
        for entry in entries(self.path):
            step = entry.get("step", "")
            if entry["event"] == "begin":
                open_steps[step] = None
            elif entry["event"] == "end":
                open_steps.pop(step, None)
                self._done.add(step)
            elif entry["event"] == "restart":
                # The innermost step is the one that was running; those around it begin again.
                if open_steps:
                    self._lost[list(open_steps)[-1]] = entry["reason"]
                open_steps.clear()

    def done(self, step: str) -> bool:
        """An earlier or this process has ended the step."""
        return step in self._done

    def lost(self, step: str) -> str | None:
        """How the process ended that was last seen in this step; None when none was."""
        return self._lost.get(step)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Notes begin and end of a step; an exception leaves it open, as a crash would."""
        self.note("begin", step=name)
        yield
        self.note("end", step=name)
        self._done.add(name)

    def note(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **facts})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def skipped(self, what: str) -> None:
        """Notes something that was left out because time was out."""
        self.note("skipped", what=what)

    def failed(self, what: str) -> None:
        """Notes something that is wrong and must be in the summary."""
        self.note("failed", what=what)


def entries(path: Path) -> list[dict[str, Any]]:
    """All lines of a journal; a last line that was cut short by a crash is left out."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found
