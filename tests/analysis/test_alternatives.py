"""Alternatives of a mask that say less than others are left out, and two may become one."""

from __future__ import annotations

import itertools
import random

import pytest
import sympy

from flashgen.spec.analysis.alternatives import implies, simplified
from flashgen.spec.language.symbols import K, Q
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Select

BLOCK = sympy.Symbol("block", integer=True, positive=True)
CLEAN = sympy.Symbol("clean", integer=True)
ROW, COLUMN = FloorDiv(Q, BLOCK), FloorDiv(K, BLOCK)
NUMBERS = (-7, -1, 0, 3, 5, 9, 12)


def assert_equal(found: sympy.Basic, mask: sympy.Basic) -> None:
    for q, k, clean in itertools.product(NUMBERS, NUMBERS, (0, 6)):
        at = {Q: q, K: k, CLEAN: clean, BLOCK: 4}
        assert found.subs(at).doit() == mask.subs(at), (found, at)


def test_alternatives_that_differ_in_whether_equality_counts_are_one() -> None:
    late, noised = Q >= CLEAN, K < CLEAN
    mask = (
        (late & ~noised & (ROW >= COLUMN))
        | (~late & ~noised & (ROW > COLUMN))
        | (sympy.Eq(ROW, COLUMN) & ((late & ~noised) | (~late & noised)))
    )
    found = simplified(mask)
    assert_equal(found, mask)
    assert found == (~noised & sympy.Gt(Select(late, ROW + 1, ROW), COLUMN, evaluate=False)) | (
        sympy.Eq(ROW, COLUMN) & ~late & noised
    )


def test_the_side_with_the_position_of_the_condition_is_moved() -> None:
    mask = ((K >= CLEAN) & (ROW >= COLUMN)) | ((K < CLEAN) & (ROW > COLUMN))
    found = simplified(mask)
    assert found == sympy.Gt(ROW, Select(K >= CLEAN, COLUMN - 1, COLUMN), evaluate=False)
    assert_equal(found, mask)
    below = ((Q >= CLEAN) & (COLUMN <= ROW)) | ((Q < CLEAN) & (COLUMN < ROW))
    assert_equal(simplified(below), below)
    assert simplified(below).has(Select)


@pytest.mark.parametrize(
    "mask",
    [
        (Q >= CLEAN) & (Q >= K) | (Q < CLEAN) & (Q > K),  # nothing to be computed once
        (Q >= K) & (ROW >= COLUMN) | (Q < K) & (ROW > COLUMN),  # the condition is that of a score
        (Q >= CLEAN) & (ROW >= COLUMN) | (K < CLEAN) & (ROW > COLUMN),  # other conditions
        (Q >= CLEAN) & (ROW >= COLUMN) | (Q < CLEAN) & (COLUMN > ROW),  # other comparisons
        (Q >= CLEAN) & (ROW >= COLUMN) & (K > 3) | (Q < CLEAN) & (ROW > COLUMN),
    ],
)
def test_other_alternatives_stay(mask: sympy.Basic) -> None:
    assert simplified(mask) == mask


def test_what_a_condition_implies_is_seen_from_its_form() -> None:
    x, y = sympy.symbols("x y", real=True)
    assert implies(sympy.Eq(x, y), x >= y)
    assert implies(sympy.Eq(x, y), y >= x)
    assert implies(x > y, sympy.Ne(x, y))
    assert implies(y < x, x >= y)
    assert implies((x > y) & (x > 0), (x >= y) | (x < 0))
    assert implies((x > y) | sympy.Eq(x, y), x >= y)
    assert not implies(x >= y, x > y)
    assert not implies(sympy.Ne(x, y), x > y)
    assert not implies(x > y, x > 0)


def random_mask(draw: random.Random, depth: int = 3) -> sympy.Basic:
    if depth == 0 or draw.random() < 0.2:
        a, b = draw.choice(
            [(Q, CLEAN), (K, CLEAN), (ROW, COLUMN), (ROW, COLUMN), (FloorMod(Q, BLOCK), 2)]
        )
        return draw.choice([sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne])(a, b)
    kind = draw.choice([sympy.And, sympy.Or])
    return kind(*(random_mask(draw, depth - 1) for _ in range(draw.choice([2, 2, 3]))))


@pytest.mark.parametrize("seed", range(25))
def test_a_random_mask_keeps_its_values(seed: int) -> None:
    mask = random_mask(random.Random(seed))
    assert_equal(simplified(mask), mask)
