"""Paged caches in the memory layouts of serving engines, and appending by a plain loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Cache(NamedTuple):
    """A paged cache: its storage, and K and V [pages, heads, page, head dim] as views of it."""

    storage: tuple[Tensor, ...]
    k: Tensor
    v: Tensor


LAYOUTS = ("hnd", "nhd", "split", "pairs", "halves")
"""HND; NHD; K and V in one row (vLLM since 2026-06); in pairs per page, or one after the other
(vLLM before)."""


def cache_of(
    layout: str,
    shape: tuple[int, int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    pad: int = 0,
    device: torch.device | str = "cpu",
) -> Cache:
    """A cache of random numbers, the same on every device.

    Args:
        layout: one of `LAYOUTS`; "pairs" and "halves" are for equal head dims.
        shape: pages, heads, page size.
        pad: unused elements behind each row.
    """
    pages, heads, page = shape
    d, d_v = dims
    generator = torch.Generator().manual_seed(pages)

    def stored(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    if layout in ("hnd", "nhd"):
        by_head = layout == "hnd"
        axes = (heads, page) if by_head else (page, heads)
        both = stored(pages, *axes, d + pad), stored(pages, *axes, d_v + pad)
        k, v = (each if by_head else each.transpose(1, 2) for each in both)
        return Cache(both, k[..., :d], v[..., :d_v])
    if layout == "split":
        one = stored(pages, heads, page, d + d_v + pad)
        return Cache((one,), *one[..., : d + d_v].split([d, d_v], -1))
    assert d == d_v, layout
    if layout == "pairs":
        one = stored(pages, 2, page, heads, d + pad)[..., :d]
        return Cache((one,), one[:, 0].transpose(1, 2), one[:, 1].transpose(1, 2))
    one = stored(2, pages, page, heads, d + pad)[..., :d]
    return Cache((one,), one[0].transpose(1, 2), one[1].transpose(1, 2))


@dataclass(frozen=True)
class Appended:
    """The arguments of a call of append_kv besides the caches, all tables on pages of its own.

    Attributes:
        k, v: the new rows.
        table, lengths: page_table and cache_seqlens.
        ends: cu_seqlens; None for rows that are not packed.
        slots: by the formula of the page table, int64 [tokens]; -1 for rows of no sequence.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    ends: Tensor | None
    slots: Tensor

    @property
    def by_table(self) -> dict[str, Tensor]:
        given = {"page_table": self.table, "cache_seqlens": self.lengths}
        return given if self.ends is None else {**given, "cu_seqlens": self.ends}

    @property
    def by_slots(self) -> dict[str, Tensor]:
        return {"slot_mapping": self.slots}

    def change(self, **changes: Any) -> Appended:
        return replace(self, **changes)


def rows_of(
    new: tuple[int, ...],
    lengths: tuple[int, ...],
    shape: tuple[int, int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    packed: bool = False,
    behind: int = 0,
) -> Appended:
    """New rows of sequences whose pages are drawn at random.

    Args:
        new, lengths: rows and keys of each sequence.
        shape: pages, heads, page size of the caches.
        packed: whether the sequences are packed; else all have equally many rows.
        behind: packed rows behind the last sequence.
    """
    pages, heads, page = shape
    generator = torch.Generator().manual_seed(sum(lengths))
    width = max(-(-length // page) for length in lengths) + 1
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    numbers = iter(torch.randperm(pages, generator=generator).tolist())
    slots = []
    for b, (count, length) in enumerate(zip(new, lengths, strict=True)):
        for entry in range(-(-length // page)):
            table[b, entry] = next(numbers)
        for position in range(length - count, length):
            slots.append(int(table[b, position // page]) * page + position % page)
    sizes = (1, heads, sum(new) + behind) if packed else (len(new), heads, new[0])
    k, v = (torch.randn(*sizes, d, generator=generator).to(dtype) for d in dims)
    ends = None
    if packed:
        ends = torch.tensor([sum(new[:b]) for b in range(len(new) + 1)], dtype=torch.int32)
    slots += [-1] * behind
    return Appended(
        k, v, table, torch.tensor(lengths, dtype=torch.int32), ends, torch.tensor(slots)
    )


def append_in_a_loop(rows: Appended, cache: Cache) -> None:
    """Writes row after row, head after head."""
    heads, n = rows.k.shape[1:3]
    page = cache.k.shape[2]
    for token, slot in enumerate(rows.slots.tolist()):
        for h in range(heads) if slot >= 0 else ():
            at = slot // page, h, slot % page
            cache.k[at] = rows.k[token // n, h, token % n]
            cache.v[at] = rows.v[token // n, h, token % n]
