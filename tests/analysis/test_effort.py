"""The analysis of a mask takes steps in proportion to the size of its expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy

import flashgen as fg
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.analysis.tile_bounds import Effort
from flashgen.spec.language.bit_functions import ShiftLeft, ShiftRight
from flashgen.spec.language.integer_limits import limits
from flashgen.spec.language.lets import nodes_of
from flashgen.spec.language.tracing import trace_mask

SLOPE, WIDTH = fg.Scalar("slope", "float32"), fg.Scalar("width", "int32")

Step = Callable[[Any, Any, Any, int], Any]

# The first value, and each from the one before; x is compared with a number at last.
FAMILIES: dict[str, tuple[Callable[[Any, Any], Any], Step]] = {
    "polynomial of floats": (
        lambda q, k: 0.5,
        lambda x, q, k, i: x * ((q - k) * 0.01) + (0.25 + i),
    ),
    "product of float sums": (lambda q, k: 1.0 * q, lambda x, q, k, i: x * (q * 0.1 + k * SLOPE)),
    "squares of remainders": (lambda q, k: q, lambda x, q, k, i: (x * x + q + k) % 65521),
    "product of integer sums": (
        lambda q, k: q + 1,
        lambda x, q, k, i: (x * (q + k * (i + 2) - WIDTH)) % 1021,
    ),
    "choices": (lambda q, k: q - k, lambda x, q, k, i: fg.where(x > i, x * 2 - k, q - x) % 99),
    "choices of floats": (lambda q, k: q * 0.1, lambda x, q, k, i: fg.where(x > i, x * x, k - x)),
    "choices in conditions": (
        lambda q, k: q - k,
        lambda x, q, k, i: fg.where(fg.where(x > i, x, k) < q, x + 1, x - q),
    ),
    "absolute values": (lambda q, k: q - k, lambda x, q, k, i: fg.abs(x - k - i)),
    "minima and maxima": (
        lambda q, k: q - k,
        lambda x, q, k, i: fg.minimum(fg.maximum(x + i, -q), k + i),
    ),
    "quotients of floats": (lambda q, k: q - k, lambda x, q, k, i: x / (1 + x * x)),
    "floor divisions": (lambda q, k: q, lambda x, q, k, i: (x // 3 + k) % (7 + i) + q // (i + 1)),
    "disjunctions": (
        lambda q, k: q % 3 == k % 3,
        lambda x, q, k, i: x & ((q < 5 * i) | (k < 7 * i)),
    ),
    "exclusive conditions": (lambda q, k: q < k, lambda x, q, k, i: x ^ ((q + i) * k % 7 < 3)),
}


def steps(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The steps of the analysis, and the nodes of the mask and of its conditions on tiles."""
    first, step = FAMILIES[name]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        x = first(q, k)
        for i in range(size):
            x = step(x, q, k, i)
        return x if x.is_condition else x < 50

    taken = 0
    spend = Effort.spend

    def counted(effort: Effort) -> bool:
        nonlocal taken
        taken += 1
        return spend(effort)

    expr = trace_mask(mask_mod).expr
    monkeypatch.setattr(Effort, "spend", counted)
    found = analyse_mask(expr)
    monkeypatch.setattr(Effort, "spend", spend)
    ends = [end for each in (found.reach, found.full) if each for end in (each.lo, each.hi) if end]
    made = sum(len(set(nodes_of(part))) for part in (found.may, found.must, *ends))
    nodes = len(set(nodes_of(expr)))
    assert made <= 12 * nodes + 200, "the conditions of tiles"
    return taken, nodes


@pytest.mark.parametrize("name", FAMILIES)
def test_the_steps_of_the_analysis_are_proportional_to_the_nodes_of_the_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (5, 16):
        taken, nodes = steps(name, size, monkeypatch)
        assert taken <= 30 * nodes


def test_bounds_of_shift_amounts_that_are_too_wide_do_not_matter() -> None:
    """An interval may be wider than the values: a shift whose result has 61 bits stays one."""
    x, n = sympy.Symbol("x", integer=True), sympy.Symbol("n", integer=True)
    for shift, expected in ((ShiftRight, (0, 100)), (ShiftLeft, (0, 100 << 54))):
        assert limits(shift(x, n), {x: (0, 100), n: (-5, 80)}) == expected
