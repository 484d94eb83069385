"""FlashInfer's decoding: one query per sequence over a cache of pages."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor
from benchmarks.suite.contenders.libraries import FLASHINFER, named
from benchmarks.suite.contenders.served import PAGE, pages_of, table_of
from benchmarks.suite.device import Device

WORKSPACE = 128 << 20
"""Bytes, as its documentation recommends."""


class FlashInfer:
    name = "FlashInfer paged"
    ours = False

    def library(self, device: Device) -> str:
        return f"{FLASHINFER.on(device)}; {named('torch')}"

    def supports(self, case: Case, device: Device) -> str | None:
        mods = case.mods
        if case.seq_q != 1 or case.seq_k % PAGE:
            return f"for decoding, with keys in whole pages of {PAGE}"
        if mods.mask is not None or mods.sink is not None or mods.score is not None:
            return "plain attention alone is measured"
        if case.dtype == "float32" or case.head_dim not in (64, 128, 256):
            return "16-bit operands with head dim 64, 128 or 256 only"
        return FLASHINFER.missing(device)

    def prepare(self, case: Case, device: Device) -> Prepared:
        package, dtype = FLASHINFER.load(device), getattr(torch, case.dtype)
        size = WORKSPACE if device.kind == "gpu" else 1
        workspace = torch.zeros(size, dtype=torch.uint8, device=device.torch)
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        table = table_of(case, device.torch)
        count = torch.arange(case.batch + 1, dtype=torch.int32, device=device.torch)
        options: dict[str, Any] = {"q_data_type": dtype, "kv_data_type": dtype}
        wrapper.plan(
            count * table.shape[1],
            table.reshape(-1),
            torch.full((case.batch,), PAGE, dtype=torch.int32, device=device.torch),
            *(case.heads_q, case.heads_kv, case.head_dim, PAGE),
            **options,
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = wrapper.run(q[:, :, 0], (pages_of(k), pages_of(v)))
            return out[:, :, None]

        return Prepared(attend, ("forward",))
