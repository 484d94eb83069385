"""torch's FlexAttention, compiled, with the block mask that its own function makes."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor
from benchmarks.suite.device import Device


class Flex:
    """Compiled for the shape at hand (dynamic=False), as its documentation advises for speed."""

    name = "flex"
    ours = False

    def supports(self, case: Case, device: Device) -> str | None:
        if not case.key and device.kind == "gpu":
            return "it takes too long to compile for every shape: the main ones only"
        if case.head_dim < 16:
            return "head dims below 16 are refused"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mods, on_gpu = case.mods, device.kind == "gpu"
        block_mask = None
        if mods.mask is not None:
            block_mask = create_block_mask(
                mods.mask, None, None, case.seq_q, case.seq_k, device=device.torch
            )
        call: Any = flex_attention
        if on_gpu:
            # Without this torch.compile gives up after eight kernels and runs the rest unfused.
            torch._dynamo.reset()
            # A backward pass that is timed again and again must keep its inputs.
            torch._functorch.config.donated_buffer = False
            call = torch.compile(flex_attention, dynamic=False)
        score, grouped = mods.score, case.heads_q != case.heads_kv

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result: Tensor = call(
                q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped
            )
            return result

        def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q.detach(), k.detach(), v.detach())

        # On the CPU it has no backward pass.
        return Prepared(attend) if on_gpu else Prepared(forward_only, ("forward",))
