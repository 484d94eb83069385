"""cuDNN's flex_attention: a mask is a tensor of key intervals for each query.

The intervals come from flashgen's analysis, which has them as expressions of the query's position
where the keys that a row keeps are one interval.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor, passes_of
from benchmarks.suite.contenders.libraries import CUDNN_FLEX, cudnn_text
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.device import Device
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.intervals import Interval, row_interval
from flashgen.spec.analysis.tile_walk import numbers_of
from flashgen.spec.language.symbols import Q

# As FlashAttention-4, from whose compiler it has its own.
os.environ.setdefault("FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


class CudnnFlex:
    name = "cuDNN flex_attention"
    ours = False

    def library(self, device: Device) -> str:
        return f"{cudnn_text()}; {CUDNN_FLEX.on(device)}"

    def supports(self, case: Case, device: Device) -> str | None:
        mods = case.mods
        if case.dtype == "float32":
            return "16-bit operands only"
        if mods.score is not None or mods.sink is not None or mods.dropout:
            return "it has masks alone: no score function, sink or dropout"
        if interval_of(case) is None:
            return "the keys of a row are no single interval to the analysis"
        if device.kind == "gpu" and not (case.key or mods.plain):
            return "it takes too long to compile for every variant: the main ones only"
        return CUDNN_FLEX.missing(device)

    def prepare(self, case: Case, device: Device) -> Prepared:
        package, mods = CUDNN_FLEX.load(device), case.mods
        packed: dict[str, Any] = {}
        if mods.starts is not None:
            longest = int((mods.starts[1:] - mods.starts[:-1]).max())
            starts = mods.starts.to(device.torch)
            packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            packed |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        ends, learns = intervals(case).to(device.torch), case.seq_q > 1
        plans: list[Any] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
            operands = [tensor[0] for tensor in rows] if packed else rows
            if not plans:  # it needs sample tensors, and serves all of their shape
                plans.append(
                    package.create_mask_plan(ends, *operands, build_backward=learns, **packed)
                )
            out: Tensor = package.flex_attn_func(*operands, mask_plan=plans[0])
            return (out[None] if packed else out).transpose(1, 2)

        return Prepared(attend, passes_of(case))


def interval_of(case: Case) -> Interval | None:
    """The keys that a row keeps, by flashgen's analysis of the case's spec."""
    spec = spec_of(case)
    if spec.block_sparse is not None or spec.mask is None:
        return None if spec.block_sparse is not None else Interval(None, None)
    return row_interval(spec.mask)


def intervals(case: Case) -> Tensor:
    """int32 [1, 1 or 3, batch * seq_q]: F0, or F0, F1 and F2, of the kept keys [0, F0) u [F1, F2).

    Those of packed sequences count from the first row of each.
    """
    interval, spec, starts = interval_of(case), spec_of(case), case.mods.starts
    assert interval is not None  # `supports` has asked
    rows = np.arange(case.seq_q)
    sizes = (case.seq_q, case.seq_k)
    keys: Any = case.seq_k
    if starts is not None:
        first = starts.numpy()
        lengths = first[1:] - first[:-1]
        rows = rows - first[:-1].repeat(lengths)
        keys = lengths.repeat(lengths)
        sizes = (0, 0)  # of queries and keys: masks of packed specs read their difference alone
    env = {Q: rows, **numbers_of(spec, (case.batch, case.heads_q, *sizes), dict(case.scalars))}

    def end(value: Any, otherwise: Any) -> Any:
        bound = otherwise if value is None else evaluate(value, env)
        return np.clip(np.broadcast_to(bound, rows.shape), 0, keys)

    last = end(interval.hi, keys)
    ends = [last]
    if interval.lo is not None:
        ends = [np.zeros_like(last), np.minimum(end(interval.lo, 0), last), last]
    flat = torch.from_numpy(np.stack(ends).astype(np.int32))
    return flat.repeat(1, case.batch)[None].contiguous()
