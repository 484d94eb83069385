"""Paged caches of 8-bit codes: codes, scales, and the caches of elements that are the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.shared.dtypes import CACHE_DTYPES

Tensor = torch.Tensor
KV_DTYPES = tuple(CACHE_DTYPES)
PAGES, PAGE = 9, 16
TABLE = torch.tensor([[3, 7, 1, -1], [0, 2, 5, 8]], dtype=torch.int32)
LENGTHS = torch.tensor([40, 61], dtype=torch.int32)


def finite_codes(kv_dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Codes of all finite numbers alike."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes = bits.view(getattr(torch, kv_dtype))
    return torch.where(codes.float().isfinite(), bits, 0).view(codes.dtype)


def scales_of(rank: int, heads: int, seed: int = 0) -> Tensor:
    """Scales of a rank from 0 to 3, around 1/50."""
    sizes = {0: (), 1: (heads,), 2: (PAGES, heads), 3: (PAGES, heads, PAGE)}[rank]
    return 0.02 * torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) + 0.001


def elements(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Element by element: the code's number times its scale in float32, rounded."""
    pages, heads, page, _ = codes.shape
    shape = {0: (1, 1, 1), 1: (1, heads, 1), 2: (pages, heads, 1), 3: (pages, heads, page)}
    return (codes.to(torch.float32) * scale.view(*shape[scale.dim()], 1)).to(dtype)


@dataclass(frozen=True)
class Coded:
    """A call of two sequences on a cache of codes."""

    spec: fg.AttentionSpec
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    queries: int = 1
    heads: int = 4
    how: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(spec: fg.AttentionSpec, ranks: tuple[int, int] = (2, 3), **changes: Any) -> Coded:
        assert spec.head_dim_v is not None
        shape = (PAGES, 2, PAGE)
        made = Coded(
            spec,
            finite_codes(spec.kv_dtype, (*shape, spec.head_dim)),
            finite_codes(spec.kv_dtype, (*shape, spec.head_dim_v), 1),
            scales_of(ranks[0], 2),
            scales_of(ranks[1], 2, 1),
        )
        return replace(made, **changes)

    def q(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.queries)
        shape = (2, self.heads, self.queries, self.spec.head_dim)
        return torch.randn(shape, generator=generator).to(getattr(torch, self.spec.dtype))

    def run(self, **how: Any) -> ForwardRun:
        scales = {
            name: fg_scale.expand(self.k.shape[:3])
            for name, fg_scale in (
                ("k_scale", _by_slot(self.k_scale)),
                ("v_scale", _by_slot(self.v_scale)),
            )
        }
        tensors = {"page_table": TABLE, "cache_seqlens": LENGTHS, **scales}
        given = {"backend": "emulator", "split_size": 32, **self.how, **how}
        return run_forward(self.spec, self.q(), self.k, self.v, tensors=tensors, **given)

    def of_elements(self, **how: Any) -> ForwardRun:
        """The call of the spec without kv_dtype on the elements of the cache."""
        spec = self.spec.replace(kv_dtype=None)
        dtype = getattr(torch, self.spec.dtype)
        k = elements(self.k, self.k_scale, dtype)
        v = elements(self.v, self.v_scale, dtype)
        tensors = {"page_table": TABLE, "cache_seqlens": LENGTHS}
        given = {"backend": "emulator", "split_size": 32, **self.how, **how}
        return run_forward(spec, self.q(), k, v, tensors=tensors, **given)


def _by_slot(scale: Tensor) -> Tensor:
    return scale[..., None] if scale.dim() in (1, 2) else scale


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for NaN, of which there is one."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
