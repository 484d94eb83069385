"""From a chosen tile to a plan: its constraints, why no larger tile, and its shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashgen.kernels.planner.derivation import DerivationLine, Refusal, line_of
from flashgen.kernels.planner.kernel_plan import Plan, SmemMap
from flashgen.kernels.planner.models.fitted_sm90 import CLUSTER_GAIN
from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS, SMEM_OF_SM
from flashgen.kernels.planner.models.panels_sm90 import rows_of_sums
from flashgen.kernels.planner.models.spec_terms import folded_score, spared_instructions
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.kernels.planner.search import (
    Evaluated,
    best_occupancy,
    cost_in_layout,
    has_whole_boxes,
    larger,
)
from flashgen.kernels.planner.tile_problem import TileProblem
from flashgen.shared.dtypes import ITEMSIZE
from flashgen.shared.launch_facts import head_places
from flashgen.spec.analysis.windows import window_of
from flashgen.spec.language.symbols import SCORE

# The derivation line of each constraint, by the name that `Excess` has for it.
_LINE_OF = {
    "shared memory": "smem",
    "shared memory per SM": "smem_sm",
    "registers per thread": "registers",
    "cost": "cost",
}


def plan_of_tile(
    problem: TileProblem, found: Evaluated, policy: str, notes: tuple[str, ...] = ()
) -> Plan:
    """The plan of a tile of a problem.

    Args:
        policy: as in `Plan.policy`.
        notes: lines to print after the plan's own.
    """
    spec, tile, at = problem.spec, found.tile, found.quantities
    refused = _refusals(problem, found) if policy == "derived" else ()
    binding = {_LINE_OF[refusal.quantity] for refusal in refused if refusal.quantity in _LINE_OF}
    # The sink of split keys counts once, in the merge.
    merged = spec.split and not spec.folds
    reads_sink = problem.kernel in ("forward", "tangent") and not merged
    sink = spec.sink if reads_sink else None
    parts = {part.name: int(part(at)) for part in found.model.parts}
    assert sum(parts.values()) == at["smem"], "the parts are those that the model counts"
    return Plan(
        kernel=problem.kernel,
        arch=problem.arch.name,
        path=problem.path.name,
        policy=policy,
        dtype=spec.dtype,
        itemsize=int(at["e"]),
        head_dim=int(at["d_qk"]),
        head_dim_v=int(at["d_v"]),
        block_q=int(at["block_q"]),
        block_k=int(at["block_k"]),
        warps=tile.warps,
        column_warps=tile.column_warps,
        score_warps=tile.score_warps,
        cluster=tile.cluster,
        stages=int(at["stages"]),
        access_bytes=int(at["access"]),
        smem=SmemMap(tuple(parts.items())),
        smem_bytes=int(at["smem"]),
        sink_bytes=ITEMSIZE[sink.dtype] if sink is not None else 0,
        has_rows=spec.sums_weights,
        heads_per_tile=problem.heads_per_tile,
        box_k=int(at.get("box_k", 0)),
        gathers=problem.gathers(tile),
        box_q=int(at.get("box_q", 0)),
        key_box=int(at.get("key_box", 0)),
        key_stride=int(at.get("key_stride", 1)),
        tangents=problem.tangents,
        partial=spec.partial or (merged and at["e"] == 2),
        folds=spec.folds and problem.kernel == "forward",
        runs=spec.runs and problem.kernel == "forward",
        one_tensor="one_tensor" in at,
        returns_maxima=spec.returns_maxima and problem.kernel == "forward",
        sums_tile=_tile_of_sums(problem, at),
        registers=int(at["register_limit"]),
        registers_needed=math.ceil(at["registers"]),
        blocks_per_sm=tile.blocks,
        cost=found.cost,
        quantities=Quantities(at),
        derivation=tuple(replace(line, binding=line.name in binding) for line in _lines(found)),
        refused=refused,
        notes=(*_notes(problem, found, policy), *notes),
    )


def _tile_of_sums(problem: TileProblem, at: Mapping[str, Number]) -> tuple[int, int] | None:
    """Rows and columns of a tile of the sums of dQ: wgmma makes dQ^T in strips of 16 rows.

    A tile of the sums is a box, where tiles are gathered, or two boxes that two warpgroups have.
    """
    if problem.kernel != "fused":
        return None
    head_dim = int(at["d_qk"])
    strips = MMA_ROWS * -(-head_dim // MMA_ROWS)
    rows = int(at["block_q"])
    if "box_q" in at:
        rows = rows_of_sums(rows, int(at["box_q"]), head_dim)
    return rows, strips if problem.path.dq_strips else head_dim


def _notes(problem: TileProblem, found: Evaluated, policy: str) -> Iterator[str]:
    """Printed notes: the quantities that the derivation takes as given, and the code path."""
    arch, at = problem.arch, found.quantities
    yield (
        f"{arch.name}: M {at['M']:,} B, M_sm {at['M_sm']:,} B, R {at['R']:,}; "
        f"rates of {arch.product}; clk: clocks of an SM per score element, {STATED_ERROR}"
    )
    if problem.path != arch.code_path:
        why = "TMA takes addresses and strides in multiples of 16 bytes"
        if problem.kernel == "tangent":
            why = "the kernel of tangents has no form for this one"
        if at["e"] not in arch.code_path.itemsizes:
            why = "float32 is split into parts of bfloat16, which mma.sync multiplies"
        yield f"{problem.path} path: {why}"
    if problem.spec.block_sparse:
        yield (
            f"visits the tiles of a block-sparse layout: {problem.spec.block_sparse.described}; "
            "clk are per score element of these tiles"
        )
    if at.get("key_stride", 1) > 1:
        yield (
            f"a block owns one of each {at['key_stride']} boxes of {at['key_box']} keys, as "
            "columns of the layout that are alike stand so far apart"
        )
    if problem.spec.score != SCORE:
        in_passes = "passes" in at
        folded = None if in_passes else folded_score(problem.spec, problem.kernel)
        yield f"score: {'; '.join(folded.notes) if folded else 'it is computed as written'}"
    if not problem.spec.is_softmax:
        spared = spared_instructions(problem.spec, problem.kernel)
        ops, special = at["score_ops"], at["special_ops"]
        yield (
            f"weights: no maximum and no exponential of a softmax: score_ops {ops + spared} - "
            f"{spared} = {ops}, special_ops {special + 1} - 1 = {special}"
        )
    if "divided" in at:
        columns = f"{at['fma_columns']} of {at['block_k']} columns on FMA units"
        costs = f"{at['undivided']:.4f} clk with none, {at['divided']:.4f} with the best number"
        yield f"exp2: {columns}; {costs} of 8 or more"
    rows, step = MMA_ROWS * found.tile.row_groups, found.tile.step
    for element, dims in problem.learned:
        window = window_of(element, dims, rows, step)
        if window is None:
            yield f"d{element.tensor}: each score is added in global memory"
        else:
            yield (
                f"d{element.tensor}: a warp adds {rows} x {step} scores to {window.entries} sums "
                "in shared memory, and these to global memory once per step"
            )
    if problem.kernel == "forward" and found.tile.column_warps > 1:
        width = int(at["d_v"])
        yield (
            f"column_warps {found.tile.column_warps}, which share the columns of O: 16 rows of all "
            f"take {width // 2} registers a thread of one warp, beside those of S and P, of "
            f"{int(at['register_limit'])}; of 256 columns they take 128"
        )
    if found.tile.cluster > 1:
        yield (
            f"cluster {found.tile.cluster}: blocks that copy half of the keys of both, two tiles "
            "of heads that share K and V, or else of queries; both visit what either reaches"
        )
    elif found.tile.column_warps > 1 and len(found.model.clusters) > 1:
        saves = f"one saves less than {CLUSTER_GAIN:.0%} of the clocks"
        if problem.alone or policy == "derived":
            yield f"no cluster: {problem.alone or saves}"
    heads, owned = problem.heads_per_tile, int(at["block_q"])
    if heads > 1:
        queries = owned // head_places(owned, heads)
        yield (
            f"heads_per_tile {heads}: query heads that share K and V, "
            f"{queries} queries of each = {heads * queries} "
            f"{'' if heads * queries == owned else f'of {owned} '}rows"
        )


def _lines(found: Evaluated) -> Iterator[DerivationLine]:
    """The constraints, the bounds that are solved from them, and the cost."""
    model, at = found.model, found.quantities
    for formula in model.sizes:
        yield line_of(formula, at)
    yield line_of(model.smem, at, "M")
    yield line_of(SMEM_OF_SM, at, "M_sm")
    for formula in (model.register_limit, *model.of_limit):
        yield line_of(formula, at)
    yield line_of(model.registers, at, "register_limit")
    yield line_of(model.smem_bound, at, upper_bound=True)
    yield line_of(model.register_bound, at, upper_bound=True)
    for formula in model.cost_steps:
        yield line_of(formula, at)


def _refusals(problem: TileProblem, found: Evaluated) -> tuple[Refusal, ...]:
    """Why each next larger tile was not chosen."""
    refused = []
    for change, bigger in larger(found):
        best = best_occupancy(problem, bigger)
        if best.excesses:
            refused.append(Refusal(**vars(best.excesses[0]), change=change))
        else:
            change += f", blocks per SM {best.tile.blocks}"
            if has_whole_boxes(problem, found.tile) and not has_whole_boxes(problem, best.tile):
                walked = "keys" if found.model.walks == "block_k" else "queries"
                block = problem.walked_block
                refused.append(Refusal("whole boxes", best.tile.step, block, walked, change))
                continue
            costs = cost_in_layout(problem, best), cost_in_layout(problem, found)
            unit = "clk per score of the call" if problem.gathers(found.tile) else "clk"
            refused.append(Refusal("cost", *costs, unit, change))
    return tuple(refused)
