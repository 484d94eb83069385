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
        """Clocks per score of sequences of so many queries, whose last tile has rows of none."""
        tile = self.tile.owned if self.model.owns == "block_q" else self.tile.step
        return self.cost * math.ceil(rows / tile) * tile / rows


def evaluated(problem: TileProblem, tile: Tile) -> Evaluated:
    """The tile, whether or not it fits."""
    model, at = problem.model_of(tile), problem.given.copy()
    at |= {
        model.owns: tile.owned,
        model.walks: tile.step,
        "warps": tile.warps,
        "row_groups": tile.row_groups,
        "blocks": tile.blocks,
        "column_warps": tile.column_warps,
    }
    if model.clusters != (1,):
        at["cluster"] = tile.cluster
    if tile.column_warps > 1 and model.stages_of_shares:
        at["stages"] = model.stages_of_shares
    if problem.kernel != "forward":
        at |= {
            "score_warps": tile.score_warps,
            "repeats": tile.column_warps // tile.score_warps,
            "exchanged": tile.exchanged,
            "dq_row_warps": dq_row_warps(int(at["block_q"]), tile.warps, int(at["d_qk"])),
            "syncs": SYNCS + (1 if tile.exchanged else 0),
        }
    if problem.records and model is problem.model:
        box = problem.box_of(tile.step)
        # For each tile in flight, the first rows of its boxes and words about them.
        words = tile.step // box
        words += tile.owned // MMA_ROWS if problem.gathers(tile) else 0
        if problem.kernel == "forward":
            at |= {"box_k": box, "records": WORD * RECORDS_PER_STAGE * at["stages"] * (words + 1)}
        else:
            name = "box_q" if model.walks == "block_q" else "box_k"
            at |= {name: box, "records": VECTOR * math.ceil(WORD * words / VECTOR)}
        if model.owns == "block_k":
            at |= {"key_box": problem.key_box(tile.owned), "key_stride": problem.stride(tile.owned)}
    if problem.learned:
        rows = MMA_ROWS * tile.row_groups
        at["windows"] = window_bytes(
            problem.kernel, problem.spec.dtype, problem.learned, rows, tile.step
        )
    at = model.costs(model.needs(at))
    if problem.softmax:
        at = _with_divided_exponentials(model, at)
    excesses = tuple(_excesses(problem, model, tile, at))
    return Evaluated(tile, model, at, float(at["cost"]), excesses)


def _with_divided_exponentials(model: KernelModel, at: dict[str, Number]) -> dict[str, Number]:
    """The costs of a tile with the best number of columns whose exponentials are on FMA units.

    That is 0 where nothing waits for the special-function units, or where it saves too little.
    """
    if not model.divides_exponentials or at["special"] < at["busiest"]:
        return at
    numbers = range(COLUMNS_OF_GROUP, int(at["block_k"]), COLUMNS_OF_GROUP)
    divided = min(
        (model.costs({**at, "fma_columns": n}) for n in numbers), key=lambda each: each["cost"]
    )
    compared = {"undivided": at["cost"], "divided": divided["cost"]}
    saves = compared["divided"] <= (1 - FMA_EXP2_GAIN) * compared["undivided"]
    return (divided if saves else at) | compared


