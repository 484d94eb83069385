"""What the rows of a query tile are: queries of one head, or of several that share K and V."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan import Plan


@dataclass(frozen=True)
class Rows:
    """C++ that finds the head and the query of a row.

    Attributes:
        queries: how many queries a tile has of each head.
        head: of a warp's rows, which are all of one.
        first, first_anew: the first query of a warp's rows, found from its first row of the tile,
            and anew from its threads.
    """

    queries: str
    head: str
    first: str
    first_anew: str


_OF_ONE_HEAD = Rows(
    "BLOCK_Q", "h", "q_start + warp_row", "q_start + thread / 32 * (16 * ROW_GROUPS)"
)
# The rows of a head lie behind those of the head before it.
_OF_HEADS = Rows("TILE_QUERIES", "head", "warp_query", "q_start + thread / 32 * 16 % TILE_QUERIES")


def rows_of(plan: Plan) -> Rows:
    """By whether the plan's tiles have several heads."""
    return _OF_HEADS if plan.heads_per_tile > 1 else _OF_ONE_HEAD
