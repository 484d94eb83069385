"""Plans of the kernels that have no tile to search for: each byte is read once."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.derive import printed
from flashgen.plan.formulas import Formula, Number, Steps
from flashgen.plan.model import REGISTER_LIMIT
from flashgen.plan.problem import ITEMSIZE
from flashgen.plan.value import Plan
from flashgen.spec import AttentionSpec

# The delta kernel: one row at a time per warp. It has no tile to search for: each byte is read
# once, and rows enough are on their way with this many threads.
DELTA_WARPS = 4
DELTA_ROWS = 64
DELTA_BLOCKS = 8
DELTA_REGISTERS = 64  # the loads of several rows are on their way at once

# O and dO, LSE and dLSE in; LSE and delta out.
ROW_TRAFFIC = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4", "B")
# With the gradient of a sink: its logit in, and out a sum of each warp's rows.
ROW_TRAFFIC_OF_SINK = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4 + logit + 4*warps/block_q", "B")
DELTA_COST = Formula("cost", "row_bytes/hbm_rate", "clk")

# The kernel of tables of extremes: a block makes the table of one line, level by level.
SUMMARY_WARPS = 8
SUMMARY_BLOCKS = 4
SUMMARY_REGISTERS = 48


def delta(spec: AttentionSpec, arch: Arch) -> Plan:
    """The plan of the kernel that computes rowsum(dO * O), which is bound by memory."""
    at: dict[str, Number] = {
        "e": ITEMSIZE[spec.dtype],
        "d_v": spec.head_dim_v or spec.head_dim,
        "R": arch.registers_per_sm,
        "warps": DELTA_WARPS,
        "blocks": DELTA_BLOCKS,
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    row_traffic = ROW_TRAFFIC
    if spec.sink is not None and spec.sink.grad:
        at |= {"logit": ITEMSIZE[spec.sink.dtype], "block_q": DELTA_ROWS}
        row_traffic = ROW_TRAFFIC_OF_SINK
    steps = (REGISTER_LIMIT, row_traffic, DELTA_COST)
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}; rates of {arch.product}; clk: clocks of "
        f"an SM per row. Bound by memory: each byte is moved once."
    )
    return _plan("delta", spec, arch, at, steps, DELTA_ROWS, DELTA_REGISTERS, note)


def summary(spec: AttentionSpec, arch: Arch) -> Plan:
    """The plan of the kernel that makes a captured tensor's table of extremes."""
    at: dict[str, Number] = {
        "R": arch.registers_per_sm,
        "warps": SUMMARY_WARPS,
        "blocks": SUMMARY_BLOCKS,
    }
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}. One block per line of the tensor. Bound by "
        f"memory: each element is read once, and a level of the table from the one below."
    )
    return _plan("summary", spec, arch, at, (REGISTER_LIMIT,), 0, SUMMARY_REGISTERS, note)


def _plan(
    kernel: str,
    spec: AttentionSpec,
    arch: Arch,
    at: dict[str, Number],
    steps: tuple[Formula, ...],
    rows: int,
    registers: int,
    note: str,
) -> Plan:
    Steps(*steps)(at)
    return Plan(
        kernel=kernel,
        arch=arch.name,
        path="sm_80",
        policy="derived",
        dtype=spec.dtype,
        itemsize=ITEMSIZE[spec.dtype],
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v or spec.head_dim,
        block_q=rows,
        block_k=0,
        warps=int(at["warps"]),
        stages=1,
        access_bytes=16,
        smem_q=0,
        smem_k=0,
        smem_v=0,
        smem_bytes=0,
        registers=int(at["register_limit"]),
        registers_needed=registers,
        blocks_per_sm=int(at["blocks"]),
        cost=float(at.get("cost", 0.0)),
        sink_bytes=int(at.get("logit", 0)),
        derivation=tuple(printed(formula, at) for formula in steps),
        refused=(),
        notes=(note,),
    )
