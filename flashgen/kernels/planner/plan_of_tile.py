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
    problem: TileProblem, chosen: Evaluated, policy: str, notes: tuple[str, ...] = ()
) -> Plan:
    """The plan of a tile of a problem.

    Args:
        policy: as in `Plan.policy`.
        notes: lines to print after the plan's own.
    """
    spec, tile, quantities = problem.spec, chosen.tile, chosen.quantities
    refused = _refusals(problem, chosen) if policy == "derived" else ()
    binding = {_LINE_OF[refusal.quantity] for refusal in refused if refusal.quantity in _LINE_OF}
    # The sink of split keys counts once, in the merge.
    merged = spec.split and not spec.folds
    reads_sink = problem.kernel in ("forward", "tangent") and not merged
    sink = spec.sink if reads_sink else None
    parts = {part.name: int(part(quantities)) for part in chosen.model.parts}
    assert sum(parts.values()) == quantities["smem"], "the parts are those that the model counts"
    return Plan(
        kernel=problem.kernel,
        arch=problem.arch.name,
        path=problem.path.name,
        policy=policy,
        dtype=spec.dtype,
        itemsize=int(quantities["e"]),
        head_dim=int(quantities["d_qk"]),
        head_dim_v=int(quantities["d_v"]),
        block_q=int(quantities["block_q"]),
        block_k=int(quantities["block_k"]),
        warps=tile.warps,
        column_warps=tile.column_warps,
        score_warps=tile.score_warps,
        cluster=tile.cluster,
        stages=int(quantities["stages"]),
        access_bytes=int(quantities["access"]),
        smem=SmemMap(tuple(parts.items())),
        smem_bytes=int(quantities["smem"]),
        sink_bytes=ITEMSIZE[sink.dtype] if sink is not None else 0,
        has_rows=spec.sums_weights,
        heads_per_tile=problem.heads_per_tile,
        gathers=problem.gathers(tile),
        tangents=problem.tangents,
        partial=spec.partial or (merged and quantities["e"] == 2),
        folds=spec.folds and problem.kernel == "forward",
        runs=spec.runs and problem.kernel == "forward",
        one_tensor="one_tensor" in quantities,
        returns_maxima=spec.returns_maxima and problem.kernel == "forward",
        sums_tile=_tile_of_sums(problem, quantities),
        registers=int(quantities["register_limit"]),
        registers_needed=math.ceil(quantities["registers"]),
        blocks_per_sm=tile.blocks,
        cost=chosen.cost,
        quantities=Quantities(quantities),
        derivation=tuple(replace(line, binding=line.name in binding) for line in _lines(chosen)),
        refused=refused,
        notes=(*_notes(problem, chosen, policy), *notes),
    )


