"""The arguments of calls that read a paged cache.

Paging changes addresses only: masks and scores see positions in the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.calls.runtime.arguments.positions import entries_of, tensors_named
from flashgen.calls.runtime.arguments.refusals import is_known, refuse, shape_of
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.paged import expanded_scale
from flashgen.shared.signature import PAGE_NAMES, SCALE_NAMES, CallSignature

Tensor = torch.Tensor

CACHE_AXES = "[pages, heads_kv, page_size, head_dim]"


def check_positions_of_pages(q_offset: object, k_offset: object) -> None:
    """Checks the offsets of a call with a paged cache.

    Raises:
        InputError: q_offset is a number, or k_offset is given.
    """
    if q_offset is not None and not isinstance(q_offset, Tensor):
        refuse(
            "the queries of a call with a paged cache have no common position",
            "argument q_offset",
            f"given {q_offset!r:.200}; queries without it are the last positions of their sequence",
            "no q_offset, or an int32 tensor with the first position of each sequence",
        )
    if isinstance(k_offset, Tensor) or k_offset != 0:
        refuse(
            "the keys of a paged cache are counted from 0 in each sequence",
            "argument k_offset",
            f"given {k_offset!r:.200}",
            "no k_offset",
        )


def check_caches(k: Tensor, v: Tensor) -> None:
    """Checks the sizes of caches, which may be symbols.

    Raises:
        InputError: k and v have different numbers of pages, heads or slots, or pages hold no keys.
    """
    for axis, counted in enumerate(("numbers of pages", "numbers of heads", "page sizes")):
        if is_known(k.shape[axis] != v.shape[axis]):
            refuse(
                f"k and v have different {counted}",
                "argument v",
                f"k {shape_of(k)}, v {shape_of(v)}",
                f"caches {CACHE_AXES} with the same first three dimensions",
            )
    if is_known(k.shape[2] == 0):
        refuse(
            "a page holds no keys",
            "argument k",
            f"shape {shape_of(k)}: {CACHE_AXES}",
            "pages of at least one slot",
        )


def with_scales(captures: Mapping[str, Any], k: Any, v: Any) -> Mapping[str, Any]:
    """The captures of a call with codes, with scales as views [pages, heads_kv, page_size].

    Scales that are missing, or are no tensors, are left to the checks of captured tensors.

    Raises:
        InputError: a scale has another shape.
    """
    scaled = dict(captures)
    for name, cache in zip(SCALE_NAMES, (k, v), strict=True):
        scale = captures.get(name)
        if not isinstance(scale, Tensor) or not isinstance(cache, Tensor) or cache.dim() != 4:
            continue
        sizes = cache.shape[:3]
        first = 1 if scale.dim() == 1 else 0
        fits = scale.dim() <= len(sizes) and not any(
            is_known(size != 1) and is_known(size != wanted)
            for size, wanted in zip(scale.shape, sizes[first:], strict=False)
        )
        if not fits:
            refuse(
                f"{name} has a shape that belongs to no part of the cache",
                f"argument {name}",
                f"shape {shape_of(scale)}; {name[0]} {shape_of(cache)}",
                "shape (), [heads_kv], [pages, heads_kv] or [pages, heads_kv, page_size]",
            )
        scaled[name] = expanded_scale(scale, cache)
    return scaled


def check_table(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> None:
    """Checks the sizes of page table and lengths, which may be symbols.

    Raises:
        InputError: they and the queries are of different numbers of sequences.
    """
    table, lengths = tensors_named(signature, captured, PAGE_NAMES)
    sequences = entries_of(signature, q, captured)
    for name, tensor in zip(PAGE_NAMES, (table, lengths), strict=True):
        if is_known(tensor.shape[0] != sequences):
            refuse(
                f"{name} is not for the sequences of q",
                f"argument {name}",
                f"shape {shape_of(tensor)}; {sequences} sequences",
                "a row of the page table and a length for each batch entry of q, or for each "
                "sequence of cu_seqlens_q",
            )


def capacity_of(signature: CallSignature, k: Tensor, captured: Sequence[Any]) -> int:
    """The positions for which the page table has entries, a multiple of the page size.

    Raises:
        InputError: kernels cannot count as many.
    """
    table = tensors_named(signature, captured, PAGE_NAMES[:1])[0]
    capacity = int(table.shape[1] * k.shape[2])
    if capacity > POSITION_LIMIT:
        refuse(
            "the page table has more positions than kernels support",
            "argument page_table",
            f"{table.shape[1]:,} pages of {k.shape[2]:,} keys; at most {POSITION_LIMIT:,} keys",
            "a narrower page table",
        )
    return capacity


def check_pages(captured: Mapping[str, Tensor], call: CheckedCall, k: Tensor) -> None:
    """Checks the values of lengths and page tables on the CPU, where that waits for nothing.

    On a GPU, lengths are clamped, and an unknown page makes the results of its sequence NaN.

    Raises:
        InputError: a length that the page table cannot hold, or a page outside the caches.
    """
    table, lengths = (captured[name] for name in PAGE_NAMES)
    page_size, pages = k.shape[2], k.shape[0]
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= call.seq_k:
            refuse(
                "a sequence is longer than its row of the page table, or shorter than 0",
                f"argument cache_seqlens, sequence {b}",
                f"cache_seqlens[{b}] is {length:,}; {table.shape[1]:,} pages of {page_size:,}",
                f"from 0 to {call.seq_k:,}, or a wider page table",
            )
        used = table[b, : -(-length // page_size)]
        unknown = ((used < 0) | (used >= pages)).nonzero().flatten()
        if len(unknown):
            column = int(unknown[0])
            refuse(
                "a page of a sequence lies outside of the caches",
                f"argument page_table, sequence {b}",
                f"page_table[{b}, {column}] is {int(used[column]):,}, for position "
                f"{column * page_size:,}; {pages:,} pages of {page_size:,}",
                "a page of the caches for every position up to cache_seqlens",
            )


def longest_of(captured: Mapping[str, Tensor]) -> int:
    """The number of keys of the longest sequence."""
    return max(captured[PAGE_NAMES[1]].tolist(), default=0)
