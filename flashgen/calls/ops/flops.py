"""Floating-point operations of the operators, for torch.utils.flop_counter.FlopCounterMode.

They are counted as torch counts its own attention: two per multiply-add of the matrix products,
over all pairs of queries and keys, masked ones included. Packed sequences have the pairs of each
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import register_flop_formula

from flashgen.shared.signature import PAGE_NAMES, CallSignature

Tensor = torch.Tensor


def register_flops(
    signature: CallSignature, packet: Any, packet_backward: Any, tangent: Any, second: Any
) -> None:
    """Registers the formulas of the operators of a spec with torch.

    Args:
        tangent, second: the operators of the tangent passes, forward and backward.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_: Any) -> int:
        return 2 * _pairs(signature, q, k, arguments) * (q.shape[3] + v.shape[3])

    def backward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_: Any) -> int:
        # S again, dQ and dK over head_dim; dP and dV over head_dim_v.
        return 2 * _pairs(signature, q, k, arguments) * (3 * q.shape[3] + 2 * v.shape[3])

    def moving(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
        """The captured tensors, and the lists of tangents and of results."""
        tangents_index = next(i for i, x in enumerate(arguments) if isinstance(x, list | tuple))
        return arguments[:tangents_index], arguments[tangents_index], arguments[tangents_index + 1]

    def tangent_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_: Any) -> int:
        # S, and S' of q and of k; with V a product for the tangents of scores, and one of V.
        captured, (q_tangent, k_tangent, v_tangent, *learned), _results = moving(arguments)
        score_tangents = _count_present(q_tangent) + _count_present(k_tangent)
        with_v = bool(score_tangents or _count_present(*learned)) + _count_present(v_tangent)
        columns = (1 + score_tangents) * q.shape[3] + with_v * v.shape[3]
        return 2 * _pairs(signature, q, k, captured) * columns

    def second_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **by_name: Any) -> int:
        # S, S', and the tangents of dQ and dK over head_dim; those of dP and dV over head_dim_v.
        captured, (q_tangent, k_tangent, v_tangent, *_), results = moving(arguments)
        score_tangents = _count_present(q_tangent) + _count_present(k_tangent)
        dout_tangents = _count_present(results[6])
        over_v = 2 + _count_present(v_tangent) + 2 * dout_tangents
        columns = (3 + 2 * score_tangents) * q.shape[3] + over_v * v.shape[3]
        flops = 2 * _pairs(signature, q, k, captured) * columns
        if _count_present(*results[4:6]) < 2:
            flops += tangent_flops(q, k, v, *arguments)
        return flops

    register: Callable[..., Any] = register_flop_formula
    formulas = {
        packet: forward,
        packet_backward: backward,
        tangent: tangent_flops,
        second: second_flops,
    }
    for target, formula in formulas.items():
        register(target, get_raw=True)(formula)
    # A counter copies the formulas when it is made; operators may be made inside it.
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registry.update(formulas)


def _count_present(*tensors: Any) -> int:
    """The number of tensors that are not None."""
    return sum(tensor is not None for tensor in tensors)


def _pairs(signature: CallSignature, q: Tensor, k: Tensor, captured: tuple[Any, ...]) -> int:
    """Pairs of a query and a key of the same sequence, over all heads."""
    batch, heads, seq_q, _ = q.shape
    tensors = dict(zip((tensor.name for tensor in signature.tensors), captured, strict=False))
    keys: Any = k.shape[2]
    if signature.paged:
        keys = tensors[PAGE_NAMES[0]].shape[1] * keys  # what the page table has room for
    if not (signature.packed or signature.paged) or any(map(_is_fake, tensors.values())):
        return int(heads * batch * seq_q * keys)
    ends = [tensors[name].long().diff() for name in signature.boundaries]
    rows = ends[0] if ends else seq_q
    keys = tensors[PAGE_NAMES[1]].long() if signature.paged else ends[1]
    return int(heads * (rows * keys).sum())


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)
