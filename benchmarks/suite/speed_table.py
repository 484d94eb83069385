"""The speed table of docs/gpu.md, made from the latest record and nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path

from benchmarks.suite import model_lines
from benchmarks.suite.cases import ROOT
from benchmarks.suite.records import RESULTS, latest, read

PAGE = ROOT / "docs" / "gpu.md"
BEGIN = "<!-- speed: written by `python benchmarks/report.py --speed-table` -->"
END = "<!-- end of speed -->"
NONE = "No speed has been measured on a GPU yet."

Row = dict[str, str]
MOST_ROWS = 40


class MarkerError(Exception):
    """A page lacks the two marker comments, each once and in order."""


def block(results: Path = RESULTS) -> str:
    """What stands between the markers."""
    every = [row for row in latest(read(results / "speed.csv")) if row["part"] == "suite"]
    rows = [row for row in every if row["contender"].startswith("flashgen")]
    timed = [row for row in rows if row["status"] == "ok" and row["ms_p50"]]
    if not timed:
        return NONE
    first = timed[0]
    taken: dict[tuple[str, ...], Row] = {}
    for row in timed:
        # What a call without options takes: the first code path, whose records come first.
        if len(row["contender"].split()) == 2:
            taken.setdefault(problem(row), row)
    of = {row["contender"]: row["library"] for row in every}
    fastest = sorted({row["peer"] for row in taken.values()} - {""})
    wrong = sum(row["status"] not in ("ok", "unsupported") for row in rows)
    slower = sum(bool(row["ratio"]) and float(row["ratio"]) < 1 for row in taken.values())
    measured = (
        f"Measured on one {first['gpu']} (driver {first['driver']}) on {first['date'][:10]} at "
        f"commit {first['commit']}, by calls without options, beside its "
        "peers on the same inputs; all of it is in `benchmarks/results/`. "
        f"Of {len(taken)} cases a peer is faster in {slower}; {wrong} were wrong or failed."
    )
    lines = [
        *textwrap.wrap(measured, 120),
        "",
        "The peers that were the fastest somewhere, and their packages:",
        "",
        *[f"- {name}: {of.get(name, '')}" for name in fastest],
        "",
        "| problem | pass | TFLOP/s | of matmul | fastest peer | times as fast |",
        "| --- | --- | --- | --- | --- | --- |",
        *[table_row(row) for row in list(taken.values())[:MOST_ROWS]],
    ]
    if models := model_lines.table(latest(read(results / "models.csv"))):
        lines += ["", "Whole models with random weights, trained and decoding:", "", *models]
    return "\n".join(lines)


def problem(row: Row) -> tuple[str, ...]:
    names = ("spec", "scalars", "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim")
    return tuple(row[name] for name in (*names, "head_dim_v", "dtype", "pass"))


def table_row(row: Row) -> str:
    heads = f"{row['heads_q']}/{row['heads_kv']}"
    name = f"{row['spec']}, {row['seq_q']} x {row['seq_k']}, {heads} heads, d {row['head_dim']}"
    share = f"{float(row['of_matmul']):.0%}" if row["of_matmul"] else ""
    ratio = f"{float(row['ratio']):.2f}" if row["ratio"] else ""
    return (
        f"| {name} | {row['pass']} | {float(row['tflops']):.0f} | {share} | {row['peer']} "
        f"| {ratio} |"
    )


def updated(text: str, inside: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with ``inside`` between the markers.

    Raises:
        MarkerError: the markers are not there once each and in order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise MarkerError(f"the page needs {begin!r} and, behind it, {end!r}, each once")
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{inside}\n{end}{tail}"
