"""The memory layouts that kernels can access, and the memory layouts of results.

Kernels move 16 bytes at once where all addresses and strides are multiples of 16 bytes, and single
elements elsewhere. TMA has further rules. Where a kernel cannot access a tensor, a sentence says
why.
"""

from __future__ import annotations

import torch

from flashgen.calls.runtime.arguments.refusals import is_known
from flashgen.shared.arch import facts, portable
from flashgen.shared.dtypes import INT32_MAX

Tensor = torch.Tensor

ALIGNED = "all base pointers and strides are multiples of 16 B"


def stride_obstacle(name: str, tensor: Tensor, unit: int = 16) -> str | None:
    """The stride that prevents 16-byte accesses, in words; None where there is none.

    The stride of an axis of length 1 is never used, so that it may have any value.

    Args:
        unit: the bytes that are accessed at once.
    """
    size = tensor.element_size()
    for axis, label in enumerate(("batch", "head", "row")):
        step = tensor.stride(axis) * size
        if tensor.shape[axis] > 1 and step % unit:
            return f"the {label} stride of {name} is {step} B, not a multiple of {unit} B"
    return None


def row_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why backward kernels cannot read a tensor with its strides, in words; None where they can."""
    if tensor.numel() and tensor.stride(3) != 1:
        return f"the last dimension of {name} is not contiguous"
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > INT32_MAX:
        return f"the rows of {name} are {row_bytes:,} B apart; at most {INT32_MAX:,} B"
    return stride_obstacle(name, tensor)


def base_obstacle(name: str, tensor: Tensor, unit: int = 16) -> str | None:
    """Why the address of a tensor prevents accesses of ``unit`` bytes, in words; None where it does
    not."""
    offset = tensor.data_ptr() % unit
    return f"{name} begins {offset} B past a multiple of {unit} B" if offset else None


def path_for(arch: str, why: str, **tensors: Tensor) -> tuple[str, str]:
    """The architecture whose kernels can read these aligned operands, and the reason.

    An expanded tensor has strides of 0, which the rules of tensor maps do not cover. Calls with one
    use the code path of all architectures.

    Args:
        arch, why: the architecture for other operands, and the reason where it is not that of the
            call.
    """
    if facts(arch).code_path.copies_by_tma:
        for name, tensor in tensors.items():
            for axis, label in enumerate(("batch", "head", "row")):
                if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
                    why = f"the {label} stride of {name} is 0, over which TMA does not step"
                    return portable(arch), why
    return arch, f"{ALIGNED}; {why}" if why else ALIGNED


def empty_rows(model: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor [batch, heads, seq, dim] with the axis order of ``model``.

    For a model stored as [batch, seq, heads, dim] the result is stored so too, as in torch's own
    attention, so that ``out.transpose(1, 2).flatten(2)`` copies nothing. Otherwise the result is
    contiguous. It is no view in either case: autograd forbids to modify views that a function
    returns.

    Args:
        model: a tensor [batch, heads, seq, any length].
        dim: the length of the result's last dimension.
        dtype: the dtype of the result; the model's if None.
    """
    batch, heads, seq, _ = model.shape
    if rows_before_heads(model):
        strides = seq * heads * dim, dim, heads * dim, 1
        return model.new_empty_strided((batch, heads, seq, dim), strides, dtype=dtype)
    return model.new_empty(batch, heads, seq, dim, dtype=dtype)


def rows_before_heads(model: Tensor) -> bool:
    """True for a tensor stored [batch, seq, heads, dim]."""
    return is_known(model.stride(1) < model.stride(2)) and not is_known(model.stride(1) == 0)


def in_memory_order_of(model: Tensor, result: Tensor) -> Tensor:
    """``result`` in the axis order of `empty_rows`, copied only where its order differs."""
    wanted = empty_rows(model, result.shape[3], result.dtype)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)
