"""Layouts, costly masks and scores as flex_attention takes them, for benchmarks/flex_kernels.py.

Those of specs/ and of benchmarks/invented.py are the same functions as there, which a test checks.
FIRE has no spec. Numbers that calls give, such as a stride, are Python's, as most users write them,
or tensors of one element (`IN_TENSORS` behind the name), so that no kernel has them as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import invented
from benchmarks.variants import FORMS, Form, Mask, Score

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 8, 2048, 64
FIRE_HIDDEN = 8
T5_STARTS = (12, 16, 23, 32, 46, 64, 91)

Tensors = Callable[..., torch.Tensor]
"""(name, shape, dtype) -> a captured tensor."""
Mods = tuple[Mask | None, Score | None]


IN_TENSORS = "+numbers in tensors"


def _of_form(form: Form, in_tensors: bool = False) -> Callable[[Tensors], Mods]:
    def mods(tensors: Tensors) -> Mods:
        given: dict[str, Any] = form.scalars(LENGTH)
        if in_tensors:
            given = {name: tensors(name, (), torch.int32) for name in given}
        made = form.mods(LENGTH, LENGTH, HEADS, given)
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


LAYOUTS = ("butterfly", "bigbird", "local_global", *invented.LAYOUTS)
DIVIDED = ("strided", "dilated_window", "natten_2d", "block_diffusion", *invented.DIVIDED)
ALL_FORMS = {**FORMS, **invented.FORMS}

MODS: dict[str, Callable[[Tensors], Mods]] = {
    **{name: _of_form(ALL_FORMS[name]) for name in ("causal", *LAYOUTS, *DIVIDED)},
    "document": _document,
    "t5_bias": _t5_bias,
    "relative_bias": _relative_bias,
    "fire": _fire,
}
MODS |= {name + IN_TENSORS: _of_form(ALL_FORMS[name], in_tensors=True) for name in DIVIDED}
