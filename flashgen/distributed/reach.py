"""Which pairs of chunks a mask may connect: only these travel and are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flashgen.analysis import analyse
from flashgen.analysis.evaluate import evaluate
from flashgen.analysis.tile_walk import exact, numbers_of
from flashgen.distributed.sharding import Sharding
from flashgen.dtypes import Number
from flashgen.language import K_HI, K_LO, Q_HI, Q_LO, B, H
from flashgen.language.spec import AttentionSpec

Array = np.ndarray[Any, np.dtype[Any]]


def reached(
    spec: AttentionSpec,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    sizes: tuple[int, int, int, int],
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor],
) -> Array:
    """For each chunk of queries and of keys, whether the mask may keep an element of the pair.

    The analysis evaluates its bounds once for each pair, by numbers on the host. Captured tensors
    that the mask reads are copied there.

    Args:
        queries, keys: chunks, by global positions.
        sizes: batch, heads, seq_q and seq_k of the whole.

    Returns:
        bool [queries, keys].
    """
    mask = analyse(spec).mask
    shape = len(queries), len(keys)
    lengths = np.outer([len(c) for c in queries], [len(c) for c in keys]).astype(bool)
    if mask.always:
        return lengths
    used = mask.may.free_symbols
    known: dict[Any, Any] = {**numbers_of(spec, sizes, scalars)}
    known |= {
        t.symbol: _array(tensors[t.name])
        for t in spec.tensors
        if t.name in tensors and t.symbol in used
    }
    values = {symbol: exact(value) for symbol, value in known.items() if symbol in used}
    b, h = np.divmod(np.arange(sizes[0] * sizes[1], dtype=np.int64), sizes[1])
    if {B, H} & used:
        values |= {B: b[:, None], H: h[:, None]}
    first_q, last_q = _ends(queries, len(keys), each=True)
    first_k, last_k = _ends(keys, len(queries), each=False)
    values |= {Q_LO: first_q, Q_HI: last_q, K_LO: first_k, K_HI: last_k}
    with np.errstate(all="ignore"):  # pairs with undefined values may be connected
        may = np.asarray(evaluate(mask.may, values), dtype=bool)
    may = np.broadcast_to(may, (may.shape[0] if may.ndim == 2 else 1, shape[0] * shape[1]))
    return may.any(axis=0).reshape(shape) & lengths


def needed_by(queries: Sharding, reach: Array) -> Array:
    """For each rank and each chunk of keys, whether the rank computes with the chunk; bool.

    Args:
        reach: the result of `reached` for the chunks of ``queries``.
    """
    owners, world = np.asarray(queries.owners), len(queries.of_rank)
    return np.stack([reach[owners == rank].any(axis=0) for rank in range(world)])


def _ends(chunks: tuple[range, ...], others: int, each: bool) -> tuple[Array, Array]:
    """The first and last positions of the chunks, for all pairs of a chunk and another one."""
    first = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    last = np.array([max(chunk.stop - 1, chunk.start) for chunk in chunks], dtype=np.int64)
    spread = np.repeat if each else np.tile
    return spread(first, others), spread(last, others)


def _array(tensor: torch.Tensor) -> Array:
    data = tensor.detach().cpu()
    wide = torch.promote_types(data.dtype, torch.float32)
    # A copy: a tensor that numpy has seen cannot be freed by FSDP.
    data = data.to(wide if data.is_floating_point() else torch.int64, copy=True)
    return np.asarray(data.numpy())
