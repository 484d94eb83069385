"""The time model against the records: predicted over measured times of flashgen's own kernels.

The records name the tiles of each call, so that a call is predicted with the tiles that it had,
whichever the planner chooses today. The kernels of the runs in `EARLIER` computed every tile for
all rows of a block and score functions as they are written; since then, warpgroups of forward
kernels skip the tiles that their own rows do not reach, and factors of score functions are folded.
Hopper's kernels for block layouts gather live blocks since then, and masks that divide have other
code: their former records are of another kernel. In the runs up to `FORMER` the last tile of
queries was the one that lacked some, in every forward kernel, and no backward kernel computed
scores ahead.

Each of these records has one tile. `comparisons` has calls whose kernels with different tiles took
turns in one process.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flashgen as fg
from benchmarks.suite.cases import Case, make
from benchmarks.suite.contenders.ours import in_short, spec_of
from benchmarks.suite.records import RESULTS, read
from flashgen.calls.runtime.bind_arguments import heads_of_call
from flashgen.kernels.codegen import walk_of_kernel
from flashgen.kernels.pipeline import divides_groups
from flashgen.kernels.planner import Plan, feasible, split_of_call
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.duration import duration_of
from flashgen.kernels.planner.models.fitted_time import CONSTANTS, constants_of
from flashgen.kernels.planner.models.spec_terms import score_instructions
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.kernels.planner.requests import BackwardPlanRequest
from flashgen.kernels.planner.traffic import StepKind, Steps, Walk
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of
from flashgen.shared.call import CheckedCall
from flashgen.shared.launch_facts import STREAMING_KERNELS
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.intervals import row_interval
from flashgen.spec.language.lets import atoms_of
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod

ARCHS = {"flashgen sm_90a": "sm_90a", "flashgen sm_80": "sm_90"}
"""The architecture of a Hopper GPU by the contender, which names the code path."""

DETERMINISTIC = " deterministic"
"""The end of the names of contenders with seven products in the backward pass."""

ONE_RANGE = "one range of keys for each row"
"""The masks that decide most constants."""

OTHERS = "all others, block layouts"

EARLIER = ("20261126T032114Z", "20261126T172208Z")
FORMER = "20261128T055650Z"

UNSPLIT = (*EARLIER, "20261127T225255Z")
"""The runs whose calls with few rows did not split their keys by themselves."""

SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim")

FORM = re.compile(r"(\w+) (\w+) b(\d+) h(\d+)/(\d+) (\d+)x(\d+) d(\d+)")
"""The subject of a form's record: its pass, its spec and its `SIZES`."""

FORM_PLANS = re.compile(r"p20 \S+, p80 \S+; (.*?)(?: (\d+) FMA columns)?")
"""Its note, where it names the plans: the plans, and the columns of exponentials on FMA units."""

PATH = "sm_90a"
"""The code path whose forms were compared, and the architecture."""

Constants = Mapping[str, Mapping[str, Number]]
"""Values of the time model's constants, by code path and name."""

Row = dict[str, str]


@dataclass(frozen=True)
class Launch:
    """A launch of a measured call: its plan and its work."""

    plan: Plan
    walks: tuple[Walk, ...]
    uneven: bool

    @property
    def exceeds_l2(self) -> bool:
        """Whether the kernel walked whole groups whose heads that run at the same time do not fit
        in L2."""
        plan, sizes = self.plan, self.walks[0].sizes
        if plan.in_parts or not (self.uneven and plan.divides_groups):
            return False
        return plan.part_heads(*sizes) < sizes.heads_q // sizes.heads_kv

    def seconds(self, constants: Constants) -> float:
        """The predicted duration with these constants of the time model."""
        plan = self.plan
        if not plan.streams:
            kernel_constants = constants_of(plan.kernel, plan.code_path, constants)
            quantities = plan.model.costs(plan.quantities.copy() | kernel_constants)
            plan = replace(plan, cost=float(quantities["cost"]), quantities=Quantities(quantities))
        return duration_of(plan, self.walks, uneven=self.uneven).seconds


