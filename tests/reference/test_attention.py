"""The oracle against torch's own attention and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashgen as fg
from flashgen import reference
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec
from tests.support.masks import causal
from tests.support.plain_attention import doubles
from tests.support.shapes import DTYPES, HEADS, LENGTHS, Case


def spec_of(mask=None, score=None, **options) -> AttentionSpec:
    return AttentionSpec(mask_mod=mask, score_mod=score, **options)


@pytest.mark.parametrize("lengths", LENGTHS[:8], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_full_attention_is_that_of_torch_in_float64(lengths, heads):
    q, k, v, *_ = doubles(Case(*lengths, 3, *heads))
    out, _ = reference.attention(spec_of(), q, k, v)
    torch.testing.assert_close(out, sdpa(q, k, v, enable_gqa=True), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (113, 203), (257, 257)], ids=str)
def test_causal_attention_is_that_of_torch_in_float64(lengths):
    q, k, v, *_ = doubles(Case(*lengths, 2, 4, 2))
    out, _ = reference.attention(spec_of(causal), q, k, v)
    expected = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_lse_is_the_natural_log_of_the_sum():
    q, k, v, *_ = doubles(Case(5, 7, 2, 3, 3, head_dim=8))
    _, lse = reference.attention(spec_of(head_dim=8), q, k, v)
    expected = torch.log((q @ k.transpose(2, 3) / math.sqrt(8)).exp().sum(-1))
    torch.testing.assert_close(lse, expected, rtol=1e-12, atol=1e-12)


def test_two_keys_worked_out_by_hand():
    q = torch.tensor([[[[2.0] + [0.0] * 7]]])
    k = torch.tensor([[[[0.0] * 8, [1.0] + [0.0] * 7]]])
    v = torch.tensor([[[[1.0] * 8, [5.0] * 8]]])
    out, lse = reference.attention(spec_of(head_dim=8, scale=0.5), q, k, v)
    # s = (0, 1): weights 1 / (1 + e) and e / (1 + e).
    weight = math.e / (1 + math.e)
    assert out[0, 0, 0].tolist() == pytest.approx([1 + 4 * weight] * 8, rel=1e-14)
    assert float(lse) == pytest.approx(math.log(1 + math.e), rel=1e-14)


def test_a_row_without_keys_is_zero_with_lse_minus_infinity():
    q, k, v, *_ = doubles(Case(6, 6, head_dim=8))
    out, lse = reference.attention(
        spec_of(lambda b, h, q, k: (q < 3) & (q >= k), head_dim=8), q, k, v
    )
    assert (out[:, :, 3:] == 0).all()
    assert (lse[:, :, 3:] == -math.inf).all()
    assert out[:, :, :3].abs().min() > 0
    assert lse[:, :, :3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ordinary_computation_gives_zero_for_a_row_without_keys(dtype):
    q, k, v = Case(6, 6, dtype=dtype, head_dim=8).tensors()
    spec = spec_of(lambda b, h, q, k: q < 3, head_dim=8)
    out, lse = reference.same_dtype(spec, q, k, v)
    assert out.dtype == q.dtype
    assert (out[:, :, 3:] == 0).all()
    assert (lse[:, :, 3:] == -math.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("function", [reference.attention, reference.same_dtype])
def test_no_queries_and_no_keys_have_defined_results(function):
    q, k, v = Case(0, 5, 2, 4, 2, head_dim=8, head_dim_v=16).tensors()
    out, lse = function(spec_of(head_dim=8, head_dim_v=16), q, k, v)
    assert (out.shape, lse.shape) == ((2, 4, 0, 16), (2, 4, 0))
    q, k, v = Case(5, 0, 2, 4, 2, head_dim=8, head_dim_v=16).tensors()
    out, lse = function(spec_of(head_dim=8, head_dim_v=16), q, k, v)
    assert out.shape == (2, 4, 5, 16)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_value_head_dim_may_differ():
    q, k, v, *_ = doubles(Case(9, 11, 2, 2, 2, head_dim=24, head_dim_v=8))
    out, _ = reference.attention(spec_of(causal, head_dim=24, head_dim_v=8), q, k, v)
    torch.testing.assert_close(out, sdpa(q, k, v, is_causal=True), rtol=1e-12, atol=1e-13)


def test_offsets_make_a_chunk_see_what_it_would_see_in_the_whole():
    def mask(b, h, q, k):
        return (q >= k) & ((q + k) % 3 != 0)

    def score(score, b, h, q, k):
        return score + (q - k) / 7

    q, k, v, *_ = doubles(Case(32, 32, 1, 2, 2, head_dim=8))
    spec = spec_of(mask, score, head_dim=8)
    whole, whole_lse = reference.attention(spec, q, k, v)
    part, part_lse = reference.attention(spec, q[:, :, 20:], k, v, q_offset=20)
    torch.testing.assert_close(part, whole[:, :, 20:])
    torch.testing.assert_close(part_lse, whole_lse[:, :, 20:])

    # Two halves of the keys, put together by their lse, are the whole.
    first, first_lse = reference.attention(spec, q, k[:, :, :16], v[:, :, :16])
    second, second_lse = reference.attention(spec, q, k[:, :, 16:], v[:, :, 16:], k_offset=16)
    joint = torch.logaddexp(first_lse, second_lse)
    total = first * (first_lse - joint).exp()[..., None]
    total += second * (second_lse - joint).exp()[..., None]
    rows = joint.isfinite()
    torch.testing.assert_close(total[rows], whole[rows])
    torch.testing.assert_close(joint, whole_lse)


def test_batch_head_and_sizes_are_those_of_the_call():
    def score(score, b, h, q, k):
        return score * 0 + b + 10 * h + 100 * fg.batch + 1000 * fg.heads + fg.seq_q / fg.seq_k

    q, k, v, *_ = doubles(Case(4, 1, 3, 6, 2, head_dim=8))
    _, lse = reference.attention(spec_of(None, score, head_dim=8), q, k, v)
    b, h = torch.arange(3)[:, None, None], torch.arange(6)[None, :, None]
    torch.testing.assert_close(lse, (b + 10 * h + 300 + 6000 + 4.0).double().expand(3, 6, 4))


def test_scalars_arrive_as_the_kernel_receives_them():
    slope, window, on = (
        fg.Scalar("slope", "float32"),
        fg.Scalar("window", "int32"),
        fg.Scalar("on", "bool"),
    )
    spec = spec_of(
        lambda b, h, q, k: ~on | (q - k < window),
        lambda score, b, h, q, k: score + slope * k,
        head_dim=8,
    )
    q, k, v, *_ = doubles(Case(4, 4, head_dim=8))
    q = q * 0
    scalars = {"slope": 0.1, "window": 0, "on": True}
    _, lse = reference.attention(spec, q, k, v, scalars=scalars)
    rounded = float(torch.tensor(0.1))
    expected = [
        math.log(sum(math.exp(rounded * key) for key in range(4) if row - key < 0))
        if row < 3
        else -math.inf
        for row in range(4)
    ]
    assert lse.flatten().tolist() == pytest.approx(expected, rel=1e-12)
    _, lse = reference.attention(spec, q, k, v, scalars={**scalars, "on": False})
    everything = math.log(sum(math.exp(rounded * key) for key in range(4)))
    assert lse.flatten().tolist() == pytest.approx([everything] * 4, rel=1e-12)


def test_scalars_that_do_not_fit_the_spec_are_refused():
    q, k, v = Case(2, 2, head_dim=8).tensors()
    with pytest.raises(InputError, match="not those of the spec") as caught:
        reference.attention(spec_of(head_dim=8), q, k, v, scalars={"window": 3})
    assert "given: window; expected: none" in str(caught.value)
    window = fg.Scalar("window")
    with pytest.raises(InputError, match="not those of the spec"):
        reference.attention(spec_of(lambda b, h, q, k: q - k < window, head_dim=8), q, k, v)


def test_memory_layout_does_not_matter():
    one = Case(33, 17, 2, 4, 2, head_dim=8)
    results = []
    for layout in ("contiguous", "sequence_major", "gaps"):
        q, k, v = Case(33, 17, 2, 4, 2, head_dim=8, layout=layout).tensors()
        assert (q == one.tensors()[0]).all()
        results.append(reference.attention(spec_of(causal, head_dim=8), q, k, v)[0])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ordinary_computation_is_as_far_from_the_oracle_as_its_dtype(dtype):
    q, k, v = Case(64, 64, 2, 4, 2, dtype=dtype).tensors()
    exact, exact_lse = reference.attention(spec_of(causal), q, k, v)
    out, lse = reference.same_dtype(spec_of(causal), q, k, v)
    eps = torch.finfo(q.dtype).eps
    error = (out.double() - exact).abs().max()
    assert eps / 100 < error < 30 * eps
    assert (lse.double() - exact_lse).abs().max() < 30 * eps
