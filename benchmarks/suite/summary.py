"""The end of a run in words: what is wrong, then what is slower than a peer, then the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.suite import model_lines
from benchmarks.suite.records import read
from benchmarks.suite.supervisor import Outcome

Row = dict[str, str]


def rows_of_run(rows: Iterable[Row], run: str) -> list[Row]:
    return [row for row in rows if row["run"] == run]


def text(run: str, outcomes: Sequence[Outcome], folder: Path) -> str:
    """The whole summary of a run whose records are in ``folder``."""
    speed = rows_of_run(read(folder / "speed.csv"), run)
    measures = rows_of_run(read(folder / "measures.csv"), run)
    models = rows_of_run(read(folder / "models.csv"), run)
    lines = [f"run {run}", *_heading(speed or models or measures), ""]
    failed = [failure for outcome in outcomes for failure in outcome.failed]
    lines += _section("failed", failed, "nothing failed")
    ours = without_options(speed)
    rest = [row for row in speed if is_ours(row) and row not in ours]
    nothing = "nothing is slower than a peer" if ours else "none timed"
    lines += _section("slower than a peer", slower(ours), nothing)
    if models:
        title = "whole models, flashgen beside each peer, the furthest behind first"
        lines += _section(title, model_lines.compared(models), "none timed")
    lines += _section("as fast as every peer, or faster", faster(ours), "none timed")
    title = "calls with options and the other code path"
    lines += _section(f"{title}, slower than a peer", slower(rest), "none")
    lines += _section(f"{title}, not slower", faster(rest), "none timed")
    lines += _section("peers", others(speed), "none timed")
    lines += _section("contenders and their packages", packages(speed), "none")
    lines += _section("refused or unsupported", refused(speed), "none")
    if models:
        lines += _section("losses of whole models", model_lines.losses(models), "none trained")
        lines += _section("whole models without times", model_lines.not_timed(models), "none")
    lines += _section("other measurements", list(map(measure_line, measures)), "none")
    lines += _section("parts", [part_line(outcome) for outcome in outcomes], "none")
    left = [f"{o.name}: {skipped}" for o in outcomes for skipped in o.skipped]
    left += [f"{o.name}: all of it: {o.note}" for o in outcomes if o.state == "skipped"]
    lines += _section("left out", left, "nothing was left out")
    return "\n".join(lines)


def digest(run: str, outcomes: Sequence[Outcome], folder: Path, most: int = 15) -> str:
    """The same on one screen, for the end of a long output."""
    all_rows = rows_of_run(read(folder / "speed.csv"), run)
    speed = without_options(all_rows)
    failed = [failure for outcome in outcomes for failure in outcome.failed]
    main = [speed_line(row) for row in speed][:most]
    behind = slower(speed)
    lines = ["", "== furthest behind a peer", *(behind[:most] or ["(none)"])]
    models = rows_of_run(read(folder / "models.csv"), run)
    if models:
        lines += ["== whole models", *(model_lines.compared(models)[:most] or ["(none timed)"])]
    lines += ["== main cases, flashgen", *(main or ["(none timed)"])]
    lines += ["== peers", *packages([row for row in all_rows if not is_ours(row)])]
    lines += ["== parts", *map(part_line, outcomes)]
    lines += ["== failed", *(failure[:200] for failure in failed[:most] or ["(nothing failed)"])]
    left = sum(len(outcome.skipped) for outcome in outcomes)
    wrong = sum(row["status"] == "wrong" for row in all_rows if is_ours(row))
    ahead = len(speed) - len(behind)
    if pairs := model_lines.pairs(models):
        wrong += sum(row["status"] == "wrong" for row in models if row["backend"] == "flashgen")
        lost = sum(pair.ratio < 1 for pair in pairs)
        lines += [f"whole models: {lost} slower than a peer, {len(pairs) - lost} not"]
    lines += [
        f"{len(failed)} failed, {wrong} rows wrong, {len(behind)} slower than a peer, {ahead} not, "
        f"{left} left out; all of it: {folder.name}/summary-{run}.txt",
    ]
    return "\n".join(lines)


def _heading(rows: list[Row]) -> list[str]:
    if not rows:
        return ["no records"]
    row = rows[0]
    dry = "" if row["device"] == "gpu" else "   A DRY RUN: no number here says anything about speed"
    return [
        f"{row['gpu']}, driver {row['driver']}, commit {row['commit']}{dry}",
        row["versions"],
    ]


def _section(title: str, lines: list[str], nothing: str) -> list[str]:
    return [f"== {title} ({len(lines)})", *(lines or [f"({nothing})"]), ""]


def is_ours(row: Row) -> bool:
    return row["contender"].startswith("flashgen")


def problem(row: Row) -> str:
    heads = (
        row["heads_q"]
        if row["heads_q"] == row["heads_kv"]
        else f"{row['heads_q']}/{row['heads_kv']}"
    )
    scalars = f" {row['scalars']}" if row["scalars"] else ""
    second = f"/{row['head_dim_v']}" if row["head_dim_v"] != row["head_dim"] else ""
    return (
        f"{row['spec']}{scalars} B{row['batch']} H{heads} {row['seq_q']}x{row['seq_k']} "
        f"d{row['head_dim']}{second} {row['dtype']} {row['pass']}"
    )


def speed_line(row: Row) -> str:
    share = f" {float(row['of_matmul']):.0%} of matmul," if row["of_matmul"] else ""
    peer = f" {float(row['ratio']):.2f} x {row['peer']}" if row["ratio"] else " no peer"
    return (
        f"{problem(row):<72} {row['contender']:<32} {float(row['ms_p50']):>9.4f} ms "
        f"{float(row['tflops']):>7.1f} TFLOP/s,{share}{peer}"
    )


def _timed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["ms_p50"]]


def without_options(rows: list[Row]) -> list[Row]:
    """The rows of the code path that calls without options take; its records come first."""
    first_rows: dict[str, Row] = {}
    for row in _timed(rows):
        if is_ours(row) and len(row["contender"].split()) == 2:
            first_rows.setdefault(problem(row), row)
    return list(first_rows.values())


def slower(rows: list[Row]) -> list[str]:
    """Rows of flashgen that a peer is faster in, the worst first."""
    slower_rows = [row for row in _timed(rows) if row["ratio"] and float(row["ratio"]) < 1]
    return [speed_line(row) for row in sorted(slower_rows, key=lambda row: float(row["ratio"]))]


def faster(rows: list[Row]) -> list[str]:
    faster_rows = [row for row in _timed(rows) if not row["ratio"] or float(row["ratio"]) >= 1]
    return [speed_line(row) for row in faster_rows]


def others(rows: list[Row]) -> list[str]:
    return [speed_line(row) for row in _timed(rows) if not is_ours(row)]


def packages(rows: list[Row]) -> list[str]:
    """The packages of each contender that was timed, with their versions."""
    library_by_contender = {row["contender"]: row["library"] for row in _timed(rows)}
    return [f"{contender:<32} {library}" for contender, library in library_by_contender.items()]


def refused(rows: list[Row]) -> list[str]:
    """Each contender and reason once, with the number of rows."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row["status"] in ("unsupported", "refused"):
            key = (row["contender"], row["status"], row["note"])
            counts[key] = counts.get(key, 0) + 1
    return [f"{who}: {status}, {why} ({n} rows)" for (who, status, why), n in counts.items()]


def measure_line(row: Row) -> str:
    note = f"   {row['note']}" if row["note"] else ""
    return (
        f"{row['part']:<12} {row['subject']:<44} {row['metric']:<28} {row['value']:>12} "
        f"{row['unit']:<8} {row['setting']}{note}"
    )


def part_line(outcome: Outcome) -> str:
    if outcome.state == "skipped":
        return f"{outcome.name:<12} skipped: {outcome.note}"
    again = f", {outcome.processes} processes" if outcome.processes > 1 else ""
    note = f": {outcome.note}" if outcome.note else ""
    return (
        f"{outcome.name:<12} {outcome.state}, {outcome.seconds:.1f} s of {outcome.allowed:.0f}"
        f"{again}{note}"
    )
