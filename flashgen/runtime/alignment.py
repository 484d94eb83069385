"""The memory layouts that kernels can access, and the reasons where they cannot access one.

Kernels move 16 bytes at once where all addresses and strides are multiples of 16 bytes, and single
elements elsewhere. TMA has further rules.
"""

from __future__ import annotations

import torch

from flashgen.arch import facts
from flashgen.dtypes import INT32_MAX

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


def access_bytes(*tensors: Tensor) -> tuple[int, str]:
    """The bytes of one access of the forward kernel to q, k, v and o, and the reason.

    Returns:
        16 or the size of an element, in bytes, and a sentence with the reason.
    """
    for name, tensor in zip("qkvo", tensors, strict=False):
        obstacle = base_obstacle(name, tensor) or stride_obstacle(name, tensor)
        if obstacle is not None:
            return tensor.element_size(), obstacle
    return 16, ALIGNED


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
