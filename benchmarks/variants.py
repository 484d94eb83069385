"""The specs of ``specs/`` in the form that FlexAttention takes: functions of torch tensors.

They are written by hand and not derived from the specs, so that FlexAttention, standard attention
and the oracle of the suite share nothing with the compiler. A test compares each with its spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Mask = Callable[..., Any]
"""(b, h, q, k) -> bool tensor; positions are integer tensors that broadcast."""
Score = Callable[..., Any]
"""(score, b, h, q, k) -> tensor."""

CHUNK = 100  # of specs/block_causal.py
CAP = 50.0  # of specs/softcap.py


@dataclass(frozen=True)
class Mods:
    """Mask and score of one problem; None where the spec has none.

    Attributes:
        is_causal: whether the mask is q >= k, for which libraries have a switch.
        additive: whether the score function adds a value that does not depend on the score.
    """

    mask: Mask | None = None
    score: Score | None = None
    is_causal: bool = False
    additive: bool = False


@dataclass(frozen=True)
class Form:
    """One spec in torch.

    Attributes:
        mods: (seq_q, seq_k, heads, scalars) -> Mods.
        scalars: seq_k -> the run-time scalars that the suite uses at that length.
    """

    mods: Callable[[int, int, int, Mapping[str, Any]], Mods]
    scalars: Callable[[int], dict[str, Any]] = field(default=lambda seq_k: {})


def _full(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods()


def _causal(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: q >= k, is_causal=True)


def _causal_offset(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    ahead = seq_k - seq_q + given["shift"]
    return Mods(mask=lambda b, h, q, k: q + ahead >= k)


def _sliding_window(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    window = given["window"]
    return Mods(mask=lambda b, h, q, k: (q >= k) & (q - k < window))


def _dilated_window(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    window, dilation = given["window"], given["dilation"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = torch.abs(q - k)
        return (distance <= window) & (distance % dilation == 0)

    return Mods(mask=mask)


def _prefix_lm(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    prefix = given["prefix"]
    return Mods(mask=lambda b, h, q, k: (k < prefix) | (q >= k))


def _block_causal(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: q // CHUNK >= k // CHUNK)


def _strided(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    stride = given["stride"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = q - k
        return (q >= k) & ((distance < stride) | (distance % stride == 0))

    return Mods(mask=mask)


def _alibi(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.exp2(-8.0 * (h + 1) / heads) * (k - q)

    return Mods(score=score, additive=True)


def _softcap(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: CAP * torch.tanh(s / CAP))


def _symmetric_window(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    window = given["window"]
    return Mods(mask=lambda b, h, q, k: torch.abs(q - k) <= window)


def _longformer(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    window, first = given["window"], given["global_tokens"]
    return Mods(mask=lambda b, h, q, k: (torch.abs(q - k) <= window) | (k < first) | (q < first))


def _block_diagonal(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    chunk = given["chunk"]
    return Mods(mask=lambda b, h, q, k: q // chunk == k // chunk)


def _natten_2d(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    width, height, radius = given["width"], given["height"], given["radius"]

    def near(a: Any, b: Any, length: int) -> Any:
        return torch.abs(b - a.clamp(min=radius).clamp(max=length - 1 - radius)) <= radius

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        rows = near(q // width, k // width, height)
        return rows & near(q % width, k % width, width)

    return Mods(mask=mask)


def _block_diffusion(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    clean, block = given["clean"], given["block"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_noised, k_noised = q < clean, k < clean
        i, j = q % clean // block, k % clean // block
        itself = (i == j) & (q_noised == k_noised)
        return itself | ((i > j) & q_noised & ~k_noised) | ((i >= j) & ~q_noised & ~k_noised)

    return Mods(mask=mask)


def _empty_rows(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: (q < seq_q // 2) & (k >= 0))


def _distance_decay(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: s / (1 + 1e-4 * (q - k) ** 2))


def _squared(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: s * s)


def _butterfly(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        differ = (q // 64) ^ (k // 64)
        return (differ & (differ - 1)) == 0  # one bit at most

    return Mods(mask=mask)


def _bigbird(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        i, j = q // 32, k // 32
        mixed = ((i * 73856093) ^ (j * 19349663) ^ 2020) % 65536 * 40503 % 65536
        return (abs(i - j) <= 1) | (i < 1) | (j < 1) | (mixed < 8192)

    return Mods(mask=mask)


def _local_global(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        i, j = q // 32, k // 32
        return (q >= k) & ((i - j < 2) | (j < 1) | (j % 4 == 3))

    return Mods(mask=mask)


def _canvas(tokens: int) -> dict[str, Any]:
    """A canvas about as wide as high, with a neighbourhood of 13 x 13 where that fits."""
    width = max(1, math.isqrt(tokens))
    height = -(-tokens // width)
    return {"width": width, "height": height, "radius": min(6, (min(width, height) - 1) // 2)}


FORMS: dict[str, Form] = {
    "full": Form(_full),
    "causal": Form(_causal),
    "causal_offset": Form(_causal_offset, lambda n: {"shift": 0}),
    "sliding_window": Form(_sliding_window, lambda n: {"window": max(1, n // 8)}),
    "dilated_window": Form(_dilated_window, lambda n: {"window": max(1, n // 8), "dilation": 4}),
    "prefix_lm": Form(_prefix_lm, lambda n: {"prefix": n // 8}),
    "block_causal": Form(_block_causal),
    "strided": Form(_strided, lambda n: {"stride": max(1, n // 64)}),
    "alibi": Form(_alibi),
    "softcap": Form(_softcap),
    "symmetric_window": Form(_symmetric_window, lambda n: {"window": max(1, n // 8)}),
    "longformer": Form(_longformer, lambda n: {"window": max(1, n // 16), "global_tokens": 64}),
    "block_diagonal": Form(_block_diagonal, lambda n: {"chunk": max(1, n // 8)}),
    "natten_2d": Form(_natten_2d, _canvas),
    "block_diffusion": Form(_block_diffusion, lambda n: {"clean": max(1, n // 2), "block": 16}),
    "empty_rows": Form(_empty_rows),
    "distance_decay": Form(_distance_decay),
    "squared": Form(_squared),
    "butterfly": Form(_butterfly),
    "bigbird": Form(_bigbird),
    "local_global": Form(_local_global),
}
"""By the name of the spec's file. Specs that capture tensors are not measured yet."""


def live_elements(mods: Mods, batch: int, heads: int, seq_q: int, seq_k: int, device: Any) -> int:
    """The number of elements of S that the mask keeps, over all batch entries and heads.

    Masks must depend on q and k only, as all masks of `FORMS` do, because one head is counted.
    """
    if mods.mask is None:
        return batch * heads * seq_q * seq_k
    zero = torch.zeros((), dtype=torch.int64, device=device)
    k = torch.arange(seq_k, device=device)[None, :]
    rows = max(1, (1 << 26) // max(1, seq_k))
    kept = 0
    for first in range(0, seq_q, rows):
        q = torch.arange(first, min(first + rows, seq_q), device=device)[:, None]
        kept += int(mods.mask(zero, zero, q, k).sum())
    return batch * heads * kept
