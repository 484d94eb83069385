"""Bytes that the forward kernel and the merge move in a call with split keys or a paged cache.

They are those that the lanes' loads and stores request, by formulas of the rows that work tiles
read and write. The HBM bound is K, V, q and out, each moved once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from flashgen.kernels.planner.derivation import line_of, printed_line
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.quantities import Number
from flashgen.kernels.planner.traffic import (
    Walk,
    neighbours_of_heads,
    rows_in,
    walks_of_head,
)

# The forward kernel. It reads K and V once for the heads that share a tile.
Q_READ = Formula("q_read", "e*d_qk*query_rows", "B")
K_READ = Formula("k_read", "e*d_qk*key_rows", "B")
V_READ = Formula("v_read", "e*d_v*value_rows", "B")
PAGES_READ = Formula("pages_read", "4*table_reads + 4*length_reads", "B")
O_WRITTEN = Formula("o_written", "e_out*d_v*part_rows", "B")
LSE_WRITTEN = Formula("lse_written", "4*lse_rows", "B")
FORWARD_BYTES = Formula(
    "forward_bytes", "q_read + k_read + v_read + pages_read + o_written + lse_written", "B"
)
# Where values are columns of the keys, and are read again as values.
K_TWICE_READ = Formula("k_read", "e*d_qk*key_rows + e*d_v*value_rows", "B")
NO_V_READ = Formula("v_read", "0", "B")
# Where caches hold codes, one lane of a warp reads the number of a page and its scales.
K_CODES_READ = Formula("k_read", "e_kv*d_qk*key_rows", "B")
V_CODES_READ = Formula("v_read", "e_kv*d_v*value_rows", "B")
SCALES_READ = Formula("scales_read", "8*scale_reads", "B")
# The merge. The lanes of each warp of a row read the LSE of a part each. Parts that are loaded
# early are read whether they have keys or not.
PARTS_READ = Formula("parts_read", "4*d_v*merged_rows", "B")
PARTS_LSE_READ = Formula("parts_lse_read", "4*row_warps*lse_rows", "B")
MERGED_WRITTEN = Formula("merged_written", "(e*d_v + 4)*rows", "B")
MERGE_BYTES = Formula("merge_bytes", "parts_read + parts_lse_read + merged_written", "B")

BOUND_BYTES = Formula("bound_bytes", "e*(d_qk + d_v)*keys + e*(d_qk + d_v)*rows", "B")
OVER_BOUND = Formula("over_bound", "(forward_bytes + merge_bytes)/bound_bytes")

OF_FORWARD = (Q_READ, K_READ, V_READ, PAGES_READ, O_WRITTEN, LSE_WRITTEN, FORWARD_BYTES)
OF_FORWARD_OF_ONE = (Q_READ, K_TWICE_READ, NO_V_READ, *OF_FORWARD[3:])
OF_FORWARD_ON_CODES = (
    *(Q_READ, K_CODES_READ, V_CODES_READ, SCALES_READ, PAGES_READ, O_WRITTEN, LSE_WRITTEN),
    Formula("forward_bytes", FORWARD_BYTES.text + " + scales_read", "B"),
)
BOUND_BYTES_OF_ONE = Formula("bound_bytes", "e*d_qk*keys + e*(d_qk + d_v)*rows", "B")
BOUND_BYTES_OF_CODES = Formula("bound_bytes", "e_kv*(d_qk + d_v)*keys + e*(d_qk + d_v)*rows", "B")
COUNTED = (
    *("query_rows", "key_rows", "value_rows", "part_rows", "lse_rows", "merged_rows"),
    *("table_reads", "length_reads", "scale_reads"),
)
OF_MERGE = (PARTS_READ, PARTS_LSE_READ, MERGED_WRITTEN, MERGE_BYTES)


class SplitWalk(NamedTuple):
    """The work of one split, or of all keys where they are not split.

    Attributes:
        split: the sizes, with the keys of the split as seq_k, and the tiles that it visits.
        keys_behind: keys of the tensor behind the split.
        writes: whether a block writes results after this split: once for all splits of a block.
        others: the work of the further splits of that block.
        early: whether the merge loads the results before it knows whether the split has keys.
    """

    split: Walk
    keys_behind: int = 0
    writes: bool = True
    early: bool = False
    others: tuple[Walk, ...] = ()


@dataclass(frozen=True)
class SplitTraffic:
    """Bytes of the launches of a call, exact where a work tile has one query of each head.

    Elsewhere a row without keys in a split counts as a row with keys if its tile reaches any.

    Attributes:
        merges: whether the keys are split, so that a second launch merges the results.
        paged: whether K and V are read from the pages of a cache.
        quantities: the quantities of the formulas, the results included.
    """

    merges: bool
    paged: bool
    quantities: Mapping[str, Number]

    @property
    def bytes(self) -> int:
        """Bytes of all launches."""
        return int(self.quantities["forward_bytes"] + self.quantities["merge_bytes"])

    @property
    def over_bound(self) -> float:
        """Bytes of all launches over the bytes of the HBM bound: K, V, q and out, each once."""
        return float(self.quantities["over_bound"])

    def forward_bytes_by_pointer(self) -> dict[str, int]:
        """Bytes by the names of the forward kernel's pointers."""
        names = {"q": "q_read", "o": "o_written", "lse": "lse_written"}
        bytes_by_name = {name: int(self.quantities[quantity]) for name, quantity in names.items()}
        k, v = int(self.quantities["k_read"]), int(self.quantities["v_read"])
        if not self.paged:
            return bytes_by_name | {"k": k, "v": v}
        if "e_kv" in self.quantities:
            scales = 4 * int(self.quantities["scale_reads"])
            bytes_by_name |= {"c_k_scale": scales, "c_v_scale": scales}
        # TMA and lanes read the same cache.
        return bytes_by_name | {
            **{"k": 0, "v": 0, "k_cache": k, "v_cache": v},
            "c_page_table": 4 * int(self.quantities["table_reads"]),
            "c_cache_seqlens": 4 * int(self.quantities["length_reads"]),
        }

    def merge_bytes_by_pointer(self) -> dict[str, int]:
        """Bytes by the names of the merge kernel's pointers."""
        lse = 4 * int(self.quantities["rows"])
        return {
            "parts_o": int(self.quantities["parts_read"]),
            "parts_lse": int(self.quantities["parts_lse_read"]),
            "o": int(self.quantities["merged_written"]) - lse,
            "lse": lse,
        }

    def __str__(self) -> str:
        formulas = _formulas(self.merges, self.quantities)
        lines = (printed_line(line_of(formula, self.quantities)) for formula in formulas)
        return "\n".join(["bytes", *chain(*lines)])


