"""The oracle's gradients against autograd of attention spelled out in plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from benchmarks.variants import FORMS, Mods
from flashgen import reference
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec
from tests.support.plain_attention import (
    SCALARS,
    SPECS,
    STATE,
    doubles,
    kept_by,
    mods_of,
    plain_attention,
    plain_gradients,
)
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import slow

Tensor = torch.Tensor
CASE = Case(7, 11, 2, 4, 2, head_dim=8, head_dim_v=16)
OFFSETS = {"q_offset": 9, "k_offset": 5}
BOTH = pytest.mark.parametrize(
    "function", [reference.gradients, reference.same_dtype_gradients], ids=["exact", "same dtype"]
)


def spec_of(mask=None, score=None, **options) -> AttentionSpec:
    return AttentionSpec(mask_mod=mask, score_mod=score, head_dim=8, **options)


def loaded(name: str) -> AttentionSpec:
    return fg.load(SPECS[name]).replace(head_dim=8, head_dim_v=16, dropout=True)


def assert_close(found, expected, tolerance: float = 1e-12) -> None:
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert not one.isnan().any(), name
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("p", "offsets"), [(0.0, {}), (0.17, OFFSETS), slow(0.0, OFFSETS), slow(0.17, {})]
)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_output_and_gradients_are_those_of_plain_pytorch(name, offsets, p):
    q, k, v, dout, dlse = doubles(CASE)
    spec, plain = loaded(name), mods_of(name, CASE)
    call = {"scalars": SCALARS.get(name, {}), "dropout_p": p, "rng": STATE, **offsets}
    kept = kept_by(p, CASE, **offsets)
    dropped = {"kept": kept, "keep_probability": round((1 - p) * 65536) / 65536}
    out, lse = reference.attention(spec, q, k, v, **call)
    expected, expected_lse = plain_attention(plain, q, k, v, **dropped, **offsets)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    for given in (dlse, None):
        found = reference.gradients(spec, q, k, v, dout, given, **call)
        assert [g.dtype for g in found] == [torch.float64] * 3
        expected = plain_gradients(plain, q, k, v, dout, given, **dropped, **offsets)
        assert_close(found, expected)
    assert_close(reference.same_dtype_gradients(spec, q, k, v, dout, None, **call), expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, head_dim=8),
        Case(1, 13, 3, 6, 1, head_dim=8, head_dim_v=24),
        Case(19, 3, 1, 6, 3, head_dim=24, head_dim_v=8, layout="gaps"),
        Case(17, 33, 2, 4, 4, head_dim=40, layout="sequence_major"),
    ],
    ids=lambda case: case.id,
)
def test_gradients_of_odd_shapes_are_those_of_plain_pytorch(case):
    q, k, v = case.tensors()
    dout, dlse = doubles(case)[3:]
    spec = fg.load(SPECS["causal"]).replace(
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, scale=0.3, dropout=True
    )
    found = reference.gradients(spec, q, k, v, dout, dlse, dropout_p=0.5, rng=torch.tensor(STATE))
    expected = plain_gradients(
        mods_of("causal", case), q.double(), k.double(), v.double(), dout, dlse,
        scale=0.3, kept=kept_by(0.5, case), keep_probability=0.5,
    )  # fmt: skip
    assert_close(found, expected)


def test_gradients_scale_with_the_scale_of_the_call():
    q, k, v, dout, dlse = doubles(CASE)
    spec = loaded("softcap").replace(scale=0.3)
    found = reference.gradients(spec, q, k, v, dout, dlse, scale=3.0)
    assert_close(found, plain_gradients(mods_of("softcap", CASE), q, k, v, dout, dlse, scale=3.0))


def middle_only(b, h, q, k):
    return (q > 2) & (q != 5) & (k <= q)


@BOTH
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_rows_without_a_key_have_gradients_of_exactly_0(function, p):
    q, k, v, dout, dlse = doubles(Case(8, 8, 2, 4, 2, head_dim=8))
    spec = spec_of(middle_only, lambda s, b, h, q, k: fg.tanh(s) + s, dropout=True)
    empty = torch.tensor([0, 1, 2, 5])
    dlse[:, :, empty] = math.nan  # merging two empty rows gives just this
    dq, dk, dv = function(spec, q, k, v, dout, dlse, dropout_p=p, rng=STATE)
    assert (dq[:, :, empty] == 0).all()
    assert dq[:, :, 6:].abs().min() > 0
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    assert (dk[:, :, :6] != 0).any()
    # A key that no query sees.
    everywhere = spec_of(lambda b, h, q, k: k != 4)
    _, dk, dv = function(everywhere, q, k, v, dout)
    assert (dk[:, :, 4] == 0).all()
    assert (dv[:, :, 4] == 0).all()
    # No row has any key.
    found = function(spec_of(lambda b, h, q, k: q < 0), q, k, v, dout, dlse)
    assert all((g == 0).all() for g in found)


@BOTH
def test_what_the_score_function_makes_minus_infinity_is_masked_too(function):
    q, k, v, dout, dlse = doubles(Case(6, 5, 2, 4, 2, head_dim=8))
    dlse[:, :, :2] = math.nan
    spec = spec_of(None, lambda s, b, h, q, k: s + fg.log(fg.maximum(q - 1, 0)))
    dq, dk, dv = function(spec, q, k, v, dout, dlse)
    assert (dq[:, :, :2] == 0).all()
    rest = function(spec_of(), q[:, :, 2:], k, v, dout[:, :, 2:], dlse[:, :, 2:])
    assert_close((dq[:, :, 2:], dk, dv), rest)
    # The same with a derivative of 0 / 0: every score is 0.
    spec = spec_of(None, lambda s, b, h, q, k: fg.log(s * s))
    found = function(spec, q, 0 * k, v, dout, dlse)
    assert all((g == 0).all() for g in found)
    # And of single elements.
    dlse[:] = 1
    k[:, :, 2] = 0
    dq, dk, dv = function(spec, q, k, v, dout, dlse)
    assert (dk[:, :, 2] == 0).all()
    assert (dv[:, :, 2] == 0).all()
    others = [0, 1, 3, 4]
    rest = function(spec, q, k[:, :, others], v[:, :, others], dout, dlse)
    assert_close((dq, dk[:, :, others], dv[:, :, others]), rest)


@BOTH
def test_no_queries_and_no_keys_have_gradients_of_0(function):
    for seq_q, seq_k in ((0, 5), (5, 0), (0, 0)):
        case = Case(seq_q, seq_k, 2, 4, 2, head_dim=8, head_dim_v=16)
        q, k, v, dout, dlse = doubles(case)
        found = function(loaded("full"), q, k, v, dout, dlse)
        assert [g.shape for g in found] == [q.shape, k.shape, v.shape]
        assert all((g == 0).all() for g in found)


# Score functions that have an infinite or no derivative, or no value, where the mask is false:
# there the score is 0, because the key is a zero vector, or the position is beyond their domain.
SINGULAR = {
    "root of the score": (
        lambda s, b, h, q, k: fg.sqrt(abs(s)),
        lambda s, *_: s.abs().sqrt(),
    ),
    "logarithm of the score": (
        lambda s, b, h, q, k: fg.log(s * s),
        lambda s, *_: (s * s).log(),
    ),
    "tanh of one over the score": (
        lambda s, b, h, q, k: fg.tanh(1 / s),
        lambda s, *_: (1 / s).tanh(),
    ),
    "root of a distance below 0": (
        lambda s, b, h, q, k: s * fg.sqrt(5.5 - k),
        lambda s, b, h, q, k: s * (5.5 - k.double()).sqrt(),
    ),
}


@pytest.mark.parametrize("name", list(SINGULAR))
def test_a_derivative_without_a_value_does_no_harm_where_the_mask_is_false(name):
    score, plain_score = SINGULAR[name]
    q, k, v, dout, dlse = doubles(Case(7, 8, 2, 4, 2, head_dim=8))
    k[:, :, 6:] = 0  # scores of 0
    spec = spec_of(lambda b, h, q, k: k < 6, score)
    # Plain autograd would give NaN: it must not see the masked keys at all.
    kept_keys = [k[:, :, :6], v[:, :, :6]]
    expected = plain_gradients(Mods(score=plain_score), q, *kept_keys, dout, dlse)
    for function in (reference.gradients, reference.same_dtype_gradients):
        dq, dk, dv = function(spec, q, k, v, dout, dlse)
        assert (dk[:, :, 6:] == 0).all()
        assert (dv[:, :, 6:] == 0).all()
        assert_close((dq, dk[:, :, :6], dv[:, :, :6]), expected, 1e-9)


@BOTH
def test_the_branch_that_where_does_not_choose_adds_nothing_to_the_derivative(function):
    q, k, v, dout, dlse = doubles(CASE)
    v = v[..., :8]
    spec = spec_of(None, lambda s, b, h, q, k: fg.where(s > 0, fg.sqrt(s) + s, 2 * s))
    # sqrt of the positive part alone: its slope at 0 is infinite, but never used.
    safe = Mods(score=lambda s, *_: torch.where(s > 0, torch.where(s > 0, s, 1).sqrt() + s, 2 * s))
    found = function(spec, q, k, v, dout[..., :8], dlse)
    assert_close(found, plain_gradients(safe, q, k, v, dout[..., :8], dlse))


FUNCTIONS = {
    "tanh": (lambda s, *_: 30 * fg.tanh(s / 30), lambda s: 1 - math.tanh(s / 30) ** 2),
    "sigmoid": (
        lambda s, *_: s * fg.sigmoid(s),
        lambda s: 1 / (1 + math.exp(-s)) + s * math.exp(-s) / (1 + math.exp(-s)) ** 2,
    ),
    "exp": (lambda s, *_: fg.exp(s) - s, lambda s: math.exp(s) - 1),
    "log": (lambda s, *_: fg.log(s + 9), lambda s: 1 / (s + 9)),
    "log2": (lambda s, *_: fg.log2(s + 9), lambda s: 1 / (s + 9) / math.log(2)),
    "sqrt": (lambda s, *_: fg.sqrt(s + 9), lambda s: 0.5 / math.sqrt(s + 9)),
    "sin": (lambda s, *_: fg.sin(s), lambda s: math.cos(s)),
    "cos": (lambda s, *_: fg.cos(s), lambda s: -math.sin(s)),
    "abs": (lambda s, *_: abs(s), lambda s: math.copysign(1, s)),
    "cube": (lambda s, *_: s**3, lambda s: 3 * s * s),
    "reciprocal": (lambda s, *_: 1 / (s + 9), lambda s: -1 / (s + 9) ** 2),
    "negative power": (lambda s, *_: (s + 9) ** -2, lambda s: -2 / (s + 9) ** 3),
    "power of a score": (lambda s, *_: 2**s, lambda s: 2**s * math.log(2)),
    "floor": (lambda s, *_: s + fg.floor(s * 5), lambda s: 1),
    "floor division": (lambda s, *_: s + s // 0.3, lambda s: 1),
    "remainder": (lambda s, *_: s % 0.3, lambda s: 1),
    "remainder by a score": (lambda s, *_: 7 % (s + 9), lambda s: -(7 // (s + 9))),
    "minimum": (lambda s, *_: fg.minimum(s, 0.1), lambda s: float(s < 0.1)),
    "maximum": (lambda s, *_: fg.maximum(2 * s, 0.1 - s), lambda s: 2 if 3 * s > 0.1 else -1),
    "where": (lambda s, *_: fg.where(s > 0.2, 3 * s, -s), lambda s: 3 if s > 0.2 else -1),
    "only positions": (lambda s, b, h, q, k: q - k + 0 * s, lambda s: 0),
    "head of the call": (lambda s, b, h, q, k: s * (h + 1) + 0 * s * k, lambda s: 1),
}


def slopes_at(s, spec, function):
    """The factors of q and k at a score of ``s``, from one query and two keys: s, then 0.

    With v = (1, 0), O is sigmoid(s'(s) - s'(0)).
    """
    q, k, v = (torch.zeros(1, 1, n, 8, dtype=torch.double) for n in (1, 2, 2))
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = s, 1.0, 1.0
    p = float(reference.attention(spec, q, k, v)[0][0, 0, 0, 0])
    dq, dk, _ = function(spec, q, k, v, torch.ones(1, 1, 1, 8, dtype=torch.double))
    return [float(g[0, 0, 0, 0]) / (p * (1 - p)) for g in (dq, dk)]


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_slope_of_every_function_is_that_of_the_textbook(name):
    score, slope = FUNCTIONS[name]
    spec = spec_of(None, score, scale=1.0)
    for s in (-1.7, -0.35, 0.15, 0.55, 2.25):
        expected = pytest.approx([slope(s), slope(s) * s], rel=1e-9, abs=1e-13)
        for function in (reference.gradients, reference.same_dtype_gradients):
            assert slopes_at(s, spec, function) == expected


@pytest.mark.parametrize(
    ("score", "slope"),
    [
        (lambda s, *_: fg.minimum(s, 0.5), 0.5),
        (lambda s, *_: fg.maximum(3 * s, 2 * s + 0.5), 2.5),
        (lambda s, *_: s + abs(s - 0.5), 1.0),
    ],
)
def test_the_slope_where_a_score_function_bends_is_that_of_torch(score, slope):
    # Equal arguments share it, and abs has none: spec/language defines the same for kernels.
    spec = spec_of(None, score, scale=1.0)
    assert slopes_at(0.5, spec, reference.gradients)[0] == pytest.approx(slope, rel=1e-12)


@BOTH
def test_the_number_of_slices_does_not_change_the_gradients(function, monkeypatch):
    case = Case(37, 41, 2, 6, 2, head_dim=8)
    q, k, v, dout, dlse = doubles(case)
    spec = spec_of(
        lambda b, h, q, k: q >= k, lambda s, b, h, q, k: s * (h + 1) + b - q + k, dropout=True
    )
    call = {"dropout_p": 0.3, "rng": STATE}
    whole = function(spec, q, k, v, dout, dlse, **call)
    out = reference.attention(spec, q, k, v, **call)
    # 5 rows of a pair at a time, then 2 whole pairs, which no group of 3 heads fits.
    for scores in (5 * 41, 2 * 37 * 41):
        monkeypatch.setattr("flashgen.reference.problem._SCORES_AT_ONCE", scores)
        assert_close(function(spec, q, k, v, dout, dlse, **call), whole, 1e-12)
        sliced = reference.attention(spec, q, k, v, **call)
        for one, other in zip(sliced, out, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_slices_of_rows_are_added_in_float32(monkeypatch):
    # One key: P = 1 and dv is the number of rows. Adding ones in bfloat16 would end at 256.
    q, k, v = Case(300, 1, dtype="bfloat16", head_dim=8).tensors()
    monkeypatch.setattr("flashgen.reference.problem._SCORES_AT_ONCE", 1)
    _, _, dv = reference.same_dtype_gradients(spec_of(), q, k, v, torch.ones_like(q))
    assert (dv == 300).all()


@pytest.mark.parametrize("p", [0.0, 0.17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "softcap", "alibi"])
def test_the_ordinary_gradients_are_as_far_from_the_oracle_as_their_dtype(name, dtype, p):
    case = Case(64, 64, 2, 4, 2, dtype=dtype)
    q, k, v = case.tensors()
    dout, dlse = doubles(case)[3:]
    dout, dlse = dout.to(q.dtype), dlse.float()
    spec = fg.load(SPECS[name]).replace(dtype=dtype, dropout=True)
    call = {"dropout_p": p, "rng": STATE}
    exact = reference.gradients(spec, q, k, v, dout, dlse, **call)
    same = reference.same_dtype_gradients(spec, q, k, v, dout, dlse, **call)
    eps = torch.finfo(q.dtype).eps
    for one, other in zip(same, exact, strict=True):
        assert one.dtype == q.dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        assert eps / 100 < error < 10 * eps
        assert reference.compare(one, other, one, factor=reference.GRADIENT_FACTOR).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ordinary_gradients_are_those_of_autograd_to_the_last_bit(dtype):
    case = Case(33, 47, 2, 8, 2, dtype=dtype, head_dim=16)
    leaves = [tensor.requires_grad_() for tensor in case.tensors()]
    q, k, v = leaves
    dout, dlse = doubles(case)[3:]
    dout, dlse = dout.to(q.dtype), dlse.float()
    kept = kept_by(0.25, case)
    wide_k, wide_v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    scores = (q @ wide_k.transpose(2, 3)) * 0.25
    scores = scores.masked_fill(~torch.ones(33, 47, dtype=torch.bool).tril(), -math.inf)
    p = scores.softmax(-1).masked_fill(~kept, 0) * (4 / 3)
    lse = scores.float().logsumexp(-1)
    expected = torch.autograd.grad([p @ wide_v, lse], leaves, [dout, dlse])

    spec = spec_of(lambda b, h, q, k: q >= k, dropout=True)
    found = reference.same_dtype_gradients(
        spec, *(leaf.detach() for leaf in leaves), dout, dlse, dropout_p=0.25, rng=STATE
    )
    for one, other in zip(found, expected, strict=True):
        # To the last bit, but where another order of the sum over 4 heads rounds differently.
        assert (one == other).double().mean() > 0.999
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(one.dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(middle_only, lambda s, b, h, q, k: fg.tanh(s) + s * s, dropout=True),
        spec_of(None, lambda s, b, h, q, k: s + fg.log(fg.maximum(q - 2, 0)), dropout=True),
    ],
    ids=["rows empty by the mask", "rows empty by the score"],
)
def test_autograd_through_the_oracle_itself_gives_its_gradients(spec):
    q, k, v, dout, dlse = doubles(Case(8, 8, 2, 4, 2, head_dim=8))
    call = {"dropout_p": 0.2, "rng": STATE}
    leaves = [operand.requires_grad_() for operand in (q, k, v)]
    out, lse = reference.attention(spec, *leaves, **call)
    assert lse.isinf().any()
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    found = reference.gradients(spec, *leaves, dout, dlse, **call)
    assert not any(g.requires_grad for g in found)
    assert_close(found, expected)


@BOTH
def test_gradients_of_another_shape_are_refused_and_not_broadcast(function):
    q, k, v, dout, dlse = doubles(CASE)
    spec = loaded("full")
    with pytest.raises(InputError, match="dout does not have the shape of out") as caught:
        function(spec, q, k, v, dout[:, :, :1])
    assert "(2, 4, 1, 16)" in caught.value.numbers
    assert "(2, 4, 7, 16)" in caught.value.numbers
    with pytest.raises(InputError, match="dlse does not have the shape of lse"):
        function(spec, q, k, v, dout, dlse[..., None])
    with pytest.raises(InputError, match="scalars given are not those"):
        function(spec, q, k, v, dout, scalars={"window": 1})


def test_kept_gradients_are_off_by_what_rounding_the_lse_and_the_output_once_makes() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, 2, 50, 8, generator=generator) for _ in range(4))
    spec = fg.AttentionSpec(head_dim=8, dtype="float32")
    exact = reference.gradients(spec, q, k, v, dout)
    kept = reference.kept_gradients(spec, q, k, v, dout)
    for near, right in zip(kept, exact, strict=True):
        off = float((near - right).abs().max() / right.abs().max())
        assert 0 < off < 2**-21
