"""The code paths that the records prove, as `calls/trust/proven.json`, which the wheel contains.

A run proves a path on its model of GPU where the path passed all of doctor's problems and no test
of tests/gpu failed or was lost, and at least one passed. The entry holds for the run's templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.suite.records import read
from flashgen.calls.trust.verdicts import PROVEN

Row = dict[str, str]
WRONG = ("failed", "lost")


def text(results: Path) -> str:
    """The contents of the file for the records of a folder: an entry for the newest run of each."""
    rows = [row for row in read(results / "measures.csv") if row["device"] == "gpu"]
    newest_runs: dict[tuple[str, str, str], str] = {}
    for run in sorted({row["run"] for row in rows}):
        for row in proven_by([row for row in rows if row["run"] == run]):
            templates = row["setting"].removeprefix("templates=")
            newest_runs[row["gpu"], row["subject"], templates] = run
    entries = [
        {"gpu": gpu, "arch": arch, "templates": templates, "run": run}
        for (gpu, arch, templates), run in sorted(newest_runs.items())
    ]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return '{"proven": [' + (f"\n{lines}\n" if lines else "") + "]}\n"


def proven_by(rows: list[Row]) -> list[Row]:
    """The rows "path passed" of a run that prove their path.

    Args:
        rows: all rows of one run.
    """
    tests = [row for row in rows if row["subject"] == "tests/gpu"]
    counts = {kind: _sum(tests, kind) for kind in ("passed", *WRONG)}
    if not counts["passed"] or any(counts[kind] for kind in WRONG):
        return []
    return [row for row in rows if row["metric"] == "path passed" and row["value"] == "1"]


def _sum(rows: Iterable[Row], metric: str) -> int:
    return sum(int(row["value"]) for row in rows if row["metric"] == metric)


def write(results: Path, *, check: bool, file: Path = PROVEN) -> bool:
    """Writes the file, or with ``check`` only compares; True where it already was so."""
    now = text(results)
    same = file.is_file() and file.read_text(encoding="utf-8") == now
    if not same and not check:
        file.write_text(now, encoding="utf-8")
    return same
