"""All calls from the runtime to the compiler packages: language, planner and pipeline.

The packages are imported inside functions, when a kernel is needed. All other modules of the
runtime can be imported without sympy and jinja2, which the layering tests check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashgen.call import CheckedCall, LaunchOptions
from flashgen.signature import CallSignature, GradientTerm

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec
    from flashgen.pipeline import Build
    from flashgen.planner import HeadsPerTile, Plan, Tile
    from flashgen.planner.schedule import LaunchBlocks

# ---- specs -------------------------------------------------------------------------------------


def signature_of(spec: AttentionSpec) -> CallSignature:
    """The signature of calls of ``spec``."""
    from flashgen.language.signature import signature_of

    return signature_of(spec)


def without_dropout(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with kernels that drop nothing, for calls whose dropout_p is 0."""
    from flashgen.language.variants import without_dropout

    return without_dropout(spec)


def learning(spec: AttentionSpec, names: frozenset[str]) -> AttentionSpec:
    """``spec`` with kernels that compute the gradients of the named tensors only."""
    from flashgen.language.variants import learning

    return learning(spec, names)


# ---- kernels -----------------------------------------------------------------------------------


def forward_kernel(
    spec: AttentionSpec,
    arch: str,
    access_bytes: int,
    call: CheckedCall,
    layout_heads: int,
    launch: LaunchOptions,
) -> tuple[Build, HeadsPerTile]:
    """The compiled forward kernel of a call, and the number of query heads that share a tile.

    Args:
        access_bytes: bytes of one access to global memory: 16, or the size of an element.
        layout_heads: heads of the block layout, as in `heads_per_tile`.
    """
    from flashgen.pipeline import build
    from flashgen.planner import plan

    options: dict[str, Any] = {
        "sram": launch.sram,
        "tile": launch.tiles.get("forward"),
        "access_bytes": access_bytes,
    }
    one_head = plan(spec, arch, **options)
    heads = heads_per_tile(spec, one_head, call, layout_heads)
    return build(spec, arch, heads_per_tile=heads.heads, **options), heads


def heads_per_tile(
    spec: AttentionSpec, plan: Plan, call: CheckedCall, layout_heads: int
) -> HeadsPerTile:
    """The number of query heads that share a tile of the forward kernel.

    Args:
        plan: a plan with the rows of one head in each tile.
        layout_heads: heads of the block layout; 1 where there is none.
    """
    from flashgen.planner import choose_heads

    sizes = call.batch, call.heads_q, call.heads_kv, call.seq_q
    return choose_heads(spec, plan, *sizes, layout_heads=layout_heads)


def backward_kernels(
    spec: AttentionSpec, arch: str, launch: LaunchOptions, *, deterministic: bool
) -> tuple[Build, ...]:
    """The compiled backward kernels, in the order of their launches."""
    from flashgen.pipeline import build_backward

    return build_backward(
        spec, arch, sram=launch.sram, deterministic=deterministic, tiles=launch.tiles
    )


def minmax_table_kernels(spec: AttentionSpec, arch: str) -> tuple[Build, ...]:
    """The compiled kernels of the min/max tables of a spec."""
    from flashgen.pipeline import build_minmax_tables

    return build_minmax_tables(spec, arch)


def minmax_span() -> int:
    """The number of elements for each entry of level 0 of a min/max table."""
    from flashgen.analysis import SPAN

    return SPAN


def gradient_terms(build: Build) -> tuple[GradientTerm, ...]:
    """The elements of learned tensors to whose gradients a kernel adds."""
    from flashgen.pipeline import gradient_terms

    return gradient_terms(build)


# ---- launches ----------------------------------------------------------------------------------


def head_bits(plan: Plan, call: CheckedCall) -> int:
    """Logarithm to base 2 of the number of heads in a head group."""
    from flashgen.planner.schedule import head_bits

    return head_bits(plan, call.heads_q, call.heads_kv, call.seq_q, call.seq_k)


def persistent_blocks(
    plan: Plan, work_tiles: int, sms: int | None, given: int | None
) -> LaunchBlocks:
    """The number of blocks of a persistent kernel, as `planner.schedule.blocks_of`.

    Raises:
        PlanError: as `blocks_of`.
    """
    from flashgen.planner.schedule import blocks_of

    return blocks_of(plan, work_tiles, sms, given)


def tensor_map_boxes(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """The boxes that TMA copies of each operand: columns, rows and heads."""
    from flashgen.planner.models.panels_sm90 import GROUP_ROWS, panels_of_kernel

    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, _), (panel_v, _) = panels_of_kernel(plan.kernel, *sizes)
    # A warpgroup's rows are queries of one head, or the tile's queries of several heads.
    queries = min(GROUP_ROWS, plan.queries_per_tile) if plan.kernel == "forward" else plan.block_q
    heads = GROUP_ROWS // queries if plan.heads_per_tile > 1 else 1
    return {
        "q": (panel, queries, heads),
        "k": (panel, plan.block_k, 1),
        "v": (panel_v, plan.block_k, 1),
        "o" if plan.kernel == "forward" else "do": (panel_v, queries, heads),
    }


def dq_sum_rows(plan: Plan) -> int:
    """The rows of a tile of dQ sums on the sm_90a path."""
    from flashgen.planner.models.panels_sm90 import queries_of_sums

    return queries_of_sums(plan.block_q, plan.head_dim)


def cpu_blocks(
    spec: AttentionSpec, arch: str, launch: LaunchOptions, *, backward: bool
) -> tuple[int, int]:
    """block_q and block_k of the plan whose tiles the CPU path uses."""
    from flashgen.planner import plan, plan_backward

    if backward:
        chosen = plan_backward(spec, arch, sram=launch.sram, tiles=launch.tiles).of_keys
    else:
        chosen = plan(spec, arch, sram=launch.sram, tile=launch.tiles.get("forward"))
    return chosen.block_q, chosen.block_k


# ---- tuned tiles -------------------------------------------------------------------------------


def tile(fields: Mapping[str, Any]) -> Tile:
    """A tile from its fields.

    Raises:
        TypeError: ``fields`` has other names than those of a tile.
    """
    from flashgen.planner import Tile

    return Tile(**fields)


def check_tiles(spec: AttentionSpec, arch: str, which: str, tiles: Mapping[str, Tile]) -> None:
    """Raises PlanError, KeyError or TypeError where no plan can have these tiles.

    Args:
        which: "forward", "backward" or "deterministic".
    """
    from flashgen.planner import plan, plan_backward

    if which == "forward":
        plan(spec, arch, tile=tiles["forward"])
    else:
        plan_backward(spec, arch, deterministic=which == "deterministic", tiles=tiles)
