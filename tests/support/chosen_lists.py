"""Calls whose queries choose their keys by random lists of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashgen as fg
from tests.support.judged import Call, normal

Tensor = torch.Tensor


def causal(b: object, h: object, q: Any, k: Any) -> Any:
    return q + 20 >= k


def spec_of(
    block_q: int, block_k: int, mask_mod: Callable[..., object] | None = causal, **options: Any
) -> fg.AttentionSpec:
    sparse = fg.BlockSparse(block_q=block_q, block_k=block_k, heads="kv")
    chosen = {"name": "chosen", "dtype": "bfloat16", "block_sparse": sparse}
    return fg.AttentionSpec(mask_mod, **{**chosen, **options})


def random_lists(
    spec: fg.AttentionSpec, lines: tuple[int, int], lengths: tuple[int, int], most: int, seed: int
) -> dict[str, Tensor]:
    """Lists of 0 to ``most`` blocks in any order, some of whose entries are -1."""
    generator = torch.Generator().manual_seed(seed)
    assert spec.block_sparse is not None
    shape = (*lines, *spec.block_sparse.blocks(*lengths))
    blocks = torch.rand(shape, generator=generator).argsort(-1)[..., :most]
    counts = torch.randint(0, most + 1, shape[:3], generator=generator)
    counts.flatten()[0], counts.flatten()[-1] = most, 0
    none = torch.rand(blocks.shape, generator=generator) < 0.1
    return {"kv_num_blocks": counts.int(), "kv_indices": blocks.masked_fill(none, -1).int()}


def call_of(
    spec: fg.AttentionSpec,
    sizes: tuple[int, int, int, int, int],
    arch: str,
    most: int = 3,
    seed: int = 0,
    lists: dict[str, Tensor] | None = None,
    **numbers: Any,
) -> Call:
    """A call in the emulator.

    Args:
        sizes: batch, heads_q, heads_kv, seq_q and seq_k.
        lists: instead of random ones.
        numbers: more arguments of the call; ``tensors`` besides the lists.
    """
    batch, heads, heads_kv, seq_q, seq_k = sizes
    dtype = getattr(torch, str(spec.dtype))
    q = normal((batch, heads, seq_q, spec.head_dim), dtype, seed + 3)
    k = normal((batch, heads_kv, seq_k, spec.head_dim), dtype, seed + 4)
    v = normal((batch, heads_kv, seq_k, spec.head_dim_v or 0), dtype, seed + 5)
    if spec.shared_kv:
        v = k[..., : spec.head_dim_v]
    made = lists or random_lists(spec, (batch, heads_kv), (seq_q, seq_k), most, seed)
    tensors = {**numbers.pop("tensors", {}), **made}
    return Call(spec, (q, k, v), {"tensors": tensors, **numbers}, arch=arch)
