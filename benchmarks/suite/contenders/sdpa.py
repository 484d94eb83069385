"""torch.nn.functional.scaled_dot_product_attention, each of its backends by itself."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.suite.cases import PASSES, Case
from benchmarks.suite.contenders import Contender, Prepared, Tensor, learned
from benchmarks.suite.contenders.libraries import FA3, FA4, cudnn_text, named
from benchmarks.suite.device import Device

MOST_MEMORY = 0.25
"""Share of the device's that a mask or the scores may take."""


class Sdpa:
    """One backend, or None for the one that torch chooses.

    Args:
        dense: whether it is for masks that become a tensor, and not for plain ones; None for both.
        implementation: which kernels are behind torch's flash backend: None for torch's own.
    """

    ours = False

    def __init__(
        self,
        name: str,
        backend: SDPBackend | None,
        *,
        dense: bool | None = None,
        implementation: str | None = None,
    ) -> None:
        self.name = name
        self._backend, self._dense, self._implementation = backend, dense, implementation
        self._materialises = backend == SDPBackend.MATH

    def library(self, device: Device) -> str:
        if self._backend == SDPBackend.CUDNN_ATTENTION:
            return f"{cudnn_text()}; {named('torch')}"
        behind = {"FA4": FA4, "FA3": FA3}.get(self._implementation or "")
        return f"{behind.text}; {named('torch')}" if behind else named("torch")

    def supports(self, case: Case, device: Device) -> str | None:
        if device.kind != "gpu" and self._backend not in (None, SDPBackend.MATH):
            return "needs a GPU"
        mods = case.mods
        plain = mods.plain
        if mods.sink is not None:
            return "it has no sinks"
        if mods.score is not None and not mods.additive:
            return "its score function is no bias"
        if mods.additive and case.dtype != "float32":
            # alibi's bias of 4096 is wrong by up to 16 in bfloat16.
            return f"it would round the bias to {case.dtype}"
        if mods.additive and learned(case.tensors(torch.device("cpu"))):
            return "its bias would be a tensor whose gradient is not that of the case"
        if mods.is_causal and case.seq_q != case.seq_k:
            return "its causal mask is for square problems"
        if not plain and self._backend == SDPBackend.FLASH_ATTENTION:
            return "this backend takes no mask"
        if self._dense is not None and self._dense == plain:
            return f"for {'masks that torch passes as tensors' if plain else 'plain attention'}"
        if self._backend == SDPBackend.EFFICIENT_ATTENTION and case.heads_q != case.heads_kv:
            return "this backend has no grouped heads"
        size = 0
        if not plain:
            size = (2 * case.heads_q if mods.additive else 1) * case.seq_q * case.seq_k
        if self._materialises:
            size += 4 * 4 * case.scores  # four matrices in float32
        if size > MOST_MEMORY * device.memory_bytes:
            return f"needs {size / 2**30:.0f} GiB for the scores or their mask"
        return self._lacks()

    def _lacks(self) -> str | None:
        if self._implementation is None:
            return None
        if self._implementation not in implementations():
            return "this torch has no other kernels for its flash backend"
        return {"FA4": FA4, "FA3": FA3}[self._implementation].missing_module()

    def prepare(self, case: Case, device: Device) -> Prepared:
        mods, backend = case.mods, self._backend
        causal, grouped = mods.is_causal and mods.plain, case.heads_q != case.heads_kv
        mask = None if causal else dense_mask(case, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, p: float = mods.dropout) -> Tensor:
            if backend == SDPBackend.FLASH_ATTENTION:
                use(self._implementation)
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=grouped
                )

        # A backward pass alone would meet the kernels that another contender has put in place.
        passes = PASSES if self._implementation is None else ("forward", "both")
        undropped = functools.partial(attend, p=0.0) if mods.dropout else None
        return Prepared(attend, passes, materialises=self._materialises, undropped=undropped)


def implementations() -> list[str]:
    """The kernels that torch knows for its flash backend, beside its own."""
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    return [] if listed is None else listed()


def use(implementation: str | None) -> None:
    """Puts these kernels behind torch's flash backend, for the whole process: 0.1 ms."""
    if not implementations():
        return
    attention = torch.nn.attention
    if implementation == attention.current_flash_attention_impl():
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


def sdpas() -> list[Contender]:
    return [
        Sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION, dense=False),
        Sdpa("cuDNN through torch, dense mask", SDPBackend.CUDNN_ATTENTION, dense=True),
        Sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa FA4", SDPBackend.FLASH_ATTENTION, implementation="FA4"),
        Sdpa("sdpa FA3", SDPBackend.FLASH_ATTENTION, implementation="FA3"),
        Sdpa("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION),
        Sdpa("sdpa math", SDPBackend.MATH),
    ]


def dense_mask(case: Case, device: Device) -> Tensor | None:
    """Mask and bias of a case as one tensor: bool [seq_q, seq_k], or a bias of every head."""
    mods = case.mods_of({**dict(case.scalars), **case.tensors(device.torch)})
    if mods.mask is None and mods.score is None:
        return None
    index_options: dict[str, Any] = {"device": device.torch, "dtype": torch.int64}
    b = torch.zeros((), **index_options)
    q = torch.arange(case.seq_q, **index_options)[:, None]
    k = torch.arange(case.seq_k, **index_options)[None, :]
    keeps = None if mods.mask is None else mods.mask(b, b, q, k)
    if mods.score is None:
        return keeps
    dtype = getattr(torch, case.dtype)
    zero = torch.zeros((), device=device.torch)
    bias = torch.stack(
        [
            mods.score(zero, b, torch.tensor(h, **index_options), q, k).to(dtype)
            for h in range(case.heads_q)
        ]
    )[None]
    return bias if keeps is None else bias.masked_fill(~keeps, -math.inf)
