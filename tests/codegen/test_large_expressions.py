"""Expressions of any size: shared parts instead of trees, in time linear in their operations."""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any

import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.kernels import pipeline
from flashgen.kernels.codegen.spec_function import MOST_INLINED, MOST_SINES
from flashgen.kernels.planner import plan_errors
from flashgen.kernels.planner.plan_errors import check_size
from flashgen.shared.errors import FlashgenError, PlanError
from flashgen.spec.analysis import score as score_analysis
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.score import derivative, derivatives
from flashgen.spec.analysis.sharing import share_evaluated
from flashgen.spec.language.float_operations import FloatProduct, FloatSum
from flashgen.spec.language.lets import (
    DEEPEST,
    LARGEST,
    Let,
    contains,
    elements_of,
    lets_of,
    nodes_of,
    parts_of,
    replaced,
)
from flashgen.spec.language.signature import in_whole, signature_of
from flashgen.spec.language.symbols import SCORE, K, Q, is_int
from flashgen.spec.language.sympy_functions import Select
from tests.support.large_mods import KINDS, spec_of
from tests.support.tiers import one_in

values = fg.Tensor("values", ("n",), "float32")


def nodes(expr: sympy.Basic) -> int:
    return sum(1 for _ in nodes_of(expr))


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_the_size_of_a_program_is_proportional_to_its_operations(kind: str) -> None:
    small, large = (
        (spec.mask, spec.score) for spec in (spec_of(kind, 120, name="s"), spec_of(kind, 240))
    )
    for few, many in zip(small, large, strict=True):
        assert nodes(many) <= 2.5 * nodes(few) + LARGEST
        sizes = [sum(1 for _ in sympy.preorder_traversal(part)) for part in parts_of(many)]
        assert max(sizes) < 3 * LARGEST


