"""The tiled algorithms against the oracle: every spec, length, dtype and layout, and edge cases."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.cpu import chunks
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.dropout import keep_mask
from flashgen.spec.language.spec import AttentionSpec
from tests.support.examples import SPECS, fitted, values_of
from tests.support.judged import judge_forward
from tests.support.masks import causal
from tests.support.shapes import Case, covering
from tests.support.tiers import one_in, slow
from tests.support.tiled_calls import both, forward

STATE = (2**63 - 11, 2**35 + 3)
EMPTY_ROWS = {"q_offset": 0, "k_offset": 40}
"""Under a causal mask the first 40 queries have no key."""


def loaded(path: Path, case: Case) -> AttentionSpec:
    return fg.load(path).replace(
        dtype=case.dtype, head_dim=case.head_dim, head_dim_v=case.head_dim_v or case.head_dim
    )


def spec_of(mask=causal, score=None, **options) -> AttentionSpec:
    given = {"head_dim": 8, "dtype": "float32", "dropout": True, **options}
    return AttentionSpec(mask, score, **given)


def gradient_of(tensor: torch.Tensor, dim: int, seed: int) -> torch.Tensor:
    """Standard normal numbers of the dtype of ``tensor``, its rows ``dim`` long."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*tensor.shape[:3], dim, generator=generator).to(tensor.dtype)


def acceptable(verdict: reference.Verdict, dtype: torch.dtype) -> bool:
    """The error rule; for float32 with an RMS of at most 1.5 times PyTorch's, instead of 1.2.

    dK and dV are added up in float32 over all query heads of a group in one chain, which PyTorch
    adds head by head: with six heads its RMS is 1.3 times as large.
    """
    if dtype != torch.float32 or verdict.ok:
        return verdict.ok
    return (
        verdict.nans == 0
        and verdict.infinities == 0
        and verdict.max_error <= verdict.max_allowed
        and verdict.rms_error <= 1.5 / reference.RMS_FACTOR * verdict.rms_allowed
    )


def check(path: Path, case: Case, **options) -> None:
    """One problem, forward and backward, by the error rule."""
    spec = loaded(path, case).replace(dropout="dropout_p" in options)
    case = fitted(spec, case)
    offsets = {name: options[name] for name in ("q_offset", "k_offset") if name in options}
    options = values_of(path, case, **offsets) | options
    q, k, v = case.tensors(seed=case.scores % 1000)
    dout = gradient_of(q, v.shape[3], 1)
    dlse = gradient_of(q, 1, 2)[..., 0].float() if spec.is_softmax else None
    out, lse, *gradients = both(spec, q, k, v, dout, dlse, **options)

    judge_forward((out, lse), spec, q, k, v, **options)
    of = (spec, q, k, v, dout, dlse)
    for name, verdict in reference.judge_gradients(gradients, *of, **options).items():
        assert acceptable(verdict, q.dtype), f"{name}: {verdict}"
    assert {gradient.dtype for gradient in gradients[:3]} == {q.dtype}
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32


# Each spec with one case in `make test`, with another in the slow tier.
COVERING = [
    pytest.param(path, case, id=f"{path.stem}-{case.id}", marks=[pytest.mark.slow] * turn)
    for number, path in enumerate(SPECS)
    for turn, case in enumerate(covering(seed=number, most_scores=600_000)[number % 6 :: 6])
]


@pytest.mark.parametrize(("path", "case"), COVERING)
def test_every_spec_meets_the_error_rule(path: Path, case: Case) -> None:
    check(path, case)


# Every fourth spec with one dtype in `make test`, the rest in the slow tier.
SHIFTED = [
    pytest.param(path, dtype, id=f"{path.stem}-{dtype}", marks=[] if fast else pytest.mark.slow)
    for number, path in enumerate(SPECS)
    for place, dtype in enumerate(("float16", "bfloat16", "float32"))
    for fast in [number % 4 == 0 and (number + place) % 3 == 0]
]


