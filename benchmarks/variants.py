"""The specs of ``specs/`` in the form that FlexAttention takes: functions of torch tensors.

A name such as "sliding_window+sink" is a spec that is made of several: the mask of one, the score
or the sink of another.

They are written by hand and not derived from the specs, so that FlexAttention, standard attention
and the oracle of the suite share nothing with the compiler. A test compares each with its spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

Mask = Callable[..., Any]
"""(b, h, q, k) -> bool tensor; positions are integer tensors that broadcast."""
Score = Callable[..., Any]
"""(score, b, h, q, k) -> tensor."""

CHUNK = 100  # of specs/block_causal.py
CAP = 50.0  # of specs/softcap.py


Band = tuple[Any, Any]
"""(left, right) of a mask that keeps q - left <= k <= q + right; None for no bound."""


@dataclass(frozen=True)
class Mods:
    """Mask and score of one problem; None where the spec has none.

    Attributes:
        band: the mask as a band, for which libraries have switches; None where it is none.
        additive: whether the score function adds a value that does not depend on the score.
        cap: c, where the score function is c tanh(s / c).
        slopes: whether it is ALiBi's.
        sink: float32 [heads], a logit of each head that joins the softmax's denominator.
        dropout: probability with which an element of P is dropped.
        starts: int32 [sequences + 1], the first row of each packed sequence, and the end. The mask
            and the score see rows of the one batch entry that holds all of them.
    """

    mask: Mask | None = None
    score: Score | None = None
    band: Band | None = None
    additive: bool = False
    cap: float = 0.0
    slopes: bool = False
    sink: Any = None
    dropout: float = 0.0
    starts: Any = None

    @property
    def is_causal(self) -> bool:
        """Whether the mask is q >= k."""
        return self.mask is not None and self.band == (None, 0)

    @property
    def plain(self) -> bool:
        """Whether it is attention with no mask or a causal one, and nothing else."""
        masked = self.mask is not None and not self.is_causal
        return not (masked or self.score or self.sink is not None or self.starts is not None)


@dataclass(frozen=True)
class Form:
    """One spec in torch.

    Attributes:
        mods: (seq_q, seq_k, heads, scalars and captured tensors by name) -> Mods.
        scalars: seq_k -> the run-time scalars that the suite uses at that length.
        tensors: (batch, seq_k, heads) -> the captured tensors; tensors of floats are learned.
    """

    mods: Callable[[int, int, int, Mapping[str, Any]], Mods]
    scalars: Callable[[int], dict[str, Any]] = field(default=lambda seq_k: {})
    tensors: Callable[[int, int, int], dict[str, Any]] = field(default=lambda *sizes: {})


def _full(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods()


def _causal(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: q >= k, band=(None, 0))


def _causal_offset(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    ahead = seq_k - seq_q + values["shift"]
    return Mods(mask=lambda b, h, q, k: q + ahead >= k)


def _sliding_window(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    window = values["window"]
    return Mods(mask=lambda b, h, q, k: (q >= k) & (q - k < window), band=(window - 1, 0))


def _dilated_window(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    window, dilation = values["window"], values["dilation"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = torch.abs(q - k)
        return (distance <= window) & (distance % dilation == 0)

    return Mods(mask=mask)


def _prefix_lm(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    prefix = values["prefix"]
    return Mods(mask=lambda b, h, q, k: (k < prefix) | (q >= k))


def _block_causal(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: q // CHUNK >= k // CHUNK)


def _strided(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    stride = values["stride"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = q - k
        return (q >= k) & ((distance < stride) | (distance % stride == 0))

    return Mods(mask=mask)


def _alibi(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.exp2(-8.0 * (h + 1) / heads) * (k - q)

    return Mods(score=score, additive=True, slopes=True)


def _softcap(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), cap=CAP)


def _symmetric_window(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    window = values["window"]
    return Mods(mask=lambda b, h, q, k: torch.abs(q - k) <= window, band=(window, window))


def _longformer(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    window, first = values["window"], values["global_tokens"]
    return Mods(mask=lambda b, h, q, k: (torch.abs(q - k) <= window) | (k < first) | (q < first))


def _block_diagonal(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    chunk = values["chunk"]
    return Mods(mask=lambda b, h, q, k: q // chunk == k // chunk)


def _natten_2d(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    width, height, radius = values["width"], values["height"], values["radius"]

    def near(a: Any, b: Any, length: int) -> Any:
        return torch.abs(b - a.clamp(min=radius).clamp(max=length - 1 - radius)) <= radius

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        rows = near(q // width, k // width, height)
        return rows & near(q % width, k % width, width)

    return Mods(mask=mask)


def _block_diffusion(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    clean, block = values["clean"], values["block"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_noised, k_noised = q < clean, k < clean
        i, j = q % clean // block, k % clean // block
        itself = (i == j) & (q_noised == k_noised)
        return itself | ((i > j) & q_noised & ~k_noised) | ((i >= j) & ~q_noised & ~k_noised)

    return Mods(mask=mask)


def _empty_rows(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(mask=lambda b, h, q, k: (q < seq_q // 2) & (k >= 0))


def _distance_decay(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: s / (1 + 1e-4 * (q - k) ** 2))


def _squared(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(score=lambda s, b, h, q, k: s * s)


def _butterfly(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        differ = (q // 64) ^ (k // 64)
        return (differ & (differ - 1)) == 0  # one bit at most

    return Mods(mask=mask)


def _bigbird(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        i, j = q // 32, k // 32
        mixed = ((i * 73856093) ^ (j * 19349663) ^ 2020) % 65536 * 40503 % 65536
        return (abs(i - j) <= 1) | (i < 1) | (j < 1) | (mixed < 8192)

    return Mods(mask=mask)


def _local_global(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
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
"""By the name of the spec's file: those that capture no tensor."""