def test_200_nested_sines_and_16_repeated_squares_are_emitted_within_pythons_recursion_limit() -> (
    None
):
    def sines(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for _ in range(200):
            score = fg.sin(score)
        return score

    def squares(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for _ in range(16):
            score = score * score + score
        return score

    before = sys.getrecursionlimit()
    for mod, most in ((sines, 60_000), (squares, 60_000)):
        kernels = fg.emit(fg.AttentionSpec(score_mod=mod, head_dim=64, dtype="float16"))
        assert all(len(source.text) < most for source in (kernels.forward, *kernels.backward))
    assert sys.getrecursionlimit() == before


def test_a_large_function_is_not_inlined_and_the_file_says_so() -> None:
    kernels = fg.emit(spec_of("sines", 20))
    ((name, instructions),) = kernels.forward.outlined
    assert name == "score_mod"
    assert "__device__ __noinline__ float score_mod(" in kernels.forward.text
    assert f"// calls     score_mod, about {instructions:,} instructions" in kernels.forward.text
    small = fg.emit(spec_of("squares", 9)).forward
    assert small.outlined == ()
    assert "__noinline__" not in small.text


def test_a_large_function_with_many_sines_calls_one_copy_of_them() -> None:
    for size, kind in ((MOST_SINES, "DEVICE"), (MOST_SINES + 1, "__device__ __noinline__")):
        text = fg.emit(spec_of("sines", size)).forward.text
        assert f"\n{kind} float sine(float x)" in text
        assert "__noinline__ float score_mod(" in text


def test_mods_beyond_what_a_kernel_can_hold_are_refused_with_the_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_errors, "MOST_EFFORT", 50)
    with pytest.raises(PlanError) as caught:
        fg.plan(spec_of("sines", 25, name="too_large"))
    assert (
        "about 100 additions, with a function as several; limit 50: 2 times" in caught.value.numbers
    )


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        (1450, lambda x, i, q, k: x + 0.5),
        (75, lambda x, i, q, k: fg.minimum(x, 2.0 + i)),
        (370, lambda x, i, q, k: -fg.minimum(x, 2.0 * i)),
        (360, lambda x, i, q, k: fg.sin(x)),
        (370, lambda x, i, q, k: fg.erf(x)),
        (90, lambda x, i, q, k: x ** (1.5 + i)),
        (360, lambda x, i, q, k: fg.where(k > q + i, x, -x)),
        (180, lambda x, i, q, k: x + values[k + i]),
    ],
)
def test_the_limit_counts_the_time_of_each_kind_of_operation(steps: int, step: Any) -> None:
    def spec(size: int) -> fg.AttentionSpec:
        def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
            for i in range(size):
                score = step(score, i, q, k)
            return score

        return fg.AttentionSpec(score_mod=score_mod, head_dim=64, dtype="float16")

    check_size(spec(steps))
    with pytest.raises(FlashgenError, match="too large for a kernel"):
        check_size(spec(steps * 11 // 10 + 1))


@pytest.mark.slow
def test_a_large_spec_is_pickled_and_has_the_same_digest() -> None:
    spec = spec_of("integers", 600)
    assert len(lets_of(spec.score)) > 5
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.digest == spec.digest
    assert lets_of(again.score) == lets_of(spec.score)


@pytest.mark.parametrize("kind", one_in(2, ["shared", "squares", "ladder", "sines"]))
def test_the_derivative_of_a_large_score_is_its_slope(kind: str) -> None:
    score = spec_of(kind, 90).score
    assert lets_of(score)
    step, at = 1e-5, {Q: 7, K: 3}
    low, high = (evaluate(score, {**at, SCORE: 0.4 + sign * step}, np.float64) for sign in (-1, 1))
    slope = evaluate(derivative(score), {**at, SCORE: 0.4}, np.float64)
    assert slope == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-9)


def test_a_derivative_looks_once_at_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []
    replaced = score_analysis.replaced
    monkeypatch.setattr(
        score_analysis, "replaced", lambda *given: (work.append("replaced"), replaced(*given))[1]
    )
    for operation in (FloatProduct, FloatSum):
        rule = operation.fdiff
        monkeypatch.setattr(
            operation, "fdiff", lambda *given, rule=rule: (work.append("rule"), rule(*given))[1]
        )
    score = spec_of("squares", 300).score
    assert derivative(score) != 0
    assert work.count("replaced") <= 3 * (len(lets_of(score)) + 1)
    assert work.count("rule") <= 2 * len(set(nodes_of(score)))


def test_derivatives_by_the_elements_of_a_large_sum_have_one_term_each() -> None:
    score = spec_of("reads", 250).score
    elements = elements_of(score)
    assert len(elements) == 50
    assert lets_of(score)
    assert derivatives(score, elements) == [sympy.Rational(1, 250)] * 50


def test_derivatives_of_choices_inside_choices_stay_choices_of_numbers() -> None:
    """sympy makes ITE of a comparison of choices, which no kernel can compute."""
    gate = fg.Tensor("gate", ("heads",), "float32", grad=True)

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for _ in range(6):
            score = fg.minimum(score * fg.maximum(gate[h], score), 1.25) + fg.cos(score)
        return score

    score = fg.AttentionSpec(score_mod=score_mod, head_dim=16, dtype="float16").score
    found = derivatives(score, elements_of(score))
    assert lets_of(*found)
    assert not any(contains(each, sympy.ITE) for each in found)


def test_variants_and_derivatives_compare_what_the_user_compares() -> None:
    """sympy would divide by 3, and compare floats of which no decision is exact."""
    ids = fg.Tensor("ids", ("seq_k",), "int32")

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return fg.where(ids[k] - ids[q] != 3 * h, score * score, score)

    spec = fg.AttentionSpec(score_mod=score_mod, head_dim=16, dtype="float16")
    for expr in (derivative(spec.score), in_whole(spec).score, derivative(in_whole(spec).score)):
        (compared,) = expr.atoms(sympy.Ne)
        assert all(is_int(side) for side in compared.args)


def test_a_division_inside_a_large_mask_is_checked_at_the_call() -> None:
    width = fg.Scalar("width", "int32")

    def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
        kept = q // width == k // width
        for i in range(DEEPEST + LARGEST):
            kept = kept | (q - k == 3 * i + 5)
        return kept

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=16, dtype="float16")
    assert lets_of(spec.mask)
    divisions = signature_of(spec).zero_divisions
    assert {division.names for division in divisions} == {("width",)}


