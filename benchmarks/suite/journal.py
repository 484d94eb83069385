"""The steps that a part has begun and ended, in a file that outlives its process.

The next process of a part leaves out the steps that are done and the one in which the last process
was lost, and continues with the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
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
        begin = 0  # of the entries of one process
        lines = entries(self.path)
        for number, entry in enumerate(lines):
            if entry["event"] == "end":
                self._done.add(entry["step"])
            elif entry["event"] == "restart":
                # The innermost step is the one that was running; those around it begin again.
                for step in open_steps(lines[begin:number])[-1:]:
                    self._lost[step] = entry["reason"]
                begin = number

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

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
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
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return lines


def open_steps(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Steps that have begun and not ended."""
    begun: dict[str, None] = {}
    for entry in lines:
        if entry["event"] == "begin":
            begun[entry["step"]] = None
        elif entry["event"] == "end":
            begun.pop(entry["step"], None)
    return list(begun)
