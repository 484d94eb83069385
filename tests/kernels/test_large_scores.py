"""Scores of any magnitude: the softmax of scores up to the largest finite number, forward and
backward, and which scores are removed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from tests.support.judged import dropping, normal
from tests.support.masks import causal
from tests.support.tiers import slow

Tensor = torch.Tensor

LARGEST = 3.4e38
LOWEST = torch.finfo(torch.float32).min

# The backend and the architecture. float32 kernels take the path of sm_80 everywhere.
PATHS = [("tiled", "sm_80"), ("emulator", "sm_80"), ("emulator", "sm_90a")]
MAGNITUDES = [1.0, 3e2, 5e4, 2e5, 3e7, 5e9, 1e15, 1e30, 2e37]


SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal},
    "scored": {"score_mod": lambda s, b, h, q, k: s + 0.01 * (k - q)},
}


def operands(magnitude: float, dtype: str, dim: int = 16) -> list[Tensor]:
    """q, k, v and dout, such that the largest scores are about ``magnitude``."""
    shape = (1, 1, 70, dim)
    q, k, v, dout = (normal(shape, torch.float32, seed) for seed in range(4))
    factor = math.sqrt(max(magnitude / 4, 1.0))
    limit = 65504.0 if dtype == "float16" else LARGEST
    q, k = ((x * factor).clamp(-limit, limit) for x in (q, k))
    return [x.to(getattr(torch, dtype)) for x in (q, k, v, dout)]


def check(
    spec: fg.AttentionSpec,
    given: list[Tensor],
    backend: str,
    arch: str,
    *,
    deterministic: bool = False,
    **call: Any,
) -> None:
    q, k, v, dout = given
    options = {"backend": backend, "arch": arch, **call}
    run = run_forward(spec, q, k, v, **options)
    options["deterministic"] = deterministic
    back = run_backward(spec, q, k, v, run.out, run.lse, dout, **options)
    known = {name: call[name] for name in ("scale", "tensors", "dropout_p", "rng") if name in call}
    exact, lse = reference.attention(spec, q, k, v, **known)
    same, _ = reference.same_dtype(spec, q, k, v, **known)
    verdict = reference.compare(run.out, exact, same)
    assert verdict, verdict
    # The float32 sum of a score's products has an error in proportion to their magnitudes.
    products = q.double().abs() @ k.double().abs().transpose(-1, -2)
    largest = call.get("scale", q.shape[-1] ** -0.5) * products.amax(-1)
    assert ((run.lse.double() - lse).abs() <= 1e-6 * (1 + largest)).all()
    found = (back.dq, back.dk, back.dv, *back.captured)
    for name, each in reference.judge_gradients(found, spec, q, k, v, dout, **known).items():
        assert each, (name, each)


def near_ties(q: Tensor, k: Tensor, name: str) -> Tensor:
    """The rows whose two largest scores differ by less than they or their LSE are rounded by.

    LSE is one float32, which then does not have the logarithm of the sum: the backward pass takes
    both probabilities as 1 (docs/trust.md).
    """
    scale = q.shape[-1] ** -0.5
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    products = (q.double().abs() @ k.double().abs().transpose(-1, -2)).amax(-1) * scale
    if name == "causal":
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    largest, second = scores.topk(2).values.unbind(-1)
    return (largest.abs() > 1e7) & (largest - second < products * 2.0**-22)


CASES = [
    (dtype, magnitude, name, backend, arch)
    for name in SPECS
    for dtype in ("float16", "bfloat16", "float32")
    for magnitude in MAGNITUDES
    for backend, arch in PATHS
    if dtype != "float16" or magnitude <= 5e9
]
FAST = {
    ("float16", 5e4, "full", "tiled", "sm_80"),
    ("bfloat16", 2e5, "scored", "emulator", "sm_80"),
    ("bfloat16", 2e37, "full", "tiled", "sm_80"),
    ("float32", 2e37, "causal", "tiled", "sm_80"),
}


@pytest.mark.parametrize(
    ("dtype", "magnitude", "name", "backend", "arch"),
    [case if case in FAST else slow(*case) for case in CASES],
)
def test_scores_of_any_magnitude_meet_the_error_rule(
    dtype: str, magnitude: float, name: str, backend: str, arch: str
) -> None:
    dim = 16 if (dtype, magnitude, name, backend, arch) in FAST else 64
    spec = fg.AttentionSpec(**SPECS[name], head_dim=dim, dtype=dtype)
    given = operands(magnitude, dtype, dim)
    given[3][near_ties(*given[:2], name)] = 0
    check(spec, given, backend, arch, deterministic=name == "causal")


@pytest.mark.parametrize(
    ("dtype", "magnitude", "dim", "backend", "arch"),
    [
        ("float16", 6e4, 16, "tiled", "sm_80"),
        ("bfloat16", 1e9, 16, "emulator", "sm_90a"),
        slow("bfloat16", 6e4, 64, "emulator", "sm_80"),
        slow("float16", 6e4, 128, "emulator", "sm_80"),
        slow("float16", 5e7, 128, "tiled", "sm_80"),
        slow("bfloat16", 1e9, 128, "emulator", "sm_90a"),
        slow("bfloat16", 1e9, 256, "emulator", "sm_80"),
    ],
)
def test_the_gradient_of_a_score_with_all_the_weight_is_no_larger_than_its_bound(
    dtype: str, magnitude: float, dim: int, backend: str, arch: str
) -> None:
    """Query i has only key i's weight: dP - delta is a rounding error (docs/trust.md)."""
    spec = fg.AttentionSpec(head_dim=dim, dtype=dtype)
    factor = math.sqrt(magnitude * math.sqrt(dim))
    work = getattr(torch, dtype)
    q = k = (factor * torch.eye(dim)).to(work)[None, None]
    v, dout = (normal((1, 1, dim, dim), work, seed) for seed in range(2))
    how = {"backend": backend, "arch": arch}
    run = run_forward(spec, q, k, v, **how)
    assert torch.equal(run.out, v)
    back = run_backward(spec, q, k, v, run.out, run.lse, dout, **how)
    sums = (dout.double().abs() * v.double().abs()).sum(-1)
    bound = 2.0**-21 * sums * factor / math.sqrt(dim)
    for gradient in (back.dq, back.dk):
        assert (gradient.double().abs().amax(-1) <= bound).all()


