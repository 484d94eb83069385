"""How results lie in memory."""

from __future__ import annotations

import torch

from flashgen.ops.symbols import known
from flashgen.plan import Plan
from flashgen.plan.model_backward_sm90 import queries_of_sums

Tensor = torch.Tensor


def empty_rows(model: Tensor, dim: int) -> Tensor:
    """An uninitialised [batch, heads, seq, dim] with sizes, dtype and order of axes of ``model``.

    A tensor stored [batch, seq, heads, dim] gives one stored like it, as torch's own attention
    does, so that ``out.transpose(1, 2).flatten(2)`` copies nothing; otherwise contiguous.

    Args:
        model: [batch, heads, seq, any].
    """
    batch, heads, seq, _ = model.shape
    if rows_before_heads(model):
        return model.new_empty(batch, seq, heads, dim).transpose(1, 2)
    return model.new_empty(batch, heads, seq, dim)


def rows_before_heads(model: Tensor) -> bool:
    """True for a tensor stored [batch, seq, heads, dim]."""
    return known(model.stride(1) < model.stride(2)) and not known(model.stride(1) == 0)


def in_layout_of(model: Tensor, result: Tensor) -> Tensor:
    """``result`` in the memory order that `empty_rows` gives; itself when it has that already."""
    wanted = empty_rows(model, result.shape[3])
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


def zero_sums(dq: Tensor, plan: Plan) -> Tensor:
    """The float32 sums that blocks add their parts of dQ to, in the order of their registers.

    Args:
        plan: of the kernel that adds.

    Returns:
        mma.sync: [batch, heads, R, C, 4, 8, 4]: R tiles of 16 rows, up to whole tiles of block_q;
        C columns of 8. Element (r, c, e, a, t) is row 16 r + 8 (e // 2) + a, column 8 c + 2 t +
        e % 2.
        wgmma, which has dQ transposed: [batch, heads, R, C, N, 8, 4, 2, 2]: R tiles of 8 N rows, up
        to whole tiles of block_q; C columns of 16. Element (r, c, n, a, t, i, e) is row 8 (r N + n)
        + 2 t + e, column 16 c + 8 i + a. These are not yet multiplied by the scale.
    """
    batch, heads, seq, dim = dq.shape
    rows = -(-seq // plan.block_q) * plan.block_q
    shape: tuple[int, ...] = (batch, heads, rows // 16, dim // 8, 4, 8, 4)
    if plan.path == "sm_90a":
        together = queries_of_sums(plan)
        shape = (batch, heads, rows // together, -(-dim // 16), together // 8, 8, 4, 2, 2)
    return torch.zeros(shape, dtype=torch.float32, device=dq.device)


def copy_sums(sums: Tensor, plan: Plan, dq: Tensor, scale: float) -> None:
    """Rounds the sums of `zero_sums` into dq, in one pass; in two where the last tile is not whole.

    Args:
        plan: of the kernel that added.
        scale: of Q K^T, for sums that are not yet multiplied by it.
    """
    batch, heads, seq, dim = dq.shape
    if plan.path == "sm_90a":
        # r, c, n, a, t, i, e  ->  r; row: n, t, e; column: c, i, a
        tiles = sums.permute(0, 1, 2, 4, 6, 8, 3, 7, 5)
        together, factor = queries_of_sums(plan), scale
    else:
        # r, c, e // 2, e % 2, a, t  ->  r; row: e // 2, a; column: c, t, e % 2
        split = sums.view(batch, heads, -1, dim // 8, 2, 2, 8, 4)
        tiles = split.permute(0, 1, 2, 4, 6, 3, 7, 5)
        together, factor = 16, 1.0
    # Columns up to 16 that are not in dq leave no way to see it in the order of the tiles.
    whole = seq // together if dim * together == tiles[0, 0, 0].numel() else 0
    if whole:
        rows = dq[:, :, : whole * together].view(batch, heads, whole, *tiles.shape[3:])
        torch.mul(tiles[:, :, :whole], factor, out=rows)
    if (done := whole * together) < seq:
        rest = tiles[:, :, whole:].reshape(batch, heads, -1, tiles[0, 0, 0].numel() // together)
        torch.mul(rest[:, :, : seq - done, :dim], factor, out=dq[:, :, done:])
