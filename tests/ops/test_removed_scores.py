"""A score_mod that gives -math.inf removes the score, on every path and with zero gradients."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen import reference
from tests.support.tiers import slow

MODS = {
    "score": lambda s, b, h, q, k: fg.where(s > 0.3, s, -math.inf),
    "sum": lambda s, b, h, q, k: s + fg.where(k > q, float("-inf"), 0),
    "rows": lambda s, b, h, q, k: fg.where(q % 3 == 0, torch.finfo(torch.float64).min, s),
    "comparison": lambda s, b, h, q, k: fg.where(s > -math.inf, s, 0),
}


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
@pytest.mark.parametrize("name", MODS)
def test_minus_infinity_removes_a_score(name, backend):
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 40, 64)
    q, k, v, dout = (torch.randn(shape, generator=generator).half() for _ in range(4))
    spec = fg.AttentionSpec(score_mod=MODS[name], head_dim=64, dtype="float16")
    scores = (q.double() @ k.double().transpose(2, 3)) / 8
    row, column = torch.arange(40)[:, None], torch.arange(40)
    # Which scores stay, by torch's own masks.
    kept = {
        "score": scores > 0.3,
        "sum": (column <= row).expand(scores.shape),
        "rows": (row % 3 != 0).expand(scores.shape),
        "comparison": torch.ones(scores.shape, dtype=torch.bool),
    }[name]
    probability = scores.masked_fill(~kept, -math.inf).softmax(-1).nan_to_num(0)
    expected = probability @ v.double()
    out, lse = reference.attention(spec, q, k, v)
    torch.testing.assert_close(out, expected)
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    found, found_lse = fg.attention(spec)(*given, backend=backend, return_lse=True)
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-3, rtol=1e-3)
    found.backward(dout)
    rows = kept.any(-1)
    assert (given[0].grad[~rows] == 0).all()
    dprobability = dout.double() @ v.double().transpose(2, 3)
    inner = (probability * dprobability).sum(-1, keepdim=True)
    dq = (probability * (dprobability - inner)) @ k.double() / 8
    torch.testing.assert_close(given[0].grad.double(), dq, atol=4e-3, rtol=4e-3)
