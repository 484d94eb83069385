"""The fields of Hopper's templates: forms of wgmma, and panels of operands in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashgen.kernels.codegen.walk import ScoreCode
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.panels_sm90 import (
    PANEL_COLUMNS,
    columns_of_instructions,
    panel_of_scores,
    panels_of_kernel,
    queries_of_sums,
)
from flashgen.spec.language.spec import AttentionSpec


class Product(NamedTuple):
    """One form of wgmma, on accumulators ``float d[columns / 8][4]``.

    Attributes:
        name: the name of the function.
        columns: the columns of the product, the instruction's n.
        from_registers: whether A is in four registers instead of shared memory.
    """

    name: str
    columns: int
    from_registers: bool

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The first column and the columns of each instruction."""
        first, *others = columns_of_instructions(self.columns)
        return (0, first), *((first, columns) for columns in others)


def fields_of(spec: AttentionSpec, plan: Plan, score: ScoreCode) -> dict[str, object]:
    """The fields that only these templates have, for any kernel of scores."""
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, panels), (panel_v, panels_v) = panels_of_kernel(
        plan.kernel, *sizes, one_tensor=plan.one_tensor, streamed=plan.streamed
    )
    sums_tile = plan.sums_tile if plan.gathers else None
    tile_queries = queries_of_sums(plan.block_q, plan.head_dim)
    return {
        "products": [
            Product(name, columns, name == "multiply_columns" and not plan.in_passes)
            for name, columns in sorted(set(_shapes_of_products(plan)))
        ],
        "streamed": plan.streamed,
        "panel": panel,
        "panels": panels,
        "panel_v": panel_v,
        "panels_v": panels_v,
        "ping_pong": plan.ping_pong,
        # With a score function or dropout, P and dS are computed together, after dP arrived.
        "one_pass": bool(score.call or spec.dropout),
        "panel_s": panel_of_scores(plan.block_k),
        "sum_queries": queries_of_sums(sums_tile[0], plan.head_dim) if sums_tile else tile_queries,
        "dq_shares_queries": tile_queries < plan.block_q,
    }


def _shapes_of_products(plan: Plan) -> Iterator[tuple[str, int]]:
    """The names of a kernel's products, each with a number of columns."""
    if plan.streamed:
        walked = plan.block_q if plan.owns_keys else plan.block_k
        yield "multiply_rows", walked // 2
        yield "multiply_columns", PANEL_COLUMNS[0]
        return
    if not plan.owns_keys:
        yield "multiply_rows", plan.block_k
        if not plan.is_for_learned:
            multiplies_v = plan.kernel in ("forward", "tangent")
            yield "multiply_columns", plan.output_columns if multiplies_v else plan.head_dim
        return
    if plan.score_warps > 1:  # keys are the columns of all products but dQ^T
        yield "multiply_rows", plan.pass_keys
        yield "multiply_columns", plan.block_k
        dq_columns = plan.block_q // (plan.warps // 4)
    else:
        yield "multiply_rows", plan.block_q
        yield "multiply_columns", plan.head_dim
        yield "multiply_columns", plan.head_dim_v
        dq_columns = queries_of_sums(plan.block_q, plan.head_dim)
    if plan.kernel == "fused":
        yield "multiply_queries", dq_columns
