"""Masks and scores as torch programs, against Python's own arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import flashgen as fg
from flashgen.calls.cpu.mods import compiled
from flashgen.shared.errors import SpecError
from flashgen.spec.language.symbols import SCORE, B, H, K, Q
from flashgen.spec.language.sympy_functions import Floor, FloorDiv, FloorMod
from flashgen.spec.language.tracing import trace_mask, trace_score
from tests.analysis.test_property import SETTINGS, environment, mask_of
from tests.support.expr_trees import (
    FLOATS,
    MASKS,
    SCALARS,
    SIZES,
    VALUES,
    Undefined,
    direct,
    traced,
)

POSITIONS = range(-5, 6)


def tensors(values: dict[Any, Any], real: torch.dtype) -> dict[Any, torch.Tensor]:
    kinds = {bool: torch.bool, int: torch.int64, float: real}
    return {symbol: torch.tensor(x, dtype=kinds[type(x)]) for symbol, x in values.items()}


def grid(expr: sympy.Basic, values: dict[Any, Any], real: torch.dtype = torch.double) -> Any:
    """``expr`` at every pair of positions, for a score of 0.5."""
    program = compiled((expr,), real)
    positions = torch.tensor(POSITIONS)
    (found,) = program.bind(tensors(values, real))(
        positions[:, None], positions[None, :], torch.tensor(0.5, dtype=real)
    )
    return found.expand(len(POSITIONS), len(POSITIONS))


@SETTINGS
@given(tree=MASKS, values=VALUES)
def test_integer_masks_are_those_of_python(tree: Any, values: dict[str, Any]) -> None:
    found = grid(mask_of(tree).expr, environment(values))
    for row, q in enumerate(POSITIONS):
        for column, k in enumerate(POSITIONS):
            try:
                expected = direct(tree, {**values, "q": q, "k": k})
            except Undefined:
                continue
            assert bool(found[row, column]) == bool(expected), (q, k)


@SETTINGS
@given(tree=FLOATS, values=VALUES, q=st.sampled_from(POSITIONS), k=st.sampled_from(POSITIONS))
def test_scores_are_those_of_python(tree: Any, values: dict[str, Any], q: int, k: int) -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + traced(tree, {**SCALARS, **SIZES, "b": b, "h": h, "q": q, "k": k})

    try:
        expr = trace_score(mod).expr
        expected = 0.5 + float(direct(tree, {**values, "q": q, "k": k}))
    except (SpecError, Undefined, OverflowError, TypeError):
        assume(False)
        raise
    # A jump between two exact neighbours may fall either way in float arithmetic. The tree is
    # searched too, because a jump between two constants is folded away while it is traced.
    jumps = expr.has(sympy.Piecewise, Floor, FloorDiv, FloorMod)
    jumps = jumps or any(jump in repr(tree) for jump in ("'//'", "'%'", "'floor'"))
    assume(not jumps and abs(expected) < 1e100)
    found = float(grid(expr, environment(values))[POSITIONS.index(q), POSITIONS.index(k)])
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_is_the_same_for_a_whole_call_is_computed_once() -> None:
    expr = trace_score(
        lambda s, b, h, q, k: s * fg.exp(-8 * (h + 1) / fg.heads) + fg.tanh(s) * fg.tanh(s)
    ).expr
    program = compiled((expr,), torch.float32)
    assert {step.function for step in program.once} >= {torch.exp}
    assert torch.exp not in {step.function for step in program.per_tile}
    assert [step.function for step in program.per_tile].count(torch.tanh) == 1


def test_value_and_derivative_share_what_they_have_in_common() -> None:
    score = trace_score(lambda s, b, h, q, k: 50 * fg.tanh(s / 50)).expr
    program = compiled((score, sympy.diff(score, SCORE)), torch.float32)
    assert [step.function for step in program.per_tile].count(torch.tanh) == 1


def test_distances_are_exact_far_from_the_origin() -> None:
    expr = trace_score(lambda s, b, h, q, k: s + 0.1 * (k - q)).expr
    program = compiled((expr,), torch.float32)
    q, k = torch.tensor([2**27 + 1]), torch.tensor([2**27])
    (found,) = program.bind({})(q, k, torch.zeros(1))
    assert float(found) == pytest.approx(-0.1, rel=1e-6)


def test_a_division_by_zero_does_not_stop_where_another_branch_is_chosen() -> None:
    step = fg.Scalar("step", "int32")
    expr = trace_mask(lambda b, h, q, k: fg.where(step > 0, q % step == 0, k == 0)).expr
    found = grid(expr, {step.expr: 0})
    for column, k in enumerate(POSITIONS):
        assert bool(found[0, column]) == (k == 0)


def test_products_beyond_int64_are_formed_in_floats() -> None:
    expr = trace_score(lambda s, b, h, q, k: s + (q * k) ** 4).expr
    program = compiled((expr,), torch.double)
    q = torch.tensor([2**27])
    (found,) = program.bind({})(q, q, torch.zeros(1, dtype=torch.double))
    assert float(found) == 2.0**216


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (lambda s, b, h, q, k: s / 3 - 2 * s, 0.5 / 3 - 1),
        (lambda s, b, h, q, k: -s * b / h, -0.5 * 2 / 3),
        (lambda s, b, h, q, k: s**3 + s**-2 + 2**s, 0.125 + 4 + math.sqrt(2)),
        (lambda s, b, h, q, k: fg.sqrt(s) / fg.sqrt(s * s + h), math.sqrt(0.5 / 3.25)),
        (lambda s, b, h, q, k: fg.minimum(s, h) + fg.maximum(s, h) + fg.floor(s), 3.5),
        (lambda s, b, h, q, k: fg.log(s) + fg.log2(s) + fg.sigmoid(s), math.log(0.5) - 0.37754066),
        (lambda s, b, h, q, k: fg.abs(s - h) + fg.sin(s) * fg.cos(s), 2.5 + math.sin(1.0) / 2),
        (lambda s, b, h, q, k: s * fg.sqrt(2) + 1e-3, 0.5 * math.sqrt(2) + 1e-3),
    ],
)
def test_functions_of_the_score(score: Any, expected: float) -> None:
    found = grid(trace_score(score).expr, {B: 2, H: 3})
    assert float(found[0, 0]) == pytest.approx(expected, rel=1e-7)


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(SpecError, match="cannot evaluate a part"):
        compiled((sympy.gamma(SCORE),), torch.float32)


def test_a_program_holds_no_tile_after_it_has_run() -> None:
    program = compiled((Q + K,), torch.double)
    bound = program.bind({})
    bound(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
    assert all(x is None or x.numel() == 1 for x in bound.registers)
