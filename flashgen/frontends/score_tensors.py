"""Tensors with an element for each score: masks and biases that a call gives.

Models give them to their attention with one element for whole dimensions: a mask of padding is
[batch, 1, 1, seq_k]. In a spec they are captured tensors, each dimension of which is read at the
position of the score or at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashgen.shared.errors import InputError
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.tensor import Tensor


class GivenTensor(NamedTuple):
    """A tensor [batch, heads, seq_q, seq_k] of one call: a position bias, or a mask of the user.

    Attributes:
        name: its name as an argument of the operator.
        dtype: a torch dtype; a bool tensor is a mask, and any other is added to the scores.
        grad: whether it is learned.
        expanded: for each dimension, whether it has one element that holds for all.
    """

    name: str
    dtype: torch.dtype
    grad: bool
    expanded: tuple[bool, bool, bool, bool]


class Start(NamedTuple):
    """How a call gives the positions of its first query and key: "" for 0, "number", or a dtype."""

    q: str = ""
    k: str = ""


def given_tensor(
    name: str, tensor: torch.Tensor, sizes: tuple[int, ...], captures: dict[str, Any]
) -> tuple[Any, ...]:
    """The fields of a `GivenTensor`; the tensor joins ``captures``.

    They are plain values, which torch.compile takes as constants.

    Args:
        sizes: batch, heads, queries and keys; a tensor for a longer cache may have more keys.

    Raises:
        InputError: the tensor does not broadcast to the scores.
    """
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.float32)
    shape = tensor.shape
    fits = tensor.dim() == 4 and all(
        length == 1 or (length >= size if axis == 3 else length == size)
        for axis, (length, size) in enumerate(zip(shape, sizes, strict=False))
    )
    if not fits:
        raise InputError(
            f"{name} does not broadcast to the scores",
            where=f"argument {name} of the attention function",
            numbers=f"shape {tuple(shape)}; scores have {tuple(sizes)}",
            way_out="[batch or 1, heads or 1, seq_q or 1, seq_k]",
        )
    captures[name] = tensor
    expanded = shape[0] == 1, shape[1] == 1, shape[2] == 1, shape[3] == 1
    return name, tensor.dtype, tensor.requires_grad, expanded


def element(score_tensor: GivenTensor, start: Start) -> Callable[..., Any]:
    """The element of a tensor that belongs to a score; its indices count from the call's first."""
    dims = tuple(f"{score_tensor.name}_{axis}" for axis in ("batch", "heads", "q", "k"))
    tensor = Tensor(score_tensor.name, dims, dtype_name(score_tensor.dtype), grad=score_tensor.grad)

    def element_at(b: Any, h: Any, q: Any, k: Any) -> Any:
        local = b, h, from_start("q_start", start.q, q), from_start("k_start", start.k, k)
        dimensions = zip(score_tensor.expanded, local, strict=True)
        return tensor[tuple(0 if expanded else index for expanded, index in dimensions)]

    return element_at


def from_start(name: str, kind: str, position: Any) -> Any:
    """A position, counted from the call's first, which the call gives under a name."""
    if not kind:
        return position
    if kind == "number":
        return position - Scalar(name, "int32")
    return position - Tensor(name, (), kind)[()]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
