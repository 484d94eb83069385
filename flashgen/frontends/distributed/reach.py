"""Which pairs of chunks a mask may connect: only these travel and are computed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.calls.cpu.problem import array
from flashgen.frontends.distributed.sharding import Sharding
from flashgen.shared.dtypes import Number
from flashgen.shared.signature import BOUNDARIES, LAYOUT
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.analysis.tile_walk import Array, exact, numbers_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H

_FAR = 1 << 40  # beyond all positions


@functools.lru_cache(maxsize=64)
def _mask(spec: AttentionSpec) -> MaskAnalysis:
    return analyse(spec).mask


def decisive(spec: AttentionSpec) -> set[str]:
    """The names of the tensors whose contents `reached` reads, where a spec has them."""
    used = _mask(spec).may.free_symbols
    return {*BOUNDARIES, LAYOUT} | {t.name for t in spec.tensors if t.symbol in used}


def reached(
    spec: AttentionSpec,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    sizes: tuple[int, int, int, int],
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor],
    heads: range | None = None,
) -> Array:
    """For each chunk of queries and of keys, whether an element of the pair may be kept.

    The analysis of the mask evaluates its bounds once for each pair, by numbers on the host. Packed
    sequences and block layouts are known there too. Captured tensors that the mask reads, the
    boundaries and the layout are copied to the host.

    Args:
        queries, keys: chunks of positions; of packed sequences, by rows of the whole.
        sizes: batch, heads, seq_q and seq_k of the whole.
        heads: the query heads that are computed; all if None.

    Returns:
        bool [queries, keys].
    """
    mask = _mask(spec)
    pairs = _pairs(spec, queries, keys, tensors)
    entries, head_range = sizes[0], range(sizes[1]) if heads is None else heads
    may: Any = np.ones(len(pairs.pair_index), dtype=bool)
    if not mask.always:
        used = mask.may.free_symbols
        batch_or_sequences = pairs.sequences if spec.packed else entries
        numbers: dict[Any, Any] = {**numbers_of(spec, (batch_or_sequences, *sizes[1:]), scalars)}
        numbers |= {
            t.symbol: _array(tensors[t.name])
            for t in spec.tensors
            if t.name in tensors and t.symbol in used
        }
        values = {symbol: exact(value) for symbol, value in numbers.items() if symbol in used}
        lines = np.arange((1 if spec.packed else entries) * len(head_range))
        b, h = np.divmod(lines, len(head_range))
        if {B, H} & used:
            values[B] = pairs.sequence if spec.packed else b[:, None]
            values[H] = h[:, None] + head_range.start
        values |= {Q_LO: pairs.q_lo, Q_HI: pairs.q_hi, K_LO: pairs.k_lo, K_HI: pairs.k_hi}
        with np.errstate(all="ignore"):  # pairs with undefined values may be connected
            may_keep = np.asarray(evaluate(mask.may, values), dtype=bool)
        may = np.broadcast_to(
            may_keep, (may_keep.shape[0] if may_keep.ndim == 2 else 1, len(may))
        ).any(0)
    reach = np.zeros((len(queries), len(keys)), dtype=bool)
    np.logical_or.at(reach.reshape(-1), pairs.pair_index, may)
    return reach & _live(spec, queries, keys, sizes, head_range, tensors)


class _Pairs(NamedTuple):
    """Pairs of chunks that have elements; a pair of packed rows is listed once for each sequence
    that lies in both chunks.

    Attributes:
        pair_index: the index of the pair, row by row.
        q_lo, q_hi, k_lo, k_hi: first and last positions.
        sequence: the number of the sequence.
        sequences: the number of sequences.
    """

    pair_index: Array
    q_lo: Array
    q_hi: Array
    k_lo: Array
    k_hi: Array
    sequence: Array
    sequences: int


def _pairs(
    spec: AttentionSpec,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    tensors: Mapping[str, torch.Tensor],
) -> _Pairs:
    spans = []
    for chunks, name in zip((queries, keys), BOUNDARIES, strict=True):
        # Sequences that are not packed are one, whose positions may begin anywhere.
        ends = _array(tensors[name]) if spec.packed else np.array([-_FAR, _FAR])
        origins = ends[:-1] if spec.packed else 0
        starts, stops = np.array([(c.start, c.stop) for c in chunks]).T[..., None]
        lo, hi = np.maximum(ends[:-1], starts), np.minimum(ends[1:], stops) - 1
        spans.append((lo - origins, hi - origins))
    (q_lo, q_hi), (k_lo, k_hi) = spans
    q, k, s = np.nonzero((q_lo <= q_hi)[:, None] & (k_lo <= k_hi)[None])
    ends_of = q_lo[q, s], q_hi[q, s], k_lo[k, s], k_hi[k, s]
    return _Pairs(q * len(keys) + k, *ends_of, s, q_lo.shape[1])


def _live(
    spec: AttentionSpec,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    sizes: tuple[int, int, int, int],
    heads: range,
    tensors: Mapping[str, torch.Tensor],
) -> Array:
    """Whether the block layout has a live block in a pair of chunks, bool [queries, keys]."""
    sparse = spec.block_sparse
    if sparse is None:
        return np.ones((len(queries), len(keys)), dtype=bool)
    if sparse.is_static:
        ends = (max((c.stop for c in chunks), default=0) for chunks in (queries, keys))
        shape = sparse.shape(*sizes[:2], *ends)
        live = np.frombuffer(sparse.table(*shape), dtype=bool).reshape(shape)
    else:
        live = _array(tensors[LAYOUT]).astype(bool)
    live_heads = live[:, heads.start : heads.stop] if live.shape[1] > 1 else live
    blocks = np.asarray(live_heads.any(axis=(0, 1)))
    rows = np.stack([blocks[_blocks(c, sparse.block_q)].any(axis=0) for c in queries])
    return np.stack([rows[:, _blocks(c, sparse.block_k)].any(axis=1) for c in keys], axis=1)


def _blocks(chunk: range, size: int) -> slice:
    return slice(chunk.start // size, -(-chunk.stop // size) if chunk else chunk.start // size)


def needed_by(queries: Sharding, reach: Array) -> Array:
    """For each rank and each chunk of keys, whether the rank computes with the chunk; bool.

    Args:
        reach: the result of `reached` for the chunks of ``queries``.
    """
    owners, world = np.asarray(queries.owners), len(queries.chunks_by_rank)
    return np.stack([reach[owners == rank].any(axis=0) for rank in range(world)])


def _array(tensor: torch.Tensor) -> Array:
    # A copy: a tensor that numpy has seen cannot be freed by FSDP.
    return np.asarray(array(tensor.detach().cpu().clone()))
