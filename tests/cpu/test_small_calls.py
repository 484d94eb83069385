"""Small calls keep what does not depend on their tensors, and large ones estimate their scores."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen.calls import cpu
from flashgen.calls.cpu.parts import ChunkScores, parts_of
from tests.support.judged import Call, judge_forward
from tests.support.masks import causal
from tests.support.shapes import DTYPES, Case

Tensor = torch.Tensor


def by_head(b, h, q, k):
    return (q + k + b) % (h + 2) != 0


def sloped(score, b, h, q, k):
    return score - fg.abs(q - k) * (h + 1) / 8


MODS = {
    "full": (None, None),
    "causal": (causal, None),
    "by head": (by_head, None),
    "sloped": (causal, sloped),
}


def spec_of(mods: str = "causal", dtype: str = "float32") -> fg.AttentionSpec:
    return fg.AttentionSpec(*MODS[mods], head_dim=16, dtype=dtype)


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_a_repeated_small_call_meets_the_error_rule(mods: str, dtype: str, heads_kv: int) -> None:
    spec = spec_of(mods, dtype)
    op = fg.attention(spec)
    for seed in range(3):
        torch.manual_seed(seed)
        shapes = ((2, 2, 20, 16), (2, heads_kv, 24, 16), (2, heads_kv, 24, 16))
        qkv = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
        found = op(*qkv, q_offset=-3, return_lse=True)
        judge_forward(found, spec, *qkv, q_offset=-3)


@pytest.mark.parametrize("mods", ["causal", "by head"])
def test_gradients_of_repeated_small_calls_meet_the_error_rule(mods: str) -> None:
    spec = spec_of(mods)
    op = fg.attention(spec)
    for _ in range(2):
        call = Call(spec, Case(20, 24, 2, 2, 2, "float32", 16).tensors(), backend="tiled")
        leaves = [x.clone().requires_grad_() for x in call.qkv]
        out, lse = op(*leaves, return_lse=True)
        gradients = torch.autograd.grad((out, lse), leaves, call.gradients)
        wanted = call.judged_backward(call.forward())
        for found, other in zip(gradients, (wanted.dq, wanted.dk, wanted.dv), strict=True):
            torch.testing.assert_close(found, other)


def test_masked_nan_reaches_no_result_of_a_small_call() -> None:
    q, k, v = Case(12, 20, 1, 2, 2, "float32", 16).tensors()
    op = fg.attention(spec_of())
    expected = op(q, k, v)
    k[:, :, 12:], v[:, :, 12:] = math.nan, 0.0
    assert torch.equal(op(q, k, v), expected)
    out, lse = op(q, k, v, q_offset=-2, return_lse=True)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    assert not out.isnan().any()


def test_a_small_call_is_computed_without_tiles_from_the_first_time(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a small call walks tiles")

    monkeypatch.setattr(ChunkScores, "runs", refuse)
    q, k, v = Case(12, 20, 1, 2, 2, "float32", 16).tensors()
    fg.attention(spec_of())(q, k, v)
    with pytest.raises(AssertionError):
        fg.attention(spec_of())(*Case(300, 300, 1, 2, 2, "float32", 16).tensors())


@pytest.mark.parametrize("factor", [0.1, 1.0, 30.0, 1e4])
def test_scores_of_any_size_meet_the_error_rule_in_both_passes(factor: float) -> None:
    spec = spec_of()
    q, k, v = Case(300, 400, 1, 2, 2, "float32", 16).tensors()
    call = Call(spec, (q * factor, k, v), backend="tiled")
    call.judged_backward(call.judged_forward())


def test_only_small_scores_are_float32_products() -> None:
    arguments = cpu.TileArguments(0.25)
    q, k, _ = Case(300, 400, 1, 1, 1, "float32", 16).tensors()
    (sequence,) = parts_of(spec_of(), q, k, arguments)
    for factor, wanted in ((1.0, torch.float32), (30.0, torch.float64), (1e30, torch.float64)):
        assert sequence.problem.products(q[0] * factor, k[0]).dtype == wanted
    assert sequence.problem.products(q[0, :, :20], k[0, :, :20]).dtype == torch.float64
