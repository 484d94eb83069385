"""What the time model predicts for each case of the records, beside its fastest peer's time.

Nothing here was measured but the peers' times and flashgen's own ones of earlier kernels. The
predictions are those of the present plans; the records decide the model's constants
(`model_errors`), whose error on the case's own record stands beside them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.suite.cases import flops
from benchmarks.suite.model_errors import (
    ARCHS,
    case_of,
    has_other_kernels,
    launches_of,
    point_of,
    recorded,
)
from benchmarks.suite.records import RESULTS, read
from flashgen.kernels.planner.models.fitted_time import CONSTANTS, STATED_ERROR
from flashgen.shared.arch import facts

CONTENDER = "flashgen sm_90a"


def table(results: Path = RESULTS) -> str:
    """One row per case, pass and GPU, the slowest one beside its peer first."""
    arch = ARCHS[CONTENDER]
    rows = []
    for row in read(results / "speed.csv"):
        timed = row["part"] == "suite" and row["status"] == "ok" and row["ratio"]
        if not timed or row["contender"] != CONTENDER or row["pass"] == "both":
            continue
        case = case_of(row)
        if not recorded(case):
            continue
        milliseconds = 1e3 * sum(
            launch.seconds(CONSTANTS) for launch in launches_of(case, arch, row["pass"])
        )
        measured, ratio = float(row["ms_p50"]), float(row["ratio"])
        speed = flops(row["pass"], case.batch * case.heads_q, case.head_dim)
        speed *= case.seq_q * case.seq_k * float(row["live"]) / milliseconds / 1e9
        error = "other kernel"
        if not has_other_kernels(row):
            error = f"{100 * point_of(row).error():+.0f} %"
        shape = f"{case.batch} x {case.heads_q}/{case.heads_kv} x {case.seq_q}"
        shape += "" if case.seq_q == case.seq_k else f" to {case.seq_k}"
        rows.append(
            (
                ratio * measured / milliseconds,
                f"| {case.spec}, {shape}, d {case.head_dim} | {row['pass']} | "
                f"{row['gpu'].removeprefix('NVIDIA ').split()[0]} | {milliseconds:.3f} | "
                f"{speed:.0f} | {row['peer']} {ratio * measured:.3f} | "
                f"{ratio * measured / milliseconds:.2f} | {ratio:.2f} | "
                f"{error} |",
            )
        )
    return "\n".join(
        [
            f"Predicted with the rates of one {facts(arch).product}; {STATED_ERROR}.",
            "Ratios are the peer's time over flashgen's.",
            "",
            "| case | pass | GPU of the peer | predicted ms | TFLOP/s | fastest peer, ms | "
            "predicted ratio | ratio of the record | error on the record |",
            f"|{' --- |' * 9}",
            *(line for _, line in sorted(rows)),
        ]
    )
