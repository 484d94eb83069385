"""The constants of the time model: ``python benchmarks/fit_duration.py --fit STEPS``.

Fits those of `flashgen.kernels.planner.models.fitted_time` for the code path sm_90a to the records
of flashgen's own kernels (`benchmarks/suite/model_errors.py`) and prints them. Calls whose masks
are ranges of keys decide all constants that are fitted. Each record has one tile, so that the forms
of kernels which were measured in turns (`comparisons` there) say what other tiles of the same call
cost: each counts as `FORM_WEIGHT` records, since clocks and temperatures of a GPU change all forms
of a call alike. Calls with one query, which are bound by global memory, and gradients of whole
groups of query heads that L2 has no room for decide nothing.

Without `--fit` it predicts the durations of other libraries' kernels, whose tiles and speeds are
published (benchmarks/published.json), by the planner's formulas, and prints the errors: how far
such a kernel is from one of flashgen's with the same tile. Lengths below `LEAST` are shown, but
count for nothing: their launches take up to 0.2 ms, of which the host and the clearing of buffers
are a large part, and these are not in the model. No GPU is needed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from benchmarks.suite import model_errors  # noqa: E402
from benchmarks.suite.model_errors import Constants  # noqa: E402
from flashgen.kernels.planner import Plan, Tile  # noqa: E402
from flashgen.kernels.planner.duration import duration_of  # noqa: E402
from flashgen.kernels.planner.formulas import Formula  # noqa: E402
from flashgen.kernels.planner.models.fitted_time import CONSTANTS  # noqa: E402
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS  # noqa: E402
from flashgen.kernels.planner.plan_of_tile import plan_of_tile  # noqa: E402
from flashgen.kernels.planner.quantities import Quantities  # noqa: E402
from flashgen.kernels.planner.search import Evaluated, evaluated  # noqa: E402
from flashgen.kernels.planner.streaming_kernels import plan_delta  # noqa: E402
from flashgen.kernels.planner.tile_problem import problem_of  # noqa: E402
from flashgen.kernels.planner.traffic import LaunchSizes, Visited, Walk  # noqa: E402
from flashgen.shared.arch import facts  # noqa: E402
from flashgen.shared.launch_facts import KEY_KERNELS  # noqa: E402

PUBLISHED = ROOT / "benchmarks" / "published.json"
LEAST = 1024
PATH = "sm_90a"  # the code path whose constants are fitted

FORM_WEIGHT = 2
FIXED = ("atomic_share", "mask_stall")
"""The constants that are not fitted. The first is measured by itself. The second was fitted to
former kernels of masks that divide, by former counts of instructions; of the present code there is
no record."""

DELTA = 0.01  # relative change of a constant for a difference quotient

# FLOP per score element and element of the head dim, by the convention of FlashAttention.
FLOPS = {"forward": 4, "backward": 10, "both": 14}
_PASSES = {name: name for name in FLOPS} | {"both": "forward and backward"}
# Bytes per element of dQ beside the main kernel's: zeros written, sums read, dQ written.
CONVERSION_BYTES = 4 + 4 + 2

# FlashAttention-4's backward kernel at head dim 256 on Hopper: two warpgroups own the same keys.
# Each computes the scores of half of the queries and half of the columns of dK and dV, and they
# exchange P and dS through shared memory. By the name of a quantity: its value beside the model's.
SAME_KEYS = {
    "reads": Formula("reads", "reads + e*((depth + depth_v)/block_q + 4)"),
    "products": Formula("products", "2*products"),
    "rest": Formula("rest", "rest + 1"),  # two more stores of 16 bits
    "shared": Formula("shared", "shared + e/128"),
}


@dataclass(frozen=True)
class Point:
    """A published measurement of one length: TFLOP/s, and the series that it belongs to."""

    series: int
    seq: int
    tflops: float

    @property
    def short(self) -> bool:
        return self.seq < LEAST


@functools.cache
def _file() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return contents


def published() -> list[dict[str, Any]]:
    """The series of the file."""
    series: list[dict[str, Any]] = _file()["series"]
    return series


def sources() -> dict[str, str]:
    """The sources of the series by their names."""
    by_name: dict[str, str] = _file()["sources"]
    return by_name


def points() -> list[Point]:
    """All points of the file."""
    return [
        Point(index, seq, tflops)
        for index, series in enumerate(published())
        for seq, tflops in zip(series["seq"], series["tflops"], strict=True)
    ]


@functools.cache
def _kernels(index: int) -> tuple[tuple[Evaluated, Plan], ...]:
    """The kernels of a series as plans of this project's models, whether or not they would fit."""
    series = published()[index]
    spec = fg.AttentionSpec(head_dim=series["head_dim"], dtype=series["dtype"])
    kernels = []
    for kernel in series["kernels"]:
        problem = problem_of(spec, facts(series["arch"]), None, 16, kernel=kernel["kernel"])
        owned, step = kernel["block_q"], kernel["block_k"]
        if kernel["kernel"] in KEY_KERNELS:
            owned, step = step, owned
        column_warps = kernel.get("column_warps", 1)
        tile = Tile(
            step=step,
            warps=kernel["warps"],
            row_groups=owned * column_warps // (MMA_ROWS * kernel["warps"]),
            blocks=kernel["blocks_per_sm"],
            column_warps=column_warps,
            score_warps=kernel.get("score_warps", 1),
        )
        evaluated_tile = evaluated(problem, tile)
        kernels.append((evaluated_tile, plan_of_tile(problem, evaluated_tile, "given")))
    return tuple(kernels)


