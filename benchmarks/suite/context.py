"""The arguments of a part, in the process that runs it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.device import Device
from benchmarks.suite.journal import Journal
from benchmarks.suite.records import MEASURES, Writer
from benchmarks.suite.supervisor import Budget


class Unusable(Exception):
    """The device of this process cannot be used any more."""


class OutOfTime(Exception):
    """The deadline came within a step: it stays open, and a run that is continued begins there."""


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        out: where records go.
        work: where logs and scratch files go.
        tiny: the smallest problems: a dry run.
    """

    device: Device
    writer: Writer
    journal: Journal
    budget: Budget
    out: Path
    work: Path
    run: str
    tiny: bool

    def usable(self) -> None:
        """Raises Unusable when nothing can run on the device any more."""
        reason = self.device.failure()
        if reason is not None:
            raise Unusable(reason)

    def measured(self, subject: str, metric: str) -> float | None:
        """A number that an earlier part of this run has measured."""
        path = self.out / "measures.csv"
        if not path.exists():
            return None
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, list(MEASURES))
            values = [
                float(row["value"])
                for row in rows
                if row["run"] == self.run and (row["subject"], row["metric"]) == (subject, metric)
            ]
        return values[-1] if values else None
