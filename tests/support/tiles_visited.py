"""The tiles that a kernel computed in the emulator, and the tiles that it must compute."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from flashgen import reference
from flashgen.calls.ops import Report
from flashgen.shared.signature import LAYOUT
from flashgen.spec.analysis.score import analyse_score
from flashgen.spec.language.block_layout import TENSORS
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import BATCH, HEADS, SCORE, SEQ_K, SEQ_Q, B, H, K, Q
from tests.support.sparse_layouts import touched

_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
# Products of a tile of scores with Q or K, and with V or dO.
_PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkdv": (2, 2), "fused": (3, 2)}


def visited(report: Report, spec: AttentionSpec | None = None) -> float:
    """Tiles that a 16-bit kernel computed: its multiplications divided by those of one tile.

    On Hopper's path the head dims must be multiples of 16, for "fused" of 64: others are padded.

    Args:
        spec: that of the kernel; None for a softmax.
    """
    assert report.counters is not None
    assert report.kernel is not None
    plan = report.kernel.plan
    done = 0.0
    for name, count in report.counters.opcodes.items():
        shape = _SHAPE.search(name)
        if shape is not None and name.startswith(("mma.", "wgmma.mma_async.")):
            warps = 4 if name.startswith("wgmma.") else 1  # that count, and multiply together
            done += count * math.prod(map(int, shape.groups())) / warps
    with_q, with_v = _PRODUCTS[plan.kernel]
    depth = with_q * plan.head_dim + with_v * plan.head_dim_v
    if spec is not None and not spec.is_softmax:
        if plan.kernel == "dq" and SCORE not in analyse_score(spec.score).derivative.free_symbols:
            depth -= plan.head_dim  # the slope of the weight needs no scores
        if plan.kernel == "forward" and spec.rounds_sums:
            depth += 8  # the product of the rounded weights with a column of ones
    return done / (plan.block_q * plan.block_k * depth)


def present(report: Report, keep: torch.Tensor) -> int:
    """Tiles with an element that is kept; bool [..., seq_q, seq_k].

    Heads that share a tile count as one: ``keep`` has one of them.
    """
    assert report.kernel is not None
    plan = report.kernel.plan
    return int(touched(keep, plan.queries_per_tile, plan.block_k).sum())


def kept(
    spec: AttentionSpec, batch: int, heads: int, seq_q: int, seq_k: int, values: dict[str, Any]
) -> torch.Tensor:
    """The mask of every element, bool [batch, heads, seq_q, seq_k]."""
    sizes = {BATCH: batch, HEADS: heads, SEQ_Q: seq_q, SEQ_K: seq_k}
    known = {symbol: torch.tensor(size) for symbol, size in sizes.items()}
    known |= {s.expr: torch.tensor(values["scalars"][s.name]) for s in spec.scalars}
    tensors = values["tensors"] | _layout(spec, seq_q, seq_k)
    known |= {t.symbol: tensors[t.name] for t in (*spec.tensors, *TENSORS) if t.name in tensors}
    axes = ((B, batch), (H, heads), (Q, seq_q), (K, seq_k))
    for place, (symbol, size) in enumerate(axes):
        known[symbol] = torch.arange(size).view([-1 if i == place else 1 for i in range(4)])
    return reference.evaluate(spec.keep, known).expand(batch, heads, seq_q, seq_k)


def _layout(spec: AttentionSpec, seq_q: int, seq_k: int) -> dict[str, torch.Tensor]:
    """The live blocks of a layout that is a function of two coordinates; empty for others."""
    sparse = spec.block_sparse
    if sparse is None or not sparse.is_static:
        return {}
    blocks = sparse.blocks(seq_q, seq_k)
    live = torch.tensor(list(sparse.table(1, 1, *blocks)), dtype=torch.bool)
    return {LAYOUT: live.view(1, 1, *blocks)}
