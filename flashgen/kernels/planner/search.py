"""The search: the tiles of a kernel, each evaluated once, and the one of least predicted cost.

A tile is chosen for all calls of a spec by what a score element costs in a tile that is computed.
The formulas count the instructions of the score function and of dropout. They see nothing of the
mask: neither the scores of partial tiles that it discards, nor the instructions that evaluate it,
nor how many tiles it leaves. A mask has an effect on the registers alone, where it is evaluated for
each tile, so that a causal kernel has the tile of a kernel without a mask: half of each tile on the
diagonal is computed for nothing. `kernels.planner.duration` counts the tiles that a mask leaves,
for one shape, and `flashgen tune` chooses by that. A tile for masks of one kind would have its
address in `cheapest`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from flashgen.kernels.planner.derivation import Excess
from flashgen.kernels.planner.formulas import tidy
from flashgen.kernels.planner.layout_share import share_of_queries, share_of_scores
from flashgen.kernels.planner.models.backward_sm80 import SYNCS, dq_row_warps
from flashgen.kernels.planner.models.fitted_sm90 import (
    CLUSTER_GAIN,
    FMA_EXP2_GAIN,
    PRODUCT_REGISTERS,
    REGISTERS_OF_P,
)
from flashgen.kernels.planner.models.forward_sm80 import PANEL, WIDER_THAN
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS, STEP, VECTOR, KernelModel
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, columns_of_instructions
from flashgen.kernels.planner.models.spec_terms import window_bytes
from flashgen.kernels.planner.quantities import Number
from flashgen.kernels.planner.tile_problem import Tile, TileProblem
from flashgen.shared.arch import WARP
from flashgen.shared.launch_facts import head_places
from flashgen.shared.paths import CodePath

WORD = 4  # bytes
SWIZZLED = 128  # bytes of a row after which the order of its vectors in shared memory repeats
RECORDS_PER_STAGE = 2  # a tile's is read while the next one's products are computed
COLUMNS_OF_GROUP = 8  # an mma has 8 columns of scores


@dataclass(frozen=True)
class Evaluated:
    """A tile of a problem, with all that the model says of it.

    Attributes:
        tile: the tile.
        model: the cost model of the form of the kernel that the tile is for.
        quantities: what the tile needs and what it costs.
        cost: predicted clocks of one SM per score element.
        excesses: the limits that it exceeds, the most informative first; () where it fits.
    """

    tile: Tile
    model: KernelModel
    quantities: Mapping[str, Number]
    cost: float
    excesses: tuple[Excess, ...]

    @property
    def rank(self) -> tuple[float, float, Tile]:
        """The order of the search: by cost, among equals by instructions, and then by size.

        A cluster must save enough.
        """
        cost = self.cost / (1 - CLUSTER_GAIN) if self.tile.cluster > 1 else self.cost
        return cost, float(self.quantities["issue"]), self.tile

    def cost_of(self, rows: int) -> float:
        """Clocks per score of sequences of so many queries, whose last tile may be partly empty."""
        tile = self.tile.owned if self.model.owns == "block_q" else self.tile.step
        return self.cost * math.ceil(rows / tile) * tile / rows


def evaluated(problem: TileProblem, tile: Tile) -> Evaluated:
    """The tile, whether or not it fits."""
    model, quantities = problem.model_of(tile), problem.quantities.copy()
    quantities |= {
        model.owns: tile.owned,
        model.walks: tile.step,
        "warps": tile.warps,
        "row_groups": tile.row_groups,
        "blocks": tile.blocks,
        "column_warps": tile.column_warps,
    }
    if model.clusters != (1,):
        quantities["cluster"] = tile.cluster
    if tile.column_warps > 1 and model.stages_of_shares:
        quantities["stages"] = model.stages_of_shares
    if problem.kernel != "forward":
        quantities |= {
            "score_warps": tile.score_warps,
            "repeats": tile.column_warps // tile.score_warps,
            "exchanged": tile.exchanged,
            "dq_row_warps": dq_row_warps(
                int(quantities["block_q"]), tile.warps, int(quantities["d_qk"])
            ),
            "syncs": SYNCS + (1 if tile.exchanged else 0),
        }
    if problem.records and model is problem.model:
        box = problem.box_of(tile.step)
        # For each tile in flight, the first rows of its boxes and words about them.
        words = tile.step // box
        words += tile.owned // MMA_ROWS if problem.gathers(tile) else 0
        if problem.kernel == "forward":
            quantities |= {
                "box_k": box,
                "records": WORD * RECORDS_PER_STAGE * quantities["stages"] * (words + 1),
            }
        else:
            name = "box_q" if model.walks == "block_q" else "box_k"
            quantities |= {name: box, "records": VECTOR * math.ceil(WORD * words / VECTOR)}
        if model.owns == "block_k":
            quantities |= {
                "key_box": problem.key_box(tile.owned),
                "key_stride": problem.stride(tile.owned),
            }
    if problem.learned:
        rows = MMA_ROWS * tile.row_groups
        quantities["windows"] = window_bytes(
            problem.kernel, problem.spec.dtype, problem.learned, rows, tile.step
        )
    quantities = model.costs(model.needs(quantities))
    if problem.softmax:
        quantities = _with_divided_exponentials(model, quantities)
    excesses = tuple(_excesses(problem, model, tile, quantities))
    return Evaluated(tile, model, quantities, float(quantities["cost"]), excesses)


def _with_divided_exponentials(
    model: KernelModel, quantities: dict[str, Number]
) -> dict[str, Number]:
    """The costs of a tile with the best number of columns whose exponentials are on FMA units.

    That is 0 where nothing waits for the special-function units, or where it saves too little.
    """
    if not model.divides_exponentials or quantities["special"] < quantities["busiest"]:
        return quantities
    numbers = range(COLUMNS_OF_GROUP, int(quantities["block_k"]), COLUMNS_OF_GROUP)
    divided = min(
        (model.costs({**quantities, "fma_columns": n}) for n in numbers),
        key=lambda costs: costs["cost"],
    )
    compared = {"undivided": quantities["cost"], "divided": divided["cost"]}
    saves = compared["divided"] <= (1 - FMA_EXP2_GAIN) * compared["undivided"]
    return (divided if saves else quantities) | compared


def _excesses(
    problem: TileProblem, model: KernelModel, tile: Tile, quantities: dict[str, Number]
) -> Iterator[Excess]:
    """The limits that a tile exceeds."""
    arch = problem.arch
    if tile.step > model.max_step:
        rows = "keys" if model.walks == "block_k" else "queries"
        yield Excess(f"{rows} per step", tile.step, model.max_step, "")
    if tile.warps > max(model.warp_counts):
        yield Excess("warps", tile.warps, max(model.warp_counts), "")
    if quantities["smem"] > quantities["M"]:
        yield Excess("shared memory", quantities["smem"], quantities["M"], "B")
    elif quantities["smem_sm"] > quantities["M_sm"]:
        yield Excess("shared memory per SM", quantities["smem_sm"], quantities["M_sm"], "B")
    if quantities["registers"] > quantities["register_limit"]:
        yield Excess(
            "registers per thread", tidy(quantities["registers"]), quantities["register_limit"], ""
        )
    resident = tile.blocks * (tile.warps + model.other_warps)
    if problem.kernel == "forward" and "launched" in quantities:
        # The assembler allots one instruction of a warpgroup within the registers of the launch,
        # which the consumers take more than. P is in registers, Q in shared memory.
        output = max(columns_of_instructions(int(quantities["d_v"]) // tile.column_warps))
        needs = max(tile.step // 2, output // 2 + REGISTERS_OF_P) + PRODUCT_REGISTERS
        if needs > quantities["launched"]:
            yield Excess("registers of a product", needs, quantities["launched"], "")
    if resident > arch.warps_per_sm:
        yield Excess("resident warps", resident, arch.warps_per_sm, "")
    if tile.blocks > arch.blocks_per_sm:
        yield Excess("resident blocks", tile.blocks, arch.blocks_per_sm, "")
    if tile.warps < (least := warps_to_copy(problem)):
        yield Excess("warps to copy a row", least, tile.warps, "")
    yield from obstacles_to_sharing(
        problem.path, tile.owned, problem.heads_per_tile, dropout=quantities["dropout_ops"] > 0
    )


def warps_to_copy(problem: TileProblem) -> int:
    """Warps that are needed to copy a row in one pass, a vector by each thread."""
    if problem.path.copies_by_tma:
        return 1
    row = problem.quantities["e"] * max(problem.quantities["d_qk"], problem.quantities["d_v"])
    return math.ceil(row / VECTOR / WARP)


def obstacles_to_sharing(
    path: CodePath, block_q: int, heads: int, *, dropout: bool
) -> Iterator[Excess]:
    """Why a tile of ``block_q`` rows cannot be shared by this number of heads.

    The 16 rows of an mma, a row group, belong to one head, or to several heads with 8, 4, 2 or 1
    queries each. With dropout they belong to one head, because a call of Philox serves 16 x 16
    elements of a head. One TMA box of Q has the rows of a warpgroup: all rows of several heads, or
    some rows of one.
    """
    if heads == 1:
        return
    slots = head_places(block_q, heads)
    queries = Fraction(block_q, slots)
    if queries < 1:
        yield Excess("heads per tile", slots, block_q, "")
    elif queries % MMA_ROWS and (dropout or MMA_ROWS % queries):
        yield Excess("heads per row group", max(2, math.ceil(MMA_ROWS / queries)), 1, "")
    elif path.copies_by_tma and queries % path.group_rows and path.group_rows % queries:
        boxes = path.group_rows // math.gcd(path.group_rows, int(queries))
        yield Excess("boxes of Q per warpgroup", boxes, 1, "")


def shapes(problem: TileProblem) -> Iterator[Tile]:
    """Every tile that the template supports, whether it fits or not, with one block per SM."""
    widest = max(problem.quantities["d_qk"], problem.quantities["d_v"])
    for model in (problem.model, *problem.model.other_forms):
        if widest <= model.beyond:
            continue
        few = 0 if problem.layout is None else model.warps_of_few_rows
        counts = [*filter(None, (few, *model.warp_counts))]
        for sharing, warps, row_groups in product(model.sharing, counts, model.row_groups):
            if warps % sharing[0] or not _divides_output(problem, warps, *sharing):
                continue
            unit = Tile(STEP, warps, row_groups, 1, *sharing).unit
            steps = range(unit, model.max_step + 1, unit)
            for step, cluster in product(steps, problem.clusters(model, sharing[0])):
                yield Tile(step, warps, row_groups, 1, *sharing, cluster)


def _divides_output(problem: TileProblem, warps: int, column_warps: int, score_warps: int) -> bool:
    """Whether so many warps, or warpgroups, can have equal shares of the columns of O."""
    if problem.kernel != "forward" or column_warps == 1:
        return True
    quantities = problem.quantities
    d_qk, d_v = int(quantities["d_qk"]), int(quantities["d_v"])
    if score_warps > 1:
        return d_v > WIDER_THAN and d_qk % PANEL == d_v % PANEL == 0
    groups = warps * MMA_ROWS // problem.path.group_rows
    # Columns of keys come in whole swizzle patterns; a tile of V has panels of its own.
    unit = SWIZZLED // int(quantities["e"]) if "one_tensor" in quantities else DEPTH_STEP
    return groups % column_warps == 0 and d_v % (unit * column_warps) == 0


def occupancies(problem: TileProblem, shape: Tile) -> list[Evaluated]:
    """The tile with every number of resident blocks with which it fits.

    A tile that does not fit at all is returned with one block, and exceeds a limit.
    """
    fitting: list[Evaluated] = []
    for blocks in range(1, problem.arch.blocks_per_sm + 1):
        candidate = evaluated(problem, replace(shape, blocks=blocks))
        if candidate.excesses:  # more blocks leave fewer resources to each
            return fitting or [candidate]
        fitting.append(candidate)
    return fitting


def best_occupancy(problem: TileProblem, shape: Tile) -> Evaluated:
    """The cheapest of `occupancies`."""
    return min(occupancies(problem, shape), key=lambda candidate: candidate.rank)


@functools.lru_cache(maxsize=1024)
def cheapest(problem: TileProblem, rows: int = 0) -> Evaluated | None:
    """The feasible tile of least predicted cost; None when there is none.

    Where boxes are gathered to tiles, the cost counts all scores in the boxes, and tiles whose
    steps are whole blocks of the layout, or whole parts of one, are preferred.

    Args:
        rows: the query rows of each sequence, where they are few; 0 for many.
    """
    candidates = [best_occupancy(problem, shape) for shape in shapes(problem)]
    fitting = [candidate for candidate in candidates if not candidate.excesses]
    gathered = [candidate for candidate in fitting if problem.gathers(candidate.tile)]
    if not gathered:
        costs = (lambda x: (x.cost_of(rows), x.rank)) if rows else (lambda x: x.rank)
        return min(fitting, key=costs, default=None)
    whole = [candidate for candidate in gathered if has_whole_boxes(problem, candidate.tile)]
    return min(whole or gathered, key=lambda x: (cost_in_layout(problem, x), x.tile))


def has_whole_boxes(problem: TileProblem, tile: Tile) -> bool:
    """Whether a step walks whole blocks of the layout, or a whole part of one."""
    if not problem.gathers(tile):
        return True
    block = problem.walked_block
    return tile.step % block == 0 or block % tile.step == 0


def cost_in_layout(problem: TileProblem, candidate: Evaluated) -> float:
    """The cost of a tile, where it is gathered times the share of all scores that it computes."""
    if problem.layout is None or not problem.gathers(candidate.tile):
        return candidate.cost
    rows = max(1, candidate.tile.owned // problem.heads_per_tile)
    if candidate.model.owns == "block_q":
        return candidate.cost * share_of_scores(problem.layout, rows)
    boxes = int(candidate.quantities["key_box"]), int(candidate.quantities["key_stride"])
    return candidate.cost * share_of_queries(problem.layout, rows, *boxes)


def larger(chosen: Evaluated) -> Iterator[tuple[str, Tile]]:
    """The next larger tiles, each with a description of the change."""
    model, tile = chosen.model, chosen.tile
    owns, walks = model.owns, model.walks
    rows = "rows" if owns == "block_q" else "keys"
    longer = replace(tile, step=tile.step + tile.unit, blocks=1)
    yield f"{walks} {longer.step}", longer
    if tile.row_groups < max(model.row_groups):
        taller = replace(tile, row_groups=tile.row_groups + 1, blocks=1)
        yield f"{owns} {taller.owned} by {MMA_ROWS * taller.row_groups} {rows} per warp", taller
    larger_counts = [warps for warps in model.warp_counts if warps > tile.warps]
    wider = replace(tile, warps=larger_counts[0] if larger_counts else 2 * tile.warps, blocks=1)
    yield f"{owns} {wider.owned} by {wider.warps} warps", wider


def smallest(problem: TileProblem) -> Evaluated:
    """The tile that needs the least shared memory, among tiles with enough warps to copy a row.

    Tiles whose registers do not fit count only where no tile's registers fit.
    """

    def size(candidate: Evaluated) -> tuple[bool, Number, Tile]:
        needs = candidate.quantities
        return needs["registers"] > needs["register_limit"], needs["smem"], candidate.tile

    least = warps_to_copy(problem)
    return min((evaluated(problem, s) for s in shapes(problem) if s.warps >= least), key=size)