@dataclass(frozen=True)
class Point:
    """A record of flashgen's own kernels.

    Attributes:
        run: the run that measured it.
        case: the problem.
        pass_: "forward" or "backward".
        path: the code path.
        deterministic: whether the sums of dQ had a fixed order.
        gpu: the name of the GPU.
        seconds: the measured duration, the median of the samples.
        launches: the launches of the call.
    """

    run: str
    case: Case
    pass_: str
    path: str
    deterministic: bool
    gpu: str
    seconds: float
    launches: tuple[Launch, ...]

    def error(self, constants: Constants = CONSTANTS) -> float:
        """Predicted over measured time, minus 1."""
        return sum(launch.seconds(constants) for launch in self.launches) / self.seconds - 1

    @property
    def kind(self) -> str:
        """What the mask of the case is to the model."""
        if self.case.seq_q == 1:
            return "one query"
        if any(launch.exceeds_l2 for launch in self.launches):
            return "whole groups of query heads beyond L2"
        spec = spec_of(self.case)
        one_range = row_interval(spec.mask) is not None and spec.block_sparse is None
        return ONE_RANGE if one_range else OTHERS


def points(results: Path = RESULTS) -> list[Point]:
    """The records of all GPUs, of cases that are `recorded` whole."""
    return [
        point_of(row)
        for row in read(results / "speed.csv")
        if row["part"] == "suite"
        and row["status"] == "ok"
        and row["ms_p50"]
        and row["contender"].removesuffix(DETERMINISTIC) in ARCHS
        and row["pass"] != "both"
        and recorded(case_of(row))
        and not has_other_kernels(row)
    ]


def recorded(case: Case) -> bool:
    """Whether records say all that a prediction needs: not the values of captured tensors, and not
    the plans with dropout, in whose place they have those of a call that drops nothing."""
    spec = spec_of(case)
    return not spec.tensors and not spec.dropout


def has_other_kernels(row: Row) -> bool:
    """Whether the launches of a record are not those of `launches_of`: kernels that have been
    replaced by ones with other tiles, and calls that split their keys by themselves."""
    case, arch = case_of(row), ARCHS[row["contender"].removesuffix(DETERMINISTIC)]
    if row["run"] not in UNSPLIT and row["pass"] == "forward":
        return split_of_call(spec_of(case), arch, call_of(case)) > 0
    spec = spec_of(case)
    gathered = spec.block_sparse is not None and row["path"] == PATH
    divided = row_interval(spec.mask) is None and atoms_of(spec.mask, FloorDiv, FloorMod)
    return (gathered or bool(divided)) and row["run"] in EARLIER


def comparisons(results: Path = RESULTS) -> list[list[Point]]:
    """The forms of kernels whose plans the records name; the forms of one call are together."""
    points_by_call: dict[tuple[str, ...], list[Point]] = {}
    for row in read(results / "measures.csv"):
        named, form = FORM_PLANS.fullmatch(row["note"]), FORM.fullmatch(row["subject"])
        if row["part"] != "forms" or named is None or form is None:
            continue
        plans, columns = named.groups()
        pass_, spec, *sizes = form.groups()
        case = make("forms", spec, *map(int, sizes))
        fixed = pass_ == "backward" and not plans.startswith("fused")
        launches = launches_of(
            case,
            PATH,
            pass_,
            fixed,
            plans,
            fma_columns=int(columns or 0),
            former=row["run"] <= FORMER,
        )
        measured = float(row["value"]) / 1e3
        point = Point(row["run"], case, pass_, PATH, fixed, row["gpu"], measured, launches)
        points_by_call.setdefault((row["run"], row["commit"], row["subject"]), []).append(point)
    return list(points_by_call.values())


def point_of(row: Row) -> Point:
    """The point of a record of one of `ARCHS`' contenders."""
    name, case = row["contender"].removesuffix(DETERMINISTIC), case_of(row)
    fixed = name != row["contender"]
    earlier = row["run"] in EARLIER
    columns = 0 if earlier else None
    launches = launches_of(
        case,
        ARCHS[name],
        row["pass"],
        fixed,
        row["plan"],
        earlier,
        columns,
        row["run"] <= FORMER,
    )
    seconds = float(row["ms_p50"]) / 1e3
    fields = row["run"], case, row["pass"], row["path"], fixed, row["gpu"]
    return Point(*fields, seconds, launches)


def case_of(row: Row) -> Case:
    """The problem that a row was measured on."""
    pairs = (pair.split("=") for pair in row["scalars"].split())
    scalars: tuple[tuple[str, Any], ...] = tuple((name, json.loads(x)) for name, x in pairs)
    sizes = (int(row[name]) for name in SIZES)
    dim_v = int(row["head_dim_v"])
    return Case(row["group"], row["spec"], *sizes, row["dtype"], scalars, dim_v=dim_v)


def call_of(case: Case) -> CheckedCall:
    """The call of a problem."""
    sizes = case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k
    dims = case.head_dim, case.head_dim_v
    return CheckedCall(*sizes, *dims, 0, 0, case.head_dim**-0.5, dict(case.scalars))


