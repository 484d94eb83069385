"""Attention and its gradients in plain PyTorch, written without flashgen's own reading of a spec.

`PLAIN` has every spec of specs/ that captures no tensor once more, on torch tensors;
tests/captured.py has variants that do. Autograd of `plain_attention` in float64 is what the oracle
is held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from shapes import Case

from flashgen.dropout import keep_mask

Tensor = torch.Tensor
SPECS = {path.stem: path for path in (Path(__file__).parent.parent / "specs").glob("*.py")}
STATE = (-(2**40) + 17, 2**33 + 5)


@dataclass(frozen=True)
class Plain:
    """A spec of specs/ written again on torch tensors, and scalars that suit small shapes."""

    keep: Callable[..., Tensor] = lambda q, k, n: torch.ones_like(q + k, dtype=torch.bool)
    score: Callable[..., Tensor] = lambda s, h, q, k: s
    scalars: dict[str, int] = field(default_factory=dict)


PLAIN = {
    "alibi": Plain(score=lambda s, h, q, k: s - 0.25 ** (h + 1) * (q - k)),
    "block_causal": Plain(keep=lambda q, k, n: q // 100 >= k // 100),
    "causal": Plain(keep=lambda q, k, n: k <= q),
    # n is Nk - Nq.
    "causal_offset": Plain(keep=lambda q, k, n: k - q <= n - 3, scalars={"shift": -3}),
    "dilated_window": Plain(
        keep=lambda q, k, n: ((q - k) % 2 == 0) & (k >= q - 4) & (k <= q + 4),
        scalars={"window": 4, "dilation": 2},
    ),
    "full": Plain(),
    "prefix_lm": Plain(keep=lambda q, k, n: (k <= 7) | (k <= q), scalars={"prefix": 8}),
    "sliding_window": Plain(
        keep=lambda q, k, n: (k <= q) & (k > q - 3), scalars={"window": 3}
    ),
    "softcap": Plain(score=lambda s, h, q, k: 100 / (1 + torch.exp(-s / 25)) - 50),
    "block_diagonal": Plain(keep=lambda q, k, n: q // 5 == k // 5, scalars={"chunk": 5}),
    "block_diffusion": Plain(
        keep=lambda q, k, n: torch.where(
            k < 6,
            (q < 6) & (q // 2 == k // 2),
            torch.where(q < 6, q // 2 > (k % 6) // 2, (q % 6) // 2 >= (k % 6) // 2),
        ),
        scalars={"clean": 6, "block": 2},
    ),
    "distance_decay": Plain(score=lambda s, h, q, k: 10000 * s / (10000 + (k - q) ** 2)),
    # n is Nk - Nq, and Nk that of the tests' case.
    "empty_rows": Plain(keep=lambda q, k, n: (2 * q + 1 < k.shape[1] - n) & (k == k)),
    "longformer": Plain(
        keep=lambda q, k, n: (k < 2) | (q < 2) | ((k <= q + 1) & (k >= q - 1)),
        scalars={"window": 1, "global_tokens": 2},
    ),
    "natten_2d": Plain(
        keep=lambda q, k, n: (
            (k // 4 >= (q // 4 - 1).clamp(0, 1)) & (k // 4 <= (q // 4 - 1).clamp(0, 1) + 2)
            & (k % 4 >= (q % 4 - 1).clamp(0, 1)) & (k % 4 <= (q % 4 - 1).clamp(0, 1) + 2)
        ),
        scalars={"width": 4, "height": 4, "radius": 1},
    ),
    "butterfly": Plain(
        keep=lambda q, k, n: sum(
            (q // (64 << bit)) % 2 != (k // (64 << bit)) % 2 for bit in range(9)
        ) < 2
    ),
    "bigbird": Plain(
        keep=lambda q, k, n: (
            (k // 32 < 1) | (q // 32 < 1) | ((k // 32 <= q // 32 + 1) & (k // 32 >= q // 32 - 1))
        )
    ),  # the random blocks are beyond the tests' case
    "local_global": Plain(
        keep=lambda q, k, n: (k <= q) & ((q // 32 <= k // 32 + 1) | (k < 32) | (k // 32 % 4 == 3))
    ),
    "squared": Plain(score=lambda s, h, q, k: s**2),
    "symmetric_window": Plain(
        keep=lambda q, k, n: (k <= q + 2) & (k >= q - 2), scalars={"window": 2}
    ),
    "strided": Plain(
        keep=lambda q, k, n: (k <= q) & ((k > q - 3) | (k % 3 == q % 3)), scalars={"stride": 3}
    ),
}  # fmt: skip


def doubles(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, dout and dlse in float64."""
    q, k, v = (tensor.double() for tensor in case.tensors(seed))
    generator = torch.Generator().manual_seed(seed + 1000)
    rows = q.shape[:3]
    dout = torch.randn(*rows, v.shape[3], generator=generator, dtype=torch.double)
    dlse = torch.randn(rows, generator=generator, dtype=torch.double)
    return q, k, v, dout, dlse


def plain_attention(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    kept: Tensor | None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention as a model spells it out, for autograd; rows without a key are left at 0."""
    heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    i = torch.arange(seq_q)[:, None] + q_offset
    j = torch.arange(seq_k)[None, :] + k_offset
    h = torch.arange(heads)[:, None, None]
    keep = plain.keep(i, j, seq_k - seq_q)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    weights = torch.where(keep, plain.score(s, h, i, j).exp(), 0)
    total = weights.sum(-1)
    some = keep.any(-1)
    lse = torch.where(some, total, 1).log()
    p = weights / torch.where(some, total, 1)[..., None]
    if kept is not None:
        p = p * kept / keep_probability
    return torch.einsum("bhij,bhjd->bhid", p, v), torch.where(some, lse, -math.inf)


def plain_gradients(plain, q, k, v, dout, dlse=None, **options) -> tuple[Tensor, ...]:
    leaves = [operand.detach().clone().requires_grad_() for operand in (q, k, v)]
    out, lse = plain_attention(plain, *leaves, **options)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (lse * dlse)[lse.isfinite()].sum()
    return torch.autograd.grad(loss, leaves)


def kept_by(p: float, case: Case, state=STATE) -> Tensor:
    pairs = np.arange(case.batch * case.heads_q)
    bits = keep_mask(p, *state, pairs, range(case.seq_q), range(case.seq_k))
    return torch.from_numpy(bits).view(case.batch, case.heads_q, case.seq_q, case.seq_k)