def test_nested_choices_of_angles_are_one_function_that_is_not_inlined() -> None:
    """Inlined, this score was 1.5 MB of machine code on sm_90a, and nested further took minutes."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return fg.where(score > 0.5, fg.atan2(score, q - k + 0.5), fg.atan2(q - k + 0.5, score))

    spec = fg.AttentionSpec(score_mod=score_mod, head_dim=64, dtype="float16", name="angles")
    ((name, instructions),) = fg.emit(spec, "sm_90a").forward.outlined
    assert name == "score_mod"
    assert MOST_INLINED < instructions < 160
    start = time.process_time()
    assert len(pipeline.build(spec, "sm_90a").cubin) < 500_000
    assert time.process_time() - start < 10


def test_a_large_whole_float_remains_an_index() -> None:
    line = fg.Tensor("line", ("n",), "float32")

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        index = q
        for _ in range(DEEPEST):
            index = fg.floor(line[index] * 1.5 + k)
        return score + line[index]

    spec = fg.AttentionSpec(score_mod=score_mod, head_dim=16, dtype="float16")
    assert lets_of(spec.score)


def learned_steps(steps: int) -> fg.AttentionSpec:
    tg = fg.Tensor("tg", ("heads", "seq_k"), "float32", grad=True)

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for i in range(steps):
            score = score + tg[h, fg.clamp(k - i, 0, 31)] * score
        return score

    return fg.AttentionSpec(score_mod=score_mod, head_dim=64, dtype="float16", name="steps")


def test_the_additions_of_many_learned_elements_are_not_unrolled() -> None:
    """Unrolled, eight took 20 s to compile on sm_90a."""
    loops = [fg.emit(learned_steps(n), "sm_90a").backward[-1].text for n in (3, 5, 8)]
    assert ["    ROLLED for (int n" in text for text in loops] == [False, True, True]
    assert ["kept_ds" in text for text in loops] == [False, True, True]


@pytest.mark.slow
def test_many_learned_elements_are_little_machine_code() -> None:
    (learned,) = (
        b for b in pipeline.build_backward(learned_steps(8), "sm_90a") if b.plan.is_for_learned
    )
    assert learned.binary.resources.code_bytes < 100_000


def test_more_learned_elements_than_a_kernel_can_hold_are_refused_with_their_number() -> None:
    fg.plan(learned_steps(plan_errors.MOST_LEARNED))
    with pytest.raises(PlanError) as caught:
        fg.plan(learned_steps(plan_errors.MOST_LEARNED + 1))
    assert "65 elements with a gradient each; limit 64" in caught.value.numbers


def test_a_derivative_replaces_each_repeated_part_once() -> None:
    """As trees, derivatives of nested extrema repeat their parts tens of times."""
    made = []

    class Counted(sympy.Function):  # type: ignore[misc]
        def __new__(cls, *args: sympy.Basic, **options: object) -> sympy.Basic:
            made.append(args)
            return super().__new__(cls, *args, **options)

    expr = SCORE
    for _ in range(12):
        expr = Counted(expr, expr)
    made.clear()
    assert replaced(expr, {SCORE: Q}).free_symbols == {Q}
    assert len(made) == 12


def test_no_name_stands_for_another_name() -> None:
    choice = Let(Select(K > Q, sum(K**i for i in range(2, 9)), Q))
    block = share_evaluated(choice + 1, choice * K)
    assert [value.func for _, value in block.lets] == [Select]
    assert all(block.lets[0][0] in result.free_symbols for result in block.results)
