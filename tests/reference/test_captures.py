"""Captured tensors in the oracle: what is read, and gradients against autograd of plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import B, H, K, Q
from flashgen.spec.language.tracing import trace_mask, trace_score
from tests.support.captured import K_OFFSET, Q_OFFSET, VARIANTS, plain_attention, plain_gradients
from tests.support.plain_attention import STATE, doubles, kept_by
from tests.support.shapes import Case
from tests.support.tiers import slow

CASE = Case(7, 11, 2, 4, 2, head_dim=8)
OFFSETS = {"q_offset": Q_OFFSET, "k_offset": K_OFFSET}
BOTH = pytest.mark.parametrize(
    "function", [reference.gradients, reference.same_dtype_gradients], ids=["exact", "same dtype"]
)


def spec_of(mask=None, score=None, **options) -> AttentionSpec:
    return AttentionSpec(mask_mod=mask, score_mod=score, head_dim=8, **options)


def assert_close(found, expected, tolerance: float = 1e-12) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert not one.isnan().any(), number
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("p", "offsets"), [(0.0, {}), (0.17, OFFSETS)], ids=["plain", "offsets and dropout"]
)
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_gradients_are_those_of_plain_pytorch(name, p, offsets):
    q, k, v, dout, dlse = doubles(CASE)
    variant = VARIANTS[name]
    spec, tensors = variant.spec(dropout=True), variant.tensors(CASE)
    call = {"tensors": tensors, "dropout_p": p, "rng": STATE, **offsets}
    kept = kept_by(p, CASE, **offsets)
    dropped = {"kept": kept, "keep_probability": round((1 - p) * 65536) / 65536}
    out, lse = reference.attention(spec, q, k, v, **call)
    expected = plain_attention(variant, q, k, v, tensors, **dropped, **offsets)
    assert_close((out, lse), expected)
    expected = plain_gradients(variant, q, k, v, tensors, dout, dlse, **dropped, **offsets)
    found = reference.gradients(spec, q, k, v, dout, dlse, **call)
    assert [g.dtype for g in found] == [torch.float64] * len(expected)
    assert_close(found, expected)
    assert_close(reference.same_dtype_gradients(spec, q, k, v, dout, dlse, **call), expected)
    near = reference.kept_gradients(spec, q, k, v, dout, dlse, **call)
    assert_close(near, expected, 1e-5)


def test_autograd_through_the_oracle_itself_gives_the_same_gradients():
    q, k, v, dout, dlse = doubles(CASE)
    variant = VARIANTS["one tensor in a product"]
    spec, tensors = variant.spec(), variant.tensors(CASE)
    leaves = [x.requires_grad_() for x in (q, k, v, *tensors.values())]
    out, lse = reference.attention(spec, q, k, v, tensors=tensors)
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    found = reference.gradients(spec, q, k, v, dout, dlse, tensors=tensors)
    assert not any(g.requires_grad for g in found)
    assert_close(found, expected)


# What is read.

POSITIONS = torch.arange(-9, 10)


def grid(expr, symbol, tensor, **more):
    values = {Q: POSITIONS[:, None], K: POSITIONS, B: torch.tensor(1), H: torch.tensor(2)}
    return reference.evaluate(expr, {**values, symbol: tensor, **more}).expand(19, 19)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int8", "bool"])
def test_an_index_outside_means_the_nearest_element(dtype):
    x = fg.Tensor("x", ("n", 3, "m"), dtype)
    tensor = torch.arange(-12, 12).view(4, 3, 2).to(getattr(torch, dtype))

    def score(s, b, h, q, k):
        element = x[q, 1, k // 2]
        return fg.where(element, 1.0, 0.0) if dtype == "bool" else 1.0 * element

    expr = trace_score(score).expr
    found = grid(expr, x.symbol, tensor)
    for i, q in enumerate(POSITIONS.tolist()):
        for j, k in enumerate(POSITIONS.tolist()):
            element = tensor[min(max(q, 0), 3), 1, min(max(k // 2, 0), 1)]
            assert float(found[i, j]) == float(element), (q, k)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.full((8, 9), 99.0)[1::2, 2:5].copy_(x),
        lambda x: x[:, :1].expand(4, 3),
        lambda x: x[:1].expand(4, 3),
        lambda x: x[2, 1].expand(4, 3),
    ],
    ids=["transposed", "with gaps", "shared columns", "shared rows", "one element"],
)
def test_strides_are_followed(view):
    x = fg.Tensor("x", ("n", "m"))
    expr = trace_score(lambda s, b, h, q, k: x[q, k] + x[k, 1]).expr
    tensor = view(torch.randn(4, 3))
    assert not tensor.is_contiguous()
    assert torch.equal(grid(expr, x.symbol, tensor), grid(expr, x.symbol, tensor.contiguous()))


def test_integers_are_exact_and_not_those_of_a_narrow_dtype():
    big = fg.Tensor("big", ("n",), "int64")
    expr = trace_mask(lambda b, h, q, k: big[0] < big[1]).expr
    assert reference.evaluate(expr, {big.symbol: torch.tensor([2**59, 2**59 + 1])})
    small = fg.Tensor("small", ("n",), "int8")
    expr = trace_mask(lambda b, h, q, k: 2 * small[0] + small[1] == 381).expr
    assert reference.evaluate(expr, {small.symbol: torch.tensor([127, 127], dtype=torch.int8)})


def test_floats_are_computed_with_in_the_real_dtype():
    x = fg.Tensor("x", (), "bfloat16")
    expr = trace_score(lambda s, b, h, q, k: x / 3).expr
    for real in (torch.float32, torch.float64):
        found = reference.evaluate(expr, {x.symbol: torch.tensor(1.0).bfloat16()}, real)
        assert found.dtype == real
        assert float(found) == float(torch.tensor(1.0, dtype=real) / 3)


def test_an_index_may_be_an_element_or_a_rounded_score():
    x = fg.Tensor("x", ("n",), grad=True)
    i = fg.Tensor("i", ("m",), "uint8")
    q, k, v, dout, dlse = doubles(Case(5, 6, head_dim=8))
    tensors = {"x": torch.arange(7.0).double(), "i": torch.tensor([200, 3, 0], dtype=torch.uint8)}
    spec = spec_of(None, lambda s, b, h, q, k: s + x[i[k] - q] * x[fg.floor(3 * s)])
    found = reference.gradients(spec, q, k, v, dout, dlse, tensors=tensors)

    leaf = tensors["x"].clone().requires_grad_()
    s = q @ k.transpose(2, 3) / math.sqrt(8)
    of_element = tensors["i"].long()[torch.arange(6).clamp(0, 2)] - torch.arange(5)[:, None]
    product = leaf[of_element.clamp(0, 6)] * leaf[(3 * s).floor().clamp(0, 6).long()]
    p = (s + product).softmax(-1)
    loss = (p @ v * dout).sum() + ((s + product).logsumexp(-1) * dlse).sum()
    assert_close(found[3:], torch.autograd.grad(loss, [leaf]))


# Gradients where there is nothing to differentiate, or nothing finite.


@BOTH
def test_what_is_masked_adds_exactly_0_whatever_the_derivative_is_there(function):
    x = fg.Tensor("x", ("n",), grad=True)
    q, k, v, dout, dlse = doubles(Case(6, 8, 2, 4, 2, head_dim=8))
    kept = lambda b, h, q, k: (k < 6) & (q != 2)  # noqa: E731
    values = torch.rand(8, dtype=torch.double) + 0.5
    values[6:] = 0
    dlse[:, :, 2] = math.nan  # of a row without a key
    for score in (
        lambda s, b, h, q, k: s + fg.sqrt(x[k]),  # an infinite slope
        lambda s, b, h, q, k: s / x[k],  # and value
        lambda s, b, h, q, k: s * fg.log(x[k] * x[k]),  # 0 / 0
    ):
        found = function(spec_of(kept, score), q, k, v, dout, dlse, tensors={"x": values})
        assert all(g.isfinite().all() for g in found)
        assert (found[3][6:] == 0).all()
        assert (found[3][:6] != 0).all()
        near = [k[:, :, :6], v[:, :, :6]]
        near = function(spec_of(kept, score), q, *near, dout, dlse, tensors={"x": values[:6]})
        assert_close([found[3][:6]], [near[3]], 1e-9)


@BOTH
def test_where_the_score_function_gives_minus_infinity_nothing_is_added(function):
    x = fg.Tensor("x", ("n",), grad=True)
    q, k, v, dout, dlse = doubles(Case(6, 8, head_dim=8))
    values = torch.rand(8, dtype=torch.double) + 0.5
    values[3] = 0
    spec = spec_of(None, lambda s, b, h, q, k: s + fg.log(x[k]))
    found = function(spec, q, k, v, dout, dlse, tensors={"x": values})
    assert all(g.isfinite().all() for g in found)
    assert found[3][3] == 0
    assert (found[3] != 0).sum() == 7
    added = spec_of(None, lambda s, b, h, q, k: s + x[k])
    values[3] = 1
    found = function(added, q, k, v, dout, dlse, tensors={"x": values.log().index_fill(
        0, torch.tensor(3), -math.inf)})  # fmt: skip
    assert found[3][3] == 0
    assert (found[3] != 0).sum() == 7


@BOTH
def test_the_branch_that_where_does_not_choose_adds_nothing(function):
    x = fg.Tensor("x", ("n",), grad=True)
    q, k, v, dout, dlse = doubles(Case(6, 4, head_dim=8))
    values = torch.tensor([0.0, 2.0, -1.0, 0.5], dtype=torch.double)
    spec = spec_of(None, lambda s, b, h, q, k: s + fg.where(x[k] > 0, fg.sqrt(x[k]), 3 * x[k]))
    found = function(spec, q, k, v, dout, dlse, tensors={"x": values})
    leaf = values.clone().requires_grad_()
    root = torch.where(leaf > 0, leaf, 1).sqrt()
    s = q @ k.transpose(2, 3) / math.sqrt(8) + torch.where(leaf > 0, root, 3 * leaf)
    loss = (s.softmax(-1) @ v * dout).sum() + (s.logsumexp(-1) * dlse).sum()
    assert_close(found[3:], torch.autograd.grad(loss, [leaf]))


@BOTH
def test_a_tensor_that_only_the_mask_reads_has_a_gradient_of_0(function):
    edge, slope = fg.Tensor("edge", ("heads",), grad=True), fg.Tensor("slope", (), grad=True)
    q, k, v, dout, dlse = doubles(CASE)
    spec = spec_of(lambda b, h, q, k: k < edge[h], lambda s, b, h, q, k: s + slope * k)
    assert [x.name for x in spec.tensors] == ["edge", "slope"]
    tensors = {"slope": torch.tensor(0.1), "edge": torch.tensor([3.0, 20.0, 0.5, 7.0])}
    found = function(spec, q, k, v, dout, dlse, tensors=tensors)
    assert [g.shape for g in found[3:]] == [(4,), ()]
    assert (found[3] == 0).all()
    assert found[4] != 0


@BOTH
def test_without_queries_or_keys_gradients_of_captures_are_0(function):
    for seq_q, seq_k in ((0, 5), (5, 0), (0, 0)):
        case = Case(seq_q, seq_k, 2, 4, 2, head_dim=8)
        q, k, v, dout, dlse = doubles(case)
        for name in ("head gate", "one tensor twice", "padding"):
            variant = VARIANTS[name]
            spec, tensors = variant.spec(), variant.tensors(case)
            out, _ = reference.attention(spec, q, k, v, tensors=tensors)
            assert (out == 0).all()
            found = function(spec, q, k, v, dout, dlse, tensors=tensors)
            learned = [tensors[x.name] for x in spec.tensors if x.grad]
            assert [g.shape for g in found[3:]] == [x.shape for x in learned]
            assert all((g == 0).all() for g in found)


# The yardstick of the error rule.


@pytest.mark.parametrize("function", [slow(reference.gradients), reference.same_dtype_gradients])
def test_the_number_of_slices_does_not_change_the_gradients(function, monkeypatch):
    case = Case(13, 17, 2, 6, 2, head_dim=8)
    q, k, v, dout, dlse = doubles(case)
    for name in ("relative bias", "one tensor in a product", "padding"):
        variant = VARIANTS[name]
        spec, tensors = variant.spec(), variant.tensors(case)
        monkeypatch.setattr("flashgen.reference.problem._SCORES_AT_ONCE", 1 << 22)
        together = function(spec, q, k, v, dout, dlse, tensors=tensors)
        for scores in (5 * 17, 2 * 13 * 17):
            monkeypatch.setattr("flashgen.reference.problem._SCORES_AT_ONCE", scores)
            assert_close(function(spec, q, k, v, dout, dlse, tensors=tensors), together)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_ordinary_gradients_have_the_dtype_of_the_tensor_and_its_error(dtype):
    case = Case(64, 64, 2, 4, 2, dtype=dtype)
    q, k, v = case.tensors()
    dout, dlse = (x.to(q.dtype).float() for x in doubles(case)[3:])
    for name in ("relative bias", "head gate", "temperature", "the score is ignored"):
        variant = VARIANTS[name]
        spec = variant.spec(64, dtype)
        for kind in (torch.float32, torch.bfloat16):
            tensors = {name: x.to(kind) for name, x in variant.tensors(case).items()}
            exact = reference.gradients(spec, q, k, v, dout, dlse, tensors=tensors)
            same = reference.same_dtype_gradients(spec, q, k, v, dout, dlse, tensors=tensors)
            for one, other in zip(same[3:], exact[3:], strict=True):
                assert one.dtype == kind
                eps = max(torch.finfo(kind).eps, torch.finfo(q.dtype).eps)
                size = max(float(other.abs().max()), 1.0)
                assert 0 < float((one.double() - other).abs().max()) < 100 * eps * size


def test_the_ordinary_gradients_are_added_in_float32_and_rounded_once(monkeypatch):
    # One key and no gradient of out: each row adds 1. Adding ones in bfloat16 would end at 256.
    bias = fg.Tensor("bias", (), "bfloat16", grad=True)
    q, k, v = Case(300, 1, dtype="bfloat16", head_dim=8).tensors()
    spec = spec_of(None, lambda s, b, h, q, k: s + bias, dtype="bfloat16")
    for scores in (1 << 22, 1):
        monkeypatch.setattr("flashgen.reference.problem._SCORES_AT_ONCE", scores)
        *_, found = reference.same_dtype_gradients(
            spec, q, k, v, torch.zeros_like(q), torch.ones(1, 1, 300),
            tensors={"bias": torch.tensor(1.0).bfloat16()},
        )  # fmt: skip
        assert found.dtype == torch.bfloat16
        assert found == 300


# What is refused.


@pytest.mark.parametrize(
    "function",
    [
        reference.attention,
        reference.same_dtype,
        reference.gradients,
        reference.same_dtype_gradients,
        reference.kept_gradients,
    ],
)
def test_tensors_that_are_not_the_specs_are_refused(function):
    q, k, v, dout, _ = doubles(CASE)
    more = () if function in (reference.attention, reference.same_dtype) else (dout,)
    variant = VARIANTS["the score is ignored"]
    spec, tensors = variant.spec(), variant.tensors(CASE)
    for given in (None, {"row": tensors["row"]}, {**tensors, "extra": tensors["row"]}):
        with pytest.raises(InputError, match="tensors given are not those") as caught:
            function(spec, q, k, v, *more, tensors=given)
        assert "expected: row, column" in caught.value.numbers
    with pytest.raises(InputError, match="row does not have the dimensions") as caught:
        function(spec, q, k, v, *more, tensors={**tensors, "row": tensors["row"][0]})
    assert "dims (heads, seq_q)" in caught.value.numbers
    with pytest.raises(InputError, match="tensors given are not those"):
        function(spec_of(), q, k, v, *more, tensors=tensors)