def _excesses(
    problem: TileProblem, model: KernelModel, tile: Tile, at: dict[str, Number]
) -> Iterator[Excess]:
    """The limits that a tile exceeds."""
    arch = problem.arch
    if tile.step > model.max_step:
        rows = "keys" if model.walks == "block_k" else "queries"
        yield Excess(f"{rows} per step", tile.step, model.max_step, "")
    if tile.warps > max(model.warp_counts):
        yield Excess("warps", tile.warps, max(model.warp_counts), "")
    if at["smem"] > at["M"]:
        yield Excess("shared memory", at["smem"], at["M"], "B")
    elif at["smem_sm"] > at["M_sm"]:
        yield Excess("shared memory per SM", at["smem_sm"], at["M_sm"], "B")
    if at["registers"] > at["register_limit"]:
        yield Excess("registers per thread", tidy(at["registers"]), at["register_limit"], "")
    resident = tile.blocks * (tile.warps + model.other_warps)
    if problem.kernel == "forward" and "launched" in at:
        # The assembler allots one instruction of a warpgroup within the registers of the launch,
        # which the consumers take more than. P is in registers, Q in shared memory.
        output = max(columns_of_instructions(int(at["d_v"]) // tile.column_warps))
        needs = max(tile.step // 2, output // 2 + REGISTERS_OF_P) + PRODUCT_REGISTERS
        if needs > at["launched"]:
            yield Excess("registers of a product", needs, at["launched"], "")
    if resident > arch.warps_per_sm:
        yield Excess("resident warps", resident, arch.warps_per_sm, "")
    if tile.blocks > arch.blocks_per_sm:
        yield Excess("resident blocks", tile.blocks, arch.blocks_per_sm, "")
    if tile.warps < (least := warps_to_copy(problem)):
        yield Excess("warps to copy a row", least, tile.warps, "")
    yield from obstacles_to_sharing(
        problem.path, tile.owned, problem.heads_per_tile, dropout=at["dropout_ops"] > 0
    )


def warps_to_copy(problem: TileProblem) -> int:
    """Warps that are needed to copy a row in one pass, a vector by each thread."""
    if problem.path.copies_by_tma:
        return 1
    row = problem.given["e"] * max(problem.given["d_qk"], problem.given["d_v"])
    return math.ceil(row / VECTOR / WARP)


def obstacles_to_sharing(
    path: CodePath, block_q: int, heads: int, *, dropout: bool
) -> Iterator[Excess]:
    """Why a tile of ``block_q`` rows cannot be shared by this number of heads.

    The 16 rows of an mma, a row group, are those of one head or of several heads with 8, 4, 2 or 1
    queries each. With dropout they are those of one head, because a call of Philox serves 16 x 16
    elements of a head. One TMA box of Q has the rows of a warpgroup: all rows of several heads, or
    some rows of one.
    """
    if heads == 1:
        return
    places = head_places(block_q, heads)
    queries = Fraction(block_q, places)
    if queries < 1:
        yield Excess("heads per tile", places, block_q, "")
    elif queries % MMA_ROWS and (dropout or MMA_ROWS % queries):
        yield Excess("heads per row group", max(2, math.ceil(MMA_ROWS / queries)), 1, "")
    elif path.copies_by_tma and queries % path.group_rows and path.group_rows % queries:
        boxes = path.group_rows // math.gcd(path.group_rows, int(queries))
        yield Excess("boxes of Q per warpgroup", boxes, 1, "")


def shapes(problem: TileProblem) -> Iterator[Tile]:
    """Every tile that the template supports, whether it fits or not, with one block per SM."""
    widest = max(problem.given["d_qk"], problem.given["d_v"])
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
    if score_warps > 1:
        d_qk, d_v = int(problem.given["d_qk"]), int(problem.given["d_v"])
        return d_v > WIDER_THAN and d_qk % PANEL == d_v % PANEL == 0
    groups = warps * MMA_ROWS // problem.path.group_rows
    # Columns of keys are those of whole swizzle patterns; a tile of V has panels of its own.
    unit = SWIZZLED // int(problem.given["e"]) if "one_tensor" in problem.given else DEPTH_STEP
    return groups % column_warps == 0 and problem.given["d_v"] % (unit * column_warps) == 0


def occupancies(problem: TileProblem, shape: Tile) -> list[Evaluated]:
    """The tile with every number of resident blocks with which it fits.

    Where it does not fit at all, with one block: the only case of a tile that exceeds a limit.
    """
    found: list[Evaluated] = []
    for blocks in range(1, problem.arch.blocks_per_sm + 1):
        each = evaluated(problem, replace(shape, blocks=blocks))
        if each.excesses:  # more blocks leave fewer resources to each
            return found or [each]
        found.append(each)
    return found


def best_occupancy(problem: TileProblem, shape: Tile) -> Evaluated:
    """The cheapest of `occupancies`."""
    return min(occupancies(problem, shape), key=lambda each: each.rank)


@functools.lru_cache(maxsize=1024)
def cheapest(problem: TileProblem, rows: int = 0) -> Evaluated | None:
    """The feasible tile of least predicted cost; None when there is none.

    Where boxes are gathered to tiles, of least cost of the scores that a block has in them; whole
    boxes of a block of the layout, or of a part of it, are preferred.

    Args:
        rows: the query rows of each sequence, where they are few; 0 for many.
    """
    found = [best_occupancy(problem, shape) for shape in shapes(problem)]
    fitting = [each for each in found if not each.excesses]
    gathered = [each for each in fitting if problem.gathers(each.tile)]
    if not gathered:
        costs = (lambda each: (each.cost_of(rows), each.rank)) if rows else (lambda each: each.rank)
        return min(fitting, key=costs, default=None)
    whole = [each for each in gathered if has_whole_boxes(problem, each.tile)]
    return min(whole or gathered, key=lambda each: (cost_in_layout(problem, each), each.tile))


def has_whole_boxes(problem: TileProblem, tile: Tile) -> bool:
    """Whether a step walks whole blocks of the layout, or a whole part of one."""
    if not problem.gathers(tile):
        return True
    block = problem.walked_block
    return tile.step % block == 0 or block % tile.step == 0


def cost_in_layout(problem: TileProblem, found: Evaluated) -> float:
    """The cost of a tile, where it is gathered times the share of all scores that it computes."""
    if problem.layout is None or not problem.gathers(found.tile):
        return found.cost
    rows = max(1, found.tile.owned // problem.heads_per_tile)
    if found.model.owns == "block_q":
        return found.cost * share_of_scores(problem.layout, rows)
    boxes = int(found.quantities["key_box"]), int(found.quantities["key_stride"])
    return found.cost * share_of_queries(problem.layout, rows, *boxes)


def larger(found: Evaluated) -> Iterator[tuple[str, Tile]]:
    """The next larger tiles, each with a description of the change."""
    model, tile = found.model, found.tile
    owns, walks = model.owns, model.walks
    rows = "rows" if owns == "block_q" else "keys"
    longer = replace(tile, step=tile.step + tile.unit, blocks=1)
    yield f"{walks} {longer.step}", longer
    if tile.row_groups < max(model.row_groups):
        taller = replace(tile, row_groups=tile.row_groups + 1, blocks=1)
        yield f"{owns} {taller.owned} by {MMA_ROWS * taller.row_groups} {rows} per warp", taller
    more = [warps for warps in model.warp_counts if warps > tile.warps]
    wider = replace(tile, warps=more[0] if more else 2 * tile.warps, blocks=1)
    yield f"{owns} {wider.owned} by {wider.warps} warps", wider


def smallest(problem: TileProblem) -> Evaluated:
    """The tile that needs the least shared memory, among tiles with enough warps to copy a row.

    Tiles whose registers do not fit count only where no tile's registers fit.
    """

    def size(each: Evaluated) -> tuple[bool, Number, Tile]:
        at = each.quantities
        return at["registers"] > at["register_limit"], at["smem"], each.tile

    least = warps_to_copy(problem)
    return min((evaluated(problem, s) for s in shapes(problem) if s.warps >= least), key=size)
