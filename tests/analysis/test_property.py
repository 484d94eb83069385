"""Classifications and bounds of random masks, compared with brute force."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from flashgen.shared.errors import SpecError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.intervals import Interval, WalkedAxis
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H, K, Q
from flashgen.spec.language.tracing import trace_mask
from tests.support.expr_trees import (
    FLOAT_MASKS,
    MASKS,
    SCALARS,
    SIZES,
    VALUES,
    Undefined,
    direct,
    traced,
)
from tests.support.tile_class import classify

SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TILES = st.tuples(st.integers(-3, 20), st.integers(1, 5), st.integers(-3, 20), st.integers(1, 7))


def mask_of(tree: Any) -> Any:
    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return traced(tree, {**SCALARS, **SIZES, "b": b, "h": h, "q": q, "k": k})

    try:
        return trace_mask(mod)
    except SpecError as error:
        # Random products can be too large, and a division by 0 can be there to see.
        assume(not re.search("too large for kernels|by 0|finite real", error.what))
        raise


def environment(values: dict[str, Any]) -> dict[Any, Any]:
    leaves = {**SCALARS, **SIZES}
    env = {leaves[name].expr: value for name, value in values.items() if name in leaves}
    return {**env, B: values["b"], H: values["h"]}


def brute_force(tree: Any, values: dict[str, Any], rows: range, columns: range) -> list[list[bool]]:
    try:
        return [[direct(tree, {**values, "q": q, "k": k}) for k in columns] for q in rows]
    except Undefined:
        assume(False)
        raise


def end(expr: Any, env: dict[Any, Any], infinite: int) -> int:
    return infinite if expr is None else evaluate(expr, env)


def positions(interval: Interval, env: dict[Any, Any], among: range) -> set[int]:
    lo, hi = end(interval.lo, env, -(10**9)), end(interval.hi, env, 10**9)
    return {x for x in among if lo <= x < hi}


@SETTINGS
@given(tree=MASKS, values=VALUES, tile=TILES)
def test_classification_is_never_wrong(tree: Any, values: dict[str, Any], tile: Any) -> None:
    q, rows, k, columns = tile
    elements = brute_force(tree, values, range(q, q + rows), range(k, k + columns))
    flat = [bool(x) for row in elements for x in row]
    analysis = analyse_mask(mask_of(tree).expr)
    note(f"{analysis}")
    kind = classify(analysis, environment(values), (q, q + rows - 1), (k, k + columns - 1))
    if kind == "empty":
        assert not any(flat)
    if kind == "full":
        assert all(flat)


@settings(SETTINGS, max_examples=20)
@given(tree=FLOAT_MASKS, values=VALUES, tile=TILES)
def test_masks_of_floats_are_classified_with_room_for_rounding(
    tree: Any, values: dict[str, Any], tile: Any
) -> None:
    q, rows, k, columns = tile
    known = []  # the elements whose value is defined
    for row in range(q, q + rows):
        for column in range(k, k + columns):
            with contextlib.suppress(Undefined):
                known.append(bool(direct(tree, {**values, "q": row, "k": column})))
    try:
        analysis = analyse_mask(mask_of(tree).expr)
    except SpecError as error:  # constants that Python itself divides by zero while tracing
        if not isinstance(error.__cause__, ZeroDivisionError):
            raise
        assume(False)
    note(f"{analysis}")
    try:
        kind = classify(analysis, environment(values), (q, q + rows - 1), (k, k + columns - 1))
    except ZeroDivisionError:  # a corner's own remainder by 0, where nothing is defined
        assume(False)
    if kind == "empty":
        assert not any(known)
    if kind == "full":
        assert all(known)


@SETTINGS
@given(tree=MASKS, values=VALUES, tile=TILES, transposed=st.booleans())
def test_bounds_are_never_wrong_and_exact_where_they_say_so(
    tree: Any, values: dict[str, Any], tile: Any, transposed: bool
) -> None:
    first, size, _, _ = tile
    fixed, walked = range(first, first + size), range(-8, 32)
    rows, columns = (walked, fixed) if transposed else (fixed, walked)
    elements = brute_force(tree, values, rows, columns)
    lines = list(zip(*elements, strict=True)) if not transposed else elements
    reached = {x for x, line in zip(walked, lines, strict=True) if any(line)}
    kept = {x for x, line in zip(walked, lines, strict=True) if all(line)}

    walk = WalkedAxis(Q) if transposed else WalkedAxis(K)
    analysis = analyse_mask(mask_of(tree).expr, walk)
    note(f"{analysis}")
    corners = (K_LO, K_HI) if transposed else (Q_LO, Q_HI)
    env = {**environment(values), corners[0]: fixed[0], corners[1]: fixed[-1]}

    hull = positions(analysis.reach, env, walked)
    assert reached <= hull
    if analysis.reach_exact:
        assert reached == hull
    if analysis.full is not None:
        inside = positions(analysis.full, env, walked)
        assert inside <= kept
        if analysis.full_exact:
            assert inside == kept
    if analysis.row is not None:
        for i, x in enumerate(fixed):
            row = positions(analysis.row, {**env, walk.fixed: x}, walked)
            assert row == {y for y, line in zip(walked, lines, strict=True) if line[i]}
