"""The speed table of docs/gpu.md, made from the newest records of a GPU and nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path

from benchmarks.suite import model_lines
from benchmarks.suite.cases import ROOT
from benchmarks.suite.records import RESULTS, latest, newest_of_cases, read
from benchmarks.suite.summary import is_ours, without_options

PAGE = ROOT / "docs" / "gpu.md"
BEGIN = "<!-- speed: written by `python benchmarks/report.py --speed-table` -->"
END = "<!-- end of speed -->"
NONE = "No speed has been measured on a GPU yet."

Row = dict[str, str]
MOST_ROWS = 40
USUAL = "bfloat16"
"""The dtype that a row need not name."""


class MarkerError(Exception):
    """A page lacks the two marker comments, each once and in order."""


def block(results: Path = RESULTS) -> str:
    """The text between the markers."""
    speed = newest_of_cases(read(results / "speed.csv"))
    every = [row for row in speed if row["part"] == "suite"]
    rows = [row for row in every if is_ours(row)]
    without_option = without_options(rows)
    if not without_option:
        return NONE
    first = without_option[0]
    runs = {row["date"][:10]: row["commit"] for row in reversed(without_option)}
    dates = ", ".join(f"{date} at commit {name}" for date, name in runs.items())
    libraries = {row["contender"]: row["library"] for row in every}
    fastest = sorted({row["peer"] for row in without_option} - {""})
    wrong = sum(row["status"] not in ("ok", "unsupported") for row in rows)
    slower = sum(bool(row["ratio"]) and float(row["ratio"]) < 1 for row in without_option)
    measured = (
        f"Measured on one {first['gpu']} (driver {first['driver']}), each case last on {dates}, in "
        f"{USUAL} unless a row says otherwise, by calls without options, beside its peers on the "
        "same inputs; all of it is in `benchmarks/results/`. "
        f"Of {len(without_option)} cases a peer is faster in {slower}; {wrong} were wrong or "
        "failed."
    )
    lines = [
        *textwrap.wrap(measured, 120),
        "",
        "The peers that were the fastest somewhere, and their packages:",
        "",
        *[f"- {name}: {libraries.get(name, '')}" for name in fastest],
        "",
        "| mask, batch x heads, queries x keys, head dim | pass | TFLOP/s | of matmul "
        "| fastest peer | times as fast | on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *[table_row(row) for row in without_option[:MOST_ROWS]],
    ]
    if models := model_lines.table(latest(read(results / "models.csv"))):
        lines += ["", "Whole models with random weights, trained and decoding:", "", *models]
    return "\n".join(lines)


def case_name(row: Row) -> str:
    """What is computed, without the pass."""
    heads, dims = f"{row['heads_q']}/{row['heads_kv']} heads", f"d {row['head_dim']}"
    if row["head_dim_v"] != row["head_dim"]:
        dims += f"/{row['head_dim_v']}"
    name = f"{row['spec']}, {row['batch']} x {heads}, {row['seq_q']} x {row['seq_k']}, {dims}"
    if row["dtype"] != USUAL:
        name += f", {row['dtype']}"
    return name


def table_row(row: Row) -> str:
    share = f"{float(row['of_matmul']):.0%}" if row["of_matmul"] else ""
    ratio = f"{float(row['ratio']):.2f}" if row["ratio"] else ""
    return (
        f"| {case_name(row)} | {row['pass']} | {float(row['tflops']):.0f} | {share} "
        f"| {row['peer']} | {ratio} | {row['date'][:10]} |"
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
