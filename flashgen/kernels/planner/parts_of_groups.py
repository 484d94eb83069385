"""Whether blocks that own keys walk whole groups of query heads, or parts of them: two times.

Under a causal mask a block has `block_k` fewer query rows in each head than the block of the keys
before its own, so that in head h of its walk it is h * block_k rows ahead. In the meantime each
running block accesses as many rows, all of which must stay in L2: otherwise the block behind reads
its rows from global memory. In few heads blocks are close enough to each other.

These reads do not come evenly: blocks begin side by side and drift apart. At a time, their share of
all accesses is taken to be anything from none to twice its mean. While they take longer than the
computation beside them, blocks wait. Nothing here is fitted to a measured time; docs/planner.md has
the predicted times beside the measured ones.
"""

from __future__ import annotations

from typing import NamedTuple

from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.fitted_common import OVERLAP_GAP_US
from flashgen.kernels.planner.traffic import SUM_BYTES
from flashgen.shared.arch import GpuMemory, facts
from flashgen.shared.launch_facts import Sizes, mean_length


class TimesOfParts(NamedTuple):
    """The times that decide between whole groups and parts, in seconds.

    Attributes:
        waits: blocks of whole groups wait so long for rows that are no longer in L2.
        sums: the time to write the float32 sums of dK and dV of the parts, to read them again, and
            to launch the kernels that do so.
    """

    waits: float
    sums: float


def times_of_parts(plan: Plan, sizes: Sizes, memory: GpuMemory, *, packed: bool) -> TimesOfParts:
    """The two times of a call under a mask that leaves half of the scores, as a causal one does.

    Args:
        plan: the plan of the kernel that computes dK and dV; its number of heads of a part is used.
        sizes: the sizes of the call. Packed sequences count as equally long.
    """
    batch, heads_q, heads_kv, seq_q, seq_k = sizes
    if packed:
        seq_q, seq_k = mean_length(seq_q, batch), mean_length(seq_k, batch)
    group, gpu, columns = heads_q // heads_kv, facts(plan.arch), plan.head_dim + plan.head_dim_v
    tiles = batch * heads_kv * -(-seq_k // plan.block_k)
    running = max(1, min(tiles, gpu.sms * plan.blocks_per_sm))
    kept_heads = memory.l2_bytes / (running * plan.block_k * plan.row_bytes)
    missing = max(0.0, 1 - (kept_heads + 1) / group)
    if batch * heads_q * seq_q * plan.row_bytes <= memory.l2_bytes:
        missing = 0.0
    scores = batch * heads_q * seq_q * seq_k / 2
    work = plan.cost * scores / gpu.sms / gpu.clock_hz
    # Sums of dQ are written back, too.
    row_bytes = plan.row_bytes + SUM_BYTES * plan.head_dim
    reads = missing * scores / plan.block_k * row_bytes / memory.bytes_per_s
    waits = 0.0
    if reads > work / 2:
        # The mean of max(0, x - 1) for x from 0 to 2 * reads / work, times the work; but no more
        # than if all accesses were reads of global memory.
        waits = max(0.0, min((reads - work / 2) ** 2 / reads, reads / missing - work))
    parts = -(-group // plan.part_heads(*sizes))
    sum_bytes = 2 * SUM_BYTES * parts * tiles * plan.block_k * columns
    return TimesOfParts(waits, sum_bytes / memory.bytes_per_s + 2 * OVERLAP_GAP_US * 1e-6)


def parts_pay(plan: Plan, sizes: Sizes, memory: GpuMemory, *, packed: bool) -> bool:
    """Whether a call takes less time in parts of its groups than with whole groups."""
    times = times_of_parts(plan, sizes, memory, packed=packed)
    return times.sums < times.waits
