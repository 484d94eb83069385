"""A call with a paged cache as one with packed sequences, whose keys are copied out of their pages.

The CPU path and the reference compute it; kernels read the pages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from flashgen.shared.dtypes import CACHE_DTYPES, dtype_name
from flashgen.shared.signature import BOUNDARIES, OFFSETS, PAGE_NAMES, SCALE_NAMES

Tensor = torch.Tensor


class Contiguous(NamedTuple):
    """A call with a paged cache as one with packed sequences.

    Attributes:
        q, k, v: [1, heads, rows of all sequences, head_dim].
        tensors: the captured tensors, with boundaries and positions instead of pages and lengths.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: dict[str, Tensor]

    def like_queries(self, result: Tensor, like: Tensor) -> Tensor:
        """A result [1, heads, rows, ...] with the batch entries of the queries ``like``."""
        if like.shape[0] == 1:
            return result
        batch, heads, rows = like.shape[:3]
        return result.view(heads, batch, rows, *result.shape[3:]).transpose(0, 1).contiguous()


def contiguous_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, captured: Mapping[str, Tensor]
) -> Contiguous:
    """Copies the keys and values of all sequences out of their pages.

    Args:
        captured: the captured tensors by name, with cu_seqlens_q where the queries are packed, and
            q_offset where they are not the last positions of their sequences.
    """
    table, lengths = (captured[name] for name in PAGE_NAMES)
    coded = dtype_name(k_cache.dtype) in CACHE_DTYPES
    paging_names = (*PAGE_NAMES, *SCALE_NAMES) if coded else PAGE_NAMES
    tensors = {name: x for name, x in captured.items() if name not in paging_names}
    if BOUNDARIES[0] not in captured:
        rows = torch.full((len(lengths),), q.shape[2], dtype=torch.int32)
        q = one_entry(q)
    else:
        rows = captured[BOUNDARIES[0]].diff()
    ends_q, ends_k = (
        torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (rows, lengths)
    )
    tensors |= zip(BOUNDARIES, (captured.get(BOUNDARIES[0], ends_q), ends_k), strict=True)
    tensors.setdefault(OFFSETS[0], lengths - rows)
    k, v = (
        _out_of_pages(cache, captured[name] if coded else None, q.dtype, table, lengths)
        for cache, name in zip((k_cache, v_cache), SCALE_NAMES, strict=True)
    )
    return Contiguous(q, k, v, tensors)


def one_entry(rows: Tensor) -> Tensor:
    """[batch, heads, rows, ...] with the rows of all batch entries in one, as packed sequences."""
    return rows.transpose(0, 1).flatten(1, 2)[None]


def _out_of_pages(
    cache: Tensor, scale: Tensor | None, dtype: torch.dtype, table: Tensor, lengths: Tensor
) -> Tensor:
    """[1, heads_kv, keys of all sequences, head_dim]; codes as elements of ``dtype``."""
    page_size = cache.shape[2]
    sequences = []
    if scale is not None:
        scale = expanded_scale(scale, cache)
    for pages, length in zip(table, lengths.tolist(), strict=True):
        used = pages[: -(-length // page_size)].long()
        rows = select_pages(cache, used)
        if scale is not None:
            rows = decoded(rows, scale[used], dtype)
        sequences.append(rows.transpose(0, 1).flatten(1, 2)[:, :length])
    return torch.cat(sequences, 1)[None]


def select_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """The pages of a cache by their numbers; on the CPU torch indexes 8-bit floats as bytes."""
    if cache.dtype.itemsize > 1:
        return cache[pages]
    return cache.view(torch.uint8)[pages].view(cache.dtype)


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of codes [..., head_dim] with scales [...], which kernels multiply."""
    return (codes.float() * scale[..., None]).to(dtype)


def expanded_scale(scale: Tensor, cache: Tensor) -> Tensor:
    """A scale of shape (), [heads_kv], [pages, heads_kv] or [pages, heads_kv, page_size] as a view
    [pages, heads_kv, page_size]."""
    rank = scale.dim()
    if rank in (1, 2):
        scale = scale[..., None]
    return scale.expand(cache.shape[:3])