# ---- forms of kernels ---------------------------------------------------------------------------

BIAS = fg.Tensor("bias", ("columns",), "float32", grad=True)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sloped": {"score_mod": lambda s, b, h, q, k: s * 1.5 + 0.01 * (k - q)},
    "learned": {"score_mod": lambda s, b, h, q, k: s + BIAS[k]},
}


CASES_OF_FORMS = [
    (form, dim, arch, deterministic, dropout_p)
    for form in FORMS
    for arch in ("sm_80", "sm_90a")
    for dim in (16, 64, 128, 192, 256)
    for deterministic in (False, True)
    for dropout_p in (0.0, 0.3)
]
FAST_FORM = ("learned", 16, "sm_90a", False, 0.0)


@pytest.mark.parametrize(
    ("form", "dim", "arch", "deterministic", "dropout_p"),
    [case if case == FAST_FORM else slow(*case) for case in CASES_OF_FORMS],
)
def test_every_form_of_the_backward_kernels_takes_far_rows(
    form: str, dim: int, arch: str, deterministic: bool, dropout_p: float
) -> None:
    """Rows of scores of 5e4 beside rows of small ones."""
    spec = fg.AttentionSpec(**FORMS[form], head_dim=dim, dtype="bfloat16", dropout=dropout_p > 0)
    given = operands(5e4, "bfloat16", dim)
    given[0][:, :, ::3] /= 1e4
    tensors = {"tensors": {"bias": normal((70,), torch.float32, 5)}} if form == "learned" else {}
    how = {"deterministic": deterministic, **dropping(dropout_p), **tensors}
    check(spec, given, "emulator", arch, **how)


# ---- removed scores -----------------------------------------------------------------------------

LITERALS = {
    "choice": lambda low: lambda s, b, h, q, k: fg.where(k <= q, s, low),
    "sum": lambda low: lambda s, b, h, q, k: s * 2 + fg.where(k <= q, 0, low),
    "rows": lambda low: lambda s, b, h, q, k: fg.where(q < 5, low, fg.maximum(s, low)),
}


@pytest.mark.parametrize("low", [-1e30, -2e30, -3e38, LOWEST, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("name", LITERALS)
def test_a_low_literal_is_minus_infinity(name: str, low: float) -> None:
    mods = LITERALS[name]
    found = fg.AttentionSpec(score_mod=mods(low), head_dim=16, dtype="float32")
    expected = fg.AttentionSpec(score_mod=mods(-math.inf), head_dim=16, dtype="float32")
    assert found.score == expected.score


def test_a_low_number_in_a_condition_or_a_product_is_a_number() -> None:
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: fg.where(s > -1e30, s, 0) + 1e-30 * (s * -1e30),
        head_dim=16,
    )
    twice = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s - s, head_dim=16)
    q, k, v, _ = (x.half() for x in operands(1.0, "float32"))
    out = fg.attention(spec)(q, k, v)
    torch.testing.assert_close(out, fg.attention(twice)(q, k, v), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "backend", "arch"),
    [
        ("float16", "tiled", "sm_80"),
        ("float32", "tiled", "sm_80"),
        ("bfloat16", "emulator", "sm_80"),
        slow("float16", "emulator", "sm_90a"),
        slow("float32", "emulator", "sm_80"),
    ],
)
def test_only_minus_infinity_removes_a_computed_score(dtype: str, backend: str, arch: str) -> None:
    """Rows 0 to 3: literals, -inf of a tensor, its lowest number in all and in some columns."""
    low = fg.Tensor("low", ("rows", "columns"), "float32")

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where(q == 0, -3e38, s) + low[q, k]

    spec = fg.AttentionSpec(score_mod=score, head_dim=16, dtype=dtype)
    q, k, v, _ = operands(1.0, dtype)
    values = torch.zeros(70, 70)
    values[1] = -math.inf
    values[2] = LOWEST
    values[3, 7:] = -2e30
    run = run_forward(spec, q, k, v, tensors={"low": values}, backend=backend, arch=arch)
    out = run.out[0, 0].double()
    assert not out[:2].any()
    assert (run.lse[0, 0, :2] == -math.inf).all()
    torch.testing.assert_close(out[2], v[0, 0].double().mean(0), atol=2e-3, rtol=0)
    exact, _ = reference.attention(spec, q, k, v, tensors={"low": values})
    same, _ = reference.same_dtype(spec, q, k, v, tensors={"low": values})
    assert reference.compare(run.out, exact, same)


def test_a_far_row_does_not_change_the_bits_of_its_neighbours() -> None:
    spec = fg.AttentionSpec(head_dim=16, dtype="bfloat16")
    q, k, v, _ = operands(1.0, "bfloat16")
    alone = run_forward(spec, q, k, v, backend="emulator")
    q[:, :, 9] *= 1e6
    beside = run_forward(spec, q, k, v, backend="emulator")
    others = torch.arange(70) != 9
    assert torch.equal(beside.out[:, :, others], alone.out[:, :, others])
    assert torch.equal(beside.lse[:, :, others], alone.lse[:, :, others])
