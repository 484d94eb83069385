"""Infinities and NaN in q, k and dO: kernels, the tiled path and the oracle agree."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.shared.paths import PATHS
from tests.support.judged import normal
from tests.support.tiers import slow

SPEC = fg.AttentionSpec(
    lambda b, h, q, k: k <= q,
    lambda score, b, h, q, k: 50 * fg.tanh(score / 50),
    name="capped_causal",
)
# One tile holds all keys: 0 * NaN of a masked pair counts only where its tile is computed.
LENGTH, BAD = 32, 20


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        *(("float16", None), ("float32", None)),
        *(slow(dtype, arch) for arch in PATHS for dtype in ("float16", "float32")),
    ],
)
@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("q", math.inf),
        ("dout", math.nan),
        pytest.param("k", -math.inf, marks=pytest.mark.slow),
        pytest.param("q", math.nan, marks=pytest.mark.slow),
    ],
)
def test_the_same_elements_are_undefined_on_every_path(
    where: str, value: float, dtype: str, arch: str | None
) -> None:
    spec = SPEC.replace(dtype=dtype)
    of = {
        name: normal((1, 1, LENGTH, 64), getattr(torch, dtype), seed)
        for seed, name in enumerate(("q", "k", "v", "dout"))
    }
    of[where][0, 0, BAD, 3] = value
    dout = of.pop("dout")
    exact = reference.attention(spec, **of)[0], *reference.gradients(spec, **of, dout=dout)
    for x in of.values():
        x.requires_grad_()
    out = fg.attention(spec)(**of, backend="emulator" if arch else "tiled", arch=arch)
    out.backward(dout)
    found = out.detach(), *(x.grad for x in of.values())
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite()), name
        worst = (ours - theirs).nan_to_num(0.0, 0.0, 0.0).abs().max()
        assert worst < (4e-3 if dtype == "float16" else 2e-5), name


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
@pytest.mark.parametrize("where", ["q", slow("k"), slow("v"), slow("dout")])
def test_a_score_that_ignores_the_score_has_the_same_gradients_on_every_path(
    where: str, backend: str
) -> None:
    """They are 0 times dS': NaN where an operand of the product is NaN."""
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: 0.01 * k, head_dim=16, dtype="float16")
    of = {
        name: normal((1, 1, LENGTH, 16), torch.float16, seed)
        for seed, name in enumerate(("q", "k", "v", "dout"))
    }
    of[where][0, 0, BAD, 3] = math.nan
    dout = of.pop("dout")
    exact = reference.gradients(spec, **of, dout=dout)
    for x in of.values():
        x.requires_grad_()
    fg.attention(spec)(**of, backend=backend).backward(dout)
    for x, theirs in zip(of.values(), exact, strict=True):
        assert torch.equal(x.grad.isnan(), theirs.isnan())


@pytest.mark.parametrize("head_dim", [64, slow(192), slow(256)])
def test_keys_that_only_rows_past_the_last_query_would_see_have_finite_gradients(
    head_dim: int,
) -> None:
    """These rows of a tile are zeros, and their scores 0 * NaN."""
    spec = fg.AttentionSpec(lambda b, h, q, k: k <= q, head_dim=head_dim, dtype="float16")
    lengths = (97, 193, 193)
    q, k, v = (normal((1, 1, n, head_dim), torch.float16, seed) for seed, n in enumerate(lengths))
    k[:, :, 97:] = math.nan
    qkv = [each.requires_grad_() for each in (q, k, v)]
    out = fg.attention(spec)(*qkv, backend="emulator", arch="sm_90a")
    _, dk, dv = torch.autograd.grad(out, qkv, normal(out.shape, torch.float16, 3))
    assert not dk[:, :, 97:].any()
    assert not dv[:, :, 97:].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()
