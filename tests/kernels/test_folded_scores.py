"""Factors of score functions that kernels leave to the scale, to the exponent and to LSE: what is
folded, and that results meet the error rule, forward and backward."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import sympy
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.kernels.planner.models.spec_terms import folded_score
from flashgen.shared.paths import PATHS
from flashgen.spec.analysis.folding import FoldedScore
from flashgen.spec.language.float_functions import Tanh
from flashgen.spec.language.float_operations import FloatProduct, FloatSum
from flashgen.spec.language.signature import split
from flashgen.spec.language.symbols import DISTANCE, PRODUCT, SCALE, K, Q
from tests.support.judged import normal
from tests.support.tiers import one_in

factor = fg.Scalar("factor", "float32")
slope = fg.Tensor("slope", ("heads",), "float32")
weight = fg.Tensor("weight", ("heads",), "float32", grad=True)
sink = fg.Tensor("sink", ("heads",), "float32")

# Score functions of s, h, q and k.
SCORES: dict[str, Any] = {
    "capped": lambda s, h, q, k: 5 * fg.tanh(0.3 * s),
    "capped and shifted": lambda s, h, q, k: 5 * fg.tanh(0.3 * s) + 3,
    "a negative factor": lambda s, h, q, k: -5 * fg.tanh(s / 5) - 3,
    "a factor of the call": lambda s, h, q, k: 4 * fg.tanh(factor * s),
    "a factor of each head": lambda s, h, q, k: 3 * fg.tanh(s / slope[h]),
    "a product with a tensor": lambda s, h, q, k: s * abs(slope[h]),
    "a learned factor": lambda s, h, q, k: 6 * fg.tanh(s / 6 * weight[h]) + 2,
    "half": lambda s, h, q, k: s * 0.5,
    "a third, shifted": lambda s, h, q, k: s / 3 - 7,
    "negated": lambda s, h, q, k: -s,
    "squared": lambda s, h, q, k: s * s,
    "squared and negated": lambda s, h, q, k: -0.5 * (s * s),
    "absolute": lambda s, h, q, k: 2 * abs(s),
    "leaky": lambda s, h, q, k: fg.maximum(s, 0.1 * s),
    "chosen by position": lambda s, h, q, k: fg.where(k % 3 == 0, 2 * s, s * 0.7),
    "chosen by sign": lambda s, h, q, k: 2 * fg.where(s > 0, s, 0.5 * s),
    "a gate of the score": lambda s, h, q, k: 2 * (s * fg.sigmoid(s)),
    "a linear bias": lambda s, h, q, k: s - abs(slope[h]) * (q - k),
    "a bias on both sides": lambda s, h, q, k: 2 * s - 0.25 * abs(q - k) + 1,
    "a bias by the call": lambda s, h, q, k: s + factor * (k - q) / 7,
    "a learned bias": lambda s, h, q, k: s + weight[h] * (k - q) / 20,
    "a bias by the square": lambda s, h, q, k: s + slope[h] * (k - q) ** 2 / 50,
    "capped with a bias": lambda s, h, q, k: 5 * fg.tanh(s / 5) - abs(slope[h]) * (q - k),
    "biased where near": lambda s, h, q, k: fg.where(abs(q - k) < 20, s + 0.1 * (k - q), s - 3),
    "decaying": lambda s, h, q, k: s / (1 + 0.01 * (q - k) ** 2),
}


def spec_of(name: str, dtype: str = "bfloat16", **options: Any) -> fg.AttentionSpec:
    given = SCORES[name]
    return fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: given(s, h, q, k), head_dim=16, dtype=dtype, **options
    )


def folded_of(name: str, kernel: str = "forward", **options: Any) -> FoldedScore | None:
    return folded_score(spec_of(name, **options), kernel)


def check(
    spec: fg.AttentionSpec, arch: str, *, magnitude: float = 1.0, seq: int = 90, **call: Any
) -> None:
    """The error rule of O and of the gradients, and LSE, in the emulator."""
    dtype = getattr(torch, spec.dtype)
    q, k, v, dout = (normal((1, 2, seq, 16), torch.float32, seed) for seed in range(4))
    q, k = q * magnitude, k * magnitude
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    values = {"slope": [0.4, -1.7], "weight": [0.9, -1.2], "sink": [0.5, 30.0]}
    names = {each.name for each in (*spec.tensors, spec.sink) if each is not None}
    tensors = {name: torch.tensor(values[name]) for name in names}
    known = call | ({"tensors": tensors} if tensors else {})
    if spec.scalars:
        known["scalars"] = {"factor": 0.37}
    run = run_forward(spec, q, k, v, backend="emulator", arch=arch, **known)
    back = run_backward(
        spec, q, k, v, run.out, run.lse, dout, backend="emulator", arch=arch, **known
    )
    exact, lse = reference.attention(spec, q, k, v, **known)
    same, _ = reference.same_dtype(spec, q, k, v, **known)
    verdict = reference.compare(run.out, exact, same)
    assert verdict, verdict
    torch.testing.assert_close(run.lse.double(), lse, rtol=1e-5, atol=1e-5)
    found = (back.dq, back.dk, back.dv, *back.captured)
    for name, each in reference.judge_gradients(found, spec, q, k, v, dout, **known).items():
        assert each, (name, each)


@pytest.mark.parametrize(("name", "arch"), one_in(50, product(SCORES, PATHS)))
def test_results_meet_the_error_rule(name: str, arch: str) -> None:
    check(spec_of(name), arch)


@pytest.mark.parametrize("name", one_in(3, ["capped and shifted", "a third, shifted", "squared"]))
def test_a_sink_is_compared_with_scores_before_their_shift(name: str) -> None:
    check(spec_of(name, "float16", sink=sink), "sm_80")


# With float16, and with products of Q and K for which exponents are of any size.
@pytest.mark.parametrize(("scale", "magnitude"), [(1e-20, 1.0), (1e-4, 100.0), (1e4, 0.01)])
@pytest.mark.parametrize(
    "name", one_in(4, ["squared", "capped and shifted", "decaying", "a linear bias"])
)
def test_any_scale_may_be_given(name: str, scale: float, magnitude: float) -> None:
    check(spec_of(name, "float16"), "sm_80", magnitude=magnitude, scale=scale)


def test_a_cap_is_one_product_and_the_function_itself() -> None:
    found = folded_of("capped and shifted")
    assert found is not None
    tenths = sympy.Rational(3, 10)
    assert found.value == Tanh(FloatProduct(PRODUCT, FloatProduct(SCALE, tenths)))
    assert (found.factor, found.degree, found.shift) == (5, 0, 3)


@pytest.mark.parametrize(("name", "degree"), [("squared", 2), ("leaky", 1), ("decaying", 1)])
def test_the_scale_of_a_homogeneous_function_is_applied_in_the_exponent(
    name: str, degree: int
) -> None:
    found = folded_of(name)
    assert found is not None
    assert found.degree == degree
    assert SCALE not in found.value.free_symbols


@pytest.mark.parametrize("name", ["a linear bias", "a bias on both sides", "capped with a bias"])
def test_a_bias_by_the_distance_is_one_product_and_sum(name: str) -> None:
    """Without a conversion of integers, and divided by what the exponent is multiplied by."""
    found = folded_of(name)
    assert found is not None
    assert {Q, K}.isdisjoint(found.value.free_symbols)
    assert isinstance(found.value, FloatSum)
    text = fg.emit(spec_of(name), "sm_90a").forward.text
    (body,) = re.findall(r"float score_mod\(.*?\n?}", text, re.S)
    assert "p.scale" not in body or name == "capped with a bias"
    assert "float(" not in body


def test_positions_in_conditions_and_indices_stay_integers() -> None:
    found = folded_of("biased where near")
    assert found is not None
    assert {Q, K, DISTANCE} <= found.value.free_symbols


def test_distances_of_served_rows_are_converted_as_integers() -> None:
    """So that rows have the same bits in all kernels at positions beyond 2^24 too."""
    found = folded_score(split(spec_of("a linear bias")), "forward")
    assert found is None or DISTANCE not in found.value.free_symbols


@pytest.mark.parametrize("name", ["negated", "squared and negated", "a negative factor"])
def test_no_negative_factor_leaves_a_score_whose_maximum_is_sought(name: str) -> None:
    found = folded_of(name)
    assert found is None or found.factor > 0
    assert "negative" in fg.plan(spec_of(name), "sm_90a").explain()


@pytest.mark.parametrize("grad", [False, True])
def test_a_shift_that_a_gradient_needs_stays_in_the_score(grad: bool) -> None:
    """The kernel that sums gradients of learned tensors computes P from the whole score."""
    found = folded_of("a learned factor" if grad else "capped and shifted")
    assert found is not None
    assert (found.shift == 0) == grad


def test_scores_of_float32_operands_are_computed_as_written() -> None:
    assert folded_of("capped", dtype="float32") is None
    assert "as written" in fg.plan(spec_of("capped", "float32"), "sm_80").explain()
