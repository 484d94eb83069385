"""The rows of a query tile: queries of one head, or of several heads that share K and V."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planner import Plan


@dataclass(frozen=True)
class Rows:
    """C++ that finds the head and the query of a row.

    Attributes:
        queries: the number of queries that a tile has of each head.
        head: the head of a warp's rows; all rows of a warp belong to one head.
        first, first_anew: the first query of a warp's rows, from the variables of the kernel, or
            computed again from the thread index.
    """

    queries: str
    head: str
    first: str
    first_anew: str


_OF_ONE_HEAD = Rows(
    "BLOCK_Q", "h", "q_start + warp_row", "q_start + thread / 32 * (16 * ROW_GROUPS)"
)
# A tile of several heads has the rows of one head after the rows of another.
_OF_HEADS = Rows("TILE_QUERIES", "head", "warp_query", "q_start + thread / 32 * 16 % TILE_QUERIES")


def rows_of(plan: Plan) -> Rows:
    """The rows of the plan's query tiles."""
    return _OF_HEADS if plan.heads_per_tile > 1 else _OF_ONE_HEAD
