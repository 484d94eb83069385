"""Fused attention in Triton, forward only, as it is commonly written on one page.

The algorithm is FlashAttention-2's (Dao, 2023, algorithm 1): a program owns BLOCK_Q rows, walks
over the keys with a running maximum and normaliser, and divides once at the end. Full tiles and
those on the diagonal of a causal mask have loops of their own: only the latter compare positions.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor
from benchmarks.suite.contenders.libraries import TRITON
from benchmarks.suite.device import Device

HEAD_DIMS = (16, 32, 64, 128, 256)
LOG2_E = 1.4426950408889634

TILES = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
"""head_dim -> (BLOCK_Q, BLOCK_K, warps, stages); (64, 32, 4, 2) for any other."""

_kernels: dict[str, Any] = {}


def interpreted() -> bool:
    """Triton executes kernels on CPU tensors, where this variable says so."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonFused:
    name = "triton"
    ours = False

    def library(self, device: Device) -> str:
        return TRITON.text

    def supports(self, case: Case, device: Device) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device.kind != "gpu" and not interpreted():
            return "needs a GPU, or TRITON_INTERPRET=1"
        if device.kind != "gpu" and case.dtype == "bfloat16":
            return "numpy, which interprets the kernel, has no bfloat16"
        mods = case.mods
        if not mods.plain or mods.dropout:
            return "full and causal attention only"
        if case.head_dim not in HEAD_DIMS or case.head_dim_v != case.head_dim:
            return f"head_dim one of {', '.join(map(str, HEAD_DIMS))}"
        if case.dtype == "float32":
            return "16-bit operands only"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        import triton

        causal = case.mods.is_causal
        block_q, block_k, warps, stages = TILES.get(case.head_dim, (64, 32, 4, 2))
        grid = (triton.cdiv(case.seq_q, block_q), case.batch * case.heads_q)
        kernel = make_kernel()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            kernel[grid](
                *(q, k, v, out),
                *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
                *(case.heads_q, case.heads_q // case.heads_kv, case.seq_q, case.seq_k),
                case.head_dim**-0.5 * LOG2_E,
                HEAD_DIM=case.head_dim,
                BLOCK_Q=block_q,
                BLOCK_K=block_k,
                CAUSAL=causal,
                num_warps=warps,
                num_stages=stages,
            )
            return out

        return Prepared(attend, ("forward",))


def make_kernel() -> Any:
    """The kernel, made when it is first needed: importing Triton is slow, and it may be missing."""
    if "forward" not in _kernels:
        from benchmarks.suite.contenders.triton_kernel import attention_forward

        _kernels["forward"] = attention_forward
    return _kernels["forward"]
