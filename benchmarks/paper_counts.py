"""Traffic and work of standard attention, from formulas, and of flashgen's kernels, from the
execution of one head.

Sources: Dao et al., "FlashAttention", 2022: Algorithm 0 and Algorithm 3 (appendix B) for standard
attention, forward and backward, whose every read and write of HBM is counted as they are written;
figure 2 for the shapes and the measured numbers that `paper.py` sets beside the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import flashgen as fg
from flashgen import emulator
from flashgen.arch import facts
from flashgen.emulator import Counters
from flashgen.emulator.counters.l2 import simulate
from flashgen.emulator.counters.recorder import AccessTrace
from flashgen.ops import run_backward, run_forward
from flashgen.pipeline import Build
from flashgen.planner import plan, plan_backward
from flashgen.planner.duration import duration_of
from flashgen.planner.traffic import LaunchSizes

ARCH = "sm_80"


@dataclass(frozen=True)
class Counts:
    """Counts of one pass over one head, or the sums of several passes.

    Attributes:
        multiply_adds: multiply-adds of the matrix products.
        issued: bytes that instructions load from and store to global memory.
        distinct: bytes of global memory that a launch accesses, each counted once per launch.
        hbm: bytes to and from HBM by the model of L2.
    """

    multiply_adds: int
    issued: int
    distinct: int
    hbm: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.multiply_adds + other.multiply_adds,
            self.issued + other.issued,
            self.distinct + other.distinct,
            self.hbm + other.hbm,
        )

    def times(self, heads: int) -> Counts:
        return Counts(*(heads * each for each in vars(self).values()))


# ---- standard attention ------------------------------------------------------------------------


def standard_forward(n: int, d: int, itemsize: int = 2) -> Counts:
    """Algorithm 0: S = Q K^T is written, P = softmax(S) read and written, O = P V."""
    elements = (2 * n * d + n * n) + 2 * n * n + (n * n + n * d + n * d)
    moved = elements * itemsize
    return Counts(2 * n * n * d, moved, moved, moved)


def standard_backward(n: int, d: int, itemsize: int = 2) -> Counts:
    """Algorithm 3: dV, dP, dS, dQ, dK one after another, P, dP and dS in HBM."""
    dv = (n * n + n * d) + n * d  # P, dO read; dV written
    dp = 2 * n * d + n * n  # dO, V read; dP written
    ds = 2 * n * n + n * n  # P, dP read; dS written
    dq = (n * n + n * d) + n * d  # dS, K read; dQ written
    dk = (n * n + n * d) + n * d  # dS, Q read; dK written
    moved = (dv + dp + ds + dq + dk) * itemsize
    return Counts(4 * n * n * d, moved, moved, moved)


def standard_memory(n: int, itemsize: int = 2) -> int:
    """Bytes of a head besides operands and results: P, kept for the backward pass, dP and dS."""
    return 3 * n * n * itemsize


def flash_memory(n: int, d: int) -> int:
    """These bytes for flashgen: LSE, then (LSE, delta) of each row and the float32 sums of dQ."""
    return 4 * n + 8 * n + 4 * n * d


# ---- flashgen's kernels, executed --------------------------------------------------------------


def executed(
    spec: fg.AttentionSpec, n: int, heads: int, *, deterministic: bool = False
) -> tuple[Counts, Counts]:
    """Forward and backward of one head of n x n, in the emulator.

    The bytes of HBM are those of one head of a launch with many heads: see `hbm_of_a_head`.

    Args:
        deterministic: the backward pass by the scheme "split".
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, n, spec.head_dim)
    dtype = getattr(torch, spec.dtype)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    how = {"backend": "emulator", "arch": ARCH, "check_memory": False}
    with emulator.profiling() as launches:
        ahead = run_forward(spec, q, k, v, **how)
    assert ahead.report.kernel is not None, "there are queries and keys"
    forward = _counts(ahead.report.kernel, launches[0], heads)
    how["deterministic"] = deterministic
    with emulator.profiling() as launches:
        back = run_backward(spec, q, k, v, ahead.out, ahead.lse, dout, **how)
    backward = Counts(0, 0, 0, 0)
    for report, counters in zip(back.reports, launches, strict=True):
        assert report.kernel is not None
        backward += _counts(report.kernel, counters, heads)
    return forward, backward


def predicted_seconds(
    spec: fg.AttentionSpec, batch: int, heads: int, n: int, *, deterministic: bool
) -> float:
    """Forward and backward by the plan's model: work against HBM, kernel by kernel."""
    backward = plan_backward(spec, ARCH, deterministic=deterministic)
    launch = [(LaunchSizes(batch, heads, heads, n, n), None)]
    kernels = (plan(spec, ARCH), *backward.kernels)
    return sum(duration_of(each, launch).seconds for each in kernels)


def _counts(build: Build, counters: Counters, heads: int) -> Counts:
    recorded = counters.recorded
    assert recorded is not None, "the launch was profiled"
    totals = counters.total()
    distinct = sum(buffer.read + buffer.written for buffer in recorded.buffers)
    hbm = hbm_of_a_head(recorded.trace, build.plan.blocks_per_sm, heads)
    # An addition to memory reads and writes it.
    issued = counters.global_read_bytes + counters.global_write_bytes
    return Counts(totals.tensor_multiply_adds, issued, distinct, hbm)


def hbm_of_a_head(trace: AccessTrace, blocks_per_sm: int, heads: int) -> int:
    """HBM bytes of one head of a launch with many heads, from the trace of one executed head.

    The model of L2 runs launches with enough heads to fill the SMs two and three times, in which
    the trace of the one head is repeated at other addresses. The difference between the two
    launches is the traffic of every further set of heads.

    Raises:
        ValueError: the difference is not a multiple of the number of heads in the set.
    """
    arch = facts(ARCH)
    blocks = len(trace.starts) - 1
    resident = arch.sms * blocks_per_sm
    lot = min(-(-resident // blocks), heads)
    moved = [
        simulate(repeated(trace, lots * lot), arch.l2_bytes, min(resident, lots * lot * blocks)).hbm
        for lots in (2, 3)
    ]
    each, rest = divmod(moved[1] - moved[0], lot)
    if rest:
        raise ValueError(f"{moved[1] - moved[0]:,} B more for {lot} heads more: not alike")
    return each


def repeated(trace: AccessTrace, heads: int) -> AccessTrace:
    """The trace of a launch of many heads, each at addresses of its own."""
    span = int(trace.line.max()) + 1
    entries = len(trace.line)
    head = np.repeat(np.arange(heads, dtype=np.int64), entries)
    starts = (trace.starts[:-1] + entries * np.arange(heads)[:, None]).ravel()
    return AccessTrace(
        np.append(starts, entries * heads),
        np.tile(trace.line, heads) + head * span,
        np.tile(trace.sectors, heads),
        np.tile(trace.kind, heads),
    )
