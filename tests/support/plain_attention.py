"""Attention and its gradients in plain PyTorch, written without flashgen's tracing of a spec.

The masks and scores of the specs that capture no tensor are those of benchmarks/variants.py;
tests/support/captured.py has variants with captured tensors. Tests compare the oracle with autograd
of `plain_attention` in float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.variants import FORMS, Mods
from flashgen.shared.dropout import keep_mask
from tests.support.paths import ROOT
from tests.support.shapes import Case

Tensor = torch.Tensor
SPECS = {path.stem: path for path in (ROOT / "specs").glob("*.py")}
STATE = (-(2**40) + 17, 2**33 + 5)


SCALARS: dict[str, dict[str, int]] = {
    "causal_offset": {"shift": -3},
    "dilated_window": {"window": 4, "dilation": 2},
    "prefix_lm": {"prefix": 8},
    "sliding_window": {"window": 3},
    "block_diagonal": {"chunk": 5},
    "block_diffusion": {"clean": 6, "block": 2},
    "longformer": {"window": 1, "global_tokens": 2},
    "natten_2d": {"width": 4, "height": 4, "radius": 1},
    "symmetric_window": {"window": 2},
    "strided": {"stride": 3},
}
"""Run-time scalars of the specs that have some, for small shapes."""


def mods_of(name: str, case: Case) -> Mods:
    return FORMS[name].mods(case.seq_q, case.seq_k, case.heads_q, SCALARS.get(name, {}))


def doubles(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, dout and dlse in float64."""
    q, k, v = (tensor.double() for tensor in case.tensors())
    generator = torch.Generator().manual_seed(1000)
    rows = q.shape[:3]
    dout = torch.randn(*rows, v.shape[3], generator=generator, dtype=torch.double)
    dlse = torch.randn(rows, generator=generator, dtype=torch.double)
    return q, k, v, dout, dlse


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plain_attention(
    mods: Mods,
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
    """Attention in elementary PyTorch operations, for autograd; rows without a key are 0."""
    heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    i = torch.arange(seq_q)[:, None] + q_offset
    j = torch.arange(seq_k)[None, :] + k_offset
    h = torch.arange(heads)[:, None, None]
    b = torch.arange(q.shape[0])[:, None, None, None]
    keep = torch.ones_like(i + j, dtype=torch.bool)
    if mods.mask is not None:
        keep = keep & mods.mask(b, h, i, j)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if mods.score is not None:
        with float64_by_default():  # of positions times a constant
            s = mods.score(s, b, h, i, j)
    weights = torch.where(keep, s.exp(), 0)
    total = weights.sum(-1)
    some = keep.any(-1)
    lse = torch.where(some, total, 1).log()
    p = weights / torch.where(some, total, 1)[..., None]
    if kept is not None:
        p = p * kept / keep_probability
    return torch.einsum("bhij,bhjd->bhid", p, v), torch.where(some, lse, -math.inf)


def plain_gradients(mods, q, k, v, dout, dlse=None, **options) -> tuple[Tensor, ...]:
    leaves = [operand.detach().clone().requires_grad_() for operand in (q, k, v)]
    out, lse = plain_attention(mods, *leaves, **options)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (lse * dlse)[lse.isfinite()].sum()
    return torch.autograd.grad(loss, leaves)


def kept_by(p: float, case: Case, state=STATE, *, q_offset: int = 0, k_offset: int = 0) -> Tensor:
    pairs = np.arange(case.batch * case.heads_q)
    rows, keys = range(q_offset, q_offset + case.seq_q), range(k_offset, k_offset + case.seq_k)
    bits = keep_mask(p, *state, pairs, rows, keys)
    return torch.from_numpy(bits).view(case.batch, case.heads_q, case.seq_q, case.seq_k)
