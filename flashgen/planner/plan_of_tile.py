"""From a chosen tile to a plan: its constraints, why no larger tile, and its shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashgen.analysis import window_of
from flashgen.launch_facts import KEY_KERNELS, head_places
from flashgen.planner.derivation import DerivationLine, Excess, Refusal, line_of
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models import forward_sm80
from flashgen.planner.models.backward_columns_sm90 import TILE_BYTES
from flashgen.planner.models.backward_sm80 import ROW_BYTES
from flashgen.planner.models.backward_sm90 import ALIGNED, SCORE_BUFFERS
from flashgen.planner.models.fitted_time import STATED_ERROR
from flashgen.planner.models.kernel_model import MMA_ROWS, SMEM_OF_SM, KernelModel
from flashgen.planner.quantities import Number, Quantities
from flashgen.planner.search import best_occupancy, cost, costs, excesses, larger
from flashgen.planner.tile_problem import Tile, TileProblem

# The derivation line of each constraint, by the name that `Excess` has for it.
_LINE_OF = {
    "shared memory": "smem",
    "shared memory per SM": "smem_sm",
    "registers per thread": "registers",
    "cost": "cost",
}


def plan_of_tile(
    problem: TileProblem, tile: Tile, policy: str, notes: tuple[str, ...] = ()
) -> Plan:
    """The plan of a feasible tile.

    Args:
        policy: as in `Plan.policy`.
        notes: lines to print after the plan's own.
    """
    at = costs(problem, tile)
    refused = refusals(problem, tile) if policy == "derived" else ()
    binding = {_LINE_OF[refusal.quantity] for refusal in refused if refusal.quantity in _LINE_OF}
    return Plan(
        kernel=problem.kernel,
        arch=problem.arch.name,
        path=problem.path,
        policy=policy,
        dtype=problem.dtype,
        itemsize=problem.itemsize,
        head_dim=problem.d_qk,
        head_dim_v=problem.d_v,
        block_q=int(at["block_q"]),
        block_k=int(at["block_k"]),
        warps=tile.warps,
        column_warps=tile.column_warps,
        score_warps=tile.score_warps,
        stages=int(at["stages"]),
        access_bytes=problem.access_bytes,
        **_tile_offsets(problem.path, problem.kernel, at),
        smem_bytes=int(at["smem"]),
        sink_bytes=problem.sink_bytes,
        heads_per_tile=problem.heads_per_tile,
        partial=problem.partial,
        sums_tile=_tile_of_sums(problem, at),
        registers=int(at["register_limit"]),
        registers_needed=math.ceil(at["registers"]),
        blocks_per_sm=tile.blocks,
        cost=float(at["cost"]),
        quantities=Quantities(at),
        derivation=tuple(
            replace(line, binding=line.name in binding)
            for line in _lines(problem.model_of(tile), at)
        ),
        refused=refused,
        notes=(*_notes(problem, tile), *notes),
    )


def _tile_of_sums(problem: TileProblem, at: Mapping[str, Number]) -> tuple[int, int] | None:
    """Rows and columns of a tile of the sums of dQ: wgmma makes dQ^T in strips of 16 rows."""
    if problem.kernel != "fused":
        return None
    head_dim = int(at["d_qk"])
    columns = MMA_ROWS * -(-head_dim // MMA_ROWS) if problem.path == "sm_90a" else head_dim
    return int(at["block_q"]), columns


def _notes(problem: TileProblem, tile: Tile) -> Iterator[str]:
    """Printed notes: the quantities that the derivation takes as given, and the code path."""
    yield (
        f"{problem.arch.name}: M {problem.smem_limit:,} B, M_sm {problem.smem_of_sm:,} B, "
        f"R {problem.arch.registers_per_sm:,}; rates of {problem.arch.product}; "
        f"clk: clocks of an SM per score element, {STATED_ERROR}"
    )
    if problem.path_note:
        yield problem.path_note
    if problem.block_layout:
        yield (
            f"visits the tiles of a block-sparse layout: {problem.block_layout}; "
            "clk are per score element of these tiles"
        )
    yield from _windows(problem, tile)
    heads = problem.heads_per_tile
    if heads > 1:
        queries = tile.owned // head_places(tile.owned, heads)
        yield (
            f"heads_per_tile {heads}: query heads that share K and V, "
            f"{queries} queries of each = {heads * queries} "
            f"{'' if heads * queries == tile.owned else f'of {tile.owned} '}rows"
        )


def _windows(problem: TileProblem, tile: Tile) -> Iterator[str]:
    """For each element to whose gradient scores add: where the sums are."""
    rows = MMA_ROWS * tile.row_groups
    scores = f"{rows} x {tile.step} scores"
    for element, dims in problem.learned:
        window = window_of(element, dims, rows, tile.step)
        if window is None:
            yield f"d{element.tensor}: each score is added in global memory"
        else:
            yield (
                f"d{element.tensor}: a warp adds {scores} to {window.entries} sums in shared "
                "memory, and these to global memory once per step"
            )


def _lines(model: KernelModel, at: Mapping[str, Number]) -> Iterator[DerivationLine]:
    """The constraints, the bounds that are solved from them, and the cost."""
    for formula in model.sizes:
        yield line_of(formula, at)
    yield line_of(model.smem, at, "M")
    yield line_of(SMEM_OF_SM, at, "M_sm")
    yield line_of(model.register_limit, at)
    for formula in model.of_limit:
        yield line_of(formula, at)
    yield line_of(model.registers, at, "register_limit")
    yield line_of(model.smem_bound, at, upper_bound=True)
    yield line_of(model.register_bound, at, upper_bound=True)
    for formula in model.cost_steps:
        yield line_of(formula, at)


def refusals(problem: TileProblem, tile: Tile) -> tuple[Refusal, ...]:
    """Why each next larger tile was not chosen."""
    found = []
    for change, bigger in larger(problem, tile):
        broken = next(excesses(problem, bigger), None)
        if broken is None:
            best = best_occupancy(problem, bigger)
            assert best is not None, "it fits with one block per SM"
            change += f", blocks per SM {best.blocks}"
            broken = Excess("cost", cost(problem, best), cost(problem, tile), "clk")
        found.append(Refusal(**vars(broken), change=change))
    return tuple(found)


def _tile_offsets(path: str, kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Byte offsets of a kernel's tiles in dynamic shared memory, by the names of `Plan`'s fields.

    Sizes of tiles are multiples of 128 bytes, because block sizes are multiples of 16 rows and head
    dims of 8 elements: the swizzle of the sm_80 path works on aligned groups.

    Args:
        at: the quantities of the chosen tile, "smem" among them.
    """
    if kernel == "forward":
        if path == "sm_90a":
            smem_k = int(at["e"] * at["block_q"] * at["depth"])
            size_of_k = int(at["stages"] * at["e"] * at["block_k"] * at["depth"])
        else:
            smem_k = int(forward_sm80.K_OFFSET(at))
            size_of_k = int(at["e"] * at["block_k"] * at["d_qk"])
        return {"smem_k": smem_k, "smem_v": smem_k + size_of_k}
    offsets, end = {}, 0
    sizes = sizes_of_tiles(path, kernel, at)
    for name, size in sizes.items():
        if size and name.startswith("smem"):
            offsets[name] = end
        end += size
    assert end == at["smem"], "the tiles are those that the model counts"
    return offsets


