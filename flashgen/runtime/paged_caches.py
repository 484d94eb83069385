"""Calls with keys and values in the pages of a cache: their checks and their numbers.

Paging changes addresses only: masks and scores see positions in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.call import CheckedCall
from flashgen.dtypes import POSITION_LIMIT
from flashgen.runtime.check_basics import known, refuse, shape_of
from flashgen.runtime.fast_division import multiplier_of
from flashgen.runtime.packed_sequences import given
from flashgen.signature import PAGE_NAMES, SPLIT, CallSignature

Tensor = torch.Tensor

LEAST_BOX_ROWS = 8
"""Rows that repeat a swizzle in shared memory: TMA copies at least that many rows of a page."""


def check_caches(k: Tensor, v: Tensor) -> None:
    """Checks the sizes of caches, which may be symbols.

    Raises:
        InputError: k and v have different numbers of pages, or pages hold no keys.
    """
    if known(k.shape[0] != v.shape[0]):
        refuse(
            "k and v have different numbers of pages",
            "argument v",
            f"k {shape_of(k)}, v {shape_of(v)}",
            "caches [pages, heads_kv, page_size, head_dim] with the same first three dimensions",
        )
    if known(k.shape[2] == 0):
        refuse(
            "a page holds no keys",
            "argument k",
            f"shape {shape_of(k)}: [pages, heads_kv, page_size, head_dim]",
            "pages of at least one slot",
        )


def check_table(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> None:
    """Checks the sizes of page table and lengths, which may be symbols.

    Raises:
        InputError: they and the queries are of different numbers of sequences.
    """
    table, lengths = given(signature, captured, PAGE_NAMES)
    sequences = q.shape[0]
    if signature.packed:
        sequences = given(signature, captured, signature.boundaries)[0].shape[0] - 1
    for name, tensor in zip(PAGE_NAMES, (table, lengths), strict=True):
        if known(tensor.shape[0] != sequences):
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
    table = given(signature, captured, PAGE_NAMES[:1])[0]
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
            at = int(unknown[0])
            refuse(
                "a page of a sequence lies outside of the caches",
                f"argument page_table, sequence {b}",
                f"page_table[{b}, {at}] is {int(used[at]):,}, for position {at * page_size:,}; "
                f"{pages:,} pages of {page_size:,}",
                "a page of the caches for every position up to cache_seqlens",
            )


def longest_of(captured: Mapping[str, Tensor]) -> int:
    """The number of keys of the longest sequence."""
    return max(captured[PAGE_NAMES[1]].tolist(), default=0)


def numbers_of_pages(k: Tensor) -> dict[str, int]:
    """The fields of a kernel that describe the pages of the caches."""
    page_size = k.shape[2]
    return {
        "pages": k.shape[0],
        "page_size": page_size,
        "page_divisor": multiplier_of(page_size),
    }


def box_rows_of(block_k: int, call: CheckedCall, page_size: int = 0) -> int:
    """The keys that TMA copies at once; 0 where that would be so few that lanes copy every key.

    It is the largest number that divides a tile of keys, a split and a page. Tiles begin at the
    borders of splits: boxes of these rows lie in one split and one page each.

    Args:
        page_size: keys of a page; 0 for contiguous keys.
    """
    rows = math.gcd(page_size, block_k, int(call.scalars.get(SPLIT, 0)))
    return rows if rows >= LEAST_BOX_ROWS else 0
