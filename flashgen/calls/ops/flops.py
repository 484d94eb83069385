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


def register_flops(signature: CallSignature, packet: Any, packet_backward: Any) -> None:
    """Registers the formulas of an operator with torch."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        return 2 * _pairs(signature, q, k, rest) * (q.shape[3] + v.shape[3])

    def backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
        # S again, dQ and dK over head_dim; dP and dV over head_dim_v.
        return 2 * _pairs(signature, q, k, rest) * (3 * q.shape[3] + 2 * v.shape[3])

    register: Callable[..., Any] = register_flop_formula
    formulas = {packet: forward, packet_backward: backward}
    for target, formula in formulas.items():
        register(target, get_raw=True)(formula)
    # A counter copies the formulas when it is made; operators may be made inside it.
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(known, dict):
            known.update(formulas)


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
