"""Standard attention: three torch operations with the whole matrix of scores in memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor
from benchmarks.suite.device import Device
from flashgen.shared.dtypes import ITEMSIZE

COPIES = 6
"""Matrices of the size of S that are alive at once in a backward pass."""


class Standard:
    name = "standard"
    ours = False

    def supports(self, case: Case, device: Device) -> str | None:
        size = COPIES * ITEMSIZE[case.dtype] * case.scores
        if size > 0.25 * device.memory_bytes:
            return f"its scores need {size / 2**30:.0f} GiB"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        mods, scale = case.mods, case.head_dim**-0.5
        place: dict[str, Any] = {"device": device.torch, "dtype": torch.int64}
        groups = (case.batch, case.heads_kv, case.heads_q // case.heads_kv)
        b = torch.arange(case.batch, **place)[:, None, None, None, None]
        h = torch.arange(case.heads_q, **place).view(1, *groups[1:], 1, 1)
        rows = torch.arange(case.seq_q, **place)[:, None]
        keys = torch.arange(case.seq_k, **place)[None, :]
        dropped = None if mods.mask is None else ~mods.mask(b, h, rows, keys)
        # Rows without a key, if the mask has any: softmax would make NaN of them.
        empty = None if dropped is None else dropped.all(dim=-1, keepdim=True)
        if empty is not None and not empty.any():
            empty = None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.view(*groups, *q.shape[2:])
            scores = torch.matmul(grouped, k[:, :, None].mT) * scale
            if mods.score is not None:
                scores = mods.score(scores, b, h, rows, keys).to(q.dtype)
            if dropped is not None:
                scores = scores.masked_fill(dropped, -math.inf)
            if empty is not None:
                scores = scores.masked_fill(empty, 0)
            weights = torch.softmax(scores, dim=-1)
            if empty is not None:
                weights = weights.masked_fill(empty, 0)
            return torch.matmul(weights, v[:, :, None]).reshape(q.shape)

        return Prepared(attend, materialises=True)
