"""torch.nn.functional.scaled_dot_product_attention, each of its backends by itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Contender, Prepared, Tensor
from benchmarks.suite.device import Device

MOST_MEMORY = 0.25
"""Share of the device's that a mask or the scores may take."""


class Sdpa:
    ours = False

    """One backend, or None for the one that torch chooses."""

    def __init__(self, short: str, backend: SDPBackend | None) -> None:
        self.name = f"sdpa {short}"
        self._backend = backend
        self._materialises = backend == SDPBackend.MATH

    def supports(self, case: Case, device: Device) -> str | None:
        if device.kind != "gpu" and self._backend not in (None, SDPBackend.MATH):
            return "needs a GPU"
        mods = case.mods
        plain = mods.score is None and (mods.mask is None or mods.is_causal)
        if mods.score is not None and not mods.additive:
            return "its score function is no bias"
        if mods.additive and case.dtype != "float32":
            # alibi's bias of 4096 is wrong by up to 16 in bfloat16.
            return f"it would round the bias to {case.dtype}"
        if mods.is_causal and case.seq_q != case.seq_k:
            return "its causal mask is for square problems"
        if not plain and self._backend == SDPBackend.FLASH_ATTENTION:
            return "this backend takes no mask"
        if self._backend == SDPBackend.EFFICIENT_ATTENTION and case.heads_q != case.heads_kv:
            return "this backend has no grouped heads"
        size = 0
        if not plain:
            size = (2 * case.heads_q if mods.additive else 1) * case.seq_q * case.seq_k
        if self._materialises:
            size += 4 * 4 * case.scores  # four matrices in float32
        if size > MOST_MEMORY * device.memory_bytes:
            return f"needs {size / 2**30:.0f} GiB for the scores or their mask"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        mods, backend = case.mods, self._backend
        mask = None if mods.is_causal else dense_mask(case, device)
        causal, grouped = mods.is_causal, case.heads_q != case.heads_kv

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

        if backend is None:
            return Prepared(plain)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return plain(q, k, v)

        return Prepared(attend, materialises=self._materialises)


def sdpas() -> list[Contender]:
    return [
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
        Sdpa("math", SDPBackend.MATH),
    ]


def dense_mask(case: Case, device: Device) -> Tensor | None:
    """Mask and bias of a case as one tensor: bool [seq_q, seq_k], or a bias of every head."""
    mods = case.mods
    if mods.mask is None and mods.score is None:
        return None
    place: dict[str, Any] = {"device": device.torch, "dtype": torch.int64}
    b = torch.zeros((), **place)
    q = torch.arange(case.seq_q, **place)[:, None]
    k = torch.arange(case.seq_k, **place)[None, :]
    kept = None if mods.mask is None else mods.mask(b, b, q, k)
    if mods.score is None:
        return kept
    dtype = getattr(torch, case.dtype)
    zero = torch.zeros((), device=device.torch)
    bias = torch.stack(
        [mods.score(zero, b, torch.tensor(h, **place), q, k).to(dtype) for h in range(case.heads_q)]
    )[None]
    return bias if kept is None else bias.masked_fill(~kept, -math.inf)
