"""The forward pass of batch-invariant calls: the bits of a row depend on its own keys alone.

Matrix libraries and sums of torch add in an order that depends on the sizes of a call. Here each
product is an element-wise one, whose rows are added in pairs; keys are in blocks that begin at
fixed positions, and one that has fewer keys is filled up with zeros. Everything is in float64, and
results are rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from flashgen.calls.cpu import sinks
from flashgen.calls.cpu.forward import chunks_with_keys, empty_results
from flashgen.calls.cpu.parts import ChunkScores, parts_of
from flashgen.calls.cpu.problem import TileArguments
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

BLOCK = 64
"""Keys whose weights and products are added in pairs. Block 0 begins at global position 0."""

_ELEMENTS = 1 << 20
"""Elements of the products of some rows and a block of keys, about: 8 MiB."""


@torch.no_grad()
def forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, arguments: TileArguments
) -> tuple[Tensor, ...]:
    """As `flashgen.calls.cpu.forward.forward`, with an order of sums that no size changes."""
    out, rows = empty_results(spec, q, v)
    q, k, v = q.double(), k.double(), v.double()
    parts = parts_of(spec, q, k, arguments)
    for chunk, *tensors in chunks_with_keys(parts, (q, k, v), out, rows):
        _chunk(chunk, *tensors)
    return out, *(column.contiguous() for column in rows.unbind(-1))


def _chunk(
    part: ChunkScores, q: Tensor, k: Tensor, v: Tensor, out: Tensor, results: Tensor
) -> None:
    problem, chunk = part.problem, part.chunk
    group, length = problem.sizes.group, problem.sizes.seq_q
    q, k, v = chunk.query_matrices(q), chunk.key_matrices(k), chunk.key_matrices(v)
    o = q.new_empty(*q.shape[:2], v.shape[2])
    statistics = q.new_empty(*q.shape[:2], results.shape[3])
    elements_of_query = q.shape[0] * group * BLOCK * max(q.shape[2], v.shape[2])
    step = max(1, _ELEMENTS // elements_of_query)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        grouped = slice(rows.start * group, rows.stop * group)
        o[:, grouped], statistics[:, grouped] = _rows(part, rows, q[:, grouped], k, v)
    chunk.to_queries(out, o)
    chunk.to_queries(results, statistics)


def _rows(part: ChunkScores, rows: slice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O of the query positions ``rows``, and LSE or what a spec has instead, and maxima."""
    problem, spec = part.problem, part.problem.spec
    o, sums = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(*q.shape[:2], 1)
    top = torch.full_like(sums, -math.inf)
    for begin in range(-(problem.keys.offset % BLOCK), k.shape[1], BLOCK):
        keys = slice(max(begin, 0), min(begin + BLOCK, k.shape[1]))
        inside = slice(keys.start - begin, keys.stop - begin)
        weights = _weights(part, rows, keys, q, k[:, keys])
        if weights is None:  # the mask removes all
            continue
        if spec.is_softmax or spec.takes_maxima:
            before, top = top, torch.maximum(top, weights.amax(-1, keepdim=True))
        if spec.is_softmax:
            shift = top.clamp_min(_LOWEST)  # -inf cannot be subtracted
            rescale, weights = _exp(before - shift), _exp(weights - shift)
            sums, o = sums * rescale, o * rescale
        p = q.new_zeros(*q.shape[:2], BLOCK)
        p[..., inside] = weights
        values = v.new_zeros(v.shape[0], BLOCK, v.shape[2])
        values[:, inside] = v[:, keys]
        sums = sums + added(p)[..., None]
        if problem.dropout_scale is not None:
            kept_p = p[..., inside].contiguous()
            part.select(kept_p, part.dropout_bits(rows, keys))
            p[..., inside] = kept_p
        o = o + added((p[..., None] * values[:, None]).transpose(2, 3))
    if not spec.is_softmax:
        o = o * (problem.dropout_scale or 1.0)
        if spec.normalizer == "sum" and not spec.partial:
            o = o / sums.masked_fill(sums == 0, math.inf)
        return o, top if spec.takes_maxima else sums if spec.sums_weights else torch.zeros_like(top)
    alone, empty = sinks.logits(part, rows), top == -math.inf
    largest = [top] if spec.returns_maxima else []
    top = top.clamp_min(_LOWEST)
    if problem.sink is not None:
        top = sinks.join(alone, top, sums, o)
    lse = torch.where(empty, alone, top + _numpy(np.log, sums))
    sums = sums.masked_fill(empty, math.inf)
    return o * (problem.dropout_scale or 1.0) / sums, torch.cat([lse, *largest], -1)


_LOWEST = torch.finfo(torch.float64).min


def _weights(part: ChunkScores, rows: slice, keys: slice, q: Tensor, k: Tensor) -> Tensor | None:
    """The scores of a block, or its weights; None where the mask removes all of them."""
    problem = part.problem
    bits = None if problem.programs.mask is None else part.mask_bits(rows, keys)
    if bits is not None and not bool(bits.any()):
        return None
    if problem.programs.ignores_score:
        scores = q.new_zeros(*q.shape[:2], k.shape[1])
    else:
        scores = added(q[:, :, None] * k[:, None]) * problem.scale
    grouped_scores = part.grouped(scores)
    if problem.programs.score is not None:
        grouped_scores = part.score(grouped_scores, rows, keys)
    if bits is not None:
        lowest = problem.spec.is_softmax or problem.spec.takes_maxima
        grouped_scores = torch.where(bits != 0, grouped_scores, -math.inf if lowest else 0.0)
    return grouped_scores.reshape(scores.shape)


def added(x: Tensor) -> Tensor:
    """Sums over the last axis, in pairs: the order depends on its length alone."""
    while (length := x.shape[-1]) > 1:
        half = length // 2
        total = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([total, x[..., 2 * half :]], -1) if length % 2 else total
    return x[..., 0]


def _exp(x: Tensor) -> Tensor:
    return _numpy(np.exp, x)


def _numpy(function: np.ufunc, x: Tensor) -> Tensor:
    """A function of NumPy, whose result for an element does not depend on where it is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return torch.from_numpy(function(x.contiguous().numpy()))