@pytest.mark.parametrize(("path", "dtype"), SHIFTED)
def test_every_spec_meets_the_error_rule_with_dropout_and_offsets(path: Path, dtype: str) -> None:
    case = Case(77, 130, 2, 4, 2, dtype, 40, 24)
    check(path, case, q_offset=50, k_offset=3, dropout_p=0.17, rng=STATE)


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "batch", "heads"),
    [(0, 5, 2, 4), (5, 0, 2, 4), (0, 0, 2, 4), (5, 7, 0, 4), (5, 7, 2, 0)],
)
def test_where_a_size_is_0_there_are_zeros_and_minus_infinity(seq_q, seq_k, batch, heads):
    q, k, v = Case(seq_q, seq_k, batch, heads, heads // 2, "float32", 8, 16).tensors()
    dout = gradient_of(q, 16, 0)
    out, lse, *gradients = both(spec_of(head_dim_v=16), q, k, v, dout, torch.ones(q.shape[:3]))
    assert out.shape == (batch, heads, seq_q, 16)
    assert lse.shape == (batch, heads, seq_q)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for gradient, operand in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == operand.shape
        assert (gradient == 0).all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_fully_masked_rows_are_exact_zeros(dropout_p):
    q, k, v = Case(100, 90, 2, 4, 2, "float32", 8).tensors()
    dout, dlse = gradient_of(q, 8, 1), gradient_of(q, 1, 2)[..., 0]
    dlse[:, :, :40] = math.nan  # what logaddexp of two such rows would send back
    out, lse, dq, dk, dv = both(
        spec_of(), q, k, v, dout, dlse, **EMPTY_ROWS, dropout_p=dropout_p, rng=STATE
    )
    assert (out[:, :, :40] == 0).all()
    assert (lse[:, :, :40] == -math.inf).all()
    assert (dq[:, :, :40] == 0).all()
    assert (dk[:, :, 60:] == 0).all(), "no query reaches these keys"
    assert (dv[:, :, 60:] == 0).all()
    for tensor in (out, lse[:, :, 40:], dq, dk, dv):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s * fg.sqrt(fg.maximum(q - k + 1, 0)) + (s - s) / (q - k + 1),
        lambda s, b, h, q, k: fg.log(fg.where(k <= q, 1, 0) * (s * s + 1)),
        lambda s, b, h, q, k: fg.where(k <= q, s, fg.sqrt(s - s)) + fg.sqrt(s * s * (q - k + 1)),
    ],
)
def test_a_derivative_that_is_infinite_or_nan_where_the_mask_is_false_does_no_harm(score):
    spec, offsets = spec_of(score=score), {"q_offset": 10, "k_offset": 20}
    q, k, v = (x.double() for x in Case(40, 25, 1, 2, 1, "float32", 8).tensors())
    dout = gradient_of(q, 8, 3)
    out, lse, *gradients = both(spec, q, k, v, dout, **offsets)
    assert (gradients[0][:, :, :10] == 0).all()
    exact = reference.attention(spec, q, k, v, **offsets)
    exact += reference.gradients(spec, q, k, v, dout, **offsets)
    for found, expected in zip((out, lse, *gradients), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_masked_elements_of_a_mixed_tile_weigh_exactly_nothing():
    q, k, v = Case(16, 16, 1, 1, 1, "float32", 8).tensors()
    dout = gradient_of(q, 8, 3)
    dout[:, :, :9] = 0
    v[:, :, 9:] = 1e38  # rows before the ninth do not see it, the rest are not compared
    out, _, _, _, dv = both(spec_of(), q, k, v, dout, block_q=16, block_k=16)
    v[:, :, 9:] = 0
    expected, *_ = both(spec_of(), q, k, v, dout, block_q=16, block_k=16)
    assert torch.equal(out[:, :, :9], expected[:, :, :9])
    dout = torch.zeros_like(dout)
    dout[:, :, :9] = 1e38
    *_, dv = both(spec_of(), q, k, v, dout, block_q=16, block_k=16)
    assert (dv[:, :, 9:] == 0).all()


def cancelling(weights: torch.Tensor) -> torch.Tensor:
    """float16 factors with which the sum of the weighted is nearly 0, so that roundings show."""
    factors = torch.ones_like(weights)
    factors[0] = -weights[1:].sum() / weights[0]
    return factors.half().double()


def test_p_and_ds_are_rounded_to_the_operands_dtype_before_their_products():
    spec = spec_of(None, dtype="float16", scale=1.0)
    q, k, v = (torch.zeros(1, 1, 30, 8, dtype=torch.float16) for _ in range(3))
    generator = torch.Generator().manual_seed(3)
    # Column 0 makes the scores; the others of v and k are free to choose.
    q[..., 0] = torch.rand(30, generator=generator)
    k[..., 0] = torch.rand(30, generator=generator)
    dout = torch.zeros_like(q)
    s = q[0, 0, :, :1].double() @ k[0, 0, :, :1].double().T
    p, unnormalised = s.softmax(-1), (s[0] - s[0].max()).exp()

    def check(found: torch.Tensor, weights: torch.Tensor, factors: torch.Tensor, total=1.0):
        exact = float((weights * factors).sum() / total)
        rounded = float((weights.half().double() * factors).sum() / total)
        assert abs(float(found) - rounded) < 0.05 * abs(rounded - exact), (rounded, exact)

    v[0, 0, :, 1] = cancelling(unnormalised).half()
    out, *_ = both(spec, q, k, v, dout)
    check(out[0, 0, 0, 1], unnormalised, v[0, 0, :, 1].double(), unnormalised.sum())

    dout[0, 0, :, 1] = cancelling(p[:, 0]).half()
    *_, dv = both(spec, q, k, v, dout)
    check(dv[0, 0, 0, 1], p[:, 0], dout[0, 0, :, 1].double())

    v[0, 0, :, 1] = torch.rand(30, generator=generator)
    dout[0, 0, :, 1] = 1
    dp = v[0, 0, :, 1].double()
    ds = p[0] * (dp - float(forward(spec, q, k, v)[0][0, 0, 0, 1]))
    k[0, 0, :, 1] = cancelling(ds).half()
    _, _, dq, *_ = both(spec, q, k, v, dout)
    check(dq[0, 0, 0, 1], ds, k[0, 0, :, 1].double())


def test_a_score_of_minus_infinity_counts_as_masked():
    spec = spec_of(None, lambda s, b, h, q, k: s + fg.log(fg.maximum(q - k, 0)))
    q, k, v = (x.double() for x in Case(37, 30, 1, 2, 2, "float32", 8).tensors())
    dout, dlse = gradient_of(q, 8, 3), gradient_of(q, 1, 4)[..., 0]
    got = both(spec, q, k, v, dout, dlse)
    exact = reference.attention(spec, q, k, v)
    exact += reference.gradients(spec, q, k, v, dout, dlse)
    assert (got[1][:, :, 0] == -math.inf).all()
    assert (got[2][:, :, 0] == 0).all()
    for found, expected in zip(got, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_rows_of_very_low_and_very_high_scores_keep_their_softmax():
    q, k, v = Case(40, 33, 1, 1, 1, "float32", 8).tensors()
    for shift in (-2e4, 2e4):
        spec = spec_of(score=lambda s, b, h, q, k, shift=shift: s * 16 + shift)
        out, lse = forward(spec, q, k, v)
        exact, exact_lse = reference.attention(spec, q, k, v)
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)


ODDS = fg.Tensor("odds", ("keys",), "int64")
COMPOSED = {
    "an angle to a choice": lambda s, b, h, q, k: fg.atan2(
        fg.maximum(s, k - 9), 1 + fg.abs(fg.clamp(fg.clamp(-0.5, -1, 1.5), -1, 1.5))
    ),
    "angles of signs": lambda s, b, h, q, k: (
        fg.atan2(fg.sigmoid(fg.sign(h) * 0.05), 1 + fg.abs(fg.exp(-fg.abs(s))))
        / (1.5 + fg.abs(fg.clamp(fg.tanh(s), -1, 1.5)))
    ),
    "a power of a choice": lambda s, b, h, q, k: (
        (1 + fg.abs(fg.clamp(fg.clamp(-0.5, -1, 1.5), -1, 1.5))) ** fg.maximum(s, fg.minimum(s, 2))
    ),
    "a shift of an element of 64 bits": lambda s, b, h, q, k: s + (ODDS[k] << (k & 3)) * 0.03,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_choices_inside_of_functions_and_shifts_inside_of_scores_are_differentiated(name: str):
    q, k, v = (x.double() for x in Case(12, 30, 1, 2, 2, "float32", 8).tensors())
    spec = spec_of(score=COMPOSED[name], dropout=False)
    captured = {"tensors": {"odds": torch.arange(-15, 15)}} if "shift" in name else {}
    dout = gradient_of(q, 8, 3)
    got = both(spec, q, k, v, dout, **captured)
    exact = reference.attention(spec, q, k, v, **captured)
    exact += reference.gradients(spec, q, k, v, dout, **captured)
    for found, expected in zip(got, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_heads_batch_sizes_and_scalars_are_those_of_the_call():
    slope = fg.Scalar("slope", "float32")
    width = fg.Scalar("width", "int32")
    on = fg.Scalar("on", "bool")

    def mask(b, h, q, k):
        return (q - k < width + 3 * h) & ((k + b) % 3 != 0) | ~on

    def score(s, b, h, q, k):
        return s + slope * h * (k - q) / fg.seq_k + b / fg.batch - fg.heads * fg.seq_q / 100

    spec = spec_of(mask, score)
    q, k, v = (x.double() for x in Case(61, 70, 3, 6, 2, "float32", 8).tensors())
    dout = gradient_of(q, 8, 3)
    for flag in (True, False):
        options = {"scalars": {"slope": 0.1, "width": 5, "on": flag}, "q_offset": 4}
        got = both(spec, q, k, v, dout, **options, block_q=16, block_k=16)
        exact = reference.attention(spec, q, k, v, **options)
        exact += reference.gradients(spec, q, k, v, dout, **options)
        for found, expected in zip(got, exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["sequence_major", "gaps"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_memory_layout_does_not_matter(layout, heads):
    case = Case(65, 50, 2, *heads, "float32", 16)
    other = Case(65, 50, 2, *heads, "float32", 16, layout=layout)
    plain, strided = case.tensors(), other.tensors()
    dout = gradient_of(plain[0], 16, 5)
    wide = torch.full((2, heads[0], 65, 32), math.nan)
    wide[..., ::2] = dout
    options = {"dropout_p": 0.1, "rng": torch.tensor(STATE)}
    expected = both(spec_of(head_dim=16), *plain, dout, **options)
    found = both(spec_of(head_dim=16), *strided, wide[..., ::2], **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_expanded_operands_are_read_as_they_are():
    q, k, v = Case(20, 20, 1, 1, 1, "float32", 8).tensors()
    wide = [x.expand(3, 2, -1, -1) for x in (q, k, v)]
    dout = gradient_of(wide[0], 8, 1)
    for a, b in zip(
        both(spec_of(), *wide, dout),
        both(spec_of(), *(x.contiguous() for x in wide), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_out_has_its_axes_in_memory_as_q_has_them():
    q, k, v = Case(9, 9, 2, 4, 4, "float32", 8, 16, layout="sequence_major").tensors()
    out, _ = forward(spec_of(head_dim_v=16), q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    out, _ = forward(spec_of(head_dim_v=16), q.contiguous(), k, v)
    assert out.is_contiguous()


@pytest.mark.parametrize("tile", [(16, 16), (33, 7), (128, 256), (1, 3)])
def test_tiles_of_any_size_give_the_same_within_rounding(tile):
    score = spec_of(score=lambda s, b, h, q, k: 5 * fg.tanh(s / 5) + (k - q) * 0.01)
    q, k, v = (x.double() for x in Case(70, 90, 2, 4, 2, "float32", 8).tensors())
    dout, dlse = gradient_of(q, 8, 1), gradient_of(q, 1, 2)[..., 0]
    options = {"dropout_p": 0.2, "rng": STATE, "q_offset": 9}
    expected = both(score, q, k, v, dout, dlse, **options)
    found = both(score, q, k, v, dout, dlse, block_q=tile[0], block_k=tile[1], **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", [(None, None), (16, 16), (19, 35)])
def test_dropout_keeps_the_same_elements_whatever_the_tiles(tile):
    """With V the identity O is P after dropout, and with dO all ones dV its column sums."""
    batch, heads, rows, keys = 2, 3, 70, 64
    spec = spec_of(None, head_dim_v=64)
    q, k, _ = Case(rows, keys, batch, heads, 1, "float32", 8).tensors()
    v = torch.eye(keys).expand(batch, 1, keys, keys)
    blocks = {"block_q": tile[0], "block_k": tile[1]}
    options = {"dropout_p": 0.4, "rng": STATE, "q_offset": 100, **blocks}
    out, _lse = forward(spec, q, k, v, **options)
    kept = keep_mask(0.4, *STATE, np.arange(batch * heads), range(100, 100 + rows), range(keys))
    assert torch.equal(out != 0, torch.from_numpy(kept).view(batch, heads, rows, keys))

    for row in (0, 17, 69):
        dout = torch.zeros_like(out)
        dout[:, :, row] = 1
        gradients = both(spec, q, k, v, dout, **options)
        assert torch.equal(
            gradients[4][:, 0].sum(-1) != 0,
            torch.from_numpy(kept).view(batch, heads, rows, keys)[:, :, row].any(1),
        )


def test_equal_arguments_give_equal_bits():
    q, k, v = Case(130, 100, 3, 4, 2, "bfloat16", 32).tensors()
    dout = gradient_of(q, 32, 1)
    spec = spec_of(head_dim=32, dtype="bfloat16")
    runs = [both(spec, q, k, v, dout, dropout_p=0.1, rng=STATE) for _ in range(3)]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a, b)


def test_gradients_that_are_tracked_and_autocast_change_nothing():
    q, k, v = Case(40, 40, 1, 2, 2, "float32", 8).tensors()
    dout = gradient_of(q, 8, 1)
    expected = both(spec_of(), q, k, v, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both(spec_of(), *leaves, dout)
    for a, b in zip(found, expected, strict=True):
        assert not a.requires_grad
        assert torch.equal(a, b)


def test_many_heads_are_computed_in_chunks_with_the_same_result(monkeypatch):
    q, k, v = Case(30, 40, 3, 8, 4, "float32", 8).tensors()
    dout = gradient_of(q, 8, 1)
    spec = spec_of(score=lambda s, b, h, q, k: s + (h + 10 * b) * 0.01 * k)
    options = {"dropout_p": 0.3, "rng": STATE}
    expected = both(spec, q, k, v, dout, **options)
    for elements in (1, 5000, 12000):
        monkeypatch.setattr(chunks, "ELEMENTS", elements)
        for a, b in zip(both(spec, q, k, v, dout, **options), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", one_in(2, ["float16", "float32"]))
@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_rows_of_the_lowest_float_are_means_as_in_torch(backend: str, dtype: str) -> None:
    """What additive masks are filled with: a computed score is never removed, however low it is."""
    x = fg.Tensor("x", ("rows", "columns"), "float32")
    spec = spec_of(None, lambda s, b, h, q, k: s + x[q, k], dtype=dtype, dropout=False)
    q, k, v = Case(40, 50, 1, 2, 2, dtype, 8).tensors()
    bias = torch.zeros(40, 50)
    bias[:8] = torch.finfo(torch.float32).min
    bias[20:, 30:] = torch.finfo(torch.float32).min
    values = {"tensors": {"x": bias}, "backend": backend}
    run = run_forward(spec, q, k, v, **values)
    dout = gradient_of(q, 8, 1)
    back = run_backward(spec, q, k, v, run.out, run.lse, dout, **values)
    exact, _ = reference.attention(spec, q, k, v, tensors={"x": bias})
    same, _ = reference.same_dtype(spec, q, k, v, tensors={"x": bias})
    assert reference.compare(run.out, exact, same)
    means = v.double().mean(2, keepdim=True)
    torch.testing.assert_close(exact[:, :, :8], means.expand(-1, -1, 8, -1), atol=1e-9, rtol=0)
    assert (run.lse[:, :, :8] == torch.finfo(torch.float32).min).all()
    found = (back.dq, back.dk, back.dv)
    judged = reference.judge_gradients(found, spec, q, k, v, dout, tensors={"x": bias})
    assert all(verdict.ok for verdict in judged.values()), judged
