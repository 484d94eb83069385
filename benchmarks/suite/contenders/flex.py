"""torch's FlexAttention, compiled, with the block mask that its own function makes.

Numbers that are arguments of flashgen's calls are tensors here, which its kernels read as well, and
no constants of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Contender, Prepared, Tensor, learned, passes_of
from benchmarks.suite.contenders.libraries import FA4, FLEX_FLASH, TRITON, named
from benchmarks.suite.device import Device


class Flex:
    """Compiled for the shape at hand (dynamic=False), as its documentation advises for speed.

    Args:
        flash: whether FlashAttention-4's kernels take the place of Triton's.
        autotune: whether torch tries all tiles that it knows, for a minute and more.
    """

    ours = False

    def __init__(self, *, flash: bool = False, autotune: bool = False) -> None:
        self.name = "flex" + " flash" * flash + " max-autotune" * autotune
        self._flash, self._autotune = flash, autotune

    def library(self, device: Device) -> str:
        if device.kind != "gpu":
            return named("torch")
        return f"{named('torch')}; {(FA4 if self._flash else TRITON).text}"

    def supports(self, case: Case, device: Device) -> str | None:
        on_gpu, slow = device.kind == "gpu", self._flash or self._autotune
        if on_gpu and not (case.main if slow else case.key):
            return "it takes too long to compile for every shape: the main ones only"
        if case.head_dim < 16:
            return "head dims below 16 are refused"
        if case.mods.dropout:
            return "it has no dropout"
        if not (on_gpu and self._flash):
            return None
        return FLEX_FLASH.missing(device) or FA4.missing(device)

    def prepare(self, case: Case, device: Device) -> Prepared:
        from torch.nn.attention.flex_attention import (
            AuxRequest,
            create_block_mask,
            flex_attention,
        )

        on_gpu, captured = device.kind == "gpu", case.tensors(device.torch)
        mods = case.mods_of({**case.numbers(device.torch), **captured})
        block_mask = None
        if mods.mask is not None:
            block_mask = create_block_mask(
                mods.mask, None, None, case.seq_q, case.seq_k, device=device.torch
            )
        call: Any = flex_attention
        options: dict[str, Any] = {}
        if on_gpu:
            # Without this torch.compile gives up after eight kernels and runs the rest unfused.
            torch._dynamo.reset()
            # A backward pass that is timed again and again must keep its inputs.
            torch._functorch.config.donated_buffer = False
            mode = "max-autotune-no-cudagraphs" if self._autotune else None
            call = torch.compile(flex_attention, dynamic=False, mode=mode)
            options = {"BACKEND": "FLASH"} if self._flash else {}
        score, grouped, sink = mods.score, case.heads_q != case.heads_kv, mods.sink

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            results = call(
                *(q, k, v),
                score_mod=score,
                block_mask=block_mask,
                enable_gqa=grouped,
                return_aux=None if sink is None else AuxRequest(lse=True),
                kernel_options=options or None,
            )
            if sink is None:
                result: Tensor = results
                return result
            # A sink takes a share of each row's weights that its log-sum-exp knows.
            out, aux = results
            share = torch.sigmoid(aux.lse - sink[:, None])
            return (out * share[..., None]).to(out.dtype)

        def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.no_grad():
                return attend(q.detach(), k.detach(), v.detach())

        # On the CPU it has no backward pass.
        if not on_gpu:
            return Prepared(forward_only, ("forward",))
        return Prepared(attend, passes_of(case), learned=learned(captured))


def flexes() -> list[Contender]:
    return [Flex(), Flex(flash=True), Flex(autotune=True)]
