"""Dropout in the oracle: it drops what `keep_mask` says, without bias; wrong calls are refused."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen import reference
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec
from tests.support.plain_attention import STATE, doubles, kept_by
from tests.support.shapes import Case


@pytest.mark.parametrize("function", [reference.attention, reference.same_dtype])
def test_dropped_elements_are_those_of_the_mask(function):
    # Scores of 0 and v = 1 for one key: the output is 0 or 1 / (keep probability * keys).
    case = Case(21, 8, 2, 4, 2, dtype="float32", head_dim=8)
    q, k, v = (torch.zeros_like(tensor) for tensor in case.tensors())
    v[:] = torch.eye(8)
    spec = AttentionSpec(head_dim=8, dropout=True)
    out, lse = function(spec, q, k, v, dropout_p=0.4, rng=STATE)
    kept = kept_by(0.4, case)
    assert ((out != 0) == kept).all()
    assert 0.5 < kept.double().mean() < 0.7
    weight = 65536 / 39322 / 8  # 0.6 * 65536 = 39321.6
    torch.testing.assert_close(out[kept].double(), torch.full_like(out[kept], weight).double())
    # The normaliser is not dropped.
    torch.testing.assert_close(lse.double(), torch.full_like(lse, math.log(8)).double())
    # Elements are those at the global positions, whatever the offsets.
    for offsets in ({"q_offset": 32, "k_offset": 48}, {"q_offset": -16, "k_offset": 5}):
        moved, _ = function(spec, q, k, v, **offsets, dropout_p=0.4, rng=STATE)
        assert torch.equal(moved != 0, kept_by(0.4, case, **offsets))
    # A tensor holds the same state as two numbers; another state is another mask.
    assert (function(spec, q, k, v, dropout_p=0.4, rng=torch.tensor(STATE))[0] == out).all()
    other, _ = function(spec, q, k, v, dropout_p=0.4, rng=(STATE[0], STATE[1] + 1))
    assert ((other != 0) != kept).any()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.17, 0.5])
def test_the_mean_over_many_masks_is_the_output_without_dropout(p):
    # O is a weighted sum of independent variables of variance (1 - kept) / kept: its mean over all
    # masks is O, and its variance is known exactly.
    case = Case(4, 16, head_dim=8)
    q, k, v, *_ = doubles(case)
    exact, _ = reference.attention(AttentionSpec(head_dim=8, dropout=True), q, k, v)
    count = 3000
    many = [tensor.expand(count, *tensor.shape[1:]) for tensor in (q, k, v)]
    out, _ = reference.attention(
        AttentionSpec(head_dim=8, dropout=True), *many, dropout_p=p, rng=(3, 4)
    )
    kept = round((1 - p) * 65536) / 65536
    weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(8), -1)
    variance = (weights**2 @ v**2) * (1 - kept) / kept
    sigmas = (out.mean(0) - exact[0]) / (variance[0] / count).sqrt()
    # 32 numbers, nearly normal: one beyond 4.5 sigma has a chance of 2e-4.
    assert sigmas.abs().max() < 4.5
    assert sigmas.square().mean() < 3
    spread = out.var(0) / variance[0]
    assert spread.min() > 0.7
    assert spread.max() < 1.4


CALLS = {
    "attention": lambda spec, q, k, v, dout, **call: reference.attention(spec, q, k, v, **call),
    "same_dtype": lambda spec, q, k, v, dout, **call: reference.same_dtype(spec, q, k, v, **call),
    "gradients": reference.gradients,
    "same_dtype_gradients": reference.same_dtype_gradients,
}


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_dropout_that_cannot_be_is_refused(call):
    q, k, v, dout, _ = doubles(Case(2, 3, head_dim=8))
    spec = AttentionSpec(head_dim=8, dropout=True)
    with pytest.raises(InputError, match="spec without dropout"):
        call(AttentionSpec(head_dim=8), q, k, v, dout, dropout_p=0.1, rng=(1, 2))
    with pytest.raises(InputError, match="not a probability of dropping"):
        call(spec, q, k, v, dout, dropout_p=1.0, rng=(1, 2))
    wrong = [
        None, (1,), (1, 2, 3), (1, 2.0), (True, 2), torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([1, 2]).int(),
    ]  # fmt: skip
    for rng in wrong:
        with pytest.raises(InputError, match="not a seed and an offset") as caught:
            call(spec, q, k, v, dout, dropout_p=0.1, rng=rng)
        assert "argument rng" in caught.value.where
    with pytest.raises(InputError, match="offsets that are tensors"):
        call(spec, q, k, v, dout, dropout_p=0.1, rng=(1, 2), q_offset=torch.tensor(16))
    # Without a probability nothing is asked of the state.
    call(AttentionSpec(head_dim=8), q, k, v, dout, dropout_p=0.0)
    call(AttentionSpec(head_dim=8), q, k, v, dout, dropout_p=0.0, rng=(1, 2))
