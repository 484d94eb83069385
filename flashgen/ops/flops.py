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

from flashgen.signature import BOUNDARIES, CallSignature

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
    pairs = batch * seq_q * k.shape[2]
    if signature.packed:
        names = [tensor.name for tensor in signature.tensors]
        ends = [captured[names.index(boundary)] for boundary in BOUNDARIES]
        if not isinstance(ends[0], FakeTensor):
            pairs = int((ends[0].long().diff() * ends[1].long().diff()).sum())
    return int(heads * pairs)