def sizes_of_tiles(path: str, kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Bytes of each part of a backward kernel's dynamic shared memory, in their order."""
    return _sizes_sm90(kernel, at) if path == "sm_90a" else _sizes_sm80(kernel, at)


def _sizes_sm80(kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Bytes of each tile of a backward kernel, in their order."""
    e, block_q, block_k = int(at["e"]), int(at["block_q"]), int(at["block_k"])
    q, k = e * block_q * int(at["d_qk"]), e * block_k * int(at["d_qk"])
    do, v = e * block_q * int(at["d_v"]), e * block_k * int(at["d_v"])
    if kernel not in KEY_KERNELS:
        sums = int(at["warps"] * at["windows"])
        return {"smem_q": q, "smem_do": do, "smem_k": 2 * k, "smem_v": v, "smem_windows": sums}
    scores = e * block_q * block_k
    exchanged = at["exchanged"]
    return {
        "smem_k": k,
        "smem_v": v,
        "smem_q": 2 * q,
        "smem_do": do,
        "smem_rows": 2 * ROW_BYTES * block_q,
        "smem_p": scores if exchanged else 0,
        "smem_ds": scores if exchanged or kernel == "fused" else 0,
    }


def _sizes_sm90(kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Bytes of each tile of a backward kernel, in their order."""
    size = {name: int(value) for name, value in at.items() if isinstance(value, int)}
    e, stages, depth, depth_v = size["e"], size["stages"], size["depth"], size["depth_v"]
    block_q, block_k = size["block_q"], size["block_k"]
    queries, keys = e * block_q, e * block_k
    if kernel not in KEY_KERNELS:
        return {
            "smem_q": queries * depth,
            "smem_do": queries * depth_v,
            "smem_k": stages * keys * depth,
            "smem_v": stages * keys * depth_v,
            "smem_rows": TILE_BYTES * stages,
            "barriers": 8 * (1 + 4 * stages),
            "smem_windows": size["warps"] * size["windows"],
        }
    exchanged = size["exchanged"]
    scores = SCORE_BUFFERS * block_q * keys
    if "passes" in size:  # the form of `backward_columns_sm90`
        return {
            "smem_k": keys * depth,
            "smem_v": keys * depth_v,
            "smem_q": stages * queries * depth,
            "smem_do": queries * depth_v,
            "smem_p": block_q * keys,
            "smem_ds": block_q * keys,
            "smem_rows": stages * (block_q * ROW_BYTES + TILE_BYTES),
            "barriers": 8 * (3 + 2 * stages),
        }
    return {
        "smem_k": keys * depth,
        "smem_v": keys * depth_v,
        "smem_q": stages * queries * depth,
        "smem_do": ALIGNED * -(-stages * queries * depth_v // ALIGNED),
        "smem_p": scores if exchanged else 0,
        "smem_ds": scores if exchanged or kernel == "fused" else 0,
        "sums": 4 * block_q * depth if kernel == "fused" else 0,  # of dQ
        "smem_rows": stages * (block_q * size["query_bytes"] + TILE_BYTES),
        "barriers": 8 * (1 + 4 * stages),
    }
