"""Costly masks and scores as flex_attention takes them, at the sizes of benchmarks/flex_kernels.py.

Those of specs/ are the same functions as there, which a test checks. FIRE has no spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.variants import FORMS, Mask, Score

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 8, 2048, 64
FIRE_HIDDEN = 8
T5_STARTS = (12, 16, 23, 32, 46, 64, 91)

Tensors = Callable[..., torch.Tensor]
"""(name, shape, dtype) -> a captured tensor."""
Mods = tuple[Mask | None, Score | None]


def _of_form(name: str) -> Callable[[Tensors], Mods]:
    def mods(tensors: Tensors) -> Mods:
        form = FORMS[name]
        made = form.mods(LENGTH, LENGTH, HEADS, form.scalars(LENGTH))
        return made.mask, made.score

    return mods


def _document(tensors: Tensors) -> Mods:
    ids = tensors("ids", (BATCH, LENGTH), torch.int32)

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, q] == ids[b, k]

    return document, None


def _t5_bias(tensors: Tensors) -> Mods:
    table = tensors("table", (HEADS, 32), torch.float32)

    def t5_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        size = (k - q).abs()
        far = 8 + sum(torch.where(size >= start, 1, 0) for start in T5_STARTS)
        bucket = torch.where(k - q > 0, 16, 0) + torch.where(size < 8, size, far)
        return score + table[h, bucket]

    return None, t5_bias


def _relative_bias(tensors: Tensors) -> Mods:
    table = tensors("table", (2 * LENGTH,), torch.float32)

    def relative_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[q - k + LENGTH - 1]

    return None, relative_bias


def _fire(tensors: Tensors) -> Mods:
    """A learned network of one hidden layer, of the relative position.

    Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context
    Transformers", 2024.
    """
    slope, threshold = (tensors(name, (), torch.float32) for name in ("slope", "threshold"))
    weight, bias = (tensors(name, (FIRE_HIDDEN,), torch.float32) for name in ("weight", "bias"))
    output = tensors("output", (HEADS, FIRE_HIDDEN), torch.float32)

    def fire(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        longest = torch.maximum(q, threshold.abs())
        place = torch.log((slope * (q - k)).abs() + 1) / torch.log((slope * longest).abs() + 1)
        for i in range(FIRE_HIDDEN):
            at = 0 * h + i  # a tensor, because Inductor cannot lower a number as an index
            score = score + output[h, at] * torch.relu(weight[at] * place + bias[at])
        return score

    return (lambda b, h, q, k: q >= k), fire


MODS: dict[str, Callable[[Tensors], Mods]] = {
    "causal": _of_form("causal"),
    "natten_2d": _of_form("natten_2d"),
    "block_diffusion": _of_form("block_diffusion"),
    "document": _document,
    "t5_bias": _t5_bias,
    "relative_bias": _relative_bias,
    "fire": _fire,
}