@functools.cache
def launches_of(
    case: Case,
    arch: str,
    pass_: str,
    deterministic: bool = False,
    plans: str = "",
    earlier: bool = False,
    fma_columns: int | None = None,
    former: bool = False,
) -> tuple[Launch, ...]:
    """The launches of a pass.

    Args:
        plans: the plans of the call's kernels in the words of the records; those of today without.
        earlier: whether the kernels are of the runs in `EARLIER`.
        fma_columns: columns of a tile whose exponentials are on FMA units; None for today's number.
        former: whether the kernels are of the runs up to `FORMER`.
    """
    spec, call = spec_of(case), call_of(case)
    launches = []
    for plan in plans_of(spec, arch, pass_, call.sizes, deterministic, plans):
        if plan.kernel == "forward":
            heads = heads_of_call(spec, plan, call, {}).heads
            if heads > 1:  # heads that share a tile may have another one
                tile = None if plan.policy == "derived" else plan.tile
                plan = fg.plan(spec, arch, heads_per_tile=heads, tile=tile)
        mask = analyse(spec, walk_of_kernel(plan.kernel)).mask
        walks = walks_of(KnownCall(spec, call), mask, plan, ragged_last=former)
        if earlier:
            walks = [_whole_tiles(plan, walk) for walk in walks]
            if not plan.streams:
                written = score_instructions(spec, plan.kernel, folds=False)
                plan = _with(plan, score_ops=written)
        if former and plan.scores_ahead:
            plan = _with(plan, first_plan=0)
        if fma_columns is not None and not plan.streams:
            plan = _with(plan, fma_columns=fma_columns)
        launches.append(Launch(plan, tuple(walks), mask.growth != 0))
    return tuple(launches)


def plans_of(
    spec: fg.AttentionSpec,
    arch: str,
    pass_: str,
    sizes: tuple[int, int, int, int, int],
    deterministic: bool,
    recorded: str,
) -> tuple[Plan, ...]:
    """The plans of a pass with the tiles of a record; today's without one."""
    texts = {text.split()[0]: text for text in recorded.split("; ") if text}
    forward = pass_ == "forward"
    request = BackwardPlanRequest(spec, arch, deterministic=deterministic)
    if forward:
        today: tuple[Plan, ...] = (fg.plan(spec, arch),)
    else:
        parts = "convert_dk" in texts if recorded else divides_groups(request, sizes)
        request = replace(request, in_parts=parts)
        today = plan_schemes(request).kernels
    same = (in_short(plan) == texts.get(plan.kernel) for plan in today if not plan.streams)
    if not recorded or all(same):
        return today
    tiles = {
        name: next(p for p in feasible(spec, arch, kernel=name) if in_short(p) == text).tile
        for name, text in texts.items()
        if (name == "forward") == forward and name not in STREAMING_KERNELS
    }
    if forward:
        return (fg.plan(spec, arch, tile=tiles["forward"]),)
    return plan_schemes(replace(request, tiles=tuple(sorted(tiles.items())))).kernels


def _with(plan: Plan, **quantities: Number) -> Plan:
    """The plan with other values of these quantities, which its cost is computed from."""
    return replace(plan, quantities=Quantities(plan.quantities.copy() | quantities))


def _whole_tiles(plan: Plan, walk: Walk) -> Walk:
    """The walk of a kernel whose warpgroups skip no tiles."""
    if walk.steps is None:
        return walk
    mask_ops = max((kind.mask_ops for steps in walk.steps for kind in steps), default=0.0)

    def whole(steps: Steps) -> Steps:
        counts: Counter[StepKind] = Counter()
        for kind, count in steps.items():
            masked = kind.mask_ops > 0 or kind.rows < plan.block_q
            counts[StepKind(plan.block_q, mask_ops if masked else 0)] += count
        return counts

    return walk._replace(steps=[whole(steps) for steps in walk.steps])


def table(results: Path = RESULTS) -> str:
    """The errors by kind of mask, pass and code path as a table of docs/planner.md."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for point in points(results):
        pass_ = point.pass_ + ", fixed order of sums" * point.deterministic
        groups.setdefault((point.kind, pass_, point.path), []).append(point.error())
    head = "| mask | pass | path | launches | median | from | to |"
    lines = [head, f"|{' --- |' * 7}"]
    for key, errors in sorted(groups.items(), reverse=True):
        shown = (f"{100 * f(errors):+.0f} %" for f in (statistics.median, min, max))
        lines.append(f"| {' | '.join((*key, str(len(errors)), *shown))} |")
    return "\n".join(lines)