def _sink(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(sink=values["sink"])


def _dropout(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    return Mods(dropout=values["dropout_p"])


def _packed_causal(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    ids = values["ids"]
    return Mods(mask=lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]))


def _variable_length(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    starts = values["cu_seqlens_q"]
    lengths = (starts[1:] - starts[:-1]).long()
    number = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
    mods = _packed_causal(seq_q, seq_k, heads, {"ids": number[None]})
    return replace(mods, starts=starts)


def _relative_bias(seq_q: int, seq_k: int, heads: int, values: Mapping[str, Any]) -> Mods:
    table = values["table"]
    return Mods(score=lambda s, b, h, q, k: s + table[q - k + seq_k - 1], additive=True)


def _starts(tokens: int) -> Any:
    """Sequences of unequal lengths: a half, a quarter and so on of the rest, eight at most."""
    starts = [0]
    while starts[-1] < tokens:
        left = tokens - starts[-1]
        starts.append(starts[-1] + (left if len(starts) == 8 else -(-left // 2)))
    return torch.tensor(starts, dtype=torch.int32)


def _documents(batch: int, seq_k: int, heads: int) -> dict[str, Any]:
    starts = _starts(seq_k)
    ids = torch.arange(len(starts) - 1, dtype=torch.int32)
    return {"ids": ids.repeat_interleave((starts[1:] - starts[:-1]).long()).repeat(batch, 1)}


def _boundaries(batch: int, seq_k: int, heads: int) -> dict[str, Any]:
    return {"cu_seqlens_q": _starts(seq_k), "cu_seqlens_k": _starts(seq_k)}


def _table(batch: int, seq_k: int, heads: int) -> dict[str, Any]:
    return {"table": torch.randn(2 * seq_k, generator=torch.Generator().manual_seed(5)) / 2}


def _sinks(batch: int, seq_k: int, heads: int) -> dict[str, Any]:
    return {"sink": 1.5 - torch.arange(heads).remainder(4).float()}


CAPTURED: dict[str, Form] = {
    "packed_causal": Form(_packed_causal, tensors=_documents),
    "variable_length": Form(_variable_length, tensors=_boundaries),
    "relative_bias": Form(_relative_bias, tensors=_table),
}
"""Forms that capture tensors, by the name of the spec's file."""

ADDED: dict[str, Form] = {
    "sink": Form(_sink, tensors=_sinks),
    "dropout": Form(_dropout, lambda n: {"dropout_p": 0.125}),
}
"""What a spec may have beside its mods: the sink of specs/sink.py, and dropout, whose probability
here is one that cuDNN has too."""


def form_of(spec: str) -> Form:
    """The form of a spec, or of several that are one: "sliding_window+sink".

    Raises:
        KeyError: there is no such form.
    """
    files = {**FORMS, **CAPTURED}
    first, *more = spec.split("+")
    forms = [files[first], *({**files, **ADDED}[name] for name in more)]
    if not more:
        return forms[0]

    def mods(*arguments: Any) -> Mods:
        parts = [form.mods(*arguments) for form in forms]
        values = {f.name: getattr(m, f.name) for m in parts for f in fields(Mods) if differs(m, f)}
        return Mods(**values)

    def differs(part: Mods, attribute: Any) -> bool:
        value = getattr(part, attribute.name)
        return value is not None and (isinstance(value, torch.Tensor) or value != attribute.default)

    return Form(
        mods,
        lambda seq_k: {name: x for form in forms for name, x in form.scalars(seq_k).items()},
        lambda *sizes: {name: x for form in forms for name, x in form.tensors(*sizes).items()},
    )


def live_elements(mods: Mods, batch: int, heads: int, seq_q: int, seq_k: int, device: Any) -> int:
    """The number of elements of S that the mask keeps, over all batch entries and heads.

    Masks must be the same for all heads, as the masks of all forms are: one head is counted.
    """
    if mods.mask is None:
        return batch * heads * seq_q * seq_k
    zero = torch.zeros((), dtype=torch.int64, device=device)
    k = torch.arange(seq_k, device=device)[None, :]
    rows = max(1, (1 << 26) // max(1, seq_k))
    kept_scores = 0
    for first in range(0, seq_q, rows):
        q = torch.arange(first, min(first + rows, seq_q), device=device)[:, None]
        kept_scores += int(mods.mask(zero, zero, q, k).sum())
    return batch * heads * kept_scores