def _with_cost(index: int, kernel: Evaluated, plan: Plan) -> Plan:
    """The plan with the cost of the published kernel, as far as it is known."""
    series = published()[index]
    quantities = {**kernel.quantities}
    shared = SAME_KEYS if plan.code_path.copies_by_tma and plan.column_warps == 2 else {}
    for formula in kernel.model.cost_steps:
        quantities[formula.name] = formula(quantities)
        if formula.name in shared:
            quantities[formula.name] = shared[formula.name](quantities)
        if formula.name == "rest" and "instructions" in series:
            quantities["rest"] = series["instructions"] - quantities["products"]
        if formula.name == "l2":
            quantities["l2"] /= series.get("cluster", 1)
    return replace(plan, cost=float(quantities["cost"]), quantities=Quantities(quantities))


def predicted(point: Point) -> float:
    """The speed that the model predicts for a point, in TFLOP/s."""
    series, seq = published()[point.series], point.seq
    batch = series["batch"] if "batch" in series else series["tokens"] // seq
    heads, head_dim, causal = series["heads"], series["head_dim"], series["causal"]
    sizes = LaunchSizes(batch, heads, heads, seq, seq)
    seconds = 0.0
    arch = facts(series["arch"])
    for kernel, plan in _kernels(point.series):
        plan = _with_cost(point.series, kernel, plan)
        visited = _causal_tiles(plan, seq) if causal else None
        seconds += duration_of(plan, [Walk(sizes, visited)], uneven=causal).seconds
        if plan.owns_keys:
            spec = fg.AttentionSpec(head_dim=head_dim, dtype=series["dtype"])
            delta = plan_delta(spec, series["arch"], plan.path)
            seconds += duration_of(delta, [Walk(sizes)]).seconds
            elements = batch * heads * seq * head_dim
            seconds += CONVERSION_BYTES * elements / arch.hbm_bytes_per_s
    flops = FLOPS[series["pass"]] * batch * heads * seq**2 * head_dim / (2 if causal else 1)
    return flops / seconds / 1e12