def split_traffic(
    plan: Plan,
    merge: Plan | None,
    walks: Sequence[SplitWalk],
    rows: int,
    keys: int,
    *,
    box_rows: int,
    page_size: int,
) -> SplitTraffic:
    """The bytes of the launches of a call.

    Args:
        plan: the plan of the forward kernel.
        merge: the plan of the merge; None where the keys are not split.
        walks: the work of each split.
        rows: query rows of all heads and sequences.
        keys: keys of all key heads and sequences.
        box_rows: the keys that TMA copies at once; 0 where lanes copy every row.
        page_size: keys of a page of the cache; 0 for contiguous keys.
    """
    counts: Counter[str] = Counter()
    for walk in walks:
        _count(counts, plan, walk, box_rows, page_size, merges=merge is not None)
    quantities: dict[str, Number] = {
        "e": plan.itemsize,
        "e_out": plan.out_itemsize,
        "d_qk": plan.head_dim,
        "d_v": plan.head_dim_v,
        **{name: counts[name] for name in COUNTED},
        "rows": rows,
        "keys": min(keys, counts["keys"]),  # heads that visit different keys may share some
        "merge_bytes": 0,
    }
    coded = plan.kv_itemsize != plan.itemsize
    if coded:
        quantities["e_kv"] = plan.kv_itemsize
    if merge is not None:
        quantities["row_warps"] = merge.quantities["row_warps"]
    if plan.one_tensor:
        quantities["one_tensor"] = 1
    FormulaSequence(*_formulas(merge is not None, quantities))(quantities)
    return SplitTraffic(merge is not None, page_size > 0, quantities)


