"""The predicted duration of a launch for given sizes.

The plan's cost is in clocks of one busy SM per score element of a tile without a mask. A step that
evaluates the mask has more instructions, and one in which some warpgroups of a block compute and
the others only hand on has fewer scores, for which the warpgroups overlap less: both are counted in
steps of the first kind, by the same formulas. A work tile takes longer than its
steps: nothing overlaps the loads of the rows that its block owns, the products and the softmax of
its first step, and the stores of its results. A launch has a number of thread blocks, which the SMs
run in rounds: the last round may leave some SMs idle, and where a mask gives blocks different
numbers of steps, a long one may start late. And no kernel ends before all of its bytes have passed
through global memory once. Where its rounds are bound by global memory, whose rate all SMs share,
the last round is not shorter than one of its work tiles.

A block of a kernel without score elements moves bytes at most at the rate at which an SM, which it
may share with other blocks, is served by L2: where few blocks run, that is more than an equal share
of global memory's rate. And it moves at most the bytes of the loads that it has in flight in the
time that one load takes (Little's law), which loads in flight together take once. Loads of which
each needs the one before wait in turn.

`benchmarks/fit_duration.py` compares the durations that these formulas predict for kernels of other
libraries with their published ones, and `benchmarks/report.py --model-errors` those of flashgen's
kernels with the records of two GPUs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flashgen.kernels.planner.derivation import DerivationLine, line_of, printed_line
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.backward_sm80 import ROW_BYTES
from flashgen.kernels.planner.models.fitted_common import LAUNCH_GAP_US, OVERLAP_GAP_US
from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.kernels.planner.models.kernel_model import LEARNED_KERNELS
from flashgen.kernels.planner.parts_of_groups import times_of_parts
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.kernels.planner.schedule import ROUNDS, SLOTS
from flashgen.kernels.planner.traffic import (
    LSE_BYTES,
    SUM_BYTES,
    LaunchSizes,
    StepKind,
    Walk,
    walks_of_head,
)
from flashgen.shared.arch import WARP, facts
from flashgen.shared.launch_facts import CONVERT_KERNELS, DecodingTile
from flashgen.shared.split_choice import waits_of_merge

# One step that nothing overlaps, and the bytes of the rows that a block owns, from and to L2.
BEGUN = Formula("begun", "1 + edges/(l2_rate*cost*block_q*block_k)")
# For each further split of a block that has several, the finished O is written and read. Where
# warps that copy have loaded the next keys by then, its first step takes longer than the pace of
# steps by what others overlap; elsewhere nothing overlaps it.
REFILLED = Formula("refilled", "1")
REFILLED_AHEAD = Formula("refilled", "(alone - pace)/cost")
RESTARTED = Formula("restarted", "refilled + 2*4*d_v/(l2_rate*cost*block_k)")
HBM = Formula("hbm", "bytes/(sms*hbm_rate)", "clk")
# Where they do not fill all slots, blocks share an SM with fewer others, and each has the pace that
# it has then. Launches that write parts of split keys are counted as by `split_choice`, which
# decides on their number: at the pace of full SMs.
RESIDENT = Formula("resident", "min(blocks, ceil(work_tiles/sms))")
SLOTS_OF_RESIDENT = Formula("slots", "sms*resident")
FORMULAS = (
    Formula("quantisation", "makespan*slots/(steps + begun*work_tiles)"),
    Formula("work", "cost*(scores + begun*work_tiles*block_q*block_k)/sms", "clk"),
    HBM,
    # The rounds in which all slots share the rate of global memory, and the last one, whose work
    # tiles take at least the time of their own work, however few share it.
    Formula("full_rounds", "hbm*(rounds - 1)*slots/work_tiles", "clk"),
    Formula("time", "max(work*quantisation, hbm, full_rounds + work*quantisation/rounds)", "clk"),
)

# Kernels without score elements.
STREAMING_FORMULAS = (
    SLOTS,
    ROUNDS,
    RESIDENT,
    Formula("in_flight", f"{16 * WARP}*loads*warps", "B"),
    Formula("from_l2", "latency + bytes/work_tiles*resident/l2_rate", "clk"),
    Formula("in_turn", "latency*bytes/work_tiles/in_flight", "clk"),
    Formula("block_time", "(chained_loads - 1)*latency + max(from_l2, in_turn)", "clk"),
    Formula("quantisation", "rounds*slots/work_tiles"),
    Formula("work", "block_time*work_tiles/slots", "clk"),
    HBM,
    Formula("time", "max(work*quantisation, hbm)", "clk"),
)


class HeadSteps(NamedTuple):
    """Heads of a launch whose blocks have the same numbers of steps.

    Attributes:
        lengths: steps of each block of one head, in the order of its tiles.
        times: the number of heads.
        interleaved: the number of interleaved heads, whose longest blocks are launched first.
    """

    lengths: Sequence[float]
    times: int
    interleaved: int = 1


@dataclass(frozen=True)
class Duration:
    """The predicted duration of one launch.

    Attributes:
        plan: the plan of the kernel.
        lines: the derivation of the time, with its numbers.
        seconds: the duration, at the clock of the product that the architecture's facts name.
        bound: "work" or "hbm".
        quantisation: the factor by which idle SMs make the launch longer; 1 when all SMs end
            together.
        parts: the heads of the launch with the lengths of their blocks in steps, the start of a
            block included.
    """

    plan: Plan
    lines: tuple[DerivationLine, ...]
    seconds: float
    bound: str
    quantisation: float
    parts: tuple[HeadSteps, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        product = facts(self.plan.arch).product
        head = f"{self.plan.kernel}: {self.seconds * 1e6:,.1f} us for one {product}"
        lines = [f"predicted {head}, bound by {self.bound}; {STATED_ERROR}"]
        for line in self.lines:
            lines += printed_line(line)
        return "\n".join(lines)


def duration_of(
    plan: Plan,
    walks: Sequence[Walk],
    *,
    uneven: bool = False,
    splits: int = 1,
    rereads: int = 0,
) -> Duration:
    """The predicted duration of one launch of a kernel.

    Args:
        walks: the parts of the launch. Interleaved heads are heads of one part.
        uneven: whether the mask's bounds move with the tile (`MaskAnalysis.growth`), so that heads
            are interleaved.
        splits: the parts of a row that a merge reads.
        rereads: bytes of the walks that an earlier walk has read and that L2 holds, such as the
            same queries in each split of their keys.

    Raises:
        ValueError: visited tiles are for another number of tiles.
    """
    arch, streams = facts(plan.arch), plan.streams
    parts = parts_of(plan, walks, uneven=uneven)
    work_tiles = sum(len(part.lengths) * part.times for part in parts)
    paced = plan
    if not streams:
        at_once = {"blocks": plan.blocks_per_sm, "work_tiles": work_tiles, "sms": arch.sms}
        paced = _at_pace(plan, max(1, int(RESIDENT(at_once))))
    if paced is not plan:
        parts = parts_of(paced, walks, uneven=uneven)
    steps = sum(sum(part.lengths) * part.times for part in parts)
    scores = 0 if streams else steps * plan.block_q * plan.block_k
    quantities: dict[str, Number] = {
        **step_facts(paced),
        "sms": arch.sms,
        "blocks": plan.blocks_per_sm,
        "steps": max(1, steps),
        "work_tiles": max(1, work_tiles),
        "edges": 0 if streams else _edges(plan, walks) / max(1, work_tiles),
        "scores": scores,
        "bytes": sum(_bytes(plan, walk.sizes, splits) for walk in walks) - rereads,
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    formulas: tuple[Formula, ...] = STREAMING_FORMULAS
    launched = parts
    if streams:
        quantities |= {"latency": arch.memory_latency, "warps": plan.warps}
        quantities |= {name: plan.quantities[name] for name in ("loads", "chained_loads")}
        if plan.merges_splits:
            quantities["chained_loads"] = int(waits_of_merge(plan.arch, work_tiles, splits))
    else:
        begun = quantities["begun"] = BEGUN(quantities)
        restarts = restart_formulas(plan) if plan.joins else ()
        formulas = (RESIDENT, SLOTS_OF_RESIDENT, ROUNDS, BEGUN, *restarts, *FORMULAS)
        launched = tuple(
            part._replace(lengths=[steps + begun for steps in part.lengths]) for part in parts
        )
        quantities["makespan"] = makespan(launched, arch.sms * paced.blocks_per_sm)
    FormulaSequence(*formulas)(quantities)
    lines = tuple(line_of(formula, quantities) for formula in formulas)
    bound = (
        "work" if quantities["time"] == quantities["work"] * quantities["quantisation"] else "hbm"
    )
    seconds, quantisation = quantities["time"] / arch.clock_hz, float(quantities["quantisation"])
    return Duration(plan, lines, seconds, bound, quantisation, launched)


def _at_pace(plan: Plan, resident: int) -> Plan:
    """The plan with the costs of blocks where ``resident`` of them share an SM."""
    if resident == plan.blocks_per_sm:
        return plan
    quantities = plan.model.costs({**plan.quantities, "blocks": resident})
    return replace(
        plan,
        blocks_per_sm=resident,
        quantities=Quantities(quantities),
        cost=float(quantities["cost"]),
    )


def decoding_tile(plan: Plan, cost: float, least_cost: float) -> DecodingTile:
    """The tile of a plan as the tile of calls with split keys.

    Args:
        cost, least_cost: as in `DecodingTile`.
    """
    columns = plan.head_dim + (0 if plan.one_tensor else plan.head_dim_v)
    return DecodingTile(
        rows=plan.block_q,
        clocks=tuple(
            _at_pace(plan, resident).cost * plan.block_q * resident
            for resident in range(1, plan.blocks_per_sm + 1)
        ),
        restarted=restarted_steps(plan),
        key_bytes=plan.kv_itemsize * columns,
        cost=cost,
        least_cost=least_cost,
    )


def step_facts(plan: Plan) -> dict[str, Number]:
    """The quantities by which a step takes its time: the tile, its cost and the rate of L2."""
    paces = {name: plan.quantities[name] for name in ("alone", "pace") if name in plan.quantities}
    return {
        **paces,
        "block_q": plan.block_q,
        "block_k": plan.block_k,
        "e": plan.itemsize,
        "d_qk": plan.head_dim,
        "d_v": plan.head_dim_v,
        "l2_rate": facts(plan.arch).l2_bytes_per_clock,
        "cost": plan.cost,
    }


def restart_formulas(plan: Plan) -> tuple[Formula, Formula]:
    """The formulas of the steps that a block takes for each further split of its rows."""
    return (REFILLED_AHEAD if "pace" in plan.quantities else REFILLED), RESTARTED


def restarted_steps(plan: Plan) -> float:
    """The value of the last of `restart_formulas`: steps for each further split of a block."""
    quantities = step_facts(plan)
    FormulaSequence(*restart_formulas(plan))(quantities)
    return float(quantities["restarted"])


def gaps_between(plans: Sequence[Plan]) -> float:
    """Seconds from the ends of the launches of a call to the starts of the next ones.

    Both numbers are assumed. A launch starts some microseconds after the end of the launch before;
    where they overlap, about one microsecond after it, because its blocks only wait for the last
    writes. It is not counted that its first blocks run beside the last blocks of the launch before.
    """
    overlapping = sum(plan.overlaps for plan in plans)
    launches = sum(plan.launches for plan in plans)
    between = launches - 1 - overlapping
    return (LAUNCH_GAP_US * between + OVERLAP_GAP_US * overlapping) * 1e-6


def cost_of_parts(durations: Sequence[Duration], sizes: LaunchSizes) -> str:
    """What sums of parts of groups of query heads cost a backward call; "" without parts.

    Args:
        durations: the durations of all launches of the call.
        sizes: the sizes of the call.
    """
    fused = next((duration.plan for duration in durations if duration.plan.in_parts), None)
    if fused is None:
        return ""
    parts, heads = fused.parts_of_group(*sizes)
    rows = sizes.batch * sizes.heads_kv * parts * -(-sizes.seq_k // fused.block_k) * fused.block_k
    size = SUM_BYTES * rows * (fused.head_dim + fused.head_dim_v)
    written = size / facts(fused.arch).hbm_bytes_per_s
    reads = sum(duration.seconds for duration in durations if duration.plan.fused_plan is not None)
    waits, _ = times_of_parts(fused, sizes, facts(fused.arch).memory, packed=False)
    return (
        f"parts     {parts} of each group, of up to {heads} query heads: {size:,} B of sums of dK "
        f"and dV, which fused writes in {written * 1e6:,.1f} us at the rate of global memory, and "
        f"which convert_dk and convert_dv add in order in {reads * 1e6:,.1f} us; blocks of whole "
        f"groups would wait {waits * 1e6:,.1f} us for rows that L2 does not hold"
    )


def parts_of(plan: Plan, walks: Sequence[Walk], *, uneven: bool) -> tuple[HeadSteps, ...]:
    """The parts of a launch, with the steps of the main loops of their blocks."""
    head_steps = []
    for walk in walks:
        parts, part_heads = plan.parts_of_group(*walk.sizes)
        tiles, heads, entries = plan.grid(*walk.sizes, parts=parts)
        if plan.cluster > 1:  # the blocks of a pair of heads have equal lengths
            paired = plan.paired_heads(walk.sizes.heads_q, walk.sizes.heads_kv)
            tiles, heads = tiles // paired, heads * paired
        lengths = _lengths(plan, tiles, walk)
        bits = plan.head_bits(*walk.sizes[1:], part_heads) if uneven and not plan.streams else 0
        head_steps.append(HeadSteps(lengths, heads * entries, 1 << bits))
    return tuple(head_steps)


def clocks_of_step(plan: Plan, kind: StepKind) -> float:
    """The clocks of a step over the clocks of a step of all rows of a tile without a mask."""
    if kind in ((0, 0), (plan.block_q, 0)):
        return float(kind.rows > 0)
    quantities = plan.quantities.copy()
    quantities["score_ops"] += quantities["mask_stall"] * kind.mask_ops
    if kind.rows < plan.block_q:
        quantities["block_q"] = kind.rows
        quantities["warps"] = plan.warps * kind.rows // plan.block_q
    cost = plan.model.costs(quantities)["cost"]
    return float(cost * kind.rows / (plan.cost * plan.block_q))


def makespan(parts: Sequence[HeadSteps], slots: int) -> float:
    """Steps until all blocks are done, when each free slot runs the next block.

    Args:
        parts: the parts of the launch, one after the other.
        slots: blocks that run at the same time.
    """
    different = {length for part in parts for length in part.lengths}
    if not different:
        return 1
    if len(different) == 1:
        blocks = sum(len(part.lengths) * part.times for part in parts)
        return max(1, different.pop() * -(-blocks // slots))
    free = [0.0] * slots  # as `placed`, without the numbers of slots, tiles and heads
    for lengths, times, interleaved in parts:
        ordered = sorted(lengths, reverse=True)
        for first in range(0, times, interleaved):
            heads = range(min(interleaved, times - first))
            for length in ordered:
                for _ in heads:
                    heapq.heapreplace(free, free[0] + length)
    return max(free)


def placed(parts: Sequence[HeadSteps], slots: int) -> Iterator[tuple[int, float, float, int, int]]:
    """The blocks in the order of their starts: each free slot runs the next one.

    Yields:
        The slot, start and end in steps, the number of the tile that the block owns, and the number
        of its head among all heads of the parts.
    """
    free = [(0.0, slot) for slot in range(slots)]
    before = 0
    for lengths, times, interleaved in parts:
        ordered = sorted(range(len(lengths)), key=lambda tile: -lengths[tile])
        for first in range(0, times, interleaved):
            for tile in ordered:
                for head in range(first, min(first + interleaved, times)):
                    start, slot = free[0]
                    end = start + lengths[tile]
                    heapq.heapreplace(free, (end, slot))
                    yield slot, start, end, tile, before + head
        before += times


def _lengths(plan: Plan, tiles: int, walk: Walk) -> list[float]:
    """Steps of each block of a head; where blocks own keys, summed over the query heads of a group
    or of a part. All parts count as having the same number of heads."""
    sizes = walk.sizes
    if plan.streams:
        return [1] * tiles
    if not sizes.batch * sizes.heads_q * tiles:
        return [0] * tiles
    group = sizes.heads_q // sizes.heads_kv if plan.owns_keys else 1
    lengths: list[float] = [
        plan.steps_of(len(tiles)) for tiles in walks_of_head(plan, sizes, walk.visited)
    ]
    if walk.steps is not None:
        clocks = {kind: clocks_of_step(plan, kind) for steps in walk.steps for kind in steps}
        lengths = [sum(clocks[kind] * steps[kind] for kind in steps) for steps in walk.steps]
    if walk.restarts:
        restarted = restarted_steps(plan)
        lengths = [x + restarted * n for x, n in zip(lengths, walk.restarts, strict=True)]
    times = group * tiles // len(lengths)  # more than 1 where the heads of a group walk alike
    parts, _ = plan.parts_of_group(*sizes)
    return [times * sum(lengths[tile::tiles]) / parts for tile in range(tiles)]


def _edges(plan: Plan, walks: Sequence[Walk]) -> int:
    """Bytes of the rows that blocks own: operands before their steps, results after them.

    Rows past the end are neither read nor written: decoding has few rows in a tile.
    """
    d_qk, d_v = plan.head_dim, plan.head_dim_v
    if plan.owns_keys:
        keys = parts = 0
        for sizes, *_ in walks:
            entry_keys = sizes.batch * sizes.heads_kv * sizes.seq_k
            keys, parts = keys + entry_keys, parts + entry_keys * plan.parts_of_group(*sizes)[0]
        if plan.in_parts:  # K and V for each part, which writes float32 sums of dK and dV
            return (plan.itemsize + SUM_BYTES) * parts * (d_qk + d_v)
        return plan.itemsize * keys * 2 * (d_qk + d_v)
    queries = sum(sizes.batch * sizes.heads_q * sizes.seq_q for sizes, *_ in walks)
    if plan.kernel == "forward":
        return queries * (plan.itemsize * d_qk + plan.out_itemsize * d_v)
    if plan.kernel == "tangent":  # Q and its tangent before, O and its tangent after them
        return plan.itemsize * queries * (d_qk * (1 + ("q" in plan.moving)) + 2 * d_v)
    gradient = d_qk if plan.kernel == "dq" else 0
    return plan.itemsize * queries * (d_qk + d_v + gradient)


def _bytes(plan: Plan, sizes: LaunchSizes, splits: int) -> int:
    """Bytes of all operands and results, each counted once."""
    queries = sizes.batch * sizes.heads_q * sizes.seq_q
    if plan.kernel == "merge":
        quantities = plan.quantities
        return queries * int(splits * quantities["part_bytes"] + quantities["row_bytes"])
    keys = sizes.batch * sizes.heads_kv * sizes.seq_k
    qk, v = plan.head_dim * plan.itemsize, plan.head_dim_v * plan.itemsize
    key_bytes = qk if plan.one_tensor else qk + v
    operands = queries * qk + keys * key_bytes * plan.kv_itemsize // plan.itemsize
    if plan.kernel == "forward":
        return operands + queries * (plan.head_dim_v * plan.out_itemsize + plan.lse_bytes)
    if plan.kernel == "tangent":
        moving = {"q": queries * qk, "k": keys * qk, "v": keys * v}
        return operands + sum(moving[x] for x in plan.moving) + 2 * queries * (v + LSE_BYTES)
    parts, _ = plan.parts_of_group(*sizes)
    rows = (sizes.heads_q, sizes.seq_q)
    if plan.fused_plan is not None:
        rows = (sizes.heads_kv * parts, sizes.seq_k)
    sums = SUM_BYTES * plan.elements_of_sums(sizes.batch, *rows)
    if plan.kernel == "delta":
        return queries * (2 * v + 2 * LSE_BYTES + ROW_BYTES) * plan.has_rows + sums
    if plan.kernel == "convert_dq":
        return sums + queries * qk
    if plan.kernel in CONVERT_KERNELS:
        return sums + keys * (qk if plan.kernel == "convert_dk" else v)
    results = {"dkdv": keys * (qk + v), "dq": queries * qk} | dict.fromkeys(LEARNED_KERNELS, 0)
    fused_bytes = results["dkdv"] + sums
    if plan.in_parts:
        fused_bytes = keys * parts * SUM_BYTES * (plan.head_dim + plan.head_dim_v) + sums
    return (
        operands + queries * (v + ROW_BYTES * plan.has_rows) + results.get(plan.kernel, fused_bytes)
    )
