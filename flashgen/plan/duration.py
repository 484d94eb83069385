"""How long a launch takes by the model, for sizes that are known: a prediction, not a measurement.

The plan's cost is clocks of one busy SM per score element. A launch has a number of blocks, which
the SMs take in turns: the last turn may leave some of them idle, and where a mask gives blocks
different lengths, the last one may begin late. And no kernel is done before its bytes have come
from global memory once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.arch import facts
from flashgen.plan.derive import printed
from flashgen.plan.formulas import Formula, Number, Steps
from flashgen.plan.model_backward import OF_CAPTURED
from flashgen.plan.order import head_bits
from flashgen.plan.traffic import LSE_BYTES, Visited
from flashgen.plan.value import Line, Plan, broken

SLOTS = Formula("slots", "sms*blocks")
QUANTISATION = Formula("quantisation", "makespan*slots/steps")
WORK = Formula("work", "cost*scores/sms", "clk")
HBM = Formula("hbm", "bytes/(sms*hbm_rate)", "clk")
TIME = Formula("time", "max(work*quantisation, hbm)", "clk")
STEPS = (SLOTS, QUANTISATION, WORK, HBM, TIME)

ROW_BYTES = 8  # LSE and delta

Sizes = tuple[int, int, int, int, int]
"""batch, heads_q, heads_kv, seq_q, seq_k."""


@dataclass(frozen=True)
class Duration:
    """The model's word on one launch.

    Attributes:
        plan: of the kernel.
        lines: how the time comes about, with the numbers.
        seconds: predicted, at the clock of the product that the architecture's facts name.
        bound: "work" or "hbm".
        quantisation: by how much the blocks' turns make it longer; 1 when all SMs end together.
    """

    plan: Plan
    lines: tuple[Line, ...]
    seconds: float
    bound: str
    quantisation: float

    def __str__(self) -> str:
        product = facts(self.plan.arch).product
        head = f"{self.plan.kernel}: {self.seconds * 1e6:,.1f} us predicted for one {product}"
        lines = [f"predicted {head}, bound by {self.bound}"]
        for line in self.lines:
            lines += broken(line)
        return "\n".join(lines)


def duration(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    visited: Visited | None = None,
    *,
    uneven: bool = False,
) -> Duration:
    """The time of one launch of a kernel with these sizes.

    Args:
        visited: for each tile that a block owns, those that it walks, as in `Plan.traffic`, the
            same for every batch entry and head; None for all of them.
        uneven: the mask's bounds move with the tile (`MaskAnalysis.growth`), so heads take turns.

    Raises:
        ValueError: visited is for another number of tiles.
    """
    return duration_of(plan, [((batch, heads_q, heads_kv, seq_q, seq_k), visited)], uneven=uneven)


def duration_of(
    plan: Plan, walks: Sequence[tuple[Sizes, Visited | None]], *, uneven: bool = False
) -> Duration:
    """The same of a launch whose heads are not alike.

    Args:
        walks: the parts of the launch, each with its own sizes and visited tiles. Where heads take
            turns, those of one part do.
    """
    arch = facts(plan.arch)
    parts, rows = [], 0
    for (batch, heads_q, heads_kv, seq_q, seq_k), visited in walks:
        tiles, heads, entries = plan.grid(batch, heads_q, heads_kv, seq_q, seq_k)
        lengths = _lengths(plan, tiles, heads_q // heads_kv, seq_q, seq_k, visited)
        bits = head_bits(plan, heads_q, heads_kv, seq_q, seq_k) if uneven else 0
        parts.append(Heads(lengths, heads * entries, 1 << bits))
        rows += batch * heads_q * seq_q
    steps = sum(sum(part.lengths) * part.times for part in parts)
    at: dict[str, Number] = {
        "sms": arch.sms,
        "blocks": plan.blocks_per_sm,
        "steps": max(1, steps),
        "makespan": makespan(parts, arch.sms * plan.blocks_per_sm),
        "cost": plan.cost,
        "scores": _scores(plan, steps, rows),
        "bytes": sum(_bytes(plan, *sizes) for sizes, _ in walks),
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    values = Steps(*STEPS)(dict(at))
    lines = tuple(printed(formula, values) for formula in STEPS)
    bound = "hbm" if values["hbm"] >= values["work"] else "work"
    return Duration(
        plan, lines, values["time"] / arch.clock_hz, bound, float(values["quantisation"])
    )


class Heads(NamedTuple):
    """Heads of a launch that are alike: the steps of each block of one, in the order of tiles."""

    lengths: Sequence[int]
    times: int
    together: int = 1  # so many take turns, longer blocks first


def makespan(parts: Sequence[Heads], slots: int) -> int:
    """Steps until all blocks are done, when each free slot takes the next one.

    Args:
        parts: of the launch, one behind the other.
        slots: blocks that run at the same time.
    """
    different = {length for part in parts for length in part.lengths}
    if not different:
        return 1
    if len(different) == 1:
        blocks = sum(len(part.lengths) * part.times for part in parts)
        return max(1, different.pop() * -(-blocks // slots))
    ends = [0] * slots
    for lengths, times, together in parts:
        ordered = sorted(lengths, reverse=True)
        for first in range(0, times, together):
            for length in ordered:
                for _ in range(min(together, times - first)):
                    heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def _lengths(
    plan: Plan, tiles: int, group: int, seq_q: int, seq_k: int, visited: Visited | None
) -> list[int]:
    """Steps of each block of a head; where blocks own keys, over the query heads of a group."""
    if plan.kernel in ("delta", "summary"):
        return [1] * tiles
    times = group if plan.owns_keys else 1
    if visited is None:
        walked = -(-seq_q // plan.block_q) if plan.owns_keys else -(-seq_k // plan.block_k)
        return [walked * times] * tiles
    found = [len(list(each)) for each in visited]
    if len(found) == tiles * times:  # those of each head of the group
        return [sum(found[tile::tiles]) for tile in range(tiles)]
    if len(found) != tiles:
        raise ValueError(f"visited has {len(found)} tiles, the launch has {tiles}")
    return [length * times for length in found]


def _scores(plan: Plan, steps: int, rows: int) -> int:
    return rows if plan.kernel == "delta" else steps * plan.block_q * plan.block_k


def _bytes(plan: Plan, batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_k: int) -> int:
    """Every byte of the operands and results once."""
    queries, keys = batch * heads_q * seq_q, batch * heads_kv * seq_k
    qk, v = plan.head_dim * plan.itemsize, plan.head_dim_v * plan.itemsize
    operands = queries * qk + keys * (qk + v)
    if plan.kernel == "forward":
        return operands + queries * (v + LSE_BYTES)
    if plan.kernel == "delta":
        return queries * (2 * v + 2 * LSE_BYTES + ROW_BYTES)
    results = {"dkdv": keys * (qk + v), "dq": queries * qk} | dict.fromkeys(OF_CAPTURED, 0)
    both = results["dkdv"] + queries * plan.head_dim * 4  # dQ's sums are float32
    return operands + queries * (v + ROW_BYTES) + results.get(plan.kernel, both)
