"""The memory layouts that kernels can access, and those of results and of the sums of dQ.

Kernels move 16 bytes at once where all addresses and strides are multiples of 16 bytes, and single
elements elsewhere. TMA has further rules. Where a kernel cannot access a tensor, a sentence says
why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashgen.arch import facts
from flashgen.dtypes import INT32_MAX
from flashgen.runtime.check_basics import known

if TYPE_CHECKING:
    from flashgen.planner import Plan

Tensor = torch.Tensor

ALIGNED = "all base pointers and strides are multiples of 16 B"


def stride_obstacle(name: str, tensor: Tensor) -> str | None:
    """The stride that prevents 16-byte accesses, in words; None where there is none.

    The stride of an axis of length 1 is never used, so that it may have any value.
    """
    size = tensor.element_size()
    for axis, label in enumerate(("batch", "head", "row")):
        step = tensor.stride(axis) * size
        if tensor.shape[axis] > 1 and step % 16:
            return f"the {label} stride of {name} is {step} B, not a multiple of 16 B"
    return None


def row_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why backward kernels cannot read a tensor with its strides, in words; None where they can."""
    if tensor.numel() and tensor.stride(3) != 1:
        return f"the last dimension of {name} is not contiguous"
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > INT32_MAX:
        return f"the rows of {name} are {row_bytes:,} B apart; at most {INT32_MAX:,} B"
    return stride_obstacle(name, tensor)


def base_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why the address of a tensor prevents 16-byte accesses, in words; None where it does not."""
    offset = tensor.data_ptr() % 16
    return f"{name} begins {offset} B past a multiple of 16 B" if offset else None


def path_for(arch: str, **tensors: Tensor) -> tuple[str, str]:
    """The architecture whose kernels can read these aligned operands, and the reason.

    An expanded tensor has strides of 0, which the rules of tensor maps do not cover. Calls with one
    use the code path of all architectures.
    """
    if facts(arch).path == "sm_90a":
        for name, tensor in tensors.items():
            for axis, label in enumerate(("batch", "head", "row")):
                if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
                    why = f"the {label} stride of {name} is 0, over which TMA does not step"
                    return arch.removesuffix("a"), why
    return arch, ALIGNED


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
        together = _rows_of_sums(plan)
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
        together, factor = _rows_of_sums(plan), scale
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


def _rows_of_sums(plan: Plan) -> int:
    """The rows of a tile of dQ sums on the sm_90a path."""
    from flashgen.planner.models.panels_sm90 import queries_of_sums

    return queries_of_sums(plan.block_q, plan.head_dim)
