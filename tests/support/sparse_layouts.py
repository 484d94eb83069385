"""Random block layouts for the tests, and the positions and tiles that they keep."""

from __future__ import annotations

from collections.abc import Callable

import torch

import flashgen as fg
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor


def sparse_spec(
    block_q: int,
    block_k: int,
    mask_mod: Callable[..., object] | None = None,
    layout: Callable[..., bool] | None = None,
    **options: object,
) -> AttentionSpec:
    sparse = fg.BlockSparse(layout, block_q, block_k)
    return AttentionSpec(mask_mod, block_sparse=sparse, **{"name": "sparse", **options})


def random_layout(
    spec: AttentionSpec, lines: tuple[int, int], ends: tuple[int, int], density: float, seed: int
) -> Tensor:
    """Bool [batch or 1, heads or 1, rows, columns] of blocks for positions below ``ends``."""
    generator = torch.Generator().manual_seed(seed)
    assert spec.block_sparse is not None
    return torch.rand(*lines, *spec.block_sparse.blocks(*ends), generator=generator) < density


def by_position(live: Tensor, block_q: int, block_k: int, seq_q: int, seq_k: int) -> Tensor:
    """Whether each score's block is live, for calls without offsets: bool [..., seq_q, seq_k]."""
    whole = live.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)
    return whole[..., :seq_q, :seq_k]


def touched(kept: Tensor, tile_q: int, tile_k: int) -> Tensor:
    """Whether each tile has a score that is kept: bool [..., rows, columns] of tiles."""
    rows, columns = -(-kept.shape[-2] // tile_q), -(-kept.shape[-1] // tile_k)
    missing = (0, columns * tile_k - kept.shape[-1], 0, rows * tile_q - kept.shape[-2])
    whole = torch.nn.functional.pad(kept, missing)
    tiles = whole.unflatten(-1, (columns, tile_k)).unflatten(-3, (rows, tile_q))
    return tiles.any(-1).any(-2)
