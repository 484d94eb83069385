"""The files of results: tidy, one observation a row, and only ever appended to.

``speed.csv`` has one row for each contender, problem and pass; ``models.csv`` one for each whole
model and backend; ``measures.csv`` one row for each other number: ceilings, overheads, compile
times, memory, counters, counts of tests. A file whose
first line is not the schema's is refused and left as it is, so that no column changes its meaning
in the middle of a file.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import ROOT

RESULTS = ROOT / "benchmarks" / "results"

STAMP = {
    "run": "which run of the suite, the time of its start in UTC",
    "date": "UTC, when the row was written",
    "commit": "flashgen's commit; with + when the tree had changes",
    "device": "gpu, or emulator for a dry run",
    "gpu": "product name",
    "driver": "version of the NVIDIA driver",
    "versions": "versions of flashgen, torch, cuDNN, Triton, NVRTC and Python",
    "part": "part of the suite",
}
SPEED = {
    **STAMP,
    "group": "group of shapes that the problem belongs to",
    "spec": "name of a file in specs/, or several that are one",
    "scalars": "run-time scalars of the spec, name=value",
    "batch": "",
    "heads_q": "",
    "heads_kv": "",
    "seq_q": "",
    "seq_k": "",
    "head_dim": "head dim of q and k",
    "head_dim_v": "head dim of v and the output",
    "dtype": "",
    "live": "share of the elements of S that the mask keeps",
    "pass": "forward, backward, or both in one call each",
    "contender": "implementation that computed it",
    "library": "packages that it is of, with their versions",
    "path": "flashgen's code path",
    "plan": "flashgen's tiles, one kernel after another",
    "status": "ok; wrong (never timed); unsupported, refused, error, crashed, skipped: see note",
    "method": "events, graph or host clock",
    "samples": "",
    "ms_p20": "20th percentile, milliseconds per call",
    "ms_p50": "median",
    "ms_p80": "80th percentile",
    "tflops": "by the convention of benchmarks/suite/cases.py, from the median",
    "of_matmul": "tflops over that of a large matrix product of the same run",
    "max_error": "error of the tensor nearest to its limit, against float64 on a slice",
    "max_allowed": "",
    "peer": "the fastest other contender that is not flashgen",
    "ratio": "time of that peer over this one's: above 1 is faster than the peer",
    "note": "",
}
CASE = (
    *("part", "spec", "scalars", "batch", "heads_q", "heads_kv", "seq_q", "seq_k"),
    *("head_dim", "head_dim_v", "dtype", "pass"),
)
"""The columns of speed.csv that say what is computed."""
MEASURES = {
    **STAMP,
    "subject": "what was measured: a contender, a kernel, a test",
    "setting": "conditions of the measurement, name=value",
    "metric": "",
    "value": "",
    "unit": "",
    "note": "",
}
MODELS = {
    **STAMP,
    "model": "a name of benchmarks/suite/whole_models.py",
    "parameters": "",
    "mode": "train: a step of AdamW; decode: one token of each sequence, behind a cache",
    "dropout": "of attention weights",
    "batch": "sequences",
    "positions": "tokens of a sequence; for decode at the end",
    "dtype": "of weights and activations",
    "backend": "what computes the attention; eager is the reference, which is not timed",
    "library": "the package of the backend, with its version",
    "status": "as in speed.csv",
    "samples": "steps that are timed",
    "ms_p20": "20th percentile, milliseconds per step",
    "ms_p50": "median",
    "ms_p80": "80th percentile",
    "tokens_per_s": "of all sequences, from the median",
    "peak_bytes": "of tensors, weights and optimizer included; empty in a dry run",
    "losses": "of each training step, nats per token",
    "difference": "from the reference, of what is nearest to its bound: a loss, gradient or logit",
    "allowed": "",
    "note": "",
}
FILES: dict[str, Mapping[str, str]] = {
    "speed.csv": SPEED,
    "models.csv": MODELS,
    "measures.csv": MEASURES,
}
STATUSES = ("ok", "wrong", "unsupported", "refused", "error", "crashed", "skipped")

Row = dict[str, Any]


class SchemaError(Exception):
    """A file or a row that is not of the schema."""


@dataclass(frozen=True)
class Stamp:
    """What all rows of one run have in common."""

    run: str
    commit: str
    device: str
    gpu: str
    driver: str
    versions: str


class Writer:
    """Appends rows of one part to the files of a folder."""

    def __init__(self, folder: Path, stamp: Stamp, part: str) -> None:
        self.folder, self._stamp, self._part = folder, stamp, part

    def speed(self, rows: Iterable[Row]) -> None:
        self._append("speed.csv", rows)

    def models(self, rows: Iterable[Row]) -> None:
        self._append("models.csv", rows)

    def measure(
        self, subject: str, metric: str, value: Any, unit: str = "", setting: str = "",
        note: str = "",
    ) -> None:  # fmt: skip
        row = {"subject": subject, "metric": metric, "value": value, "unit": unit}
        self._append("measures.csv", [{**row, "setting": setting, "note": note}])

    def _append(self, file: str, rows: Iterable[Row]) -> None:
        common = {**asdict(self._stamp), "date": now(), "part": self._part}
        append(self.folder / file, [{**common, **row} for row in rows])


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows at the end of the file, in one write; makes the file when there is none.

    A column that a row leaves out is empty.

    Raises:
        SchemaError: a row has another column, or the file another first line.
    """
    schema = FILES[path.name]
    rows = list(rows)
    for row in rows:
        if unknown := set(row) - set(schema):
            raise SchemaError(f"{path.name} has no column {', '.join(sorted(unknown))}")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(schema), restval="", lineterminator="\n")
    if path.exists() and path.stat().st_size:
        check_header(path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.writeheader()
    writer.writerows({name: _shown(value) for name, value in row.items()} for row in rows)
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a file, oldest first; none when there is no file.

    Raises:
        SchemaError: its first line is not the schema's, or a row has too few or too many cells.
    """
    if not path.exists():
        return []
    check_header(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SchemaError(f"{path.name}, row {number}: not {len(FILES[path.name])} cells")
    return rows


def check_header(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    expected = list(FILES[path.name])
    if columns != expected:
        raise SchemaError(
            f"{path.name} has other columns than the schema; it stays as it is. "
            f"Missing: {', '.join(c for c in expected if c not in columns) or 'none'}; "
            f"unknown: {', '.join(c for c in columns if c not in expected) or 'none'}"
        )


def merge(source: Path, target: Path) -> int:
    """Appends the runs of one folder to another that does not have them yet; how many rows."""
    added = 0
    for name in FILES:
        known_runs = {row["run"] for row in read(target / name)}
        fresh = [row for row in read(source / name) if row["run"] not in known_runs]
        if dry := [row for row in fresh if row["device"] != "gpu"]:
            raise SchemaError(f"{len(dry)} rows of {name} are of a dry run")
        if fresh:
            append(target / name, fresh)
            added += len(fresh)
    return added


def latest(rows: list[dict[str, str]], device: str = "gpu") -> list[dict[str, str]]:
    """The rows of the newest run on a device."""
    newest = max((row["run"] for row in rows if row["device"] == device), default=None)
    return [row for row in rows if row["run"] == newest]


def newest_of_cases(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of the GPU of the newest run: the rows of each case and pass from the newest run that has
    it, because a short run has few cases; newest runs first."""
    gpus = {row["gpu"] for row in latest(rows)}
    last: dict[tuple[str, ...], str] = {}
    return [
        row
        for row in sorted(rows, key=lambda row: row["run"], reverse=True)
        if row["gpu"] in gpus
        and last.setdefault(tuple(row[name] for name in CASE), row["run"]) == row["run"]
    ]


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """The commit of the checkout, with + when files differ from it; "unknown" without git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        name = git("rev-parse", "--short=12", "HEAD")
        return (name + "+" * bool(git("status", "--porcelain"))) if name else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _shown(value: Any) -> Any:
    """Numbers with six digits: enough for a time, and no noise in a diff."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value).replace("\n", " ")


def folder_is_of_the_repository(folder: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(RESULTS)
