"""The time model against the records: predicted over measured times of flashgen's own kernels."""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import flashgen as fg
from benchmarks.suite.cases import Case
from benchmarks.suite.contenders.ours import in_short, spec_of
from benchmarks.suite.records import RESULTS, latest, read
from flashgen.kernels.planner import Plan, plan_backward
from flashgen.shared.call import CheckedCall
from flashgen.spec.analysis.intervals import row_interval
from flashgen.tools.profile.visited_tiles import KnownCall
from flashgen.tools.tune.rank import predicted

ARCHS = {"flashgen sm_90a": "sm_90a", "flashgen sm_80": "sm_90"}
"""The architecture of a Hopper GPU by the contender, which names the code path."""

SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim")

Row = dict[str, str]


def case_of(row: Row) -> Case:
    """The problem that a row was measured on."""
    pairs = (pair.split("=") for pair in row["scalars"].split())
    scalars: tuple[tuple[str, Any], ...] = tuple((name, json.loads(x)) for name, x in pairs)
    sizes = (int(row[name]) for name in SIZES)
    return Case(row["group"], row["spec"], *sizes, row["dtype"], scalars)


@functools.cache
def plans_of(spec: fg.AttentionSpec, arch: str, pass_: str) -> tuple[Plan, ...]:
    """The plans of a pass, of which a record names each."""
    return (fg.plan(spec, arch),) if pass_ == "forward" else plan_backward(spec, arch).kernels


def error(row: Row, case: Case) -> float | None:
    """Predicted over measured time, minus 1; None where the present plans are not those of the row.

    Nor is there one for captured tensors, whose values a record lacks.
    """
    spec, arch = spec_of(case), ARCHS[row["contender"]]
    plans = plans_of(spec, arch, row["pass"])
    if spec.tensors or any(in_short(plan) not in row["plan"] for plan in plans):
        return None
    sizes = case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k
    dims = case.head_dim, case.head_dim
    call = CheckedCall(*sizes, *dims, 0, 0, case.head_dim**-0.5, dict(case.scalars))
    seconds = sum(each.seconds for each in predicted(KnownCall(spec, call), plans))
    return 1e3 * seconds / float(row["ms_p50"]) - 1


def kind_of(case: Case) -> str:
    """What the mask of a case is to the model, which counts no instructions of masks."""
    spec = spec_of(case)
    if case.seq_q == 1:
        return "one query"
    one_range = row_interval(spec.mask) is not None and spec.block_sparse is None
    return "one range of keys for each row" if one_range else "all others, block layouts"


def groups(results: Path = RESULTS) -> dict[tuple[str, str, str], list[float]]:
    """The errors of the newest run on a GPU, by kind of mask, pass and code path."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in latest(read(results / "speed.csv")):
        timed = row["part"] == "suite" and row["status"] == "ok" and row["ms_p50"]
        if not timed or row["contender"] not in ARCHS or row["pass"] == "both":
            continue
        case = case_of(row)
        by = error(row, case)
        if by is not None:
            found.setdefault((kind_of(case), row["pass"], row["path"]), []).append(by)
    return found


def table(results: Path = RESULTS) -> str:
    """The errors as a table of docs/planner.md."""
    head = "| mask | pass | path | launches | median | from | to |"
    lines = [head, f"|{' --- |' * 7}"]
    for key, found in sorted(groups(results).items(), reverse=True):
        shown = (f"{100 * f(found):+.0f} %" for f in (statistics.median, min, max))
        lines.append(f"| {' | '.join((*key, str(len(found)), *shown))} |")
    return "\n".join(lines)