def _causal_tiles(plan: Plan, seq: int) -> Visited:
    """The tiles that a block visits: keys up to its queries, or queries from its keys on."""
    query_tiles, key_tiles = -(-seq // plan.block_q), -(-seq // plan.block_k)
    if plan.owns_keys:
        return [range(key * plan.block_k // plan.block_q, query_tiles) for key in range(key_tiles)]
    last = (min(seq, (tile + 1) * plan.block_q) for tile in range(query_tiles))
    return [range(-(-end // plan.block_k)) for end in last]


def errors(measurements: Sequence[Point]) -> list[float]:
    """Predicted over measured speed, minus 1."""
    return [predicted(point) / point.tflops - 1 for point in measurements]


def counted(measurements: Sequence[Point]) -> list[Point]:
    """The points that count: all but points of short lengths."""
    return [point for point in measurements if not point.short]


def form_errors(forms: list[model_errors.Point], constants: Constants = CONSTANTS) -> list[float]:
    """The logarithms of predicted over measured times of the forms of one call, less their mean."""
    logarithms = [math.log1p(form.error(constants)) for form in forms]
    return [logarithm - statistics.mean(logarithms) for logarithm in logarithms]


def step(measurements: Sequence[model_errors.Point], constants: Constants) -> Constants:
    """One step of Gauss and Newton towards the least squares of log(predicted / measured)."""
    calls, path_constants = model_errors.comparisons(), constants[PATH]
    one_range = [point for point in measurements if point.kind == model_errors.ONE_RANGE]
    names = [name for name in path_constants if name not in FIXED]

    def residuals(trial: Constants) -> np.ndarray[Any, np.dtype[np.float64]]:
        forms = [error for forms in calls for error in form_errors(forms, trial)]
        records = [math.log1p(point.error(trial)) for point in one_range]
        return np.array(records + [FORM_WEIGHT * error for error in forms])

    base = residuals(constants)
    columns = []
    for name in names:
        changed = {**constants, PATH: {**path_constants, name: path_constants[name] * (1 + DELTA)}}
        columns.append((residuals(changed) - base) / DELTA)
    change, *_ = np.linalg.lstsq(np.stack(columns, axis=1), -base, rcond=None)
    change = np.clip(change, -0.5, 0.5)
    for share in (1, 1 / 2, 1 / 4, 1 / 8):  # the model has kinks: a whole step may go too far
        factors = zip(names, 1 + share * change, strict=True)
        better = {
            **constants,
            PATH: {**path_constants, **{x: path_constants[x] * float(by) for x, by in factors}},
        }
        if np.sum(residuals(better) ** 2) < np.sum(base**2):
            return better
    return constants


SINCE = ("20261128T055650Z",)
"""The runs since the last fit, whose records it has not seen."""


def records(*, seen: bool = True) -> list[model_errors.Point]:
    """The records of the path that is fitted, whose errors are printed; or those of the same kinds
    since the last fit. Masks that are one range of keys decide."""
    kinds = (model_errors.ONE_RANGE, model_errors.OTHERS)
    return [
        point
        for point in model_errors.points()
        if point.path == PATH and point.kind in kinds and (point.run not in SINCE) == seen
    ]


def table_of_errors() -> str:
    """The errors by library, GPU and pass as a table of docs/planner.md."""
    groups: dict[tuple[str, ...], list[float]] = {}
    counted_points = counted(points())
    for point, error in zip(counted_points, errors(counted_points), strict=True):
        series = published()[point.series]
        key = series["library"], _PASSES[series["pass"]], series["gpu"]
        groups.setdefault(key, []).append(abs(error))
        groups.setdefault(("all", "", ""), []).append(abs(error))
    lines = ["| kernels | pass | GPU | points | median error | worst |", f"|{' --- |' * 6}"]
    groups["all", "", ""] = groups.pop(("all", "", ""))
    for key, errors_of_group in groups.items():
        median, worst = statistics.median(errors_of_group), max(errors_of_group)
        lines.append(f"| {' | '.join(key)} | {len(errors_of_group)} | {median:.1%} | {worst:.1%} |")
    return "\n".join(line.replace("|  ", "| ") for line in lines)


def in_words(errors: Sequence[float]) -> str:
    """Number of points, median and worst error."""
    size = [abs(error) for error in errors]
    return f"{len(size)} points, median {statistics.median(size):.1%}, worst {max(size):.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", type=int, metavar="STEPS", help="fit anew in this many steps")
    parser.add_argument("--table", action="store_true", help="print the table of docs/planner.md")
    options = parser.parse_args()
    if options.table:
        print(table_of_errors())
        return 0
    console = Console(width=150)
    if options.fit:
        measurements, constants = records(), CONSTANTS
        for _ in range(options.fit):
            constants = step(measurements, constants)
            console.print({name: round(value, 4) for name, value in constants[PATH].items()})
        console.print(in_words([point.error(constants) for point in measurements]))
        calls = model_errors.comparisons()
        forms = [
            math.expm1(logarithm) for forms in calls for logarithm in form_errors(forms, constants)
        ]
        console.print(f"forms of one call beside each other: {in_words(forms)}")
        return 0
    every = points()
    table = Table("kernel", "GPU", "pass", "d", "mask", "predicted / measured - 1, by length")
    for index, series in enumerate(published()):
        points_of_series = [point for point in every if point.series == index]
        shown = (
            f"{point.seq}: {error:+.0%}"
            for point, error in zip(points_of_series, errors(points_of_series), strict=True)
        )
        mask = "causal" if series["causal"] else "none"
        table.add_row(
            *(series["library"], series["gpu"], series["pass"], str(series["head_dim"]), mask),
            "  ".join(shown),
        )
    console.print(table)
    console.print(f"all: {in_words(errors(counted(every)))}")
    short = [point for point in every if point.short]
    console.print(f"below {LEAST:,}, not counted: {in_words(errors(short))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
