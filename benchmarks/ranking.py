"""The planner's ranking of tiles against counted work: ``python benchmarks/ranking.py``.

Every feasible tile of causal attention is executed in the emulator, and its predicted cost is
compared with the cost computed from counts in place of predictions. Prints Spearman's rank
correlation of the cost and of each of its terms, and writes benchmarks/results/ranking.json.
Nothing is timed; no GPU is needed. Exits 1 when a correlation of the cost is below 0.9.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen.kernels.planner import Plan, feasible  # noqa: E402
from flashgen.tools.profile.kernel_profile import Profile  # noqa: E402
from flashgen.tools.profile.run import profile_forward  # noqa: E402

ARCH = "sm_80"
HEAD_DIMS = (64, 128)
N = 384
LEAST = 0.9
TERMS = ("tensor", "shared", "l2", "special", "issue")
TITLES: dict[str, Callable[[dict[str, Any]], float]] = {
    "feasible tiles": lambda result: float(result["tiles"]),
    "cost, all of them": lambda result: result["spearman"],
    "cost, each shape at its best occupancy": lambda result: result["spearman_best_occupancy"],
    "best by prediction / best by counts": lambda result: result["best_to_least_counted"],
}


@dataclass(frozen=True)
class Row:
    """A feasible tile: clocks of one SM, predicted and counted, of its cost and of each term."""

    plan: Plan
    predicted: dict[str, float]
    counted: dict[str, float]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.plan.block_q, self.plan.block_k, self.plan.warps


def rows_of(
    spec: fg.AttentionSpec,
    n: int,
    *,
    every: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """All feasible tiles of a forward kernel, each shape executed once for one head of n rows.

    Args:
        every: 5 takes each fifth shape.
        progress: called with the number of shapes that are done and the number of all shapes.
    """
    by_shape: dict[Any, list[Plan]] = {}
    for plan in feasible(spec, ARCH):
        by_shape.setdefault(replace(plan.tile, blocks=1), []).append(plan)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(1, 1, n, dim, generator=generator).to(dtype)
        for dim in (spec.head_dim, spec.head_dim, spec.head_dim_v or spec.head_dim)
    )
    shapes = sorted(by_shape)[::every]
    found: list[Row] = []
    for place, shape in enumerate(shapes):
        progress(place, len(shapes))
        plans = by_shape[shape]
        _, (profile,) = profile_forward(spec, q, k, v, arch=ARCH, tiles={"forward": plans[0].tile})
        # Tiles that differ in the number of resident blocks have the same code and the same work.
        found += [_row(replace(profile, plan=plan)) for plan in plans]
    progress(len(shapes), len(shapes))
    return found


def _row(profile: Profile) -> Row:
    work = {each.name: each for each in profile.work}
    predicted = {term: float(work[term].predicted or 0.0) for term in TERMS}
    scores = predicted["tensor"] / _line(profile.plan, "tensor")
    return Row(
        profile.plan,
        {**predicted, "cost": profile.plan.cost * scores},
        {**{term: work[term].counted for term in TERMS}, "cost": _counted_cost(profile)},
    )


def _counted_cost(profile: Profile) -> float:
    """Clocks of one SM for a launch, by the formula of the plan's own "cost".

    The clocks of each resource and the barriers are counted. The plan's formulas add them up: the
    clocks of the busiest resource, and those of the others that no other warp overlaps. PTX
    instructions are counted, which the assembler translates to other ones.
    """
    plan = profile.plan
    counted = {each.name: each.counted for each in profile.work if each.unit == "clk"}
    at = {**plan.quantities, **counted}
    at["barriers"] = profile.totals.barriers / plan.warps * at["barrier"] / plan.blocks_per_sm
    for formula in plan.model.cost_steps:
        if formula.name in ("busiest", "alone", "pace", "cost"):
            at[formula.name] = formula(at)
    return float(at["cost"])


def _line(plan: Plan, name: str) -> float:
    return float(plan.quantities[name])


def best_occupancy(rows: Sequence[Row]) -> list[Row]:
    """For each shape the row with the number of resident blocks that the planner would choose."""
    best: dict[tuple[int, int, int], Row] = {}
    for row in rows:
        other = best.setdefault(row.shape, row)
        if row.predicted["cost"] < other.predicted["cost"]:
            best[row.shape] = row
    return list(best.values())


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> Any:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


def agreement(rows: Sequence[Row], name: str) -> float:
    return spearman([row.predicted[name] for row in rows], [row.counted[name] for row in rows])


def record_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The record of one head dim."""
    one_each = best_occupancy(rows)
    ratios = {
        term: [row.counted[term] / row.predicted[term] for row in rows] for term in (*TERMS, "cost")
    }
    best = min(rows, key=lambda row: row.predicted["cost"])
    cheapest = min(row.counted["cost"] for row in rows)
    return {
        "tiles": len(rows),
        "shapes": len(one_each),
        "spearman": agreement(rows, "cost"),
        "spearman_best_occupancy": agreement(one_each, "cost"),
        "spearman_of_terms": {term: agreement(rows, term) for term in TERMS if _varies(rows, term)},
        "counted_to_predicted": {term: [min(found), max(found)] for term, found in ratios.items()},
        "best": list(best.shape),
        "best_to_least_counted": best.counted["cost"] / cheapest,
    }


def _varies(rows: Sequence[Row], term: str) -> bool:
    return len({row.counted[term] for row in rows}) > 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--length", type=int, default=N, help="of the sequences")
    parser.add_argument("--every", type=int, default=1, help="5 executes each fifth shape")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/ranking.json")
    options = parser.parse_args()
    console, found = Console(), {}
    causal = fg.load(ROOT / "specs" / "causal.py")
    with Progress(console=Console(stderr=True)) as progress:
        for head_dim in options.head_dims:
            task = progress.add_task(f"d {head_dim}: executing every tile")
            rows = rows_of(
                causal.replace(head_dim=head_dim),
                options.length,
                every=options.every,
                progress=lambda done, total, task=task: progress.update(
                    task, completed=done, total=total
                ),
            )
            found[f"causal, head_dim {head_dim}"] = record_of(rows)
    table = Table("Spearman, predicted against counted", *found)
    for title, value in TITLES.items():
        table.add_row(title, *(f"{value(result):.4g}" for result in found.values()))
    for term in TERMS:
        correlations = (result["spearman_of_terms"].get(term, 1.0) for result in found.values())
        table.add_row(f"of the term {term}", *(f"{value:.3f}" for value in correlations))
    console.print(table)
    console.print("issue counts instructions of PTX, and predicts those of the machine code")
    record = {
        "arch": ARCH,
        "n": options.length,
        "what": "predicted against counted cost",
        "specs": found,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {options.output}")
    least = min(min(e["spearman"], e["spearman_best_occupancy"]) for e in found.values())
    return 0 if least >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
