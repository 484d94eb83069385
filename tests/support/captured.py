"""Variants with captured tensors, each written twice: as a spec and in plain PyTorch.

The plain form indexes whole tensors with advanced indexing and is differentiated by reverse-mode
autograd. It shares no code with flashgen's tracing of a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import flashgen as fg
from flashgen.spec.language.spec import AttentionSpec
from tests.support.shapes import Case

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

Q_OFFSET, K_OFFSET = 2, 3
"""Of calls with offsets: the tensors along seq_q and seq_k are long enough for them."""


def _all(b: Tensor, h: Tensor, q: Tensor, k: Tensor, t: Tensors) -> Tensor:
    return torch.ones_like(q + k, dtype=torch.bool)


def _same(s: Tensor, *_: Any) -> Tensor:
    return s


@dataclass(frozen=True)
class Variant:
    """A spec, its tensors for the sizes of a case, and both mods on torch tensors."""

    mods: tuple[Callable[..., object] | None, Callable[..., object] | None]
    make: Callable[[Case, torch.Generator], Tensors]
    keep: Callable[..., Tensor] = _all
    score: Callable[..., Tensor] = _same

    def spec(self, head_dim: int = 8, dtype: str = "float32", **options: Any) -> AttentionSpec:
        mask, score = self.mods
        return AttentionSpec(mask, score, head_dim=head_dim, dtype=dtype, **options)

    def tensors(self, case: Case, seed: int = 0) -> Tensors:
        """The tensors with floats in float64, whatever dtype the spec declares."""
        return self.make(case, torch.Generator().manual_seed(seed + 77))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.double)


def whole(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def q_end(case: Case) -> int:
    return case.seq_q + Q_OFFSET


def k_end(case: Case) -> int:
    return case.seq_k + K_OFFSET


table = fg.Tensor("table", ("distances",), grad=True)
buckets = fg.Tensor("buckets", ("heads", 5), grad=True)
dense = fg.Tensor("dense", ("batch", "heads", "seq_q", "seq_k"), grad=True)
gate = fg.Tensor("gate", ("heads",), grad=True)
t = fg.Tensor("t", (), grad=True)
places = fg.Tensor("places", ("n",), grad=True)
row = fg.Tensor("row", ("heads", "seq_q"), grad=True)
column = fg.Tensor("column", ("seq_k",), grad=True)
fixed = fg.Tensor("fixed", ("heads",))
document = fg.Tensor("document", ("batch", "tokens"), "int32")
length = fg.Tensor("length", ("batch",), "int64")
present = fg.Tensor("present", ("batch", "seq_k"), "bool")
prefix = fg.Tensor("prefix", ("batch",), "int16")
width = fg.Tensor("width", ("heads",), "uint8")

VARIANTS = {
    "relative bias": Variant(
        (None, lambda s, b, h, q, k: s + table[q - k + fg.seq_k - 1]),
        lambda c, g: {"table": normal(g, c.seq_q + c.seq_k - 2)},  # the last index is clamped
        score=lambda s, b, h, q, k, t, n: (
            s + t["table"][(q - k + n - 1).clamp(0, len(t["table"]) - 1)]
        ),
    ),
    "causal with learned buckets": Variant(
        (
            lambda b, h, q, k: k <= q,
            lambda s, b, h, q, k: s + buckets[h, fg.minimum((q - k) // 2, 4)],
        ),
        lambda c, g: {"buckets": normal(g, c.heads_q, 5)},
        keep=lambda b, h, q, k, t: k <= q,
        score=lambda s, b, h, q, k, t, n: s + t["buckets"][h, ((q - k) // 2).clamp(0, 4)],
    ),
    "dense bias": Variant(
        (None, lambda s, b, h, q, k: s + dense[b, h, q, k]),
        lambda c, g: {"dense": normal(g, c.batch, c.heads_q, q_end(c), k_end(c))},
        score=lambda s, b, h, q, k, t, n: s + t["dense"][b, h, q, k],
    ),
    "bias shared by batch and queries": Variant(
        (None, lambda s, b, h, q, k: s + dense[b, h, q, k] / 3),
        lambda c, g: {"dense": normal(g, 1, c.heads_q, 1, k_end(c))},
        score=lambda s, b, h, q, k, t, n: s + t["dense"][0, h, 0, k] / 3,
    ),
    "head gate": Variant(
        (None, lambda s, b, h, q, k: s * fg.sigmoid(gate[h])),
        lambda c, g: {"gate": normal(g, c.heads_q)},
        score=lambda s, b, h, q, k, t, n: s * t["gate"][h].sigmoid(),
    ),
    "temperature": Variant(
        (None, lambda s, b, h, q, k: s * t),
        lambda c, g: {"t": normal(g)},
        score=lambda s, b, h, q, k, t, n: s * t["t"],
    ),
    "one tensor twice": Variant(
        (None, lambda s, b, h, q, k: s + places[q] + places[k]),
        lambda c, g: {"places": normal(g, max(q_end(c), k_end(c)))},
        score=lambda s, b, h, q, k, t, n: s + t["places"][q] + t["places"][k],
    ),
    "one tensor in a product": Variant(
        (None, lambda s, b, h, q, k: s * places[q] * places[k] + fg.sin(places[0] * places[k])),
        lambda c, g: {"places": normal(g, max(q_end(c), k_end(c)))},
        score=lambda s, b, h, q, k, t, n: (
            s * t["places"][q] * t["places"][k] + (t["places"][0] * t["places"][k]).sin()
        ),
    ),
    "the score is ignored": Variant(
        (None, lambda s, b, h, q, k: row[h, q] * fg.cos(column[k]) - column[k]),
        lambda c, g: {"row": normal(g, c.heads_q, q_end(c)), "column": normal(g, k_end(c))},
        score=lambda s, b, h, q, k, t, n: t["row"][h, q] * t["column"][k].cos() - t["column"][k],
    ),
    "document and looked up by its id": Variant(
        (
            lambda b, h, q, k: document[b, q] == document[b, k],
            lambda s, b, h, q, k: s + places[document[b, k] - q % 2] * fixed[h],
        ),
        lambda c, g: {
            "document": whole(g, 0, 3, c.batch, max(q_end(c), k_end(c))).int(),
            "places": normal(g, 3),
            "fixed": normal(g, c.heads_q),
        },
        keep=lambda b, h, q, k, t: t["document"][b, q] == t["document"][b, k],
        score=lambda s, b, h, q, k, t, n: (
            s + t["places"][(t["document"][b, k] - q % 2).clamp(0, 2).long()] * t["fixed"][h]
        ),
    ),
    "padding": Variant(
        (lambda b, h, q, k: k < length[b], lambda s, b, h, q, k: s * fg.sigmoid(gate[h]) + t),
        lambda c, g: {
            "length": whole(g, 0, k_end(c), c.batch),
            "gate": normal(g, 1),
            "t": normal(g),
        },
        keep=lambda b, h, q, k, t: k < t["length"][b],
        score=lambda s, b, h, q, k, t, n: s * t["gate"].sigmoid() + t["t"],
    ),
    "present keys": Variant(
        (lambda b, h, q, k: present[b, k], lambda s, b, h, q, k: s + row[h, q] * column[k]),
        lambda c, g: {
            "present": whole(g, 0, 2, c.batch, k_end(c)).bool(),
            "row": normal(g, c.heads_q, q_end(c)),
            "column": normal(g, k_end(c)),
        },
        keep=lambda b, h, q, k, t: t["present"][b, k],
        score=lambda s, b, h, q, k, t, n: s + t["row"][h, q] * t["column"][k],
    ),
    "prefix": Variant(
        (lambda b, h, q, k: (k < prefix[b]) | (k <= q), None),
        lambda c, g: {"prefix": whole(g, 0, k_end(c), c.batch).short()},
        keep=lambda b, h, q, k, t: (k < t["prefix"][b]) | (k <= q),
    ),
    "window of a head": Variant(
        (lambda b, h, q, k: fg.abs(q - k) <= width[h], lambda s, b, h, q, k: s - t * (q - k) ** 2),
        lambda c, g: {"width": whole(g, 0, 6, c.heads_q).to(torch.uint8), "t": normal(g) / 9},
        keep=lambda b, h, q, k, t: (q - k).abs() <= t["width"][h],
        score=lambda s, b, h, q, k, t, n: s - t["t"] * (q - k) ** 2,
    ),
    "learned where it bends": Variant(
        (
            None,
            lambda s, b, h, q, k: fg.where(
                s > gate[h], s, fg.maximum(column[k], s) + fg.tanh(row[h, q] * s)
            ),
        ),
        lambda c, g: {
            "gate": normal(g, c.heads_q),
            "column": normal(g, k_end(c)),
            "row": normal(g, c.heads_q, q_end(c)),
        },
        score=lambda s, b, h, q, k, t, n: torch.where(
            s > t["gate"][h],
            s,
            torch.maximum(t["column"][k].expand_as(s), s) + (t["row"][h, q] * s).tanh(),
        ),
    ),
}


def plain_attention(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Tensors,
    *,
    q_offset: int = 0,
    k_offset: int = 0,
    kept: Tensor | None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention in elementary PyTorch operations, for autograd; rows without a key are 0."""
    batch, heads, seq_q, dim = q.shape
    group, seq_k = heads // k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    b = torch.arange(batch)[:, None, None, None]
    h = torch.arange(heads)[:, None, None]
    i = torch.arange(seq_q)[:, None] + q_offset
    j = torch.arange(seq_k) + k_offset
    s = variant.score(q @ k.transpose(2, 3) * dim**-0.5, b, h, i, j, tensors, seq_k)
    shape = batch, heads, seq_q, seq_k
    s = s.expand(shape).masked_fill(~variant.keep(b, h, i, j, tensors).expand(shape), -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0)
    p = s.softmax(-1).masked_fill(empty, 0)
    if kept is not None:
        p = p * kept / keep_probability
    return p @ v, s.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def plain_gradients(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Tensors,
    dout: Tensor,
    dlse: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv and the gradients of the spec's learned tensors, by autograd."""
    names = [tensor.name for tensor in variant.spec().tensors if tensor.grad]
    learned = {name: tensors[name].detach().requires_grad_() for name in names}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = plain_attention(variant, *leaves, tensors | learned, **options)
    loss = (out * dout).sum() + (lse * dlse)[lse.isfinite()].sum()
    everything = [*leaves, *learned.values()]
    found = torch.autograd.grad(loss, everything, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(everything, found, strict=True)
    )