def _formulas(merges: bool, quantities: Mapping[str, Number]) -> tuple[Formula, ...]:
    forward: tuple[Formula, ...] = OF_FORWARD
    bound = BOUND_BYTES
    if "one_tensor" in quantities:
        forward = OF_FORWARD_OF_ONE if quantities["value_rows"] else forward
        bound = BOUND_BYTES_OF_ONE
    if "e_kv" in quantities:
        forward, bound = OF_FORWARD_ON_CODES, BOUND_BYTES_OF_CODES
    return (*forward, *(OF_MERGE if merges else ()), bound, OVER_BOUND)


def _count(
    counts: Counter[str],
    plan: Plan,
    walk: SplitWalk,
    box_rows: int,
    page_size: int,
    *,
    merges: bool,
) -> None:
    """Adds the rows of one split to the counts of the launch, by the names of the quantities."""
    sizes, visited, _, before, _ = walk.split
    paged = page_size > 0
    walks = walks_of_head(plan, sizes, visited)
    block_walks = [walks, *(walks_of_head(plan, x.sizes, x.visited) for x in walk.others)]
    reaching = [i for i, tiles in enumerate(zip(*block_walks, strict=True)) if any(tiles)]
    queries = rows_in(reaching, plan.queries_per_tile, sizes.seq_q, before)
    read_queries = queries  # whose Q is read: once for all splits of a block
    if plan.joins and not walk.writes:
        read_queries = 0
    elif plan.joins and plan.code_path.copies_by_tma:  # whether or not its rows reach a key
        read_queries = sizes.seq_q
    pairs = sizes.batch * sizes.heads_q
    shared = pairs // plan.heads_per_tile  # walks over the keys
    touched = rows_in(set(chain(*walks)), plan.block_k, sizes.seq_k)
    counts["query_rows"] += read_queries * (
        pairs + sizes.batch * neighbours_of_heads(plan, sizes.heads_q)
    )
    if walk.writes:
        counts["part_rows"] += pairs * (queries if merges else sizes.seq_q)
        counts["lse_rows"] += pairs * sizes.seq_q
        counts["merged_rows"] += pairs * (sizes.seq_q if walk.early else queries)
    counts["keys"] += sizes.batch * sizes.heads_kv * touched
    if paged and walk.writes:  # a lane of each warp reads the length
        warps = plan.warps + (1 if plan.other_warps else 0)
        counts["length_reads"] += shared * len(walks) * warps
    one_tensor, columns_again = plan.one_tensor, plan.columns_read_again
    columns = plan.head_dim, plan.own_columns_of_v + columns_again
    vectors, vectors_v = (dim * plan.itemsize // 16 for dim in columns)
    for tile in chain(*walks):
        keys = values = valid = min(plan.block_k, sizes.seq_k - tile * plan.block_k)
        boxes, reads = (-(-valid // box_rows) if box_rows else 0), 0
        if not paged:
            # A box reads on beyond a split that ends inside of it, as far as the tensor has keys.
            if boxes:
                keys = values = min(boxes * box_rows, valid + walk.keys_behind)
        elif plan.kv_itemsize != plan.itemsize:
            # For each 32 rows, each warp reads the pages, and their scales where K and V have
            # scales by page.
            sets = [min(32, valid - i) for i in range(0, valid, 32)]
            reads = plan.warps * sum(1 + (rows - 1) // page_size for rows in sets)
            counts["scale_reads"] += shared * reads
        elif not boxes:
            reads = valid * (vectors + vectors_v)
        else:
            # Lanes copy the rows of V of a box with rows behind the last key, as they may be NaN.
            keys, reads = boxes * box_rows, 2 * boxes + valid % box_rows * vectors_v
            if one_tensor:  # a tile has a part for each warpgroup that shares its rows
                keys, reads = valid, plan.column_warps * boxes + valid % box_rows * vectors
        values = 0 if one_tensor and not columns_again else values
        for name, count in (("key_rows", keys), ("value_rows", values), ("table_reads", reads)):
            counts[name] += shared * count