def _tile_of_sums(problem: TileProblem, quantities: Mapping[str, Number]) -> tuple[int, int] | None:
    """Rows and columns of a tile of the sums of dQ: wgmma makes dQ^T in strips of 16 rows.

    A tile of the sums is a box, where tiles are gathered, or two boxes that two warpgroups have.
    """
    if problem.kernel != "fused":
        return None
    head_dim = int(quantities["d_qk"])
    strips = MMA_ROWS * -(-head_dim // MMA_ROWS)
    rows = int(quantities["block_q"])
    if "box_q" in quantities:
        rows = rows_of_sums(rows, int(quantities["box_q"]), head_dim)
    return rows, strips if problem.path.dq_strips else head_dim


def _notes(problem: TileProblem, chosen: Evaluated, policy: str) -> Iterator[str]:
    """Printed notes: the quantities that the derivation takes as given, and the code path."""
    arch, quantities = problem.arch, chosen.quantities
    yield (
        f"{arch.name}: M {quantities['M']:,} B, M_sm {quantities['M_sm']:,} B, "
        f"R {quantities['R']:,}; rates of {arch.product}; "
        f"clk: clocks of an SM per score element, {STATED_ERROR}"
    )
    if problem.path != arch.code_path:
        why = "TMA takes addresses and strides in multiples of 16 bytes"
        if problem.kernel == "tangent":
            why = "the kernel of tangents has no form for this one"
        if quantities["e"] not in arch.code_path.itemsizes:
            why = "float32 is split into parts of bfloat16, which mma.sync multiplies"
        yield f"{problem.path} path: {why}"
    if problem.spec.block_sparse:
        yield (
            f"visits the tiles of a block-sparse layout: {problem.spec.block_sparse.described}; "
            "clk are per score element of these tiles"
        )
    if quantities.get("key_stride", 1) > 1:
        yield (
            f"a block owns one of each {quantities['key_stride']} boxes of {quantities['key_box']} "
            "keys, as columns of the layout that are alike stand so far apart"
        )
    if problem.spec.score != SCORE:
        in_passes = "passes" in quantities
        folded = None if in_passes else folded_score(problem.spec, problem.kernel)
        yield f"score: {'; '.join(folded.notes) if folded else 'it is computed as written'}"
    if not problem.spec.is_softmax:
        spared = spared_instructions(problem.spec, problem.kernel)
        ops, special = quantities["score_ops"], quantities["special_ops"]
        yield (
            f"weights: no maximum and no exponential of a softmax: score_ops {ops + spared} - "
            f"{spared} = {ops}, special_ops {special + 1} - 1 = {special}"
        )
    if "divided" in quantities:
        columns = f"{quantities['fma_columns']} of {quantities['block_k']} columns on FMA units"
        none, best = quantities["undivided"], quantities["divided"]
        yield (
            f"exp2: {columns}; {none:.4f} clk with none, {best:.4f} with the best "
            "number of 8 or more"
        )
    rows, step = MMA_ROWS * chosen.tile.row_groups, chosen.tile.step
    for element, dims in problem.learned:
        window = window_of(element, dims, rows, step)
        if window is None:
            yield f"d{element.tensor}: each score is added in global memory"
        else:
            yield (
                f"d{element.tensor}: a warp adds {rows} x {step} scores to {window.entries} sums "
                "in shared memory, and these to global memory once per step"
            )
    if problem.kernel == "forward" and chosen.tile.column_warps > 1:
        width = int(quantities["d_v"])
        yield (
            f"column_warps {chosen.tile.column_warps}, which share the columns of O: 16 rows of "
            f"all take {width // 2} registers a thread of one warp, beside those of S and P, of "
            f"{int(quantities['register_limit'])}; of 256 columns they take 128"
        )
    if chosen.tile.cluster > 1:
        yield (
            f"cluster {chosen.tile.cluster}: blocks that copy half of the keys of both, two tiles "
            "of heads that share K and V, or else of queries; both visit what either reaches"
        )
    elif chosen.tile.column_warps > 1 and len(chosen.model.clusters) > 1:
        saves = f"one saves less than {CLUSTER_GAIN:.0%} of the clocks"
        if problem.why_alone or policy == "derived":
            yield f"no cluster: {problem.why_alone or saves}"
    heads, owned = problem.heads_per_tile, int(quantities["block_q"])
    if heads > 1:
        queries = owned // head_places(owned, heads)
        yield (
            f"heads_per_tile {heads}: query heads that share K and V, "
            f"{queries} queries of each = {heads * queries} "
            f"{'' if heads * queries == owned else f'of {owned} '}rows"
        )


def _lines(chosen: Evaluated) -> Iterator[DerivationLine]:
    """The constraints, the bounds that are solved from them, and the cost."""
    model, quantities = chosen.model, chosen.quantities
    for formula in model.sizes:
        yield line_of(formula, quantities)
    yield line_of(model.smem, quantities, "M")
    yield line_of(SMEM_OF_SM, quantities, "M_sm")
    for formula in (model.register_limit, *model.after_limit):
        yield line_of(formula, quantities)
    yield line_of(model.registers, quantities, "register_limit")
    yield line_of(model.smem_bound, quantities, upper_bound=True)
    yield line_of(model.register_bound, quantities, upper_bound=True)
    for formula in model.cost_steps:
        yield line_of(formula, quantities)


def _refusals(problem: TileProblem, chosen: Evaluated) -> tuple[Refusal, ...]:
    """Why each next larger tile was not chosen."""
    refused = []
    for change, bigger in larger(chosen):
        best = best_occupancy(problem, bigger)
        if best.excesses:
            refused.append(Refusal(**vars(best.excesses[0]), change=change))
        else:
            change += f", blocks per SM {best.tile.blocks}"
            if has_whole_boxes(problem, chosen.tile) and not has_whole_boxes(problem, best.tile):
                walked = "keys" if chosen.model.walks == "block_k" else "queries"
                block = problem.walked_block
                refused.append(Refusal("whole boxes", best.tile.step, block, walked, change))
                continue
            costs = cost_in_layout(problem, best), cost_in_layout(problem, chosen)
            unit = "clk per score of the call" if problem.gathers(chosen.tile) else "clk"
            refused.append(Refusal("cost", *costs, unit, change))
    return tuple(refused)
