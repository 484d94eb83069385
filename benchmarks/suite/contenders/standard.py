"""Standard attention: three torch operations with the whole matrix of scores in memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor, learned
from benchmarks.suite.contenders.libraries import named
from benchmarks.suite.device import Device
from flashgen.shared.dtypes import ITEMSIZE

COPIES = 6
"""Matrices of the size of S that are alive at once in a backward pass."""


class Standard:
    name = "standard"
    ours = False

    def library(self, device: Device) -> str:
        return named("torch")

    def supports(self, case: Case, device: Device) -> str | None:
        size = COPIES * ITEMSIZE[case.dtype] * case.scores
        if size > 0.25 * device.memory_bytes:
            return f"its scores need {size / 2**30:.0f} GiB"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        captured, scale = case.tensors(device.torch), case.head_dim**-0.5
        mods = case.mods_of({**dict(case.scalars), **captured})
        index_options: dict[str, Any] = {"device": device.torch, "dtype": torch.int64}
        groups = (case.batch, case.heads_kv, case.heads_q // case.heads_kv)
        b = torch.arange(case.batch, **index_options)[:, None, None, None, None]
        h = torch.arange(case.heads_q, **index_options).view(1, *groups[1:], 1, 1)
        rows = torch.arange(case.seq_q, **index_options)[:, None]
        keys = torch.arange(case.seq_k, **index_options)[None, :]
        dropped = None if mods.mask is None else ~mods.mask(b, h, rows, keys)
        # Rows without a key, if the mask has any: softmax would make NaN of them.
        empty = None if dropped is None else dropped.all(dim=-1, keepdim=True)
        if empty is not None and not empty.any():
            empty = None
        sink = None if mods.sink is None else mods.sink.view(*groups[1:], 1, 1)

        def attend(q: Tensor, k: Tensor, v: Tensor, p: float = mods.dropout) -> Tensor:
            grouped = q.view(*groups, *q.shape[2:])
            scores = torch.matmul(grouped, k[:, :, None].mT) * scale
            if mods.score is not None:
                scores = mods.score(scores, b, h, rows, keys).to(q.dtype)
            if dropped is not None:
                scores = scores.masked_fill(dropped, -math.inf)
            if empty is not None:
                scores = scores.masked_fill(empty, 0)
            if sink is not None:
                column = sink.to(q.dtype).expand(*scores.shape[:-1], 1)
                scores = torch.cat((scores, column), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
            if p:
                weights = torch.nn.functional.dropout(weights, p)
            if empty is not None:
                weights = weights.masked_fill(empty, 0)
            return torch.matmul(weights, v[:, :, None]).reshape(*q.shape[:-1], v.shape[-1])

        undropped = functools.partial(attend, p=0.0) if mods.dropout else None
        return Prepared(attend, materialises=True, learned=learned(captured), undropped=undropped)
