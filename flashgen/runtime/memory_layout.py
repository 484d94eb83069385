"""The memory layouts of results and of the float32 sums of dQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashgen.runtime.compiler import dq_sum_rows
from flashgen.runtime.symbolic_sizes import known

if TYPE_CHECKING:
    from flashgen.planner import Plan

Tensor = torch.Tensor


def empty_rows(model: Tensor, dim: int) -> Tensor:
    """An uninitialised tensor [batch, heads, seq, dim] with the dtype and axis order of ``model``.

    For a model stored as [batch, seq, heads, dim] the result is stored likewise, as in torch's own
    attention, so that ``out.transpose(1, 2).flatten(2)`` copies nothing. Otherwise the result is
    contiguous.


    Args:
        model: a tensor [batch, heads, seq, any length].
        dim: the length of the result's last dimension.
    """
    batch, heads, seq, _ = model.shape
    if rows_before_heads(model):
        return model.new_empty(batch, seq, heads, dim).transpose(1, 2)
    return model.new_empty(batch, heads, seq, dim)


def rows_before_heads(model: Tensor) -> bool:
    """True for a tensor stored [batch, seq, heads, dim]."""
    return known(model.stride(1) < model.stride(2)) and not known(model.stride(1) == 0)


def in_memory_order_of(model: Tensor, result: Tensor) -> Tensor:
    """``result`` in the axis order of `empty_rows`, copied only where its order differs."""
    wanted = empty_rows(model, result.shape[3])
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def zero_sums(dq: Tensor, plan: Plan) -> Tensor:
    """Zeroed float32 sums to which blocks add their parts of dQ, in the order of registers.

    Args:
        dq: the gradient to which the sums are rounded, [batch, heads, seq, head_dim].
        plan: the plan of the kernel that adds to the sums.

    Returns:
        mma.sync: [batch, heads, R, C, 4, 8, 4]: R tiles of 16 rows, up to whole tiles of block_q;
        C columns of 8. Element (r, c, e, a, t) is row 16 r + 8 (e // 2) + a, column 8 c + 2 t +
        e % 2.
        wgmma, which has dQ transposed: [batch, heads, R, C, N, 8, 4, 2, 2]: R tiles of 8 N rows, up
        to whole tiles of block_q; C columns of 16. Element (r, c, n, a, t, i, e) is row 8 (r N + n)
        + 2 t + e, column 16 c + 8 i + a. These sums are not multiplied by the scale yet.
    """
    batch, heads, seq, dim = dq.shape
    rows = -(-seq // plan.block_q) * plan.block_q
    shape: tuple[int, ...] = (batch, heads, rows // 16, dim // 8, 4, 8, 4)
    if plan.path == "sm_90a":
        together = dq_sum_rows(plan)
        shape = (batch, heads, rows // together, -(-dim // 16), together // 8, 8, 4, 2, 2)
    return torch.zeros(shape, dtype=torch.float32, device=dq.device)


def copy_sums(sums: Tensor, plan: Plan, dq: Tensor, scale: float) -> None:
    """Rounds the sums of `zero_sums` to dq: in one pass, or two where the last tile is partial.

    Args:
        plan: the plan of the kernel that added to the sums.
        scale: factor on Q K^T, for sums that are not multiplied by it yet.
    """
    batch, heads, seq, dim = dq.shape
    if plan.path == "sm_90a":
        # r, c, n, a, t, i, e  ->  r; row: n, t, e; column: c, i, a
        tiles = sums.permute(0, 1, 2, 4, 6, 8, 3, 7, 5)
        together, factor = dq_sum_rows(plan), scale
    else:
        # r, c, e // 2, e % 2, a, t  ->  r; row: e // 2, a; column: c, t, e % 2
        split = sums.view(batch, heads, -1, dim // 8, 2, 2, 8, 4)
        tiles = split.permute(0, 1, 2, 4, 6, 3, 7, 5)
        together, factor = 16, 1.0
    # Padding columns prevent a view of dq in the order of the tiles.
    whole = seq // together if dim * together == tiles[0, 0, 0].numel() else 0
    if whole:
        rows = dq[:, :, : whole * together].view(batch, heads, whole, *tiles.shape[3:])
        torch.mul(tiles[:, :, :whole], factor, out=rows)
    if (done := whole * together) < seq:
        rest = tiles[:, :, whole:].reshape(batch, heads, -1, tiles[0, 0, 0].numel() // together)
        torch.mul(rest[:, :, : seq - done, :dim], factor, out=dq[:, :, done:])
