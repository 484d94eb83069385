"""FlashAttention-4, the kernels of the package flash-attn-4 for Hopper and Blackwell.

Masks and scores that are functions reach the same kernels by FlexAttention's FLASH backend
(`benchmarks.suite.contenders.flex`); here are those for which the package has arguments.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor, learned, passes_of
from benchmarks.suite.contenders.libraries import FA4, named
from benchmarks.suite.device import Device

# The first call of a kernel compiles it for ten seconds; a kernel on disk serves every process.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


class FlashAttention:
    ours = False

    def __init__(self, *, deterministic: bool = False) -> None:
        self.name = "FlashAttention-4" + (" deterministic" if deterministic else "")
        self.deterministic = deterministic

    def library(self, device: Device) -> str:
        return f"{FA4.on(device)}; {named('torch')}"

    def supports(self, case: Case, device: Device) -> str | None:
        mods = case.mods
        if case.dtype == "float32":
            return "16-bit operands only"
        if mods.dropout:
            return "it has no dropout"
        if mods.starts is None and mods.mask is not None and mods.band is None:
            return "its mask is no band of keys"
        if mods.score is not None and not mods.cap:
            return "its score function is no cap"
        if mods.mask is not None and case.seq_q != case.seq_k:
            return "its bands begin at the last query and key"
        if self.deterministic and case.seq_q == 1:
            return "decoding has no gradients"
        if device.kind == "gpu" and not (case.key or mods.plain):
            return "it takes too long to compile for every variant: the main ones only"
        reason = FA4.missing(device)
        return reason if reason is not None else self._lacks(case, device)

    def _lacks(self, case: Case, device: Device) -> str | None:
        function, options = self._call(case, device)
        parameters = inspect.signature(function).parameters
        unknown = sorted(set(options) - set(parameters))
        return f"this version has no argument {', '.join(unknown)}" if unknown else None

    def _call(self, case: Case, device: Device) -> tuple[Any, dict[str, Any]]:
        """The function of the package, and its arguments beside q, k and v."""
        package, captured = FA4.load(device), case.tensors(device.torch)
        mods = case.mods_of({**dict(case.scalars), **captured})
        options: dict[str, Any] = {"deterministic": self.deterministic, "causal": False}
        if mods.starts is not None:
            longest = int((mods.starts[1:] - mods.starts[:-1]).max())
            options |= {"cu_seqlens_q": mods.starts, "cu_seqlens_k": mods.starts, "causal": True}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        elif mods.is_causal:
            options["causal"] = True
        elif mods.mask is not None:
            options["window_size"] = mods.band
        if mods.cap:
            options["softcap"] = mods.cap
        if mods.sink is not None:
            options["learnable_sink"] = mods.sink
        packed = mods.starts is not None
        return (package.flash_attn_varlen_func if packed else package.flash_attn_func), options

    def prepare(self, case: Case, device: Device) -> Prepared:
        function, options = self._call(case, device)
        packed = "cu_seqlens_q" in options
        sink = options.get("learnable_sink")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Its operands are [batch, rows, heads, d], packed ones [rows, heads, d].
            rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
            operands = (tensor[0] for tensor in rows) if packed else rows
            results = function(*operands, **options)
            out: Tensor = results[0] if isinstance(results, tuple) else results
            return (out[None] if packed else out).transpose(1, 2)

        passes = passes_of(case, deterministic=self.deterministic)
        return Prepared(attend, passes, learned=learned({} if sink is None else {"sink": sink}))
